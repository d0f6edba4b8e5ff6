"""Checkpoints of commlib's `transformers.Trainer`: saving, resuming, rotation, the best model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import commlib
from commlib.errors import ConfigError
from tests.contract.subjects import Subject, of_each_kind
from tests.integrations.transformers_runs import (
    Callback,
    Run,
    assert_alike,
    assert_same_run,
    assert_same_weights,
    launched,
    make,
    result_of,
    tiny_model,
    train,
)
from tests.multi.common import raises_on_every_rank
from tests.multi.forker import RankError
from tests.multi.pool import on_ranks, run_ranks

REPEATABLE = [name for name in commlib.algorithms.list() if not Subject(name).runs_by_clocks]
SAVES = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3}


def made_for(name: str) -> dict[str, Any]:
    """Return the arguments of a trainer with an algorithm and the optimizer that it needs."""
    subject = Subject(name)
    optimizer = subject.optimizer([torch.zeros(1, requires_grad=True)])
    kind = (type(optimizer), {k: v for k, v in optimizer.defaults.items() if k in ("lr", "momentum")})
    return {"algorithm": subject.algorithm(), "optimizer_cls_and_kwargs": kind}


def logs_after(run: Run, step: int) -> dict[int, dict[str, float]]:
    """Return the logs of the later steps; those before come from rank 0's file, and gradients may be the rank's own."""
    return {int(log["step"]): log for log in run.logs if "loss" in log and log["step"] > step}


@pytest.mark.parametrize("name", of_each_kind(REPEATABLE))
@on_ranks(2)
def test_a_resumed_run_is_bit_identical(name: str, tmp_path: Path) -> None:
    with launched():
        whole = train(tmp_path, **made_for(name), **SAVES)
        other = tiny_model(initializer_range=0.5)
        again = train(tmp_path, **made_for(name), **SAVES, model=other, resume=str(tmp_path / "checkpoint-3"))
        assert logs_after(again, 3) == logs_after(whole, 3)
        assert set(logs_after(whole, 3)) == {4, 5, 6, 7}
        assert_same_weights(again.weights, whole.weights)


@pytest.mark.parametrize("name", ["topk", "local_sgd"])
@on_ranks(2)
def test_a_resumed_run_of_many_options_is_bit_identical(name: str, tmp_path: Path) -> None:
    options = {**SAVES, "bf16": True, "gradient_accumulation_steps": 3, "max_grad_norm": 0.1, "max_steps": 12}
    options |= {"activation_checkpointing": True, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    with launched():
        whole = train(tmp_path, **made_for(name), **options)
        for step in (4, 8):  # the end of an epoch, and the middle of one
            again = train(tmp_path, **made_for(name), **options, resume=str(tmp_path / f"checkpoint-{step}"))
            assert logs_after(again, step) == logs_after(whole, step)
            assert_same_weights(again.weights, whole.weights)


class Weights(Callback):
    """Keeps this rank's weights of when training began, and of when checkpoints were saved, by their steps."""

    def __init__(self) -> None:
        self.begun: dict[str, torch.Tensor] = {}
        self.saved: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.begun = copied(model)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.saved[state.global_step] = copied(model)


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@on_ranks(2)
def test_the_saved_model_is_the_mean_of_the_replicas(tmp_path: Path) -> None:
    with launched():
        weights = Weights()
        trainer = train(tmp_path, **made_for("local_sgd"), **SAVES, callbacks=[weights]).trainer
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, weights.saved[3])
        first, second = everyone
        assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])  # in the middle of a period
        mean = {name: (first[name] + second[name]) / 2 for name in first}
        read = type(trainer.model).from_pretrained(tmp_path / "checkpoint-3")
        assert_same_weights(dict(read.state_dict()), mean)
        assert "lm_head.weight" not in load_file(tmp_path / "checkpoint-3/model.safetensors")  # tied
        trainer.save_model(str(tmp_path / "end"))
        dist.barrier()
        read = type(trainer.model).from_pretrained(tmp_path / "end")
        assert_same_weights(dict(read.state_dict()), dict(trainer.model.state_dict()))
        assert_alike(trainer.model)


@on_ranks(2)
def test_saving_on_one_rank_alone_names_the_ranks_that_stay_away(tmp_path: Path) -> None:
    with launched():
        trainer = train(tmp_path, "local_sgd", wrap_options={"timeout": 2}).trainer
        if dist.get_rank() == 0:
            with pytest.raises(commlib.PeerTimeout) as caught:
                trainer.save_model()
            assert caught.value.ranks == {1}
        dist.barrier()


@on_ranks(2)
def test_weights_that_one_host_does_not_see_are_an_error_on_all(tmp_path: Path) -> None:
    of_host = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with launched(), mock.patch.dict(os.environ, of_host):
        own = tmp_path / f"host-{dist.get_rank()}"
        options = {"algorithm": "allreduce", **SAVES, "save_on_each_node": True}  # transformers: not the weights
        train(own, **options)
        with raises_on_every_rank(ValueError, "Can't find a valid checkpoint", "host-1"):
            train(own, **options, resume=str(own / "checkpoint-3"))


@pytest.mark.parametrize("name", [name for name in commlib.algorithms.list() if name not in REPEATABLE])
@pytest.mark.slow
@on_ranks(2)
def test_a_run_that_depends_on_clocks_resumes_from_its_own_weights(name: str, tmp_path: Path) -> None:
    with launched():
        before, after = Weights(), Weights()
        train(tmp_path, **made_for(name), **SAVES, callbacks=[before])
        folder = str(tmp_path / "checkpoint-3")
        again = train(tmp_path, **made_for(name), **SAVES, callbacks=[after], resume=folder)
        assert_same_weights(after.begun, before.saved[3])
        assert set(logs_after(again, 3)) == {4, 5, 6, 7}
        assert_alike(again.trainer.model)


@on_ranks(2)
def test_old_checkpoints_go_with_all_their_files(tmp_path: Path) -> None:
    with launched():
        trainer = train(tmp_path, "topk", **SAVES, save_total_limit=1).trainer
        dist.barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]
        own = sorted(path.name for path in (tmp_path / "checkpoint-7").glob("commlib*"))
        assert own == ["commlib-rank0.pt", "commlib-rank1.pt"]
        trainer.train(resume_from_checkpoint=True)  # the last one, in which all is done


def delete(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("file", "spoil", "words"),
    [
        ("commlib-rank1.pt", delete, "commlib-rank1.pt is missing"),
        ("commlib-rank1.pt", cut, "rank 1: its own part of"),
        ("optimizer.pt", delete, "has no optimizer.pt"),
        ("trainer_state.json", delete, "has no trainer_state.json"),
    ],
    ids=["rank_missing", "rank_cut", "optimizer_missing", "interrupted"],
)
@on_ranks(2)
def test_a_checkpoint_that_is_not_whole_is_refused(file: str, spoil: Any, words: str, tmp_path: Path) -> None:
    with launched():
        train(tmp_path, "topk", **SAVES)
        if dist.get_rank() == 0:
            spoil(tmp_path / "checkpoint-3" / file)
        dist.barrier()
        with raises_on_every_rank(ConfigError, words):
            train(tmp_path, "topk", **SAVES, resume=str(tmp_path / "checkpoint-3"))


@on_ranks(2)
def test_a_checkpoint_that_was_being_overwritten_is_refused(tmp_path: Path) -> None:
    with launched():
        train(tmp_path, "topk", **SAVES)
        trainer = make(tmp_path, "topk", **SAVES)
        with pytest.MonkeyPatch.context() as patch, raises_on_every_rank(OSError, "disk full"):
            patch.setattr(type(trainer), "_save_rng_state", disk_is_full, raising=False)
            trainer.train()
        with raises_on_every_rank(ConfigError, "has no trainer_state.json"):
            train(tmp_path, "topk", **SAVES, resume=str(tmp_path / "checkpoint-3"))


def disk_is_full(trainer: Any, folder: str) -> None:
    raise OSError("disk full")


@on_ranks(2)
def test_checkpoints_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    with launched():
        train(tmp_path / "ddp", **SAVES)
        with raises_on_every_rank(ConfigError, "commlib-rank", "is missing"):
            train(tmp_path, "allreduce", **SAVES, resume=str(tmp_path / "ddp/checkpoint-3"))
        train(tmp_path / "bare", "allreduce", **SAVES, save_only_model=True)
        with raises_on_every_rank(ConfigError, "save_only_model"):
            train(tmp_path, "allreduce", **SAVES, resume=str(tmp_path / "bare/checkpoint-3"))
        with raises_on_every_rank(ConfigError, "there is no folder"):
            train(tmp_path, "allreduce", **SAVES, resume=str(tmp_path / "none"))
        train(tmp_path / "topk", "topk", **SAVES)
        with raises_on_every_rank(ConfigError, "topk", "allreduce"):
            train(tmp_path, "allreduce", **SAVES, resume=str(tmp_path / "topk/checkpoint-3"))


def run_on(folder: Path, algorithm: Any, resume: Any = None) -> Any:
    """Train on the ranks of this job; returns the weights."""
    with launched():
        return train(folder, algorithm, **SAVES, resume=resume).weights


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_as_with_ddp(before: int, after: int, tmp_path: Path) -> None:
    run_ranks(run_on, before, tmp_path / "run", "allreduce")
    resume = str(tmp_path / "run/checkpoint-3")
    got = run_ranks(run_on, after, tmp_path / "commlib", "allreduce", resume)
    expected = run_ranks(run_on, after, tmp_path / "ddp", None, resume)
    for own, of_ddp in zip(got, expected, strict=True):
        assert_same_weights(own, of_ddp)


def test_another_number_of_ranks_is_refused_where_state_is_each_ranks_own(tmp_path: Path) -> None:
    run_ranks(run_on, 2, tmp_path, "topk")
    with pytest.raises(RankError, match=r"ConfigError: .*world_size 2, expected 1"):
        run_ranks(run_on, 1, tmp_path, "topk", str(tmp_path / "checkpoint-3"))


def test_another_number_of_ranks_goes_on_from_the_mean_of_replicas(tmp_path: Path) -> None:
    run_ranks(run_on, 2, tmp_path, "local_sgd")
    run_ranks(resumes_from_the_file, 1, tmp_path / "checkpoint-3")


def resumes_from_the_file(folder: Path) -> None:
    with launched():
        weights = Weights()
        train(folder.parent, "local_sgd", **SAVES, callbacks=[weights], resume=str(folder))
        saved = load_file(folder / "model.safetensors")
        assert_same_weights({name: weights.begun[name] for name in saved}, saved)


@pytest.mark.parametrize("algorithm", ["allreduce", "local_sgd"])
@on_ranks(2)
def test_the_best_model_is_on_all_ranks(algorithm: str, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.5, "max_steps": 20}
    best |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    with launched():
        got = train(tmp_path / "commlib", algorithm, **best, callbacks=[early_stop()], save_total_limit=2)
        state = got.trainer.state
        assert state.global_step < 20  # stopped early
        assert int(state.best_model_checkpoint.rpartition("-")[2]) < state.global_step
        assert_alike(got.trainer.model)
        read = type(got.trainer.model).from_pretrained(state.best_model_checkpoint)
        assert_same_weights(dict(read.state_dict()), got.weights)
        if algorithm == "allreduce":
            expected = train(tmp_path / "ddp", **best, callbacks=[early_stop()], save_total_limit=2)
            assert_same_run(got, expected)


class Falling:
    """A metric of which the first value is the best."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self, _: Any) -> dict[str, int]:
        self.value -= 1
        return {"falling": self.value}


@pytest.mark.parametrize("name", ["diloco", "local_sgd"])
@on_ranks(2)
def test_weights_that_an_algorithm_keeps_begin_anew_at_the_best_model(name: str, tmp_path: Path) -> None:
    sgd = {"algorithm": Subject(name).algorithm(), "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5})}
    sgd |= {"max_steps": 8, "lr_scheduler_type": "constant"}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_falling", "greater_is_better": True}
    best |= {"compute_metrics": Falling()}
    best |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    with launched():
        trainer = train(tmp_path / "best", **sgd, **best).trainer
        found = trainer.state.best_model_checkpoint
        assert found.endswith("-2")
        again = type(trainer.model).from_pretrained(found)
        trainer.args.load_best_model_at_end = False
        torch.manual_seed(7)
        trainer.train()
        fresh = make(tmp_path / "fresh", **sgd, **{**best, "load_best_model_at_end": False}, model=again)
        torch.manual_seed(7)
        fresh.train()
        assert_same_weights(result_of(trainer).weights, result_of(fresh).weights)


def early_stop() -> Any:
    import transformers

    return transformers.EarlyStoppingCallback(early_stopping_patience=2)


def with_adapter() -> Any:
    """Return a model of which only an adapter of low rank is trained."""
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4)
        settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(tiny_model(), settings)


@pytest.mark.parametrize("algorithm", ["allreduce", "local_sgd"])
@on_ranks(2)
def test_adapters_are_trained_saved_and_resumed(algorithm: str, tmp_path: Path) -> None:
    with launched():
        whole = train(tmp_path / "run", algorithm, model=with_adapter(), **SAVES)
        files = {path.name for path in (tmp_path / "run/checkpoint-3").iterdir()}
        assert "adapter_model.safetensors" in files
        assert "model.safetensors" not in files
        resume = str(tmp_path / "run/checkpoint-3")
        again = train(tmp_path / "run", algorithm, model=with_adapter(), **SAVES, resume=resume)
        assert_same_weights(again.weights, whole.weights)
        if algorithm == "allreduce":
            expected = train(tmp_path / "ddp", model=with_adapter(), **SAVES)
            assert_same_run(whole, expected)
