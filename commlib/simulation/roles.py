"""Ranks that do different work: an object of the algorithm for each role, all in the same rounds.

[Note: roles] An algorithm names, for each rank, one that stands for it (`Algorithm.representatives`): few in all. Each
of them communicates one round by itself, on meta tensors; of two that differ in nothing, or of which one has the more
to do at every place and sends the same bytes, one is left. Where rounds vary, what one round shows is no reason to
leave a node out. The others, the roles, are simulated side by side: each has an algorithm object, a count of local work
and of memory, and a clock; a collective waits for the last of those that take part.

What a joint collective takes is what it takes the slowest role. Only collectives across nodes differ: there the ranks
of a node share its adapter, which is busy for the sum of what they send.
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
from commlib.simulation.collectives import Cost, Links, TransportProfile
from commlib.simulation.meter import Meter
from commlib.transport.base import Communication, Communicator, Exchange, Request
from commlib.transport.simulated import SimulatedTransport


@dataclass(frozen=True)
class Roles:
    """Ranks of which each has a role of its own.

    Attributes:
        ranks: One rank of each role, ascending.
        of_rank: [world_size] For each rank, the place in `ranks` of the one that stands for it.
    """

    ranks: tuple[int, ...]
    of_rank: np.ndarray

    @classmethod
    def one(cls, world_size: int) -> Roles:
        """Return that of rank 0, which stands for all."""
        return cls((0,), np.zeros(world_size, dtype=np.intp))

    @property
    def shares(self) -> np.ndarray:
        """[num_roles] The part of all ranks that each stands for."""
        return np.bincount(self.of_rank, minlength=len(self.ranks)) / len(self.of_rank)


@dataclass(slots=True)
class Joint(Request):
    """The same collective as several ranks ask for it.

    Attributes:
        parts: What each of them asks for, with peers counted from itself: as rank 0 would.
        shares: The part of all ranks that each stands for.
    """

    parts: Sequence[Request]
    shares: Sequence[float]

    @property
    def verb(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (it is that of the parts)
        """Their verb."""
        return self.parts[0].verb

    @override
    def wire_bytes(self) -> float:
        """Return the mean over the ranks."""
        return sum(share * part.wire_bytes() for share, part in zip(self.shares, self.parts, strict=True))

    @override
    def is_empty(self) -> bool:
        return all(part.is_empty() for part in self.parts)


class RoleLinks(Links):
    """Links that know joint collectives, and which clocks belong together.

    Args:
        network: As of `Links`.
        profile: The same.
        device: The same.
        roles: The ranks that requests come from.
        each_rank: Whether each rank has a clock; else each role.
    """

    def __init__(
        self, network: Network, profile: TransportProfile, device: Device, roles: Roles, *, each_rank: bool
    ) -> None:
        super().__init__(network, profile, device)
        self._each_rank = each_rank
        ranks = np.array(roles.ranks)
        self._nodes_of_roles = ranks // network.gpus_per_node
        # Roles with the same number wait for one another in a collective of that group.
        places = {"all": np.zeros_like(ranks), "local": self._nodes_of_roles, "across": ranks % network.gpus_per_node}
        self._meetings = {
            group: [np.flatnonzero(of == number) for number in np.unique(of)] for group, of in places.items()
        }

    @override
    def cost(self, request: Request) -> Cost:
        """Return what a request costs, whoever else uses the links; of joint ones see [Note: roles]."""
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
        """Return what one rank's part costs: of an exchange the longer of what it sends and what it receives."""
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
    """The objects of several ranks as one: in every round each does its part, and they ask for joint collectives.

    Args:
        prototype: The algorithm; copied for each.
        network: What connects the ranks.
        roles: The ranks.
        meter: Counts the work of each apart.
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
                raise CommlibError(f"{self.name} asks for different collectives on different ranks")
            yield Joint(requests, self._shares, size=requests[0].size, group=requests[0].group)


def _next(part: Communication) -> list[Request]:
    """Return the next request, or nothing at the end."""
    request = next(part, None)
    return [] if request is None else [request]


def communicator_on(network: Network, algorithm: Algorithm, rank: int) -> Communicator:
    """Return a rank's view of the group, as the algorithm has it."""
    comm = Communicator(rank, network.world_size)
    if algorithm.channel.wants_nodes:
        comm.nodes = SimulatedTransport(rank, network.world_size, network.gpus_per_node).split_by_node()
    return comm


def seen_from_itself(request: Request, comm: Communicator) -> Request:
    """Return a request with its peers as rank 0 would have them: so many places on."""
    if not isinstance(request, Exchange):
        return request
    own = comm
    if comm.nodes is not None and request.group != "all":
        own = comm.nodes.local if request.group == "local" else comm.nodes.across

    def shifted(messages):
        return [((peer - own.rank) % own.world_size, tensor) for peer, tensor in messages]

    return dataclasses.replace(request, sends=shifted(request.sends), receives=shifted(request.receives))


# --- which ranks have a role of their own -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """What a rank does in a round: what takes time or memory, what it sends, and in which collectives."""

    amounts: np.ndarray
    sent: tuple[float, ...]
    verbs: tuple[str, ...]

    def covers(self, other: _Part) -> bool:
        """Return whether this one has at least as much to do everywhere, and sends the same."""
        return (self.verbs, self.sent) == (other.verbs, other.sent) and bool((self.amounts >= other.amounts).all())


def find_roles(network: Network, links: Links, device: Device, prototype: Algorithm, context: Context) -> Roles:
    """Find the ranks that have roles of their own; see [Note: roles].

    Args:
        network: What connects the ranks.
        links: What collectives cost.
        device: What a rank computes with.
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
    """Let a rank set up and communicate all buckets once, by itself, and note what that takes."""
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
