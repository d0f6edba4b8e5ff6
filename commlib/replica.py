"""The state of a wrapped model, or of a copy of one, and the work that its forward does in addition to the user's.

[Note: copies] A copy (by `deepcopy`, pickle, `AveragedModel`) is made of the bare object, with the copy methods of the
user's class, and is represented by a `Copy`. It communicates nothing until its first forward with gradients, which
wraps it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._C import _distributed_autograd, _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.fx import _symbolic_trace
from torch.nn.parallel import DistributedDataParallel

from commlib import locks, verify
from commlib.engine import state as checkpoints
from commlib.engine.engine import Engine
from commlib.errors import ConfigError
from commlib.join import JoinState
from commlib.outputs import tensors_in
from commlib.pipelining.stages import is_from_stage
from commlib.primitives.replicate import broadcast_all
from commlib.sharding.local import local_of, reshard
from commlib.transport.closing import Finalizer
from commlib.weak import WeakMembers

if TYPE_CHECKING:
    from commlib.tuner import Tuner

#: Wraps a copy of a wrapped model with the same options. Pickled with the copy.
Again = Callable[[nn.Module], Any]


#: The reason why no other wrapper may contain a wrapped model, for messages.
REFUSAL = (
    "a model that commlib has wrapped, and gradients would be averaged twice. Train the wrapped model itself, or wrap "
    "the bare one: commlib.unwrap(model). For trainers that wrap models themselves: with accelerate, call "
    "commlib.integrations.accelerate.use(accelerator, ...) before prepare; instead of transformers.Trainer, use "
    "commlib.integrations.transformers.Trainer"
)


class Replica:
    """The state of one wrapped model: its engine, its buffers, and the work of its forward beyond the user's.

    Args:
        engine: The engine that communicates for the model.
        model: The model, not extended yet.
        ignored: Names of parameters and buffers that are not communicated.
        broadcast_buffers: Whether rank 0's buffers are copied to all ranks after each synchronised backward.
        group: The user's process group.
        again: Wraps a copy with the options of this model.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        ignored: set[str],
        broadcast_buffers: bool,
        group: Any,
        again: Again,
    ) -> None:
        self.engine = engine
        self.group: Callable[[], Any] = weakref.ref(group)  # weak, so that a destroyed group's threads can end
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.original_class = model.__class__
        self.ignored = ignored
        self.again = again
        self.bare = bare_of(model, model.__class__)
        self.structure = self._observed()
        self.join = JoinState(engine.comm)
        self.is_running = False
        self.tuner: Tuner | None = None
        self.copies_buffers = broadcast_buffers
        if broadcast_buffers and (engine.comm.world_size > 1 or engine.session.is_elastic):
            own = weakref.ref(self)
            engine.gradients.buffers.tensors = lambda: replica._buffers() if (replica := own()) is not None else []

    @property
    def require_sync(self) -> bool:
        """Whether the next backwards are synchronised."""
        return self.engine.gradients.backward.require_sync

    @require_sync.setter
    def require_sync(self, value: bool) -> None:
        self.engine.gradients.backward.require_sync = value

    def expect_backward(self) -> None:
        """See `commlib.expect_backward`."""
        if self.is_running:
            self._follow_model()
        else:
            self.before_forward()
            self._end_forward()
        if not self.engine.gradients.is_idle:
            self.engine.gradients.backward.expect()

    def communicate(self) -> None:
        """Communicate the gradients as they are, after the last micro-batch of a pipeline's step."""
        if not self.engine.gradients.is_idle:
            self.engine.gradients.communicate()

    def begin_forward(self) -> Replica:
        """Call `before_forward`. Returns itself."""
        self.before_forward()
        return self

    def before_forward(self) -> None:
        """Begin a step before a forward with gradients, after adopting changes of the model."""
        engine = self.engine
        if not torch.is_grad_enabled():
            return
        self._follow_model()
        self.engine.gradients.backward.is_deferred = is_from_stage(self)
        if self.require_sync and self.bare.training:
            engine.tell_of_loads()
        if self.tuner is not None and self.require_sync:
            with engine.session.wholly():
                self.tuner.forward_begins()
        if self.join.enabled:
            self.join.announce(engine, self.require_sync)
        self.agree_on_state()  # after the announcement, since a joined rank takes part in it

    def _follow_model(self) -> None:
        """Check that the model matches the engine's view of it, or adopt the changes."""
        engine = self.engine
        self._refuse_other_wrappers()
        gradients = engine.gradients
        gradients.backward.forget_failed()
        engine.check()
        engine.settle_weights()
        engine.look_for_uncounted_changes()
        self.structure.check(self.bare, engine.parameters)
        leaves = not self.join.enabled and gradients.reducer.frozen()  # a rank that has joined makes no forwards
        if self.structure.was_unfrozen() or leaves or engine.has_moved():
            self._adopt_parameters()
        gradients.install_pending()

    def _refuse_other_wrappers(self) -> None:
        outer = DistributedDataParallel._active_ddp_module
        if outer is not None and outer.module is not self.bare and _shares_parameters(outer, self.engine):
            raise ConfigError(f"DistributedDataParallel is around {REFUSAL}")
        verify.check_steps([self.engine.parameters[0].param])
        if _is_in_distributed_autograd():
            raise ConfigError(
                "torch.distributed.autograd keeps gradients in its own contexts, which commlib does not see. Call the "
                "model outside of dist_autograd.context(), and loss.backward()"
            )

    def agree_on_state(self) -> None:
        """If state or weights were loaded, check that all ranks loaded them after the same step. Collective then."""
        engine = self.engine
        if engine.has_loaded and self.bare.training:  # one rank alone may evaluate the model that it has loaded
            if engine.comm.world_size > 1:
                verify.agree_on_state(engine.transport, checkpoints.places(engine))
            engine.has_loaded = False

    def _observed(self) -> verify.Structure:
        return verify.Structure(self.bare, {id(p.param) for p in self.engine.parameters}, self.ignored)

    def _adopt_parameters(self) -> None:
        """Adopt parameters that were unfrozen, moved, cast or frozen for good. Checks that ranks agree, and replans."""
        engine = self.engine
        engine.session.refuse_if_elastic("unfreezing, casting or moving parameters")
        self._reshard()
        known = {parameter.name for parameter in engine.parameters} - set(engine.gradients.reducer.frozen())
        parameters = verify.parameters_of(self.bare, self.ignored, known)
        error = None
        try:
            ranks = torch.distributed.get_process_group_ranks(self.group())
            verify.check_sharded(self.bare, self.ignored, engine.algorithm, ranks)
        except ConfigError as found:
            error = found
        try:
            verify.agree(engine.transport, lambda: verify.describe(self.bare, parameters, self.ignored, {}), error)
        except ConfigError:  # raised on all ranks, and nothing has changed
            raise
        except BaseException as error:
            engine.session.abandon(error)
            raise
        engine.adopt(parameters)
        self.structure = self._observed()

    @torch._disable_dynamo
    def after_forward(self, output: Any) -> None:
        """Let the gradients of the outputs announce the backward."""
        if not torch.is_grad_enabled() or self.engine.gradients.is_idle:
            return
        self._end_forward()
        self.engine.gradients.backward.announce([tensor for tensor in tensors_in(output) if tensor.requires_grad])

    def _end_forward(self) -> None:
        if self.tuner is not None and self.require_sync and not self.engine.gradients.is_idle:
            self.tuner.forward_ends()

    def _buffers(self) -> list[torch.Tensor]:
        return self.structure.buffers(self.bare, self.ignored)

    def _copied_buffers(self) -> list[torch.Tensor]:
        """Return the buffers that are copied from rank 0."""
        return [local_of(buffer.data) for buffer in self.engine.gradients.buffers.tensors()]

    def broadcast_model(self, source: int = 0, all_buffers: bool = False) -> None:
        """Copy parameters and buffers of rank `source` to all ranks, `all_buffers` even if backwards copy none."""
        self._reshard()
        buffers = [local_of(each.data) for each in self._buffers()] if all_buffers else self._copied_buffers()
        parameters = [local_of(p.data) for name, p in self.bare.named_parameters() if name not in self.ignored]
        self._broadcast("the broadcast of parameters and buffers", [*parameters, *buffers], source)

    def _broadcast(self, what: str, tensors: list[torch.Tensor], source: int) -> None:
        if tensors and self.engine.comm.world_size > 1:
            self.engine.session.run(what, broadcast_all(tensors, self.engine.comm, source))

    def _reshard(self) -> None:
        model = self.model()  # FSDP2 does not know the bare object
        if model is not None:
            reshard(model)

    def drain(self) -> None:
        """Apply the results of pending background rounds now."""
        self._reshard()
        self.engine.drain()

    def synchronize(self, optimizer: bool = False) -> None:
        """See `commlib.synchronize`."""
        self._reshard()
        self.engine.synchronize()
        if optimizer:
            self.engine.synchronize_optimizer()
        self._broadcast("the broadcast of buffers", self._copied_buffers(), 0)


class Copy:
    """The state of a copy of a wrapped model until its first forward with gradients. See [Note: copies].

    Attributes:
        again: Wraps the copy.
        require_sync: Whether the first backwards are synchronised.
    """

    def __init__(self, model: nn.Module, again: Again) -> None:
        self.model: Callable[[], Any] = weakref.ref(model)
        self.original_class = model.__class__
        self.again = again
        self.require_sync = True
        self.is_running = False

    @property
    def bare(self) -> nn.Module:
        """The copy as an object of the user's class. Rebuilt for each use, since it would keep the parameters alive."""
        return bare_of(self.model(), self.original_class)

    def begin_forward(self) -> Replica | None:
        """Wrap the copy before a forward that may train together with other ranks."""
        return self.join_ranks().begin_forward() if self._may_train() else None

    def _may_train(self) -> bool:
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.bare.parameters())
        return trains and not is_alone

    def join_ranks(self) -> Replica:
        """Wrap the copy. Collective.

        Raises:
            ConfigError: The copy needs an optimizer, or there is no process group.
        """
        model = self.model()
        self.again(model)
        replica = registry.get(model)
        assert isinstance(replica, Replica)
        replica.require_sync = self.require_sync
        return replica


Wrapped = Replica | Copy


#: Attribute of a wrapped model's own class that holds a reference to the model, and its state.
_ENTRY = "_commlib_entry"


class Registry:
    """The `Replica` of each wrapped model and the `Copy` of each copy, for as long as the model exists.

    The entry is stored in the class that was created for the model. If attributes of the model lead back to it (as with
    FSDP2 or a trainer), they form a reference cycle, which the garbage collector frees. A table in this object would
    keep the model alive.
    """

    def __init__(self) -> None:
        self._replicas: WeakMembers[Replica] = WeakMembers(locks.lock("replicas", is_of_process=True))

    def put(self, model: nn.Module, wrapped: Wrapped) -> None:
        """Store the state of a model."""
        cls, watch = type(model), None
        if isinstance(wrapped, Replica):
            self._replicas.add(wrapped)
            end, what = functools.partial(_forget_class_of, weakref.ref(cls)), f"the state of a {cls.__name__}"
            watch = Finalizer(model, end, what, is_ended_at_exit=False)
        type.__setattr__(cls, _ENTRY, (weakref.ref(model), wrapped, watch))

    def get(self, model: Any) -> Wrapped | None:
        """Return the state of this object. None for its bare object."""
        entry = getattr(type(model), _ENTRY, None)
        return entry[1] if entry is not None and entry[0]() is model else None

    def discard(self, model: nn.Module) -> None:
        """Remove a model."""
        wrapped = self.get(model)
        if isinstance(wrapped, Replica):
            self._replicas.discard(wrapped)
        for cls in type(model).__mro__:
            _forget(cls)

    def replicas(self) -> Iterator[Replica]:
        """Yield the `Replica` of each wrapped model."""
        yield from self._replicas.alive()


def _forget(cls: type) -> None:
    """Release the state of the model of this class now, not when the class is collected."""
    entry = vars(cls).get(_ENTRY)
    if entry is not None:
        type.__delattr__(cls, _ENTRY)
        if (watch := entry[2]) is not None:
            watch.detach()


def _forget_class_of(reference: Callable[[], type | None]) -> None:
    """Release the state of a model that was freed."""
    if (cls := reference()) is not None:
        _forget(cls)


registry = Registry()


def bare_of(model: nn.Module, cls: type) -> nn.Module:
    """Return an object of class `cls` that shares all state with the model."""
    bare = object.__new__(cls)
    bare.__dict__ = model.__dict__
    return bare


def find(model: Any) -> Wrapped | None:
    """Return the `Replica` of a wrapped model or the `Copy` of a copy. None for any other object."""
    return registry.get(model) if isinstance(model, nn.Module) else None


def replicas() -> Iterator[Replica]:
    """Yield the `Replica` of each wrapped model of this process."""
    return registry.replicas()


def replica_of(model: Any) -> Replica:
    """Return the `Replica` of a wrapped model.

    Raises:
        ConfigError: The model is not wrapped, or is a copy that has not trained yet.
    """
    wrapped = wrapped_of(model)
    if isinstance(wrapped, Copy):
        raise ConfigError(
            f"the {type(model).__name__} is a copy of a wrapped model, which is wrapped in its first forward with "
            "gradients; call commlib.wrap(model, ...) to wrap it now"
        )
    return wrapped


def wrapped_of(model: Any) -> Wrapped:
    """Return the `Replica` of a wrapped model or the `Copy` of a copy.

    Raises:
        ConfigError: The model is neither.
    """
    wrapped = find(inside_compiled(model))
    if wrapped is None:
        raise ConfigError(f"the {type(model).__name__} is not wrapped; call commlib.wrap(model, ...) first")
    return wrapped


def inside_compiled(model: Any) -> Any:
    """Return the model inside if `model` is the output of `torch.compile` on a wrapped model, else `model`."""
    inner = getattr(model, "_orig_mod", None)  # the prefix of its parameters' names
    return model if find(model) is not None or find(inner) is None else inner


@torch._disable_dynamo
def begin_forward(model: nn.Module) -> Replica | None:
    """Prepare a wrapped model for a forward. Returns the `Replica` that announces the backward through the outputs.

    Returns None if there is nothing to do: the forward is not a step of training, or it is nested in another one
    (recursion, or `forward` called by `__call__`).
    """
    wrapped = registry.get(model)
    return None if wrapped is None or wrapped.is_running or is_local() else wrapped.begin_forward()


def is_local() -> bool:
    """Return whether a forward now is not a step of training: traced, transformed, or recomputed by backward."""
    if torch._C._current_graph_task_id() != -1 or _functorch.peek_interpreter_stack() is not None:
        return True
    if (
        torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or getattr(_symbolic_trace, "_is_fx_tracing_flag", False)
    ):
        return True
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY))


def _is_in_distributed_autograd() -> bool:
    rpc = sys.modules.get("torch.distributed.rpc.api")
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return False
    try:
        _distributed_autograd._current_context()
    except RuntimeError:
        return False
    return True


def _shares_parameters(outer: nn.Module, engine: Engine) -> bool:
    own = {id(parameter.param) for parameter in engine.parameters}
    ignored = getattr(outer, "parameters_to_ignore", ())
    inner = cast("nn.Module", outer.module)
    return any(id(p) in own for name, p in inner.named_parameters() if name not in ignored)
