"""Simulation of training steps on a network with the algorithms used in training (docs/explanation/simulator.md)."""

from commlib.simulation.calibration import MeasuredStep, calibrate
from commlib.simulation.simulator import Options, simulate

__all__ = ["MeasuredStep", "Options", "calibrate", "simulate"]
