"""A session: a communicator, the driver of its rounds, and the error that ended it.

[Note: wholly] Buckets, parameters and algorithms change on all ranks at the same point of the program. If a change
fails on one rank, the rank cannot return to its old state, because the other ranks have changed. So the communication
ends: on this rank at once, and on its peers when this rank aborts its communicators.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

from commlib.engine.modes import in_plain_mode
from commlib.engine.rounds.driver import Driver
from commlib.engine.rounds.task import Task
from commlib.errors import CommlibError, kept, restated
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
        error: The error that ended the session, or None. See [Note: kept errors] in `errors.py`.
        when_ended: Functions called once with that error, each with a copy.
    """

    def __init__(
        self, transport: Transport, driver: Driver, *, wants_nodes: bool = False, ends_with: Session | None = None
    ) -> None:
        self.transport = transport
        self.driver = driver
        self.comm = Communicator(transport.rank, transport.world_size)
        self.error: CommlibError | None = None
        self.when_ended: list[Callable[[BaseException], object]] = []
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
