"""Set-up checks: of the model on one rank, and that all ranks have the same model."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.stateless import _functional_call
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from commlib.algorithms.auto import Auto
from commlib.algorithms.base import Algorithm
from commlib.arguments import described
from commlib.codecs import BlockCodec, SparseCodec
from commlib.engine.buckets.slot import name_some
from commlib.engine.planning.plan import Parameter
from commlib.errors import CommlibError, ConfigError
from commlib.sharding.local import (
    copied,
    divide_factors,
    is_by_fsdp,
    is_sharded,
    island_of,
    local_of,
    ranks_of,
    spec_of,
)
from commlib.transport.base import Transport
from commlib.version import __version__

#: Number of characters that an error shows of a value that differs between ranks.
_SHOWN = 100


def ignored_names(model: nn.Module, ignored: Sequence[str | nn.Parameter]) -> set[str]:
    """Return the names of the parameters and buffers that `ignored` (names or parameters) selects.

    Raises:
        ConfigError: One of them is not in the model.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    by_id: dict[int, list[str]] = {}
    for name, parameter in named.items():
        by_id.setdefault(id(parameter), []).append(name)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    names: set[str] = set()
    for item in ignored:
        if isinstance(item, str) and item in named:
            names.update(by_id[id(named[item])])
        elif isinstance(item, str) and item in buffers:
            names.add(item)
        elif isinstance(item, torch.Tensor) and id(item) in by_id:
            names.update(by_id[id(item)])
        else:
            shown = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
            raise ConfigError(f"ignored_parameters: {shown} is neither a parameter nor a buffer of the model")
    return names


def parameters_of(model: nn.Module, ignored: set[str], known: Collection[str] = ()) -> list[Parameter]:
    """Return the parameters to communicate: those that require a gradient or are known, tied ones once.

    Args:
        model: The model.
        ignored: Names of parameters that are not communicated.
        known: Names of parameters that are communicated whether or not they currently require a gradient.
    """
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return [
        Parameter(name, parameter, id(parameter) in sparse)
        for name, parameter in model.named_parameters()
        if (parameter.requires_grad or name in known) and name not in ignored
    ]


def check_model(model: Any, parameters: Sequence[Parameter]) -> None:
    """Check the parameters on one rank.

    Raises:
        ConfigError: There are no parameters, uninitialised ones, or several devices.
    """
    if not parameters:
        raise ConfigError("the model has no parameter that requires a gradient, so there is nothing to communicate")
    lazy = [p.name for p in parameters if is_lazy(p.param)]
    if lazy:
        raise ConfigError(f"uninitialised lazy parameters: {name_some(lazy)}. Run a forward pass before wrapping")
    devices: dict[str, list[str]] = {}
    for parameter in parameters:
        devices.setdefault(str(parameter.param.device), []).append(parameter.name)
    if "meta" in devices:
        raise ConfigError(
            f"parameters on the meta device: {name_some(devices['meta'])}. Materialise the model (to_empty) "
            "before wrapping"
        )
    if len(devices) > 1:
        shown = "; ".join(f"{device}: {name_some(names)}" for device, names in devices.items())
        raise ConfigError(f"the parameters are on {len(devices)} devices, expected one ({shown}). Move the model first")


def check_steps(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parameters whose optimizer steps within backward, before their gradients are communicated.

    Raises:
        ConfigError: There are such parameters.
    """
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
        raise ConfigError(
            "torch.distributed.optim._apply_optimizer_in_backward steps with each rank's own gradients, before they "
            "are communicated. Make the optimizer's step after backward"
        )


def check_sharded(model: nn.Module, ignored: set[str], algorithm: Algorithm, ranks: Collection[int]) -> None:
    """Check that sharded parameters are sharded over other ranks than those of the group.

    Args:
        model: The model.
        ignored: Names of parameters and buffers that are not communicated.
        algorithm: The algorithm.
        ranks: The global ranks of the group, including this one.

    Raises:
        ConfigError: A parameter or buffer wraps other tensors and is not a DTensor. Or a DTensor is on a mesh with more
            than one of the ranks, or the algorithm does not support it. Or FSDP2 leaves a parameter unsharded.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    wrapped = [(name, each) for name, each in named if name not in ignored and _is_wrapper(each)]
    foreign = [name for name, each in wrapped if not is_sharded(each)]
    if foreign:
        raise ConfigError(
            f"parameters or buffers that are wrappers of tensors: {name_some(foreign)}. commlib.wrap takes plain "
            "tensors and DTensors: freeze them, or name them in ignored_parameters and reduce their gradients yourself"
        )
    among = [name for name, each in wrapped if len(ranks_of(each) & set(ranks)) > 1]
    if among:
        raise ConfigError(
            f"{name_some(among)} are DTensors (of fully_shard or tensor parallelism) on a mesh that has several ranks "
            f"of the group {sorted(ranks)}, whose ranks must hold replicas. Shard on one dimension of a mesh and pass "
            "the other: fully_shard(model, mesh=mesh['shard']), then commlib.wrap(model, ..., "
            "process_group=mesh['replicate'])"
        )
    trained = {n: p for n, p in model.named_parameters() if n not in ignored and p.requires_grad}
    if len(island_of(trained.values())) > 1:
        _check_island(model, trained, algorithm)
    if wrapped and not algorithm.channel.has_rounds:
        raise ConfigError(
            f"{name_some([name for name, _ in wrapped])} are DTensors, and {algorithm.name!r} runs without rounds, on "
            "whole parameters. Use an algorithm on gradients, or one that averages weights in rounds"
        )


def _check_island(model: nn.Module, trained: dict[str, nn.Parameter], algorithm: Algorithm) -> None:
    whole = [name for name, each in trained.items() if not is_sharded(each)]
    if whole and is_by_fsdp(model):
        raise ConfigError(
            f"{name_some(whole)} are not sharded, while fully_shard has sharded other parameters. The ranks of an "
            "island have different gradients for them, which neither FSDP2 nor commlib would average. Call "
            "fully_shard(model, ...) on the whole model last; or average them yourself and name them in "
            "ignored_parameters"
        )
    if algorithm.channel.keeps_replicas_alike:
        _check_divide_factors(divide_factors(model), algorithm)
    if isinstance(algorithm, Auto):
        raise ConfigError(
            f"{name_some([name for name, each in trained.items() if is_sharded(each)])} are DTensors, and 'auto' would "
            "choose separately for each of their shards. Name one algorithm"
        )
    copies = copied(trained)
    if copies and algorithm.channel.has_rounds and not algorithm.channel.keeps_step:
        raise ConfigError(
            f"{name_some(copies)}: several ranks of an island hold the same shard, and their copies would diverge with "
            f"{algorithm.name!r}, whose rounds end by the clock. Use an algorithm whose rounds keep step"
        )


def _check_divide_factors(factors: set[float | None], algorithm: Algorithm) -> None:
    given = sorted(factor for factor in factors if factor is not None)
    if given and None in factors:
        raise ConfigError(
            f"FSDP2's set_gradient_divide_factor({given[0]:g}) is set on some modules, and others take means. Call it "
            "on every module that fully_shard was given, or on none"
        )
    if given and getattr(algorithm, "op", None) != "sum":
        raise ConfigError(
            f"FSDP2's set_gradient_divide_factor({given[0]:g}) is for sums over all ranks, and {algorithm.name!r} "
            "takes the mean over the islands, so gradients would be too small by a factor of the number of islands. Do "
            "not set the factor, to get the mean over all ranks; or use an algorithm with op='sum', such as "
            "commlib.algorithms.AllReduce(op='sum')"
        )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory of its own, but wraps other tensors."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or is_lazy(tensor) or tensor.is_meta:
        return False
    return is_traceable_wrapper_subclass(tensor) or (tensor.numel() > 0 and not tensor.data_ptr())


def describe(
    model: nn.Module, parameters: Sequence[Parameter], ignored: set[str], options: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield everything that must be identical on all ranks, as ordered (name, value) pairs."""
    for name, value in options.items():
        yield f"option {name}", value if isinstance(value, str) else repr(value)
    for parameter in parameters:
        yield f"parameter {parameter.name!r}", _shape_of(parameter.part) + spec_of(parameter.param)
    for name, buffer in model.named_buffers():
        if name not in ignored:
            yield f"buffer {name!r}", _shape_of(local_of(buffer)) + spec_of(buffer)


def algorithm_options(algorithm: Algorithm) -> dict[str, Any]:
    """Return the settings of an algorithm that ranks must have in common: its class, its arguments, its channel.

    Includes public attributes that are plain values, codecs or dataclasses, since they may be set after construction.
    """
    public = {k: v for k, v in vars(algorithm).items() if not k.startswith("_") and k not in algorithm.may_differ}
    shown = (str, int, float, bool, type(None), BlockCodec, SparseCodec)
    plain = {k: repr(v) for k, v in public.items() if isinstance(v, shown) or dataclasses.is_dataclass(v)}
    cls = type(algorithm).__name__
    return {
        "algorithm": cls,
        **{f"{cls}.{name}": value for name, value in described(algorithm)},
        **{f"{cls}.{name} (attribute)": value for name, value in plain.items()},
        "channel": algorithm.channel,
    }


def agree(
    transport: Transport,
    pairs: Callable[[], Iterable[tuple[str, str]]],
    error: Exception | None,
    what: str = "wrap",
) -> None:
    """Check that no rank has an error, and that all have the same version of commlib and the same pairs. Collective.

    Raises on every rank.

    Args:
        transport: Carries the digests, and the pairs themselves only if they differ.
        pairs: Yields this rank's pairs, from the start at each call.
        error: An earlier error of this rank.
        what: The function that the ranks are in.

    Raises:
        ConfigError: A rank has an error, or the pairs differ. Names the item, and the value on each rank.
    """
    compared = lambda: itertools.chain([("commlib", __version__)], pairs())  # noqa: E731
    digest = hashlib.sha256()
    for pair in compared() if error is None else ():
        digest.update(repr(pair).encode())
    text = None if error is None else f"{type(error).__name__}: {error}"
    reports = transport.gather_objects((text, digest.hexdigest()))
    if any(text is not None for text, _ in reports):
        transport.part()
    if error is not None:
        kind = type(error) if isinstance(error, CommlibError) else ConfigError
        cause = error.__cause__ if isinstance(error, CommlibError) else error  # whose message is not printed twice
        raise kind(f"rank {transport.rank}: {error}") from cause
    failed = {rank: text for rank, (text, _) in enumerate(reports) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise ConfigError(f"rank {transport.rank}: {what} failed on ranks {sorted(failed)}; on rank {rank}: {text}")
    if len({digest for _, digest in reports}) > 1:
        difference = _difference(transport.gather_objects(list(compared())))
        transport.part()
        raise ConfigError(
            f"rank {transport.rank}: the models or options differ between ranks ({difference}). Build the same model "
            "with the same options on every rank"
        )


def agree_on_state(transport: Transport, pairs: Iterable[tuple[str, str]]) -> None:
    """Check that all ranks have loaded state of the same step. Otherwise they would deadlock or drift apart.

    Args:
        transport: Carries the pairs.
        pairs: (name, value) pairs that must be identical.

    Raises:
        ConfigError: They differ. Raised on every rank.
        PeerTimeout: A rank has loaded nothing.
    """
    what = "the comparison of loaded state (load_state_dict, the model's or commlib's, must be called on every rank)"
    rows = [[tuple(pair) for pair in row] for row in transport.gather_apart(list(pairs), what)]
    if any(row != rows[0] for row in rows):
        transport.part()
        raise ConfigError(
            f"rank {transport.rank}: the loaded states differ between ranks ({_difference(rows)}). Load the state that "
            "was saved after the same step on every rank"
        )


def _difference(by_rank: Sequence[Sequence[tuple]]) -> str:
    """Describe the first difference between the ranks' pairs."""
    lengths = [len(pairs) for pairs in by_rank]
    for items in itertools.zip_longest(*by_rank, fillvalue=("nothing", "")):
        if len(set(items)) == 1:
            continue
        groups: dict[tuple, list[int]] = {}
        for rank, item in enumerate(items):
            groups.setdefault(item, []).append(rank)
        shown = "; ".join(f"ranks {ranks}: {what} {_short(value)}".rstrip() for (what, value), ranks in groups.items())
        are_alike = len(set(lengths)) == 1 or len({what for what, _ in groups}) == 1
        return shown if are_alike else f"{shown}; entries per rank: {lengths}"
    raise AssertionError("the digests differ but the descriptions do not")


def _short(value: str) -> str:
    """Return a value as it is shown: a long one, such as the description of a function, by its beginning and digest."""
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({hashlib.sha256(value.encode()).hexdigest()[:8]})"


def _shape_of(tensor: torch.Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f", strides {tuple(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{strides}"


class Structure:
    """A snapshot of the model's parameters and buffers, to detect changes cheaply at each forward.

    Args:
        model: The model.
        known: The identities of the communicated parameters.
        ignored: Names of parameters that may change.
    """

    def __init__(self, model: nn.Module, known: Collection[int] = (), ignored: Collection[str] = ()) -> None:
        modules = list(model.modules())
        self._known, self._ignored = known, ignored
        self._tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._filled = [table for table in self._tables if table]
        self._lengths = list(map(len, self._tables))
        self._entries = list(itertools.chain.from_iterable(map(dict.values, self._filled)))
        self._has_shards = any(map(is_sharded, self._entries))
        self._frozen = [
            parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and id(parameter) not in known and name not in ignored
        ]
        self._buffer_tables = [module._buffers for module in modules]
        self._buffer_entries: list[torch.Tensor | None] = []
        self._buffers: list[torch.Tensor] = []

    def buffers(self, model: nn.Module, ignored: Collection[str]) -> list[torch.Tensor]:
        """Return the buffers whose names are not ignored, tied ones once."""
        # Runs in every step, so the model is walked only after a change.
        if not any(self._buffer_tables):
            return []
        entries = list(itertools.chain.from_iterable(map(dict.values, self._buffer_tables)))
        is_known = len(entries) == len(self._buffer_entries) and all(map(is_, entries, self._buffer_entries))
        if not is_known or not self._is_same():
            self._buffer_entries = entries
            self._buffers = [buffer for name, buffer in model.named_buffers() if name not in ignored]
        return self._buffers

    def _is_same(self) -> bool:
        # Runs before every forward: a few passes in C over all entries.
        entries = itertools.chain.from_iterable(map(dict.values, self._filled))
        if list(map(len, self._tables)) != self._lengths:
            return False
        if not self._has_shards:
            return all(map(is_, entries, self._entries))
        return all(now is then or _is_gathered(now, then) for now, then in zip(entries, self._entries, strict=True))

    def was_unfrozen(self) -> bool:
        """Return whether a parameter that was frozen, and is not communicated, now requires a gradient."""
        return any(parameter.requires_grad for parameter in self._frozen)

    def check(self, model: nn.Module, parameters: Sequence[Parameter]) -> None:
        """Raise if parameters were added or replaced, or communicated parameters were removed.

        Args:
            model: The model.
            parameters: The communicated parameters.

        Raises:
            ConfigError: Names the parameters.
        """
        if self._is_same() or self._are_lent():
            return
        now = dict(model.named_parameters())
        before, kept = set(map(id, self._entries)), set(map(id, now.values()))
        added = [name for name, parameter in now.items() if id(parameter) not in before and name not in self._ignored]
        removed = [parameter.name for parameter in parameters if id(parameter.param) not in kept]
        if not added and not removed:
            self.__init__(model, self._known, self._ignored)  # modules were moved, with the same parameters
            return
        changes = [f"added: {name_some(added)}"] if added else []
        changes += [f"removed: {name_some(removed)}"] if removed else []
        raise ConfigError(
            f"the model's parameters changed after wrapping ({'; '.join(changes)}), so they would not be communicated. "
            "Call commlib.unwrap(model), change the model (fully_shard does, too), and wrap it again on all ranks"
        )

    def _are_lent(self) -> bool:
        """Return whether other tensors replace the parameters for one call only (`torch.func.functional_call`)."""
        entries = itertools.chain.from_iterable(map(dict.values, self._filled))
        if any(isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter) for each in entries):
            return True
        frame = sys._getframe()
        while frame is not None and frame.f_code is not _functional_call.__code__:
            frame = frame.f_back
        return frame is not None


def _is_gathered(now: Any, then: Any) -> bool:
    """Return whether `now` is a tensor that FSDP2 has temporarily put in the place of a sharded parameter.

    This is the whole parameter or, with `reshard_after_forward=<int>`, a shard on another mesh of the same ranks.
    """
    if not (is_sharded(then) and isinstance(now, nn.Parameter) and now.shape == then.shape):
        return False
    other: Any = now
    return not is_sharded(other) or (ranks_of(other) == ranks_of(then) and other.device_mesh != then.device_mesh)
