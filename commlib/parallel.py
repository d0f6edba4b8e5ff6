"""The methods that a wrapped model's class gains.

[Note: object and class] A wrapped model is the user's object with a class of its own that derives from his. The class
only adds methods. What belongs to the wrapping is kept for the object, by `registry`: another object of that class,
which a method of the model made by `type(self)(...)`, is an ordinary model.

[Note: the type] Python cannot say "a Net that also has no_sync": there are no intersections of types. For pyright and
mypy, `WrappedModel[Net]` comes nearest. It knows what `Parallel` adds, and that `module` is a `Net`. It derives from
`Any` and so goes wherever a `Net` is asked for. Its other attributes are `Any`, as a `Net`'s own cannot be listed;
`nn.Module` would make them `Tensor | Module`, which nobody may call: neither `own_method` nor `no_sync`.
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

#: What torch.compile says where it was to trace more than the user's forward.
UNTRACED = (
    "a wrapped model announces its backward around its forward, which cannot be part of a graph. Where fullgraph=True "
    "is wanted, compile the model, not the function that calls it"
)

#: The class of a user's model.
M = TypeVar("M", bound=nn.Module)

#: What a wrapped model's class has for itself, so that the user's must not have it.
NAMES = ("no_sync", "require_backward_grad_sync", "join", "join_hook", "join_device", "join_process_group")


class _Refusal:
    """Stands where `DistributedDataParallel` looks for names to ignore, and says that it must not wrap this model."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(f"DistributedDataParallel would be around {REFUSAL}")


@Joinable.register  # not a base: `Joinable` derives from `ABC`, which gives objects another layout than a module's
class Parallel:
    """What a wrapped model's class gains; `super()` is the user's class. Each wrapped model has a class of its own."""

    _ddp_params_and_buffers_to_ignore = _Refusal()

    def __init_subclass__(cls, **_: Any) -> None:
        """Leave the user's `__init_subclass__` out: he has made no class."""

    @property
    def module(self) -> Any:
        """The model as an object of its original class, sharing everything with this one; a submodule so named wins."""
        own = self.__dict__.get("_modules", {}).get("module")
        wrapped = registry.get(self)
        if own is None and wrapped is None:
            raise AttributeError("module")
        return own if own is not None else cast("Wrapped", wrapped).bare

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backwards are synchronised, as in DDP; `no_sync` sets it for a while."""
        wrapped = registry.get(self)
        if wrapped is None:
            raise AttributeError("require_backward_grad_sync")
        return wrapped.require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        wrapped_of(self).require_sync = bool(value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of forwards made inside accumulate locally; the next backward outside synchronises them."""
        before = _require_sync(self, False)
        try:
            yield
        finally:
            _require_sync(self, before)  # a copy may have been wrapped meanwhile

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
        if not all(channel.allows_join for channel in replica.engine.channels):
            raise ConfigError(
                f"join: in the rounds of {replica.engine.algorithm.name!r} over weights nobody can stand in for a rank "
                "that has no data left. Give all ranks as many optimizer steps, or use an algorithm on gradients"
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
        """Load weights; those that an algorithm kept of earlier ones (anchors, outer momentum) start anew.

        Raises:
            ConfigError: The names are DDP's, with `module.` before each.
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
        if wrapped is None:  # an ordinary object, of a class that cannot be named
            original = type(self)._commlib_class  # pyright: ignore[reportAttributeAccessIssue]
            return bare_of(cast("nn.Module", self), original).__reduce_ex__(protocol)
        return copy_of, (wrapped.bare, wrapped.again)


def _refuse_names_of_ddp(model: Any, state: Any) -> None:
    """Raise where all names in a state begin as DDP's: with `strict=False` nothing would be loaded, in silence."""
    has_prefix = isinstance(state, Mapping) and state and all(str(name).startswith("module.") for name in state)
    if has_prefix and "module" not in model._modules:
        raise ConfigError(
            "load_state_dict: the names begin with 'module.', as DistributedDataParallel saves them; a wrapped model "
            "keeps its own. Load {name.removeprefix('module.'): value for name, value in state_dict.items()}"
        )


def extend(model: nn.Module, wrapped: Wrapped) -> None:
    """Give the model, an object of the user's class, the methods of `Parallel`; see [Note: object and class]."""
    cls = wrapped.original_class
    members: dict[str, Any] = {
        **{name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")},
        "_commlib_class": cls,
        "__call__": _announcing(cls, "__call__"),
        "forward": _announcing(cls, "forward"),
    }
    if issubclass(cls, torch.fx.GraphModule):
        members["recompile"] = _recompile
    # Not by calling the metaclass: nobody's registry of classes is to hear of it.
    make = abc.ABCMeta.__new__ if issubclass(type(cls), abc.ABCMeta) else type.__new__
    model.__class__ = make(type(cls), cls.__name__, (Parallel, cls), members)
    registry.put(model, wrapped)


def _announcing(cls: type, name: str) -> Callable[..., Any]:
    """Return `__call__` or `forward` of a wrapped model's class: the user's, ready for a synchronised backward.

    torch.compile traces what it calls, and neither itself nor commlib's work before and after: traced once, that would
    never be done again.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(super(Parallel, self) if issubclass(type(self), Parallel) else self, name)  # it may be unwrapped
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
    """Let torch.fx write the code that it generates to the class that it made, not to the wrapped model's."""
    extended = type(self)
    self.__class__ = extended._commlib_class
    try:
        return self.recompile()
    finally:
        self.__class__ = extended


def restore_class(model: nn.Module) -> None:
    """Make a wrapped model or a copy an ordinary object of the user's class again."""
    wrapped = registry.get(model)
    if wrapped is not None:
        registry.discard(model)
        model.__class__ = wrapped.original_class


def as_made_by_the_user(model: Any) -> None:
    """Give an object that is not wrapped, but was made by a wrapped model's class, the user's class."""
    original = getattr(type(model), "_commlib_class", None)
    if original is not None and registry.get(model) is None:
        model.__class__ = original


def copy_of(bare: nn.Module, again: Again) -> nn.Module:
    """Make an object that was copied or unpickled a copy of a wrapped model. Local."""
    if registry.get(bare) is None:
        extend(bare, Copy(bare, again))
    return bare


@torch._disable_dynamo
def _require_sync(model: Any, value: bool) -> bool:
    """Say whether the next backwards are synchronised; returns what was so before."""
    wrapped = wrapped_of(model)
    before, wrapped.require_sync = wrapped.require_sync, value
    return before


def _joined(model: Any) -> Replica:
    """Return what belongs to a wrapped model; a copy is wrapped now, as all ranks come here together."""
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
            """Let gradients of forwards made inside accumulate locally."""
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
