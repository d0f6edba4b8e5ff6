"""AdamW whose variance can be frozen: the optimizer of `onebit_adam` and `qadam`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from typing_extensions import override

from commlib.errors import ConfigError


class FrozenVarianceAdam(torch.optim.Optimizer):
    """AdamW that, once its variance is frozen, takes the averaged momentum in the place of gradients.

    With t the step, T the last step before the freeze, wd decoupled:

        before:  m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   T = t
        after:   m <- grad (the algorithm has averaged b1 m + (1 - b1) g over the ranks)
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^T)) + eps)
        x <- (1 - lr wd) x - lr u,   after the freeze with |u| <= max(1, (1 - b1) / sqrt(1 - b2))

    The bias correction of the variance stops with the variance. The bound is Adam's own (Kingma and Ba, "Adam", section
    2.1), which a frozen variance no longer keeps: an element whose gradient was next to zero until then, of a unit that
    never fired, would else get a step without limit once momentum comes with a scale for many elements. Without such an
    algorithm it is AdamW. Complex parameters count as two reals each, as in torch's Adam, whose state (`step`,
    `exp_avg`, `exp_avg_sq`) it keeps and takes over.

    Args:
        params: Parameters or groups of them; groups may have their own lr, betas, eps and weight_decay.
        lr: Learning rate.
        betas: b1 and b2, in [0, 1).
        eps: Added to the root of the variance.
        weight_decay: Decoupled.

    Raises:
        ConfigError: A number out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ConfigError(
                "FrozenVarianceAdam: expected lr, eps, weight_decay >= 0 and betas in [0, 1), got "
                f"{lr=}, {eps=}, {weight_decay=}, {betas=}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "frozen": False})

    def freeze(self) -> None:
        """Freeze the variance from now on: gradients are momentum. Called by the algorithm; kept in `state_dict`."""
        for group in self.param_groups:
            group["frozen"] = True

    def momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return m of a parameter, of its shape; made if the parameter had no gradient so far."""
        return self._state_of(parameter)["exp_avg"]

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")  # as torch's Adam keeps it
            state["variance_steps"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("frozen", False)
        for own in self.state.values():
            if "step" in own:
                own.setdefault("variance_steps", int(own["step"]))  # torch's Adam never freezes

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step; a parameter without gradient is left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(parameter)
        b1, b2 = group["betas"]
        tensors = parameter, gradient, state["exp_avg"], state["exp_avg_sq"]
        parameter, gradient, mean, variance = map(_as_real, tensors)
        state["step"] += 1
        step = float(state["step"])
        if group["frozen"]:
            mean.copy_(gradient)
        else:
            state["variance_steps"] += 1
            mean.lerp_(gradient, 1 - b1)
            variance.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        mean_correction = 1 - b1**step
        variance_correction = 1 - b2 ** state["variance_steps"] if state["variance_steps"] else 1.0
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (variance.sqrt() / variance_correction**0.5).add_(group["eps"])
        if not group["frozen"]:
            parameter.addcdiv_(mean, denominator, value=-group["lr"] / mean_correction)
            return
        bound = max(1.0, (1 - b1) / (1 - b2) ** 0.5) * mean_correction
        parameter.add_((mean / denominator).clamp_(-bound, bound), alpha=-group["lr"] / mean_correction)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
