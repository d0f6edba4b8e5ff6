"""What a training step takes on a network, from the algorithm objects that train (docs/explanation/simulator.md)."""

from commlib.simulation.calibration import MeasuredStep, calibrate
from commlib.simulation.simulator import Options, simulate

__all__ = ["MeasuredStep", "Options", "calibrate", "simulate"]
