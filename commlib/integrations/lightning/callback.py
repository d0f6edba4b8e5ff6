"""A callback that logs statistics of communication."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from commlib.errors import ConfigError
from commlib.replica import Replica, find
from commlib.wrap import stats


class StatsCallback(Callback):
    """Logs `commlib.stats` of the trained model to all loggers of the trainer, every `every_n_steps` optimizer steps.

    Works with `CommlibStrategy`, and with any strategy if the module or one of its submodules was wrapped with
    `commlib.wrap`. If several were, the outermost one is used. The values are rank 0's, because loggers of other ranks
    write nothing.

    Args:
        every_n_steps: Number of optimizer steps (`trainer.global_step`) between entries.
        prefix: Prefix of each name.

    Raises:
        ConfigError: `every_n_steps` is not a positive integer.
    """

    def __init__(self, every_n_steps: int = 50, prefix: str = "comm/") -> None:
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ConfigError(f"StatsCallback: every_n_steps: expected an integer of 1 or more, got {every_n_steps!r}")
        self.every_n_steps, self.prefix = every_n_steps, prefix
        self._logged_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the module is wrapped.

        Raises:
            ConfigError: Neither the module nor a submodule is wrapped.
        """
        self._logged_step = trainer.global_step
        _wrapped_in(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log once every `every_n_steps` optimizer steps."""
        step = trainer.global_step
        if step // self.every_n_steps == self._logged_step // self.every_n_steps:
            return
        self._logged_step = step
        values = {name: float(value) for name, value in stats(_wrapped_in(pl_module)).as_dict(self.prefix).items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)


def _wrapped_in(pl_module: LightningModule) -> Any:
    """Return the module itself or its first submodule that is wrapped."""
    for module in pl_module.modules():
        if isinstance(find(module), Replica):
            return module
    raise ConfigError(
        f"StatsCallback: commlib has wrapped neither {type(pl_module).__name__} nor a submodule of it. Use "
        "Trainer(strategy=CommlibStrategy(...)), or call commlib.wrap before training starts"
    )
