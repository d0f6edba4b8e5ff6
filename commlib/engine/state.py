"""Saving and restoring the communication's state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from commlib import formats
from commlib.engine.engine import Engine
from commlib.engine.modes import in_plain_mode
from commlib.engine.optimizers import scale_of
from commlib.engine.planning import plan as plans
from commlib.errors import ConfigError
from commlib.sharding.local import places_of

_FORMAT = 2
#: Entries of every state, independent of the algorithm and the step.
_ENTRIES = ("plan", "hook_counts", "num_rounds", "num_weight_rounds", "step", "state")


@in_plain_mode
def save(engine: Engine) -> dict[str, Any]:
    """Return the engine's state on this rank. See `commlib.state_dict`."""
    engine.drain()
    saved: dict[str, Any] = {
        **formats.stamp(_FORMAT),
        "algorithm": engine.algorithm.name,
        "world_size": engine.comm.world_size,
        "rank": engine.comm.rank,
        "shard": places_of([parameter.param for parameter in engine.parameters]),
        "step": engine.counter.step,
        "num_weight_rounds": 0,
    }
    for channel in engine.channels:
        channel.settle()
        saved |= channel.state_dict()
    return saved | {"state": engine.channels[-1].keeper.state_dict()}


@in_plain_mode
def load(engine: Engine, state: dict[str, Any]) -> None:
    """Load the state that `save` returned. See `commlib.load_state_dict`.

    Raises:
        ConfigError: The state has another format, algorithm or model, or was saved with incompatible options, or,
            unless it is the same on all ranks, belongs to another rank or world size. Nothing has changed then.
    """
    engine.session.refuse_if_elastic("commlib.load_state_dict")
    rank = engine.comm.rank
    formats.check(state, _FORMAT, f"rank {rank}: the saved communication state")
    expected: dict[str, Any] = {"algorithm": engine.algorithm.name}
    if not engine.algorithm.portable:
        expected |= {"world_size": engine.comm.world_size, "rank": rank}
    expected["shard"] = places_of([parameter.param for parameter in engine.parameters])
    for key, value in expected.items():
        if state.get(key, []) != value:
            raise ConfigError(
                f"rank {rank}: the saved communication state has {key} {state.get(key)!r}, expected "
                f"{value!r}. Load the file of this rank, written by a run of the same algorithm and world size"
            )
    if missing := [entry for entry in _ENTRIES if entry not in state]:
        raise ConfigError(f"rank {rank}: the saved communication state is incomplete: it has no {missing[0]!r}")
    keeper = engine.channels[-1].keeper
    keeper.check_state_dict(state["state"])
    try:
        plan = plans.restored(state["plan"], engine.parameters)
    except ConfigError as error:
        raise ConfigError(f"rank {rank}: {error}") from None
    engine.forget_loads()
    with engine.session.wholly():
        for channel in engine.channels:
            channel.drop_background()
        engine.gradients.restore(plan, state["hook_counts"])
        keeper.load_state_dict(state["state"])
        engine.counter.step = int(state["step"])
        for channel in engine.channels:
            channel.load_state_dict(state)
    engine.has_loaded = engine.algorithm.channel.keeps_step


def places(engine: Engine) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) pairs of loaded state that must be identical on all ranks."""
    yield "optimizer step", str(engine.counter.step)
    if engine.scaler is not None and engine.algorithm.channel.keeps_replicas_alike:
        yield "loss scale", str(scale_of(engine.scaler))
    for channel in engine.channels:
        own = channel.state_dict()
        yield "rounds", str(own.get("num_rounds", own.get("num_weight_rounds")))
        plan = str((own.get("plan") or {}).get("buckets"))
        yield "buckets", hashlib.sha256(plan.encode()).hexdigest()[:8]
