"""One backward of a model: from autograd's hooks to a round of gradients.

[Note: the life of a backward] The first hook that fires (on an output of the forward, or on a parameter where the
outputs could not be hooked) *begins* a backward and queues a callback for its end. The first gradient *opens* a round.
Each bucket whose gradients are all there is gathered and *launched*. The callback *flushes* the buckets that are not
complete (unused parameters), launches what goes beside them (rank 0's buffers) and waits. A backward that touches no
parameter (`torch.autograd.grad` on inputs) opens no round. Several models in one backward all flush before any of them
waits. An exception in backward destroys the callback: a backward whose callback is gone is forgotten if it had
communicated nothing, and else ends the model's communication.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from commlib.engine.bucket import Run
from commlib.engine.gradient_round import GradientRound
from commlib.engine.slot import Slot
from commlib.errors import CommlibError, ConfigError

if TYPE_CHECKING:
    from commlib.engine.engine import Engine

_log = logging.getLogger("commlib")

_under_way: weakref.WeakSet[Backward] = weakref.WeakSet()


class _End:
    """The callback at the end of a backward. It dies with the backward, also with one that an exception ends."""

    __slots__ = ("__weakref__", "_engine")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self) -> None:
        self._engine.backward.end()


class Backward:
    """Where the backward of one model is, from hook to hook.

    Args:
        engine: The model's; it owns this.

    Attributes:
        require_sync: Whether backwards of forwards that are made now are synchronised.
        is_profiling: Whether the one under way is recorded, without overlap.
        round: Its round, once there is one.
        has_counts: Whether it is known how often each hook fires.
    """

    def __init__(self, engine: Engine) -> None:
        self._reference: Callable[[], Engine | None] = weakref.ref(engine)
        self.require_sync = True
        self.is_profiling = False
        self.round: GradientRound | None = None
        self.has_counts = False
        self._slots: Sequence[Slot] = ()
        self._forward_ran = self._expects_sync = False  # since the last backward: any forward, a synchronised one
        self._has_hidden_outputs = False  # a forward returned nothing whose gradient announces the backward
        self._has_warned = False
        self._graph_task: int | None = None
        self._callback: Callable[[], _End | None] = lambda: None
        self._sync = self._is_flushed = False
        self._early_divisor = 1.0

    @property
    def _engine(self) -> Engine:
        engine = self._reference()
        assert engine is not None
        return engine

    @property
    def is_under_way(self) -> bool:
        """Whether a backward began that has not ended."""
        return self._graph_task is not None

    # --- hooks ------------------------------------------------------------------------------------------------------

    def follow(self, slots: Sequence[Slot]) -> None:
        """Expect gradients of these parameters, of which it is not known how often their hooks fire."""
        self._slots, self.has_counts = slots, False

    def hook_counts(self) -> dict[str, int] | None:
        """Return how often each gradient hook fires in a backward, where not once; None before that is known."""
        if not self.has_counts:
            return None
        return {slot.name: slot.expected for slot in self._slots if slot.expected != 1}

    def restore_counts(self, counts: dict[str, int] | None) -> None:
        """Take over what `hook_counts` returned."""
        self.has_counts = counts is not None
        for slot in self._slots:
            slot.expected = (counts or {}).get(slot.name, 1)

    def announce(self, outputs: Sequence[torch.Tensor]) -> None:
        """A forward has ended: the first gradient of any of these outputs announces its backward."""
        engine, sync = self._engine, self.require_sync
        self._has_hidden_outputs = not outputs
        self._forward_ran = True
        self._expects_sync |= sync
        for tensor in outputs:
            tensor.register_hook(lambda _: engine.backward.begin(sync))

    # --- the beginning ----------------------------------------------------------------------------------------------

    def begin(self, sync: bool) -> None:
        """Take part in the backward that is running now; called by every hook on an output, counts once."""
        self.forget_failed()
        if self._graph_task is None:
            engine = self._engine
            engine.check()
            engine.install_pending()
            self._refuse_communicated(engine)
            self._graph_task = torch._C._current_graph_task_id()
            end = _End(engine)
            self._callback = weakref.ref(end)
            _under_way.add(self)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            self._sync = self.is_profiling = self._is_flushed = False
            # Until it is known how often each hook fires, a gradient that is placed may still grow: divide at the end.
            divisor = engine.current_algorithm.predivisor(engine.comm) if self.has_counts else 1.0
            for bucket in engine.buckets:
                bucket.start_backward(divisor)
            self._early_divisor = divisor
        if sync and not self._sync:
            self._start_sync(self._engine)

    def _begin_unannounced(self) -> None:
        """A gradient came, and no output of a forward announced it."""
        is_local = not self._forward_ran and not self._has_hidden_outputs
        if is_local and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "gradients of %r came without a forward of the wrapped model (a call of model.module, or of another "
                "method of it); as with DDP they stay local",
                self._slots[0].name,
            )
        self.begin(self._expects_sync or (self._has_hidden_outputs and self.require_sync))

    def _start_sync(self, engine: Engine) -> None:
        self._sync = engine.schedule.gradients and not engine.is_idle
        if not self._sync:
            return
        self.is_profiling = engine.planning.begins()
        complete = [bucket for bucket in engine.buckets if bucket.pending == 0]
        if complete and not self.is_profiling:  # an unsynchronised forward shares this backward, and came first
            self.round = engine.open_round()
            for bucket in complete:
                self.round.launch(bucket)

    def _refuse_communicated(self, engine: Engine) -> None:
        """Refuse gradients that were communicated already where the algorithm would take them for a rank's own.

        Raises:
            ConfigError: There are some.
        """
        algorithm = engine.current_algorithm
        if algorithm.traits.accumulates or not engine.num_rounds:
            return
        kept = [s for b in engine.dense for s in b.slots if s.param.grad is s.view and bool(s.view.any())]
        if kept:
            raise ConfigError(
                f"rank {engine.comm.rank}: the gradient of {kept[0].name!r} holds what an earlier synchronised "
                f"backward has communicated, and {algorithm.name!r} would count it as new. Call zero_grad() after each "
                "step, and make all backwards of a step but the last one inside model.no_sync()"
            )

    # --- gradients --------------------------------------------------------------------------------------------------

    def on_gradient(self, slot: Slot) -> None:
        """Take note that a parameter has its gradient in `param.grad`. Runs for each of them: every line counts."""
        if self._graph_task is None:
            self._begin_unannounced()
        if self.is_profiling:
            self._engine.planning.readiness.mark(slot.idx)
        slot.left = left = slot.left - 1
        if left == 0:
            run = slot.run
            run.pending -= 1  # pyright: ignore[reportOptionalMemberAccess]
            if run.pending == 0:  # pyright: ignore[reportOptionalMemberAccess]
                self._run_complete(run)  # pyright: ignore[reportArgumentType]
        elif left < 0 and self.has_counts:
            self._fired_again(slot)

    def _fired_again(self, slot: Slot) -> None:
        if slot.run is not None and slot.run.is_placed:
            raise CommlibError(
                f"rank {self._engine.comm.rank}: a further gradient of {slot.name!r} came after it had been gathered: "
                f"it was ready {slot.expected - slot.left} times in this backward and {slot.expected} times in the "
                "first one. Run the model the same way in every step, or use checkpoint(..., use_reentrant=False)."
            )

    def _run_complete(self, run: Run) -> None:
        """All gradients of the run are there."""
        run.bucket.pending -= 1
        if self._sync:
            if self.round is None:
                self.round = self._engine.open_round()
            run.place(self._early_divisor)
            if run.bucket.pending == 0 and not self.is_profiling:
                self.round.launch(run.bucket)

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The callback at the end of backward."""
        engine = self._engine
        try:
            for each in [other for other in _under_way if other._graph_task == self._graph_task]:
                each._flush()
            if self.round is not None:
                engine.finish(self.round)
        except BaseException as error:
            engine.abandon(error)
            raise
        finally:
            self._leave()

    def _flush(self) -> None:
        """Launch what is not complete. Every model in this backward does so before any of them waits."""
        if self._is_flushed:
            return
        self._is_flushed = True
        has_gradients = self.round is not None or any(slot.left != slot.expected for slot in self._slots)
        if not self.has_counts and has_gradients:
            self.has_counts = True
            for slot in self._slots:
                slot.expected = max(1, slot.expected - slot.left)
        if self._sync and has_gradients:
            engine = self._engine
            if self.is_profiling:
                engine.planning.readiness.end()
            self.round = self.round or engine.open_round()
            self.round.flush()

    def forget_failed(self) -> None:
        """Forget a backward that an exception has ended, if it communicated nothing; else end the communication."""
        if self._graph_task is None or self._callback() is not None:
            return
        if self.round is not None and self.round.has_begun:
            self._engine.abandon(
                CommlibError(
                    "the previous backward did not finish (an exception in it?), so the ranks no longer agree on what "
                    "was communicated. Restart from a checkpoint on all ranks"
                )
            )
        elif self.round is not None:
            self.round.discard()
        self._leave()

    def _leave(self) -> None:
        self.round = self._graph_task = None
        self._forward_ran = self._expects_sync = False
        _under_way.discard(self)
