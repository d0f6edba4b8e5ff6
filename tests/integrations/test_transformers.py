"""commlib in `transformers.Trainer`: what it does under DDP, it does the same with commlib, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

import commlib
from tests.integrations.transformers_runs import assert_same_run, launched, padded, train, uneven_examples
from tests.multi.pool import on_ranks


def mean_of_known(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss function of the user's own."""
    import torch

    loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
                                             ignore_index=-100, reduction="sum")  # fmt: skip
    return loss / num_items_in_batch


def share_correct(prediction: Any) -> dict[str, float]:
    """A metric of the user's own."""
    return {"correct": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}


#: Ways to train, by the arguments of the trainer and of `TrainingArguments` that make them.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "max_steps": 5},
    "accumulation_by_rank": {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    "accumulation_synchronised": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
    "epochs_that_end_unevenly": {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2},
    "reentrant_checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "checkpointing": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2},
    "clipped": {"max_grad_norm": 0.05},
    "not_clipped": {"max_grad_norm": 0.0},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "compute_metrics": share_correct, "eval_on_start": True},
    "own_loss": {"compute_loss_func": mean_of_known, "gradient_accumulation_steps": 2},
    "smoothed_labels": {"label_smoothing_factor": 0.1},
    "grouped_by_length": {
        "train_dataset": uneven_examples,
        "data_collator": padded,
        "train_sampling_strategy": "group_by_length",
    },
    "noisy_embeddings": {"neftune_noise_alpha": 5.0},
    "tokens_counted": {"include_num_input_tokens_seen": "all"},
    "fixed_buckets": {"ddp_bucket_cap_mb": 1, "ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False},
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_training_is_ddps_bit_for_bit(way: str, tmp_path: Path) -> None:
    with launched():
        expected = train(tmp_path / "ddp", **WAYS[way])
        got = train(tmp_path / "commlib", "allreduce", **WAYS[way])
        assert isinstance(expected.trainer.model_wrapped, DistributedDataParallel)
        assert commlib.stats(got.trainer.model).algorithm == "allreduce"
        assert_same_run(got, expected)
