"""Checkpoints from which training resumes bit for bit.

A checkpoint has the model, the optimizer and, for every rank, the communication state and, if replicas may differ, the
rank's own weights and optimizer state. `Checkpoint` saves everything with torch.distributed.checkpoint;
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
