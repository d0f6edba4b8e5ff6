"""Profiling of a user's model as a workload: shapes, and the time of each layer measured by hooks."""

from __future__ import annotations

import runpy
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from commlib.errors import ConfigError
from commlib.network.model import DTYPES, Layer, Workload
from commlib.network.workloads import save

__all__ = ["profile_model", "profile_script", "save", "traceback_in"]

#: A longer step than this many shortest ones shows that the times depend on other work on the machine.
_STEADY = 1.5


def profile_model(
    model: torch.nn.Module,
    step: Callable[[torch.nn.Module], Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    name: str = "",
    batch_per_rank: int = 1,
    steps: int = 5,
    warmup_steps: int = 2,
) -> Workload:
    """Measure training steps of an unwrapped model and return them as a workload.

    Gradients are accumulated within a step and cleared between steps. With an optimizer, parameters change. A workload
    has a single dtype, which is the dtype of most elements. Parameters without a gradient are communicated like all
    others and count as ready when backward ends. `Workload.source` reports both cases.

    Args:
        model: The model. Its parameters that require a gradient become the workload's.
        step: Called with the model; runs one forward and one backward.
        optimizer: Stepped after `step` and timed. State with "exp_avg" marks it as "adam", otherwise it is "sgd".
        name: Name of the workload; the model's class by default.
        batch_per_rank: Samples per step.
        steps: Number of measured steps; the workload has their median times.
        warmup_steps: Number of steps before the measured ones.

    Raises:
        ConfigError: No parameter requires a gradient or gets one in `step`, the dtype is not a workload dtype, or a
            number of steps is out of range.
    """
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
    dtype, remarks = _dtype(parameters)
    if steps < 1 or warmup_steps < 0:
        raise ConfigError(f"profile: expected steps >= 1 and warmup_steps >= 0, got {steps=}, {warmup_steps=}")
    timer = _StepTimer(next(iter(parameters.values())).device, model, parameters)
    with timer.hooked():
        for done in range(warmup_steps + steps):
            model.zero_grad(set_to_none=True)
            timer.begin()
            step(model)
            if all(p.grad is None for p in parameters.values()):
                raise ConfigError("profile: step(model) left no gradient in any parameter: it must call backward()")
            timer.end_backward()
            if optimizer is not None:
                optimizer.step()
            timer.end(keep=done >= warmup_steps)
    state = optimizer.state.values() if optimizer is not None else ()
    ready_s = {key: statistics.median(times) for key, times in timer.ready_s.items() if times}
    unused = [key for key in parameters if key not in ready_s]
    if unused:
        shown = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        remarks.append(
            f"{len(unused)} of {len(parameters)} parameters got no gradient and count as ready last: {shown}"
        )
        ready_s |= dict.fromkeys(unused, statistics.median(timer.backward_s))
    steps_s = [sum(parts) for parts in zip(timer.forward_s, timer.backward_s, timer.optimizer_s, strict=True)]
    shortest_s, longest_s = min(steps_s), max(steps_s)
    measured = (
        f"measured: median of {steps} steps of {shortest_s * 1e3:.3g} to {longest_s * 1e3:.3g} ms, "
        f"torch {torch.__version__}, {timer.device}"
    )
    if longest_s > _STEADY * shortest_s:
        remarks.append("the steps differ: measure more of them on an idle machine")
    return Workload(
        name=name or type(model).__name__,
        layers=_layers(parameters, ready_s),
        batch_per_rank=batch_per_rank,
        forward_s=statistics.median(timer.forward_s),
        backward_s=statistics.median(timer.backward_s),
        optimizer_s=statistics.median(timer.optimizer_s) if optimizer is not None else 0.0,
        device=str(timer.device.type),
        dtype=dtype,
        optimizer="adam" if any("exp_avg" in entry for entry in state) else "sgd",
        source="; ".join([measured, *remarks]),
    )


def profile_script(
    script: Path | str, arguments: Sequence[str] = (), *, batch_per_rank: int = 1, steps: int = 5
) -> Workload:
    """Run a Python file and profile its globals `model`, `step` and, if defined, `optimizer`.

    The file's folder is first on `sys.path` and `sys.argv` holds its path and the arguments, as when Python runs it.
    Its `__name__` is not "__main__", so code under that guard, such as training, does not run.

    Raises:
        ConfigError: The file or a global is missing. See also `profile_model`.
    """
    if not Path(script).is_file():
        raise ConfigError(f"profile: no such file: {str(script)!r}")
    with _as_script(Path(script), arguments):
        found = runpy.run_path(str(script), run_name="__commlib_profile__")
        return _profile_globals(found, Path(script), batch_per_rank, steps)


def traceback_in(script: Path | str, error: BaseException) -> str | None:
    """Return the traceback of an error from the script's first frame on. None if the script did not raise it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != str(script):
        frame = frame.tb_next
    is_invalid = isinstance(error, SyntaxError) and error.filename == str(script)  # it has no frame
    return "".join(traceback.format_exception(type(error), error, frame)) if frame or is_invalid else None


@contextmanager
def _as_script(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def _profile_globals(found: dict[str, Any], script: Path, batch_per_rank: int, steps: int) -> Workload:
    model, step = found.get("model"), found.get("step")
    if not isinstance(model, torch.nn.Module) or not callable(step):
        raise ConfigError(
            f"profile: expected {str(script)!r} to define `model`, a torch.nn.Module, and `step(model)`, outside of "
            f"`if __name__ == '__main__'`, got model={type(model).__name__}, step={type(step).__name__}"
        )
    return profile_model(
        model,
        step,
        optimizer=found.get("optimizer"),
        name=script.stem,
        batch_per_rank=batch_per_rank,
        steps=steps,
    )


class _StepTimer:
    """Records when a forward ends and when each gradient is ready, in seconds, by hooks.

    The device is synchronised at both ends of a step. On a CUDA device, events record the times without a
    synchronisation within the step.
    """

    def __init__(self, device: torch.device, model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
        self.device = device
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self.optimizer_s: list[float] = []
        self.ready_s: dict[str, list[float]] = {key: [] for key in parameters}
        self._model = model
        self._parameters = parameters
        self._marks: dict[str, Any] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Register hooks on the parameters and on the model's forward."""

        def marks(key: str) -> Callable[..., None]:
            return lambda *_: self._mark(key)

        handles = [p.register_post_accumulate_grad_hook(marks(key)) for key, p in self._parameters.items()]
        handles.append(self._model.register_forward_hook(marks("forward end")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        self._marks = {}
        self._wait()
        self._mark("begin")

    def end_backward(self) -> None:
        self._mark("backward end")

    def end(self, keep: bool) -> None:
        self._mark("end")
        self._wait()
        if not keep:
            return
        if "forward end" not in self._marks:
            raise ConfigError("profile: step(model) did not call model(...)")
        self.forward_s.append(self._between("begin", "forward end"))
        self.backward_s.append(self._between("forward end", "backward end"))
        self.optimizer_s.append(self._between("backward end", "end"))
        for key, times in self.ready_s.items():
            if key in self._marks:
                times.append(self._between("forward end", key))

    def _mark(self, key: str) -> None:
        """Record the time. A parameter that is used twice keeps the last one."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[key] = event
        else:
            self._marks[key] = time.perf_counter()

    def _between(self, first: str, second: str) -> float:
        begin, end = self._marks[first], self._marks[second]
        return begin.elapsed_time(end) * 1e-3 if self.device.type == "cuda" else end - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _dtype(parameters: dict[str, torch.nn.Parameter]) -> tuple[str, list[str]]:
    """Return the dtype of most elements, and a remark if there are other dtypes."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in parameters.values():
        counts[parameter.dtype] += parameter.numel()
    most = max(counts, key=counts.__getitem__, default=None)
    names = [name for name, dtype in DTYPES.items() if dtype == most]
    if not names:
        raise ConfigError(
            f"profile: expected parameters that require gradients, most of them of one of {', '.join(DTYPES)}, got "
            f"{sorted(map(str, counts)) or 'none'}"
        )
    others = {str(dtype).removeprefix("torch."): count for dtype, count in counts.items() if dtype != most}
    shown = ", ".join(f"{count:,} elements of {dtype}" for dtype, count in others.items())
    return names[0], [f"{shown} count as {names[0]}"] if others else []


def _layers(parameters: dict[str, torch.nn.Parameter], ready_s: dict[str, float]) -> tuple[Layer, ...]:
    """Return one layer per module, such that gradients become ready at the measured times.

    A layer's weight is the time between its gradients and those of the layer before. Layers are ordered by backward,
    last first, which may differ from the order of registration.
    """
    modules: dict[str, dict[str, torch.nn.Parameter]] = {}
    for key, parameter in parameters.items():
        owner, _, own = key.rpartition(".")
        modules.setdefault(owner or own, {})[own] = parameter
    at_s = {owner: max(ready_s[_key(owner, own)] for own in members) for owner, members in modules.items()}
    layers, before_s = [], 0.0
    for owner in sorted(modules, key=at_s.__getitem__):
        shapes = tuple((own, tuple(parameter.shape)) for own, parameter in modules[owner].items())
        layers.append(Layer(owner, shapes, max(0.0, at_s[owner] - before_s)))
        before_s = at_s[owner]
    return tuple(reversed(layers))


def _key(owner: str, own: str) -> str:
    return own if owner == own else f"{owner}.{own}"
