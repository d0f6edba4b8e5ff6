"""Asynchronous averaging of weights in the background."""

from __future__ import annotations

from typing_extensions import override

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Weights
from commlib.algorithms.context import BucketView
from commlib.primitives.centralized import centralized_full_precision
from commlib.transport.base import Communication, Communicator


class AsyncAveraging(Algorithm):
    """Averages the replicas in the background, every `period` steps or as often as the slowest rank permits.

    At the end of a step, rank i copies its weights to c_i and joins the next round. The copies are averaged once the
    last rank has joined. At the end of the first step at which the mean is available,

        x_i <- x_i + mean_j(c_j) - c_i

    which keeps the steps made in the meantime. A slow or stopped rank delays the averaging, but not the training of
    other ranks. Training does not have to pause for evaluation or saving, because weights change only at the end of a
    step.

    Paper: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2022, section 4
    (asynchronous model averaging); Lian et al. 2018 for the analysis.

    Deviations: BAGUA averages the live weights at a fixed interval in milliseconds, under a lock that forward and
    backward also acquire, and the user calls `abort()` and `resume()`. Here a round works on a copy, periods are in
    steps, and there are no locks and no such calls.

    Args:
        period: Minimum number of optimizer steps between the starts of rounds.
        warmup_steps: Optimizer steps of plain gradient all-reduce before the first round.

    Raises:
        ConfigError: `period` or `warmup_steps` is out of range.
    """

    made_for = "sgd"
    portable = True
    keeps_mean = True

    def __init__(self, period: int = 8, *, warmup_steps: int = 0) -> None:
        self.channel = Weights(asynchronous=True, period=period, warmup_steps=warmup_steps)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        """Replace the copies by their mean."""
        yield from centralized_full_precision(bucket.flat, comm)
        bucket.flat.div_(comm.world_size)
