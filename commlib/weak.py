"""Sets and tables that keep nothing alive, for use by several threads.

The standard library's allow that the collector removes elements while they are iterated over, but not that another
thread adds some: that raises `RuntimeError`. These return copies, made under a lock that whoever adds takes as well.
The collector, which removes elements as before, never takes the lock; see `[Note: locks]` in `locks.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")


class WeakMembers(Generic[T]):
    """A set that does not keep its members alive.

    Args:
        lock: Of this set only.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, *members: T) -> None:
        """Add members."""
        with self._lock:
            self._members.update(members)

    def discard(self, *members: T) -> None:
        """Remove members that are there."""
        with self._lock:
            self._members.difference_update(members)

    def clear(self) -> None:
        """Remove all members. Whoever is iterating over the set, as before a fork, has another one."""
        with self._lock:
            self._members = weakref.WeakSet()

    def alive(self) -> list[T]:
        """Return the members there are now."""
        with self._lock:
            return list(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._members


class WeakTable(Generic[T, V]):
    """A table by keys that it does not keep alive.

    Args:
        lock: Of this table only.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._values: weakref.WeakKeyDictionary[Any, V] = weakref.WeakKeyDictionary()

    def put(self, key: T, value: V) -> None:
        """Set the value of a key."""
        with self._lock:
            self._values[key] = value

    def get(self, key: T) -> V | None:
        """Return the value of a key; None where there is none."""
        return self._values.get(key)

    def __getitem__(self, key: T) -> V:
        return self._values[key]

    def pop(self, key: T) -> V | None:
        """Remove a key, and return its value; None where there is none."""
        with self._lock:
            return self._values.pop(key, None)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the keys there are now."""
        with self._lock:
            keys = list(self._values)
        return iter(keys)

    def __contains__(self, key: object) -> bool:
        return key in self._values
