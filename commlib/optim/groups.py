"""Lookup of a parameter's group in an optimizer."""

from __future__ import annotations

from typing import Any

import torch


class Groups:
    """Finds the group of a parameter, again at each use, because loading a state or adding a group replaces groups.

    Args:
        optimizer: The optimizer that has the groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._places: dict[torch.Tensor, tuple[int, int]] = {}

    def find(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return the parameter's current group; None if it is in no group."""
        group = self._at(parameter)
        if group is None:
            self._places = {
                each: (number, place)
                for number, own in enumerate(self._optimizer.param_groups)
                for place, each in enumerate(own["params"])
            }
            group = self._at(parameter)
        return group

    def _at(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        number, place = self._places.get(parameter, (-1, -1))
        groups = self._optimizer.param_groups
        if not 0 <= number < len(groups) or place >= len(groups[number]["params"]):
            return None
        return groups[number] if groups[number]["params"][place] is parameter else None
