"""The communicator of an elastic group: it follows the newest view between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from commlib.errors import CommlibError, ConfigError, PeerFailure, TransportError
from commlib.transport.base import EndedError, Nodes, Request, Transport, Work
from commlib.transport.torch_dist import TorchTransport

if TYPE_CHECKING:
    from commlib.elastic.sessions import Sessions, Settled


class ElasticTransport(Transport):
    """Runs requests on the communicator of the view that this rank has entered.

    The training thread alone changes the communicator, in `enter`. Other threads may abort it.

    Args:
        sessions: Makes the communicators of each view.

    Attributes:
        hand_over: Called by `enter` with each view, on the training thread, before the round. Collective over the
            view's members.
    """

    is_elastic = True

    def __init__(self, sessions: Sessions) -> None:
        self.hand_over: Callable[[Settled], None] = lambda settled: None
        self._sessions = sessions
        self._settled: Settled | None = None
        self._inner: TorchTransport | None = None
        self._sent_before = 0.0

    # --- the communicator of the view -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """This process's rank in the view that it has entered; 0 before the first one."""
        return 0 if self._inner is None else self._inner.rank

    @property
    def world_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of members of that view; 1 before the first one."""
        return 1 if self._inner is None else self._inner.world_size

    @property
    def global_ranks(self) -> Sequence[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The members' ids, in rank order."""
        return (0,) if self._inner is None else self._inner.global_ranks

    @property
    def timeout_s(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How long a collective may wait for its peers."""
        return self._sessions.timeout_s

    @property
    def bytes_sent(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes that this rank has sent so far, in all views."""
        return self._sent_before + (0.0 if self._inner is None else self._inner.bytes_sent)

    @override
    def issue(self, request: Request) -> Work:
        if self._inner is None:
            raise EndedError("this member has not entered a view")
        return self._inner.issue(request)

    @override
    def gather_objects(self, value: Any) -> list[Any]:
        return [value] if self._inner is None else self._inner.gather_objects(value)

    @override
    def split_by_node(self) -> Nodes | None:
        raise ConfigError("hierarchical=True is not supported in an elastic group")

    @override
    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
        """Return the error at once: the next view shows which members have gone.

        After a timeout, the diagnosis names the members that did not arrive, which the service is told.
        """
        inner = self._inner
        if inner is None or (isinstance(error, CommlibError) and not isinstance(error, EndedError)):
            return error
        if getattr(error, "after_s", 0.0) >= self.timeout_s:
            return inner.diagnose(error, what, suspects)
        inner.abort()
        return PeerFailure(f"{what} failed: {error}")

    @override
    def abort(self) -> None:
        if self._inner is not None:
            self._inner.abort()

    @override
    def close(self) -> None:
        self._sessions.close()

    # --- views ------------------------------------------------------------------------------------------------------

    @override
    def enter(self, number: int | None) -> bool:
        has_changed, after = False, 0
        while (settled := self._sessions.newest(after)) is not self._settled:
            self._sent_before = self.bytes_sent
            self._inner, self._settled = settled.transport, settled
            has_changed = True
            try:
                self.hand_over(settled)
            except TransportError as error:
                self._sessions.broke(settled, error)
                after = settled.view.number
                continue
            self._sessions.entered(settled)
            if number is not None and settled.agreed != number - 1:
                raise CommlibError(
                    f"this member is before round {number} and the others have agreed on round {settled.agreed}. This "
                    "is a bug in commlib"
                )
        return has_changed

    @override
    def note_complete(self, number: int) -> None:
        assert self._settled is not None
        self._sessions.complete(number, self._settled)

    @override
    def note_agreed(self, number: int) -> None:
        self._sessions.agreed(number)

    @override
    def is_agreed(self, number: int, error: Exception) -> bool:
        assert self._settled is not None
        self._sessions.broke(self._settled, error)
        return self._sessions.newest(after=self._settled.view.number).agreed >= number
