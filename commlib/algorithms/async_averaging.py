"""Model averaging in the background, for which no step waits."""

from __future__ import annotations

from typing_extensions import override

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Weights
from commlib.algorithms.context import BucketView
from commlib.primitives.centralized import centralized_full_precision
from commlib.transport.base import Communication, Communicator


class AsyncAveraging(Algorithm):
    """Average the replicas in the background, every `period` steps or as often as the slowest rank allows.

    At a step's end a rank copies its weights c_i and comes to the next round; when the last rank has come, the copies
    are averaged; at the first step end at which the mean is there

        x_i <- x_i + mean_j(c_j) - c_i

    so that the steps made meanwhile are kept. A slow or stopped rank delays the averaging, never the others' training,
    and nothing has to be paused for evaluation or saving. Weights change at step ends only.

    Paper: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2022, section 4
    (asynchronous model averaging); Lian et al. 2018 for the analysis.

    Deviations: BAGUA averages the live weights under a lock that forward and backward take too, every so many
    milliseconds, and the user calls `abort()` and `resume()`. Here a round works on a copy, periods are steps, and
    there is no lock and nothing to call.

    Args:
        period: Optimizer steps from the start of a round to the start of the next, at least.
        warmup_steps: Optimizer steps of plain gradient all-reduce before.

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
