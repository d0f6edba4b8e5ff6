"""Integration with Hugging Face accelerate: `prepare` wraps models with commlib instead of DDP.

accelerator = commlib.integrations.accelerate.use(Accelerator(), "topk")
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend, is_compiled_module
from torch import nn

from commlib import algorithms, checkpoint
from commlib.algorithms import Algorithm
from commlib.errors import ConfigError
from commlib.integrations.accelerate_checkpoint import Folder, Loading, in_own_memory
from commlib.integrations.accelerate_models import Models, bare_of, inner_of
from commlib.integrations.versions import TESTED, warn_if_untested
from commlib.replica import Replica, find
from commlib.wrap import alone, expect_backward, wrap

warn_if_untested("accelerate")

#: Backends that shard or schedule the model themselves, so that there is no gradient of the whole model to communicate.
_OTHERS = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}

#: Options of `commlib.wrap` that follow from the prepared objects.
_FOLLOWS = {"optimizer": "the optimizers given to prepare", "scaler": "the accelerator's own scaler"}


_Own = TypeVar("_Own", bound=Accelerator)


def use(accelerator: _Own, algorithm: str | Algorithm = "allreduce", **options: Any) -> _Own:
    """Make an accelerator wrap models with `commlib.wrap` instead of DDP, from its next `prepare` on.

    Call it on every rank before `prepare`. The accelerator stays the same object; its class is replaced by a subclass
    of the original. With one process, models stay as accelerate leaves them. Methods behave as in accelerate with DDP.
    If replicas differ between the ranks, `get_state_dict`, `save_model` and `save_state` are collective.

    Args:
        accelerator: The accelerator; changed in place.
        algorithm: As in `commlib.wrap`.
        options: Further options of `commlib.wrap`, except `optimizer` and `scaler`, which the accelerator provides.

    Returns:
        `accelerator` itself.

    Raises:
        ConfigError: The algorithm or an option is unknown; `use` was called before, or after models were prepared;
            several processes were launched, but accelerate uses one; FSDP, DeepSpeed, Megatron-LM, XLA, or tensor,
            context or sequence parallelism is on; regional compilation is on; a DDP communication hook is set.
    """
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(f"use: expected an accelerate.Accelerator, got {type(accelerator).__name__}")
    _check_unused(accelerator)
    _check_processes(accelerator)
    _check_parallelism(accelerator)
    _check_options(options)
    handler = accelerator.ddp_handler
    if handler is not None:
        options.setdefault("broadcast_buffers", handler.broadcast_buffers)
    accelerator._commlib = Models(algorithms.create(algorithm), options)  # pyright: ignore[reportAttributeAccessIssue]
    accelerator.__class__ = _relaxed(type(accelerator))
    return accelerator


def _relaxed(cls: type[Accelerator]) -> type[Any]:
    """Return a subclass of an accelerator's class that wraps models with commlib."""
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (Relaxed, cls), members)


def _new(cls: type[Accelerator]) -> Any:
    """Return an empty accelerator whose original class is `cls`, for pickle to fill."""
    return object.__new__(_relaxed(cls))


def _check_unused(accelerator: Accelerator) -> None:
    if isinstance(accelerator, Relaxed):
        name = accelerator._commlib.algorithm.name
        raise ConfigError(f"use: this accelerator uses {name!r} already. Call use once, before prepare")
    if _prepared(accelerator, "models"):
        raise ConfigError("use: models were prepared already, for DDP. Call use right after Accelerator(...)")


def _check_processes(accelerator: Accelerator) -> None:
    launched = os.environ.get("WORLD_SIZE", "")
    if accelerator.num_processes == 1 and launched.isdecimal() and int(launched) > 1:
        raise ConfigError(
            f"use: WORLD_SIZE is {launched}, but accelerate uses one process, so each would train alone. On a machine "
            "without accelerators, pass Accelerator(cpu=True) or set ACCELERATE_USE_CPU=true"
        )


def _check_parallelism(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in _OTHERS:
        raise ConfigError(
            f"use: the accelerator is set up for {_OTHERS[kind]}, but commlib replaces DDP. Choose plain data "
            "parallelism (accelerate config, or accelerate launch --multi_gpu), or train without commlib"
        )
    parallel = accelerator.parallelism_config
    if parallel is not None and (parallel.non_data_parallel_size > 1 or parallel.dp_shard_enabled):
        raise ConfigError(
            f"use: the accelerator's parallelism_config has {parallel.active_mesh_dims}, but commlib replaces DDP. "
            "Pass only dp_replicate_size"
        )
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ConfigError(
            f"use: DistributedDataParallelKwargs has the communication hook {str(handler.comm_hook)!r}, which applies "
            "to DDP only. Leave it out: the algorithm determines the communication"
        )
    if _plugin(accelerator).use_regional_compilation:
        raise ConfigError(
            "use: regional compilation copies the model, but commlib wraps the model itself. Set "
            "use_regional_compilation=False (the whole model is then compiled)"
        )


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name in _FOLLOWS:
            raise ConfigError(f"use: do not pass {name}=; commlib takes {_FOLLOWS[name]}")
    known = set(inspect.signature(wrap).parameters) - {"model", "algorithm", *_FOLLOWS}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"use: unknown options {unknown}; commlib.wrap has {sorted(known)}. Pass an algorithm's options to an "
            "instance of it, such as use(accelerator, commlib.algorithms.TopK(ratio=0.01))"
        )


_Base = Accelerator if TYPE_CHECKING else object


class Relaxed(_Base):
    """Methods added to the class of an accelerator; `super()` is its original class."""

    _commlib: Models

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the original class, because pickle cannot find this one by name."""
        original = type(self).__bases__[1]
        return _new, (original,), *super().__reduce_ex__(max(protocol, 2))[2:]

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """See accelerate. Wraps each model with the optimizers of this or earlier calls that hold its parameters."""
        with self._commlib.expecting(args):
            prepared = super().prepare(*args, device_placement=device_placement)
        self._commlib.unmark()
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See accelerate. A model with trainable parameters is wrapped by commlib, in place.

        Raises:
            ConfigError: The model cannot be wrapped, or was wrapped by `commlib.wrap`.
        """
        inner = inner_of(model)
        if evaluation_mode or self.distributed_type == DistributedType.NO:
            if not evaluation_mode and _is_trained(inner):
                alone.put(inner, self._commlib.algorithm.name)
            return super().prepare_model(model, device_placement, evaluation_mode)
        self._commlib.check(inner)
        is_known = any(each is inner for each in _prepared(self, "models"))
        self._commlib.mark(inner)
        with _not_compiling(self):
            super().prepare_model(model, device_placement, evaluation_mode=True)
        if not _is_trained(inner):
            return self._compiled(model)
        is_wrapped = self._commlib.wrap(inner, _prepared(self, "optimizers"), self.scaler, rewraps=not is_known)
        if not is_wrapped and self._compiles():
            raise ConfigError(
                f"prepare: {self._commlib.algorithm.name!r} needs the optimizer of the {type(inner).__name__} before "
                "the model is compiled. Prepare both in one call"
            )
        self._commlib.unmark()
        return self._compiled(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """See accelerate. Models prepared before whose parameters the optimizer holds are wrapped with it."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        self._commlib.optimizer_came(_prepared(self, "optimizers"), self.scaler)
        return prepared

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """See accelerate. The next backward is synchronized, even if its forwards ran under `no_sync`."""
        inner = inner_of(model)
        if isinstance(find(inner), Replica):
            expect_backward(inner)
        yield

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """See accelerate. Returns an object of the model's original class that shares all state with the model."""
        if not is_compiled_module(model):
            return super().unwrap_model(bare_of(model), keep_fp32_wrapper, keep_torch_compile)
        bare = super().unwrap_model(bare_of(inner_of(model)), keep_fp32_wrapper)
        return torch.compile(bare, **_plugin(self).to_kwargs()) if keep_torch_compile else bare

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """See accelerate. If replicas differ between the ranks, returns their mean, and every rank must call it."""
        state = super().get_state_dict(model, unwrap)
        inner = inner_of(model)
        if not self._commlib.has(inner):
            return state
        if not checkpoint.replicas_differ(inner):
            return in_own_memory(state)
        consensus = checkpoint.consensus_state_dict(inner)
        return {name: consensus[name.removeprefix("_orig_mod.")] for name in state}

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """See accelerate. Every rank also writes a file with its own communication state.

        Raises:
            CommlibError: Another rank could not write its files.
        """
        if not self._commlib.in_use:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        states = [self._commlib.rank_state(model) for model in _prepared(self, "models")]
        begun: list[Folder] = []

        def begin(_models: Any, _weights: Any, folder: str) -> None:
            Folder(self, folder).begin()
            begun.append(Folder(self, folder))

        hook = self.register_save_state_pre_hook(begin)
        try:
            saved = super().save_state(output_dir, safe_serialization, **kwargs)
        except Exception as error:
            if begun:
                begun[0].fail(error)
            raise
        finally:
            hook.remove()
        begun[0].end(states, self._commlib.algorithm.name)
        return saved

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """See accelerate. Also loads this rank's own communication state.

        Raises:
            ConfigError: The checkpoint is incomplete, or of another algorithm, world size or set of models.
        """
        if not self._commlib.in_use:
            return super().load_state(input_dir, load_kwargs, **kwargs)
        found: list[Any] = []

        def take(models: list[Any], folder: str) -> None:
            found.append(Folder(self, folder).read(len(models), self._commlib.algorithm))
            models[:] = [Loading(model) if self._commlib.has(model) else model for model in models]

        read = self.register_load_state_pre_hook(take)
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            read.remove()
        self._commlib.load_rank_states(_prepared(self, "models"), found[0])

    def _compiles(self) -> bool:
        return _plugin(self).backend != DynamoBackend.NO

    def _compiled(self, model: nn.Module) -> Any:
        """Compile the model, once and after wrapping, as accelerate does."""
        if not self._compiles() or is_compiled_module(model):
            return model
        return torch.compile(model, **_plugin(self).to_kwargs())


def _prepared(accelerator: Accelerator, kind: str) -> list[Any]:
    """Return the prepared models or optimizers. accelerate has no public list of them."""
    found = getattr(accelerator, f"_{kind}", None)
    if found is None:
        raise ConfigError(
            f"this version of accelerate has no list _{kind} of prepared objects, which commlib needs. "
            f"pip install 'accelerate=={TESTED['accelerate']}'"
        )
    return found


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _plugin(accelerator: Accelerator) -> Any:
    """Return the options of `torch.compile`."""
    return accelerator.state.dynamo_plugin


@contextlib.contextmanager
def _not_compiling(accelerator: Accelerator) -> Iterator[None]:
    """Disable `torch.compile` in `prepare_model`; the model is compiled after wrapping."""
    plugin = _plugin(accelerator)
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = backend
