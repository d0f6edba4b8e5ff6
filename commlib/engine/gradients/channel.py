"""The channel of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm
from commlib.engine.buckets.bucket import Bucket, EmbeddingBucket
from commlib.engine.channel import OpenChannel, Settings
from commlib.engine.gradients.averaging import Averaging
from commlib.engine.gradients.backward import Backward, StreamedBackward
from commlib.engine.gradients.reducer import Reducer
from commlib.engine.planning.plan import Parameter, Plan
from commlib.engine.rounds.schedule import StepCounter
from commlib.engine.session import Session
from commlib.errors import CommlibError
from commlib.primitives.replicate import mean_all
from commlib.sharding.local import local_of


class GradientChannel(OpenChannel):
    """The gradients of one model: a reducer for its buckets and rounds, and a backward whose hooks drive it.

    Every algorithm has this channel. An algorithm that does not communicate gradients may average them in full
    precision during a warm-up; without a warm-up, the channel is *idle*: it has no hooks and no buckets. It is also
    idle in a group of one rank if the algorithm has nothing to do there.

    Args:
        session: Carries the rounds.
        device: Device of the parameters.
        settings: Arguments of `wrap`.
        algorithm: The model's algorithm.
        counter: Counts the steps.
        parameters: The parameters, in the model's order.

    Attributes:
        reducer: Runs the rounds.
        backward: State of the current backward.
        search: The reducer's search for the bucket plan.
        buffers: The model's buffers that each round broadcasts.
    """

    def __init__(
        self,
        session: Session,
        device: torch.device,
        settings: Settings,
        algorithm: Algorithm,
        counter: StepCounter,
        parameters: Sequence[Parameter],
    ) -> None:
        self.session = session
        self.keeper = algorithm
        self._has_loaded_state = False  # since the last step
        self.reducer = Reducer(session, device, settings, _averaging(algorithm, counter, session, settings.scaler))
        self.search = self.reducer.search
        self.buffers = self.reducer.buffers
        self.backward = (
            StreamedBackward(self.reducer, lambda: torch.cuda.current_stream(device))
            if device.type == "cuda"
            else Backward(self.reducer)
        )
        own = weakref.ref(self.backward)
        session.when_ended.append(lambda error: (backward := own()) and backward.cancel(error))
        self._start(parameters)

    def use(self, algorithm: Algorithm, counter: StepCounter, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters with this algorithm from now on. Collective; not allowed during backward."""
        self.keeper = algorithm
        self.reducer.averaging = _averaging(algorithm, counter, self.session, self.reducer.settings.scaler)
        self._start(parameters)

    def _start(self, parameters: Sequence[Parameter]) -> None:
        if self.reducer.averaging.algorithm.channel.wants_nodes:
            self.session.find_nodes()
        self.adopt(parameters)

    @override
    def adopt(self, parameters: Sequence[Parameter]) -> None:
        reducer = self.reducer
        before = reducer.follow(parameters)
        self.backward.follow(reducer.bucket_set.slots)
        reducer.install(reducer.search.restart(parameters))
        if not self.is_idle:
            reducer.bucket_set.hook(weakref.ref(self.backward))
        for slot in before:
            slot.unhook()

    @override
    def set_up(self, settings: Settings) -> None:
        self.reducer.settings = settings
        self.reducer.install(self.search.next)

    @property
    def is_idle(self) -> bool:
        """Whether the channel is idle; see above."""
        return self.reducer.averaging.is_idle

    @property
    @override
    def buckets(self) -> list[Bucket | EmbeddingBucket]:
        return self.reducer.buckets

    # --- plans and rounds -------------------------------------------------------------------------------------------

    def install_pending(self) -> None:
        """Install the pending plan, if there is one and no backward is under way."""
        if not self.backward.is_under_way:
            self.reducer.install_pending()

    def communicate(self) -> None:
        """Communicate the current gradients in one round, as after a backward that did not run any hooks."""
        reducer = self.reducer
        predivisor = reducer.begin()
        if not reducer.averaging.is_due:
            return
        reducer.search.begins()
        for bucket in reducer.buckets:
            bucket.start_backward(predivisor)
        reducer.search.backward_ends()
        with self.session.wholly():
            round_ = reducer.open_round()
            round_.flush()
            reducer.finish(round_)
            reducer.follow_round()

    def shadow_round(self) -> None:
        """Take part in a round without data, on a rank that has joined early."""
        reducer = self.reducer
        self.install_pending()
        if not reducer.averaging.is_due:
            return
        reducer.search.begins()
        reducer.search.backward_ends()
        reducer.bucket_set.leave_gradients()
        with self.session.wholly():
            round_ = reducer.open_round(contributes=False)
            round_.contribute_nothing()
            reducer.finish(round_, publishes=False)
            reducer.follow_round()

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def num_rounds(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of rounds so far."""
        return self.reducer.num_rounds

    @property
    def waited_s(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Seconds that the training thread has waited for rounds so far (on CUDA: host time)."""
        return self.reducer.waited_s

    @property
    @override
    def bytes_sent(self) -> float:
        return self.session.transport.bytes_sent

    @property
    @override
    def is_settled(self) -> bool:
        return self.is_idle or self.search.plan.kind not in ("initial", "trial")

    @override
    def has_moved(self) -> bool:
        return self.reducer.bucket_set.has_moved()

    @property
    @override
    def allows_join(self) -> bool:
        return self.reducer.averaging.keeps_replicas_alike

    @override
    def synchronize(self) -> None:
        if not self.reducer.averaging.keeps_replicas_alike:
            with torch.no_grad():
                weights = [local_of(parameter.param.data) for parameter in self.reducer.parameters]
                self.session.run("the mean of the weights", mean_all(weights, self.session.comm))

    @override
    def begin_step(self, has_closure: bool = False) -> None:
        self._has_loaded_state = False

    @override
    def weights_were_loaded(self) -> None:
        if not self._has_loaded_state:  # otherwise the kept state belongs to these weights
            self.reducer.averaging.forget()

    @override
    def settle(self) -> None:
        if not self.is_idle:
            self.search.settle()

    @override
    def state_dict(self) -> dict[str, Any]:
        names = [parameter.name for parameter in self.reducer.parameters]
        return {
            "num_rounds": self.num_rounds,
            "plan": self.search.next.saved(names),
            "hook_counts": self.backward.hook_counts(),  # None until they are known
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reducer.num_rounds = int(state["num_rounds"])
        self._has_loaded_state = True

    @override
    def load_as_new_member(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state)
        self.backward.restore_counts(state["hook_counts"])

    def restore(self, plan: Plan | None, hook_counts: dict[str, int] | None) -> None:
        """Install a plan from a checkpoint, without recording. None installs the initial plan and settles it."""
        with self.session.wholly():
            self.backward.restore_counts(hook_counts)
            self.reducer.install(self.search.restore(plan))
            if plan is None:
                self.settle()

    @override
    def close(self) -> None:
        self.reducer.bucket_set.close()
        self.backward.unhook()
        if self.backward.round is not None:
            self.session.abandon(CommlibError("the model was unwrapped during backward"))


def _averaging(algorithm: Algorithm, counter: StepCounter, session: Session, scaler: Any) -> Averaging:
    return Averaging(algorithm, counter, session.comm, scaler, session.is_elastic)
