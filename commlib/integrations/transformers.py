"""`transformers.Trainer` with commlib in DDP's place: training, checkpoints, resuming, logs.

`Trainer` is transformers' own with three more arguments; `TrainerMixin` gives them to any class that derives from it.

[Note: what is overridden] Most of `Trainer` needs no change, as accelerate wraps the model by commlib
(`commlib.integrations.accelerate`). Overridden is where a checkpoint is written and read, since replicas may differ
between ranks and algorithms have state. transformers has no public place for that: the methods are those of `_HOOKS`,
and a release that has lost one is refused when a trainer is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from commlib import algorithms
from commlib.algorithms.base import Algorithm
from commlib.checkpoint import consensus_state_dict, load_rank_state, rank_state, replicas_differ
from commlib.errors import ConfigError
from commlib.integrations import rank_files
from commlib.integrations.accelerate import use
from commlib.integrations.versions import TESTED, warn_if_untested
from commlib.replica import Replica, find
from commlib.wrap import stats

warn_if_untested("transformers")

_Base: Any = transformers.Trainer if TYPE_CHECKING else object

#: The methods of `transformers.Trainer` that are overridden, with their parameters; see [Note: what is overridden].
_HOOKS = {
    "create_accelerator_and_postprocess": ["self"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_save_rng_state": ["self", "output_dir"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
}


#: What of a checkpoint all ranks share, beside the weights, which transformers looks for itself.
_COMMON_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json")


class StatsCallback(transformers.TrainerCallback):
    """Adds what the model has communicated to each log of training: the numbers of `commlib.stats`.

    `Trainer` adds one by itself, before all other callbacks. Where you add it to another trainer, with a model that you
    have wrapped, put it before the callbacks that are to see the numbers.

    Args:
        prefix: Before each name.
    """

    def __init__(self, prefix: str = "comm/") -> None:
        self.prefix = prefix

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **_: Any) -> None:
        """Add the numbers to `logs`, and to the trainer's history."""
        if logs is None or "loss" not in logs or not isinstance(find(model), Replica):
            return
        found = {k: v for k, v in stats(model).as_dict(self.prefix).items() if not isinstance(v, str)}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


class TrainerMixin(_Base):
    """Makes a trainer that derives from `transformers.Trainer` communicate by commlib.

    It comes before the trainer: `class MyTrainer(TrainerMixin, Seq2SeqTrainer)`.

    Args:
        args: As the trainer's.
        algorithm: As in `commlib.wrap`.
        wrap_options: Further arguments of `commlib.wrap`, but for `optimizer` and `scaler`, which the trainer knows.
        kwargs: As the trainer's.

    Raises:
        ConfigError: An unknown algorithm or option; a model that is wrapped already; FSDP, DeepSpeed or another way of
            parallel training that is not data-parallel.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class in which the trainer's methods would come before these."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if transformers.Trainer in order and order.index(TrainerMixin) > order.index(transformers.Trainer):
            raise ConfigError(
                f"class {cls.__name__}: TrainerMixin comes after the trainer, so it would do nothing. Write "
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
        algorithms.create(algorithm)  # raises what is wrong with it, before anything is built
        self._comm = _Communication(algorithm, dict(wrap_options or {}))
        super().__init__(*args, **kwargs)
        if not any(isinstance(callback, StatsCallback) for callback in self.callback_handler.callbacks):
            self.callback_handler.callbacks.insert(0, StatsCallback())

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and have it wrap models by commlib."""
        _check_arguments(self.args)
        _check_model(self.model)
        super().create_accelerator_and_postprocess()
        use(self.accelerator, self._comm.algorithm, **self._comm.options)

    # --- saving -----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint; this rank's own part is taken first, as results that are under way change weights."""
        if not self.args.save_only_model and self._is_wrapped:
            self._comm.rank_state = rank_state(self.model, self._optimizers)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._comm.rank_state = None

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._comm.rank_state is not None:
            rank_files.save(Path(output_dir), self._comm.rank_state, self.state.global_step)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model: the consensus of the replicas, for which every rank comes here."""
        if state_dict is None and self._is_wrapped and replicas_differ(self.model):
            state_dict = consensus_state_dict(self.model)
        super()._save(output_dir, state_dict)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the common weights, of a checkpoint that is found to be complete."""
        rank_files.check(Path(resume_from_checkpoint), _COMMON_FILES, "trainer_state.json")
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._is_wrapped:
            load_rank_state(self.model, rank_files.load(Path(checkpoint)), self._optimizers)

    @property
    def _is_wrapped(self) -> bool:
        return isinstance(find(self.model), Replica)

    @property
    def _optimizers(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` that communicates by commlib; `TrainerMixin` says which arguments are added."""


class _Communication:
    """What a trainer's communication is to be.

    Args:
        algorithm: As in `commlib.wrap`.
        options: Its further arguments.

    Attributes:
        rank_state: While a checkpoint is saved, what this rank writes beside the common part.
    """

    def __init__(self, algorithm: str | Algorithm, options: dict[str, Any]) -> None:
        self.algorithm = algorithm
        self.options = options
        self.rank_state: dict[str, Any] | None = None


def _check_hooks(trainer: Any) -> None:
    if not isinstance(trainer, transformers.Trainer):
        raise ConfigError(
            f"class {type(trainer).__name__}: TrainerMixin needs a trainer beside it. Write "
            f"class {type(trainer).__name__}(TrainerMixin, transformers.Trainer)"
        )
    for name, leading in _HOOKS.items():
        method = getattr(transformers.Trainer, name, None)
        if method is None or list(inspect.signature(method).parameters)[: len(leading)] != leading:
            raise ConfigError(
                f"transformers {transformers.__version__} has no Trainer.{name}({', '.join(leading)}), by which "
                "commlib saves and resumes. Install the version that was tested: "
                f"pip install transformers=={TESTED['transformers']}"
            )


def _check_arguments(args: transformers.TrainingArguments) -> None:
    """Refuse what shards a model: commlib replaces DDP."""
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise ConfigError(
                f"{name}={getattr(args, name)!r}: commlib replaces DDP, and cannot be used with {name}, which shards "
                f"the model. Leave {name} out, or train by transformers.Trainer"
            )


def _check_model(model: Any) -> None:
    if isinstance(find(model), Replica):
        raise ConfigError(
            "model: it is wrapped by commlib already. The trainer wraps it itself: pass the bare model, "
            "commlib.unwrap(model), and algorithm= and wrap_options= to the trainer"
        )
