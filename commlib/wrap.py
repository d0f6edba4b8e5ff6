"""`wrap`: makes a model train in parallel, in place; and what the wrapped model offers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils.weak import WeakIdKeyDictionary

from commlib import algorithms, verify
from commlib.algorithms.base import Algorithm
from commlib.engine import state as checkpoints
from commlib.engine.bucket import name_some
from commlib.engine.engine import Engine
from commlib.engine.stats import Stats
from commlib.errors import CommlibError, ConfigError
from commlib.join import JoinState
from commlib.primitives.replicate import broadcast_all
from commlib.transport.torch_dist import TorchTransport, as_timedelta, resolve_group

_KEY = "_commlib_replica"

#: Which parameters are communicated by some wrapped model, so that none is communicated twice.
_owned: WeakIdKeyDictionary = WeakIdKeyDictionary()


def wrap(
    model: nn.Module,
    algorithm: str | Algorithm = "allreduce",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: Any = None,
    bucket_cap_mb: float | None = None,
    broadcast_buffers: bool = True,
    init_sync: bool = True,
    ignored_parameters: Sequence[str | nn.Parameter] = (),
    scaler: Any = None,
    timeout: float | timedelta | None = None,
) -> nn.Module:
    """Make `model` train in parallel over the ranks of a process group, in place.

    Collective: every rank of the group calls it with the same model and options. The same object comes back; its
    class gains `no_sync()`, `join()` and `module`, and its parameters' names and `state_dict` stay as they are.
    Gradients are communicated while backward runs, and are final when `backward()` returns. `param.grad` is then a view
    of a buffer that commlib owns.

    Args:
        model: The model, on its device; changed in place.
        algorithm: A registered name (`commlib.algorithms.list()`) or an `Algorithm` instance with options.
        optimizer: Required by algorithms that act on weights or optimizer state; its steps are then counted.
        process_group: A `ProcessGroup`, a 1-D `DeviceMesh`, or None for the default group.
        bucket_cap_mb: Size of a bucket in MiB. None lets commlib measure and plan the buckets.
        broadcast_buffers: Whether rank 0's buffers are copied to all ranks before each forward that follows a synchronised
            one, evaluation included, as in DDP.
        init_sync: Whether rank 0's parameters and buffers are copied to all ranks now.
        ignored_parameters: Parameters, or names of parameters and buffers, that commlib leaves alone.
        scaler: The `GradScaler`, for algorithms that keep residuals.
        timeout: Seconds (or a timedelta) that a collective waits for its peers; None takes the group's.

    Returns:
        `model` itself.

    Raises:
        ConfigError: No process group; or, alike on every rank: an unknown algorithm, a model that cannot be wrapped, is
            wrapped already, or differs between ranks.
        TransportError: A rank did not take part within the timeout.
    """
    group = resolve_group(process_group)
    setup = _SetUp(model, algorithm, optimizer, ignored_parameters, bucket_cap_mb)
    duration, error = _timeout(timeout, group, setup)
    transport = TorchTransport(group, setup.device, duration)
    try:
        options = {"broadcast_buffers": broadcast_buffers, "init_sync": init_sync, "bucket_cap_mb": bucket_cap_mb}
        verify.agree(transport, setup.pairs(options), setup.error or error)
    except BaseException:
        transport.close()
        raise
    assert setup.algorithm is not None
    cap_bytes = None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
    prototype = copy.deepcopy(setup.algorithm)
    engine = Engine(setup.parameters, transport, setup.algorithm, cap_bytes, optimizer, scaler)
    if optimizer is not None and not setup.algorithm.traits.on_gradients:
        engine.follow_optimizer(optimizer, TorchTransport(group, setup.device, duration))
    replica = _Replica(engine, model, setup.ignored, broadcast_buffers, group)
    replica.options = {
        "algorithm": prototype,
        "bucket_cap_mb": bucket_cap_mb,
        "broadcast_buffers": broadcast_buffers,
        "ignored_parameters": tuple(sorted(setup.ignored)),
        "timeout": timeout,
    }
    _extend(model, replica)
    if init_sync:
        replica.broadcast_model()
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Undo `wrap`: remove every hook, end the communication, restore the class. Returns the same object.

    Every rank calls it. Background rounds are taken first; gradients and parameters stay.

    Raises:
        ConfigError: The model is not wrapped.
    """
    replica = _replica_of(model)
    if replica.engine.weights is not None and replica.engine.error is None:
        replica.engine.weights.drain()
    for parameter in replica.engine.parameters:
        _owned.pop(parameter.param, None)
    replica.engine.close()
    model.__class__ = replica.original_class
    return model


def stats(model: nn.Module) -> Stats:
    """Return what the wrapped model has communicated. Local; prints as a table of its buckets.

    Raises:
        ConfigError: The model is not wrapped.
    """
    return _replica_of(model).engine.stats()


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the communication's state on this rank: the algorithm's own, its phase, and the bucket plan.

    Save it beside `model.state_dict()`, per rank; with it a resumed run is bit-identical to one that never stopped. (Within
    the first three synchronised backwards there is no plan to save yet: the resumed run makes its own.)

    Raises:
        ConfigError: The model is not wrapped.
    """
    return checkpoints.save(_replica_of(model).engine)


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Take over what `state_dict` returned. Local; every rank loads its own.

    Raises:
        ConfigError: The model is not wrapped, or the state is of another algorithm, model or world size.
    """
    checkpoints.load(_replica_of(model).engine, dict(state))


def synchronize(model: nn.Module) -> None:
    """Make the model the same on all ranks: the consensus of the replicas. Collective.

    Background rounds are taken first. Algorithms on gradients keep replicas alike, so only buffers are copied then;
    for the others the parameters become their mean over the ranks.

    Raises:
        ConfigError: The model is not wrapped.
        TransportError: A rank did not take part.
    """
    _replica_of(model).synchronize()


def _timeout(timeout: Any, group: Any, setup: _SetUp) -> tuple[timedelta, Exception | None]:
    """Return the duration, and what was wrong with `timeout` (all ranks are told together, so the group's serves)."""
    try:
        return as_timedelta(timeout, group, setup.device), None
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        return as_timedelta(None, group, setup.device), ConfigError(f"timeout={timeout!r}: {error}")


class _SetUp:
    """What one rank finds out by itself before it meets the others; an error is kept, to be raised on all of them."""

    def __init__(
        self, model: Any, algorithm: Any, optimizer: Any, ignored: Sequence[str | nn.Parameter], bucket_cap_mb: Any
    ) -> None:
        self.model = model
        self.algorithm: Algorithm | None = None
        self.parameters: list[Any] = []
        self.ignored: set[str] = set()
        self.error: Exception | None = None
        self.device = torch.device("cpu")
        try:
            _check_wrappable(model)
            self.ignored = verify.ignored_names(model, tuple(ignored))
            self.parameters = verify.parameters_of(model, self.ignored)
            verify.check_model(model, self.parameters)
            self.device = self.parameters[0].param.device
            _check_not_owned(self.parameters)
            self.algorithm = algorithms.create(algorithm)
            _check_optimizer(self.algorithm, optimizer)
            if bucket_cap_mb is not None and not bucket_cap_mb > 0:
                raise ConfigError(f"bucket_cap_mb: expected a positive number of MiB or None, got {bucket_cap_mb!r}")
        except Exception as error:
            self.error = error

    def pairs(self, options: dict[str, Any]) -> list[tuple]:
        """Return what must be alike on all ranks."""
        if self.error is not None or self.algorithm is None:
            return []
        options = {**options, **verify.algorithm_options(self.algorithm), "ignored_parameters": sorted(self.ignored)}
        return verify.describe(self.model, self.parameters, self.ignored, options)


def _check_wrappable(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("model: a ScriptModule cannot be wrapped; wrap the Python module, then torch.compile it")
    for name, module in model.named_modules():
        what = f"its submodule {name!r}" if name else "the model"
        if hasattr(type(module), _KEY):
            raise ConfigError(f"{what} is wrapped already. Call commlib.unwrap first, or wrap only the outer module")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConfigError(f"{what} is a DistributedDataParallel. Wrap the bare module (its .module) instead")


def _check_not_owned(parameters: Sequence[Any]) -> None:
    twice = [parameter.name for parameter in parameters if parameter.param in _owned]
    if twice:
        raise ConfigError(
            f"parameters that another wrapped model communicates: {name_some(twice)}. Wrap one of the two only, or "
            "name them in ignored_parameters"
        )


def _check_optimizer(algorithm: Algorithm, optimizer: Any) -> None:
    needed = algorithm.traits.needs_optimizer or not algorithm.traits.on_gradients
    if optimizer is None and needed:
        raise ConfigError(f"the algorithm {algorithm.name!r} acts on weights or optimizer state: pass optimizer=")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")


def _extend(model: nn.Module, replica: _Replica) -> None:
    """Give the model's class the methods of `_Parallel`, for this object only."""
    cls = model.__class__
    for parameter in replica.engine.parameters:
        _owned[parameter.param] = True
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, _KEY: replica}
    model.__class__ = types.new_class(cls.__name__, (_Parallel, cls), exec_body=lambda body: body.update(members))


def _replica_of(model: Any) -> _Replica:
    replica = getattr(type(model), _KEY, None)
    if replica is None:
        raise ConfigError(f"the {type(model).__name__} is not wrapped; call commlib.wrap(model, ...) first")
    return replica


class _Replica:
    """What belongs to one wrapped model: its engine, its buffers, and what its forward does beside the user's."""

    def __init__(self, engine: Engine, model: nn.Module, ignored: set[str], broadcast_buffers: bool, group: Any) -> None:
        self.engine = engine
        self.group = group
        self.original_class = model.__class__
        self.ignored = ignored
        self.options: dict[str, Any] = {}
        self.structure = verify.Structure(model)
        self.join = JoinState(engine.comm)
        self._broadcasts_buffers = broadcast_buffers
        self._after_sync = True  # as in DDP, buffers are copied before each forward that follows a synchronised one
        bare = object.__new__(model.__class__)
        bare.__dict__ = model.__dict__
        self.bare: nn.Module = bare

    @torch._disable_dynamo
    def before_forward(self) -> None:
        """Check that the model is as the engine knows it, and copy the buffers of rank 0, as DDP does."""
        engine = self.engine
        if torch._C._current_graph_task_id() != -1:
            return  # backward runs this forward again
        if torch.is_grad_enabled():
            self._check(engine)
        syncs_buffers, self._after_sync = self._broadcasts_buffers and self._after_sync, engine.require_sync
        if self.join.enabled and torch.is_grad_enabled():
            self.join.announce(engine, syncs_buffers, engine.require_sync)
        if syncs_buffers:
            self.copy_buffers(self.join.source)

    def _check(self, engine: Engine) -> None:
        if engine.in_backward:
            raise CommlibError(
                f"rank {engine.comm.rank}: the previous backward did not finish (an exception in it?), so the ranks no "
                "longer agree on what was communicated. Restart from a checkpoint on all ranks"
            )
        engine.check()
        self.structure.check(self.bare)
        if self.structure.requires_grad_changed() or engine.layout_changed():
            self._adopt_parameters()
        engine.install_pending()

    def _adopt_parameters(self) -> None:
        """Parameters were frozen, unfrozen, moved or cast: check that all ranks agree, and plan anew."""
        self.structure = verify.Structure(self.bare)
        parameters = verify.parameters_of(self.bare, self.ignored)
        pairs = verify.describe(self.bare, parameters, self.ignored, {})
        verify.agree(self.engine.transport, pairs, None)
        for parameter in self.engine.parameters:
            _owned.pop(parameter.param, None)
        for parameter in parameters:
            _owned[parameter.param] = True
        self.engine.adopt(parameters)

    @torch._disable_dynamo
    def after_forward(self, output: Any) -> None:
        """Have the outputs' gradients announce the backward."""
        if not torch.is_grad_enabled() or self.engine.is_idle:
            return
        engine, sync = self.engine, self.engine.require_sync
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: engine.begin(sync))

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for name, buffer in self.bare.named_buffers() if name not in self.ignored]

    def copy_buffers(self, source: int = 0) -> None:
        """Copy the buffers of rank `source` to all ranks."""
        if buffers := self._buffers():
            self._broadcast("the broadcast of buffers (every rank must call forward)", buffers, source)

    def broadcast_model(self, source: int = 0) -> None:
        """Copy parameters and buffers of rank `source` to all ranks."""
        parameters = [p.data for name, p in self.bare.named_parameters() if name not in self.ignored]
        self._broadcast("the broadcast of parameters and buffers", [*parameters, *self._buffers()], source)

    def _broadcast(self, what: str, tensors: list[torch.Tensor], source: int) -> None:
        if self.engine.comm.world_size > 1:
            self.engine.run(what, broadcast_all(tensors, self.engine.comm, source))

    def synchronize(self) -> None:
        """See `commlib.synchronize`."""
        if self.engine.weights is not None:
            self.engine.weights.drain()
            self.engine.run("the mean of the weights", self.engine.weights.mean_of_weights())
        self.copy_buffers()


@Joinable.register  # not a base: `Joinable` derives from `ABC`, which gives objects another layout than a module's
class _Parallel:
    """What a wrapped model's class gains. Its `super()` is the user's class, and each wrapped model has a class of its own."""

    _commlib_replica: _Replica

    @torch._disable_dynamo(recursive=False)  # the user's forward, called inside, is compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replica = self._commlib_replica
        replica.before_forward()
        output = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        replica.after_forward(output)
        return output

    @property
    def module(self) -> Any:
        """The model as an object of its original class, sharing everything with this one; a submodule so named wins."""
        own = self.__dict__.get("_modules", {}).get("module")
        return self._commlib_replica.bare if own is None else own

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate gradients locally, for forwards made inside; the next one outside synchronises them."""
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
        return Join(
            [self],
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
        """The user's process group, on which `Join` counts ranks."""
        return self._commlib_replica.group

    @property
    def _join_config(self) -> Any:
        return self._commlib_replica.join.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._commlib_replica.join.set_config(config, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        replica = self._commlib_replica
        return _restore, (replica.bare, replica.options)


def _restore(bare: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Unpickle or copy: wrap again on the default group, where there is one and no optimizer is needed."""
    on_gradients = options["algorithm"].traits.on_gradients and not options["algorithm"].traits.needs_optimizer
    if torch.distributed.is_available() and torch.distributed.is_initialized() and on_gradients:
        return wrap(bare, init_sync=False, **options)
    return bare


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
