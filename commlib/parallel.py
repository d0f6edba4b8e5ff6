"""The methods that a wrapped model's class gains.

[Note: object and class] A wrapped model is the user's object. Its class is replaced by a new class that derives from
the user's and only adds methods. State of the wrapping is kept per object, in `registry`. Another object of that class,
created by a method of the model with `type(self)(...)`, is an ordinary model.

[Note: the type] Python has no intersection types, so "a Net that also has no_sync" cannot be expressed. For pyright and
mypy, `WrappedModel[Net]` is the closest type. It declares the methods of `Parallel`, and `module` as a `Net`. It
derives from `Any`, so it is accepted wherever a `Net` is. Its other attributes are `Any`, because a `Net`'s own cannot
be listed. Deriving from `nn.Module` alone would type them as `Tensor | Module`, which cannot be called.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from commlib.errors import ConfigError
from commlib.replica import REFUSAL, Again, Copy, Replica, Wrapped, bare_of, begin_forward, find, registry, wrapped_of

#: The reason that torch.compile reports if it would trace more than the user's forward.
UNTRACED = (
    "a wrapped model announces its backward around its forward, which cannot be part of a graph. To use "
    "fullgraph=True, compile the model, not the function that calls it"
)

#: The class of a user's model.
M = TypeVar("M", bound=nn.Module)

#: Names that a wrapped model's class defines, so the user's class must not.
NAMES = ("no_sync", "require_backward_grad_sync", "join", "join_hook", "join_device", "join_process_group")


class _Refusal:
    """Raises when `DistributedDataParallel` reads the names to ignore, since DDP must not wrap this model."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(f"DistributedDataParallel would be around {REFUSAL}")


@Joinable.register  # not a base class: `Joinable` derives from `ABC`, whose object layout differs from a module's
class Parallel:
    """Methods that a wrapped model's class gains. Each wrapped model has its own class; `super()` is the user's."""

    _ddp_params_and_buffers_to_ignore = _Refusal()

    def __init_subclass__(cls, **_: Any) -> None:
        """Skip the user's `__init_subclass__`, since the user has not defined this class."""

    @property
    def module(self) -> Any:
        """The model as an object of its original class, sharing all state. A submodule `module` takes precedence."""
        own = self.__dict__.get("_modules", {}).get("module")
        wrapped = registry.get(self)
        if own is None and wrapped is None:
            raise AttributeError("module")
        return own if own is not None else cast("Wrapped", wrapped).bare

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backwards are synchronised, as in DDP. `no_sync` sets it temporarily."""
        wrapped = registry.get(self)
        if wrapped is None:
            raise AttributeError("require_backward_grad_sync")
        return wrapped.require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        wrapped_of(self).require_sync = bool(value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of forwards inside the block locally. The next backward outside synchronises them."""
        before = _require_sync(self, False)
        try:
            yield
        finally:
            _require_sync(self, before)  # a copy may have been wrapped inside the block

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs: a rank that runs out takes part without data. See `torch.distributed`'s `Join`."""
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
            ConfigError: The algorithm's rounds require data on every rank.
        """
        replica = _joined(self)
        replica.engine.session.refuse_if_elastic("join (uneven inputs)")
        if not all(channel.allows_join for channel in replica.engine.channels):
            raise ConfigError(
                f"join: the rounds of {replica.engine.algorithm.name!r} over weights need every rank, and one that has "
                "run out of data cannot take part. Give all ranks as many optimizer steps, or use an algorithm on "
                "gradients"
            )
        return replica.join.hook(replica, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device on which `Join` runs its own collectives."""
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
        """Load weights. State that an algorithm keeps of earlier weights (anchors, outer momentum) is reset.

        Raises:
            ConfigError: The names are DDP's, with the prefix `module.`.
        """
        wrapped = registry.get(self)
        _refuse_names_of_ddp(self, args[0] if args else kwargs.get("state_dict"))
        with wrapped.engine.loading_weights() if isinstance(wrapped, Replica) else contextlib.nullcontext():
            return super().load_state_dict(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def __copy__(self) -> Any:
        wrapped = registry.get(self)
        original = type(self)._commlib_class  # pyright: ignore[reportAttributeAccessIssue]
        copied = copy.copy(bare_of(cast("nn.Module", self), original) if wrapped is None else wrapped.bare)
        return copied if wrapped is None else copy_of(copied, wrapped.again)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wrapped = registry.get(self)
        original = type(self)._commlib_class  # pyright: ignore[reportAttributeAccessIssue]
        copied = copy.deepcopy(bare_of(cast("nn.Module", self), original) if wrapped is None else wrapped.bare, memo)
        memo[id(self)] = copied
        return copied if wrapped is None else copy_of(copied, wrapped.again)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wrapped = registry.get(self)
        if wrapped is None:  # an ordinary object of a class that pickle cannot find by name
            original = type(self)._commlib_class  # pyright: ignore[reportAttributeAccessIssue]
            return bare_of(cast("nn.Module", self), original).__reduce_ex__(protocol)
        return copy_of, (wrapped.bare, wrapped.again)


def _refuse_names_of_ddp(model: Any, state: Any) -> None:
    """Raise if all names in a state have DDP's prefix. With `strict=False`, nothing would be loaded, silently."""
    has_prefix = isinstance(state, Mapping) and state and all(str(name).startswith("module.") for name in state)
    if has_prefix and "module" not in model._modules:
        raise ConfigError(
            "load_state_dict: the names begin with 'module.', as DistributedDataParallel saves them; a wrapped model "
            "keeps its own. Load {name.removeprefix('module.'): value for name, value in state_dict.items()}"
        )


def extend(model: nn.Module, wrapped: Wrapped) -> None:
    """Give the model, an object of the user's class, the methods of `Parallel`. See [Note: object and class]."""
    cls = wrapped.original_class
    members: dict[str, Any] = {
        **{name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")},
        "_commlib_class": cls,
        "__call__": _announcing(cls, "__call__"),
        "forward": _announcing(cls, "forward"),
    }
    if issubclass(cls, torch.fx.GraphModule):
        members["recompile"] = _recompile
    # Bypass the metaclass call, so that registries of classes do not see the new class.
    make = abc.ABCMeta.__new__ if issubclass(type(cls), abc.ABCMeta) else type.__new__
    model.__class__ = make(type(cls), cls.__name__, (Parallel, cls), members)
    registry.put(model, wrapped)


def _announcing(cls: type, name: str) -> Callable[..., Any]:
    """Return `__call__` or `forward` for a wrapped model's class: the user's, preceded by commlib's preparation.

    torch.compile traces the user's method that is called inside, but not commlib's work before and after it. Traced
    work would run only once.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(super(Parallel, self) if issubclass(type(self), Parallel) else self, name)  # possibly unwrapped
        replica = begin_forward(self)
        if replica is None:
            return own(*args, **kwargs)
        replica.is_running = True
        try:
            output = own(*args, **kwargs)
        finally:
            replica.is_running = False
        replica.after_forward(output)
        return output

    users = getattr(cls, name)
    functools.update_wrapper(call, users, updated=())
    call.__dict__.update({key: value for key, value in vars(users).items() if not key.startswith("_torchdynamo")})
    return torch.compiler.disable(call, recursive=False, reason=UNTRACED)


def _recompile(self: Any) -> Any:
    """Let torch.fx write its generated code to the class that it created, not to the wrapped model's class."""
    extended = type(self)
    self.__class__ = extended._commlib_class
    try:
        return self.recompile()
    finally:
        self.__class__ = extended


def restore_class(model: nn.Module) -> None:
    """Turn a wrapped model or a copy back into an ordinary object of the user's class."""
    wrapped = registry.get(model)
    if wrapped is not None:
        registry.discard(model)
        model.__class__ = wrapped.original_class


def as_made_by_the_user(model: Any) -> None:
    """Restore the user's class of an object that is not wrapped, but was created by a wrapped model's class."""
    original = getattr(type(model), "_commlib_class", None)
    if original is not None and registry.get(model) is None:
        model.__class__ = original


def copy_of(bare: nn.Module, again: Again) -> nn.Module:
    """Turn an object that was copied or unpickled into a copy of a wrapped model. Local."""
    if registry.get(bare) is None:
        extend(bare, Copy(bare, again))
    return bare


@torch._disable_dynamo
def _require_sync(model: Any, value: bool) -> bool:
    """Set whether the next backwards are synchronised. Returns the previous value."""
    wrapped = wrapped_of(model)
    before, wrapped.require_sync = wrapped.require_sync, value
    return before


def _joined(model: Any) -> Replica:
    """Return the `Replica` of a wrapped model. A copy is wrapped first, since all ranks call this together."""
    wrapped = wrapped_of(model)
    return wrapped.join_ranks() if isinstance(wrapped, Copy) else wrapped


if TYPE_CHECKING:

    class WrappedModel(nn.Module, Generic[M], Any):
        """The type of a wrapped model, for annotations and `isinstance`; see [Note: the type]."""

        require_backward_grad_sync: bool

        @property
        def module(self) -> M:
            """The model as an object of its original class."""
            ...

        def no_sync(self) -> contextlib.AbstractContextManager[None]:
            """Accumulate gradients of forwards inside the block locally."""
            ...

        def join(
            self,
            divide_by_initial_world_size: bool = True,
            enable: bool = True,
            throw_on_early_termination: bool = False,
        ) -> Join:
            """Train with uneven inputs."""
            ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

else:

    class _IsWrapped(type):
        def __instancecheck__(cls, model: Any) -> bool:
            return find(model) is not None

    class WrappedModel(Generic[M], metaclass=_IsWrapped):
        """The type of a wrapped model (and of a copy of one), for annotations and `isinstance`."""
