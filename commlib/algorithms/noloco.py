"""NoLoCo: many local steps, then an outer step with the weights of one other rank, drawn at random."""

from __future__ import annotations

from typing_extensions import override

from commlib.algorithms.context import BucketView
from commlib.algorithms.neighbours import NeighbourAveraging
from commlib.algorithms.outer import OuterStep
from commlib.primitives.mixers import FullPrecisionMixer
from commlib.primitives.topology import RandomMatching
from commlib.transport.base import Communication, Communicator


class NoLoCo(NeighbourAveraging):
    """Every `period` local steps the ranks are paired at random, and each makes an outer step with the pair's weights.

    With f_i the slow weights of rank i, x_i those that it came to from them, j its partner, m_i its outer momentum a:

        m_i <- a m_i + outer_lr ((x_i + x_j) / 2 - f_i),   f_i <- f_i + m_i,   x_i = f_i

    The bracket is the mean of the ways that the two went, plus what pulls f_i to the mean of their slow weights. Nobody
    waits for more than one rank, whatever their number; a rank sends 4n bytes. Of an odd number of ranks one rests and
    steps along its own way. Replicas differ; `commlib.synchronize` gives their mean.

    Args:
        period: Inner steps from one outer step to the next.
        outer_lr: The outer learning rate.
        outer_momentum: The outer momentum a.
        seed: Of the pairs; the same on all ranks.
        overlap: Whether a round runs while the next step's forward and backward do; its effect is added at that step's
            end.

    Paper: Kolehmainen, Blagoev, Donaghy, Ersoy, Nies, "NoLoCo: No-all-reduce Low Communication Training Method for
    Large Models" (2025), the modified Nesterov momentum with groups of two.
    Deviations: the weight of the pull is the outer learning rate, as in the authors' code, so that only x travels.
    Pairs are drawn from a shared seed. Activations are not routed between replicas: there is no pipeline here.
    `overlap` is not in the paper.
    """

    made_for = "adam"

    def __init__(
        self,
        period: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        seed: int = 0,
        overlap: bool = False,
    ) -> None:
        super().__init__(RandomMatching(seed), FullPrecisionMixer(), period=period, overlap=overlap, hierarchical=False)
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.outer_step = OuterStep("NoLoCo", lr=outer_lr, momentum=outer_momentum)
        self.states = (self.mixing, self.outer_step)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from self.mixing.average(bucket, comm)
        self.outer_step.subtract(bucket)
        self.outer_step.step(bucket)
