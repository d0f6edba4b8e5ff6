"""NoLoCo: many local steps, then an outer step with the weights of a random partner."""

from __future__ import annotations

from typing_extensions import override

from commlib.algorithms.context import BucketView
from commlib.algorithms.neighbours import NeighbourAveraging
from commlib.algorithms.outer import OuterStep
from commlib.primitives.mixers import FullPrecisionMixer
from commlib.primitives.topology import RandomMatching
from commlib.transport.base import Communication, Communicator


class NoLoCo(NeighbourAveraging):
    """Pairs the ranks at random every `period` local steps; each makes an outer step with the weights of its pair.

    With f_i the slow weights of rank i, x_i its weights after the local steps from f_i, j its partner, m_i its outer
    momentum buffer and a the momentum:

        m_i <- a m_i + outer_lr ((x_i + x_j) / 2 - f_i),   f_i <- f_i + m_i,   x_i = f_i

    The parenthesis is the mean of the outer updates of the two ranks, plus a term that pulls f_i to the mean of their
    slow weights. A rank waits for only one other rank, for any world size, and sends 4n bytes. With an odd number of
    ranks, one has no partner and uses only its own update. Replicas differ; `commlib.synchronize` sets all weights to
    their mean.

    Args:
        period: Inner steps between outer steps.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Momentum a of the outer optimizer.
        seed: Seed of the pairs; the same on all ranks.
        overlap: Whether a round runs during the next step's forward and backward. Its effect is added at the end of
            that step.

    Paper: Kolehmainen, Blagoev, Donaghy, Ersoy, Nies, "NoLoCo: No-all-reduce Low Communication Training Method for
    Large Models" (2025), the modified Nesterov momentum with groups of two.
    Deviations: the weight of the pull is the outer learning rate, as in the authors' code, so that only x is sent.
    Pairs are drawn from a shared seed. Activations are not routed between replicas, since there is no pipeline.
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
