"""Saving and restoring the communication's state."""

from __future__ import annotations

from typing import Any

from commlib.engine.engine import Engine
from commlib.engine.planning import plan as plans
from commlib.errors import ConfigError
from commlib.sharding.local import places_of

_FORMAT = 1


def save(engine: Engine) -> dict[str, Any]:
    """Return the engine's state on this rank; see `commlib.state_dict`."""
    engine.drain()
    saved: dict[str, Any] = {
        "format": _FORMAT,
        "algorithm": engine.algorithm.name,
        "world_size": engine.comm.world_size,
        "rank": engine.comm.rank,
        "shard": places_of([parameter.param for parameter in engine.parameters]),
        "step": engine.progress.step,
        "num_weight_rounds": 0,
    }
    for channel in engine.channels:
        channel.settle()
        saved |= channel.state_dict()
    return saved | {"state": engine.channels[-1].keeper.state_dict()}


def load(engine: Engine, state: dict[str, Any]) -> None:
    """Take over what `save` returned; see `commlib.load_state_dict`.

    Raises:
        ConfigError: The state is of another format, algorithm or model, or, where it is not the same on all ranks, of
            another rank or world size. Nothing was changed then.
    """
    rank = engine.comm.rank
    expected = {"format": _FORMAT, "algorithm": engine.algorithm.name}
    if not engine.algorithm.portable:
        expected |= {"world_size": engine.comm.world_size, "rank": rank}
    expected["shard"] = places_of([parameter.param for parameter in engine.parameters])
    for key, value in expected.items():
        if state.get(key, []) != value:
            raise ConfigError(
                f"rank {rank}: the saved communication state has {key} {state.get(key)!r}, expected "
                f"{value!r}. Load the file of this rank, written by a run of the same algorithm and world size"
            )
    try:
        plan = plans.restored(state["plan"], engine.parameters)
    except ConfigError as error:
        raise ConfigError(f"rank {rank}: {error}") from None
    with engine.line.wholly():
        engine.gradients.restore(plan, state["hook_counts"])
        engine.channels[-1].keeper.load_state_dict(state["state"])
        engine.progress.step = int(state["step"])
        for channel in engine.channels:
            channel.load_state_dict(state)
