"""Selection of the parameters to compress, and units of residuals."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.context import Context
from commlib.algorithms.state import State


@dataclass(frozen=True)
class CompressionPolicy:
    """Selects the parameters to compress. The others are averaged in full precision, in separate buckets.

    Attributes:
        min_numel: Parameters with fewer elements are not compressed.
        min_dims: Parameters with fewer dimensions are not compressed; biases and norms have one.
        skip: `fnmatch` patterns of the names of parameters that are not compressed, for example `("*embed*",
            "head.*")`.
    """

    min_numel: int = 0
    min_dims: int = 0
    skip: tuple[str, ...] = ()

    def __call__(self, name: str, parameter: torch.Tensor) -> bool:
        """Return whether the parameter is compressed. Complex and integer parameters never are."""
        return (
            parameter.is_floating_point()
            and parameter.numel() >= self.min_numel
            and parameter.dim() >= self.min_dims
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.skip)
        )


#: Default for codecs that are accurate enough for small tensors too.
EVERYTHING = CompressionPolicy()

#: Default for codecs that are too coarse for norms and biases, which are a small fraction of the bytes.
MATRICES = CompressionPolicy(min_numel=1024, min_dims=2)


class Units(State):
    """The `State` that holds the units of residuals: no loss scale; optionally, the learning rate of their step.

    Args:
        rescale: Whether a residual e is added as `(lr_then / lr_now) * e`, so that SGD applies it to the weights as
            `lr_then * e` (Karimireddy et al., 2019, algorithm 1, stores `lr * e`). With several parameter groups the
            learning rate of the first one is used.
    """

    same = ("units",)

    def __init__(self, rescale: bool = False) -> None:
        self.rescale = rescale
        self._optimizer: torch.optim.Optimizer | None = None
        self._scaler: Any = None
        self._step = self._scale_step = -1
        self._lr: float | None = None
        self._decay = self._scale = 1.0

    @override
    def setup(self, context: Context) -> None:
        self.follow(context.optimizer, context.scaler)

    @override
    def save(self) -> dict[str, Any]:
        return {"units": self.state_dict()}

    @override
    def load(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state["units"])

    def follow(self, optimizer: torch.optim.Optimizer | None, scaler: Any) -> None:
        """Read the learning rate and the loss scale from this optimizer and scaler from now on."""
        self._optimizer, self._scaler = optimizer, scaler
        self._scale, self._scale_step = 1.0, -1

    def scale(self, step: int) -> float:
        """Return the loss scale of the gradients in the round of number `step`.

        The scaler is read once per round, as `get_scale` synchronizes with the device on CUDA.
        """
        if step != self._scale_step and self._scaler is not None and self._scaler.is_enabled():
            self._scale, self._scale_step = float(self._scaler.get_scale()), step
        return self._scale

    def decay(self, step: int) -> float:
        """Return the factor of residuals in the round of number `step`; repeated calls return the same value.

        With `rescale` it is lr_then / lr_now, where lr_then is the learning rate of the previous round. It is 1 if
        either is 0, and without `rescale`.
        """
        if step != self._step and self._optimizer is not None and self.rescale:
            now = self._lr_of(self._optimizer.param_groups[0])
            self._decay = self._lr / now if self._lr and now else 1.0
            self._lr = now
            self._step = step
        return self._decay

    def _lr_of(self, group: dict[str, Any]) -> float:
        """Return the factor that the group's optimizer applies to the result of the round."""
        return float(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the learning rate of the last round."""
        return {"lr": self._lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._lr, self._scale_step = state["lr"], -1
