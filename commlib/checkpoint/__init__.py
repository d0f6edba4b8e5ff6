"""What a training run saves and goes on from, bit for bit.

A model, an optimizer, and on every rank what the two do not say: the communication's state, and where replicas may
differ the rank's own weights and optimizer state. `Checkpoint` saves all by torch.distributed.checkpoint;
`write_rank_file` and `read_rank_file` add one file per rank to the checkpoints of other tools.
"""

from commlib.checkpoint.consensus import consensus_state_dict, replicas_differ
from commlib.checkpoint.rank_state import load_rank_state, rank_state, read_rank_file, write_rank_file
from commlib.checkpoint.stateful import Checkpoint

__all__ = [
    "Checkpoint",
    "consensus_state_dict",
    "load_rank_state",
    "rank_state",
    "read_rank_file",
    "replicas_differ",
    "write_rank_file",
]
