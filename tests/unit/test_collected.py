"""Endings that the collector asks for: outside of what it interrupted, once, and before the interpreter has gone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from commlib.transport.collected import Finalizer
from tests.structure import PACKAGE, sources
from tests.waiting import LIMIT_S, eventually


class Owner:
    """Has what must be ended."""

    def __init__(self, end: object) -> None:
        self.finalizer = Finalizer(self, end)  # type: ignore[arg-type]


def reapers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "commlib-reaper"]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    assert eventually(lambda: not reapers())
    yield
    assert eventually(lambda: not reapers())


def test_an_ending_may_take_a_lock_that_was_held_where_its_owner_went() -> None:
    lock, ended = threading.Lock(), threading.Event()

    def end() -> None:
        with lock:
            ended.set()

    owner = Owner(end)
    with lock:
        del owner  # where the collector would have come, too
        assert not ended.is_set()
    assert ended.wait(LIMIT_S)


def test_an_ending_may_join_the_thread_on_which_its_owner_went() -> None:
    ended = threading.Event()

    def run() -> None:
        owners.clear()

    thread = threading.Thread(target=run)

    def end() -> None:
        thread.join(LIMIT_S)
        if not thread.is_alive():
            ended.set()

    owners = [Owner(end)]
    thread.start()
    assert ended.wait(LIMIT_S)


def test_an_ending_is_done_once_by_whom_it_was_left_to() -> None:
    calls: list[str] = []
    owner = Owner(lambda: calls.append("reaper"))
    assert owner.finalizer.detach()
    assert not reapers(), "the last one takes the thread with it"
    assert not owner.finalizer.detach()
    del owner
    assert calls == []


def test_an_ending_that_fails_is_said_and_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    first, second = Owner(lambda: 1 // 0), Owner(ended.set)
    del first
    del second
    assert ended.wait(LIMIT_S)
    assert "did not end well" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_one_thread_serves_all_and_another_comes_after_it() -> None:
    ended: list[int] = []
    for _ in range(3):
        owners = [Owner(lambda idx=idx: ended.append(idx)) for idx in range(5)]
        assert len(reapers()) == 1
        owners.clear()
        assert eventually(lambda: not reapers())
    assert sorted(ended) == sorted(3 * [*range(5)])


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_thread_of_its_own_and_leaves_its_parents_things() -> None:
    calls: list[str] = []
    owner = Owner(lambda: calls.append("the parent's"))
    pid = os.fork()
    if pid == 0:
        ended = threading.Event()
        del owner
        own = Owner(ended.set)
        del own
        os._exit(0 if ended.wait(LIMIT_S) and not calls else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert calls == []
    del owner
    assert eventually(lambda: calls == ["the parent's"])


_SCRIPT = """
import sys, threading, time
from commlib.transport.collected import Finalizer

class Owner:
    pass

def end(word, seconds):
    time.sleep(seconds)
    print(word, threading.current_thread().name, flush=True)

collected, kept = Owner(), [Owner(), Owner()]
Finalizer(collected, lambda: end("collected", 0.5))
for idx, each in enumerate(kept):
    Finalizer(each, lambda idx=idx: end(f"kept {idx}", 0.0))
del collected
"""


def test_at_exit_nothing_is_left_to_be_ended() -> None:
    """What was begun is waited for; the rest is done by the main thread, the latest first."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["collected commlib-reaper", "kept 1 MainThread", "kept 0 MainThread"]
    assert done.stderr == ""


def test_nothing_else_is_called_by_the_collector() -> None:
    """See [Note: collected anywhere]: what takes locks or joins threads goes through `Finalizer`."""

    def uses(path: Path) -> bool:
        return re.search(r"weakref\.finalize|def __del__", path.read_text(encoding="utf-8")) is not None

    assert [path.relative_to(PACKAGE).as_posix() for path in sources() if uses(path)] == ["transport/collected.py"]
