"""The tuner of `algorithm="auto"`: measures, simulates the candidates, and switches the algorithm between two steps.

[Note: the life of a choice] All ranks count the same steps and change state at the start of the same forward:

    profiling   the engine's first synchronised backwards, without overlap, measure when each gradient is ready
    choosing    the ranks probe the network, rank 0 simulates and decides, and all ranks adopt the choice
    settling    the engine plans the buckets of the chosen algorithm
    watching    windows of steps are compared with the expected time; a departure leads back to choosing

The ratio of the measured to the predicted time of an algorithm scales its later predictions. A single candidate is
adopted before the first step, without any measurement.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from commlib import algorithms
from commlib.algorithms.auto import Auto
from commlib.algorithms.base import EXACTNESS, Algorithm, keeps_momentum
from commlib.algorithms.known import doubt
from commlib.engine import optimizers
from commlib.engine.engine import Engine
from commlib.engine.planning.plan import Parameter
from commlib.engine.planning.readiness import DeviceTimer
from commlib.errors import CommlibError, ConfigError
from commlib.network.model import DTYPES, Layer, Workload
from commlib.simulation.compare import hierarchical_form
from commlib.simulation.probe import Probe, beside_nothing, probe, scaled, work_factor
from commlib.simulation.simulator import Options, simulate
from commlib.transport.base import Transport

_log = logging.getLogger("commlib")

#: commlib's own choice of candidates, in order of preference, before the presets.
CANDIDATES = (
    *("allreduce", "bytegrad", "ef_quantized", "signsgd", "topk", "powersgd"),
    *("decentralized", "low_precision_decentralized", "local_sgd", "async_averaging"),
)
#: Candidates within this fraction of the fastest count as equally fast, given the accuracy of the predictions.
TOLERANCE = 0.03
#: Relative deviation from the expected step time that triggers a new choice.
DEPARTURE = 0.2
#: Number of synchronised backwards in the profile; the first is cold.
MIN_PROFILED = 3
#: Number of parts of a watched window, and minimum number of steps of a part. The median part is compared, so that a
#: pause between two steps (an evaluation, a checkpoint) does not count as a slow step.
_PARTS, _PART_STEPS = 5, 8


@dataclass(frozen=True)
class Times:
    """Seconds of a step without communication, and of its phases, on the slowest rank."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    ready_s: tuple[float, ...]


@dataclass(frozen=True)
class Choice:
    """The decision of rank 0.

    Attributes:
        algorithm: The chosen algorithm.
        predicted_s: Predicted seconds per step, by algorithm name.
        reason: One line of text.
    """

    algorithm: Algorithm
    predicted_s: dict[str, float]
    reason: str


class Tuner:
    """Chooses the algorithm of one wrapped model.

    Args:
        engine: The model's engine, which initially runs `Auto` as an all-reduce.
        auto: The user's options.
        connect: Creates a communicator for algorithms that communicate weights. Collective.
        synchronize: Makes the replicas identical. Collective.
    """

    def __init__(
        self,
        engine: Engine,
        auto: Auto,
        connect: Callable[[], Transport],
        synchronize: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._auto = auto
        self._connect = connect
        self._synchronize = synchronize
        self._find_nodes()
        self._watch = _Watch(DeviceTimer(engine.device))
        self.times: Times | None = None
        self._expected_s: float | None = None
        self._bias: dict[str, float] = {}
        self._steps_left = -1  # in the current window; -1 before a choice
        self.choice: Choice | None = None
        candidates = self._candidates()
        self._has_choice = len(candidates) > 1
        if auto.candidates and engine.comm.rank == 0 and (reasons := self._doubts()):
            _log.warning("commlib auto: not recommended, but named in `candidates`: %s", reasons)
        if self._has_choice:
            engine.gradients.search.num_recorded = MIN_PROFILED
            engine.gradients.search.may_settle = False  # settling ends the profile, which the choice needs
        else:
            self._use(Choice(candidates[0], {}, "the only candidate"))
            if engine.comm.rank == 0:
                _log.warning("commlib auto: %s: the only candidate; nothing is measured", candidates[0].name)

    def state_dict(self) -> dict[str, Any]:
        """Return the measured times, from which a resumed run can choose again."""
        return {} if self.times is None else dataclasses.asdict(self.times)

    def forward_begins(self) -> None:
        """Record the start of a training step, and choose if a choice is due. All ranks call it in the same steps."""
        if not self._has_choice:
            return
        if self.choice is not None and not self._engine.algorithm.channel.keeps_step:
            return  # ranks run asynchronously, without a step at which they could synchronise
        self._watch.step_begins(self._engine.gradients.reducer.last.waited)
        if self.choice is None:
            if self._engine.gradients.search.plan.ready_s and self._watch.num_steps >= MIN_PROFILED:
                self.times = self._agree_on_times()
                self._choose()
        elif self._is_settled():
            self._continue_window()

    def forward_ends(self) -> None:
        """Record the end of the forward of a training step."""
        if self._has_choice:
            self._watch.forward_ends()

    def adopt(self, name: str, times: Mapping[str, Any]) -> None:
        """Continue with the algorithm that the saved run had chosen. Collective.

        Args:
            name: Name of the algorithm in the checkpoint.
            times: The dictionary that `state_dict` returned.

        Raises:
            ConfigError: No candidate has this name.
        """
        found = {each.name: each for each in self._candidates()}
        if name not in found:
            raise ConfigError(
                f"auto: the saved run had chosen the algorithm {name!r}, which is not among {sorted(found)}"
            )
        self.times = Times(**times)
        self._use(Choice(found[name], {}, "as in the checkpoint"))

    # --- measuring ----------------------------------------------------------------------------------------------------

    def _agree_on_times(self) -> Times:
        """Return the times of the slowest rank. Collective."""
        ready_s = self._engine.gradients.search.plan.ready_s
        backward_s = max(ready_s)
        own = (*self._watch.forward_and_rest_s(backward_s), backward_s, ready_s)
        slowest = max(self._engine.transport.gather_objects(own), key=lambda each: sum(each[:3]))
        forward_s, optimizer_s, backward_s, ready_s = slowest
        return Times(forward_s, backward_s, optimizer_s, ready_s)

    def _is_settled(self) -> bool:
        """Return whether the buckets are final."""
        return self._engine.is_settled

    def _continue_window(self) -> None:
        """Count a step; at the end of a window, compare its step time with the expected one."""
        if self._steps_left < 0:
            self._begin_window()
            return
        self._steps_left -= 1
        if self._steps_left:
            return
        own_s = self._watch.window_s(self._part_steps())
        step_s = max(self._engine.transport.gather_objects(own_s))
        name = self._engine.algorithm.name
        expected_s, self._expected_s = self._expected_s, step_s
        if expected_s is not None and abs(step_s / expected_s - 1) > DEPARTURE and self.choice is not None:
            if name in self.choice.predicted_s:
                self._bias[name] = self._bias.get(name, 1.0) * step_s / self.choice.predicted_s[name]
            self._choose(f"a step took {step_s * 1e3:.0f} ms instead of {expected_s * 1e3:.0f}")
            return
        self._begin_window()

    def _begin_window(self) -> None:
        self._steps_left = _PARTS * self._part_steps()
        self._watch.begin_window()

    def _part_steps(self) -> int:
        """Return the number of steps in a part of a window: whole periods, because steps within a period differ."""
        cycle = self._engine.algorithm.channel.cycle
        return -(-_PART_STEPS // cycle) * cycle

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Algorithm]:
        return candidates_of(self._auto, self._engine.optimizer, self._engine.comm.nodes is not None)

    def _doubts(self) -> str:
        """Return which candidates, including excluded ones, should not be used with the optimizer, and why."""
        optimizer, has_nodes = self._engine.optimizer, self._engine.comm.nodes is not None
        return doubts(_usable(self._auto, optimizer, has_nodes), optimizers.kind_of(optimizer))

    def _find_nodes(self) -> None:
        """Detect the nodes, if all of them have equally many ranks. Collective."""
        with contextlib.suppress(ConfigError):  # raised on all ranks; each rank then counts as a node
            self._engine.session.find_nodes()

    def _choose(self, why: str = "") -> None:
        """Probe the network, decide on rank 0, and adopt the choice on all ranks. Collective."""
        engine = self._engine
        self._synchronize()
        nodes = engine.comm.nodes
        found = probe(engine.transport, engine.device, nodes and nodes.local)
        decided = self._decide(found) if engine.comm.rank == 0 else None
        decided = engine.transport.gather_objects(decided)[0]
        if isinstance(decided, str):
            engine.transport.part()
            raise CommlibError(f"auto: rank 0 could not simulate the candidates: {decided}")
        name, predicted_s, reason = decided
        chosen = next(each for each in self._candidates() if each.name == name)
        self._use(Choice(chosen, predicted_s, reason))
        if engine.comm.rank == 0:
            _log.warning("commlib auto: %s%s", f"{why}; " if why else "", reason)

    def _decide(self, found: Probe) -> tuple[str, dict[str, float], str] | str:
        """Return the chosen name, the predicted seconds of each candidate, and the reason; or the error as a string."""
        try:
            return self._simulate_all(found)
        except Exception as error:  # for example in a user's candidate; the other ranks wait for the result
            return repr(error)

    def _simulate_all(self, found: Probe) -> tuple[str, dict[str, float], str]:
        assert self.times is not None
        workload = workload_of(self._engine.parameters, self.times)
        candidates = self._candidates()
        # Even a corrected prediction is no shorter than a step without communication.
        predicted_s = {
            c.name: max(workload.step_s, self._predict(c, workload, found) * self._bias.get(c.name, 1.0))
            for c in candidates
        }
        chosen = preferred(candidates, predicted_s)
        shown = ", ".join(f"{n} {s * 1e3:.0f}" for n, s in sorted(predicted_s.items(), key=lambda entry: entry[1]))
        left_out = "" if self._auto.candidates else self._doubts()
        return (
            chosen,
            predicted_s,
            f"{chosen}: {found.network.bandwidth_gbps:.2f} Gbit/s and {found.network.latency_us:.0f} us a message "
            f"measured, {workload.step_s * 1e3:.0f} ms a step without communication; predicted ms: {shown}"
            + (f"; left out: {left_out}" if left_out else ""),
        )

    def _predict(self, candidate: Algorithm, workload: Workload, found: Probe) -> float:
        engine = self._engine
        parameters = [dataclasses.replace(p, group=candidate.group(p.name, p.param)) for p in engine.parameters]
        factor = work_factor(candidate, found.device, engine.comm.world_size, engine.device, parameters)
        cap_bytes = engine.gradients.search.cap_bytes
        device = scaled(found.device, factor)
        if not self._watch.uses_processor:
            device = beside_nothing(device)
        options = Options(
            steps=2, bucket_cap_mb=None if cap_bytes is None else cap_bytes / 2**20, transport=found.profile
        )
        return simulate(workload, found.network, device, candidate, options).step_s

    def _use(self, choice: Choice) -> None:
        """Switch the engine to a choice."""
        engine = self._engine
        engine.gradients.search.may_settle = True
        self.choice = choice
        self._expected_s = choice.predicted_s.get(choice.algorithm.name)
        self._steps_left = -1
        if choice.algorithm.name != engine.algorithm.name:
            engine.replace(copy.deepcopy(choice.algorithm), self._connect)


def candidates_of(auto: Auto, optimizer: torch.optim.Optimizer | None, has_nodes: bool = False) -> list[Algorithm]:
    """Return the candidates of the allowed class that can be used with an optimizer.

    If nodes have several ranks each, commlib's own candidates take their hierarchical form, where one exists. They
    exclude algorithms that are known to lose with the optimizer, and those that are not exact and were not measured
    with it (`known.doubt`).

    Raises:
        ConfigError: A candidate is not registered, two candidates have the same name, or no candidate remains.
    """
    found = _usable(auto, optimizer, has_nodes)
    if not auto.candidates:
        kind = optimizers.kind_of(optimizer)
        found = [each for each in found if not doubt(each, kind)]
    if len({each.name for each in found}) < len(found):
        raise ConfigError(f"auto: expected candidates with different names, got {[each.name for each in found]}")
    if not found:
        raise ConfigError(
            f"auto: expected a candidate of the class {auto.allow!r} or a narrower one that works with the optimizer, "
            f"got {list(auto.candidates or CANDIDATES)}"
        )
    return found


def _usable(auto: Auto, optimizer: torch.optim.Optimizer | None, has_nodes: bool) -> list[Algorithm]:
    """Return the candidates of the allowed class that can run with an optimizer, recommended or not."""
    allowed = EXACTNESS[: EXACTNESS.index(auto.allow) + 1]
    return [
        each
        for each in map(algorithms.create, auto.candidates or _own_candidates(has_nodes))
        if each.exactness in allowed
        and not (isinstance(each, Auto) or not each.channel.has_rounds)  # without rounds there are no buckets to plan
        and (optimizer is not None or not each.channel.needs_optimizer)
        and (each.optimizer_type is None or isinstance(optimizer, each.optimizer_type))
        and each.optimizer_kind in (None, optimizers.kind_of(optimizer))
        and not (each.has_momentum and keeps_momentum(optimizer))
    ]


def doubts(candidates: Iterable[Algorithm], kind: str) -> str:
    """Return the candidates that are not recommended with a kind of optimizer, and why; "" without any."""
    reasons = [(each.name, doubt(each, kind)) for each in candidates]
    return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)


def preferred(candidates: Sequence[Algorithm], predicted_s: Mapping[str, float]) -> str:
    """Return the most exact candidate within `TOLERANCE` of the fastest, by name; the first of equally exact ones.

    Args:
        candidates: Candidates in order of preference.
        predicted_s: Predicted seconds per step, by name.
    """
    bound_s = min(predicted_s.values()) * (1 + TOLERANCE)
    close = [each for each in candidates if predicted_s[each.name] <= bound_s]
    return min(close, key=lambda each: EXACTNESS.index(each.exactness)).name


def _own_candidates(has_nodes: bool) -> list[Algorithm]:
    forms = [hierarchical_form(name) if has_nodes else None for name in CANDIDATES]
    own = [form or algorithms.create(name) for form, name in zip(forms, CANDIDATES, strict=True)]
    return [*own, *map(algorithms.create, algorithms.PRESETS)]


def workload_of(parameters: Sequence[Parameter], times: Times) -> Workload:
    """Return the trained model as a workload: one layer per dense parameter, in reverse order of readiness.

    Raises:
        CommlibError: No parameter is dense.
    """
    dense = [(at, p) for at, p in zip(times.ready_s, parameters, strict=True) if not p.sparse]
    if not dense:
        raise CommlibError("auto: the model has sparse gradients only")
    dense.sort(key=lambda entry: entry[0])
    layers, before = [], 0.0
    for at, parameter in dense:
        layer, _, name = parameter.name.rpartition(".")
        layers.append(Layer(layer, ((name, tuple(parameter.param.shape) or (1,)),), max(at - before, 0.0)))
        before = at
    names = {value: key for key, value in DTYPES.items()}
    return Workload(
        name="this model",
        layers=tuple(reversed(layers)),
        batch_per_rank=1,
        forward_s=max(times.forward_s, 1e-6),
        backward_s=max(times.backward_s, 1e-6),
        optimizer_s=max(times.optimizer_s, 0.0),
        dtype=names.get(dense[0][1].param.dtype, "fp32"),
        source="measured",
    )


class _Watch:
    """Step times on this rank.

    Args:
        timer: The model's timer. On CUDA, a moment is an event of its stream and is read only on request.
    """

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self._begins: list[Any] = []
        self._forwards: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any] | None] = []
        self._processor_s: list[float] = []

    @property
    def num_steps(self) -> int:
        """Number of complete steps recorded."""
        return max(0, len(self._begins) - 1)

    def step_begins(self, waited: tuple[Any, Any] | None) -> None:
        """Record the start of a forward; `waited` holds when the last step started and stopped waiting for rounds."""
        self._begins.append(self._timer.now())
        self._processor_s.append(time.thread_time())
        self._waits.append(waited)

    def forward_ends(self) -> None:
        """Record the end of a forward."""
        self._forwards.append((self._begins[-1], self._timer.now()))

    def _seconds(self, spans: Iterable[tuple[Any, Any] | None]) -> list[float]:
        self._timer.arrive(self._begins[-1])  # the latest moment
        return [0.0 if span is None else self._timer.seconds(*span) for span in spans]

    @property
    def uses_processor(self) -> bool:
        """Whether this thread was busy for most of a step, excluding the wait for communication."""
        spent_s = self._processor_s[-1] - self._processor_s[0]
        (all_s,) = self._seconds([(self._begins[0], self._begins[-1])])
        return spent_s > 0.5 * (all_s - sum(self._seconds(self._waits[1:])))

    def forward_and_rest_s(self, backward_s: float) -> tuple[float, float]:
        """Return the medians of forward, and of the rest of a step without backward and waiting."""
        steps_s = self._seconds(itertools.pairwise(self._begins))
        rests_s = [step_s - waited_s for step_s, waited_s in zip(steps_s, self._seconds(self._waits[1:]), strict=True)]
        forward_s = median(self._seconds(self._forwards))
        return forward_s, max(0.0, median(rests_s) - forward_s - backward_s)

    def begin_window(self) -> None:
        """Discard the records before now."""
        self._begins, self._processor_s = self._begins[-1:], self._processor_s[-1:]
        self._waits, self._forwards = [], []

    def window_s(self, part_steps: int) -> float:
        """Return the mean seconds of a step in the median part of the window."""
        return median(self._seconds(itertools.pairwise(self._begins[::part_steps]))) / part_steps
