"""Progress on standard error: a bar on a terminal, periodic lines in a log."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TextColumn, TimeElapsedColumn

#: Seconds between two lines in a log.
_PERIOD_S = 10.0


@contextmanager
def progress_bar(what: str, num_kinds: int, repeats: int = 1) -> Iterator[Callable[[str], None]]:
    """Show the progress of tasks of several kinds, `repeats` of each.

    Yields a function to call with the kind after each task. The remaining time is shown once a task of every kind has
    ended, because kinds differ in cost. Without repeats, no time is shown.
    """
    remaining = Remaining(num_kinds, repeats)
    if not sys.stderr.isatty():
        yield _logged(what, num_kinds * repeats, remaining)
        return
    columns = (*Bar.get_default_columns()[:-1], TimeElapsedColumn(), TextColumn("{task.fields[remaining]}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=num_kinds * repeats, remaining="")

        def advance(kind: str) -> None:
            remaining.add(kind)
            bar.update(task, advance=1, remaining=str(remaining).removeprefix(", "))

        yield advance


class Remaining:
    """Estimates the remaining time of tasks from the mean duration of each kind.

    Args:
        num_kinds: Number of kinds.
        repeats: Number of tasks of each kind.
    """

    def __init__(self, num_kinds: int, repeats: int) -> None:
        self._num_kinds, self._repeats = num_kinds, repeats
        self._durations_s: defaultdict[str, list[float]] = defaultdict(list)
        self._before_s = time.monotonic()

    def add(self, kind: str) -> None:
        """Record the end of a task, which began when the task before it ended."""
        now_s = time.monotonic()
        self._durations_s[kind].append(now_s - self._before_s)
        self._before_s = now_s

    def seconds(self) -> float | None:
        """Return the estimate. None until a task of every kind has ended."""
        if len(self._durations_s) < self._num_kinds:
            return None
        return sum((self._repeats - len(each)) * sum(each) / len(each) for each in self._durations_s.values())

    def __str__(self) -> str:
        """Return the estimate as the end of a line. Empty without an estimate, and if nothing remains."""
        seconds = round(self.seconds() or 0.0)
        return f", about {seconds // 60}:{seconds % 60:02} min left" if seconds else ""


def _logged(what: str, total: int, remaining: Remaining) -> Callable[[str], None]:
    done, said_s = 0, time.monotonic()
    _log(f"{what}: {total} simulations")

    def advance(kind: str) -> None:
        nonlocal done, said_s
        done += 1
        remaining.add(kind)
        if time.monotonic() - said_s >= _PERIOD_S:
            said_s = time.monotonic()
            _log(f"{what}: {done} of {total}{remaining}")

    return advance


@contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """Show the current activity. Yields a function to call with the next activity."""
    if not sys.stderr.isatty():
        _log(what)
        yield _log
        return
    with Console(stderr=True).status(what) as shown:
        yield shown.update


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
