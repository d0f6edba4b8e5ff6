"""Optimizers that some algorithms are one half of."""

from commlib.optim.demo import DeMo
from commlib.optim.frozen_variance_adam import FrozenVarianceAdam

__all__ = ["DeMo", "FrozenVarianceAdam"]
