"""Simulations in processes of their own: the same results, and nothing left however it ends."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from commlib.errors import CommlibError
from commlib.network import presets
from commlib.simulation import compare
from commlib.simulation.workers import on_all_cores
from tests.unit.test_compare import NETWORK, OPTIONS, SMALL
from tests.waiting import LIMIT_S, eventually

MANY = 100
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


def test_few_simulations_stay_in_this_process():
    with on_all_cores(3) as run:
        assert run is map


def test_the_results_are_those_of_one_process():
    chosen = compare.candidates("all", several_per_node=True)
    arguments = (SMALL, NETWORK, presets.device("v100"), chosen, OPTIONS)
    seen: list[str] = []
    with on_all_cores(MANY) as run:
        assert run is not map
        pids = set(run(_pid, range(MANY)))
        found = compare.compare(*arguments, seen.append, run)
    assert os.getpid() not in pids
    assert seen == ["ddp", *chosen]
    alone = compare.compare(*arguments)
    assert found.as_dict() == alone.as_dict()
    assert found.results() == alone.results()


def test_a_process_that_is_killed_is_an_error():
    with pytest.raises(CommlibError, match="a simulation process was killed"), on_all_cores(MANY) as run:
        list(run(_end, [1]))


def test_an_interrupt_waits_until_all_processes_have_been_started():
    started = []

    def numbers():  # is read while they are started
        other = threading.Thread(target=_be_interrupted)
        other.start()
        other.join()
        started.append(True)
        yield from range(MANY)

    with pytest.raises(KeyboardInterrupt), on_all_cores(MANY) as run:
        run(_pid, numbers())
    assert started
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.thin
@pytest.mark.parametrize(
    "after_s", [0.0, pytest.param(0.1, marks=pytest.mark.slow), 3.0]
)  # while processes start, and when they simulate
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_command_is_ended(way, after_s):
    command = [sys.executable, "-m", "commlib", "compare", "--workload", "bert-large", "--steps", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert eventually(lambda: len(_in_session(process.pid)) >= 3)  # itself and its workers
        time.sleep(after_s)
        if way is signal.SIGINT:
            os.killpg(process.pid, way)  # as a terminal does
        else:
            process.send_signal(way)
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # or leaving the block would wait for its end
            raise
    assert eventually(lambda: not _in_session(process.pid))
    assert process.returncode == (130 if way is signal.SIGINT else -signal.SIGKILL)
    # A process that starts while its parent is killed finds no task to read, which Python says before any code of ours.
    unread = output.count("reduction.pickle.load(from_parent)") if way is signal.SIGKILL else 0
    assert output.count("Traceback") <= unread, output


def _be_interrupted() -> None:
    """Be the thread that the kernel chose: any that does not block the signal."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


def _end(code: int) -> None:
    os._exit(code)


def _pid(_: int) -> int:
    time.sleep(0.01)
    return os.getpid()


def _in_session(session: int) -> list[str]:
    """Return the processes of a session that are not mere entries in the table."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, fields = entry.read_text().rpartition(")")
        except OSError:
            continue
        state, _, _, own = fields.split()[:4]
        if int(own) == session and state not in "ZX":
            found.append(entry.parent.name)
    return found
