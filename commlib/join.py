"""Uneven inputs (torch's `Join`): a rank without data takes part in the rounds of the ranks that still train."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from commlib.engine.engine import Engine
from commlib.transport.base import Communication, Communicator


class Shadowed(Protocol):
    """The wrapped model that a joined rank shadows.

    Attributes:
        engine: Its engine.
    """

    engine: Engine

    def agree_on_state(self) -> None:
        """Check loaded state, as a forward does after state was loaded."""
        ...

    def broadcast_model(self, source: int = 0) -> None:
        """Copy the parameters and buffers of rank `source` to all ranks."""
        ...


class JoinState:
    """The ranks that still have data, exchanged at each forward inside a `Join` context.

    Attributes:
        source: The lowest rank that still has data. Its buffers are copied to all ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._joinable: Any = None
        self._divides_by_initial = True
        self.config = _JoinConfig.construct_disabled_join_config()
        self.source = 0

    @property
    def enabled(self) -> bool:
        """Whether the model is in a `Join` context."""
        return self.config.enable

    def set_config(self, config: Any, joinable: Any) -> None:
        """Store the configuration that `Join` sets."""
        self.config = config
        self._joinable = joinable if config.enable else None

    def hook(self, model: Shadowed, divides_by_initial: bool) -> JoinHook:
        """Return the hook for a `Join` context that is being entered."""
        self._divides_by_initial = divides_by_initial
        return _ShadowHook(self, model)

    def announce(self, engine: Engine, syncs: bool) -> None:
        """Notify the ranks that have joined whether this iteration communicates."""
        Join.notify_join_context(self._joinable)
        self.exchange(engine, True, syncs)

    def exchange(self, engine: Engine, active: bool, syncs: bool) -> bool:
        """Exchange the flags with all ranks. Returns whether any rank communicates in this iteration."""
        own = torch.tensor([active, syncs], dtype=torch.uint8, device=engine.device)
        everyone = own.new_empty(2 * self._comm.world_size)
        engine.session.run("the exchange of Join flags", _gather(everyone, own, self._comm))
        table = everyone.view(-1, 2).tolist()
        ranks = [rank for rank, row in enumerate(table) if row[0]]
        self.source = engine.gradients.buffers.source = ranks[0] if ranks else 0
        self._comm.num_active = self._comm.world_size if self._divides_by_initial else max(1, len(ranks))
        return any(row[1] for row in table)

    def leave(self, engine: Engine) -> None:
        """Reset at the end of the context: all ranks count again."""
        self.config = _JoinConfig.construct_disabled_join_config()
        self._joinable = None
        self._comm.num_active = self._comm.world_size
        self.source = engine.gradients.buffers.source = 0


class _ShadowHook(JoinHook):
    def __init__(self, state: JoinState, model: Shadowed) -> None:
        self._state = state
        self._model = model
        self._engine = model.engine

    def main_hook(self) -> None:
        """Take part in one iteration of the ranks that still have data."""
        any_syncs = self._state.exchange(self._engine, False, False)
        self._model.agree_on_state()
        if any_syncs:
            self._engine.gradients.shadow_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that joined last to all ranks."""
        self._state.exchange(self._engine, is_last_joiner, False)
        self._model.broadcast_model(self._state.source)
        self._state.leave(self._engine)


def _gather(output: torch.Tensor, own: torch.Tensor, comm: Communicator) -> Communication:
    yield comm.all_gather(output, own)
