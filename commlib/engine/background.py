"""Work that runs on a thread of its own and is joined later."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """A thread that runs one function.

    Args:
        name: The thread's name.
        work: The function to run. Every wait in it must have a timeout.
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
        """Wait for the function to return, and raise its error, if any."""
        self._thread.join()
        if self._error is not None:
            raise self._error
