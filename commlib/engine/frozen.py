"""Tracks parameters that rounds over weights leave out because they are permanently frozen.

[Note: frozen layers] Results are not written to a frozen parameter. From the next round on, it is in no bucket, so
outer momentum does not change it. A parameter that two losses freeze in turns is frozen at the end of every other step,
possibly of every step with a round, but must still be averaged. Once a parameter has been unfrozen, it therefore counts
as frozen again only after a whole period. If ranks froze a parameter between two rounds, its values may differ between
them. An unfrozen parameter is therefore first replaced by its mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Frozen:
    """Tracks which parameters are permanently frozen; see [Note: frozen layers].

    Args:
        parameters: The parameters.
        period: Steps after which a parameter that was unfrozen before counts as frozen.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], period: int) -> None:
        self._parameters = parameters
        self._period = period
        self._steps: dict[int, int] = {}  # by id(): consecutive steps at whose end it was frozen
        self._takes_turns: set[int] = set()

    def end_step(self) -> None:
        """Record which parameters are frozen at the end of a step."""
        now = [id(parameter) for parameter in self._parameters if not parameter.requires_grad]
        if not now and not self._steps:
            return
        self._takes_turns.update(self._steps.keys() - now)
        self._steps = {key: self._steps.get(key, 0) + 1 for key in now}

    def resting(self) -> frozenset[int]:
        """Return the `id` of each permanently frozen parameter."""
        return frozenset(
            key for key, count in self._steps.items() if key not in self._takes_turns or count > self._period
        )
