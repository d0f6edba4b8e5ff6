"""Optimizer state as one tree of tensors by parameter name, whose structure is the same from the first step on.

An optimizer creates the state of a parameter in the first step with a gradient for it. State that does not exist yet is
taken from a stand-in optimizer that made a step with zero gradients. Its names are recorded as absent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from commlib.checkpoint import blobs
from commlib.errors import ConfigError

#: Attributes that the stand-in must not share with the optimizer: the step hooks.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class Named:
    """One optimizer and the names of its parameters.

    Attributes:
        optimizer: The optimizer.
        names: Parameter names, by the parameters' numbers in `optimizer.state_dict()`.
    """

    optimizer: torch.optim.Optimizer
    names: list[str]


def named(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> list[Named]:
    """Name the optimizers' parameters as in the model. Parameters that are not in the model are named by position."""
    of_model = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for number, optimizer in enumerate(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = [of_model.get(id(p), f"optimizer {number}, parameter {i}") for i, p in enumerate(parameters)]
        found.append(Named(optimizer, names))
    return found


def tree_of(optimizers: Sequence[Named]) -> dict[str, Any]:
    """Return `{"state": {parameter: {entry: value}}, "rest": bytes}`. The tensors are the optimizers' own.

    Raises:
        ConfigError: An optimizer has no state yet, and its step needs more than gradients.
    """
    state: dict[str, Any] = {}
    rest = []
    for each in optimizers:
        saved = each.optimizer.state_dict()
        present = {each.names[number]: values for number, values in saved["state"].items()}
        absent = {} if len(present) == len(each.names) else _initial(each, has_stepped=bool(present))
        state |= {**absent, **present}
        rest.append({"present": sorted(present), "param_groups": saved["param_groups"]})
    return {"state": state, "rest": blobs.packed(rest)}


def restore(optimizers: Sequence[Named], tree: Mapping[str, Any]) -> None:
    """Load the output of `tree_of`.

    Raises:
        ConfigError: It has another number of optimizers.
    """
    rest = blobs.unpacked(tree["rest"])
    if len(rest) != len(optimizers):
        raise ConfigError(f"the checkpoint has {len(rest)} optimizers, and there are {len(optimizers)}")
    for each, own in zip(optimizers, rest, strict=True):
        numbers = {name: number for number, name in enumerate(each.names)}
        state = {numbers[name]: dict(tree["state"][name]) for name in own["present"]}
        each.optimizer.load_state_dict({"state": state, "param_groups": own["param_groups"]})


def _initial(named: Named, has_stepped: bool) -> dict[str, Any]:
    """Return the optimizer's initial state, by parameter names.

    An optimizer that has stepped and has no such initial state, such as LBFGS, keeps all its state at one parameter.
    The result is then empty.
    """
    optimizer = named.optimizer
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__ = {**optimizer.__dict__, **{name: type(getattr(optimizer, name))() for name in _HOOKS}}
    stand_in.__dict__.pop("step", None)  # a scheduler's wrapper, which counts steps
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [
        {**group, "params": [_zeros(parameter) for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    try:
        stand_in.step()
        found = stand_in.state_dict()["state"]
    except Exception as error:
        if has_stepped:
            return {}
        raise ConfigError(
            f"{type(optimizer).__name__}: its state is created in a step that needs more than gradients ({error}). "
            "Make one step before it is saved or loaded, or leave it out of commlib.Checkpoint"
        ) from error
    return {named.names[number]: _blank(values) for number, values in found.items()}


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros_like(parameter, requires_grad=True)
    zeros.grad = torch.zeros_like(parameter)
    return zeros


def _blank(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
