"""What a training step takes on a network, from the algorithm objects that train (docs/simulator.md)."""

from commlib.network.simulation.calibration import Cell, calibrate
from commlib.network.simulation.simulator import Options, simulate

__all__ = ["Cell", "Options", "calibrate", "simulate"]
