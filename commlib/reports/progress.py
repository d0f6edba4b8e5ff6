"""Progress on standard error: a bar on a terminal, periodic lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TimeRemainingColumn

#: Seconds between two lines in a log.
_PERIOD_S = 10.0


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show the progress of `total` tasks. Yields a function to call after each task."""
    if not sys.stderr.isatty():
        yield _logged(what, total)
        return
    console = Console(stderr=True)
    with Bar(*Bar.get_default_columns()[:-1], TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda _: bar.advance(task)


def _logged(what: str, total: int) -> Callable[[str], None]:
    done, said_s = 0, time.monotonic()
    _log(f"{what}: {total} simulations")

    def advance(_: str) -> None:
        nonlocal done, said_s
        done += 1
        if time.monotonic() - said_s >= _PERIOD_S:
            said_s = time.monotonic()
            _log(f"{what}: {done} of {total}")

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
