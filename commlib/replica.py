"""What a wrapped model is: the methods that its class gains, and what its forward does beside the user's.

[Note: object and class] A wrapped model is the user's object with a class of its own that derives from his. The class
only adds methods. What belongs to the wrapping is kept for the object, in `_registry`: another object of that class,
which a method of the model made by `type(self)(...)`, is an ordinary model.

[Note: copies] A copy (by `deepcopy`, pickle, `AveragedModel`) is made of the bare object, by whatever means the user's
class has for it, and is a `Copy`: it communicates nothing until its first forward with gradients, in which it is
wrapped.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch._C import _distributed_autograd, _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.fx import _symbolic_trace
from torch.nn.parallel import DistributedDataParallel

from commlib import verify
from commlib.engine.engine import Engine
from commlib.errors import ConfigError
from commlib.join import JoinState
from commlib.primitives.replicate import broadcast_all
from commlib.tuner import Tuner

#: Wraps a copy of a wrapped model as that was; pickled with the copy.
Again = Callable[[nn.Module], Any]


class Replica:
    """What belongs to one wrapped model: its engine, its buffers, and what its forward does beside the user's.

    Args:
        engine: Communicates for it.
        model: The model, not extended yet.
        ignored: Names of parameters and buffers that are left alone.
        broadcast_buffers: Whether rank 0's buffers are everyone's after each synchronised backward.
        group: The user's process group.
        again: Wraps a copy as this model was.
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
        self.group: Callable[[], Any] = weakref.ref(group)  # does not keep a destroyed group's threads
        self.original_class = model.__class__
        self.ignored = ignored
        self.again = again
        self.bare = bare_of(model, model.__class__)
        self.structure = self._observed()
        self.join = JoinState(engine.comm)
        self.is_running = False
        self.tuner: Tuner | None = None
        if broadcast_buffers and engine.comm.world_size > 1:
            own = weakref.ref(self)
            engine.buffers = lambda: replica._buffers() if (replica := own()) is not None else []

    @property
    def require_sync(self) -> bool:
        """Whether the next backwards are synchronised."""
        return self.engine.require_sync

    @require_sync.setter
    def require_sync(self, value: bool) -> None:
        self.engine.require_sync = value

    @torch._disable_dynamo(recursive=False)  # the user's forward, called inside, is compiled
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model; a call from within (recursion, or `forward` from `__call__`) is the user's alone."""
        if self.is_running or is_local():
            return forward(*args, **kwargs)
        self.before_forward()
        self.is_running = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self.is_running = False
        self.after_forward(output)
        return output

    @torch._disable_dynamo
    def before_forward(self) -> None:
        """Before a forward with gradients: check that the model is as the engine knows it."""
        engine = self.engine
        if not torch.is_grad_enabled():
            return
        self._refuse_other_wrappers()
        engine.forget_failed_backward()
        engine.check()
        self.structure.check(self.bare, engine.parameters)
        if self.structure.was_unfrozen() or engine.idle.is_due() or engine.layout_changed():
            self._adopt_parameters()
        engine.install_pending()
        if self.tuner is not None and engine.require_sync:
            with engine.wholly():
                self.tuner.forward_begins()
        if self.join.enabled:
            self.join.announce(engine, engine.require_sync)

    def _refuse_other_wrappers(self) -> None:
        outer = DistributedDataParallel._active_ddp_module
        if outer is not None and outer.module is not self.bare and _shares_parameters(outer, self.engine):
            raise ConfigError(f"DistributedDataParallel is around {_REFUSAL}")
        if _is_in_distributed_autograd():
            raise ConfigError(
                "torch.distributed.autograd keeps gradients in contexts of its own, where commlib does not see them. "
                "Call the model outside of dist_autograd.context(), and loss.backward()"
            )

    def _observed(self) -> verify.Structure:
        return verify.Structure(self.bare, {id(p.param) for p in self.engine.parameters}, self.ignored)

    def _adopt_parameters(self) -> None:
        """Parameters were unfrozen, moved, cast or frozen for good: check that all ranks agree, and plan anew."""
        engine = self.engine
        known = {parameter.name for parameter in engine.parameters} - engine.idle.leave_out()
        parameters = verify.parameters_of(self.bare, self.ignored, known)
        try:
            verify.agree(engine.transport, lambda: verify.describe(self.bare, parameters, self.ignored, {}), None)
        except ConfigError:  # alike on all ranks, and nothing has changed
            raise
        except BaseException as error:
            engine.abandon(error)
            raise
        engine.adopt(parameters)
        self.structure = self._observed()

    @torch._disable_dynamo
    def after_forward(self, output: Any) -> None:
        """Have the outputs' gradients announce the backward."""
        if not torch.is_grad_enabled() or self.engine.is_idle:
            return
        engine, sync = self.engine, self.engine.require_sync
        if self.tuner is not None and sync:
            self.tuner.forward_ends()
        announcing = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        engine.has_hidden_outputs = not announcing
        engine.forward_ran = True
        engine.expects_sync |= sync
        for tensor in announcing:
            tensor.register_hook(lambda _: engine.begin(sync))

    def _buffers(self) -> list[torch.Tensor]:
        return self.structure.buffers(self.bare, self.ignored)

    def _copied_buffers(self) -> list[torch.Tensor]:
        """Return the buffers that are to be rank 0's on all ranks."""
        return list(self.engine.buffers())

    def broadcast_model(self, source: int = 0) -> None:
        """Copy parameters and buffers of rank `source` to all ranks."""
        parameters = [p.data for name, p in self.bare.named_parameters() if name not in self.ignored]
        self._broadcast("the broadcast of parameters and buffers", [*parameters, *self._copied_buffers()], source)

    def _broadcast(self, what: str, tensors: list[torch.Tensor], source: int) -> None:
        if tensors and self.engine.comm.world_size > 1:
            self.engine.run(what, broadcast_all(tensors, self.engine.comm, source))

    def synchronize(self) -> None:
        """See `commlib.synchronize`."""
        if (weights := self.engine.weights) is not None:
            weights.complete(max(self.engine.transport.gather_objects(weights.num_started)))
            self.engine.run("the mean of the weights", weights.mean_of_weights())
        if self.engine.attached is not None:
            self.engine.attached.runner.synchronize()
        self._broadcast("the broadcast of buffers", self._copied_buffers(), 0)


class Copy:
    """What belongs to a copy of a wrapped model until its first forward with gradients; see [Note: copies].

    Attributes:
        bare: The copy as an object of the user's class.
        again: Wraps it.
        require_sync: Whether the first backwards are synchronised.
    """

    def __init__(self, model: nn.Module, again: Again) -> None:
        self.model: Callable[[], Any] = weakref.ref(model)
        self.original_class = model.__class__
        self.bare = bare_of(model, model.__class__)
        self.again = again
        self.require_sync = True
        self.is_running = False

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model; where it may train beside other ranks, wrap it first."""
        if self.is_running or is_local() or not self._may_train():
            return forward(*args, **kwargs)
        return self.join_ranks().run(forward, args, kwargs)

    def _may_train(self) -> bool:
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.bare.parameters())
        return trains and not is_alone

    def join_ranks(self) -> Replica:
        """Wrap the copy. Collective.

        Raises:
            ConfigError: It cannot be: it needs an optimizer, or there is no process group.
        """
        model = self.model()
        self.again(model)
        replica = _registry.get(model)
        assert isinstance(replica, Replica)
        replica.engine.require_sync = self.require_sync
        return replica


Wrapped = Replica | Copy

#: What a wrapped model's class has for itself, so that the user's must not have it.
NAMES = ("no_sync", "require_backward_grad_sync", "join", "join_hook", "join_device", "join_process_group")


class _Registry:
    """What belongs to each wrapped model and each copy of one, as long as the model is there.

    By the identity of the model's attributes, which the bare object shares.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[nn.Module], Wrapped]] = {}

    def put(self, model: nn.Module, wrapped: Wrapped) -> None:
        key, entries = id(model.__dict__), self._entries
        entries[key] = (weakref.ref(model, lambda _: entries.pop(key, None)), wrapped)

    def get(self, model: Any) -> Wrapped | None:
        entry = self._entries.get(id(model.__dict__))
        return entry[1] if entry is not None and entry[0]() is model else None

    def discard(self, model: nn.Module) -> None:
        self._entries.pop(id(model.__dict__), None)

    def replicas(self) -> Iterator[Replica]:
        """Yield what belongs to each wrapped model."""
        for _, wrapped in list(self._entries.values()):
            if isinstance(wrapped, Replica):
                yield wrapped


_registry = _Registry()


class _Refusal:
    """Stands where `DistributedDataParallel` looks for names to ignore, and says that it must not wrap this model."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(f"DistributedDataParallel would be around {_REFUSAL}")


_REFUSAL = (
    "a model that commlib has wrapped, and gradients would be averaged twice. Train the wrapped model itself, or wrap "
    "the bare one: commlib.unwrap(model) (a trainer that wraps models by itself must be told not to)"
)


@Joinable.register  # not a base: `Joinable` derives from `ABC`, which gives objects another layout than a module's
class Parallel:
    """What a wrapped model's class gains; `super()` is the user's class. Each wrapped model has a class of its own."""

    _ddp_params_and_buffers_to_ignore = _Refusal()

    def __init_subclass__(cls, **_: Any) -> None:
        """Leave the user's `__init_subclass__` out: he has made no class."""

    @torch._disable_dynamo(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, ready for a synchronised backward."""
        forward = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        wrapped = _registry.get(self)
        return forward(*args, **kwargs) if wrapped is None else wrapped.run(forward, args, kwargs)

    @property
    def module(self) -> Any:
        """The model as an object of its original class, sharing everything with this one; a submodule so named wins."""
        own = self.__dict__.get("_modules", {}).get("module")
        wrapped = _registry.get(self)
        if own is None and wrapped is None:
            raise AttributeError("module")
        return own if own is not None else cast("Wrapped", wrapped).bare

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backwards are synchronised, as in DDP; `no_sync` sets it for a while."""
        wrapped = _registry.get(self)
        if wrapped is None:
            raise AttributeError("require_backward_grad_sync")
        return wrapped.require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        _wrapped(self).require_sync = bool(value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of forwards made inside accumulate locally; the next backward outside synchronises them."""
        before = _wrapped(self).require_sync
        _wrapped(self).require_sync = False
        try:
            yield
        finally:
            _wrapped(self).require_sync = before  # of a copy that has been wrapped meanwhile, too

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs: a rank that runs out takes part without data. See `torch.distributed` `Join`."""
        joinable = cast("Joinable", self)
        return Join(
            [joinable],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that shadows this model's collectives once the rank has joined.

        Raises:
            ConfigError: The algorithm makes rounds for which a rank without data could not stand in.
        """
        replica = _joined(self)
        algorithm = replica.engine.algorithm
        if replica.engine.weights is not None and not algorithm.traits.asynchronous:
            raise ConfigError(
                f"join: in the rounds of {algorithm.name!r} over weights nobody can stand in for a rank that has no "
                "data left. Give all ranks as many optimizer steps, or use an algorithm on gradients"
            )
        return replica.join.hook(replica, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device of `Join`'s own collectives."""
        return _joined(self).engine.device

    @property
    def join_process_group(self) -> Any:
        """The user's process group, on which `Join` counts ranks.

        Raises:
            ConfigError: It has been destroyed.
        """
        group = _joined(self).group()
        if group is None:
            raise ConfigError("join: the process group of the model has been destroyed")
        return group

    @property
    def _join_config(self) -> Any:
        return _joined(self).join.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        _joined(self).join.set_config(config, self)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights; those that an algorithm kept of earlier ones (anchors, outer momentum) start anew."""
        result = super().load_state_dict(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        wrapped = _registry.get(self)
        if isinstance(wrapped, Replica):
            wrapped.engine.weights_were_loaded()
        return result

    def __copy__(self) -> Any:
        wrapped = _registry.get(self)
        original = type(self)._commlib_class  # pyright: ignore[reportAttributeAccessIssue]
        copied = copy.copy(bare_of(cast("nn.Module", self), original) if wrapped is None else wrapped.bare)
        return copied if wrapped is None else copy_of(copied, wrapped.again)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wrapped = _registry.get(self)
        original = type(self)._commlib_class  # pyright: ignore[reportAttributeAccessIssue]
        copied = copy.deepcopy(bare_of(cast("nn.Module", self), original) if wrapped is None else wrapped.bare, memo)
        memo[id(self)] = copied
        return copied if wrapped is None else copy_of(copied, wrapped.again)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wrapped = _registry.get(self)
        if wrapped is None:  # an ordinary object, of a class that cannot be named
            original = type(self)._commlib_class  # pyright: ignore[reportAttributeAccessIssue]
            return bare_of(cast("nn.Module", self), original).__reduce_ex__(protocol)
        return copy_of, (wrapped.bare, wrapped.again)


def bare_of(model: nn.Module, cls: type) -> nn.Module:
    """Return an object of class `cls` that shares everything with the model."""
    bare = object.__new__(cls)
    bare.__dict__ = model.__dict__
    return bare


def extend(model: nn.Module, wrapped: Wrapped) -> None:
    """Give the model, an object of the user's class, the methods of `Parallel`; see [Note: object and class]."""
    cls = wrapped.original_class
    members: dict[str, Any] = {
        **{name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")},
        "_commlib_class": cls,
        "forward": _forward_of(cls),
    }
    if issubclass(cls, torch.fx.GraphModule):
        members["recompile"] = _recompile
    # Not by calling the metaclass: nobody's registry of classes is to hear of it.
    make = abc.ABCMeta.__new__ if issubclass(type(cls), abc.ABCMeta) else type.__new__
    model.__class__ = make(type(cls), cls.__name__, (Parallel, cls), members)
    _registry.put(model, wrapped)


def _forward_of(cls: type) -> Callable[..., Any]:
    """Return `forward` for a wrapped model's class, with the signature of the user's."""

    @functools.wraps(cls.forward)
    @torch._disable_dynamo(recursive=False)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = super(Parallel, self).forward  # pyright: ignore[reportAttributeAccessIssue]
        wrapped = _registry.get(self)
        if wrapped is None or wrapped.is_running:
            return own(*args, **kwargs)
        return wrapped.run(own, args, kwargs)

    return forward


def _recompile(self: Any) -> Any:
    """Let torch.fx write the code that it generates to the class that it made, not to the wrapped model's."""
    extended = type(self)
    self.__class__ = extended._commlib_class
    try:
        return self.recompile()
    finally:
        self.__class__ = extended


def restore_class(model: nn.Module) -> None:
    """Make a wrapped model or a copy an ordinary object of the user's class again."""
    wrapped = _registry.get(model)
    if wrapped is not None:
        _registry.discard(model)
        model.__class__ = wrapped.original_class


def copy_of(bare: nn.Module, again: Again) -> nn.Module:
    """Make an object that was copied or unpickled a copy of a wrapped model. Local."""
    if _registry.get(bare) is None:
        extend(bare, Copy(bare, again))
    return bare


def find(model: Any) -> Wrapped | None:
    """Return what belongs to a wrapped model or a copy of one; None for any other object."""
    return _registry.get(model) if isinstance(model, nn.Module) else None


def replicas() -> Iterator[Replica]:
    """Yield what belongs to each wrapped model of this process."""
    return _registry.replicas()


def replica_of(model: Any) -> Replica:
    """Return what belongs to a wrapped model.

    Raises:
        ConfigError: The model is not wrapped, or is a copy that has not trained yet.
    """
    wrapped = _wrapped(model)
    if isinstance(wrapped, Copy):
        raise ConfigError(
            f"the {type(model).__name__} is a copy of a wrapped model, which is wrapped in its first forward with "
            "gradients; call commlib.wrap(model, ...) to have it done now"
        )
    return wrapped


def _wrapped(model: Any) -> Wrapped:
    wrapped = find(model)
    if wrapped is None:
        raise ConfigError(f"the {type(model).__name__} is not wrapped; call commlib.wrap(model, ...) first")
    return wrapped


def _joined(model: Any) -> Replica:
    """Return what belongs to a wrapped model; a copy is wrapped now, as all ranks come here together."""
    wrapped = _wrapped(model)
    return wrapped.join_ranks() if isinstance(wrapped, Copy) else wrapped


def is_local() -> bool:
    """Return whether a forward now is no step of training: traced, transformed, or run again by backward."""
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


def tensors_in(output: Any) -> Iterable[torch.Tensor]:
    """Yield every tensor in nested lists, tuples, mappings and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))
