"""The exceptions that commlib raises.

CommlibError (RuntimeError)        as DDP's errors are, so that code which catches those goes on working
├── ConfigError (ValueError)      a wrong argument, model or use; raised alike on every rank
├── CodecError                    bytes or buffers that a codec cannot take
└── TransportError                a collective that did not complete
    ├── PeerTimeout               peers did not arrive within the timeout
    └── PeerFailure               a peer died or left

The last two have `ranks`: the global ranks (of the default group) that the message accuses.

LossWarning (UserWarning)          no error: an algorithm is known to learn less with the optimizer
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable


class CommlibError(RuntimeError):
    """The base of every exception that commlib raises."""


class ConfigError(CommlibError, ValueError):
    """A wrong argument, model or use. The message says what, got, expected and the fix."""


class CodecError(CommlibError):
    """A payload or buffer that a codec cannot take. Nothing was written."""


class TransportError(CommlibError):
    """A collective did not complete; the model's communication has ended and cannot be resumed."""


class _PeerError(TransportError):
    """A collective that did not complete, and the ranks that are known to be why."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = frozenset(ranks)


class PeerTimeout(_PeerError):
    """Some ranks did not arrive within the timeout. The message names the collective and, where known, the ranks.

    Attributes:
        ranks: The global ranks that did not arrive; empty where they are not known.
    """


class PeerFailure(_PeerError):
    """A rank died or left while others waited for it. The message names the collective and, where known, the rank.

    Attributes:
        ranks: The global ranks that died or left; empty where they are not known.
    """


def restated(error: BaseException, message: str) -> CommlibError:
    """Return an error of commlib's with another message: of the same kind and ranks, if `error` was one itself."""
    if isinstance(error, _PeerError):
        return type(error)(message, error.ranks)
    return TransportError(message) if isinstance(error, TransportError) else CommlibError(message)


class EarlierTraceback(Exception):
    """What Python would print of an error that is kept without its frames, as the cause of that error."""


def without_frames(error: BaseException) -> BaseException:
    """Return an error that was caught, to keep it: with its traceback, and those of its causes, as text in its cause.

    [Note: kept errors] A traceback has frames, and these have all that was there where they were left: a user's model,
    a loss and its graph. Whoever keeps an error keeps them. If the graph's hooks lead back to whoever that is, none of
    them is ever freed: the collector does not see through torch's graphs. So communication keeps errors without frames,
    and what it raises of them is another object, as raising gives an error the frames that it passes.
    """
    cause = _earlier(error)
    error.__traceback__ = error.__context__ = None
    error.__cause__ = cause
    return error


def kept(error: BaseException) -> CommlibError:
    """Return an error of commlib's to keep, and to raise later, in the place of one that goes on: see `without_frames`.

    Its kind and ranks are those of `error`, as of `restated`.
    """
    copy = restated(error, str(error) or type(error).__name__)
    copy.__cause__ = _earlier(error)
    return copy


def _earlier(error: BaseException) -> BaseException | None:
    """Return the tracebacks of an error as the cause of what is kept of it; None if it was not raised."""
    if error.__traceback__ is None and (error.__cause__ is None or isinstance(error.__cause__, EarlierTraceback)):
        return error.__cause__
    return EarlierTraceback("\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__)))


class LossWarning(UserWarning):
    """`wrap` is given an algorithm that is known to lose far more than a few percent with the optimizer given to it.

    It is warned of on rank 0, as Python warns: once for a line, and not where a filter ignores this class.
    """
