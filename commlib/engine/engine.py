"""The engine of one wrapped model: from a gradient that is ready to a gradient that is communicated.

[Note: wholly] Buckets, parameters and algorithms change on all ranks at the same place of the program. Where a change
fails on one rank, it cannot go on with what it had, as the others have changed: the communication ends, here at once
and at the peers as this rank aborts its communicators.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import Algorithm, Context
from commlib.engine import plan as plans
from commlib.engine.attached import Attached
from commlib.engine.backward import Backward
from commlib.engine.bucket import Bucket, SparseBucket, layout_key
from commlib.engine.gradient_round import GradientRound
from commlib.engine.idle import Idle
from commlib.engine.memory import Memory
from commlib.engine.optimizers import Steps
from commlib.engine.plan import Parameter, Plan
from commlib.engine.planner import INITIAL_CAP_BYTES, Cost
from commlib.engine.planning import Planning
from commlib.engine.policy import Schedule
from commlib.engine.profile import measure_cost
from commlib.engine.scheduler import Round, Task, acquire
from commlib.engine.slot import Slot
from commlib.engine.weights import WeightRounds
from commlib.errors import CommlibError
from commlib.primitives.replicate import broadcast_all
from commlib.transport.base import Communication, Communicator, Transport

_log = logging.getLogger("commlib")

_dtype = operator.attrgetter("dtype")


def _no_buffers() -> Sequence[torch.Tensor]:
    return ()


class Engine:
    """Buckets, hooks and rounds of the gradients of one model.

    Args:
        parameters: The parameters to communicate, in the model's order; all on one device, at least one.
        transport: The communicator, used by nothing else.
        algorithm: What to do with a bucket.
        cap_bytes: A fixed bucket size instead of a planned one.
        optimizer: The user's optimizer, if given.
        scaler: The user's GradScaler, if given.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        transport: Transport,
        algorithm: Algorithm,
        cap_bytes: int | None = None,
        optimizer: Any = None,
        scaler: Any = None,
    ) -> None:
        self.transport = transport
        self.optimizer = optimizer
        self.scaler = scaler
        self.device = parameters[0].param.device
        self.comm = Communicator(transport.rank, transport.world_size)
        self.error: BaseException | None = None
        self.num_rounds = 0
        self.exposed_s = 0.0
        self.weights: WeightRounds | None = None
        self.attached: Attached | None = None
        self.buffers: Callable[[], Sequence[torch.Tensor]] = _no_buffers  # that are to be alike after each round
        self.buffer_source = 0
        self.driver, release = acquire(self.device)
        self._finalizer = weakref.finalize(self, release)
        self.backward = Backward(self)
        self.planning = Planning(transport, self.device, cap_bytes)
        self._warm_up = AllReduce()
        self.last_sent: list[float] = []  # per bucket, bytes and seconds of the last round
        self.last_seconds: list[float] = []
        self.dense = []
        self._slots: list[Slot] = []
        self.idle = Idle()
        self.use(algorithm, parameters)
        own = weakref.ref(self)
        self._steps = Steps(
            optimizer,
            scaler,
            lambda args, kwargs: (engine := own()) and engine._step_begins(args, kwargs),
            lambda: (engine := own()) and engine._step_ends(),
        )

    def use(self, algorithm: Algorithm, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters by this algorithm from now on. Collective, and not within a backward."""
        self.algorithm = algorithm
        # Without buffers, to measure with: what communicates gradients, in the warm-up only or always.
        self._blank = copy.deepcopy(algorithm) if algorithm.traits.on_gradients else AllReduce()
        self.schedule = Schedule(algorithm.traits)
        is_alone = self.comm.world_size == 1 and algorithm.traits.idle_alone
        self.is_idle = is_alone or not self.schedule.ever_gradients
        if algorithm.traits.hierarchical and self.comm.local is None:
            self.comm.local, self.comm.across = self.transport.split_by_node() or (None, None)
        self._communicate(parameters)

    def replace(self, algorithm: Algorithm, connect: Callable[[], Transport]) -> None:
        """Change the algorithm; `connect` makes a communicator for rounds over weights. Collective, as `use`."""
        with self.wholly():
            self._stop_following()
            self.use(algorithm, self.parameters)
            if self.acts_after_steps:
                self.follow_optimizer(connect())

    def _stop_following(self) -> None:
        for following in (self.weights, self.attached):
            if following is not None:
                following.close()
        self.weights = self.attached = None

    def adopt(self, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters from now on, with a plan that starts anew. Collective."""
        if self.attached is not None:
            self.attached.refuse_change()
        with self.wholly():
            self._communicate(parameters)
            if self.weights is not None:
                self.weights.settle(max(self.transport.gather_objects(self.weights.num_started)))
                self.weights.adopt(self.parameters)

    def _communicate(self, parameters: Sequence[Parameter]) -> None:
        group = self.algorithm.group
        parameters = [dataclasses.replace(p, group=group(p.name, p.param)) for p in parameters]
        before, self._slots = self._slots, plans.make_slots(parameters)
        self.parameters = parameters
        self._params = [parameter.param for parameter in parameters]
        self._dtypes = list(map(_dtype, self._params))
        self.backward.follow(self._slots)
        self._memory = Memory()  # gradients of parameters that are frozen now may stay where they are
        self._install(self.planning.restart(parameters))
        own = weakref.ref(self.backward)
        for slot in () if self.is_idle else self._slots:
            slot.hook(own)
        for slot in before:
            slot.unhook()

    @contextlib.contextmanager
    def wholly(self) -> Iterator[None]:
        """End the communication where a change of it fails; see [Note: wholly]."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    # --- plans ------------------------------------------------------------------------------------------------------

    def _install(self, plan: Plan) -> None:
        """Make the buckets of `plan`, and move gradients that exist into them; then let the old ones go."""
        buckets: list[Bucket | SparseBucket] = []
        memory = self._memory
        if not self.is_idle:
            if any(slot.param.grad is not None for slot in self._slots):  # they may lie where the old buckets are
                memory = Memory()
            buckets = plans.build(plan, self.parameters, self._slots, memory)
        dense = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        for bucket in dense:
            bucket.adopt_existing()
        if not self.is_idle:
            context = Context(self.comm, dense, self.device, self.optimizer, self.scaler)
            self._warm_up.setup(context)
            if self.algorithm.traits.on_gradients:
                self.algorithm.setup(context)
        before: list[Bucket] = self.dense
        self.planning.installed(plan)
        self.buckets, self.dense, self._memory = buckets, dense, memory
        self.last_sent, self.last_seconds = [], []
        for bucket in before:
            bucket.release()

    def install_pending(self) -> None:
        """Change to the plan that the last rounds led to, if there is one and no backward is under way."""
        if self.planning.pending is not None and not self.backward.is_under_way:
            with self.wholly():
                self._install(self.planning.pending)

    @property
    def plan(self) -> Plan:
        """What the buckets hold."""
        return self.planning.plan

    def _measure_cost(self) -> Cost:
        with torch.no_grad():
            max_bytes = sum(bucket.nbytes for bucket in self.dense) // 8
            group = plans.main_group(self.parameters)
            return measure_cost(self._blank, self.transport, self.comm, self.driver, self.device, max_bytes, group)

    # --- rounds of gradients ----------------------------------------------------------------------------------------

    def open_round(self, contributes: bool = True) -> GradientRound:
        """Open the round of this backward; `contributes`: whether this rank has data for it."""
        if not self.buckets:
            raise CommlibError(f"rank {self.comm.rank}: there are parameters and no buckets: a defect of commlib")
        self.comm.step, self.comm.contributes = self.num_rounds, contributes
        self.comm.optimizer_step = self.schedule.step
        algorithm = self.current_algorithm
        return GradientRound(self.buckets, algorithm, self.comm, self.transport, self.driver, self._tail())

    def _tail(self) -> list[Task]:
        """Return what goes beside the buckets of a round."""
        tail = self.planning.tasks(self.comm)
        if self.buffers():
            tail.append(Task(lambda: "the broadcast of buffers", self._copy_buffers, True, True))
        return tail

    def _copy_buffers(self) -> Communication:
        # As they are when backward has ended: it may have run forwards again. Not through autograd's eyes, as a graph
        # that is kept has saved them.
        yield from broadcast_all([buffer.data for buffer in self.buffers()], self.comm, self.buffer_source)

    @property
    def current_algorithm(self) -> Algorithm:
        """What communicates gradients now: the algorithm, or full precision in its warm-up."""
        return self._warm_up if self.schedule.warming_up else self.algorithm

    def abandon(self, error: BaseException) -> None:
        """End this model's communication for good. Peers that wait for this rank are told by its abort."""
        if self.error is not None:
            return
        self.error = error
        if self.backward.round is not None:
            self.backward.round.cancel(error)
        self.transport.abort()
        if self.weights is not None:
            self.weights.abandon(error)

    def finish(self, round_: GradientRound, publishes: bool = True) -> None:
        """Wait for a round and make its results the gradients, or leave those as they are."""
        start = time.perf_counter()
        round_.wait()
        self.exposed_s = time.perf_counter() - start
        if publishes:
            self.idle.note(frozenset(self.parameters[idx].name for idx in round_.publish()))
        else:
            round_.drop()
        self.last_sent = [task.sent_bytes for task in round_.tasks]
        self.last_seconds = [task.ended_s - task.began_s for task in round_.tasks]
        self.num_rounds += 1
        if self.algorithm.traits.on_gradients and self.optimizer is None:
            self.schedule.end_step()
        self.planning.ended(self.backward.is_profiling, self._measure_cost)

    def run(self, what: str, communication: Communication) -> None:
        """Run one communication on its own, now, and wait for it; `what` names it in errors."""
        self.check()
        task = Task(lambda: what, lambda: communication)
        round_ = Round(self.transport, [task], window=1)
        try:
            self.driver.open(round_)
            self.driver.ready(round_, 0)
            self.driver.wait(round_)
        except BaseException as error:
            self.driver.cancel(round_, error)
            self.abandon(error)
            raise

    def shadow_round(self) -> None:
        """Take part in a round without data: what a rank that has joined early does."""
        self.install_pending()
        if self.is_idle or not self.schedule.gradients:
            return
        self.backward.is_profiling = self.planning.begins()
        if self.backward.is_profiling:
            self.planning.readiness.end()
        with torch.no_grad():
            for slot in self._slots:  # what the user has left there is his
                if slot.param.grad is not None and slot.param.grad is slot.view:
                    slot.param.grad = slot.view.clone()
        with self.wholly():
            round_ = self.open_round(contributes=False)
            round_.contribute_nothing()
            self.finish(round_, publishes=False)

    # --- weights and optimizer state --------------------------------------------------------------------------------

    @property
    def acts_after_steps(self) -> bool:
        """Whether there are rounds over weights or optimizer state."""
        traits = self.algorithm.traits
        return self.optimizer is not None and not (traits.on_gradients or traits.runs_itself)

    def follow_optimizer(self, transport: Transport) -> None:
        """Run the algorithm's rounds over weights or state at the end of the optimizer's steps, on `transport`."""
        cap_bytes = self.planning.cap_bytes or INITIAL_CAP_BYTES
        self.weights = WeightRounds(
            self.parameters, self.algorithm, self.schedule, transport, self.driver, self.optimizer, cap_bytes
        )

    def _step_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.weights is not None:
            self.weights.begin_step()
        if self.attached is not None:
            self.attached.begin_step(args, kwargs)

    def _step_ends(self) -> None:
        if self.weights is not None:
            self.weights.end_step()
        elif self.attached is not None:
            self.attached.end_step()
        else:
            self.schedule.end_step()

    def weights_were_loaded(self) -> None:
        """Let algorithms that keep something of earlier weights start anew from those that the model has now."""
        if self.weights is not None:
            self.weights.forget()
        if self.attached is not None:
            self.attached.runner.weights_were_loaded()

    # --- state ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what ended the communication, if anything did."""
        error = self.error or (self.weights and self.weights.error)
        if error is not None:
            raise CommlibError(
                f"rank {self.comm.rank}: this model's communication ended with an earlier error and cannot go on: "
                f"{error or type(error).__name__}"
            ) from error

    def layout_changed(self) -> bool:
        """Return whether parameters were cast or moved to another device since their buckets were made."""
        buckets = [*self.dense, *(self.weights.buckets if self.weights is not None else ())]
        moved = any(layout_key(b.slots[0].param) != (b.flat.dtype, b.flat.device) for b in buckets)
        return moved or list(map(_dtype, self._params)) != self._dtypes

    def restore(self, plan: Plan | None, hook_counts: dict[str, int] | None) -> None:
        """Change to a plan from a checkpoint; nothing is profiled then. None is the first one, to be settled."""
        with self.wholly():
            self.backward.restore_counts(hook_counts)
            self._install(self.planning.restore(plan))
            if plan is None and not self.is_idle:
                self.planning.settle()

    def close(self) -> None:
        """Remove every hook and give up the driver and the communicator. Harmless when called twice."""
        for slot in self._slots:
            slot.unhook()
        self._steps.close()
        self._stop_following()
        if self.backward.round is not None:
            self.abandon(CommlibError("the model was unwrapped during backward"))
        self._finalizer()
        self.transport.close()
