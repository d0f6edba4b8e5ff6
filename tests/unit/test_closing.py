"""The closing thread ends things once, outside of the code that the collector interrupted, in time, and at exit."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib import locks
from commlib.replica import replica_of
from commlib.transport import closing
from commlib.transport.closing import Finalizer, drain
from tests.waiting import eventually

WAIT_S = 30.0


class Owner:
    """Owns a thing that must be ended."""

    def __init__(self, end: Callable[[], object], what: str = "a thing") -> None:
        self.finalizer = Finalizer(self, end, what)


def closing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "commlib-closing"]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    gc.collect()
    assert eventually(lambda: not closing_threads())
    yield
    assert eventually(lambda: not closing_threads())


# --- finalizers ------------------------------------------------------------------------------------------------------


def test_a_finalizer_does_one_put() -> None:
    owner = Owner(lambda: None)
    (watched,) = closing._closing._watched.values()
    found = watched.finalize.peek()
    assert found is not None
    _, function, args, kwargs = found
    assert function == closing._closing._queue.put
    assert isinstance(closing._closing._queue, queue.SimpleQueue)
    assert (args, kwargs) == ((watched.ending,), {})
    del owner


def test_an_ending_may_take_a_lock_that_was_held_where_its_owner_went() -> None:
    lock, ended = threading.Lock(), threading.Event()

    def end() -> None:
        with lock:
            ended.set()

    owner = Owner(end)
    with lock:
        del owner  # where the collector would have come, too
        assert not ended.is_set()
    assert ended.wait(WAIT_S)


def test_an_ending_may_join_the_thread_on_which_its_owner_went() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=lambda: owners.clear())

    def end() -> None:
        thread.join(WAIT_S)
        if not thread.is_alive():
            ended.set()

    owners = [Owner(end)]
    thread.start()
    assert ended.wait(WAIT_S)


def test_owners_may_go_within_the_lock_of_the_closing_thread_itself() -> None:
    ended = threading.Event()
    owner = Owner(ended.set)
    with closing._closing._lock:
        del owner
    assert ended.wait(WAIT_S)


def test_an_ending_is_done_once_by_whom_it_was_left_to() -> None:
    calls: list[str] = []
    owner = Owner(lambda: calls.append("closing thread"))
    assert owner.finalizer.detach()
    assert not closing_threads(), "the last one ends the thread, and waits for it"
    assert not owner.finalizer.detach()
    del owner
    drain()
    assert calls == []


def test_an_ending_that_fails_is_said_and_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    first, second = Owner(lambda: 1 // 0, "the first thing"), Owner(ended.set)
    del first
    del second
    assert ended.wait(WAIT_S)
    assert "ending the first thing, which was dropped without commlib.unwrap, failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_one_thread_serves_all_and_another_comes_after_it() -> None:
    ended: list[int] = []
    for _ in range(3):
        owners = [Owner(lambda idx=idx: ended.append(idx)) for idx in range(5)]  # type: ignore[misc]
        assert len(closing_threads()) == 1
        owners.clear()
        assert eventually(lambda: not closing_threads())
    assert sorted(ended) == sorted(3 * [*range(5)])


# --- draining --------------------------------------------------------------------------------------------------------


def test_draining_waits_for_what_was_dropped_and_for_what_comes_of_it() -> None:
    """As a model that is forgotten frees its communicators, whose endings come into the queue later."""
    go_on, ended, kept = threading.Event(), list[str](), Owner(lambda: None)
    inner = [Owner(lambda: ended.append("inner"))]

    def end_outer() -> None:
        assert go_on.wait(WAIT_S)
        inner.clear()
        ended.append("outer")

    outer = Owner(end_outer)
    del outer
    drained = threading.Thread(target=lambda: (drain(), ended.append("drained")))
    drained.start()
    go_on.set()
    drained.join(WAIT_S)
    assert ended == ["outer", "inner", "drained"]
    assert len(closing_threads()) == 1, "something is watched still"
    assert kept.finalizer.detach()


def test_draining_waits_for_a_thread_that_has_nothing_left_to_watch() -> None:
    for _ in range(50):
        owner = Owner(lambda: None)
        del owner
        drain()
        assert not closing_threads()


def test_several_may_drain_at_once() -> None:
    ended: list[int] = []
    owners = [Owner(lambda idx=idx: ended.append(idx)) for idx in range(20)]  # type: ignore[misc]
    threads = [threading.Thread(target=drain) for _ in range(4)]
    for thread in threads:
        owners.pop()
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert sorted(ended) == [16, 17, 18, 19]


def test_an_ending_may_drain() -> None:
    ended = threading.Event()
    owner = Owner(lambda: (drain(), ended.set()))
    del owner
    assert ended.wait(WAIT_S)


def test_an_ending_that_hangs_is_named_and_left_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "LIMIT_S", 0.2)
    over, ended = threading.Event(), threading.Event()
    hanging, behind = Owner(lambda: over.wait(WAIT_S), "the backend of a card"), Owner(ended.set)
    del hanging
    del behind
    with caplog.at_level(logging.WARNING, "commlib"):
        drain()
    assert "the backend of a card did not end within 0.2 s; it is abandoned" in caplog.text
    assert not ended.is_set()
    drain()  # nobody is there to be waited for, and no thread is started
    assert len(closing_threads()) == 1
    monkeypatch.setattr(closing, "LIMIT_S", WAIT_S)
    kept = Owner(lambda: None)  # as in the next `wrap`
    drain()
    assert ended.is_set(), "the new thread takes over the queue"
    over.set()
    assert kept.finalizer.detach()


# --- the exit --------------------------------------------------------------------------------------------------------

_SCRIPT = """
import atexit, threading, time, weakref
from commlib.transport import closing

class Owner:
    pass

def end(word, seconds):
    time.sleep(seconds)
    print(word, threading.current_thread().name, flush=True)

def no_thread(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

first, last = Owner(), Owner()
weakref.finalize(first, print, "another's, made first", flush=True)
collected, kept = Owner(), [Owner(), Owner()]
closing.Finalizer(collected, lambda: end("collected", 0.5), "what was collected")
for idx, each in enumerate(kept):
    closing.Finalizer(each, lambda idx=idx: end(f"kept {idx}", 0.0), f"what was kept: {idx}")
closing.Finalizer(first, lambda: print("is not to be ended"), "an entry", is_ended_at_exit=False)
weakref.finalize(last, print, "another's, made last", flush=True)
del collected
atexit.register(lambda: setattr(threading.Thread, "start", no_thread))
"""


def run_script(text: str) -> tuple[list[str], str]:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines(), done.stderr


def test_at_exit_the_closing_thread_ends_what_is_left_the_latest_first() -> None:
    """`weakref`'s own function at exit comes later where another library has used it before."""
    said, errors = run_script(_SCRIPT)
    own = ["collected commlib-closing", "kept 1 commlib-closing", "kept 0 commlib-closing"]
    assert said == [*own, "another's, made last", "another's, made first"]
    assert errors == ""


def test_at_exit_what_does_not_end_is_named_and_holds_up_nobody() -> None:
    hanging = _SCRIPT.replace('end("collected", 0.5)', "threading.Event().wait()")
    said, errors = run_script(hanging.replace("class Owner", "closing.LIMIT_S = 0.3\n\nclass Owner"))
    assert said == ["another's, made last", "another's, made first"]
    assert errors.splitlines() == [
        "what was collected did not end within 0.3 s; it is abandoned",
        "these had not ended at exit: what was kept: 0, what was kept: 1",
    ]


# --- a fork ----------------------------------------------------------------------------------------------------------


def ends_well(run: Callable[[], bool]) -> bool:
    """Fork; return whether `run` returns True in the child."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if run() else 1)
        os._exit(2)
    deadline, found = time.monotonic() + 2 * WAIT_S, (0, 0)
    while found == (0, 0) and time.monotonic() < deadline:
        found = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if found == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found[0] == pid and os.waitstatus_to_exitcode(found[1]) == 0


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_thread_of_its_own_and_leaves_its_parents_things() -> None:
    calls: list[str] = []
    owners = [Owner(lambda: calls.append("the parent's")) for _ in range(2)]

    def run() -> bool:
        owners.pop()
        drain()
        was_left_alone = not closing_threads() and not owners[0].finalizer.detach()
        own, ended = [Owner(lambda: ended.set())], threading.Event()
        own.clear()
        drain()
        return was_left_alone and ended.is_set() and not calls and not closing_threads()

    assert ends_well(run)
    assert calls == []
    owners.clear()
    assert eventually(lambda: calls == ["the parent's"] * 2)


@contextlib.contextmanager
def held_elsewhere(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock on another thread in the block."""
    is_held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            over.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(WAIT_S)
    yield
    over.set()
    thread.join(WAIT_S)


def trains_alone() -> bool:
    """Wrap and unwrap a model whose rounds the driver's thread runs."""
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu")
    commlib.wrap(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    replica_of(model).engine.session.run("nothing", (_ for _ in ()))
    commlib.unwrap(model)
    return not closing_threads()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_locks_that_are_held_at_a_fork_are_free_in_the_child() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    models: list[nn.Module] = [commlib.wrap(nn.Linear(2, 2)), commlib.wrap(nn.Linear(2, 2))]
    held = dict(locks.of_process)
    assert len(held) >= 8

    def run() -> bool:
        models.pop()
        drain()
        for lock in held.values():
            if not lock.acquire(timeout=0):
                return False
            lock.release()
        return trains_alone()

    try:
        with contextlib.ExitStack() as stack:
            for lock in held.values():
                stack.enter_context(held_elsewhere(lock))
            assert ends_well(run)
    finally:
        models.clear()
        dist.destroy_process_group()
