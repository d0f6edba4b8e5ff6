"""A session: a communicator, the driver of its rounds, and the error that ended it.

[Note: wholly] Buckets, parameters and algorithms change on all ranks at the same point of the program. If a change
fails on one rank, the rank cannot return to its old state, because the other ranks have changed. So the communication
ends: on this rank at once, and on its peers when this rank aborts its communicators.

[Note: agreement] In an elastic group a rank can die while others already have the result of a round. No rank uses a
result before an all-reduce shows that every rank has it. If any rank has left that all-reduce, all ranks have the
result; if some rank of the next view has none, no rank has left it, and the round is repeated from its inputs. So all
ranks, the lost ones included, make the same steps, and no result has to be handed out.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch

from commlib.engine.modes import in_plain_mode
from commlib.engine.rounds.driver import Driver
from commlib.engine.rounds.task import Task
from commlib.errors import CommlibError, ConfigError, TransportError, kept, restated
from commlib.transport.base import Communication, Communicator, Transport


class Session:
    """Carries rounds until an error ends it.

    Args:
        transport: The communicator, for the session's exclusive use.
        driver: Runs the rounds.
        wants_nodes: Whether to set `comm.nodes`. Collective if so.
        ends_with: Another session, whose error also ends this one.

    Attributes:
        comm: The group, as seen by algorithms.
        num_rounds: Number of rounds that were waited for with `complete`.
        num_repeated: How often a round was repeated in a newer view of an elastic group.
        error: The error that ended the session, or None. See [Note: kept errors] in `errors.py`.
        when_entered: Functions called when the ranks of an elastic group have changed.
        when_ended: Functions called once with that error, each with a copy.
    """

    def __init__(
        self, transport: Transport, driver: Driver, *, wants_nodes: bool = False, ends_with: Session | None = None
    ) -> None:
        self.transport = transport
        self.driver = driver
        self.comm = Communicator(transport.rank, transport.world_size)
        self.num_rounds = self.num_repeated = 0
        self.error: CommlibError | None = None
        self.when_ended: list[Callable[[BaseException], object]] = []
        self.when_entered: list[Callable[[], object]] = []
        transport.on_failure(self.abandon)
        if ends_with is not None:
            own = weakref.ref(self)
            ends_with.when_ended.append(lambda error: (session := own()) and session.abandon(error))
        if wants_nodes:
            self.find_nodes()

    def find_nodes(self) -> None:
        """Set `comm.nodes` for algorithms. Collective on the first call."""
        if self.comm.nodes is None:
            self.comm.nodes = self.transport.split_by_node()

    @property
    def is_elastic(self) -> bool:
        """Whether the ranks may change between rounds."""
        return self.transport.is_elastic

    def refuse_if_elastic(self, what: str) -> None:
        """Raise if the group is elastic, before something that all ranks must do at the same time.

        Raises:
            ConfigError: The group is elastic.
        """
        if self.is_elastic:
            raise ConfigError(f"{what} is not supported in an elastic group")

    def enter(self, is_new: bool = False) -> None:
        """Let the ranks of an elastic group's newest view take part in the next round.

        Args:
            is_new: Whether this rank is a new member, which does not know the number of the round yet.
        """
        if self.transport.enter(None if is_new else self.num_rounds + 1):
            comm, transport = self.comm, self.transport
            comm.rank, comm.world_size, comm.num_active = transport.rank, transport.world_size, transport.world_size
            for follow in self.when_entered:
                follow()

    def complete(self, wait: Callable[[], object], repeat: Callable[[], object]) -> None:
        """Wait for a round. In an elastic group, repeat it in each new view until all ranks have its result.

        Args:
            wait: Waits for the round.
            repeat: Starts it once more, from its inputs, with the ranks of the newest view.

        Raises:
            TransportError: The round failed, and the group is not elastic.
        """
        number = self.num_rounds + 1
        while True:
            try:
                wait()
                self._agree(number)
                break
            except TransportError as error:
                if self.transport.is_agreed(number, error):
                    break
            self.num_repeated += 1
            repeat()
        self.num_rounds = number

    def _agree(self, number: int) -> None:
        """Agree that all ranks have the result of a round. See [Note: agreement]."""
        if self.is_elastic:
            largest = self.transport.note_complete(number)
            agreement = lambda: self._agreement(largest)  # noqa: E731
            self.driver.run(self.transport, [Task(lambda: "the agreement on a round", agreement, True, True)])
            self.transport.note_agreed(number, largest)

    def _agreement(self, largest: torch.Tensor) -> Communication:
        yield self.comm.all_reduce(largest, "max")

    @in_plain_mode
    def attempt(self, what: str, communication: Communication) -> None:
        """Run one communication whose failure does not end the session of an elastic group."""
        self.driver.run(self.transport, [Task(lambda: what, lambda: communication)])

    @in_plain_mode
    def run(self, what: str, communication: Communication) -> None:
        """Run one communication now and wait for it. `what` names it in errors."""
        self.check()
        with self.wholly():
            self.driver.run(self.transport, [Task(lambda: what, lambda: communication)])

    def check(self) -> None:
        """Raise the error that ended the session, if any.

        Raises:
            CommlibError: Names that error, which is its cause. A `TransportError` of the same kind and ranks if the
                cause was one: if only streams wait for collectives, nothing else reports it to the user.
        """
        if self.error is not None:
            raise restated(
                self.error,
                f"rank {self.comm.rank}: this model's communication ended with an earlier error and cannot continue: "
                f"{self.error}",
            ) from self.error

    def check_streams(self) -> None:
        """Raise the error of a collective that only streams wait for. Results computed on them since are invalid.

        Raises:
            CommlibError: As in `check`.
        """
        if (failure := self.transport.failure) is not None:
            self.abandon(failure)
            self.check()

    def abandon(self, error: BaseException) -> None:
        """End the session permanently. Peers that wait for this rank are notified by its abort."""
        if self.error is not None:
            return
        self.keep(error)
        for tell in self.when_ended:
            tell(kept(error))
        self.transport.abort()

    def keep(self, error: BaseException) -> None:
        """Store an error that has ended the session and is being raised."""
        self.error = kept(error)

    @contextlib.contextmanager
    def wholly(self) -> Iterator[None]:
        """End the session if a change inside the block fails. See [Note: wholly]."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    def close(self) -> None:
        """Release the communicator. Idempotent."""
        self.transport.close()
