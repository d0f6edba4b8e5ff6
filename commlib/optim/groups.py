"""Where an optimizer keeps what belongs to a parameter."""

from __future__ import annotations

from typing import Any

import torch


class Groups:
    """Finds the group that a parameter is in, at each use: loading a state and adding a group replace groups.

    Args:
        optimizer: Whose groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._places: dict[torch.Tensor, tuple[int, int]] = {}

    def find(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        """Return the group, as it is now; None if the parameter is in none."""
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
