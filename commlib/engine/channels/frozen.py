"""Which parameters rounds over weights leave out, because they are frozen for good.

[Note: frozen layers] A parameter that is frozen stays where it is: results are not written to it, and from the next
round on it is in no bucket, so that no outer momentum reaches it. One that two losses freeze in turns is frozen at
the end of every other step, perhaps of all steps with a round, and is to be averaged all the same: after it came
back once, it counts as frozen only after a whole period. When a parameter comes back the ranks may differ in it, if
they froze it between two rounds, so it becomes their mean first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Frozen:
    """Which parameters are frozen for good; see [Note: frozen layers].

    Args:
        parameters: The parameters.
        period: Steps after which one that takes turns counts as frozen.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], period: int) -> None:
        self._parameters = parameters
        self._period = period
        self._steps: dict[int, int] = {}  # at whose ends a parameter was frozen, in a row
        self._takes_turns: set[int] = set()

    def end_step(self) -> None:
        """Look at the parameters at the end of a step."""
        now = [id(parameter) for parameter in self._parameters if not parameter.requires_grad]
        if not now and not self._steps:
            return
        self._takes_turns.update(self._steps.keys() - now)
        self._steps = {key: self._steps.get(key, 0) + 1 for key in now}

    def resting(self) -> frozenset[int]:
        """Return the identities of those that are frozen for good."""
        return frozenset(
            key for key, count in self._steps.items() if key not in self._takes_turns or count > self._period
        )
