"""AdamW whose variance can be frozen: the optimizer of `onebit_adam`, `qadam` and `zero_one_adam`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from typing_extensions import override

from commlib.errors import ConfigError


class FrozenVarianceAdam(torch.optim.Optimizer):
    """AdamW that uses the averaged momentum in place of gradients once its variance is frozen.

    With t the step, T the last step before the freeze, and wd the decoupled weight decay:

        before:  m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   T = t
        after:   m <- grad (the algorithm has averaged b1 m + (1 - b1) g over the ranks)
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^T)) + eps)
        x <- (1 - lr wd) x - lr u,   after the freeze with |u| <= max(1, (1 - b1) / sqrt(1 - b2))

    The bias correction of the variance stops with the variance. The bound on u is Adam's own (Kingma and Ba, "Adam",
    section 2.1), which no longer holds once the variance is frozen. Without it, an element whose gradient was almost
    zero until then, such as that of a unit that never fired, would get an unbounded step once momentum arrives with a
    scale that many elements share. Without such an algorithm the optimizer is AdamW.

    `zero_one_adam` may let ranks make local steps between rounds. In such a step, while the variance is frozen:

        m <- b1 m + (1 - b1) g,   s <- s + lr m,   S <- S + lr,   x <- (1 - lr wd) x - lr u

    In the step of a round, where grad is the mean of (s + lr m) / (S + lr) over the ranks and c the weights after the
    last round, decayed like x:

        m <- grad,   x <- (1 - lr wd) c - (S + lr) u,   s <- 0,   S <- 0

    Complex parameters count as two reals each, as in torch's Adam. The state has the entries of torch's Adam (`step`,
    `exp_avg`, `exp_avg_sq`), and state of torch's Adam can be loaded.

    Args:
        params: Parameters or groups of them; groups may have their own lr, betas, eps and weight_decay.
        lr: Learning rate.
        betas: b1 and b2, in [0, 1).
        eps: Added to the square root of the variance.
        weight_decay: Decoupled weight decay coefficient.

    Raises:
        ConfigError: A number is out of range.
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

    def freeze(self, frozen: bool = True) -> None:
        """Freeze or unfreeze the variance. While it is frozen, gradients are momentum, from the next step on.

        Called by the algorithm; saved in `state_dict`.
        """
        for group in self.param_groups:
            group["frozen"] = frozen

    def expect_local_steps(self) -> None:
        """Take the gradients of the next step as momentum, and those of later steps as local until the next call.

        Called by the algorithm in each round; saved in `state_dict`.
        """
        for group in self.param_groups:
            group["has_local_steps"] = group["averaged"] = True

    def forget_local_steps(self) -> None:
        """Discard the sums of local steps and continue from the current weights."""
        for group in self.param_groups:
            group["passed_lr"] = 0.0
        for state in self.state.values():
            state.pop("common", None)
            state.pop("moved", None)

    def moved(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return s of a parameter, in its shape; None if it has made no local step since the last round."""
        return self.state[parameter].get("moved") if parameter in self.state else None

    def momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return m of a parameter, in its shape. It is created if the parameter has had no gradient yet."""
        return self._state_of(parameter)["exp_avg"]

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = state["variance_steps"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("frozen", False)
        for own in self.state.values():
            if "step" in own:  # a tensor in the state of torch's Adam, which never freezes
                own["step"] = int(own["step"])
                own.setdefault("variance_steps", own["step"])

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
                    self._update(parameter, parameter.grad, group)
            if group.get("has_local_steps", False):
                is_local = group["frozen"] and not group["averaged"]
                group["passed_lr"] = group.get("passed_lr", 0.0) + float(group["lr"]) if is_local else 0.0
                group["averaged"] = False
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(parameter)
        b1, b2 = group["betas"]
        is_local = group["frozen"] and group.get("has_local_steps", False) and not group["averaged"]
        if is_local and "moved" not in state:
            state["common"] = parameter.clone(memory_format=torch.preserve_format)
            state["moved"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        common, moved = (None, None) if is_local else (state.pop("common", None), state.pop("moved", None))
        if moved is not None and common is not None:
            parameter.copy_(common)
        tensors = parameter, gradient, state["exp_avg"], state["exp_avg_sq"]
        parameter, gradient, mean, variance = map(_as_real, tensors)
        state["step"] += 1
        if is_local:
            mean.lerp_(gradient, 1 - b1)
            _as_real(state["moved"]).add_(mean, alpha=group["lr"])
            _as_real(state["common"]).mul_(1 - group["lr"] * group["weight_decay"])
        elif group["frozen"]:
            mean.copy_(gradient)
        else:
            state["variance_steps"] += 1
            mean.lerp_(gradient, 1 - b1)
            variance.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        mean_correction = 1 - b1 ** state["step"]
        variance_correction = 1 - b2 ** state["variance_steps"] if state["variance_steps"] else 1.0
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (variance.sqrt() / variance_correction**0.5).add_(group["eps"])
        if not group["frozen"]:
            parameter.addcdiv_(mean, denominator, value=-group["lr"] / mean_correction)
            return
        bound = max(1.0, (1 - b1) / (1 - b2) ** 0.5) * mean_correction
        span = group["lr"] + (0.0 if is_local else group.get("passed_lr", 0.0))
        parameter.add_((mean / denominator).clamp_(-bound, bound), alpha=-span / mean_correction)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
