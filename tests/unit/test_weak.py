"""Sets and tables of weak references: iterated over while other threads add to them and the collector removes."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commlib import locks
from commlib.weak import WeakMembers, WeakTable


class Thing:
    pass


def members() -> WeakMembers[Thing]:
    return WeakMembers(locks.lock("test"))


def table() -> WeakTable[Thing, int]:
    return WeakTable(locks.lock("test"))


@pytest.fixture
def _switching() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def raises_beside_another_thread(look: Callable[[], object], add: Callable[[Thing], object], turns: int) -> bool:
    """Look `turns` times while another thread adds and drops members; return whether that raised."""
    over, errors = threading.Event(), list[RuntimeError]()

    def keep_adding() -> None:
        kept: list[Thing] = []
        while not over.is_set():
            kept.append(Thing())
            add(kept[-1])
            if len(kept) > 50:
                kept.clear()

    thread = threading.Thread(target=keep_adding)
    thread.start()
    try:
        for _ in range(turns):
            look()
    except RuntimeError as error:
        errors.append(error)
    finally:
        over.set()
        thread.join()
    return bool(errors)


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("is_set", [True, False])
def test_another_thread_may_add(is_set: bool) -> None:
    """The standard library's raise in the same place, so there is something to be seen here."""
    bare: Any = weakref.WeakSet() if is_set else weakref.WeakKeyDictionary()
    add: Callable[[Thing], object] = bare.add if is_set else lambda each: bare.setdefault(each, 1)
    assert raises_beside_another_thread(lambda: list(bare), add, 100_000)
    if is_set:
        found = members()
        assert not raises_beside_another_thread(found.alive, found.add, 3_000)
    else:
        kept = table()
        assert not raises_beside_another_thread(lambda: list(kept), lambda each: kept.put(each, 1), 3_000)


def test_a_set_has_the_members_that_are_alive() -> None:
    found, one, other = members(), Thing(), Thing()
    found.add(one, other)
    found.add(one)
    assert one in found
    assert set(found.alive()) == {one, other}
    found.discard(other, Thing())
    assert found.alive() == [one]
    del one
    gc.collect()
    assert found.alive() == []
    found.add(other)
    found.clear()
    assert other not in found


def test_a_table_has_the_keys_that_are_alive() -> None:
    kept, one, other = table(), Thing(), Thing()
    kept.put(one, 1)
    kept.put(other, 2)
    assert (kept[one], kept.get(other), kept.get(Thing())) == (1, 2, None)
    assert set(kept) == {one, other}
    assert (kept.pop(other), kept.pop(other)) == (2, None)
    assert other not in kept
    del one
    gc.collect()
    assert list(kept) == []


def test_the_collector_may_come_while_a_copy_is_made() -> None:
    """It removes dropped members without taking a lock."""
    found, things = members(), [Thing() for _ in range(10)]
    found.add(*things)
    with found._lock:
        del things[5:]
        gc.collect()
    assert set(found.alive()) == set(things)
