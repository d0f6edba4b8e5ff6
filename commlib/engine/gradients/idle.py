"""Tracks parameters that are no longer communicated because they have been frozen for several rounds."""

from __future__ import annotations

#: Consecutive rounds after which parameters that were frozen in all of them are left out.
_ROUNDS = 8


class Idle:
    """The parameters that were frozen in the last rounds, by name. All ranks freeze the same parameters.

    Two alternating losses freeze parameters in every other step, and each change of the plan is collective. Frozen
    parameters therefore stay in the plan for some rounds, as unused parameters. A parameter that was left out once and
    came back stays in the plan permanently: freezing it again changes nothing.
    """

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._num_rounds = 0
        self._left_out: set[str] = set()

    def note(self, names: frozenset[str]) -> None:
        """Record the parameters that were frozen in a round."""
        if names or self._names:
            self._num_rounds = self._num_rounds + 1 if names == self._names else 1
            self._names = names

    def is_due(self) -> bool:
        """Return whether parameters should be left out now."""
        return self._num_rounds >= _ROUNDS and bool(self._names - self._left_out)

    def leave_out(self) -> frozenset[str]:
        """Return the parameters to leave out now, and reset the count."""
        due = self._names - self._left_out if self.is_due() else frozenset[str]()
        self._left_out |= due
        self._names, self._num_rounds = frozenset(), 0
        return due
