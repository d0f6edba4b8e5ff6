"""A communicator for each view, made in the background, and the agreement of its members.

[Note: settling] A thread of its own *settles* each view as it arrives: it ends the communicator of the view before,
which ends the round under way, connects the members, and compares their progress. So a member that evaluates or saves
takes part at once. If a newer view arrives, the keys of the older one end, and its thread with them. The training
thread takes the newest settled view when it begins a round, or when a round has failed. From the arrival of a view on,
no round of an earlier view becomes complete on this member, so the progress that it has sent stays true.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from commlib import locks
from commlib.elastic.membership import SILENT_S, Membership, ViewOver
from commlib.elastic.progress import Agreement, Progress, agree
from commlib.elastic.ranks import ViewRanks
from commlib.elastic.views import View
from commlib.errors import CommlibError, PeerTimeout, StoreLost, TransportError
from commlib.transport.torch_dist import TorchTransport

_log = logging.getLogger("commlib")

#: Logged by a member that waits for its first view.
_NO_VIEW = (
    "elastic: waiting for a view, at most %g s. The service at %s %s. Without --fresh it waits for the members of an "
    "earlier run of the job; with min_members also for others"
)
#: How long a member waits for the service to find the cause of a break before it asks for another view, in seconds.
_UNNOTICED_S = 1.0
#: How long an aborted communicator stays open, so that its works can end or be abandoned, in seconds.
_LINGER_S = 1.0
#: How long `close` waits for each thread, in seconds.
_END_S = 10.0


@dataclass(frozen=True, eq=False)
class Settled:
    """A view whose members are connected.

    Attributes:
        view: The view.
        transport: Its communicator.
        agreement: What its members agree on.
    """

    view: View
    transport: TorchTransport
    agreement: Agreement

    @property
    def agreed(self) -> int:
        """The last round whose result all members have."""
        return self.agreement.agreed


class Sessions:
    """The communicators of one model, one for each view.

    Args:
        membership: This member.
        timeout_s: How long a collective, the set-up of a view and a new view may take, in seconds.
        is_outside: Whether this member has no view yet and does not ask for one, so that it may wait for any time.
    """

    def __init__(
        self, membership: Membership, timeout_s: float, is_outside: Callable[[], bool] = lambda: False
    ) -> None:
        self.timeout_s = timeout_s
        self._is_outside = is_outside
        self._membership = membership
        self._progress = Progress()
        self._changed = locks.condition("elastic sessions")
        self._newest: View | None = None  # received, not necessarily settled
        self._settled: Settled | None = None
        self._error: BaseException | None = None
        self._broken: int | None = None  # the number of a view that broke, until it is reported
        self._changing_since_s: float | None = None  # until the training thread has entered a view
        self._paused = 0  # the number of the last view for which a pause was logged
        self._old: list[TorchTransport] = []
        self._threads: set[threading.Thread] = set()
        self._is_over = threading.Event()

    # --- views, on their threads ------------------------------------------------------------------------------------

    def follow(self, view: View) -> None:
        """Begin to settle a view. Called on the thread of the membership."""
        with self._changed:
            if self._is_over.is_set() or (self._newest is not None and self._newest.number >= view.number):
                return
            self._newest, self._broken = view, None
            self._changing_since_s = self._changing_since_s or time.monotonic()
            self._progress.has_initial_state |= view.began == view.number
            before, self._settled = self._settled, None
            if before is not None:
                self._old.append(before.transport)
            self._changed.notify_all()
            thread = threading.Thread(
                target=self._settle, args=(view,), name=f"commlib view {view.number}", daemon=True
            )
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
            thread.start()

    def _settle(self, view: View) -> None:
        began_s = time.monotonic()
        with self._changed:
            old, self._old = self._old, []
        for transport in old:
            transport.abort()
        transport = None
        try:
            store = self._membership.store_of(view)
            ranks = ViewRanks(view, self._membership.me.id, store)
            limit, setup_limit = timedelta(seconds=self.timeout_s), timedelta(seconds=self.timeout_s / 2)
            transport = TorchTransport(ranks, torch.device("cpu"), limit, setup_timeout=setup_limit)
            self._publish(view, transport, began_s)
        except (ViewOver, dist.DistStoreError):
            _log.debug("elastic: view %d ended before it was settled", view.number)
        except TransportError as error:
            _log.info("elastic: view %d could not be connected: %s", view.number, error)
            self._broke(view, error)
        except BaseException as error:
            self._fail(error)
            self._membership.leave()
        finally:
            if old:
                self._is_over.wait(_LINGER_S)
            for each in old:
                each.close()
            if transport is not None and not self._is_settled(transport):
                transport.close()

    def _publish(self, view: View, transport: TorchTransport, began_s: float) -> None:
        with self._changed:
            if self._newest is not view:
                return
            own = self._progress.as_plain()
        members = [Progress.of_plain(each) for each in transport.gather_objects(own)]
        agreement = agree(members, view.ids, transport.rank)
        with self._changed:
            if self._newest is not view:
                return
            self._progress.follow(agreement)
            self._settled = Settled(view, transport, agreement)
            self._changed.notify_all()
        self._membership.settled(view.number)
        duration_s = time.monotonic() - began_s
        _log.debug("elastic: view %d is connected after %.3f s; %s", view.number, duration_s, agreement)

    def _is_settled(self, transport: TorchTransport) -> bool:
        with self._changed:
            found = [self._settled.transport] if self._settled is not None else []
            return any(each is transport for each in [*found, *self._old])

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # --- the training thread ----------------------------------------------------------------------------------------

    def newest(self, after: int = 0) -> Settled:
        """Return the newest view once it is settled, its number is larger than `after`, and it has enough members.

        Raises:
            Excluded: This member is not in the newest view.
            StoreLost: No such view came in time.
            CommlibError: The members cannot train together.
        """
        began_s, is_logged = time.monotonic(), False
        while True:
            with self._changed:
                self._check()
                found = self._settled
                is_paused = found is not None and len(found.view.members) < self._membership.min_members
                if found is not None and found.view.number > after and not is_paused:
                    return found
                if found is not None and is_paused:
                    self._log_pause(found.view)
                broken = self._broken
                self._changed.wait(_UNNOTICED_S / 4)
            if self._is_outside():
                began_s = time.monotonic()
            waited_s = time.monotonic() - began_s
            if self._newest is None and waited_s > SILENT_S and not is_logged:
                is_logged = True
                _log.warning(_NO_VIEW, self.timeout_s, self._membership.address, self._membership.connection)
            if broken is not None and waited_s > _UNNOTICED_S:
                self._report(broken, ())
            if waited_s > self.timeout_s and not is_paused:
                raise StoreLost(
                    f"no view after number {after} was settled within {self.timeout_s:g} s; the service at "
                    f"{self._membership.address} {self._membership.connection}"
                )

    def _log_pause(self, view: View) -> None:
        if self._paused != view.number:
            self._paused = view.number
            _log.info(
                "elastic: view %d of %d members: %s; training pauses below %d members",
                view.number,
                len(view.ids),
                self._membership.reason,
                self._membership.min_members,
            )

    def _check(self) -> None:
        self._membership.check()
        if self._error is not None:
            raise self._error

    def broke(self, settled: Settled, error: Exception) -> None:
        """End the communicator of a view in which a collective failed, at all members, and ask for another view."""
        _log.debug("elastic: view %d broke: %s", settled.view.number, error)
        settled.transport.abort()
        self._broke(settled.view, error)

    def _broke(self, view: View, error: Exception) -> None:
        """Report the members that did not answer; after other errors, wait until the service finds the cause.

        A member that ended its communicator may only have followed another one, so it is not reported.
        """
        with self._changed:
            if self._newest is not view:
                return
            self._broken = view.number
            self._changing_since_s = self._changing_since_s or time.monotonic()
        if isinstance(error, PeerTimeout) and error.ranks:
            self._report(view.number, tuple(sorted(error.ranks)))

    def _report(self, number: int, ids: tuple[int, ...]) -> None:
        with self._changed:
            if self._broken != number:
                return
            self._broken = None
        self._membership.suspect(ids, number)

    # --- progress, from the training thread -------------------------------------------------------------------------

    @property
    def num_agreed(self) -> int:
        """The last round of which this member knows that all members had the result."""
        with self._changed:
            return self._progress.agreed

    def begin(self, rounds: int, model: str) -> None:
        """Set the rounds of the loaded state, and the digest of the model. Before the first view is followed."""
        with self._changed:
            self._progress.agreed, self._progress.model = rounds, model

    def copied_from(self, source: int) -> None:
        """Set the id of the member from which this one has received state in the background. Before its first view."""
        with self._changed:
            self._progress.source = source

    def entered(self, settled: Settled, repeats: bool) -> None:
        """Note that this member has the state of the job, and takes part in the next round of a view.

        Args:
            settled: The view.
            repeats: Whether it repeats a round.
        """
        with self._changed:
            self._progress.enter(settled.agreement)
            since_s, self._changing_since_s = self._changing_since_s, None
        _log.info(
            "elastic: view %d of %d members: %s; %s round %d, after %.2f s",
            settled.view.number,
            len(settled.view.ids),
            self._membership.reason,
            "repeats" if repeats else "continues with",
            settled.agreed + 1,
            0.0 if since_s is None else time.monotonic() - since_s,
        )

    def complete(self, number: int, settled: Settled) -> None:
        """Note that this member has the result of a round that ran in a view.

        Raises:
            ViewOver: A newer view has arrived. The progress that its members were sent does not change.
        """
        with self._changed:
            if self._newest is not settled.view:
                raise ViewOver(f"view {settled.view.number} ended before round {number}")
            self._progress.complete = (number, settled.view.number)

    def agreed(self, number: int) -> None:
        """Note that all members of the view have the result of a round."""
        with self._changed:
            self._progress.agreed = number

    def close(self) -> None:
        """End the communicators, and the threads that settle views. Idempotent.

        A thread that runs code of torch when the interpreter exits would end the process with an abort.
        """
        with self._changed:
            self._is_over.set()
            self._newest, found, self._settled = None, self._settled, None
            old, self._old = self._old, []
            threads, self._threads = self._threads, set()
            self._error = self._error or CommlibError("the model was unwrapped")
            self._changed.notify_all()
        for each in [*old, *([found.transport] if found else [])]:
            each.close()
        for thread in threads - {threading.current_thread()}:
            thread.join(_END_S)
            if thread.is_alive():
                _log.warning("elastic: the thread %r did not end within %g s", thread.name, _END_S)
