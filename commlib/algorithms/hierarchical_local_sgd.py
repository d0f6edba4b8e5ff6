"""Hierarchical local SGD: frequent averages of the weights inside each node, infrequent ones across nodes."""

from __future__ import annotations

from typing_extensions import override

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Weights
from commlib.algorithms.context import BucketView
from commlib.errors import ConfigError
from commlib.primitives.centralized import centralized_full_precision
from commlib.transport.base import Communication, Communicator


class HierarchicalLocalSGD(Algorithm):
    """Averages weights inside each node every `period` steps, and over all ranks every `period * global_every` steps.

    With x_r the weights of rank r and n(r) its node of L ranks, in round k = 1, 2, ...:

        x_r = 1/L sum_{s in n(r)} x_s   where k is no multiple of global_every,   else   x_r = 1/N sum_s x_s

    Without two levels (one node, or one rank on each node), every average is over all ranks.

    Args:
        period: Optimizer steps between averages.
        global_every: Interval of global averages: 3 means two averages inside the node, then one over all ranks.

    Paper: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (ICLR 2020): hierarchical local SGD; `period` is
    its H, `global_every` its H^b.
    Deviations: the local optimizer is the user's, and its state stays local.
    """

    made_for = "sgd"
    portable = True
    keeps_mean = True

    def __init__(self, period: int = 4, global_every: int = 4) -> None:
        if global_every < 1:
            raise ConfigError(f"HierarchicalLocalSGD.global_every: expected at least 1, got {global_every}")
        self.global_every = global_every
        self.channel = Weights(period=period, hierarchical=True)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        is_global = (comm.step + 1) % self.global_every == 0
        peers = comm if is_global or comm.nodes is None else comm.nodes.local
        yield from centralized_full_precision(bucket.flat, peers)
        bucket.flat.div_(peers.num_active)
