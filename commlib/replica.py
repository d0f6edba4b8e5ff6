"""What a wrapped model is: the methods that its class gains, and what its forward does beside the user's."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from commlib import verify
from commlib.engine.engine import Engine
from commlib.errors import CommlibError, ConfigError
from commlib.join import JoinState
from commlib.primitives.replicate import broadcast_all
from commlib.tuner import Tuner

KEY = "_commlib_replica"

#: Of all wrapped models, so that no parameter is communicated twice.
replicas: weakref.WeakSet[Replica] = weakref.WeakSet()


class Replica:
    """What belongs to one wrapped model: its engine, its buffers, and what its forward does beside the user's."""

    def __init__(
        self, engine: Engine, model: nn.Module, ignored: set[str], broadcast_buffers: bool, group: Any
    ) -> None:
        self.engine = engine
        self.group: Callable[[], Any] = weakref.ref(group)  # does not keep a destroyed group's threads
        self.original_class = model.__class__
        self.ignored = ignored
        self.options: dict[str, Any] = {}
        self.restore: Callable[..., nn.Module]  # set by `wrap`: makes a copy of the model from `bare` and `options`
        self.structure = verify.Structure(model)
        self.join = JoinState(engine.comm)
        self.is_running = False
        self.tuner: Tuner | None = None
        self._broadcasts_buffers = broadcast_buffers
        self._after_sync = True  # as in DDP, buffers are copied before each forward that follows a synchronised one
        bare = object.__new__(model.__class__)
        bare.__dict__ = model.__dict__
        self.bare: nn.Module = bare

    @torch._disable_dynamo(recursive=False)  # the user's forward, called inside, is compiled
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model; a call from within (recursion, or `forward` from `__call__`) is the user's alone."""
        if self.is_running:
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
        """Check that the model is as the engine knows it, and copy the buffers of rank 0, as DDP does."""
        engine = self.engine
        if torch._C._current_graph_task_id() != -1:
            return  # backward runs this forward again
        if torch.is_grad_enabled():
            self._check(engine)
            if self.tuner is not None and engine.require_sync:
                self.tuner.forward_begins()
        syncs_buffers, self._after_sync = self._broadcasts_buffers and self._after_sync, engine.require_sync
        if self.join.enabled and torch.is_grad_enabled():
            self.join.announce(engine, syncs_buffers, engine.require_sync)
        if syncs_buffers:
            self.copy_buffers(self.join.source)

    def _check(self, engine: Engine) -> None:
        if engine.in_backward and engine.error is None:
            engine.abandon(
                CommlibError(
                    "the previous backward did not finish (an exception in it?), so the ranks no longer agree on what "
                    "was communicated. Restart from a checkpoint on all ranks"
                )
            )
        engine.check()
        self.structure.check(self.bare, engine.parameters)
        if self.structure.was_unfrozen() or engine.found_frozen or engine.layout_changed():
            self._adopt_parameters()
        engine.install_pending()

    def _adopt_parameters(self) -> None:
        """Parameters were frozen, unfrozen, moved or cast: check that all ranks agree, and plan anew."""
        self.structure = verify.Structure(self.bare)
        parameters = verify.parameters_of(self.bare, self.ignored)
        verify.agree(self.engine.transport, lambda: verify.describe(self.bare, parameters, self.ignored, {}), None)
        self.engine.adopt(parameters)

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

    def copy_buffers(self, source: int = 0) -> None:
        """Copy the buffers of rank `source` to all ranks."""
        if buffers := self._buffers():
            self._broadcast("the broadcast of buffers (every rank must call forward)", buffers, source, here=True)

    def broadcast_model(self, source: int = 0) -> None:
        """Copy parameters and buffers of rank `source` to all ranks."""
        parameters = [p.data for name, p in self.bare.named_parameters() if name not in self.ignored]
        self._broadcast("the broadcast of parameters and buffers", [*parameters, *self._buffers()], source)

    def _broadcast(self, what: str, tensors: list[torch.Tensor], source: int, here: bool = False) -> None:
        if self.engine.comm.world_size > 1:
            self.engine.run(what, broadcast_all(tensors, self.engine.comm, source), here)

    def synchronize(self) -> None:
        """See `commlib.synchronize`."""
        if (weights := self.engine.weights) is not None:
            weights.complete(max(self.engine.transport.gather_objects(weights.num_started)))
            self.engine.run("the mean of the weights", weights.mean_of_weights())
        if self.engine.attached is not None:
            self.engine.attached.runner.synchronize()
        self.copy_buffers()


@Joinable.register  # not a base: `Joinable` derives from `ABC`, which gives objects another layout than a module's
class Parallel:
    """What a wrapped model's class gains; `super()` is the user's class. Each wrapped model has a class of its own."""

    _commlib_replica: Replica

    @torch._disable_dynamo(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, ready for a synchronised backward."""
        return self._commlib_replica.run(super().__call__, args, kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; a direct call is ready for a synchronised backward too."""
        forward = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if self._commlib_replica.is_running:
            return forward(*args, **kwargs)
        return self._commlib_replica.run(forward, args, kwargs)

    @property
    def module(self) -> Any:
        """The model as an object of its original class, sharing everything with this one; a submodule so named wins."""
        own = self.__dict__.get("_modules", {}).get("module")
        return self._commlib_replica.bare if own is None else own

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of forwards made inside accumulate locally; the next backward outside synchronises them."""
        engine = self._commlib_replica.engine
        before, engine.require_sync = engine.require_sync, False
        try:
            yield
        finally:
            engine.require_sync = before

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
        """Return the hook that shadows this model's collectives once the rank has joined."""
        replica = self._commlib_replica
        return replica.join.hook(replica, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device of `Join`'s own collectives."""
        return self._commlib_replica.engine.device

    @property
    def join_process_group(self) -> Any:
        """The user's process group, on which `Join` counts ranks.

        Raises:
            ConfigError: It has been destroyed.
        """
        group = self._commlib_replica.group()
        if group is None:
            raise ConfigError("join: the process group of the model has been destroyed")
        return group

    @property
    def _join_config(self) -> Any:
        return self._commlib_replica.join.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._commlib_replica.join.set_config(config, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        replica = self._commlib_replica
        return replica.restore, (replica.bare, replica.options)


def extend(model: nn.Module, replica: Replica) -> None:
    """Give the model's class the methods of `Parallel`, for this object only."""
    cls = model.__class__
    replicas.add(replica)
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, KEY: replica}
    model.__class__ = types.new_class(cls.__name__, (Parallel, cls), exec_body=lambda body: body.update(members))


def replica_of(model: Any) -> Replica:
    """Return what belongs to a wrapped model.

    Raises:
        ConfigError: The model is not wrapped.
    """
    replica = getattr(type(model), KEY, None)
    if replica is None:
        raise ConfigError(f"the {type(model).__name__} is not wrapped; call commlib.wrap(model, ...) first")
    return replica


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
