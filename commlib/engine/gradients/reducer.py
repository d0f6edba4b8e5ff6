"""The reducer: the buckets of a model's gradients, their plan, and the rounds that average them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from commlib.algorithms.channels import Gradients
from commlib.algorithms.context import Context
from commlib.engine.background import Background
from commlib.engine.buckets.bucket import Bucket, EmbeddingBucket
from commlib.engine.buckets.slot import Slot
from commlib.engine.channel import Settings
from commlib.engine.frozen import FrozenParameters
from commlib.engine.gradients.averaging import Averaging
from commlib.engine.gradients.buckets import BucketSet
from commlib.engine.gradients.inputs import Inputs
from commlib.engine.gradients.loss_scale import NUM_LEVELS
from commlib.engine.gradients.round import GradientRound
from commlib.engine.planning import plan as plans
from commlib.engine.planning.cost import measure_cost
from commlib.engine.planning.plan import Parameter, Plan
from commlib.engine.planning.readiness import DeviceTimer
from commlib.engine.planning.search import PlanSearch
from commlib.engine.planning.sizes import BucketTimes
from commlib.engine.rounds.task import Task
from commlib.engine.session import Session
from commlib.errors import CommlibError, ConfigError
from commlib.primitives.replicate import broadcast_all
from commlib.sharding.local import local_of
from commlib.transport.base import Communication


@dataclass(frozen=True)
class LastRound:
    """Statistics of the last round.

    Attributes:
        sent_bytes: Bytes that this rank sent, per bucket, then for the flags if they were sent separately.
        seconds: Durations of the same transfers.
        exposed_s: Seconds that the training thread waited (on CUDA: host time).
        waited: Start and end of that wait, from the model's `DeviceTimer`; on CUDA, events on its stream.
    """

    sent_bytes: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    exposed_s: float = 0.0
    waited: tuple[Any, Any] | None = None


@dataclass
class Buffers:
    """The model's buffers that each round makes identical on all ranks.

    Attributes:
        tensors: Returns the buffers.
        source: The rank whose buffers are broadcast.
    """

    tensors: Callable[[], Sequence[torch.Tensor]] = field(default=lambda: ())
    source: int = 0

    def copy(self, session: Session) -> Communication:
        """Broadcast the buffers from the source rank."""
        # Read at the end of backward, which may have run forwards again. `data` hides the change from autograd: a
        # retained graph may have saved the buffers.
        return broadcast_all([local_of(buffer.data) for buffer in self.tensors()], session.comm, self.source)


class Reducer:
    """Averages the gradients of a model in rounds, as DDP's reducer does.

    Args:
        session: Carries the rounds.
        device: Device of the parameters.
        settings: Arguments of `wrap`.
        averaging: How gradients are averaged.

    Attributes:
        session: As above.
        settings: As above. Replaced with another optimizer.
        averaging: As above. Replaced with another algorithm.
        parameters: The parameters, in the model's order.
        search: Searches for the bucket plan.
        bucket_set: The slots of the parameters, and the current buckets.
        buffers: The buffers that each round broadcasts.
        last: Statistics of the last round.
        inputs: The buckets before the round, in an elastic group.
        num_rounds: Number of rounds so far.
        waited_s: Seconds that the training thread has waited for rounds so far (on CUDA: host time).
    """

    def __init__(self, session: Session, device: torch.device, settings: Settings, averaging: Averaging) -> None:
        self.session = session
        self.settings = settings
        self.averaging = averaging
        self.parameters: Sequence[Parameter] = ()
        self.search = PlanSearch(session.transport, device, settings.cap_bytes)
        self.bucket_set = BucketSet(parks=device.type == "cuda")
        self.buffers = Buffers()
        self.last = LastRound()
        self.inputs = Inputs() if session.is_elastic else None
        self.num_rounds = 0
        self.waited_s = 0.0
        self._device = device
        self._timer = DeviceTimer(device)
        self._frozen = FrozenParameters(patience=None)
        self._may_hold_communicated = False  # until a backward begins
        self._exchange: Background | None = None
        self._snapshot: dict[str, Any] = {}  # the algorithm's state before the round, in an elastic group
        own = weakref.WeakMethod(self._follow_ranks)
        session.when_entered.append(lambda: (follow := own()) and follow())

    @property
    def buckets(self) -> list[Bucket | EmbeddingBucket]:
        """The plan's buckets."""
        return self.bucket_set.buckets

    def follow(self, parameters: Sequence[Parameter]) -> list[Slot]:
        """Create slots for these parameters, and return the previous slots. `install` creates the buckets."""
        self.parameters = parameters
        return self.bucket_set.follow(parameters)

    # --- plans ------------------------------------------------------------------------------------------------------

    def install(self, plan: Plan) -> None:
        """Build the buckets of `plan`, move existing gradients into them, and release the old buckets."""
        buckets, dense = [], []
        if not self.averaging.is_idle:
            buckets, dense = self.bucket_set.build(plan, 0 if self.averaging.loss_scale is None else NUM_LEVELS)
            self._set_up(dense)
            if self.inputs is not None:
                self.inputs.prepare(dense)
        self.search.installed(plan)
        self.bucket_set.take(buckets, dense)
        self.last = LastRound(exposed_s=self.last.exposed_s, waited=self.last.waited)

    def _set_up(self, dense: Sequence[Bucket]) -> None:
        comm, settings = self.session.comm, self.settings
        self.averaging.setup(Context(comm, dense, self._device, settings.optimizer, settings.scaler))

    def install_pending(self) -> None:
        """Install the pending plan, if there is one. Must not be called during backward."""
        if self.search.pending is not None:
            with self.session.wholly():
                self.install(self.search.pending)

    def _follow_ranks(self) -> None:
        self._set_up(self.bucket_set.dense)

    def frozen(self) -> list[str]:
        """Return the names of parameters that are to leave the plan: permanently frozen, and still frozen now."""
        names = self._frozen.permanent
        return [p.name for p in self.parameters if p.name in names and not p.param.requires_grad] if names else []

    def _measure_cost(self) -> BucketTimes:
        with torch.no_grad():
            max_bytes = sum(bucket.nbytes for bucket in self.bucket_set.dense) // 8
            group = plans.main_group(self.parameters)
            return measure_cost(self.averaging.prototype, self.session, self._device, max_bytes, group)

    # --- rounds -----------------------------------------------------------------------------------------------------

    def begin(self) -> float:
        """Install a pending plan before a backward; return the divisor to apply when gathering gradients.

        Raises:
            ConfigError: Some gradients have already been communicated, and the algorithm would treat them as this
                rank's own.
            CommlibError: The communication has ended.
        """
        self.session.check()
        if self.averaging.loss_scale is not None:
            self.averaging.loss_scale.check()
        self.install_pending()
        self._refuse_communicated()
        return self.averaging.current.predivisor(self.session.comm)

    def _refuse_communicated(self) -> None:
        may_hold, self._may_hold_communicated = self._may_hold_communicated, False
        declared = self.averaging.current.channel
        if not may_hold or (isinstance(declared, Gradients) and declared.accumulates):
            return
        slots = (slot for bucket in self.bucket_set.dense for slot in bucket.slots)
        held = next((slot for slot in slots if slot.param.grad is slot.view and bool(slot.view.any())), None)
        if held is not None:
            self._may_hold_communicated = True
            raise ConfigError(
                f"rank {self.session.comm.rank}: the gradient of {held.name!r} holds values that an earlier "
                f"synchronised backward communicated, and {self.averaging.algorithm.name!r} would count them as new. "
                "Call zero_grad() after each step, and run all backwards of a step except the last one inside "
                "model.no_sync()"
            )

    def open_round(self, contributes: bool = True) -> GradientRound:
        """Open the round of this backward. `contributes`: whether this rank has data for it."""
        comm, averaging = self.session.comm, self.averaging
        self.session.enter()
        if not self.buckets:
            raise CommlibError(f"rank {comm.rank}: there are parameters but no buckets. This is a bug in commlib")
        comm.step, comm.contributes, comm.optimizer_step = self.num_rounds, contributes, averaging.counter.step
        if self.inputs is not None:
            self.inputs.begin_round()
            self._snapshot = averaging.snapshot()
        return GradientRound(
            self.buckets, averaging.current, self.session, self._tail, averaging.loss_scale, self.inputs
        )

    def _tail(self) -> list[Task]:
        tail = self.search.tasks(self.session.comm)
        if self.buffers.tensors():
            tail.append(Task(lambda: "the broadcast of buffers", lambda: self.buffers.copy(self.session), True, True))
        return tail

    def _wait(self, round_: GradientRound) -> None:
        round_.wait()
        self.session.check_streams()

    def _repeat(self, round_: GradientRound) -> None:
        self.averaging.restore(self._snapshot)
        self.session.enter()
        round_.repeat()

    def finish(self, round_: GradientRound, publishes: bool = True) -> None:
        """Wait for a round. If `publishes`, its results become the gradients; otherwise these do not change."""
        start_s, start = time.perf_counter(), self._timer.now()
        self.session.complete(lambda: self._wait(round_), lambda: self._repeat(round_))
        waited = (start, self._timer.now())
        exposed_s = time.perf_counter() - start_s
        self.waited_s += exposed_s
        if publishes:
            round_.publish()
        else:
            round_.drop()
        self._frozen.note(round_.frozen)
        tasks = round_.tasks
        self.last = LastRound(
            tuple(task.sent_bytes for task in tasks),
            tuple(task.ended_s - task.began_s for task in tasks),
            exposed_s,
            waited,
        )
        self.num_rounds += 1
        self._may_hold_communicated = publishes
        self.averaging.counter.end_backward()

    def follow_round(self, in_background: bool = False) -> None:
        """Agree with the other ranks on the next plan after a round, if due.

        Args:
            in_background: Run the exchange in a thread, which `join` waits for. See [Note: several models] in
                `backward.py`.
        """
        if in_background and self.search.is_undecided:
            self._exchange = Background("commlib-plan", lambda: self.search.ended(self._measure_cost))
        else:
            self.search.ended(self._measure_cost)

    def join(self) -> None:
        """Wait for the exchange that `follow_round` runs in the background; raise its error."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            with self.session.wholly():
                exchange.join()
