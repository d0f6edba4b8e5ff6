"""Which parameters are not communicated any more because they have been frozen for a while."""

from __future__ import annotations

#: Rounds in a row after which parameters that were frozen in all of them are left out.
_ROUNDS = 8


class Idle:
    """The frozen parameters of the last rounds, by name; alike on all ranks, as freezing is.

    Two losses that take turns freeze parameters in every other step, and each change of the plan asks all ranks. So
    frozen parameters stay for some rounds, as unused ones, and those that were left out once and came back stay for
    good: freezing them again changes nothing.
    """

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._num_rounds = 0
        self._left_out: set[str] = set()

    def note(self, names: frozenset[str]) -> None:
        """Take note of the parameters that were frozen in a round."""
        if names or self._names:
            self._num_rounds = self._num_rounds + 1 if names == self._names else 1
            self._names = names

    def is_due(self) -> bool:
        """Return whether parameters are to be left out now."""
        return self._num_rounds >= _ROUNDS and bool(self._names - self._left_out)

    def leave_out(self) -> frozenset[str]:
        """Return the parameters that are to be left out now, and begin to count anew."""
        due = self._names - self._left_out if self.is_due() else frozenset[str]()
        self._left_out |= due
        self._names, self._num_rounds = frozenset(), 0
        return due
