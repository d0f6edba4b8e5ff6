"""Which parameters an algorithm compresses, and in which units it keeps what it lost."""

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
    """Says which parameters are compressed; the others are averaged in full precision, in buckets of their own.

    Attributes:
        min_numel: Parameters of fewer elements are not compressed.
        min_dims: Parameters of fewer dimensions (biases and norms have one) are not compressed.
        skip: Patterns of names (as `fnmatch` has them) that are not compressed, for example `("*embed*", "head.*")`.
    """

    min_numel: int = 0
    min_dims: int = 0
    skip: tuple[str, ...] = ()

    def __call__(self, name: str, parameter: torch.Tensor) -> bool:
        """Return whether the parameter is compressed. Complex ones and those of integer types never are."""
        return (
            parameter.is_floating_point()
            and parameter.numel() >= self.min_numel
            and parameter.dim() >= self.min_dims
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.skip)
        )


#: The default of algorithms whose codec serves small tensors as well as large ones.
EVERYTHING = CompressionPolicy()

#: For codecs so coarse that norms and biases suffer, which are a small part of the bytes.
MATRICES = CompressionPolicy(min_numel=1024, min_dims=2)


class Units(State):
    """The units of residuals: those of the gradient without its loss scale; by option, times the learning rate.

    Args:
        rescale: Whether a residual e is added as `(lr_then / lr_now) * e`, since SGD owes `lr_then * e` to the weights
            (Karimireddy et al., 2019, algorithm 1, keeps `lr * e`). With several parameter groups the learning rate of
            the first one counts.
    """

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
        """Take the learning rate and the loss scale from these."""
        self._optimizer, self._scaler = optimizer, scaler
        self._scale, self._scale_step = 1.0, -1

    def scale(self, step: int) -> float:
        """Return the loss scale of the gradients in the round of number `step`.

        The scaler is asked once a round: on CUDA the host waits for its answer.
        """
        if step != self._scale_step and self._scaler is not None and self._scaler.is_enabled():
            self._scale, self._scale_step = float(self._scaler.get_scale()), step
        return self._scale

    def decay(self, step: int) -> float:
        """Return the factor of residuals in the round of number `step`; the same however often it is asked.

        It is lr_then / lr_now with `rescale`, lr_then that of the round before; 1 where either is 0, and without.
        """
        if step != self._step and self._optimizer is not None and self.rescale:
            now = self._lr_of(self._optimizer.param_groups[0])
            self._decay = self._lr / now if self._lr and now else 1.0
            self._lr = now
            self._step = step
        return self._decay

    def _lr_of(self, group: dict[str, Any]) -> float:
        """Return by what a group's optimizer will multiply what the round brings."""
        return float(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the learning rate of the last round."""
        return {"lr": self._lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._lr, self._scale_step = state["lr"], -1
