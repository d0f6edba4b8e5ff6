"""Thread-safe sets and tables that hold weak references.

The standard library's weak collections tolerate that the garbage collector removes elements during iteration. They
raise `RuntimeError` if another thread adds an element meanwhile. These classes iterate over copies, taken under a lock
that `add` and `put` also hold. The collector never takes the lock; see `[Note: locks]` in `locks.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")


class WeakMembers(Generic[T]):
    """A set of weak references to its members.

    Args:
        lock: A lock for this set only.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, *members: T) -> None:
        """Add members."""
        with self._lock:
            self._members.update(members)

    def discard(self, *members: T) -> None:
        """Remove members, if present."""
        with self._lock:
            self._members.difference_update(members)

    def clear(self) -> None:
        """Remove all members. Iterations that are in progress, for example across a fork, keep the old set."""
        with self._lock:
            self._members = weakref.WeakSet()

    def alive(self) -> list[T]:
        """Return the current members."""
        with self._lock:
            return list(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._members


class WeakTable(Generic[T, V]):
    """A table with weak references to its keys.

    Args:
        lock: A lock for this table only.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._values: weakref.WeakKeyDictionary[Any, V] = weakref.WeakKeyDictionary()

    def put(self, key: T, value: V) -> None:
        """Set the value of a key."""
        with self._lock:
            self._values[key] = value

    def get(self, key: T) -> V | None:
        """Return the value of a key, or None if the key is absent."""
        return self._values.get(key)

    def __getitem__(self, key: T) -> V:
        return self._values[key]

    def pop(self, key: T) -> V | None:
        """Remove a key and return its value, or None if the key is absent."""
        with self._lock:
            return self._values.pop(key, None)

    def __iter__(self) -> Iterator[T]:
        """Iterate over a snapshot of the keys."""
        with self._lock:
            keys = list(self._values)
        return iter(keys)

    def __contains__(self, key: object) -> bool:
        return key in self._values
