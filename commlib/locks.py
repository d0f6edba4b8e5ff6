"""Where commlib's locks are made, all of them, each with a name.

[Note: locks] The collector runs wherever Python allocates an object: within a lock, too, on the thread that holds it.
What it calls must therefore never take a lock (`[Note: closing]` in `transport/closing.py`). A test that is to show
this has to come upon the collector within each lock there is, so locks are made here: while `probe` is set, it sees
each lock and may return another in its place. Otherwise these functions return plain objects of `threading`.

A process may be forked while another of its threads holds a lock. In the child that thread does not exist, and the lock
would be held for ever. Locks of a whole process, which a child may take as well, are therefore made free there. Locks
of a single object need not be: a child makes objects of its own, and leaves those of its parent alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

#: For tests: called with the name and the lock that was made; returns what is used in its place.
probe: Callable[[str, Any], Any] | None = None

#: Of the whole process, by name.
of_process: dict[str, Any] = {}


def lock(name: str, *, is_of_process: bool = False) -> threading.Lock:
    """Return a new lock.

    Args:
        name: What it guards; a literal, which no other call uses.
        is_of_process: Whether it lives as long as the process, so that a forked child uses it as well.
    """
    return _made(name, threading.Lock(), is_of_process)


def rlock(name: str, *, is_of_process: bool = False) -> threading.RLock:
    """Return a new lock that its holder may take again. Arguments as of `lock`."""
    return _made(name, threading.RLock(), is_of_process)


def condition(name: str) -> threading.Condition:
    """Return a new condition with a lock of its own."""
    return threading.Condition(_made(name, threading.RLock(), False))


def _made(name: str, made: Any, is_of_process: bool) -> Any:
    if is_of_process:
        of_process[name] = made
    return made if probe is None else probe(name, made)


def _free_in_child() -> None:
    for each in of_process.values():
        each._at_fork_reinit()  # as the standard library does with its own


os.register_at_fork(after_in_child=_free_in_child)
