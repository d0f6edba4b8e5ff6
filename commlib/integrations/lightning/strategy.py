"""The strategy: Lightning's DDP strategy with commlib in place of DDP.

[Note: where the backward is] With automatic optimization, `training_step` is the forward of the wrapped module, and its
loss announces the backward, whichever methods or submodules it calls. With manual optimization, backwards run inside
`training_step`: Lightning calls the strategy just before each of them, and the strategy announces it then.

[Note: steps with closures] With automatic optimization, forward and backward run inside `optimizer.step(closure)`.
Algorithms that need the gradients before the optimizer's step get a step without a closure: a hook runs the closure
first, including all that Lightning does after the backward (`on_before_optimizer_step`, clipping).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

from commlib import algorithms, verify
from commlib import checkpoint as rank_states
from commlib.algorithms.base import Algorithm
from commlib.engine.optimizers import all_of, resolve
from commlib.errors import ConfigError
from commlib.integrations.lightning import checkpoints
from commlib.parallel import restore_class
from commlib.replica import Replica, find
from commlib.wrap import expect_backward, synchronize, unwrap, wrap

_log = logging.getLogger("commlib")

#: Options of Lightning's own strategies that are passed on.
_LIGHTNING_OPTIONS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "start_method"),
)
#: Parameters of `commlib.wrap` that the strategy provides itself.
_OWN = ("model", "algorithm", "optimizer", "scaler", "process_group")
_WRAP_OPTIONS = tuple(name for name in inspect.signature(wrap).parameters if name not in _OWN)


class CommlibStrategy(DDPStrategy):
    """Trains a LightningModule in several processes with communication by commlib.

    The LightningModule stays the same object. It is wrapped in place after `fit` has created its optimizers, and
    unwrapped when `fit` ends.

    Args:
        algorithm: A registered name (`commlib.algorithms.list()`) or an `Algorithm` with options.
        process_group_timeout: A timedelta, the timeout of the process group if Lightning creates it.
        **options: Options of `commlib.wrap` (`timeout`, `bucket_cap_mb`, `ignored_parameters`, ...; `timeout` is that
            of commlib's own collectives), and options of Lightning's `DDPStrategy` that do not concern DDP itself:
            `start_method`, `process_group_backend`, `cluster_environment`, `checkpoint_io`, `precision_plugin`,
            `accelerator`, `parallel_devices`.

    Raises:
        ConfigError: The algorithm or an option is unknown.
    """

    def __init__(
        self,
        algorithm: str | Algorithm = "allreduce",
        *,
        process_group_timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        _check_options(options)
        algorithms.create(algorithm)  # raises on errors
        lightnings = {name: options.pop(name) for name in _LIGHTNING_OPTIONS if name in options}
        if process_group_timeout is not None:
            lightnings["timeout"] = process_group_timeout
        super().__init__(**lightnings)
        self.algorithm = algorithm
        self._options = options
        self._saved: checkpoints.Saved | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._has_failed = False
        self._hooks: list[Any] = []

    # --- set-up and end ---------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Create the process group.

        Raises:
            ConfigError: The accelerator is neither "cpu" nor "cuda".
        """
        if self.root_device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"CommlibStrategy: expected accelerator='cpu' or 'cuda', got a device of type {self.root_device.type!r}"
            )
        super().setup_environment()

    @override
    def configure_ddp(self) -> None:
        """Copy rank 0's parameters and buffers to all ranks, as DDP does. `setup` wraps once there are optimizers."""
        if self._options.get("init_sync", True):
            _make_alike(self._module, tuple(self._options.get("ignored_parameters", ())))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the module. Wrap it if it will be trained.

        Raises:
            ConfigError: An error of `commlib.wrap`, or no optimizer of the module has parameters of it.
        """
        self._has_failed, self._saved = False, None
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._wrap()

    def _wrap(self) -> None:
        module, optimizers = self._module, self._raw_optimizers
        algorithm = algorithms.create(self.algorithm)
        if not optimizers:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                return
            algorithm = self._without_steps(algorithm)
        elif _held_by(optimizers).isdisjoint(map(id, module.parameters())):
            raise ConfigError(
                f"{type(module).__name__}.configure_optimizers returned no optimizer with parameters of the module, so "
                "there is nothing to train together. Return one, or None to train without an optimizer"
            )
        self._hooks = [each.register_step_pre_hook(self._run_closure_first) for each in optimizers]  # before commlib's
        scaler = getattr(self.precision_plugin, "scaler", None)
        wrap(module, algorithm, optimizer=optimizers or None, scaler=scaler, **self._options)

    def _without_steps(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm for a module without optimizers: its gradients are averaged as with DDP."""
        if algorithm.name == "allreduce":
            return algorithm
        if self.is_global_zero:
            _log.warning(
                "%s.configure_optimizers returned no optimizer, so %r has no steps to follow: 'allreduce' averages the "
                "gradients. If the module has an optimizer, return it",
                *(type(self._module).__name__, algorithm.name),
            )
        return algorithms.create("allreduce")

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Record that the ranks may be at different points, so that no collective may follow."""
        self._has_failed = True

    @override
    def teardown(self) -> None:
        """Unwrap the module. If replicas differ, all ranks get the consensus first."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._loaded = [], None
        replica = self._replica
        if replica is not None and self._has_failed:
            self._saved = None
            replica.engine.close()
            restore_class(self._module)
        elif replica is not None:
            self._end()
        super().teardown()

    def _end(self) -> None:
        module = self._module
        self._saved = checkpoints.Saved(module, self._raw_optimizers).detach()
        synchronize(module)
        unwrap(module)
        self._saved.fit_has_ended(module)

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _raw_optimizers(self) -> list[torch.optim.Optimizer]:
        """The module's optimizers, without Lightning's placeholder for none, which has no parameters."""
        found = all_of(resolve(list(self.optimizers))) if self.optimizers else ()
        return [optimizer for optimizer in found if optimizer.param_groups]

    @property
    def _replica(self) -> Replica | None:
        """The replica of the wrapped module; None if it is not wrapped."""
        wrapped = find(self.lightning_module)
        return wrapped if isinstance(wrapped, Replica) else None

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's `state_dict`: the consensus if replicas may differ. Collective then.

        Lightning calls this first when it saves, so pending communication results are applied here.
        """
        if self._replica is None:
            return super().lightning_module_state_dict()
        self._saved = checkpoints.Saved(self._module, self._raw_optimizers)
        return rank_states.consensus_state_dict(self._module)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the file from rank 0, with every rank's part in it. Every rank calls it."""
        gathered = self._gathered() if "optimizer_states" in checkpoint else None
        if gathered is not None:
            checkpoint = {**checkpoint, checkpoints.KEY: gathered}  # hooks have seen the dict, and may keep it
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _gathered(self) -> dict[str, Any] | None:
        """Return commlib's entry for the file on rank 0, None on other ranks. Collective."""
        saved = self._saved
        if saved is None or not dist.is_initialized():
            return None
        if self._replica is not None:
            self._saved = None  # valid at this step only
        elif not self.broadcast(saved.is_valid_for(self._module)):
            return None
        return saved.gather()

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the file. commlib's entry is removed and kept until the optimizers are loaded: no hook sees it."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._loaded = checkpoint.pop(checkpoints.KEY, None)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state, the last state that all ranks share, and then this rank's part.

        Raises:
            ConfigError: The state is of another algorithm, or of another world size and is not portable.
        """
        super().load_optimizer_state_dict(checkpoint)
        if self._replica is not None:
            checkpoints.load(self._module, self._loaded, self._raw_optimizers)
            self._loaded = None

    # --- training ---------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` as the forward of the wrapped module."""
        module, replica = self._module, self._replica
        if replica is None:  # nothing in it is trained
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            if module.automatic_optimization:
                replica.begin_forward()
            with _running(replica, True):
                output = module.training_step(*args, **kwargs)
            # With manual optimization, `pre_backward` announces it, and whether it is synchronized is decided then.
            if module.automatic_optimization:
                replica.after_forward(output)
            return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Announce a backward of manual optimization; see [Note: where the backward is]."""
        replica = self._replica
        if replica is not None and not self._module.automatic_optimization:
            with _running(replica, False):  # counts as a step of its own (for `auto`)
                expect_backward(self._module)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Do nothing. DDP's work at this point is not needed."""

    @override
    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Make the backwards of forwards inside the context local."""
        module: Any = self._module
        with contextlib.nullcontext() if self._replica is None else module.no_sync():
            yield

    def _run_closure_first(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Run a step's closure before the step if the algorithm needs that; see [Note: steps with closures]."""
        replica = self._replica
        if replica is None or not _takes_gradients_before(replica):
            return None
        closure = kwargs.get("closure") or next(filter(callable, args[1:]), None)
        if closure is None:
            return None
        closure()
        return args[:1], {name: value for name, value in kwargs.items() if name != "closure"}


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - {*_WRAP_OPTIONS, *_LIGHTNING_OPTIONS})
    if unknown:
        raise ConfigError(
            f"CommlibStrategy: no such option: {', '.join(unknown)}. Expected options of commlib.wrap "
            f"({', '.join(_WRAP_OPTIONS)}), process_group_timeout, or Lightning's {', '.join(_LIGHTNING_OPTIONS)}. "
            "DDP's options for unused parameters and gradient views are not needed"
        )


def _make_alike(module: pl.LightningModule, ignored: tuple[Any, ...]) -> None:
    """Copy rank 0's parameters and buffers to all ranks. If modules differ, do nothing: `wrap` raises the error."""
    names = verify.ignored_names(module, ignored)
    tensors = {
        name: tensor.detach()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name not in names and not is_lazy(tensor)
    }
    own = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if all(other == own for other in everyone):
        for tensor in tensors.values():
            _broadcast(tensor)


def _broadcast(tensor: Tensor) -> None:
    """Copy rank 0's values to all ranks, as bytes, which works for every dtype and layout."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    if data.numel():
        dist.broadcast(data, 0)
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


@contextlib.contextmanager
def _running(replica: Replica, value: bool) -> Generator[None, None, None]:
    """Set whether forwards of the wrapped module are part of an enclosing forward and so announce no backward."""
    before, replica.is_running = replica.is_running, value
    try:
        yield
    finally:
        replica.is_running = before


def _held_by(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _takes_gradients_before(replica: Replica) -> bool:
    runners = (getattr(channel, "runner", None) for channel in replica.engine.channels)
    return any(runner is not None and runner.needs_gradients for runner in runners)
