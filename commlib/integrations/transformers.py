"""`transformers.Trainer` with commlib in place of DDP: training, checkpoints, resuming, logs.

`Trainer` is transformers' own with three more arguments; `TrainerMixin` adds them to any subclass of it.

[Note: overridden methods] Most of `Trainer` needs no change, because accelerate wraps the model with commlib
(`commlib.integrations.accelerate`). The methods that write and read checkpoints are overridden, because replicas may
differ between ranks and algorithms have state. transformers has no public hooks for that. The methods are listed in
`_HOOKS`, and a transformers release without one of them is rejected when a trainer is created.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import ParallelMode

from commlib import algorithms, checkpoint, locks
from commlib.algorithms.base import Algorithm
from commlib.checkpoint import read_rank_file
from commlib.errors import ConfigError
from commlib.integrations.accelerate import use
from commlib.integrations.agreement import on_all_ranks
from commlib.integrations.versions import TESTED, warn_if_untested
from commlib.replica import Replica, find
from commlib.weak import WeakMembers
from commlib.wrap import stats, synchronize, unwrap

warn_if_untested("transformers")

_Base: Any = transformers.Trainer if TYPE_CHECKING else object

#: Private methods of `transformers.Trainer` that are overridden or called, with their parameters.
_HOOKS = {
    "create_accelerator_and_postprocess": ["self"],
    "_update_auto_batch_size": ["self", "batch_size"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_get_output_dir": ["self", "trial"],
}

#: The files of a checkpoint that all ranks share, in the order of writing. transformers checks the weights itself.
_COMMON_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json")


class StatsCallback(transformers.TrainerCallback):
    """Adds the statistics of communication, `commlib.stats`, to each log of training.

    `Trainer` adds this callback automatically, before all other callbacks. With another trainer, whose model you have
    wrapped yourself, put it before the callbacks that use the numbers.

    Args:
        prefix: Prefix of each name.
    """

    def __init__(self, prefix: str = "comm/") -> None:
        self.prefix = prefix

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **_: Any) -> None:
        """Add the numbers to `logs` and to the trainer's history."""
        if logs is None or "loss" not in logs or not isinstance(find(model), Replica):
            return
        found = stats(model).as_dict(self.prefix)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


class _Replicas(transformers.TrainerCallback):
    """Makes the model identical on all ranks when training ends, before it is saved or used."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Record the model as wrapped by a trainer; another trainer may train it next."""
        _trained.add(model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Synchronize the model on all ranks, unless all ranks have loaded the best model."""
        has_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if isinstance(find(model), Replica) and checkpoint.replicas_differ(model) and not has_best:
            synchronize(model)


#: The models that a trainer has wrapped.
_trained: WeakMembers[Any] = WeakMembers(locks.lock("transformers", is_of_process=True))


class TrainerMixin(_Base):
    """Makes a subclass of `transformers.Trainer` communicate with commlib.

    Put it before the trainer: `class MyTrainer(TrainerMixin, Seq2SeqTrainer)`.

    Args:
        args: As in the trainer.
        algorithm: As in `commlib.wrap`.
        wrap_options: Further arguments of `commlib.wrap`, except `optimizer` and `scaler`, which the trainer provides.
        kwargs: As in the trainer.

    Raises:
        ConfigError: The algorithm or an option is unknown; the model is wrapped already; FSDP, DeepSpeed or another
            kind of parallelism that is not data-parallel is on.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reject a class in which the trainer's methods precede these in the MRO."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if transformers.Trainer in order and order.index(TrainerMixin) > order.index(transformers.Trainer):
            raise ConfigError(
                f"class {cls.__name__}: TrainerMixin comes after the trainer, so it would have no effect. Write "
                f"class {cls.__name__}(TrainerMixin, ...)"
            )

    def __init__(
        self,
        *args: Any,
        algorithm: str | Algorithm = "allreduce",
        wrap_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _check_hooks(self)
        algorithms.create(algorithm)  # raises on errors, before anything is built
        if "algorithm" in (wrap_options or {}):
            raise ConfigError("wrap_options: the algorithm is an argument of its own, algorithm=")
        self._commlib_options = {"algorithm": algorithm, **(wrap_options or {})}
        super().__init__(*args, **kwargs)
        callbacks = self.callback_handler.callbacks
        own = [_Replicas(), *(each for each in callbacks if isinstance(each, StatsCallback))]
        own += [] if len(own) > 1 else [StatsCallback()]
        callbacks[:] = [*own, *(each for each in callbacks if each not in own)]  # all others see their changes

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator and make it wrap models with commlib."""
        _check_arguments(self.args)
        _take_over(self.model)
        super().create_accelerator_and_postprocess()
        options = self._commlib_options
        if self.args.ddp_bucket_cap_mb is not None:
            options.setdefault("bucket_cap_mb", self.args.ddp_bucket_cap_mb)
        use(self.accelerator, **options)._commlib.goes_on = True

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Unwrap the model before the retry with a smaller batch: an error in backward may have ended communication."""
        if self._is_wrapped:
            unwrap(self.model)
        super()._update_auto_batch_size(batch_size)

    # --- saving -----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint. Each rank's own part is first: it applies pending results, which changes weights."""
        if self._is_wrapped and not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            if self.args.should_save:
                _make_incomplete(folder)
            self.accelerator.wait_for_everyone()
            checkpoint.write_rank_file(folder, self.model, self.optimizer)
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model: the consensus of the replicas. All ranks call this."""
        if state_dict is None and self._is_wrapped and checkpoint.replicas_differ(self.model):
            state_dict = checkpoint.consensus_state_dict(self.model)
        super()._save(output_dir, state_dict)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights that all ranks share, from a checkpoint that is complete for resuming."""
        load = super()._load_from_checkpoint
        if self.args.parallel_mode == ParallelMode.DISTRIBUTED:
            on_all_ranks(lambda: _check_complete(Path(resume_from_checkpoint)))
            on_all_ranks(lambda: load(resume_from_checkpoint, model))
        else:
            load(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer, then this rank's own part, which must be last."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._is_wrapped:
            folder = checkpoint
            on_all_ranks(lambda: _read_own(folder, self.model, self.optimizer))

    @property
    def _is_wrapped(self) -> bool:
        return isinstance(find(self.model), Replica)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` that communicates with commlib; see `TrainerMixin` for the additional arguments."""


def _check_hooks(trainer: Any) -> None:
    if not isinstance(trainer, transformers.Trainer):
        raise ConfigError(
            f"class {type(trainer).__name__}: TrainerMixin needs a trainer as a further base class. Write "
            f"class {type(trainer).__name__}(TrainerMixin, transformers.Trainer)"
        )
    for name, leading in _HOOKS.items():
        method = getattr(transformers.Trainer, name, None)
        if method is None or list(inspect.signature(method).parameters)[: len(leading)] != leading:
            raise ConfigError(
                f"transformers {transformers.__version__} has no Trainer.{name}({', '.join(leading)}), which commlib "
                "needs to save and resume. Install the version that was tested: "
                f"pip install transformers=={TESTED['transformers']}"
            )


def _check_arguments(args: transformers.TrainingArguments) -> None:
    """Reject arguments that shard the model: commlib replaces DDP."""
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise ConfigError(
                f"{name}={getattr(args, name)!r}: commlib replaces DDP, and cannot be used with {name}, which shards "
                f"the model. Leave {name} out, or train with transformers.Trainer"
            )


def _make_incomplete(folder: Path) -> None:
    """Remove the files of an older checkpoint that would make a partly overwritten one look complete."""
    for path in (folder / _COMMON_FILES[-1], *folder.glob("commlib-rank*.pt")):
        path.unlink(missing_ok=True)


def _check_complete(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"resume_from_checkpoint: there is no folder {folder}")
    missing = [name for name in _COMMON_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} cannot be resumed: it has no {', '.join(missing)}. It was saved with save_only_model, or its "
            "saving was interrupted. Resume from another checkpoint, or load its weights into the model and train "
            "without resuming"
        )


def _read_own(folder: str, model: Any, optimizer: Any) -> None:
    """Load this rank's own part. Any error is raised as a `ConfigError`."""
    try:
        read_rank_file(folder, model, optimizer)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"rank {dist.get_rank()}: its own part of {folder} cannot be read ({type(error).__name__}: {error}). "
            "Resume from another checkpoint"
        ) from error


def _take_over(model: Any) -> None:
    """Unwrap a model that another trainer has wrapped; reject one that the user has wrapped."""
    if isinstance(find(model), Replica):
        if model in _trained:
            unwrap(model)
            return
        raise ConfigError(
            "model: it is wrapped by commlib already. The trainer wraps it itself: pass the bare model, "
            "commlib.unwrap(model), and algorithm= and wrap_options= to the trainer"
        )
