"""Optimizers that implement the update rule of specific algorithms."""

from commlib.optim.demo import DeMo
from commlib.optim.frozen_variance_adam import FrozenVarianceAdam

__all__ = ["DeMo", "FrozenVarianceAdam"]
