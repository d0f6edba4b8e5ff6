"""Sign descent with decoupled weight decay: the optimizer of `demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from typing_extensions import override

from commlib.errors import ConfigError


class DeMo(torch.optim.Optimizer):
    """Descends along the signs of the gradients, which the algorithm `demo` computes from the momenta of all ranks.

        x <- (1 - lr weight_decay) x - lr sign(grad)

    An element whose gradient is 0 or NaN only decays.

    Args:
        params: Parameters or groups of them; groups may have their own lr and weight_decay.
        lr: Learning rate: the step of every element.
        weight_decay: Decoupled weight decay coefficient.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        if not (lr >= 0 and weight_decay >= 0):
            raise ConfigError(f"DeMo: expected lr >= 0 and weight_decay >= 0, got {lr=}, {weight_decay=}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step. Parameters without a gradient are not changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        return loss
