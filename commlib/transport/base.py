"""The verbs: what a primitive can ask of the network.

A primitive is a generator. It does local work, then yields one `Request`; the scheduler issues the request when its
turn in the static order comes, and resumes the generator when the data has arrived. A request only describes: nothing
is sent by making one. The same requests run on torch.distributed and, by their sizes alone, in a simulator.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from typing_extensions import override

from commlib.errors import CommlibError, ConfigError


@dataclass(slots=True)
class Request:
    """One collective, described. Subclasses name the verb and its tensors; a `Communicator` makes them.

    Attributes:
        size: The number of ranks that take part.
        group: Which ranks: "all" of the communicator, those of the same node ("local"), or those with the same place in
            every node ("across").
    """

    verb: ClassVar[str] = "request"
    size: int = field(kw_only=True)
    group: str = field(default="all", kw_only=True)

    def wire_bytes(self) -> float:
        """Return the bytes that one rank sends in a bandwidth-optimal implementation."""
        raise NotImplementedError

    def is_empty(self) -> bool:
        """Return whether there is nothing to move, which all ranks see alike."""
        return False


#: What `Algorithm.communicate` and every primitive return: requests out, nothing in.
Communication = Generator[Request, None, None]


@dataclass(slots=True)
class AllReduce(Request):
    """Reduce `tensor` over all ranks in place; `op` is "sum" or "max"."""

    verb: ClassVar[str] = "all_reduce"
    tensor: torch.Tensor
    op: str = "sum"

    @override
    def wire_bytes(self) -> float:
        return 2 * (self.size - 1) / self.size * self.tensor.nbytes

    @override
    def is_empty(self) -> bool:
        return self.tensor.numel() == 0


@dataclass(slots=True)
class AllGather(Request):
    """Gather every rank's `input` [n] into `output` [world_size * n], in rank order."""

    verb: ClassVar[str] = "all_gather"
    output: torch.Tensor
    input: torch.Tensor

    @override
    def wire_bytes(self) -> float:
        return (self.size - 1) * self.input.nbytes

    @override
    def is_empty(self) -> bool:
        return self.input.numel() == 0


@dataclass(slots=True)
class AllToAll(Request):
    """Send chunk r of `input` [world_size * n] to rank r; `output` holds what each rank sent here, in rank order."""

    verb: ClassVar[str] = "all_to_all"
    output: torch.Tensor
    input: torch.Tensor

    @override
    def wire_bytes(self) -> float:
        return (self.size - 1) / self.size * self.input.nbytes

    @override
    def is_empty(self) -> bool:
        return self.input.numel() == 0


@dataclass(slots=True)
class Broadcast(Request):
    """Copy `tensor` of rank `source` (a rank within the group) to every rank, in place."""

    verb: ClassVar[str] = "broadcast"
    tensor: torch.Tensor
    source: int = 0

    @override
    def wire_bytes(self) -> float:
        return (self.size - 1) / self.size * self.tensor.nbytes

    @override
    def is_empty(self) -> bool:
        return self.tensor.numel() == 0


@dataclass(slots=True)
class Exchange(Request):
    """Send tensors to some ranks, and fill tensors from some ranks: point to point, with neighbours in a graph.

    What two ranks send one another is matched in order: the first tensor sent to a rank fills the first that this rank
    receives from here, in this request and the next ones. A rank with nothing to send or receive makes the request all
    the same, empty, so that all ranks make as many.

    Attributes:
        sends: (rank within the group, contiguous tensor), left alone until the request completes.
        receives: (rank within the group, contiguous tensor) of the size that this rank sends.
    """

    verb: ClassVar[str] = "exchange"
    sends: Sequence[tuple[int, torch.Tensor]]
    receives: Sequence[tuple[int, torch.Tensor]]

    @override
    def wire_bytes(self) -> float:
        return sum(tensor.nbytes for _, tensor in self.sends)

    @override
    def is_empty(self) -> bool:
        """Return whether this rank has nothing to move; others may have."""
        return not any(tensor.numel() for _, tensor in (*self.sends, *self.receives))


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Wait for the data (on CUDA: make the current stream wait); raise what went wrong."""
        ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the work has completed or failed, from any thread."""
        ...


class Communicator:
    """The group as an algorithm sees it: who is there, and the verbs.

    Attributes:
        rank: This process's rank within the group.
        world_size: The number of ranks in the group.
        nodes: The ranks of this node and those across nodes, where the algorithm asked for nodes (its channel's
            `hierarchical`) and there are several with several ranks each; None otherwise.
        num_active: The number of ranks that contribute data; below `world_size` only where ranks have joined early and
            `divide_by_initial_world_size=False` was asked for. Means divide by it.
        contributes: Whether this rank has data in this round; one that has joined early sends zeros.
        step: Rounds so far, the same on all ranks and after a resume; what random numbers are drawn for.
        optimizer_step: Steps of the optimizer so far, or rounds where it is not known: what schedules count.
    """

    def __init__(self, rank: int, world_size: int, group: str = "all") -> None:
        self.rank = rank
        self.world_size = world_size
        self.nodes: Nodes | None = None
        self.num_active = world_size
        self.contributes = True
        self.step = self.optimizer_step = 0
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> AllReduce:
        """Describe an in-place all-reduce of a contiguous `tensor` of any shape; `op` is "sum" or "max"."""
        return AllReduce(tensor, op, size=self.world_size, group=self._group)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> AllGather:
        """Describe an all-gather of `input` [n] into `output` [world_size * n]."""
        return AllGather(output, input, size=self.world_size, group=self._group)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> AllToAll:
        """Describe an all-to-all of equal chunks; `input` and `output` are [world_size * n] and do not overlap."""
        return AllToAll(output, input, size=self.world_size, group=self._group)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Broadcast:
        """Describe an in-place broadcast of `tensor` from group rank `source`."""
        return Broadcast(tensor, source, size=self.world_size, group=self._group)

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> Exchange:
        """Describe sends to and receives from ranks of the group, as (rank, tensor); either may be empty.

        Raises:
            ConfigError: A rank is not in the group, or is this one.
        """
        for rank, _ in (*sends, *receives):
            if not 0 <= rank < self.world_size or rank == self.rank:
                raise ConfigError(
                    f"exchange: expected other ranks of 0..{self.world_size - 1} than this one, {self.rank}; got {rank}"
                )
        return Exchange(sends, receives, size=self.world_size, group=self._group)


class Nodes(NamedTuple):
    """A group of several nodes with several ranks each, as one rank sees it.

    Attributes:
        local: The ranks of this node.
        across: The ranks with this one's place in every node.
    """

    local: Communicator
    across: Communicator


class Transport(ABC):
    """Executes requests. One instance is one communicator, used by one issuing thread."""

    rank: int
    world_size: int
    global_ranks: Sequence[int]  # of the group's ranks in the default group, for errors
    bytes_sent: float  # so far, by each verb's formula
    timeout_s: float  # how long a collective may wait for its peers
    stands_for_all: bool = False  # whether this process simulates all ranks, which then come to everything together
    in_order: bool = True  # whether all ranks issue its requests at the same place among those of other transports

    @property
    def failure(self) -> Exception | None:
        """What broke a collective that the host does not wait for (on NCCL); None while nothing has.

        What the device's streams did since is void. Where a failure is being diagnosed this waits for it, some seconds.
        """
        return None

    def on_failure(self, callback: Callable[[Exception], None]) -> None:  # noqa: B027 (nothing fails unseen by default)
        """Have `callback` called, once, with the `failure`: from another thread, or now if there is one already.

        Args:
            callback: A bound method, held weakly.
        """

    def split_by_node(self) -> Nodes | None:
        """Return the ranks of this node, and those with this one's place in every node. Collective.

        None where there is one node only, or one rank in each.

        Raises:
            ConfigError: The nodes have different numbers of ranks.
        """
        return None

    def local_address(self) -> str:
        """Return the address of this host at which the other ranks reach it; loopback where that is not known."""
        return "127.0.0.1"

    @abstractmethod
    def issue(self, request: Request) -> Work:
        """Start `request` and return at once."""

    def complete(self, request: Request, what: str) -> None:
        """Start `request` and wait for its end.

        Raises:
            TransportError: It failed; the message names `what` and the ranks to blame.
        """
        with self.explaining(what):
            self.issue(request).wait()

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Turn an error of the block into what `diagnose` makes of it."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            failure = self.diagnose(error, what)
            if failure is error:
                raise
            raise failure from error

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order. Blocks; used at set-up only.

        Args:
            value: Plain data: None, bool, int, float, str, bytes, and lists, tuples and dicts of them.

        Raises:
            ConfigError: The value is not plain.
            TransportError: A rank died, did not come, or sent what is no plain value.
        """

    def gather_apart(self, value: Any, what: str) -> list[Any]:
        """Return every rank's `value`, of two ranks or more, some of which may not come.

        It goes apart from the collectives, if that is possible: else a rank that goes on with a collective of its own
        would take this for that.

        Args:
            value: As for `gather_objects`.
            what: Names this in errors.

        Raises:
            TransportError: As `gather_objects`.
        """
        return self.gather_objects(value)

    def part(self) -> None:
        """Wait until all ranks know of an error that all of them raise now. Collective.

        The first to raise it ends the communicator, and with it the collective by which a slower rank is about to hear
        of it, which would then name the first in the place of the error.
        """
        with contextlib.suppress(CommlibError):  # who comes late finds the others gone, and knows all
            self.gather_objects(None)

    @abstractmethod
    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
        """Turn a failed collective's exception into a `TransportError` that names `what` and the ranks to blame.

        An error of commlib's own is returned as it is.

        Args:
            error: What went wrong.
            what: The collective.
            suspects: Ranks that did not come, as far as the caller knows; named where nothing better is known.
        """

    def bystanders(self) -> set[int]:
        """Return the ranks that have said that they met another one's failure: their own end is no news."""
        return set()

    def blame(self) -> None:  # noqa: B027 (where no peer can fail there is nothing to say)
        """Tell the others that this rank has met a peer's failure, so that they do not blame it if it ends."""

    @abstractmethod
    def abort(self) -> None:
        """End all work under way, so that neither this process nor its peers wait for it."""

    @abstractmethod
    def close(self) -> None:
        """End all work and release the communicator. Harmless when done twice, or when the process group is gone."""


def is_own(error: Exception) -> bool:
    """Return whether an error says all that there is to say already: it is commlib's."""
    return isinstance(error, CommlibError) and not isinstance(error, EndedError)


class EndedError(CommlibError):
    """A collective was asked for that cannot take place, as peers have ended or have given up."""
