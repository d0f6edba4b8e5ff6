"""The program of a rank's process: either a pooled rank that serves jobs, or a separate rank for one function.

    python -m tests.multi.rank_worker <fd>     forks a process for each function that arrives on the socket <fd>

A pooled rank is one whose function is `serve`. A forked process returns from here when its function has, and does not
change the interpreter's exit, so that shutdown tests see the same exit as a user's script. Nothing that is imported
before the fork has threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple

from tests.waiting import eventually

_PR_SET_PDEATHSIG = 1
# The connection of this process to the pool's store, by port: for each, torch asks a name server who the peer is.
_clients: dict[int, Any] = {}
_num_modules = 0


class Job(NamedTuple):
    """One function to run on the ranks `0 .. world_size - 1`."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    store: tuple[int, str]  # port and prefix
    timeout_s: float


class ForkJob(NamedTuple):
    """One function to run in a separate process; without a log, its output goes where the forker's output goes."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    environment: dict[str, str]
    log_path: str | None


class Outcome(NamedTuple):
    """How a job ended on one rank.

    Attributes:
        kind: "ok", "error" or "skip".
        value: The result, or the words.
        num_loops: Threads of Gloo that are still there: one for each group that something keeps.
    """

    kind: str
    value: Any
    num_loops: int = 0


def resolve(module: str, qualname: str) -> Callable[..., Any]:
    """Return the function `qualname` of `module`; of a test made by `on_ranks`, the body that the ranks run."""
    target: Any = importlib.import_module(module)
    for part in qualname.split("."):
        target = getattr(target, part)
    return getattr(target, "rank_body", target)


def import_torch() -> None:
    """Import torch, then turn every warning into an error (torch's own import is not ours to judge)."""
    import torch
    import torch.distributed
    import torch.nn.parallel

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # A future change of torch's own C++ logging, not of anything that runs here.
    warnings.filterwarnings("default", message=".*TORCH_CPP_LOG_LEVEL.*")
    # Warnings that torch 2.11 emits once per process, whatever a program does.
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
    warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
    # A plugin that imports a name from its former place.
    warnings.filterwarnings("ignore", message="commlib.algorithms.families.policy has moved")
    # Tests that combine an algorithm and an optimizer do not examine the loss of that combination.
    warnings.filterwarnings("ignore", message=".* (more loss than all-reduce|not measured) with")


def die_with_parent() -> None:
    """Ask the kernel to end this process when the test process ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class BackgroundFailures:
    """Collects exceptions that no test can see: those that end a thread, and those raised in destructors."""

    def __init__(self) -> None:
        self.found: list[str] = []
        threading.excepthook = self._on_thread
        sys.unraisablehook = self._on_unraisable

    def _on_thread(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "?"
        trace = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        self.found.append(f"exception ended the thread {name}:\n{trace}")

    def _on_unraisable(self, args: Any) -> None:
        trace = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        self.found.append(f"exception ignored in {args.object!r}: {args.err_msg}\n{trace}")

    def take(self) -> list[str]:
        found, self.found = self.found, []
        return found


def init_group(job: Job) -> None:
    """Set up the default Gloo group of a pooled job over a fresh part of the pool's store."""
    import torch.distributed as dist

    port, prefix = job.store
    timeout = datetime.timedelta(seconds=job.timeout_s)
    client = _clients.get(port) or dist.TCPStore("127.0.0.1", port, is_master=False)
    client.set_timeout(timeout)
    _clients[port] = client
    store = dist.PrefixStore(prefix, client)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout)


#: By process: the environment in which its first job began.
_environment: dict[int, dict[str, str]] = {}


def reset_process() -> None:
    """Give every job the same start, whatever the one before it did."""
    import torch

    torch.default_generator.manual_seed(1234)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    first = _environment.setdefault(os.getpid(), dict(os.environ))
    if first != os.environ:
        os.environ.clear()
        os.environ.update(first)


def run_in_group(job: Job) -> Any:
    """Run the job's function inside its own default group and destroy the group afterwards."""
    import torch.distributed as dist

    reset_process()
    function = resolve(job.module, job.qualname)
    init_group(job)
    try:
        dist.barrier()  # a rank that is done at once must not leave while another still connects to it
        result = function(*job.args, **job.kwargs)
        gc.collect()  # DDP must not be the last to let go of the group: it may wait for Gloo's thread, and that for it
        with contextlib.suppress(RuntimeError):  # a rank that failed is gone, and reports for itself
            if dist.is_initialized():
                dist.barrier()
        return result
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_job(job: Job, background: BackgroundFailures) -> Outcome:
    """Run a job; never raises. Warning filters that the job sets end with it."""
    try:
        with warnings.catch_warnings():
            outcome = Outcome("ok", run_in_group(job))
    except BaseException as error:
        kind = "skip" if type(error).__name__ == "Skipped" else "error"
        text = str(error) if kind == "skip" else traceback.format_exc()
        traceback.clear_frames(error.__traceback__)
        _clients.clear()  # a thread that is left behind may wait in it
        outcome = Outcome(kind, text)
    gc.collect()
    job.kwargs.clear()  # an algorithm in it knows the model
    found = background.take() + left_behind()
    freeze_new_modules()  # last: a model that a thread still uses would never be collected
    if found and outcome.kind == "ok":
        return Outcome("error", "\n".join(found))
    return outcome


#: How long threads that are ending may take, in seconds each.
_ENDING_S = 0.2
#: Threads that jobs have left behind in this process, and that are known.
_left: set[threading.Thread] = set()


def left_behind() -> list[str]:
    """Return a description of communication threads that a job has left running, after its models were released."""
    new = {thread for thread in threading.enumerate() if thread.name.startswith("commlib-")} - _left

    def are_gone() -> bool:
        gc.collect()  # objects that the job left in use may be free by now
        return not any(thread.is_alive() for thread in new)

    for thread in new:
        thread.join(_ENDING_S)
    if not any(thread.is_alive() for thread in new) or eventually(are_gone):
        return []
    left = {thread for thread in new if thread.is_alive()}
    _left.update(left)
    return [f"these threads are left behind: {sorted(thread.name for thread in left)}"]


def freeze_new_modules() -> None:
    """Exclude the objects of modules that were imported since the last call from all later collections.

    Objects that were frozen before may be garbage now, such as a trainer that a library kept, and its model.
    """
    global _num_modules
    if len(sys.modules) != _num_modules:
        _num_modules = len(sys.modules)
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def encode(outcome: Outcome) -> bytes:
    """Pickle an outcome; a result that cannot be pickled becomes an error that says so."""
    try:
        return pickle.dumps(tuple(outcome))
    except Exception as error:
        return pickle.dumps(("error", f"the result of the job cannot be pickled: {error!r}"))


def num_loops() -> int:
    """Return how many of Gloo's event loops run in this process."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as name:  # it may end meanwhile
            found += name.read().startswith("gloo_tcp_loop")
    return found


def serve(fd: int, stack_path: str) -> None:
    """Serve jobs from the socket `fd` until it closes; SIGUSR1 lets this process write its stacks to a file."""
    connection = Connection(fd)
    stack_file: io.TextIOBase = open(stack_path, "w")  # noqa: SIM115 (open for the life of the process)
    background = BackgroundFailures()
    connection.send_bytes(b"ready")
    while True:
        try:
            job = Job(*pickle.loads(connection.recv_bytes()))
        except EOFError:
            return
        faulthandler.unregister(signal.SIGUSR1)  # a trainer in the job before may have set the signal's default action
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        outcome = run_job(job, background)
        connection.send_bytes(encode(outcome._replace(num_loops=num_loops())))


def serve_forks(fd: int) -> None:
    """Fork a process for every job on the socket `fd` until that closes; returns in each of them too.

    Answers with pairs of process id and exit code, or None in its place for a process that has just been started.
    """
    die_with_parent()
    connection = Connection(fd)
    sys.path[:] = pickle.loads(connection.recv_bytes())
    import_torch()
    for name in ("torch._dynamo", "commlib"):  # the first optimizer imports the former
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # an exit that looks through all of torch's objects copies every page of them
    assert threading.active_count() == 1
    running: dict[int, int] = {}  # ids by file descriptor
    while True:
        ready = wait([connection, *running])
        for ended in set(ready) & set(running):
            os.close(ended)  # type: ignore[arg-type]
            pid, status = os.waitpid(running.pop(ended), 0)  # type: ignore[arg-type]
            connection.send_bytes(pickle.dumps((pid, os.waitstatus_to_exitcode(status))))
        if connection in ready:
            try:
                parts, is_given = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            given = [recv_handle(connection)] if is_given else []
            pid = os.fork()
            if pid == 0:
                connection.close()
                return run_once(ForkJob(*parts), *given)
            for fd in given:
                os.close(fd)
            running[os.pidfd_open(pid)] = pid
            connection.send_bytes(pickle.dumps((pid, None)))


def run_once(job: ForkJob, *given: int) -> None:
    """Run one function in this fresh process, as a script of its own would, and let the interpreter exit in its way."""
    die_with_parent()
    os.setsid()
    if job.log_path is not None:
        log = os.open(job.log_path, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
    os.environ.clear()
    os.environ.update(job.environment)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    resolve(job.module, job.qualname)(*given, *job.args)


def default_group_from_env(timeout_s: float = 30.0) -> int:
    """Set up the default group of a rank of its own, over the store that the test process hosts; returns the rank."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), world_size, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return rank


if __name__ == "__main__":
    # The module object that tests import, not this `__main__` copy, so that its classes are the ones they see.
    importlib.import_module("tests.multi.rank_worker").serve_forks(int(sys.argv[1]))
