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


class LossWarning(UserWarning):
    """`wrap` is given an algorithm that is known to lose far more than a few percent with the optimizer given to it.

    It is warned of on rank 0, as Python warns: once for a line, and not where a filter ignores this class.
    """
