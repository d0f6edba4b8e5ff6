"""Members of an elastic job, forked from one process that has imported everything: python -m tests.elastic.member

Reads a line of JSON for each member to start, and prints "<name> pid <pid>". Members print lines that begin with their
name.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import hashlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import commlib
from commlib import elastic, hand_over
from commlib.algorithms.channels import Gradients
from commlib.elastic.transport import ElasticTransport
from commlib.engine.gradients.inputs import Inputs
from commlib.engine.session import Session
from commlib.hand_over import HandOver
from commlib.kernels import native
from commlib.outputs import tensors_in
from commlib.replica import replica_of
from tests.memory import storages
from tests.waiting import LIMIT_S


@dataclasses.dataclass
class Start:
    """A member to start.

    Attributes:
        name: Its name.
        address: The service.
        token: The secret.
        algorithm: The name of the algorithm, and its options.
        options: See above.
        trap: (place, number of the round): there the member prints "at <place>" and waits to be killed; at "copy" after
            that round. If the place is "", it prints "has <number>" when it has the result of the round.
        rounds: After this many rounds it leaves.
        members_at: Before the round of this number it waits until the view has this many members.
        seed: The seed of its weights.
        min_members: As for `join`.
        sleep_s: How long each step sleeps.
        width: The width of the model.
        timeout_s: The timeout of `join`.
        heartbeat_s: The heartbeats of `join`.
        leaves_on_sigterm: Whether a handler of SIGTERM calls `leave`.
        shares_scheduler: Whether new members receive the state of the scheduler.
        samples: The size of a dataset that a sampler draws from. 0: batches depend on the name and the round.
        checkpoint: A file that the member loads before `wrap` if it exists, and writes after its last round.
        forks_child: Whether it forks a process that survives it.
        standby: As for `join`.
        freezes: Whether the first layer is frozen.
        patience_s: How long a donor waits for the next step of its training thread.
        counts_memory: Whether the model is two matrices, and the member prints the bytes of all tensors beyond the
            model, the optimizer's state and the buckets.
    """

    name: str
    address: str
    token: str
    algorithm: str = "allreduce"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    trap: tuple[str, int] = ("", 0)
    rounds: int = 8
    seed: int = 0
    min_members: int = 1
    members_at: dict[str, int] = dataclasses.field(default_factory=dict)
    sleep_s: float = 0.0
    width: int = 64
    timeout_s: float = 60.0
    heartbeat_s: float = 60.0
    leaves_on_sigterm: bool = False
    shares_scheduler: bool = True
    samples: int = 0
    checkpoint: str = ""
    forks_child: bool = False
    standby: bool = False
    freezes: bool = False
    patience_s: float = 2.0
    counts_memory: bool = False


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


#: Places at which a trap stops a member before a method runs, or after it.
_BEFORE: dict[str, tuple[type, str]] = {
    "encode": (Inputs, "keep"),
    "give": (HandOver, "_state"),
    "send": (Session, "attempt"),
    "take": (HandOver, "_load"),
    "copy": (HandOver, "copy_for"),
    "complete": (ElasticTransport, "note_complete"),
    "agreed": (ElasticTransport, "note_agreed"),
}
_AFTER: dict[str, tuple[type, str]] = {"collective": (ElasticTransport, "issue")}


class Trap:
    """Stops the member at one place of one round."""

    def __init__(self, start: Start, model: Any, optimizer: Any) -> None:
        self._start, self._model = start, model
        self._is_released = False
        signal.signal(signal.SIGUSR1, lambda *_: self._release())
        place, _ = start.trap
        stop = lambda *_: self._stop()  # noqa: E731
        if place == "":
            _insert(ElasticTransport, "note_complete", before=self._say_it_has_the_result)
        elif place == "forward":
            model.register_forward_pre_hook(stop)
        elif place == "backward":
            model[-1].weight.register_hook(stop)
        elif place == "last gradient":
            model[0].weight.register_hook(stop)
        elif place == "optimizer":
            optimizer.register_step_pre_hook(lambda *_: self._stop(done=1))
        elif place in _BEFORE:
            _insert(*_BEFORE[place], before=stop)
        else:
            _insert(*_AFTER[place], after=stop)

    @property
    def _num_rounds(self) -> int:
        return replica_of(self._model).engine.session.num_rounds

    def _say_it_has_the_result(self) -> None:
        if self._num_rounds == self._start.trap[1] - 1:
            say(self._start.name, "has", self._start.trap[1])

    def _release(self) -> None:
        self._is_released = True
        gc.collect()  # nothing is left of former views for later

    def _stop(self, done: int = 0) -> None:
        place, number = self._start.trap
        is_due = self._num_rounds >= number if place == "copy" else self._num_rounds - done == number - 1
        if place == "take" or is_due:
            say(self._start.name, "at", place)
            while not self._is_released:  # a signal may reach another thread, so it would not always end a pause
                time.sleep(0.02)


def _insert(
    cls: type, method: str, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    """Run functions before and after a method of a class."""
    real = getattr(cls, method)

    def run(*args: Any) -> Any:
        before()
        result = real(*args)
        after()
        return result

    setattr(cls, method, run)


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(each.detach().contiguous().numpy().tobytes() for each in tensors)).hexdigest()[:12]


def make_model(width: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 10))


def batch(name: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(1000 * number + sum(name.encode()))
    return torch.randn(8, 32, generator=data), torch.randint(0, 10, (8,), generator=data)


def batches(start: Start, members: elastic.Members) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches without end. Those of a sampler are printed as "drew <round> <epoch> <indices>"."""
    if not start.samples:
        while True:
            yield batch(start.name, members.num_rounds + 1)
    data = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(start.samples, 32, generator=data), torch.randint(10, (start.samples,), generator=data)
    dataset = TensorDataset(torch.arange(start.samples), inputs, labels)
    sampler = elastic.Sampler(dataset, 2, members)
    loader = members.loader(DataLoader(dataset, batch_sampler=sampler, num_workers=1))
    yield inputs, labels  # the sampler is made before `wrap`
    while True:
        epoch = sampler.epoch
        for indices, *rest in loader:
            say(start.name, "drew", members.num_rounds + 1, epoch, *indices.tolist())
            yield rest[0], rest[1]


def fork_child(name: str) -> None:
    if (pid := os.fork()) == 0:
        time.sleep(LIMIT_S)
        os._exit(0)
    say(f"{name}-child", "pid", pid)


def kept_beyond(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors beyond the model, the optimizer's state and the buckets."""
    tensors = [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
    tensors += [*model.state_dict().values(), *(each.flat for each in replica_of(model).engine.channels[-1].buckets)]
    known = {each.untyped_storage().data_ptr() for each in tensors}
    return sum(nbytes for address, nbytes in storages().items() if address not in known)


def train(start: Start) -> None:
    torch.manual_seed(start.seed)
    hand_over._PATIENCE_S = start.patience_s
    members = elastic.join(
        start.address,
        start.name,
        token=start.token,
        timeout=start.timeout_s,
        heartbeat_s=start.heartbeat_s,
        min_members=start.min_members,
        standby=start.standby,
    )
    say(start.name, "joined", members.id)
    model = make_model(start.width)
    if start.counts_memory:
        matrices = [torch.nn.Linear(*of, bias=False) for of in ((32, start.width), (start.width, 32))]
        model = torch.nn.Sequential(*matrices)
    if start.freezes:
        model[0].requires_grad_(False)
    made = commlib.algorithms.create(start.algorithm)
    if start.options:
        made = type(made)(**start.options)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer: Any = (
        torch.optim.SGD(trained, lr=0.05, momentum=0.0 if made.has_momentum else 0.9)
        if made.optimizer_type is None
        else made.optimizer_type(trained, lr=0.05)  # type: ignore[call-arg]
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    if start.shares_scheduler:
        members.share("scheduler", scheduler)
    data = batches(start, members)
    next(data)
    if start.checkpoint and os.path.exists(start.checkpoint):
        members.load_state_dict(torch.load(start.checkpoint))
    Trap(start, model, optimizer)
    if start.leaves_on_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: members.leave())
    commlib.wrap(model, made, optimizer=optimizer, process_group=members, bucket_cap_mb=0.004)
    say(start.name, "entered", members.num_rounds, members.world_size)
    if start.forks_child:
        fork_child(start.name)
    of_weights = not isinstance(made.channel, Gradients)
    while (number := members.num_rounds + 1) <= start.rounds:
        if count := start.members_at.get(str(number)):
            while members.view is None or len(members.view.ids) < count:
                time.sleep(0.002)
        inputs, labels = next(data)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
        time.sleep(start.sleep_s)
        states = [each for state in optimizer.state.values() for each in state.values()]
        tensors = [*model.state_dict().values(), *(each for each in states if isinstance(each, torch.Tensor))]
        if of_weights:
            if members.num_rounds < number:  # replicas differ within a period
                continue
            shared = lambda: tensors_in(replica_of(model).engine.algorithm.shared_state_dict())  # noqa: E731
            tensors = [*(shared() if made.channel.in_background else model.parameters())]
        rate, total = optimizer.param_groups[0]["lr"], sum(float(p.detach().double().sum()) for p in model.parameters())
        say(start.name, "round", number, members.world_size, digest(tensors), rate, total)
    if start.counts_memory:
        say(start.name, "memory", kept_beyond(model, optimizer))
    if start.checkpoint:
        torch.save(members.state_dict(), start.checkpoint)
    members.close()
    say(start.name, "left", *(f"{name}={value}" for name, value in commlib.stats(model).as_dict().items()))


def main() -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports much on first use
    native.load()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, threads  # they would be missing in forked members
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    say("ready")
    for line in sys.stdin:
        start = Start(**json.loads(line))
        if (pid := os.fork()) == 0:
            faulthandler.register(signal.SIGUSR2)
            logging.basicConfig(level=logging.INFO, format=f"{start.name} log %(message)s", stream=sys.stdout)
            try:
                train(start)
            except BaseException as error:
                say(start.name, "failed", type(error).__name__, str(error).replace("\n", " "))
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.setpgid(pid, pid)  # with the workers of its DataLoader
        say(start.name, "pid", pid)


if __name__ == "__main__":
    main()
