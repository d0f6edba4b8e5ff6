"""A line: a communicator and the driver of its rounds, until an error ends it.

[Note: wholly] Buckets, parameters and algorithms change on all ranks at the same place of the program. Where a change
fails on one rank, it cannot go on with what it had, as the others have changed: the communication ends, here at once
and at the peers as this rank aborts its communicators.
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


class Line:
    """What carries rounds.

    Args:
        transport: The communicator, used by nothing else.
        driver: Runs the rounds.
        wants_nodes: Whether `comm.nodes` is to be there. Collective then.
        ends_with: Another line, whose error ends this one too.

    Attributes:
        comm: The group, as algorithms see it.
        error: What ended the line, if anything did; see [Note: kept errors] in `errors.py`.
        when_ended: Called with that error, each with a copy, once.
    """

    def __init__(
        self, transport: Transport, driver: Driver, *, wants_nodes: bool = False, ends_with: Line | None = None
    ) -> None:
        self.transport = transport
        self.driver = driver
        self.comm = Communicator(transport.rank, transport.world_size)
        self.error: CommlibError | None = None
        self.when_ended: list[Callable[[BaseException], object]] = []
        transport.on_failure(self.abandon)
        if ends_with is not None:
            own = weakref.ref(self)
            ends_with.when_ended.append(lambda error: (line := own()) and line.abandon(error))
        if wants_nodes:
            self.find_nodes()

    def find_nodes(self) -> None:
        """Let algorithms know the nodes. Collective, the first time."""
        if self.comm.nodes is None:
            self.comm.nodes = self.transport.split_by_node()

    @in_plain_mode
    def run(self, what: str, communication: Communication) -> None:
        """Run one communication on its own, now, and wait for it; `what` names it in errors."""
        self.check()
        with self.wholly():
            self.driver.run(self.transport, [Task(lambda: what, lambda: communication)])

    def check(self) -> None:
        """Raise what ended the line, if anything did.

        Raises:
            CommlibError: It names that error, which is its cause, and is a `TransportError` of the same kind and ranks
                if that was one: where only streams wait for collectives, nothing else tells the user of it.
        """
        if self.error is not None:
            raise restated(
                self.error,
                f"rank {self.comm.rank}: this model's communication ended with an earlier error and cannot go on: "
                f"{self.error}",
            ) from self.error

    def check_streams(self) -> None:
        """Raise what ended collectives that only streams wait for: what these have done since is void.

        Raises:
            CommlibError: As `check`.
        """
        if (failure := self.transport.failure) is not None:
            self.abandon(failure)
            self.check()

    def abandon(self, error: BaseException) -> None:
        """End the line for good. Peers that wait for this rank are told by its abort."""
        if self.error is not None:
            return
        self.keep(error)
        for tell in self.when_ended:
            tell(kept(error))
        self.transport.abort()

    def keep(self, error: BaseException) -> None:
        """Take note of what has ended the line, and is raised now."""
        self.error = kept(error)

    @contextlib.contextmanager
    def wholly(self) -> Iterator[None]:
        """End the line where a change fails; see [Note: wholly]."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    def close(self) -> None:
        """Give the communicator up. Harmless when called twice."""
        self.transport.close()
