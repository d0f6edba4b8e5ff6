"""Rounds over weights or optimizer state: at the end of optimizer steps, waited for at once or steps later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlib.algorithms.base import Algorithm, Context
from commlib.engine import plan as plans
from commlib.engine.bucket import Bucket, tensors_of
from commlib.engine.plan import Parameter
from commlib.engine.planner import INITIAL_CAP_BYTES
from commlib.engine.policy import Schedule
from commlib.engine.scheduler import Driver, Round, Task
from commlib.transport.base import Communication, Communicator, Transport


class WeightRounds:
    """The buckets of an algorithm whose `Traits.tensors` are weights or optimizer state, and their rounds.

    A round that is waited for replaces the tensors by its result. One in the background works on a copy taken at its
    start; its effect, `result - copy`, is added to the tensors when it is taken, so that the steps made meanwhile are
    kept (BAGUA's asynchronous model averaging does the same).

    Args:
        parameters: The parameters, in the model's order.
        algorithm: What to do with a bucket.
        schedule: Says when rounds start and are taken; shared with the engine.
        transport: A communicator used by these rounds alone.
        driver: The device's driver.
        optimizer: Its step ends what `Traits` counts.
        cap_bytes: Size of a bucket.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        algorithm: Algorithm,
        schedule: Schedule,
        transport: Transport,
        driver: Driver,
        optimizer: torch.optim.Optimizer,
        cap_bytes: int = INITIAL_CAP_BYTES,
    ) -> None:
        self._algorithm = algorithm
        self._schedule = schedule
        self._transport = transport
        self._driver = driver
        self._optimizer = optimizer
        self._comm = Communicator(transport.rank, transport.world_size)
        dense = [Parameter(p.name, p.param, sparse=False, group=p.group) for p in parameters]
        built = plans.build(plans.initial(dense, cap_bytes), dense, plans.make_slots(dense))
        self.buckets = [bucket for bucket in built if isinstance(bucket, Bucket)]
        self._copies = [torch.empty_like(b.flat) for b in self.buckets] if algorithm.traits.delay else []
        self._round: Round | None = None
        self.num_rounds = 0
        algorithm.setup(Context(self._comm, self.buckets, self.buckets[0].flat.device, optimizer))

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent for these rounds."""
        return self._transport.bytes_sent

    @torch.no_grad()
    def end_step(self) -> None:
        """Do what is due at the end of an optimizer step."""
        due = self._schedule.end_step()
        if due.take_background:
            self._take()
        if due.start:
            self._start()
            if not due.in_background:
                self._wait_and_replace()

    @torch.no_grad()
    def drain(self) -> None:
        """Take the result of a round in the background now, if there is one."""
        if self._schedule.drain():
            self._take()

    def close(self) -> None:
        """Wait for what is in the background, keep the weights as they are, and release the communicator."""
        if self._round is not None:
            self._driver.wait(self._round)
            self._round = None
        self._transport.close()

    def _start(self) -> None:
        tasks = []
        for idx, bucket in enumerate(self.buckets):
            bucket.load(self._tensors(bucket))
            if self._copies:
                self._copies[idx].copy_(bucket.flat)
            tasks.append(Task(bucket.describe, lambda bucket=bucket: self._algorithm.communicate(bucket, self._comm)))
        self._round = Round(self._transport, tasks, self._algorithm.traits.window)
        self._driver.open(self._round)
        for idx in range(len(tasks)):
            self._driver.ready(self._round, idx)

    def _wait_and_replace(self) -> None:
        self._wait()
        for bucket in self.buckets:
            bucket.store(self._tensors(bucket))

    def _take(self) -> None:
        self._wait()
        for bucket, copy in zip(self.buckets, self._copies, strict=True):
            bucket.flat.sub_(copy)
            torch._foreach_add_(self._tensors(bucket), [slot.view for slot in bucket.slots])

    def _wait(self) -> None:
        round_, self._round = self._round, None
        assert round_ is not None
        self._driver.wait(round_)
        self.num_rounds += 1

    def _tensors(self, bucket: Bucket) -> list[torch.Tensor]:
        return tensors_of(bucket, self._algorithm.traits.tensors, self._optimizer)

    def mean_of_weights(self) -> Communication:
        """Replace every parameter by its mean over the ranks."""
        for bucket in self.buckets:
            weights = tensors_of(bucket, "weights", None)
            bucket.load(weights)
            yield self._comm.all_reduce(bucket.flat)
            bucket.flat.div_(self._comm.world_size)
            bucket.store(weights)
