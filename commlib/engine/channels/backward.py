"""One backward of a model: from autograd's hooks to a round of gradients.

[Note: the life of a backward] The first hook that fires (on an output of the forward, or on a parameter where the
outputs could not be hooked) *begins* a backward and queues a callback for its end. The first gradient *opens* a round.
Each bucket whose gradients are all there is gathered and *launched*. The callback *flushes* the buckets that are not
complete (unused parameters), launches what goes beside them (rank 0's buffers) and waits. A backward that touches no
parameter (`torch.autograd.grad` on inputs) opens no round. Several models in one backward all flush before any of them
waits. An exception in backward destroys the callback: a backward whose callback is gone is forgotten if it had
communicated nothing, and else ends the model's communication.

[Note: several models] Losses of several models may be added in any order, and in another one on each rank; so the
callbacks of one backward come in different orders, too. Rounds are all under way before any is waited for. What ranks
then tell each other about plans blocks, so a thread for each model does it, and is waited for once all callbacks have
begun theirs.

[Note: hooks and dynamo] Where a function that calls `backward` or `step` is compiled, dynamo leaves those calls out but
looks at every Python frame within them, hooks included, and would trace and guard commlib's own work. So it is told at
each hook to look away (a third of a microsecond); no hook is a lambda, whose frame it would see before.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from commlib import locks
from commlib.engine.buckets.bucket import Bucket, SparseBucket
from commlib.engine.buckets.slot import Segment, Slot
from commlib.engine.channels.gradient_round import GradientRound
from commlib.engine.line import Line
from commlib.engine.planning.readiness import Readiness
from commlib.engine.rounds import marks
from commlib.errors import CommlibError, ConfigError
from commlib.weak import WeakMembers

_log = logging.getLogger("commlib")

_under_way: WeakMembers[Backward] = WeakMembers(locks.lock("backwards", is_of_process=True))
os.register_at_fork(after_in_child=_under_way.clear)  # none goes on in a child


class Phase(Enum):
    """Where the backward of a model is."""

    NONE = "there is none"
    LOCAL = "it is not synchronised, or not yet"
    OVERLAPPED = "each bucket leaves as soon as its gradients are there"
    RECORDED = "when each gradient is there is recorded; the buckets leave at the end"
    FLUSHED = "its gradients are all there, and all buckets have left"


# A look at an enum's class costs more than the rest of a hook.
_NONE, _LOCAL, _OVERLAPPED, _RECORDED, _FLUSHED = Phase


class Host(Protocol):
    """The channel whose backward this is.

    Attributes:
        line: What carries it.
        buckets: Of the current plan.
        readiness: Where a recorded backward is recorded.
        watch_steps: Called with True where a backward begins in which hooks of the user's run; else with False.
    """

    line: Line
    watch_steps: Callable[[bool], object]

    @property
    def buckets(self) -> Sequence[Bucket | SparseBucket]:
        """See above."""
        ...

    @property
    def readiness(self) -> Readiness:
        """See above."""
        ...

    def backward_begins(self) -> float:
        """A backward begins: change to a plan that is pending; return the predivisor. Raises what forbids it."""
        ...

    def sync_begins(self) -> Phase:
        """A backward is to be synchronised; return in which phase it goes on."""
        ...

    def open_round(self) -> GradientRound:
        """Open the round of this backward."""
        ...

    def backward_ends(self) -> None:
        """The computation of a synchronised backward has ended."""
        ...

    def finish(self, round_: GradientRound) -> None:
        """Wait for the round, and make its results the gradients."""
        ...

    def follow_round(self, in_background: bool) -> None:
        """Agree with the other ranks on the next plan, where that is due."""
        ...

    def join(self) -> None:
        """Wait for what that does in the background, and raise its error."""
        ...


class _End:
    """The callback at the end of a backward. It dies with the backward, also with one that an exception ends.

    It lets those go first that were queued during the backward: FSDP2 makes the last gradients in one of its own.
    """

    __slots__ = ("__weakref__", "_backward", "_has_waited", "_host")

    def __init__(self, backward: Backward, host: Host) -> None:
        self._backward, self._host = backward, host
        self._has_waited = False

    @torch._disable_dynamo  # see [Note: hooks and dynamo]
    def __call__(self) -> None:
        if self._has_waited:
            self._backward.end(self._host)
        else:
            self._has_waited = True
            torch.autograd.Variable._execution_engine.queue_callback(self)


class Backward:
    """Where the backward of one model is, from hook to hook.

    Args:
        host: The channel; it owns this.

    Attributes:
        require_sync: Whether backwards of forwards that are made now are synchronised.
        is_deferred: Whether forwards that are made now announce no synchronised backward, as those of a micro-batch.
        refuses_unannounced: Whether a backward that would stay local because nothing announced it is an error.
        phase: Where the backward is.
        round: Its round, once there is one.
        has_counts: Whether it is known how often each hook fires.
    """

    def __init__(self, host: Host) -> None:
        self._reference: Callable[[], Host | None] = weakref.ref(host)
        self.require_sync = True
        self.refuses_unannounced = self.is_deferred = False
        self.phase = _NONE
        self.round: GradientRound | None = None
        self.has_counts = False
        self._slots: Sequence[Slot] = ()
        self._forward_ran = self._expects_sync = False  # since the last backward: any forward, a synchronised one
        self._is_expected = False  # the next backward is a synchronised one, whatever its forwards were
        self._has_hidden_outputs = False  # a forward returned nothing whose gradient announces the backward
        self._has_warned = self._has_watched = False
        self._graph_task: int | None = None
        self._callback: Callable[[], _End | None] = lambda: None
        self._together: list[Backward] = []  # all of this backward; from its end until this one's own
        self._on_leaves: dict[int, RemovableHandle] = {}  # by the identity of the leaf

    @property
    def _host(self) -> Host:
        host = self._reference()
        assert host is not None
        return host

    @property
    def is_under_way(self) -> bool:
        """Whether a backward began that has not ended."""
        return self.phase is not _NONE

    @property
    def is_communicating(self) -> bool:
        """Whether a backward is under way whose gradients are to be communicated, and are not yet."""
        return self.phase is not _NONE and self.phase is not _LOCAL

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
        host, sync = self._host, self.require_sync and not self.is_deferred
        self._has_hidden_outputs = not outputs
        self._forward_ran = True
        self._expects_sync |= sync
        for tensor in outputs:
            if tensor.is_leaf:
                self._announce_leaf(tensor, sync)
            else:
                tensor.register_hook(functools.partial(self._on_output, sync, host))

    def _announce_leaf(self, leaf: torch.Tensor, sync: bool) -> None:
        """Announce the backward of an output that lives on: a parameter or an input, as it is.

        It has one hook, of the last forward, whose backward it is taken for (as in DDP). It does not keep the channel.
        """
        for key, handle in list(self._on_leaves.items()):
            if key == id(leaf) or handle.hooks_dict_ref() is None:
                self._on_leaves.pop(key).remove()
        self._on_leaves[id(leaf)] = leaf.register_hook(functools.partial(_on_leaf, weakref.ref(self), sync))

    def unhook(self) -> None:
        """Take the hooks off what lives on."""
        for handle in self._on_leaves.values():
            handle.remove()
        self._on_leaves.clear()

    def expect(self) -> None:
        """The next backward is one of a forward that is made now, whatever begins it."""
        self._forward_ran = True
        self._is_expected |= self.require_sync

    # --- the beginning ----------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # see [Note: hooks and dynamo]
    def _on_output(self, sync: bool, host: Host, _: torch.Tensor) -> None:
        self.begin(sync, host)

    def begin(self, sync: bool, host: Host | None = None) -> None:
        """Take part in the backward that is running now; called by every hook on an output, counts once.

        Args:
            sync: Whether the forward was made to be synchronised.
            host: The channel, which a hook on an output keeps alive.
        """
        host = host or self._host
        self.forget_failed()
        if self.phase is _NONE:
            _refuse_compiled_autograd()
            predivisor = host.backward_begins()
            if not self.has_counts:
                predivisor = 1.0  # a gradient that is placed may still grow: divide at the end
            self._graph_task = torch._C._current_graph_task_id()
            end = _End(self, host)
            self._callback = weakref.ref(end)
            _under_way.add(self)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            self.phase = _LOCAL
            has_hooks = [bucket.start_backward(predivisor) for bucket in host.buckets]
            if any(has_hooks):
                self._has_watched = True
                host.watch_steps(True)
        if (sync or self._is_expected) and self.phase is _LOCAL:
            self._start_sync(host)

    def _begin_unannounced(self) -> None:
        """A gradient came, and no output of a forward announced it."""
        if not self._forward_ran and not self._has_hidden_outputs and self.require_sync:
            self._object()
        self.begin(self._expects_sync or (self._has_hidden_outputs and self.require_sync))

    def _object(self) -> None:
        """Say that a backward stays local, or refuse it."""
        came = (
            f"gradients of {self._slots[0].name!r} came without a forward of the wrapped model (a call of "
            "model.module, or of another method of it)"
        )
        if self.refuses_unannounced:
            raise ConfigError(
                f"rank {self._host.line.comm.rank}: {came}, and would stay local. Call commlib.expect_backward(model) "
                "before such a backward, or make it inside model.no_sync() if it is to be local"
            )
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s; as with DDP they stay local, unless commlib.expect_backward(model) is called before", came
            )

    def _start_sync(self, host: Host) -> None:
        self.phase = host.sync_begins()
        complete = [bucket for bucket in host.buckets if bucket.left == 0]
        if complete and self.phase is _OVERLAPPED:  # an unsynchronised forward shares this backward, and came first
            self.round = host.open_round()
            for bucket in complete:
                self.round.launch(bucket)

    # --- gradients --------------------------------------------------------------------------------------------------

    def on_gradient(self, slot: Slot) -> None:
        """Take note that a parameter has its gradient in `param.grad`. Runs for each of them: every line counts."""
        if self.phase is _NONE:
            self._begin_unannounced()
        if self.phase is _RECORDED:
            self._host.readiness.mark(slot.idx)
        slot.left = left = slot.left - 1
        if left == 0:
            segment = slot.segment
            segment.left -= 1  # pyright: ignore[reportOptionalMemberAccess]
            if segment.left == 0:  # pyright: ignore[reportOptionalMemberAccess]
                self._segment_complete(segment)  # pyright: ignore[reportArgumentType]
        elif left < 0 and self.has_counts:
            self._fired_again(slot)

    def _fired_again(self, slot: Slot) -> None:
        if slot.segment is not None and slot.segment.left < 0:
            raise CommlibError(
                f"rank {self._host.line.comm.rank}: a further gradient of {slot.name!r} came after it had been "
                f"gathered: it was ready {slot.expected - slot.left} times in this backward and {slot.expected} times "
                "in the first one. Run the model the same way in every step, or use checkpoint(..., "
                "use_reentrant=False)."
            )

    def _segment_complete(self, segment: Segment) -> None:
        """All gradients of the segment are there."""
        bucket: Any = segment.bucket
        bucket.left -= 1
        if self.phase is _LOCAL:
            return
        if self.round is None:
            self.round = self._host.open_round()
        with marks.phase("gather", bucket.describe):
            segment.place()
        if bucket.left == 0 and self.phase is _OVERLAPPED:
            self.round.launch(bucket)

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, host: Host) -> None:
        """The callback at the end of backward."""
        try:
            for each in self._of_this_backward():
                if each.is_under_way:  # others have ended
                    each._flush()
            if self.round is not None:
                host.finish(self.round)
                host.follow_round(in_background=len(self._together) > 1)
        except BaseException as error:
            host.line.abandon(error)
            raise
        finally:
            together, self._together = self._together, []
            self._leave()
            if not any(each._together for each in together):
                _join([each._reference() for each in together])

    def _of_this_backward(self) -> list[Backward]:
        """Return all models that take part in the backward under way; the first that ends finds them."""
        if not self._together:
            found = [other for other in _under_way.alive() if other._graph_task == self._graph_task]
            for each in found:
                each._together = found
        return self._together

    def _flush(self) -> None:
        """Launch what is not complete. Every model in this backward does so before any of them waits."""
        if self.phase is _FLUSHED:
            return
        syncs, self.phase = self.phase is not _LOCAL, _FLUSHED
        has_gradients = self.round is not None or any(slot.left != slot.expected for slot in self._slots)
        if not self.has_counts and has_gradients:
            self.has_counts = True
            for slot in self._slots:
                slot.expected = max(1, slot.expected - slot.left)
        if syncs and has_gradients:
            host = self._host
            host.backward_ends()
            self.round = self.round or host.open_round()
            self.round.flush()

    def cancel(self, error: BaseException) -> None:
        """End the round under way, if there is one."""
        if self.round is not None:
            self.round.cancel(error)

    def forget_failed(self) -> None:
        """Forget a backward that an exception has ended, if it communicated nothing; else end the communication."""
        if self.phase is _NONE or self._callback() is not None:
            return
        if self.round is not None and self.round.has_begun:
            self._host.line.abandon(
                CommlibError(
                    "the previous backward did not finish (an exception in it?), so the ranks no longer agree on what "
                    "was communicated. Restart from a checkpoint on all ranks"
                )
            )
        elif self.round is not None:
            self.round.discard()
        self._leave()

    def _leave(self) -> None:
        self.phase = _NONE
        self.round = self._graph_task = None
        self._together = []
        if self._has_watched and (host := self._reference()) is not None:
            self._has_watched = False
            host.watch_steps(False)
        self._forward_ran = self._expects_sync = self._is_expected = False
        _under_way.discard(self)


def _join(hosts: Sequence[Host | None]) -> None:
    """Wait for what all of these do in the background; raise the first error."""
    errors: list[BaseException] = []
    for host in hosts:
        try:
            if host is not None:
                host.join()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


@torch._disable_dynamo  # see [Note: hooks and dynamo]
def _on_leaf(found: Callable[[], Backward | None], sync: bool, _: torch.Tensor) -> None:
    if (backward := found()) is not None:
        backward.begin(sync)


def _refuse_compiled_autograd() -> None:
    """Raise where this backward is a graph that compiled autograd runs.

    It stores gradients again after the hooks on them, so that each rank would go on with its own. Nothing public tells
    whether it does: `torch._dynamo.config.compiled_autograd` also leaves ordinary backwards of compiled models.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise ConfigError(
            "compiled autograd (torch._dynamo.config.compiled_autograd) does not leave gradients to commlib, nor to "
            "DDP. Turn it off, or compile the model instead of the function that calls backward"
        )
