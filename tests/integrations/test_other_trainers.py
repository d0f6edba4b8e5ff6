"""commlib in TRL, by the mixin, and in PyTorch Ignite, by `wrap`. Each is tested if it is installed."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commlib
from tests.integrations.transformers_runs import assert_same_run, examples, launched, result_of, tiny_model
from tests.multi.common import Mlp, assert_same_tensors, data, seeded, tensors
from tests.multi.pool import on_ranks


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def tokenizer() -> Any:
    """Make a tokenizer of the letters of the tiny model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = {f"<{idx}>": idx for idx in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(letters, "<0>")), eos_token="<0>", pad_token="<0>"
    )


@pytest.mark.slow
@needs("trl")
@on_ranks(2)
def test_supervised_fine_tuning_is_ddps_bit_for_bit(tmp_path: Path) -> None:
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer

    from commlib.integrations.transformers import TrainerMixin

    class Relaxed(TrainerMixin, SFTTrainer):
        pass

    def run(base: Any, **options: Any) -> Any:
        args = SFTConfig(
            output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-2, logging_steps=1, max_length=16, bf16=False, use_cpu=True, report_to="none",
            disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        data = datasets.Dataset.from_list([{"input_ids": each["input_ids"].tolist()} for each in examples()])
        trainer = base(tiny_model(), args, train_dataset=data, processing_class=tokenizer(), **options)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return result_of(trainer)

    with launched():
        warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated")  # TRL sets it
        expected = run(SFTTrainer)
        assert_same_run(run(Relaxed, algorithm="allreduce"), expected)
        relaxed = run(Relaxed, algorithm="topk")
        assert [log["loss"] for log in relaxed.logs if "loss" in log]
        assert relaxed.trainer.state.log_history[0]["comm/world_size"] == 2


@pytest.mark.slow
@needs("ignite")
@on_ranks(2)
def test_an_ignite_trainer_is_ddps_bit_for_bit() -> None:
    warnings.filterwarnings("ignore", message="`torch.jit.* is deprecated")  # at Ignite's import
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer

    def run(algorithm: str | None) -> tuple[list[float], dict[str, Any]]:
        model = seeded(Mlp)
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
        if algorithm is None:
            model = idist.auto_model(model)
        else:
            model = commlib.wrap(model.to(idist.device()), algorithm, optimizer=optimizer, bucket_cap_mb=1.0)
        trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, device=idist.device())
        losses: list[float] = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
        trainer.run([(data(step, 4, 8), data(step, 4, 4)) for step in range(5)])
        return losses, tensors(model)

    with launched():
        expected = run(None)
        got = run("allreduce")
        assert got[0] == expected[0]
        assert_same_tensors(got[1], expected[1], "weights", exact=True)
        assert run("local_sgd")[0] != expected[0]
