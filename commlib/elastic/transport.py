"""The communicator of an elastic group: it follows the newest view between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from commlib.errors import CommlibError, ConfigError, PeerFailure, TransportError
from commlib.transport.base import EndedError, Nodes, Request, Transport, Work
from commlib.transport.torch_dist import TorchTransport

if TYPE_CHECKING:
    from commlib.elastic.positions import Positions
    from commlib.elastic.sessions import Sessions, Settled


class ElasticTransport(Transport):
    """Runs requests on the communicator of the view that this rank has entered.

    The training thread alone changes the communicator, in `enter`. Other threads may abort it.

    Args:
        sessions: Makes the communicators of each view.
        positions: The positions of samplers, on which the members agree with each round.

    Attributes:
        hand_over: Called by `enter` with each view, on the training thread, before the round. Collective over the
            view's members.
    """

    is_elastic = True

    def __init__(self, sessions: Sessions, positions: Sequence[Positions]) -> None:
        self.hand_over: Callable[[Settled], None] = lambda settled: None
        self._sessions, self._positions = sessions, positions
        self._settled: Settled | None = None
        self._inner: TorchTransport | None = None
        self._sent_before = 0.0
        self._repeats = False  # a round

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
    def view_number(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of the view; None before the first one."""
        return None if self._settled is None else self._settled.view.number

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
            self._sessions.entered(settled, self._repeats)
            if number is not None and settled.agreed != number - 1:
                raise CommlibError(
                    f"this member is before round {number} and the others have agreed on round {settled.agreed}. This "
                    "is a bug in commlib"
                )
        return has_changed

    @override
    def note_complete(self, number: int) -> torch.Tensor:
        assert self._settled is not None
        self._sessions.complete(number, self._settled)
        return torch.tensor([number, *(each.end for each in self._positions)])

    @override
    def note_agreed(self, number: int, largest: torch.Tensor) -> None:
        self._sessions.agreed(number)
        self._repeats = False
        for each, base in zip(self._positions, largest[1:].tolist(), strict=True):
            each.agree(base, self.rank, self.world_size)

    @override
    def is_agreed(self, number: int, error: Exception) -> bool:
        assert self._settled is not None
        self._sessions.broke(self._settled, error)
        self._repeats = self._sessions.newest(after=self._settled.view.number).agreed < number
        self._settled.transport.wait_for_ends()  # before its works' tensors are written for the repetition
        return not self._repeats
