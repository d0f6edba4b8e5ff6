"""The backward of a model, from autograd hooks to a round of gradients.

[Note: the life of a backward] The first hook that fires *begins* a backward and queues a callback for its end. It is a
hook on an output of the forward, or on a parameter if the outputs could not be hooked. The first complete segment of a
bucket *opens* a round. Each bucket whose gradients are complete is gathered and *launched*. The callback *flushes* the
incomplete buckets (unused parameters), launches further tasks (such as the broadcast of rank 0's buffers) and waits. A
backward that reaches no parameter (`torch.autograd.grad` on inputs) opens no round. If several models share a backward,
all of them flush before any of them waits. An exception in backward destroys the callback. The backward is then
discarded if it has communicated nothing; otherwise the model's communication ends.

[Note: several models] Each rank may add the losses of several models in a different order, so the callbacks of one
backward also run in different orders. All rounds are therefore under way before any rank waits for one. Agreeing on the
next plan blocks, so one thread per model does it. The threads are joined once all callbacks have started theirs.

[Note: hooks and dynamo] When a function that calls `backward` or `step` is compiled, dynamo excludes these calls from
the graph. It still inspects every Python frame within them, including hooks, and would trace and guard commlib's code.
Each hook therefore disables dynamo, which takes a third of a microsecond. No hook is a lambda, because dynamo would
inspect the lambda's frame first.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from commlib import locks
from commlib.engine.buckets.slot import Segment, Slot
from commlib.engine.gradients.reducer import Reducer
from commlib.engine.gradients.round import GradientRound
from commlib.engine.rounds import marks
from commlib.errors import CommlibError, ConfigError
from commlib.weak import WeakMembers

_log = logging.getLogger("commlib")

_under_way: WeakMembers[Backward] = WeakMembers(locks.lock("backwards", is_of_process=True))
os.register_at_fork(after_in_child=_under_way.clear)  # no backward continues in a child process


class Phase(Enum):
    """Phase of a model's backward."""

    NONE = "no backward is under way"
    LOCAL = "the backward is not synchronised, or not yet"
    OVERLAPPED = "each bucket is launched as soon as its gradients are complete"
    RECORDED = "the time at which each gradient is ready is recorded; buckets are launched at the end"
    FLUSHED = "all gradients are complete, and all buckets have been launched"


# A member lookup on the enum class costs more than the rest of a hook.
_NONE, _LOCAL, _OVERLAPPED, _RECORDED, _FLUSHED = Phase


class _End:
    """The callback at the end of a backward. It is destroyed with the backward, also when an exception ends it.

    It runs after callbacks that were queued during the backward: FSDP2 produces the last gradients in such a callback.
    """

    __slots__ = ("__weakref__", "_backward", "_has_waited")

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        self._has_waited = False

    @torch._disable_dynamo  # see [Note: hooks and dynamo]
    def __call__(self) -> None:
        if self._has_waited:
            self._backward.end()
        else:
            self._has_waited = True
            torch.autograd.Variable._execution_engine.queue_callback(self)


class Backward:
    """State of one model's backward, updated by hooks.

    Args:
        reducer: Averages the gradients.

    Attributes:
        watch_steps: Called with True when a backward begins that runs user hooks, and with False at its end.
        require_sync: Whether forwards that run now require a synchronised backward.
        is_deferred: Whether forwards that run now do not announce a synchronised backward, as for micro-batches.
        refuses_unannounced: Whether to raise if a backward would stay local because no forward announced it.
        phase: The current phase.
        round: The current round; None before it is opened.
        has_counts: Whether it is known how often each hook fires per backward.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.watch_steps: Callable[[bool], object] = lambda _: None
        self.require_sync = True
        self.refuses_unannounced = self.is_deferred = False
        self.phase = _NONE
        self.round: GradientRound | None = None
        self.has_counts = False
        self._slots: Sequence[Slot] = ()
        self._forward_ran = self._expects_sync = False  # since the last backward
        self._is_expected = False  # whether the next backward is synchronised regardless of its forwards
        self._has_hidden_outputs = False  # a forward returned no tensor whose gradient announces the backward
        self._has_warned = self._has_watched = False
        self._graph_task: int | None = None
        self._callback: Callable[[], _End | None] = lambda: None
        self._together: list[Backward] = []  # models in this backward; set from its end until this model's callback
        self._on_leaves: dict[int, RemovableHandle] = {}  # by the `id` of the leaf

    @property
    def _rank(self) -> int:
        return self._reducer.session.comm.rank

    @property
    def is_under_way(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self.phase is not _NONE

    @property
    def is_communicating(self) -> bool:
        """Whether a backward is under way whose gradients have yet to be communicated."""
        return self.phase is not _NONE and self.phase is not _LOCAL

    # --- hooks ------------------------------------------------------------------------------------------------------

    def follow(self, slots: Sequence[Slot]) -> None:
        """Expect gradients of these parameters. How often their hooks fire is not known yet."""
        self._slots, self.has_counts = slots, False

    def hook_counts(self) -> dict[str, int] | None:
        """Return how often gradient hooks fire per backward, omitting those that fire once; None until known."""
        if not self.has_counts:
            return None
        return {slot.name: slot.expected for slot in self._slots if slot.expected != 1}

    def restore_counts(self, counts: dict[str, int] | None) -> None:
        """Load the return value of `hook_counts`."""
        self.has_counts = counts is not None
        for slot in self._slots:
            slot.expected = (counts or {}).get(slot.name, 1)

    def announce(self, outputs: Sequence[torch.Tensor]) -> None:
        """Hook the outputs of a forward; the first gradient of any of them announces its backward."""
        sync = self.require_sync and not self.is_deferred
        self._has_hidden_outputs = not outputs
        self._forward_ran = True
        self._expects_sync |= sync
        for tensor in outputs:
            if tensor.is_leaf:
                self._announce_leaf(tensor, sync)
            else:
                tensor.register_hook(functools.partial(self._on_output, sync))

    def _announce_leaf(self, leaf: torch.Tensor, sync: bool) -> None:
        """Hook an output that outlives the forward: a parameter or an input, returned unchanged.

        The leaf has one hook, which attributes its gradient to the last forward (as in DDP). The hook does not keep
        this object alive.
        """
        for key, handle in list(self._on_leaves.items()):
            if key == id(leaf) or handle.hooks_dict_ref() is None:
                self._on_leaves.pop(key).remove()
        self._on_leaves[id(leaf)] = leaf.register_hook(functools.partial(_on_leaf, weakref.ref(self), sync))

    def unhook(self) -> None:
        """Remove the hooks from leaves."""
        for handle in self._on_leaves.values():
            handle.remove()
        self._on_leaves.clear()

    def expect(self) -> None:
        """Treat the next backward as belonging to a forward that runs now, whichever hook begins it."""
        self._forward_ran = True
        self._is_expected |= self.require_sync

    # --- the beginning ----------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # see [Note: hooks and dynamo]
    def _on_output(self, sync: bool, _: torch.Tensor) -> None:
        self.begin(sync)

    def begin(self, sync: bool) -> None:
        """Join the running backward. Every hook on an output calls this; only the first call begins the backward.

        Args:
            sync: Whether the forward requires a synchronised backward.
        """
        self.forget_failed()
        if self.phase is _NONE:
            self._begin()
        if (sync or self._is_expected) and self.phase is _LOCAL:
            self._start_sync()

    def _begin(self) -> None:
        _refuse_compiled_autograd()
        predivisor = self._reducer.begin()
        if not self.has_counts:
            predivisor = 1.0  # later hooks may add to a placed gradient: divide at the end
        self._graph_task = torch._C._current_graph_task_id()
        end = _End(self)
        self._callback = weakref.ref(end)
        _under_way.add(self)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self.phase = _LOCAL
        have_hooks = [bucket.start_backward(predivisor) for bucket in self._reducer.buckets]
        if any(have_hooks):
            self._has_watched = True
            self.watch_steps(True)

    def _begin_unannounced(self) -> None:
        """Begin a backward whose first gradient no output of a forward announced."""
        if not self._forward_ran and not self._has_hidden_outputs and self.require_sync:
            self._object()
        self.begin(self._expects_sync or (self._has_hidden_outputs and self.require_sync))

    def _object(self) -> None:
        """Warn that a backward stays local, or raise."""
        came = (
            f"gradients of {self._slots[0].name!r} arrived without a forward of the wrapped model (a call to "
            "model.module, or to another method of it)"
        )
        if self.refuses_unannounced:
            raise ConfigError(
                f"rank {self._rank}: {came} and would stay local. Call commlib.expect_backward(model) "
                "before such a backward, or run it inside model.no_sync() if it should stay local"
            )
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s. They stay local, as with DDP, unless commlib.expect_backward(model) is called before", came
            )

    def _start_sync(self) -> None:
        """Synchronise this backward, unless the step communicates no gradients."""
        reducer = self._reducer
        if not reducer.averaging.is_due:
            return
        self.phase = _RECORDED if reducer.search.begins() else _OVERLAPPED
        complete = [bucket for bucket in reducer.buckets if bucket.num_pending == 0]
        if complete and self.phase is _OVERLAPPED:  # gradients of an unsynchronised forward came first in this backward
            self.round = reducer.open_round()
            for bucket in complete:
                self.round.launch(bucket)

    # --- gradients --------------------------------------------------------------------------------------------------

    def on_gradient(self, slot: Slot) -> None:
        """Record that a parameter's gradient is in `param.grad`. Runs for every parameter, so it must be fast."""
        if self.phase is _NONE:
            self._begin_unannounced()
        if self.phase is _RECORDED:
            self._reducer.search.readiness.mark(slot.idx)
        slot.num_pending = num_pending = slot.num_pending - 1
        if num_pending == 0:
            segment = slot.segment
            segment.num_pending -= 1  # pyright: ignore[reportOptionalMemberAccess]
            if segment.num_pending == 0:  # pyright: ignore[reportOptionalMemberAccess]
                self._segment_complete(segment)  # pyright: ignore[reportArgumentType]
        elif num_pending < 0 and self.has_counts:
            self._fired_again(slot)

    def _fired_again(self, slot: Slot) -> None:
        if slot.segment is not None and slot.segment.num_pending < 0:
            raise CommlibError(
                f"rank {self._rank}: the gradient of {slot.name!r} was accumulated again after it had "
                f"been gathered: it was ready {slot.expected - slot.num_pending} times in this backward and "
                f"{slot.expected} times in the first one. Run the model the same way in every step, or use "
                "checkpoint(..., use_reentrant=False)."
            )

    def _segment_complete(self, segment: Segment) -> None:
        """Gather a segment whose gradients are complete, and launch its bucket if that is complete too."""
        bucket: Any = segment.bucket
        bucket.num_pending -= 1
        if self.phase is _LOCAL:
            return
        if self.round is None:
            self.round = self._reducer.open_round()
        with marks.phase("gather", bucket.describe):
            segment.place()
        if bucket.num_pending == 0 and self.phase is _OVERLAPPED:
            self.round.launch(bucket)

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Run the callback at the end of backward."""
        try:
            for each in self._of_this_backward():
                if each.is_under_way:  # the others have ended
                    each._flush()
            if self.round is not None:
                self._reducer.finish(self.round)
                self._reducer.follow_round(in_background=len(self._together) > 1)
        except BaseException as error:
            self._reducer.session.abandon(error)
            raise
        finally:
            together, self._together = self._together, []
            self._leave()
            if not any(each._together for each in together):
                _join([each._reducer for each in together])

    def _of_this_backward(self) -> list[Backward]:
        """Return all models in the current backward. The first one to end collects them."""
        if not self._together:
            found = [other for other in _under_way.alive() if other._graph_task == self._graph_task]
            for each in found:
                each._together = found
        return self._together

    def _flush(self) -> None:
        """Launch the incomplete buckets. Every model in this backward does so before any of them waits."""
        if self.phase is _FLUSHED:
            return
        syncs, self.phase = self.phase is not _LOCAL, _FLUSHED
        has_gradients = self.round is not None or any(slot.num_pending != slot.expected for slot in self._slots)
        if not self.has_counts and has_gradients:
            self.has_counts = True
            for slot in self._slots:
                slot.expected = max(1, slot.expected - slot.num_pending)
        if syncs and has_gradients:
            self._reducer.search.backward_ends()
            self.round = self.round or self._reducer.open_round()
            self.round.flush()

    def cancel(self, error: BaseException) -> None:
        """Cancel the current round with an error, if there is one."""
        if self.round is not None:
            self.round.cancel(error)

    def forget_failed(self) -> None:
        """Discard a backward that an exception has ended. If it has communicated, end the communication."""
        if self.phase is _NONE or self._callback() is not None:
            return
        if self.round is not None and self.round.has_begun:
            self._reducer.session.abandon(
                CommlibError(
                    "the previous backward did not finish (an exception in it?), so the ranks may have communicated "
                    "different buckets. Restart from a checkpoint on all ranks"
                )
            )
        elif self.round is not None:
            self.round.discard()
        self._leave()

    def _leave(self) -> None:
        self.phase = _NONE
        self.round = self._graph_task = None
        self._together = []
        if self._has_watched:
            self._has_watched = False
            self.watch_steps(False)
        self._forward_ran = self._expects_sync = self._is_expected = False
        _under_way.discard(self)


class StreamedBackward(Backward):
    """A backward whose gradients may be produced on several streams of an accelerator.

    Gradients are gathered on the stream of the last one. That stream first waits for the streams of earlier gradients,
    because autograd synchronises streams with its caller only at the end of backward.

    Args:
        reducer: See `Backward`.
        current: Returns the current stream.
    """

    def __init__(self, reducer: Reducer, current: Callable[[], Any]) -> None:
        super().__init__(reducer)
        self._current = current
        self._streams: set[Any] = set()

    def on_gradient(self, slot: Slot) -> None:
        """See `Backward`."""
        self._streams.add(self._current())
        super().on_gradient(slot)

    def _segment_complete(self, segment: Segment) -> None:
        current = self._current()
        for stream in self._streams - {current}:
            current.wait_stream(stream)
        super()._segment_complete(segment)

    def _leave(self) -> None:
        super()._leave()
        self._streams.clear()


def _join(reducers: Sequence[Reducer]) -> None:
    """Wait for the background exchanges of all models; raise the first error."""
    errors: list[BaseException] = []
    for reducer in reducers:
        try:
            reducer.join()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


@torch._disable_dynamo  # see [Note: hooks and dynamo]
def _on_leaf(found: Callable[[], Backward | None], sync: bool, _: torch.Tensor) -> None:
    if (backward := found()) is not None:
        backward.begin(sync)


def _refuse_compiled_autograd() -> None:
    """Raise if compiled autograd runs this backward.

    Compiled autograd stores gradients again after their hooks, so each rank would continue with its own gradients. No
    public API reports whether it is running: with `torch._dynamo.config.compiled_autograd`, the backward of a compiled
    model may still be an ordinary one.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise ConfigError(
            "compiled autograd (torch._dynamo.config.compiled_autograd) supports neither commlib nor DDP: it stores "
            "gradients again after their hooks. Turn it off, or compile the model instead of the function that calls "
            "backward"
        )
