"""The scripts of the fault and shutdown tests: short training runs in which one thing goes wrong.

Each is like a user's script: it sets up the default group, wraps a model and trains. Errors are not caught, so they end
the process with a traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commlib.transport import point_to_point
from tests.multi.common import Mlp, data, mlp_loss, seeded, sgd
from tests.multi.notices import await_told, others, tell
from tests.multi.rank_worker import default_group_from_env
from tests.waiting import eventually

VICTIM = 1
GOOD_STEPS = 3
#: The time after which the tests consider a rank to hang.
HANG_S = 90.0
#: The timeout where nothing may wait for it: a rank that does has hung.
LONG_S = 150.0
#: The timeout where tests wait for it: longer than a busy machine may stall, as the steps before must succeed.
SHORT_S = 10.0


class Deep(nn.Module):
    """Eight layers, so that a backward has a middle and several buckets; `trap` is called in that middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(8)])
        self.trap: Callable[[], None] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for number, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(hidden))
            if number == 3 and self.trap is not None:
                hidden.register_hook(lambda gradient: self.trap())  # type: ignore[misc]
        return hidden


def report(**facts: object) -> None:
    """Write one line that the test parses, at once: other threads log meanwhile."""
    sys.stdout.write(f"REPORT {json.dumps(facts)}\n")
    sys.stdout.flush()


def report_error(error: Exception) -> None:
    """Report the error of a rank, and its time by the clock that all ranks share."""
    ranks = sorted(getattr(error, "ranks", ()))
    report(event="error", kind=type(error).__name__, message=str(error), ranks=ranks, at_s=time.monotonic())


def report_later(act: Callable[[], object]) -> None:
    """Report the error of a further use of the model, after the communication has ended."""
    try:
        act()
    except RuntimeError as later:
        ranks = sorted(getattr(later, "ranks", ()))
        report(event="later", message=str(later), kind=type(later).__name__, ranks=ranks)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stall() -> None:
    time.sleep(LONG_S)


def fail() -> None:
    raise RuntimeError("the user's own error")


TRAPS = {"die": die, "stop": stop, "stall": stall, "fail": fail}
TIMEOUTS_S = {"die": LONG_S, "stop": SHORT_S, "stall": SHORT_S, "fail": LONG_S}


def come_together(what: str) -> None:
    """Tell the others that this rank has come so far; the victim goes on when all have, so that they are past it."""
    tell(what)
    if dist.get_rank() == VICTIM:
        await_told(what, others())


def train_into_trap(kind: str, algorithm: str = "allreduce") -> None:
    """Train; `kind` happens on the victim in the middle of a backward. The others report their errors.

    With an `algorithm` that ends in ", exchanged", small all-to-alls are exchanges too, like those of large buckets.
    The error is raised again, so that the process ends as a user's would.
    """
    import commlib
    import commlib.errors

    rank = default_group_from_env(timeout_s=LONG_S)
    if algorithm.endswith(", exchanged"):
        algorithm = algorithm.removesuffix(", exchanged")
        point_to_point._LEAST_CHUNK = 1
    model = commlib.wrap(seeded(Deep), algorithm, timeout=TIMEOUTS_S[kind], bucket_cap_mb=0.01)
    for step in range(GOOD_STEPS):
        model.zero_grad()
        model(data(step, 4, 32)).sum().backward()
    report(event="trained", buckets=commlib.stats(model).num_buckets)
    come_together("trained")
    if rank == VICTIM:
        model.trap = TRAPS[kind]
    try:
        for step in range(3):
            model.zero_grad()
            model(data(step, 4, 32)).sum().backward()
    except commlib.errors.CommlibError as error:
        report_error(error)
        report_later(lambda: model(data(0, 4, 32)))
        raise


def train_weights_into_trap(kind: str, algorithm: str) -> None:
    """The same for algorithms on weights: the victim runs into `kind` in a backward, so it comes to no more rounds."""
    import commlib
    import commlib.errors

    rank = default_group_from_env(timeout_s=LONG_S)
    model = seeded(Deep)
    optimizer = sgd(model)
    commlib.wrap(model, algorithm, optimizer=optimizer, timeout=TIMEOUTS_S[kind], bucket_cap_mb=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data(number, 4, 32)).sum().backward()
        optimizer.step()

    for number in range(GOOD_STEPS):
        step(number)
    come_together("trained")
    if rank == VICTIM:
        model.trap = TRAPS[kind]
    try:
        for number in range(4):
            step(number)
    except commlib.errors.CommlibError as error:
        report_error(error)
        report_later(lambda: model(data(0, 4, 32)))
        raise


def train_into_trap_at_a_round(kind: str, algorithm: str) -> None:
    """Train; the victim runs into `kind` at the end of an optimizer step, where the others begin a round."""
    import commlib
    import commlib.errors

    rank = default_group_from_env(timeout_s=LONG_S)
    model = seeded(Deep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    traps: list[Callable[[], None]] = []
    optimizer.register_step_post_hook(lambda *_: [trap() for trap in traps] and None)  # before commlib's own
    instance = commlib.algorithms.get(algorithm)(period=2)
    commlib.wrap(model, instance, optimizer=optimizer, timeout=TIMEOUTS_S[kind], bucket_cap_mb=0.01)

    def train_steps(first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            model(data(step, 4, 32)).square().mean().backward()
            if rank == VICTIM and step == 5:
                traps.append(TRAPS[kind])
            optimizer.step()

    train_steps(0, 5)
    report(event="trained", rounds=commlib.stats(model).rounds)
    come_together("trained")
    try:
        train_steps(5, 9)
    except commlib.errors.CommlibError as error:
        report_error(error)
        report_later(lambda: model(data(0, 4, 32)))
        raise


def skip_backward_on_one_rank() -> None:
    """The victim leaves the loop one step early and goes on to something else: a classic of uneven data."""
    import commlib
    import commlib.errors

    rank = default_group_from_env(timeout_s=LONG_S)
    model = commlib.wrap(seeded(Deep), timeout=SHORT_S, bucket_cap_mb=0.01)
    for step in range(GOOD_STEPS + (rank != VICTIM)):
        model.zero_grad()
        try:
            model(data(step, 4, 32)).sum().backward()
        except commlib.errors.CommlibError as error:
            report_error(error)
            tell("failed")
            raise
    await_told("failed", others())


def wait_in_forward() -> None:
    """The victim is slow, but within the timeout: nothing may happen."""
    import commlib

    rank = default_group_from_env(timeout_s=LONG_S)
    model = commlib.wrap(seeded(Deep), timeout=LONG_S)
    for step in range(4):
        time.sleep(2.0 if rank == VICTIM and step == 2 else 0.0)
        model.zero_grad()
        model(data(step, 4, 32)).sum().backward()
    report(event="done")


def add_parameter_on_one_rank() -> None:
    """The victim's model grows after wrapping; it says so at its next forward, and the others must not hang."""
    import commlib
    import commlib.errors

    rank = default_group_from_env(timeout_s=LONG_S)
    model = commlib.wrap(seeded(Mlp), timeout=LONG_S)
    mlp_loss(model, 0).backward()
    come_together("trained")
    if rank == VICTIM:
        model.late = nn.Linear(3, 3)
    try:
        mlp_loss(model, 1).backward()
    except commlib.errors.CommlibError as error:
        report_error(error)
        raise


def wrap_on_one_rank_only() -> None:
    """The victim never calls `wrap`."""
    import commlib
    import commlib.errors

    rank = default_group_from_env(timeout_s=LONG_S)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S), dist.group.WORLD)  # that of the set-up, too
    if rank == VICTIM:
        await_told("failed", others())
        return
    try:
        commlib.wrap(seeded(Mlp), timeout=0.2 * SHORT_S)
    except commlib.errors.CommlibError as error:
        report_error(error)
        tell("failed")
        raise


# --- Shutdown --------------------------------------------------------------------------------------------------------


def num_threads() -> int:
    """Count the threads that Python knows of."""
    return threading.active_count()


def report_end(before: int, waits: bool) -> None:
    """Report the threads at the end; `waits` until they are as few as `before`: a busy machine may take a while."""
    assert not waits or eventually(lambda: num_threads() <= before), threading.enumerate()
    report(event="end", before=before, after=num_threads())


def train_some(model: nn.Module, steps: int = 3) -> None:
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()


def shut_down(way: str) -> None:
    """Train a few steps, then end the process in one of many ways."""
    import commlib

    default_group_from_env(timeout_s=LONG_S)
    before = num_threads()
    model = commlib.wrap(seeded(Mlp), timeout=LONG_S)
    train_some(model)
    ENDINGS[way](model)
    report_end(before, waits=way in ("unwrap-destroy", "destroy-unwrap"))


def destroy_the_group(way: str) -> None:
    """Train, and end the default group: threads of its backend that were alive at exit could abort the process."""
    import commlib

    default_group_from_env(timeout_s=LONG_S)
    model = commlib.wrap(seeded(Mlp), timeout=LONG_S)
    train_some(model)
    trained = num_gloo_threads(4)  # two of the default group, and two of commlib's
    if way == "unwrapped":
        commlib.unwrap(model)
    dist.destroy_process_group()
    left = num_gloo_threads(2 if way == "wrapped" else 0)  # commlib's end with the model or at exit
    report(event="destroyed", trained=trained, left=left)


def ask_a_destroyed_group() -> None:
    """Train, destroy the default group, and access members that need it."""
    import commlib
    from commlib.replica import replica_of
    from commlib.transport.groups import NODE_VARIABLE

    default_group_from_env(timeout_s=LONG_S)
    rank = dist.get_rank()
    model = commlib.wrap(seeded(Mlp), timeout=LONG_S)
    train_some(model)
    dist.destroy_process_group()
    os.environ[NODE_VARIABLE] = str(rank // 2)
    asked = {"join": lambda: model.join_process_group, "nodes": replica_of(model).engine.transport.split_by_node}
    for what, ask in asked.items():
        try:
            ask()
        except commlib.errors.CommlibError as error:
            report(event=what, kind=type(error).__name__, message=str(error))


def num_gloo_threads(expected: int, timeout_s: float = 60) -> int:
    """Count the threads of Gloo process groups, until they are as many as expected: they come and go with a delay."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = 0
        for name in pathlib.Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):
                found += "gloo_runloop" in name.read_text()
        if found == expected or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def shut_down_in_flight(way: str) -> None:
    """Train until a round over weights is under way in the background, then end the process."""
    import commlib

    default_group_from_env(timeout_s=LONG_S)
    before = num_threads()
    model = seeded(Mlp)
    optimizer = sgd(model)
    algorithm = commlib.algorithms.StreamingDiLoCo(period=8, fragments=2, delay=4)
    commlib.wrap(model, algorithm, optimizer=optimizer, timeout=LONG_S)
    for step in range(8):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()
    ENDINGS[way](model)
    report_end(before, waits=way in ("unwrap-destroy", "destroy-unwrap"))


def just_end(model: nn.Module) -> None:
    return


def destroy_only(model: nn.Module) -> None:
    dist.destroy_process_group()


def unwrap_then_destroy(model: nn.Module) -> None:
    import commlib

    commlib.unwrap(model)
    dist.destroy_process_group()


def destroy_then_unwrap(model: nn.Module) -> None:
    import commlib

    dist.destroy_process_group()
    commlib.unwrap(model)


def destroy_then_use(model: nn.Module) -> None:
    """A step after the group has gone is a clear error, not a hang."""
    import commlib.errors

    inputs = data(0, 5, 8)
    dist.destroy_process_group()
    with contextlib.suppress(commlib.errors.CommlibError):
        model(inputs).sum().backward()
        report(event="no error")


def exit_by_sys(model: nn.Module) -> None:
    sys.exit(3)


def exit_by_exception(model: nn.Module) -> None:
    mlp_loss(model, 0)
    raise KeyError("the user's own error")


def exit_in_backward(model: nn.Module) -> None:
    """All ranks fail in the middle of the same backward."""

    def trap(gradient: Tensor) -> None:
        raise ZeroDivisionError("in backward")

    model.first.weight.register_hook(trap)  # type: ignore[union-attr]
    mlp_loss(model, 0).backward()


def exit_with_forward_pending(model: nn.Module) -> None:
    model.loss = mlp_loss(model, 0)  # type: ignore[assignment]


def exit_with_accumulated(model: nn.Module) -> None:
    with model.no_sync():  # type: ignore[operator]
        mlp_loss(model, 0).backward()


def exit_by_interrupt(model: nn.Module) -> None:
    """Train until the test sends SIGINT."""
    print("training", flush=True)
    while True:
        train_some(model, 1)


ENDINGS: dict[str, Callable[[nn.Module], None]] = {
    "just-end": just_end,
    "destroy": destroy_only,
    "unwrap-destroy": unwrap_then_destroy,
    "destroy-unwrap": destroy_then_unwrap,
    "destroy-use": destroy_then_use,
    "sys-exit": exit_by_sys,
    "exception": exit_by_exception,
    "exception-in-backward": exit_in_backward,
    "forward-pending": exit_with_forward_pending,
    "accumulated": exit_with_accumulated,
    "interrupt": exit_by_interrupt,
}
