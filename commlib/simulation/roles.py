"""Ranks that do different work: one algorithm object per role, all in the same rounds.

[Note: roles] An algorithm assigns a representative to each rank (`Algorithm.representatives`). There are few
representatives. Each communicates one round alone, on meta tensors. One of two representatives is dropped if they do
the same, or if the other has at least as much work at every place and sends the same bytes. If rounds vary, a single
round is not enough to drop the representatives of a whole node. The remaining ones, the roles, are simulated together.
Each has an algorithm object, a count of local work and of memory, and a clock. A collective waits for its last
participant.

A joint collective takes the time of the slowest role. Collectives across nodes differ: the ranks of a node share its
adapter, which is busy for the sum of their messages.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Weights
from commlib.algorithms.context import BucketView, Context
from commlib.errors import CommlibError
from commlib.network.model import Device, Network
from commlib.simulation.collectives import SHARDS, Cost, Islands, Links, TransportProfile
from commlib.simulation.meter import Meter
from commlib.transport.base import Communication, Communicator, Exchange, Request
from commlib.transport.simulated import SimulatedTransport


@dataclass(frozen=True)
class Roles:
    """The ranks with distinct roles.

    Attributes:
        ranks: One rank of each role, ascending.
        of_rank: [world_size] For each rank, the index in `ranks` of its representative.
    """

    ranks: tuple[int, ...]
    of_rank: np.ndarray

    @classmethod
    def one(cls, world_size: int) -> Roles:
        """Return a single role: rank 0 represents all ranks."""
        return cls((0,), np.zeros(world_size, dtype=np.intp))

    @property
    def shares(self) -> np.ndarray:
        """[num_roles] Fraction of all ranks that each role represents."""
        return np.bincount(self.of_rank, minlength=len(self.ranks)) / len(self.of_rank)


@dataclass(slots=True)
class Joint(Request):
    """A collective as issued by several ranks.

    Attributes:
        parts: The request of each rank, with peers relative to the rank, as rank 0 would issue it.
        shares: Fraction of all ranks that each of them represents.
    """

    parts: Sequence[Request]
    shares: Sequence[float]

    @property
    def verb(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (it is that of the parts)
        """Verb of the parts."""
        return self.parts[0].verb

    @override
    def wire_bytes(self) -> float:
        """Return the mean over the ranks."""
        return sum(share * part.wire_bytes() for share, part in zip(self.shares, self.parts, strict=True))

    @override
    def is_empty(self) -> bool:
        return all(part.is_empty() for part in self.parts)


class RoleLinks(Links):
    """Links that support joint collectives and know which clocks synchronise.

    Args:
        network: See `Links`.
        profile: See `Links`.
        device: See `Links`.
        roles: The ranks that issue requests.
        islands: See `Links`.
        each_rank: Whether each rank has a clock; otherwise each role has one.
    """

    def __init__(
        self,
        network: Network,
        profile: TransportProfile,
        device: Device,
        roles: Roles,
        islands: Islands | None = None,
        *,
        each_rank: bool,
    ) -> None:
        super().__init__(network, profile, device, islands)
        self._each_rank = each_rank
        ranks = np.array(roles.ranks)
        self._nodes_of_roles = ranks // network.gpus_per_node
        # Roles with the same number wait for each other in a collective of that group.
        places = {"all": np.zeros_like(ranks), "local": self._nodes_of_roles, "across": ranks % network.gpus_per_node}
        # The ranks of an island have the same role.
        places |= dict.fromkeys((SHARDS, f"{SHARDS} local", f"{SHARDS} across"), ranks)
        self._meetings = {
            group: [np.flatnonzero(of == number) for number in np.unique(of)] for group, of in places.items()
        }

    @override
    def cost(self, request: Request) -> Cost:
        """Return the cost of a request on idle links. For joint collectives see [Note: roles]."""
        if not isinstance(request, Joint):
            return super().cost(request)
        costs = [self._cost_of(part) for part in request.parts]
        slowest = max(costs, key=lambda cost: cost.seconds)
        adapter_s, seconds = slowest.adapter_s, slowest.seconds
        if request.group == "across":
            busy_s, shares = np.array([cost.adapter_s for cost in costs]), np.array(request.shares)
            of_nodes = [self._nodes_of_roles == node for node in np.unique(self._nodes_of_roles)]
            adapter_s = max(float(np.average(busy_s[own], weights=shares[own])) for own in of_nodes)
            seconds = adapter_s + max(cost.seconds - cost.adapter_s for cost in costs)
        bytes_out = sum(share * cost.adapter_bytes for share, cost in zip(request.shares, costs, strict=True))
        return dataclasses.replace(slowest, seconds=seconds, adapter_s=adapter_s, adapter_bytes=bytes_out)

    def _cost_of(self, part: Request) -> Cost:
        """Return the cost of one rank's part; for an exchange, the longer of its sends and its receives."""
        if part.is_empty():
            return Cost()
        cost = super().cost(part)
        if not isinstance(part, Exchange):
            return cost
        back = super().cost(dataclasses.replace(part, sends=part.receives, receives=part.sends))
        return cost if cost.seconds >= back.seconds else dataclasses.replace(back, adapter_bytes=cost.adapter_bytes)

    @override
    def _together(self, request: Request, at: np.ndarray) -> np.ndarray:
        if self._each_rank:
            slowest = (
                max(request.parts, key=lambda part: self.cost(part).seconds) if isinstance(request, Joint) else request
            )
            return super()._together(slowest, at)
        there = at.copy()
        for meeting in self._meetings[request.group]:
            there[meeting] = at[meeting].max()
        return there


class Chorus(Algorithm):
    """The algorithm objects of several ranks combined into one. In every round they issue joint collectives.

    Args:
        prototype: The algorithm; copied for each rank.
        network: The network of the ranks.
        roles: The ranks.
        meter: Counts the work of each rank separately.
    """

    def __init__(self, prototype: Algorithm, network: Network, roles: Roles, meter: Meter) -> None:
        self.channel, self.name = prototype.channel, prototype.name
        self._singers = [copy.deepcopy(prototype) for _ in roles.ranks]
        self._comms = [communicator_on(network, prototype, rank) for rank in roles.ranks]
        self._shares = roles.shares.tolist()
        self._meter = meter

    @override
    def setup(self, context: Context) -> None:
        for role, (singer, comm) in enumerate(zip(self._singers, self._comms, strict=True)):
            with self._meter.counting_for(role):
                singer.setup(dataclasses.replace(context, comm=comm))

    @override
    def begin(self, bucket: BucketView) -> None:
        for role, singer in enumerate(self._singers):
            with self._meter.counting_for(role):
                singer.begin(bucket)

    @override
    def divisor(self, comm: Communicator) -> float:
        return self._singers[0].divisor(comm)

    @override
    def predivisor(self, comm: Communicator) -> float:
        return self._singers[0].predivisor(comm)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        for own in self._comms:
            own.step, own.optimizer_step = comm.step, comm.optimizer_step
        parts = [singer.communicate(bucket, own) for singer, own in zip(self._singers, self._comms, strict=True)]
        while True:
            requests: list[Request] = []
            for role, part in enumerate(parts):
                with self._meter.counting_for(role):
                    requests += [seen_from_itself(request, self._comms[role]) for request in _next(part)]
            if not requests:
                return
            if len(requests) < len(parts) or len({(each.verb, each.group) for each in requests}) > 1:
                raise CommlibError(f"{self.name} issues different collectives on different ranks")
            yield Joint(requests, self._shares, size=requests[0].size, group=requests[0].group)


def _next(part: Communication) -> list[Request]:
    """Return the next request, or an empty list at the end."""
    request = next(part, None)
    return [] if request is None else [request]


def communicator_on(network: Network, algorithm: Algorithm, rank: int) -> Communicator:
    """Return a rank's view of the group, with the nodes if the algorithm uses them."""
    comm = Communicator(rank, network.world_size)
    if algorithm.channel.wants_nodes:
        comm.nodes = SimulatedTransport(rank, network.world_size, network.gpus_per_node).split_by_node()
    return comm


def seen_from_itself(request: Request, comm: Communicator) -> Request:
    """Return a request with its peers relative to the rank, as rank 0 would issue it."""
    if not isinstance(request, Exchange):
        return request
    own = comm
    if comm.nodes is not None and request.group != "all":
        own = comm.nodes.local if request.group == "local" else comm.nodes.across

    def shifted(messages):
        return [((peer - own.rank) % own.world_size, tensor) for peer, tensor in messages]

    return dataclasses.replace(request, sends=shifted(request.sends), receives=shifted(request.receives))


# --- ranks with roles of their own ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A rank's part in a round: amounts of time and memory, bytes sent, and collectives."""

    amounts: np.ndarray
    sent: tuple[float, ...]
    verbs: tuple[str, ...]

    def covers(self, other: _Part) -> bool:
        """Return whether this part has at least as much work everywhere as the other, and sends the same."""
        return (self.verbs, self.sent) == (other.verbs, other.sent) and bool((self.amounts >= other.amounts).all())


def find_roles(network: Network, links: Links, device: Device, prototype: Algorithm, context: Context) -> Roles:
    """Find the ranks with distinct roles; see [Note: roles].

    Args:
        network: The network of the ranks.
        links: The costs of collectives.
        device: The device of each rank.
        prototype: The algorithm; copied.
        context: Buckets and optimizer.
    """
    named = np.array(prototype.representatives(communicator_on(network, prototype, 0)))
    candidates, of_rank = np.unique(named, return_inverse=True)
    if len(candidates) == 1:
        return Roles((int(candidates[0]),), of_rank)
    parts = [_part_of(int(rank), network, links, device, prototype, context) for rank in candidates]
    channel = prototype.channel
    varies = isinstance(channel, Weights) and channel.varies

    def covers(one: int, other: int) -> bool:
        are_comparable = (
            not varies or candidates[one] // network.gpus_per_node == candidates[other] // network.gpus_per_node
        )
        return bool(are_comparable) and parts[one].covers(parts[other])

    numbers = range(len(parts))
    above = [[one for one in numbers if covers(one, other)] for other in numbers]
    kept = [other for other in numbers if all(covers(other, one) and other <= one for one in above[other])]
    place = np.array([next(kept.index(one) for one in above[other] if one in kept) for other in numbers], dtype=np.intp)
    return Roles(tuple(int(candidates[idx]) for idx in kept), place[of_rank])


def _part_of(
    rank: int, network: Network, links: Links, device: Device, prototype: Algorithm, context: Context
) -> _Part:
    """Run setup and one round over all buckets on a single rank, and record its part."""
    algorithm, comm, meter = copy.deepcopy(prototype), communicator_on(network, prototype, rank), Meter(device)
    seconds: list[float] = []
    requests: list[Request] = []
    with meter.active():
        algorithm.setup(dataclasses.replace(context, comm=comm))
        meter.take()
        for bucket in context.buckets:
            if isinstance(algorithm.channel, Weights):
                algorithm.begin(bucket)
            for request in algorithm.communicate(bucket, comm):
                seconds.append(meter.seconds()[0])
                requests.append(seen_from_itself(request, comm))
        seconds.append(meter.seconds()[0])
    costs = [Cost() if each.is_empty() or each.size == 1 else links.cost(each) for each in requests]
    return _Part(
        amounts=np.array([*np.diff(seconds), meter.allocated_bytes, *(each.seconds for each in costs)]),
        sent=tuple(each.wire_bytes() for each in requests),
        verbs=tuple(f"{each.verb} {each.group}" for each in requests),
    )
