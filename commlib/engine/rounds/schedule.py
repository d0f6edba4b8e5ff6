"""Counts steps, and decides which rounds start and end with them, without a clock and so identically on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commlib.algorithms.channels import Channel, Weights


class StepCounter:
    """Counts the optimizer steps of a training, or its synchronised backwards if no optimizer is known.

    Args:
        declared: The algorithm's channel.
        counts_backwards: Whether no optimizer is known.

    Attributes:
        step: Number of steps so far.
        counts_backwards: As above.
        when_counted: Called at the end of each step.
    """

    def __init__(self, declared: Channel, counts_backwards: bool = False) -> None:
        self._declared = declared
        self.counts_backwards = counts_backwards
        self.when_counted: Callable[[], object] = lambda: None
        self.step = 0

    @property
    def is_warming_up(self) -> bool:
        """Whether gradients are still averaged in full precision before the algorithm starts."""
        return self.step < self._declared.warmup_steps

    @property
    def ended_warm_up_step(self) -> bool:
        """Whether the step that ended last was one of the warm-up."""
        return 0 < self.step <= self._declared.warmup_steps

    @property
    def ever_syncs_gradients(self) -> bool:
        """Whether the backward of any step synchronises gradients."""
        return self._declared.syncs_gradients(0)

    @property
    def syncs_gradients(self) -> bool:
        """Whether the backward of this step synchronises gradients."""
        return self._declared.syncs_gradients(self.step)

    def end_step(self) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.when_counted()

    def end_backward(self) -> None:
        """Count a synchronised backward, if backwards are the steps."""
        if self.counts_backwards:
            self.end_step()


@dataclass(frozen=True)
class StepActions:
    """The actions at the end of an optimizer step, in this order.

    Attributes:
        take_background: Wait for the background round and apply its result.
        start: Start a round over weights or state.
        in_background: Whether the started round is waited for later.
    """

    take_background: bool = False
    start: bool = False
    in_background: bool = False


class Schedule:
    """Decides which rounds over weights or state start and end at the end of each optimizer step.

    Args:
        declared: The algorithm's channel.
        counter: Counts the steps.

    Attributes:
        take_at: The earliest step at which to take the background round; None without one.
    """

    def __init__(self, declared: Weights, counter: StepCounter) -> None:
        self._declared = declared
        self._counter = counter
        self.take_at: int | None = None
        self._started_at: int | None = None

    @property
    def in_background(self) -> bool:
        """Whether a background round is pending."""
        return self.take_at is not None

    def end_step(self, has_arrived: bool = False) -> StepActions:
        """Return the actions at the end of the last counted step.

        Args:
            has_arrived: Whether the result of the background round has arrived. Only asynchronous rounds use it.
        """
        step, declared = self._counter.step, self._declared
        if self._counter.ended_warm_up_step:
            return StepActions()
        is_late_enough = self.take_at is not None and self.take_at <= step
        take = is_late_enough and (has_arrived or not declared.asynchronous)
        if take:
            self.take_at = None
        start = self.take_at is None and self._is_due(step)
        if start:
            self._started_at = step
            if declared.in_background:
                self.take_at = step + max(1, declared.delay)
        return StepActions(take, start, start and declared.in_background)

    def _is_due(self, step: int) -> bool:
        """Return whether a round starts now. An asynchronous round starts once the previous one has ended."""
        declared = self._declared
        if declared.asynchronous:
            return self._started_at is None or step - self._started_at >= declared.period
        return (step - declared.warmup_steps) % declared.period == 0

    def drain(self) -> bool:
        """Return whether a background round must be taken now (before saving, evaluation or exit)."""
        pending, self.take_at = self.take_at is not None, None
        return pending
