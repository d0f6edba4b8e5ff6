"""Communication requests, and the interface of the transports that execute them.

A primitive is a generator. It does local work, then yields one `Request`. The scheduler issues the request at its
position in the static order, and resumes the generator when the data has arrived. Creating a request sends nothing. The
same requests run on torch.distributed and, by their sizes alone, in a simulator.
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
    """Description of one collective. Subclasses define the verb and its tensors; a `Communicator` creates them.

    Attributes:
        size: The number of ranks that take part.
        group: The ranks that take part: "all" of the communicator, those of the same node ("local"), or those at the
            same position in every node ("across").
    """

    verb: ClassVar[str] = "request"
    size: int = field(kw_only=True)
    group: str = field(default="all", kw_only=True)

    def wire_bytes(self) -> float:
        """Return the bytes that one rank sends in a bandwidth-optimal implementation."""
        raise NotImplementedError

    def is_empty(self) -> bool:
        """Return whether there is no data to move. The result is the same on all ranks."""
        return False


#: The return type of `Algorithm.communicate` and of every primitive: yields requests, receives nothing.
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
    """Send chunk r of `input` [world_size * n] to rank r; `output` holds the chunk from each rank, in rank order."""

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
    """Send tensors to some ranks and receive tensors from some ranks: point-to-point, with neighbours in a graph.

    Messages between two ranks are matched in order: the first tensor sent to a rank fills the first tensor that this
    rank receives from the sender, across consecutive requests. A rank with nothing to send or receive still issues an
    empty request, so that all ranks issue the same number.

    Attributes:
        sends: (rank within the group, contiguous tensor); must not be modified until the request completes.
        receives: (rank within the group, contiguous tensor), with the size that the sending rank sends.
    """

    verb: ClassVar[str] = "exchange"
    sends: Sequence[tuple[int, torch.Tensor]]
    receives: Sequence[tuple[int, torch.Tensor]]

    @override
    def wire_bytes(self) -> float:
        return sum(tensor.nbytes for _, tensor in self.sends)

    @override
    def is_empty(self) -> bool:
        """Return whether this rank has no data to move; other ranks may have some."""
        return not any(tensor.numel() for _, tensor in (*self.sends, *self.receives))


class Work(Protocol):
    """A collective in progress."""

    def wait(self) -> None:
        """Wait for the data (on CUDA: make the current stream wait); raise the collective's error, if any."""
        ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the work has completed or failed, from any thread."""
        ...


class Communicator:
    """An algorithm's view of the group: the ranks and the verbs.

    Attributes:
        rank: This process's rank within the group.
        world_size: The number of ranks in the group.
        nodes: The ranks of this node and those across nodes, if the algorithm requests nodes (its channel's
            `hierarchical`) and there are several with several ranks each; None otherwise.
        num_active: The number of ranks that contribute data, the divisor of means. Below `world_size` only if ranks
            have joined early and `divide_by_initial_world_size=False` is set.
        contributes: Whether this rank has data in this round; a rank that has joined early sends zeros.
        step: Rounds so far, the same on all ranks and after a resume; seeds random numbers.
        optimizer_step: Optimizer steps so far, or rounds if unknown; schedules count it.
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
            ConfigError: A rank is not in the group, or is this rank.
        """
        for rank, _ in (*sends, *receives):
            if not 0 <= rank < self.world_size or rank == self.rank:
                raise ConfigError(
                    f"exchange: expected ranks in 0..{self.world_size - 1} other than this one, {self.rank}; got {rank}"
                )
        return Exchange(sends, receives, size=self.world_size, group=self._group)


class Nodes(NamedTuple):
    """One rank's view of a group of several nodes with several ranks each.

    Attributes:
        local: The ranks of this node.
        across: The ranks at this rank's position in every node.
    """

    local: Communicator
    across: Communicator


class Transport(ABC):
    """Executes requests. One instance is one communicator, used by one issuing thread."""

    rank: int
    world_size: int
    global_ranks: Sequence[int]  # the group's ranks in the default group, for error messages
    bytes_sent: float  # so far, by each verb's formula
    timeout_s: float  # how long a collective may wait for its peers
    stands_for_all: bool = False  # whether this process simulates all ranks, which then arrive at the same time
    in_order: bool = True  # whether all ranks issue its requests in the same order relative to other transports
    is_elastic: bool = False  # whether the ranks may change between rounds; see `commlib.elastic.transport`
    view_number: int | None = None  # the number of an elastic group's view that this rank has entered

    def enter(self, number: int | None) -> bool:
        """Follow the newest view of an elastic group before the round `number` (from 1) or, with None, as a new member.

        Returns:
            Whether the ranks have changed since the last call.
        """
        return False

    def note_complete(self, number: int) -> torch.Tensor:
        """Note that this rank has the result of a round, and so takes part in the agreement that all ranks have it.

        Returns:
            This rank's contribution to the agreement [any number], int64.
        """
        raise NotImplementedError("only elastic groups agree on rounds")

    def note_agreed(self, number: int, largest: torch.Tensor) -> None:
        """Note that all ranks have the result of a round, and the largest contributions to the agreement."""
        raise NotImplementedError("only elastic groups agree on rounds")

    def is_agreed(self, number: int, error: Exception) -> bool:
        """Return, after an error in a round, whether all ranks of the next view have its result. Else it is repeated.

        Raises:
            Exception: The given error, unless the group is elastic.
            StoreLost: No new view came in time.
            Excluded: This rank is not in the new view.
        """
        raise error

    @property
    def failure(self) -> Exception | None:
        """The error of a collective that the host does not wait for (on NCCL), or None.

        Later results of the device's streams are void. Waits some seconds for a diagnosis in progress.
        """
        return None

    def on_failure(self, callback: Callable[[Exception], None]) -> None:  # noqa: B027 (nothing fails unseen by default)
        """Call `callback` once with the `failure`: from another thread, or now if it has already occurred.

        Args:
            callback: A bound method, held weakly.
        """

    def split_by_node(self) -> Nodes | None:
        """Return the ranks of this node, and those at this rank's position in every node. Collective.

        Returns None if there is only one node, or one rank per node.

        Raises:
            ConfigError: The nodes have different numbers of ranks.
        """
        return None

    def local_address(self) -> str:
        """Return the address of this host for connections from other ranks; loopback if unknown."""
        return "127.0.0.1"

    @abstractmethod
    def issue(self, request: Request) -> Work:
        """Start `request`. Does not block."""

    def complete(self, request: Request, what: str) -> None:
        """Start `request` and wait for it.

        Raises:
            TransportError: The request failed; the message names `what` and the ranks to blame.
        """
        with self.explaining(what):
            self.issue(request).wait()

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Convert an error raised in the block with `diagnose`."""
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
            TransportError: A rank died, did not arrive, or sent a malformed value.
        """

    def gather_apart(self, value: Any, what: str) -> list[Any]:
        """Return every rank's `value`, in a group of two or more ranks, some of which may not arrive.

        If possible, the values do not travel as a collective: a rank that has moved on to another collective would
        match the two.

        Args:
            value: As for `gather_objects`.
            what: The name of this call in errors.

        Raises:
            TransportError: As for `gather_objects`.
        """
        return self.gather_objects(value)

    def part(self) -> None:
        """Wait until all ranks know of an error that all of them are about to raise. Collective.

        Otherwise the first rank that raises would close the communicator, and a slower rank, still in the collective
        that delivers the error, would blame the first rank instead.
        """
        with contextlib.suppress(CommlibError):  # a late rank finds the others closed, and already has the error
            self.gather_objects(None)

    @abstractmethod
    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
        """Turn a failed collective's exception into a `TransportError` that names `what` and the ranks to blame.

        An error of commlib is returned unchanged.

        Args:
            error: The original error.
            what: The name of the collective.
            suspects: Ranks that did not arrive, as far as the caller knows; named if nothing better is known.
        """

    def bystanders(self) -> set[int]:
        """Return the ranks that have reported a failure of another rank; they are not to blame for their own end."""
        return set()

    def blame(self) -> None:  # noqa: B027 (does nothing where no peer can fail)
        """Report to all peers that this rank is affected by a peer's failure, so that it is not blamed if it ends."""

    @abstractmethod
    def abort(self) -> None:
        """End all works in progress, so that neither this process nor its peers wait for them."""

    @abstractmethod
    def close(self) -> None:
        """End all works and release the communicator. Idempotent; works after the process group was destroyed."""


def is_own(error: Exception) -> bool:
    """Return whether an error is commlib's own, and so needs no diagnosis."""
    return isinstance(error, CommlibError) and not isinstance(error, EndedError)


class EndedError(CommlibError):
    """A collective cannot take place, because peers have ended or given up."""
