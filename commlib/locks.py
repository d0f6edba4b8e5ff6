"""Factory functions for all locks in commlib. Each lock has a name.

[Note: locks] The garbage collector can run wherever Python allocates an object, including on a thread that holds a
lock. Code that the collector calls must therefore never take a lock (`[Note: closing]` in `transport/closing.py`). A
test of this has to trigger the collector while each lock is held, so all locks are created here: if `probe` is set, it
receives each new lock and may return a substitute. Otherwise these functions return plain `threading` objects.

A process may fork while another of its threads holds a lock. That thread does not exist in the child, so the lock would
stay held forever. Locks of a whole process, which a child may take as well, are therefore released in the child. Locks
of a single object are not: a child creates its own objects and does not use those of its parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

#: For tests: called with the name and the new lock; returns the lock to use instead.
probe: Callable[[str, Any], Any] | None = None

#: Locks of the whole process, by name.
of_process: dict[str, Any] = {}


def lock(name: str, *, is_of_process: bool = False) -> threading.Lock:
    """Return a new lock.

    Args:
        name: The guarded resource; a literal that no other call uses.
        is_of_process: Whether the lock lives as long as the process, so that a forked child uses it as well.
    """
    made = threading.Lock()
    return made if probe is None and not is_of_process else _made(name, made, is_of_process)


def rlock(name: str, *, is_of_process: bool = False) -> threading.RLock:
    """Return a new reentrant lock. Arguments as for `lock`."""
    return _made(name, threading.RLock(), is_of_process)


def condition(name: str) -> threading.Condition:
    """Return a new condition with its own lock."""
    return threading.Condition(_made(name, threading.RLock(), False))


def _made(name: str, made: Any, is_of_process: bool) -> Any:
    if is_of_process:
        of_process[name] = made
    return made if probe is None else probe(name, made)


def _free_in_child() -> None:
    for each in of_process.values():
        each._at_fork_reinit()  # as the standard library does for its own locks


os.register_at_fork(after_in_child=_free_in_child)
