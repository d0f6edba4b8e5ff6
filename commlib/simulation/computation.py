"""Forward and backward of a model on virtual clocks."""

from __future__ import annotations

import numpy as np

from commlib.network.model import Workload
from commlib.simulation.clock import VirtualDriver


class Computation:
    """The computation of a model of which every rank has all weights. It only takes time.

    Args:
        workload: The workload.
        driver: The virtual clocks.
    """

    #: Bytes sent by a rank so far.
    bytes_sent = 0.0

    def __init__(self, workload: Workload, driver: VirtualDriver) -> None:
        self.workload = workload
        self.driver = driver
        self._at_s = 0.0

    def forward(self, pace: np.ndarray) -> None:
        """Compute forward; `pace` [num_clocks] is the factor on its time."""
        self._at_s = 0.0
        self.driver.compute(self.workload.forward_s * pace, "forward")

    def backward(self, pace: np.ndarray, until_s: float) -> None:
        """Continue backward to this number of seconds of computation after its beginning."""
        self.driver.compute((until_s - self._at_s) * pace, "backward")
        self._at_s = until_s

    def end_backward(self, pace: np.ndarray) -> None:
        """Compute the rest of backward."""
        self.backward(pace, self.workload.backward_s)
