"""The gradient channel: buckets, hooks and rounds of synchronised backwards."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients
from commlib.algorithms.context import Context
from commlib.engine.background import Background
from commlib.engine.buckets.bucket import Bucket, SparseBucket
from commlib.engine.channel import OpenChannel, Settings
from commlib.engine.frozen import FrozenParameters
from commlib.engine.gradients.backward import Backward, Phase
from commlib.engine.gradients.buckets import BucketSet
from commlib.engine.gradients.loss_scale import NUM_LEVELS, LossScale
from commlib.engine.gradients.round import GradientRound
from commlib.engine.gradients.streamed import StreamedBackward
from commlib.engine.line import Line
from commlib.engine.planning import plan as plans
from commlib.engine.planning.cost import measure_cost
from commlib.engine.planning.plan import Parameter, Plan
from commlib.engine.planning.readiness import Clock, Readiness
from commlib.engine.planning.search import PlanSearch
from commlib.engine.planning.sizes import BucketTimes
from commlib.engine.rounds.schedule import Progress
from commlib.engine.rounds.task import Task
from commlib.errors import CommlibError, ConfigError
from commlib.primitives.replicate import broadcast_all, mean_all
from commlib.sharding.local import local_of
from commlib.transport.base import Communication


@dataclass(frozen=True)
class LastRound:
    """Statistics of the last round.

    Attributes:
        sent_bytes: Bytes that this rank sent, per bucket, then for the flags if they were sent separately.
        seconds: Durations of the same transfers.
        exposed_s: Seconds that the training thread waited (on CUDA: host time).
        waited: Start and end of that wait, from the model's `Clock`; on CUDA, events on its stream.
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

    def copy(self, line: Line) -> Communication:
        """Broadcast the buffers from the source rank."""
        # Read at the end of backward, which may have run forwards again. `data` hides the change from autograd: a
        # retained graph may have saved the buffers.
        return broadcast_all([local_of(buffer.data) for buffer in self.tensors()], line.comm, self.source)


class GradientChannel(OpenChannel):
    """Buckets, hooks and rounds for the gradients of one model.

    Every algorithm has this channel. An algorithm that does not communicate gradients may average them in full
    precision during a warm-up; without a warm-up, the channel is *idle*: it has no hooks and no buckets. It is also
    idle in a group of one rank if the algorithm has nothing to do there.

    Args:
        line: Carries the rounds.
        device: Device of the parameters.
        settings: Arguments of `wrap`.

    Attributes:
        backward: State of the current backward.
        search: Searches for the bucket plan.
        buffers: The buffers that each round broadcasts.
        last: Statistics of the last round.
        is_idle: Whether the channel is idle; see above.
        watch_steps: Called with True when a backward begins that runs user hooks, and with False at its end.
    """

    algorithm: Algorithm
    progress: Progress
    is_idle: bool
    _is_own: bool  # whether the algorithm uses this channel after its warm-up
    _blank: Algorithm  # a copy of the algorithm that communicates gradients, without buffers, for measurements

    def __init__(self, line: Line, device: torch.device, settings: Settings) -> None:
        self.line = line
        self._device = device
        self._clock = Clock(device)
        self._settings = settings
        is_cuda = device.type == "cuda"
        self.backward = StreamedBackward(self, lambda: torch.cuda.current_stream(device)) if is_cuda else Backward(self)
        self.search = PlanSearch(line.transport, device, settings.cap_bytes)
        self._frozen = FrozenParameters(patience=None)
        self.buffers = Buffers()
        self.last = LastRound()
        self.num_rounds = 0
        self._has_loaded_state = False  # since the last step
        self._may_hold_communicated = False  # until a backward begins
        self._exchange: Background | None = None
        self.watch_steps: Callable[[bool], object] = lambda _: None
        self._warm_up = AllReduce()
        self._loss_scale: LossScale | None = None
        self._set = BucketSet(parks=is_cuda)
        self._parameters: Sequence[Parameter] = ()
        own = weakref.ref(self.backward)
        line.when_ended.append(lambda error: (backward := own()) and backward.cancel(error))

    def use(self, algorithm: Algorithm, progress: Progress, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters with this algorithm from now on. Collective; not allowed during backward."""
        declared = algorithm.channel
        self.keeper = self.algorithm = algorithm
        self.progress = progress
        self.is_idle = (self.line.comm.world_size == 1 and declared.rests_alone) or not progress.ever_syncs_gradients
        self._is_own = isinstance(declared, Gradients)
        self._blank = copy.deepcopy(algorithm) if self._is_own else AllReduce()
        scaler = self._settings.scaler
        shares_scale = scaler is not None and scaler.is_enabled() and declared.keeps_replicas_alike
        self._loss_scale = LossScale(scaler, self.line.comm.rank) if shares_scale else None
        if declared.wants_nodes:
            self.line.find_nodes()
        self.adopt(parameters)

    @override
    def adopt(self, parameters: Sequence[Parameter]) -> None:
        before = self._set.follow(parameters)
        self._parameters = parameters
        self.backward.follow(self._set.slots)
        self._install(self.search.restart(parameters))
        if not self.is_idle:
            self._set.hook(weakref.ref(self.backward))
        for slot in before:
            slot.unhook()

    @override
    def set_up(self, settings: Settings) -> None:
        self._settings = settings
        self._install(self.search.next)

    # --- plans ------------------------------------------------------------------------------------------------------

    def _install(self, plan: Plan) -> None:
        """Build the buckets of `plan`, move existing gradients into them, and release the old buckets."""
        buckets, dense = ([], []) if self.is_idle else self._set.build(plan, self._num_marks)
        if not self.is_idle:
            context = Context(self.line.comm, dense, self._device, self._settings.optimizer, self._settings.scaler)
            self._warm_up.setup(context)
            if self._is_own:
                self.algorithm.setup(context)
        self.search.installed(plan)
        self._set.take(buckets, dense)
        self.last = LastRound(exposed_s=self.last.exposed_s, waited=self.last.waited)

    @property
    def _num_marks(self) -> int:
        return 0 if self._loss_scale is None else NUM_LEVELS

    def install_pending(self) -> None:
        """Install the pending plan, if there is one and no backward is under way."""
        if self.search.pending is not None and not self.backward.is_under_way:
            with self.line.wholly():
                self._install(self.search.pending)

    @property
    def plan(self) -> Plan:
        """The plan of the current buckets."""
        return self.search.plan

    @property
    @override
    def buckets(self) -> list[Bucket | SparseBucket]:
        """The plan's buckets."""
        return self._set.buckets

    @property
    def dense(self) -> list[Bucket]:
        """The buckets that have a flat buffer."""
        return self._set.dense

    @property
    def readiness(self) -> Readiness:
        """Records when gradients become ready."""
        return self.search.readiness

    @property
    @override
    def is_settled(self) -> bool:
        return self.is_idle or self.plan.kind not in ("initial", "trial")

    @override
    def has_moved(self) -> bool:
        return self._set.has_moved()

    def frozen(self) -> list[str]:
        """Return the names of parameters that are to leave the plan: permanently frozen, and still frozen now."""
        names = self._frozen.permanent
        return [p.name for p in self._parameters if p.name in names and not p.param.requires_grad] if names else []

    def _measure_cost(self) -> BucketTimes:
        with torch.no_grad():
            max_bytes = sum(bucket.nbytes for bucket in self.dense) // 8
            return measure_cost(self._blank, self.line, self._device, max_bytes, plans.main_group(self._parameters))

    # --- rounds -----------------------------------------------------------------------------------------------------

    def backward_begins(self) -> float:
        """Install a pending plan before a backward; return the divisor to apply when gathering gradients.

        Raises:
            ConfigError: Some gradients have already been communicated, and the algorithm would treat them as this
                rank's own.
            CommlibError: The communication has ended.
        """
        self.line.check()
        if self._loss_scale is not None:
            self._loss_scale.check()
        self.install_pending()
        self._refuse_communicated()
        return self.current_algorithm.predivisor(self.line.comm)

    def sync_begins(self) -> Phase:
        """Begin a backward that requires synchronisation; return its phase, `LOCAL` in a step without communication."""
        if self.is_idle or not self.progress.syncs_gradients:
            return Phase.LOCAL
        return Phase.RECORDED if self.search.begins() else Phase.OVERLAPPED

    def backward_ends(self) -> None:
        """Record that the computation of a synchronised backward has ended."""
        self.search.backward_ends()

    def _refuse_communicated(self) -> None:
        may_hold, self._may_hold_communicated = self._may_hold_communicated, False
        declared = self.current_algorithm.channel
        if not may_hold or (isinstance(declared, Gradients) and declared.accumulates):
            return
        kept = [s for b in self.dense for s in b.slots if s.param.grad is s.view and bool(s.view.any())]
        if kept:
            self._may_hold_communicated = True
            raise ConfigError(
                f"rank {self.line.comm.rank}: the gradient of {kept[0].name!r} holds values that an earlier "
                f"synchronised backward communicated, and {self.algorithm.name!r} would count them as new. Call "
                "zero_grad() after each step, and run all backwards of a step except the last one inside "
                "model.no_sync()"
            )

    @property
    def current_algorithm(self) -> Algorithm:
        """The algorithm that communicates gradients now; full-precision all-reduce during the warm-up."""
        return self._warm_up if self.progress.is_warming_up or not self._is_own else self.algorithm

    def open_round(self, contributes: bool = True) -> GradientRound:
        """Open the round of this backward. `contributes`: whether this rank has data for it."""
        comm = self.line.comm
        if not self.buckets:
            raise CommlibError(f"rank {comm.rank}: there are parameters but no buckets. This is a bug in commlib")
        comm.step, comm.contributes, comm.optimizer_step = self.num_rounds, contributes, self.progress.step
        tail = self.search.tasks(comm)
        if self.buffers.tensors():
            tail.append(Task(lambda: "the broadcast of buffers", lambda: self.buffers.copy(self.line), True, True))
        return GradientRound(self.buckets, self.current_algorithm, self.line, tail, self._loss_scale)

    def finish(self, round_: GradientRound, publishes: bool = True) -> None:
        """Wait for a round. If `publishes`, its results become the gradients; otherwise these do not change."""
        start_s, start = time.perf_counter(), self._clock.now()
        round_.wait()
        self.line.check_streams()
        waited = (start, self._clock.now())
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
        self.progress.end_backward()

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
            with self.line.wholly():
                exchange.join()

    def communicate(self) -> None:
        """Communicate the current gradients in one round, as after a backward that did not run any hooks."""
        predivisor = self.backward_begins()
        if self.sync_begins() is Phase.LOCAL:
            return
        for bucket in self.buckets:
            bucket.start_backward(predivisor)
        self.backward_ends()
        with self.line.wholly():
            round_ = self.open_round()
            round_.flush()
            self.finish(round_)
            self.follow_round()

    def shadow_round(self) -> None:
        """Take part in a round without data, on a rank that has joined early."""
        self.install_pending()
        if self.sync_begins() is Phase.LOCAL:
            return
        self.backward_ends()
        self._set.leave_gradients()
        with self.line.wholly():
            round_ = self.open_round(contributes=False)
            round_.contribute_nothing()
            self.finish(round_, publishes=False)
            self.follow_round()

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    @override
    def allows_join(self) -> bool:
        return self._keeps_replicas_alike

    @property
    def _keeps_replicas_alike(self) -> bool:
        return not self._is_own or self.algorithm.channel.keeps_replicas_alike

    @override
    def synchronize(self) -> None:
        if not self._keeps_replicas_alike:
            with torch.no_grad():
                weights = [local_of(parameter.param.data) for parameter in self._parameters]
                self.line.run("the mean of the weights", mean_all(weights, self.line.comm))

    @override
    def begin_step(self, has_closure: bool = False) -> None:
        self._has_loaded_state = False

    @override
    def weights_were_loaded(self) -> None:
        if self._is_own and not self._has_loaded_state:  # otherwise the kept state belongs to these weights
            self.algorithm.forget()

    @property
    @override
    def bytes_sent(self) -> float:
        return self.line.transport.bytes_sent

    @override
    def settle(self) -> None:
        if not self.is_idle:
            self.search.settle()

    @override
    def state_dict(self) -> dict[str, Any]:
        names = [parameter.name for parameter in self._parameters]
        return {
            "num_rounds": self.num_rounds,
            "plan": self.search.next.saved(names),
            "hook_counts": self.backward.hook_counts(),  # None until they are known
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_rounds = int(state["num_rounds"])
        self._has_loaded_state = True

    def restore(self, plan: Plan | None, hook_counts: dict[str, int] | None) -> None:
        """Install a plan from a checkpoint, without recording. None installs the initial plan and settles it."""
        with self.line.wholly():
            self.backward.restore_counts(hook_counts)
            self._install(self.search.restore(plan))
            if plan is None:
                self.settle()

    @override
    def close(self) -> None:
        self._set.close()
        self.backward.unhook()
        if self.backward.round is not None:
            self.line.abandon(CommlibError("the model was unwrapped during backward"))
