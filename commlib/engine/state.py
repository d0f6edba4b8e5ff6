"""Saving and restoring the communication's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commlib.algorithms.base import Algorithm, Runner
from commlib.engine.plan import Plan
from commlib.errors import ConfigError

if TYPE_CHECKING:
    from commlib.engine.engine import Engine

_FORMAT = 1


def save(engine: Engine) -> dict[str, Any]:
    """Return the engine's state on this rank; see `commlib.state_dict`."""
    if engine.weights is not None:
        engine.weights.drain()
    if not engine.is_idle:
        engine.planning.settle()
    names = [parameter.name for parameter in engine.parameters]
    pending = engine.planning.next
    return {
        "format": _FORMAT,
        "algorithm": engine.algorithm.name,
        "world_size": engine.comm.world_size,
        "rank": engine.comm.rank,
        "step": engine.schedule.step,
        "num_rounds": engine.num_rounds,
        "num_weight_rounds": engine.weights.num_started if engine.weights else 0,
        "plan": None
        if pending.kind == "initial"
        else {"buckets": [[names[idx] for idx in members] for members in pending.buckets], "ready_s": pending.ready_s},
        "hook_counts": engine.backward.hook_counts(),  # None before they are known
        "state": _keeper(engine).state_dict(),
    }


def load(engine: Engine, state: dict[str, Any]) -> None:
    """Take over what `save` returned; see `commlib.load_state_dict`.

    Raises:
        ConfigError: The state is of another format, algorithm or model, or, where it is not the same on all ranks, of
            another rank or world size. Nothing was changed then.
    """
    expected = {"format": _FORMAT, "algorithm": engine.algorithm.name}
    if not engine.algorithm.traits.portable:
        expected |= {"world_size": engine.comm.world_size, "rank": engine.comm.rank}
    for key, value in expected.items():
        if state.get(key) != value:
            raise ConfigError(
                f"rank {engine.comm.rank}: the saved communication state has {key} {state.get(key)!r}, expected "
                f"{value!r}. Load the file of this rank, written by a run of the same algorithm and world size"
            )
    plan = _plan(engine, state["plan"])
    with engine.wholly():
        engine.restore(plan, state["hook_counts"])
        _keeper(engine).load_state_dict(state["state"])
        engine.schedule.step = int(state["step"])
        engine.num_rounds = int(state["num_rounds"])
        if engine.weights is not None:
            engine.weights.loaded_state()
            if not engine.algorithm.traits.asynchronous:  # where ranks may be a round apart
                engine.weights.num_started = engine.weights.num_rounds = int(state["num_weight_rounds"])


def _keeper(engine: Engine) -> Algorithm | Runner:
    """Return what holds the algorithm's state: the algorithm, or its runner."""
    return engine.algorithm if engine.attached is None else engine.attached.runner


def _plan(engine: Engine, saved: dict[str, Any] | None) -> Plan | None:
    if saved is None:
        return None
    index = {parameter.name: idx for idx, parameter in enumerate(engine.parameters)}
    names = [name for members in saved["buckets"] for name in members]
    if sorted(names) != sorted(index):
        different = sorted(set(names) ^ set(index))
        raise ConfigError(
            f"rank {engine.comm.rank}: the saved bucket plan is of another model: {len(names)} parameters, expected "
            f"{len(index)}; first difference {different[:1]}"
        )
    buckets = tuple(tuple(index[name] for name in members) for members in saved["buckets"])
    return Plan(buckets, "restored", tuple(saved["ready_s"]))
