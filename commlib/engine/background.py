"""Work that is begun now and waited for later."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """A thread that does one piece of work.

    Args:
        name: Of the thread.
        work: What is to be done. Every wait in it must have a limit of its own.
    """

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Wait for the end of the work, and raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
