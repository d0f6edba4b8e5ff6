"""Decides which parameters are permanently frozen, so that a channel leaves them out of its plan.

[Note: frozen parameters] A parameter that is frozen is permanently frozen from then on, and leaves the plan of every
channel before its next round. Rounds over weights would otherwise change it, by outer momentum or by a codec's error,
and rounds over gradients would send zeros for it.

A parameter that two alternating losses freeze in turns must stay: it may be frozen at the end of every step that has a
round, and must still be averaged. Its history shows it, so a parameter that was frozen and is unfrozen *takes turns*.
It is permanently frozen again only after `patience` steps in a row. For weights this is a period, because no round may
change a layer that is frozen for good. For gradients there is no such number: zeros change nothing, while each change
of the plan is collective and restarts the search for bucket sizes. So a parameter changes that plan twice at most.

If ranks froze a parameter between two rounds over weights, its values may differ between them. An unfrozen parameter is
therefore first replaced by its mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Collection


class FrozenParameters:
    """Tracks which parameters are permanently frozen; see [Note: frozen parameters]. All ranks freeze the same ones.

    Args:
        patience: Number of steps (rounds of gradients) in a row after which a parameter that takes turns counts as
            permanently frozen; None if it never does.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._num_steps: dict[str, int] = {}  # by name: consecutive steps at whose end it was frozen
        self._takes_turns: set[str] = set()

    def note(self, frozen: Collection[str]) -> None:
        """Record the names of the parameters that are frozen at the end of a step."""
        if frozen or self._num_steps:
            self._takes_turns.update(self._num_steps.keys() - frozen)
            self._num_steps = {name: self._num_steps.get(name, 0) + 1 for name in frozen}

    @property
    def permanent(self) -> frozenset[str]:
        """The names of the permanently frozen parameters."""
        return frozenset(name for name in self._num_steps if name not in self._takes_turns or self._waited(name))

    def _waited(self, name: str) -> bool:
        return self._patience is not None and self._num_steps[name] > self._patience
