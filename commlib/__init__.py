"""commlib: communication relaxation for data-parallel training in PyTorch.

model = commlib.wrap(model, algorithm="allreduce")
"""

from commlib import algorithms, codecs, optim
from commlib.errors import CodecError, CommlibError, ConfigError, PeerFailure, PeerTimeout, TransportError
from commlib.parallel import WrappedModel
from commlib.wrap import load_state_dict, state_dict, stats, synchronize, unwrap, wrap

__version__ = "0.1.0"

__all__ = [
    "CodecError",
    "CommlibError",
    "ConfigError",
    "PeerFailure",
    "PeerTimeout",
    "TransportError",
    "WrappedModel",
    "__version__",
    "algorithms",
    "codecs",
    "load_state_dict",
    "optim",
    "state_dict",
    "stats",
    "synchronize",
    "unwrap",
    "wrap",
]
