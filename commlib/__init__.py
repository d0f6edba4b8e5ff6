"""commlib: communication relaxation for data-parallel training in PyTorch.

model = commlib.wrap(model, algorithm="allreduce")
"""

from commlib import algorithms, checkpoint, codecs, elastic, optim
from commlib.checkpoint import Checkpoint
from commlib.errors import CodecError, CommlibError, ConfigError, LossWarning, PeerFailure, PeerTimeout, TransportError
from commlib.parallel import WrappedModel
from commlib.shard import shard
from commlib.version import __version__
from commlib.wrap import (
    expect_backward,
    load_state_dict,
    set_optimizer,
    state_dict,
    stats,
    synchronize,
    unwrap,
    wrap,
)

__all__ = [
    "Checkpoint",
    "CodecError",
    "CommlibError",
    "ConfigError",
    "LossWarning",
    "PeerFailure",
    "PeerTimeout",
    "TransportError",
    "WrappedModel",
    "__version__",
    "algorithms",
    "checkpoint",
    "codecs",
    "elastic",
    "expect_backward",
    "load_state_dict",
    "optim",
    "set_optimizer",
    "shard",
    "state_dict",
    "stats",
    "synchronize",
    "unwrap",
    "wrap",
]
