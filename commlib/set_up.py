"""The checks of `wrap` on one rank, and the comparison between ranks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from commlib import algorithms, ddp_arguments, verify
from commlib.algorithms.auto import Auto
from commlib.algorithms.base import Algorithm
from commlib.algorithms.known import OPTIMIZERS
from commlib.engine import optimizer_state, optimizers
from commlib.engine.buckets.slot import name_some
from commlib.errors import ConfigError
from commlib.parallel import NAMES, as_made_by_the_user
from commlib.replica import Replica, find, replicas
from commlib.sharding.local import island_of, reshard
from commlib.transport.base import Transport
from commlib.transport.torch_dist import TorchTransport

_log = logging.getLogger("commlib")


def tuner() -> Any:
    """Import the tuner, and with it the simulator. Only "auto" needs them."""
    from commlib import tuner

    return tuner


class SetUp:
    """The checks of `wrap` on one rank. Keeps the first error, so that all ranks raise together."""

    def __init__(
        self,
        model: Any,
        algorithm: Any,
        optimizer: Any,
        ignored: Sequence[str | nn.Parameter],
        bucket_cap_mb: Any,
        scaler: Any,
        ranks: Sequence[int],
        unannounced: str,
        ddp: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.algorithm: Algorithm | None = None
        self.optimizer: Any = None
        self.parameters: list[Any] = []
        self.ignored: set[str] = set()
        self.scaler = scaler
        self.error: Exception | None = None
        self.device = torch.device("cpu")
        try:
            self._check_model(ignored)
            ddp_arguments.check(ddp, self.device, algorithm)
            _check_notowned(self.parameters)
            verify.check_steps([parameter.param for parameter in self.parameters])
            self._check_algorithm(algorithm, optimizer, ranks)
            _check_options(scaler, unannounced, bucket_cap_mb)
        except Exception as error:
            self.error = error

    def _check_model(self, ignored: Sequence[str | nn.Parameter]) -> None:
        model = self.model
        as_made_by_the_user(model)
        _check_wrappable(model)
        reshard(model)
        self.ignored = verify.ignored_names(model, tuple(ignored))
        self.parameters = verify.parameters_of(model, self.ignored)
        verify.check_model(model, self.parameters)
        self.device = self.parameters[0].param.device

    def _check_algorithm(self, algorithm: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        self.algorithm = algorithms.create(algorithm)
        self.optimizer = optimizers.resolve(optimizer)
        check_optimizer(self.algorithm, self.optimizer, self.parameters)
        _check_repeatable(self.algorithm)
        verify.check_sharded(self.model, self.ignored, self.algorithm, ranks)
        if isinstance(self.algorithm, Auto):
            tuner().candidates_of(self.algorithm, self.optimizer)

    def agree(self, transport: Transport, options: dict[str, Any], error: Exception | None) -> Algorithm:
        """Check that all ranks have the same model and options, and connect the island of a sharded model. Collective.

        Args:
            transport: The communicator.
            options: The options of `wrap`, by name.
            error: A further error on this rank, if any.

        Returns:
            The algorithm.

        Raises:
            ConfigError: The ranks differ, or one of them has an error. Raised on every rank.
        """
        verify.agree(transport, lambda: self.pairs(options), self.error or error)
        assert self.algorithm is not None
        if self.algorithm.channel.keeps_replicas_alike:
            optimizer_state.agree(transport, optimizer_state.digests(self.optimizer, self.parameters))
        island = sorted(island_of(parameter.param for parameter in self.parameters))
        if len(island) > 1 and isinstance(transport, TorchTransport) and transport.world_size > 1:
            transport.join_island(island)
        return self.algorithm

    def digest(self, options: dict[str, Any]) -> str:
        """Return a digest of the model and the options."""
        return hashlib.sha256(repr(list(self.pairs(options))).encode()).hexdigest()[:16]

    def pairs(self, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the (name, value) pairs that must be identical on all ranks."""
        assert self.algorithm is not None
        options = {**verify.algorithm_options(self.algorithm), **options, "ignored_parameters": sorted(self.ignored)}
        if self.scaler is not None and self.algorithm.channel.keeps_replicas_alike:
            options["scaler"] = optimizers.scale_of(self.scaler)
        return verify.describe(self.model, self.parameters, self.ignored, options)


def _check_wrappable(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("model: a ScriptModule cannot be wrapped; wrap the Python module, then torch.compile it")
    taken = [name for name in NAMES if hasattr(type(model), name)]
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)  # has its own message below
    if taken and find(model) is None and not is_ddp:
        raise ConfigError(
            f"model: {type(model).__name__} has {', '.join(map(repr, taken))} of its own. A wrapped model's class "
            "defines these names, as DDP does. Rename them, or wrap a module around the model"
        )
    for name, module in model.named_modules():
        what = f"its submodule {name!r}" if name else "the model"
        if isinstance(find(module), Replica):
            raise ConfigError(f"{what} is wrapped already. Call commlib.unwrap first, or wrap only the outer module")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                f"{what} is a DistributedDataParallel. Wrap the bare module (its .module) instead. If a trainer "
                "created the DDP, disable that (Ray Train: prepare_model(model, parallel_strategy=None))"
            )


def _check_notowned(parameters: Sequence[Any]) -> None:
    owned = {id(parameter.param) for replica in replicas() for parameter in replica.engine.parameters}
    twice = [parameter.name for parameter in parameters if id(parameter.param) in owned]
    if twice:
        raise ConfigError(
            f"another wrapped model already communicates these parameters: {name_some(twice)}. Call commlib.unwrap on "
            "that model, and wrap one module that holds both, both = torch.nn.ModuleList([one, other]), with all "
            "optimizers; call commlib.expect_backward(both) before each backward that is to be synchronised"
        )


def check_optimizer(
    algorithm: Algorithm, optimizer: Any, parameters: Sequence[Any], is_warming_up: bool = True
) -> None:
    """Refuse an optimizer (as returned by `optimizers.resolve`) that the algorithm cannot run with.

    Raises:
        ConfigError: The algorithm needs an optimizer, or one that holds all parameters, or one that trains at the point
            that is evaluated, or one of the preset's kind.
    """
    kind = None if optimizer is None else optimizers.kind_of(optimizer)
    if algorithm.optimizer_kind not in (None, kind):
        named = OPTIMIZERS[algorithm.optimizer_kind]
        raise ConfigError(
            f"optimizer: this preset of {algorithm.name!r} was measured with {named}; expected torch.optim.{named} for "
            f"the hidden matrices and another one for the rest, as in optimizer=[muon, adamw], got "
            f"{optimizers.names_of(optimizer)}. {algorithm.name!r} itself takes any optimizer"
        )
    algorithm.check_optimizer(optimizer, is_warming_up)
    needed = algorithm.channel.needs_optimizer
    if optimizer is None:
        if needed:
            raise ConfigError(
                f"the algorithm {algorithm.name!r} acts on weights or optimizer state. Create the optimizer first and "
                f"pass it: commlib.wrap(model, {algorithm.name!r}, optimizer=optimizer)"
            )
        return
    if not algorithm.channel.keeps_replicas_alike and optimizers.has_points(optimizer):
        raise ConfigError(
            f"optimizer: {optimizers.names_of(optimizer)} trains at another point than the one that is evaluated (it "
            f"has train() and eval()), and {algorithm.name!r} would average only one of them over the ranks. Use an "
            "algorithm on gradients"
        )
    missing = optimizers.left_out(optimizer, [(parameter.name, parameter.param) for parameter in parameters])
    if missing and needed:
        raise ConfigError(
            f"optimizer: {name_some(missing)} are in no group of the optimizer, so {algorithm.name!r} would not "
            "see their steps. Pass all optimizers, as a list, or freeze the parameters that none of them trains"
        )
    if missing:
        _log.warning("optimizer: %s are in no group of the optimizer; its first group's learning rate is used", missing)


def _check_options(scaler: Any, unannounced: str, bucket_cap_mb: Any) -> None:
    if scaler is not None and not (hasattr(scaler, "get_scale") and hasattr(scaler, "is_enabled")):
        raise ConfigError(f"scaler: expected a torch.amp.GradScaler, got {type(scaler).__name__}")
    if unannounced not in ("warn", "error"):
        raise ConfigError(f"unannounced: expected 'warn' or 'error', got {unannounced!r}")
    if bucket_cap_mb is not None and not (isinstance(bucket_cap_mb, int | float) and bucket_cap_mb > 0):
        raise ConfigError(f"bucket_cap_mb: expected a positive number of MiB or None, got {bucket_cap_mb!r}")


def _check_repeatable(algorithm: Algorithm) -> None:
    """Refuse algorithms that depend on clocks if deterministic algorithms are requested."""
    depends = not algorithm.channel.keeps_step or isinstance(algorithm, Auto)
    if not depends or not torch.are_deterministic_algorithms_enabled():
        return
    message = f"the algorithm {algorithm.name!r} depends on clocks, so runs are not reproducible"
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise ConfigError(f"{message}, and torch.use_deterministic_algorithms is on. Choose another algorithm")
    _log.warning("%s, though torch.use_deterministic_algorithms is on", message)
