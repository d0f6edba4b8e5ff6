"""commlib in `transformers.Trainer`: the same results as under DDP, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.replica import find
from tests.integrations.transformers_runs import (
    assert_alike,
    assert_same_run,
    assert_same_weights,
    examples,
    launched,
    make,
    padded,
    result_of,
    tiny_model,
    train,
    uneven_examples,
)
from tests.multi.pool import on_ranks
from tests.thin import fast


def mean_of_known(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss function of the user's own."""
    loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
                                             ignore_index=-100, reduction="sum")  # fmt: skip
    return loss / num_items_in_batch


def share_correct(prediction: Any) -> dict[str, float]:
    """A metric of the user's own."""
    return {"correct": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}


class Stream(torch.utils.data.IterableDataset):
    """Examples without a length."""

    def __iter__(self) -> Any:
        return iter(examples())


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
    "saved_when_best": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "best",
        "metric_for_best_model": "loss",
    },
    "stream_of_data": {"train_dataset": Stream, "dataloader_drop_last": True},
    "fixed_buckets": {"ddp_bucket_cap_mb": 1, "ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False},
}


#: The ways in the fast part: those that differ in commlib's behavior.
CHOSEN = ("accumulation", "epochs_that_end_unevenly", "reentrant_checkpointing", "evaluated")


@pytest.mark.parametrize("way", fast(WAYS, *CHOSEN))
@on_ranks(2)
def test_training_is_ddps_bit_for_bit(way: str, tmp_path: Path) -> None:
    with launched():
        expected = train(tmp_path / "ddp", **WAYS[way])
        got = train(tmp_path / "commlib", "allreduce", **WAYS[way])
        assert isinstance(expected.trainer.model_wrapped, DistributedDataParallel)
        assert commlib.stats(got.trainer.model).algorithm == "allreduce"
        assert_same_run(got, expected)


@on_ranks(2)
def test_prediction_and_generation_are_ddps(tmp_path: Path) -> None:
    with launched():
        runs = [train(tmp_path / "ddp"), train(tmp_path / "commlib", "allreduce")]
        data = examples(7, seed=11)
        expected, got = (run.trainer.predict(data) for run in runs)
        assert (got.predictions == expected.predictions).all()
        assert got.metrics["test_loss"] == expected.metrics["test_loss"]
        if dist.get_rank() == 1:  # on one rank: no forward communicates
            prompt = data[0]["input_ids"][None, :4]
            texts = [run.trainer.model.generate(prompt, max_new_tokens=5, do_sample=False) for run in runs]
            assert torch.equal(*texts)
            assert texts[0].shape == (1, 9)


@on_ranks(2)
def test_evaluation_before_training(tmp_path: Path) -> None:
    with launched():
        trainers = [make(tmp_path / "ddp"), make(tmp_path / "commlib", "allreduce")]
        before = [trainer.evaluate()["eval_loss"] for trainer in trainers]
        assert before[0] == before[1]
        assert find(trainers[1].model) is None
        trainers[0] = make(tmp_path / "ddp")  # transformers' own would now train without DDP
        for trainer in trainers:
            torch.manual_seed(7)
            trainer.train()
        assert_same_weights(result_of(trainers[1]).weights, result_of(trainers[0]).weights)


@pytest.mark.parametrize("algorithm", ["allreduce", "topk", "local_sgd"])
@on_ranks(2)
def test_training_goes_on_in_a_second_call(algorithm: str, tmp_path: Path) -> None:
    with launched():
        trainer = make(tmp_path, algorithm)
        trainer.train()
        replica = find(trainer.model)
        assert_alike(trainer.model)
        trainer.train()
        assert find(trainer.model) is replica
        assert_alike(trainer.model)
        if algorithm == "allreduce":
            expected = train(tmp_path).trainer
            expected.train()
            assert_same_weights(result_of(trainer).weights, result_of(expected).weights)


@on_ranks(2)
def test_another_trainer_takes_the_model_over(tmp_path: Path) -> None:
    with launched():
        model = tiny_model()
        train(tmp_path, "local_sgd", model=model)
        got = train(tmp_path, "allreduce", model=model)
        assert commlib.stats(model).algorithm == "allreduce"
        other = tiny_model()
        train(tmp_path, "local_sgd", model=other)
        expected = train(tmp_path, model=commlib.unwrap(other))
        assert_same_weights(got.weights, expected.weights)


@on_ranks(2)
def test_a_model_is_made_anew_for_each_training(tmp_path: Path) -> None:
    with launched():
        expected = train(tmp_path / "ddp", model_init=new_model)
        got = train(tmp_path / "commlib", "allreduce", model_init=new_model)
        assert_same_run(got, expected)
        got.trainer.train()
        assert_same_weights(result_of(got.trainer).weights, expected.weights)


def new_model() -> Any:
    return tiny_model()


class OutOfMemoryOnce:
    """A loss function that fails in the second step of the first try, as a device without memory does."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        self.calls += 1
        loss = mean_of_known(outputs, labels, num_items_in_batch)
        if self.calls == 2:
            loss.register_hook(_out_of_memory)
        return loss


def _out_of_memory(gradient: Any) -> None:
    raise RuntimeError("CUDA out of memory.")


@on_ranks(2)
def test_a_smaller_batch_after_running_out_of_memory(tmp_path: Path) -> None:
    with launched():
        runs = [
            train(tmp_path, algorithm, auto_find_batch_size=True, compute_loss_func=OutOfMemoryOnce())
            for algorithm in (None, "allreduce")
        ]
        assert runs[1].trainer._train_batch_size < 2
        assert_same_weights(runs[1].weights, runs[0].weights)


@on_ranks(2)
def test_the_end_of_the_group_ends_the_training(tmp_path: Path) -> None:
    with launched():
        trainer = train(tmp_path, "topk").trainer
        trainer.accelerator.end_training()
        assert not dist.is_initialized()
