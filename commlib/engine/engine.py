"""The engine of one wrapped model: from a gradient that is ready to a gradient that is communicated.

[Note: the life of a backward] The first hook that fires (on an output of the forward, or on a parameter where the
outputs could not be hooked) *begins* a backward and queues a callback for its end. The first gradient *opens* a round.
Each bucket whose gradients are all there is gathered and *launched*. The callback *flushes* the buckets that are not
complete (unused parameters), launches what goes beside them (rank 0's buffers) and waits. A backward that touches no
parameter (`torch.autograd.grad` on inputs) opens no round. Several models in one backward all flush before any of them
waits. An exception in backward destroys the callback: a backward whose callback is gone is forgotten if it had
communicated nothing, and else ends the model's communication.

[Note: wholly] Buckets, parameters and algorithms change on all ranks at the same place of the program. Where a change
fails on one rank, it cannot go on with what it had, as the others have changed: the communication ends, here at once
and at the peers as this rank aborts its communicators.

[Note: settling] While plans are tried, which one a step runs with depends on clocks. A checkpoint ends that: from the
round after it on, all ranks stay with the plan of that round, which the checkpoint has, so that the run that loads it
goes the same way. As not all ranks need to save, the wish goes with the round, as long as there is something to settle.
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
from commlib.engine.bucket import Bucket, Run, Slot, SparseBucket, layout_key
from commlib.engine.gradient_round import GradientRound
from commlib.engine.idle import Idle
from commlib.engine.memory import Memory
from commlib.engine.optimizers import Steps
from commlib.engine.plan import Parameter, Plan
from commlib.engine.planner import INITIAL_CAP_BYTES, Cost
from commlib.engine.policy import Schedule
from commlib.engine.profile import Readiness, Trials, measure_cost, steps_per_visit
from commlib.engine.scheduler import Round, Task, acquire
from commlib.engine.weights import WeightRounds
from commlib.errors import CommlibError, ConfigError
from commlib.primitives.replicate import broadcast_all
from commlib.transport.base import Communication, Communicator, Transport

_log = logging.getLogger("commlib")

#: Synchronised backwards without overlap before the plan is made: the first is cold, the best of the others counts.
_PROFILED_BACKWARDS = 3

#: Bucket size in those backwards, where the sizes are to be planned. Nothing overlaps in them, so more buckets are only
#: more latency; and DDP's first step is one bucket as well. Adam magnifies the last bits of the first gradient more
#: than those of any other, so loss curves part less from DDP's where the first sum has its order.
_PROFILE_CAP_BYTES = 1 << 30

_in_backward: weakref.WeakSet[Engine] = weakref.WeakSet()

_dtype = operator.attrgetter("dtype")


def _no_buffers() -> Sequence[torch.Tensor]:
    return ()


class _End:
    """The callback at the end of a backward. It dies with the backward, also with one that an exception ends."""

    __slots__ = ("__weakref__", "_engine")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self) -> None:
        self._engine._end()


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
        self.require_sync = True
        self.forward_ran = self.expects_sync = False  # since the last backward: any forward, a synchronised one
        self.has_hidden_outputs = False  # a forward returned nothing whose gradient announces the backward
        self._has_warned = False
        self.error: BaseException | None = None
        self.num_rounds = 0
        self.exposed_s = 0.0
        self.weights: WeightRounds | None = None
        self.attached: Attached | None = None
        self.buffers: Callable[[], Sequence[torch.Tensor]] = _no_buffers  # that are to be alike after each round
        self.buffer_source = 0
        self.driver, release = acquire(self.device)
        self._finalizer = weakref.finalize(self, release)
        if cap_bytes is None and torch.are_deterministic_algorithms_enabled():
            cap_bytes = INITIAL_CAP_BYTES  # a plan that no clock has a say in
        self.cap_bytes = cap_bytes
        self.num_profiled = _PROFILED_BACKWARDS if cap_bytes is None else 1  # before the plan is made
        self.may_settle = True
        self._wants_to_settle = False
        self._wish: torch.Tensor | None = None  # of the round under way: whether any rank wants to
        self._warm_up = AllReduce()
        self._graph_task: int | None = None
        self._end_of_backward: Callable[[], _End | None] = lambda: None
        self._sync = False
        self._is_profiling = False
        self._early_divisor = 1.0
        self._round: GradientRound | None = None
        self.last_sent: list[float] = []  # per bucket, bytes and seconds of the last round
        self.last_seconds: list[float] = []
        self._is_flushed = False
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
        self._has_counts = False
        self._readiness = Readiness(len(self.parameters), self.device)
        self.next_plan: Plan | None = None
        self._trials: Trials | None = None
        self._memory = Memory()  # gradients of parameters that are frozen now may stay where they are
        self._install(plans.initial(self.parameters, self.cap_bytes or _PROFILE_CAP_BYTES))
        own = weakref.ref(self)
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
        self.plan, self.buckets, self.dense, self._memory = plan, buckets, dense, memory
        self.last_sent, self.last_seconds = [], []
        for bucket in before:
            bucket.release()

    def install_pending(self) -> None:
        """Change to the plan that the last rounds led to, if there is one and no backward is under way."""
        if self.next_plan is not None and self._graph_task is None:
            with self.wholly():
                self._install(self.next_plan)
                self.next_plan = None

    @property
    def is_undecided(self) -> bool:
        """Whether the plan is still to be found by measuring."""
        return self.cap_bytes is None and (self.next_plan or self.plan).kind in ("initial", "trial")

    def settle(self) -> None:
        """Let all ranks stay with the plan of the next round, if plans are still tried; see [Note: settling]."""
        self._wants_to_settle = self.may_settle and self.is_undecided and not self.is_idle

    def _agree_to_settle(self) -> Communication:
        assert self._wish is not None
        yield self.comm.all_reduce(self._wish, op="max")

    def _end_trials(self) -> None:
        """Some rank wants to settle."""
        self._wants_to_settle, self._trials = False, None
        self._readiness = Readiness(0, self.device)
        if self.plan.kind == "initial":
            self.next_plan = plans.by_sizes(self.parameters, INITIAL_CAP_BYTES)
        else:
            self.plan = dataclasses.replace(self.plan, kind="settled")

    def _plan_after_profile(self) -> None:
        """Make the plan, or the candidates to try, from what rank 0 recorded: the same on all ranks. Collective."""
        recorded = self._readiness.result() if self.comm.rank == 0 else None
        ready_s, backward_s = self.transport.gather_objects(recorded)[0]
        self._readiness = Readiness(0, self.device)
        if self.cap_bytes is None:
            found = plans.candidates(self.parameters, ready_s, backward_s, self._measure_cost())
        else:
            found = [plans.fixed(self.parameters, self.cap_bytes, ready_s)]
        if len(found) == 1:
            only = found[0]
            self.next_plan = only if only.kind == "fixed" else dataclasses.replace(only, kind="planned")
        else:
            self._trials = Trials(found, steps_per_visit(backward_s))
            self.next_plan = self._trials.current

    def _measure_cost(self) -> Cost:
        with torch.no_grad():
            max_bytes = sum(bucket.nbytes for bucket in self.dense) // 8
            group = plans.main_group(self.parameters)
            return measure_cost(self._blank, self.transport, self.comm, self.driver, self.device, max_bytes, group)

    def _continue_trials(self) -> None:
        """Time the step that ends now; change to the next candidate, in the end to the fastest on the slowest rank."""
        if self._trials is None or not self._trials.step_ended(time.perf_counter()):
            return
        if self._trials.current is None:
            of_ranks = self.transport.gather_objects(self._trials.figures)
            self._trials.end_pass([max(column) for column in zip(*of_ranks, strict=True)])
        self.next_plan = self._trials.current
        if self.next_plan is None:
            self.next_plan = dataclasses.replace(self._trials.plans[0], kind="planned")
            self._trials = None

    # --- one backward -----------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward began that has not ended."""
        return self._graph_task is not None

    def begin(self, sync: bool) -> None:
        """Take part in the backward that is running now; called by every hook on an output, counts once."""
        self.forget_failed_backward()
        if self._graph_task is None:
            self.check()
            self.install_pending()
            self._refuse_communicated()
            self._graph_task = torch._C._current_graph_task_id()
            end = _End(self)
            self._end_of_backward = weakref.ref(end)
            _in_backward.add(self)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            self._sync = self._is_profiling = self._is_flushed = False
            # Until it is known how often each hook fires, a gradient that is placed may still grow: divide at the end.
            divisor = self._current_algorithm().predivisor(self.comm) if self._has_counts else 1.0
            for bucket in self.buckets:
                bucket.start_backward(divisor)
            self._early_divisor = divisor
        if sync and not self._sync:
            self._start_sync()

    def forget_failed_backward(self) -> None:
        """Forget a backward that an exception has ended, if it communicated nothing; else end the communication."""
        if self._graph_task is None or self._end_of_backward() is not None:
            return
        round_ = self._round
        if round_ is not None and round_.has_begun:
            self.abandon(
                CommlibError(
                    "the previous backward did not finish (an exception in it?), so the ranks no longer agree on what "
                    "was communicated. Restart from a checkpoint on all ranks"
                )
            )
        elif round_ is not None:
            round_.discard()
        self._leave_backward()

    def _leave_backward(self) -> None:
        self._round = self._graph_task = None
        self.forward_ran = self.expects_sync = False
        _in_backward.discard(self)

    def _refuse_communicated(self) -> None:
        """Refuse gradients that were communicated already where the algorithm would take them for a rank's own.

        Raises:
            ConfigError: There are some.
        """
        algorithm = self._current_algorithm()
        if algorithm.traits.accumulates or not self.num_rounds:
            return
        kept = [s for b in self.dense for s in b.slots if s.param.grad is s.view and bool(s.view.any())]
        if kept:
            raise ConfigError(
                f"rank {self.comm.rank}: the gradient of {kept[0].name!r} holds what an earlier synchronised backward "
                f"has communicated, and {algorithm.name!r} would count it as new. Call zero_grad() after each step, "
                "and make all backwards of a step but the last one inside model.no_sync()"
            )

    def _begin_unannounced(self) -> None:
        """A gradient came, and no output of a forward announced it."""
        is_local = not self.forward_ran and not self.has_hidden_outputs
        if is_local and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "gradients of %r came without a forward of the wrapped model (a call of model.module, or of another "
                "method of it); as with DDP they stay local",
                self.parameters[0].name,
            )
        self.begin(self.expects_sync or (self.has_hidden_outputs and self.require_sync))

    def _start_sync(self) -> None:
        self._sync = self.schedule.gradients and not self.is_idle
        if not self._sync:
            return
        self._is_profiling = self.plan.kind == "initial"
        if self._is_profiling:
            self._readiness.start()
        complete = [bucket for bucket in self.buckets if bucket.pending == 0]
        if complete and not self._is_profiling:  # an unsynchronised forward shares this backward, and came first
            self._open_round()
            for bucket in complete:
                self._round.launch(bucket)  # pyright: ignore[reportOptionalMemberAccess]

    def on_gradient(self, slot: Slot) -> None:
        """Take note that a parameter has its gradient in `param.grad`. Runs for each of them: every line counts."""
        if self._graph_task is None:
            self._begin_unannounced()
        if self._is_profiling:
            self._readiness.mark(slot.idx)
        slot.left = left = slot.left - 1
        if left == 0:
            run = slot.run
            run.pending -= 1  # pyright: ignore[reportOptionalMemberAccess]
            if run.pending == 0:  # pyright: ignore[reportOptionalMemberAccess]
                self._run_complete(run)  # pyright: ignore[reportArgumentType]
        elif left < 0 and self._has_counts:
            self._fired_again(slot)

    def _fired_again(self, slot: Slot) -> None:
        if slot.run is not None and slot.run.is_placed:
            raise CommlibError(
                f"rank {self.comm.rank}: a further gradient of {slot.name!r} came after it had been gathered: it was "
                f"ready {slot.expected - slot.left} times in this backward and {slot.expected} times in the first one. "
                "Run the model the same way in every step, or use checkpoint(..., use_reentrant=False)."
            )

    def _run_complete(self, run: Run) -> None:
        """All gradients of the run are there."""
        run.bucket.pending -= 1
        if self._sync:
            if self._round is None:
                self._open_round()
            run.place(self._early_divisor)
            if run.bucket.pending == 0 and not self._is_profiling:
                self._round.launch(run.bucket)  # pyright: ignore[reportOptionalMemberAccess]

    def _open_round(self, contributes: bool = True) -> None:
        if not self.buckets:
            raise CommlibError(f"rank {self.comm.rank}: there are parameters and no buckets: a defect of commlib")
        algorithm = self._current_algorithm()
        self.comm.step, self.comm.contributes = self.num_rounds, contributes
        self.comm.optimizer_step = self.schedule.step
        self._round = GradientRound(self.buckets, algorithm, self.comm, self.transport, self.driver, self._tail())

    def _tail(self) -> list[Task]:
        """Return what goes beside the buckets of a round."""
        tail = []
        self._wish = None
        if self.is_undecided and self.may_settle:
            self._wish = torch.full((1,), float(self._wants_to_settle), dtype=torch.float32, device=self.device)
            tail.append(Task(lambda: "whether the plan is settled", self._agree_to_settle, True, True))
        if self.buffers():
            tail.append(Task(lambda: "the broadcast of buffers", self._copy_buffers, True, True))
        return tail

    def _copy_buffers(self) -> Communication:
        # As they are when backward has ended: it may have run forwards again. Not through autograd's eyes, as a graph
        # that is kept has saved them.
        yield from broadcast_all([buffer.data for buffer in self.buffers()], self.comm, self.buffer_source)

    def _current_algorithm(self) -> Algorithm:
        return self._warm_up if self.schedule.warming_up else self.algorithm

    def _flush(self) -> None:
        """Launch what is not complete. Every model in this backward does so before any of them waits."""
        if self._is_flushed:
            return
        self._is_flushed = True
        has_gradients = self._round is not None or self._any_gradient()
        if not self._has_counts and has_gradients:
            self._count_hooks()
        if self._sync and has_gradients:
            if self._is_profiling:
                self._readiness.end()
            if self._round is None:
                self._open_round()
            self._round.flush()  # pyright: ignore[reportOptionalMemberAccess]

    def _count_hooks(self) -> None:
        self._has_counts = True
        for slot in self._slots:
            slot.expected = max(1, slot.expected - slot.left)

    def _end(self) -> None:
        """The callback at the end of backward."""
        try:
            for engine in [e for e in _in_backward if e._graph_task == self._graph_task]:
                engine._flush()
            if self._round is not None:
                self._finish(self._round)
        except BaseException as error:
            self.abandon(error)
            raise
        finally:
            self._leave_backward()

    def abandon(self, error: BaseException) -> None:
        """End this model's communication for good. Peers that wait for this rank are told by its abort."""
        if self.error is not None:
            return
        self.error = error
        if self._round is not None:
            self._round.cancel(error)
        self.transport.abort()
        if self.weights is not None:
            self.weights.abandon(error)

    def _any_gradient(self) -> bool:
        return any(slot.left != slot.expected for slot in self._slots)

    def _finish(self, round_: GradientRound, publishes: bool = True) -> None:
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
        if self._wish is not None and bool(self._wish.item()):
            self._end_trials()
        elif self._is_profiling and self._readiness.num_backwards >= self.num_profiled:
            self._plan_after_profile()
        else:
            self._continue_trials()

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
        self._is_profiling = self.plan.kind == "initial"
        if self._is_profiling:
            self._readiness.start()
            self._readiness.end()
        with torch.no_grad():
            for slot in self._slots:  # what the user has left there is his
                if slot.param.grad is not None and slot.param.grad is slot.view:
                    slot.param.grad = slot.view.clone()
        with self.wholly():
            self._open_round(contributes=False)
            round_, self._round = self._round, None
            assert round_ is not None
            round_.contribute_nothing()
            self._finish(round_, publishes=False)

    # --- weights and optimizer state --------------------------------------------------------------------------------

    @property
    def acts_after_steps(self) -> bool:
        """Whether there are rounds over weights or optimizer state."""
        traits = self.algorithm.traits
        is_alone = self.comm.world_size == 1 and traits.idle_alone
        return self.optimizer is not None and not (traits.on_gradients or traits.runs_itself or is_alone)

    def follow_optimizer(self, transport: Transport) -> None:
        """Run the algorithm's rounds over weights or state at the end of the optimizer's steps, on `transport`."""
        cap_bytes = self.cap_bytes or INITIAL_CAP_BYTES
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

    def hook_counts(self) -> dict[str, int] | None:
        """Return how often each gradient hook fires in a backward, where not once; None before that is known."""
        if not self._has_counts:
            return None
        return {slot.name: slot.expected for slot in self._slots if slot.expected != 1}

    def restore(self, plan: Plan | None, hook_counts: dict[str, int] | None) -> None:
        """Change to a plan from a checkpoint; nothing is profiled then. None is the first one, to be settled."""
        with self.wholly():
            self._trials = None
            self._has_counts = hook_counts is not None
            for slot in self._slots:
                slot.expected = (hook_counts or {}).get(slot.name, 1)
            self._install(plan or plans.initial(self.parameters, self.cap_bytes or _PROFILE_CAP_BYTES))
            self.next_plan = None
            if plan is None:
                self._readiness = Readiness(len(self.parameters), self.device)
                self.settle()

    def close(self) -> None:
        """Remove every hook and give up the driver and the communicator. Harmless when called twice."""
        for slot in self._slots:
            slot.unhook()
        self._steps.close()
        self._stop_following()
        if self._round is not None:
            self.abandon(CommlibError("the model was unwrapped during backward"))
        self._finalizer()
        self.transport.close()
