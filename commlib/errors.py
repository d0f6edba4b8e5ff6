"""The exceptions that commlib raises.

CommlibError (RuntimeError)        a RuntimeError like DDP's errors, so existing handlers keep working
├── ConfigError (ValueError)      a wrong argument, model or use; raised identically on every rank
├── CodecError                    bytes or buffers that a codec cannot take
└── TransportError                a collective that did not complete
    ├── PeerTimeout               peers did not arrive within the timeout
    ├── PeerFailure               a peer died or left
    ├── Excluded                  this process is not in the newest view of the members (`commlib.elastic`)
    └── StoreLost                 the service that numbers views does not answer

`PeerTimeout` and `PeerFailure` have an attribute `ranks`: the global ranks (of the default group) that the message
names as the cause.

LossWarning (UserWarning)          not an error: the algorithm is known to converge worse with the optimizer
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable


class CommlibError(RuntimeError):
    """Base class of all exceptions that commlib raises."""


class ConfigError(CommlibError, ValueError):
    """A wrong argument, model or use. The message names the problem, the value, the expected value and the fix."""


class CodecError(CommlibError):
    """A payload or buffer that a codec cannot process. Nothing was written."""


class TransportError(CommlibError):
    """A collective did not complete; the model's communication has ended and cannot be resumed."""


class _PeerError(TransportError):
    """A collective that did not complete, with the ranks known to be the cause."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = frozenset(ranks)


class PeerTimeout(_PeerError):
    """Some ranks did not arrive within the timeout. The message names the collective and, if known, the ranks.

    Attributes:
        ranks: The global ranks that did not arrive; empty if unknown.
    """


class PeerFailure(_PeerError):
    """A rank died or left while other ranks waited for it. The message names the collective and, if known, the rank.

    Attributes:
        ranks: The global ranks that died or left; empty if unknown.
    """


class Excluded(TransportError):
    """This process is not in the newest view. Its state is void. After joining again it has that of the members."""


class StoreLost(TransportError):
    """The service that numbers views did not answer in time, and training cannot go on without a new view."""


def restated(error: BaseException, message: str) -> CommlibError:
    """Return a commlib error with another message, of the type and ranks of `error` if that is a `TransportError`."""
    if isinstance(error, _PeerError):
        return type(error)(message, error.ranks)
    return type(error)(message) if isinstance(error, TransportError) else CommlibError(message)


class EarlierTraceback(Exception):
    """The traceback text of an error that is stored without its frames; set as the cause of that error."""


def without_frames(error: BaseException) -> BaseException:
    """Prepare a caught error for storage: its traceback and those of its causes become text in its cause.

    [Note: kept errors] A traceback holds frames, and frames hold their local variables: a user's model, a loss and its
    autograd graph. An object that stores an error keeps all of them alive. If hooks of the graph refer back to that
    object, none of them is ever freed, because the garbage collector cannot traverse autograd graphs. commlib therefore
    stores errors without frames. It raises a copy, because raising an error attaches frames to it.
    """
    cause = _earlier(error)
    error.__traceback__ = error.__context__ = None
    error.__cause__ = cause
    return error


def kept(error: BaseException) -> CommlibError:
    """Return a copy of an error to store and raise later, while the original propagates. See `without_frames`.

    The type and the ranks of the copy are those that `restated` returns.
    """
    copy = restated(error, str(error) or type(error).__name__)
    copy.__cause__ = _earlier(error)
    return copy


def _earlier(error: BaseException) -> BaseException | None:
    """Return the tracebacks of an error as the cause of its stored copy; None if the error was not raised."""
    if error.__traceback__ is None and (error.__cause__ is None or isinstance(error.__cause__, EarlierTraceback)):
        return error.__cause__
    return EarlierTraceback("\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__)))


class LossWarning(UserWarning):
    """Warns that the algorithm is known to converge much worse (far more than a few percent) with the given optimizer.

    Without an optimizer, the worst measured result counts. `wrap` emits it on rank 0 through `warnings`: once per line,
    unless a filter ignores this class.
    """
