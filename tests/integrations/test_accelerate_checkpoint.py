"""Checkpoints of accelerate with commlib: resumed bit for bit, complete or refused, with consensus weights."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import commlib
from commlib import formats
from commlib.errors import ConfigError
from tests.contract.subjects import Subject, gathered, of_each_kind
from tests.integrations.accelerate_common import (
    assert_equal,
    epoch,
    loader,
    new_accelerator,
    shared_folder,
    values,
)
from tests.multi.common import Cnn, Mlp, raises_on_every_rank, seeded
from tests.multi.pool import on_ranks, run_ranks

ALGORITHMS = commlib.algorithms.list()
BUCKETS = {"bucket_cap_mb": 0.002, "timeout": 30}


class Dropping(Mlp):
    """An `Mlp` that drops inputs, so that a run depends on random numbers, with a buffer of its own on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += inputs.sum().detach()
        return super().forward(nn.functional.dropout(inputs, 0.2, self.training))


class Run:
    """One training: an accelerator, and the objects that it has prepared."""

    def __init__(self, algorithm: Any, seed: int = 7, subject: Subject | None = None, **options: Any) -> None:
        self.accelerator = new_accelerator(algorithm, use=BUCKETS if algorithm is not None else None, **options)
        model = seeded(Dropping, seed)
        optimizer = (subject or Subject("allreduce")).optimizer(list(model.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        prepared = self.accelerator.prepare(model, optimizer, loader(96), scheduler)
        self.model, self.optimizer, self.batches, self.scheduler = prepared
        torch.manual_seed(100 * seed + dist.get_rank())

    def train(self, first: int, last: int) -> list[torch.Tensor]:
        """Train on some batches of the 12, and return the losses."""
        batches = self.accelerator.skip_first_batches(self.batches, first)
        some = (batch for batch, _ in zip(batches, range(first, last), strict=False))
        return epoch(self.accelerator, self.model, self.optimizer, some, self.scheduler)

    def state(self) -> list[Any]:
        return [values(self.model), torch.tensor(self.scheduler.get_last_lr()), torch.get_rng_state()]


@on_ranks(2)
@pytest.mark.parametrize("name", of_each_kind(ALGORITHMS))
def test_a_saved_run_resumes_bit_for_bit(name: str) -> None:
    subject = Subject(name)
    for steps in (3, 6):
        whole = Run(subject.algorithm(), subject=subject)
        whole.train(0, steps)
        with shared_folder() as folder:
            whole.accelerator.save_state(str(folder))
            saved = whole.state()
            resumed = Run(subject.algorithm(), seed=99, subject=subject)
            resumed.accelerator.load_state(str(folder))
        if not subject.runs_by_clocks:  # else peers change the weights meanwhile
            assert_equal(resumed.state(), saved)
        # One after the other: rounds of one run must not wait for those of the other.
        rng = torch.get_rng_state()
        losses = resumed.train(steps, steps + 5)
        torch.set_rng_state(rng)
        expected = whole.train(steps, steps + 5)
        if subject.runs_by_clocks:
            assert all(torch.isfinite(loss) for loss in losses)
            continue
        assert_equal(losses, expected)
        assert_equal(resumed.state(), whole.state())


@on_ranks(2)
def test_accumulation_resumes_in_the_middle_of_a_step() -> None:
    """accelerate saves which micro-batch it is at, and no gradients: a run saved there loses them, with DDP too."""
    results = []
    for algorithm in ("allreduce", None):
        run = Run(algorithm, gradient_accumulation_steps=2)
        run.train(0, 3)
        with shared_folder() as folder:
            run.accelerator.save_state(str(folder))
            resumed = Run(algorithm, seed=99, gradient_accumulation_steps=2)
            resumed.accelerator.load_state(str(folder))
        assert resumed.accelerator.step == 3
        results.append([resumed.train(3, 8), values(resumed.model)])
    assert_equal(results[0][0], results[1][0])
    del results[0][1]["seen"], results[1][1]["seen"]  # of rank 0 after a backward, with DDP before a forward
    assert_equal(*results)


@on_ranks(2)
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_what_is_saved_for_others_is_the_consensus(safe: bool) -> None:
    run = Run(commlib.algorithms.LocalSGD(period=4))
    run.train(0, 3)
    before = values(run.model)
    states = gathered({name: tensor.clone() for name, tensor in before.items()})
    assert not torch.equal(states[0]["first.weight"], states[1]["first.weight"])
    mean = {name: (states[0][name] + states[1][name]) / 2 for name in before} | {"seen": states[0]["seen"]}
    assert_equal(dict(run.accelerator.get_state_dict(run.model)), mean)
    with shared_folder() as folder:
        run.accelerator.save_model(run.model, str(folder / "model"), safe_serialization=safe)
        run.accelerator.save_state(str(folder / "state"), safe_serialization=safe)
        dist.barrier()
        for name in ("model", "state"):
            path = folder / name / ("model.safetensors" if safe else "pytorch_model.bin")
            assert_equal(dict(load_file(path) if safe else torch.load(path)), mean)
        resumed = Run(commlib.algorithms.LocalSGD(period=4), seed=99)
        resumed.accelerator.load_state(str(folder / "state"))
    assert_equal(values(run.model), before)
    assert_equal(values(resumed.model), before)


@on_ranks(2)
def test_where_replicas_are_alike_one_rank_may_ask_for_the_weights() -> None:
    run = Run("topk")
    run.train(0, 2)
    with shared_folder() as folder:
        if dist.get_rank() == 1:
            state = run.accelerator.get_state_dict(run.model)
            assert_equal(dict(state), dict(run.model.state_dict()))
        run.accelerator.save_model(run.model, str(folder))
        dist.barrier()
        assert load_file(folder / "model.safetensors").keys() == run.model.state_dict().keys()


@on_ranks(2)
def test_consensus_of_a_compiled_model_and_its_checkpoint() -> None:
    try:
        run = Run(commlib.algorithms.LocalSGD(period=4), dynamo_backend="eager")
        run.train(0, 3)
        expected = commlib.checkpoint.consensus_state_dict(run.accelerator._models[0])
        for unwrap in (True, False):
            state = run.accelerator.get_state_dict(run.model, unwrap=unwrap)
            assert_equal({name.removeprefix("_orig_mod."): value for name, value in state.items()}, dict(expected))
        with shared_folder() as folder:
            run.accelerator.save_state(str(folder))
            resumed = Run(commlib.algorithms.LocalSGD(period=4), seed=99, dynamo_backend="eager")
            resumed.accelerator.load_state(str(folder))
        assert_equal(values(resumed.model), values(run.model))
    finally:
        torch.compiler.reset()


@on_ranks(2)
def test_automatic_names_and_the_limit_of_checkpoints() -> None:
    from accelerate.utils import ProjectConfiguration

    with shared_folder() as folder:
        config = {"automatic_checkpoint_naming": True, "total_limit": 2}
        run = Run("topk", project_config=ProjectConfiguration(str(folder), **config))
        for step in range(3):
            run.train(step, step + 1)
            run.accelerator.save_state()
            dist.barrier()
        kept = folder / "checkpoints"
        assert sorted(path.name for path in kept.iterdir()) == ["checkpoint_1", "checkpoint_2"]
        assert sorted(path.name for path in (kept / "checkpoint_2").glob("commlib*")) == [
            *("commlib.json", "commlib_0.pt", "commlib_1.pt"),
        ]
        resumed = Run("topk", seed=99, project_config=ProjectConfiguration(str(folder), **config))
        resumed.accelerator.load_state()
        assert_equal(resumed.state(), run.state())


@on_ranks(2)
def test_machines_without_a_common_folder() -> None:
    from accelerate.utils import ProjectConfiguration

    options = {"own_node": True, "project_config": ProjectConfiguration(save_on_each_node=True)}
    run = Run(commlib.algorithms.LocalSGD(period=4), **options)
    run.train(0, 3)
    with tempfile.TemporaryDirectory() as own:
        run.accelerator.save_state(own)
        assert sorted(path.name for path in Path(own).glob("commlib*")) == [
            *("commlib.json", f"commlib_{dist.get_rank()}.pt"),
        ]
        resumed = Run(commlib.algorithms.LocalSGD(period=4), seed=99, **options)
        resumed.accelerator.load_state(own)
    assert_equal(resumed.state(), run.state())


@on_ranks(2)
def test_several_models_of_which_one_is_not_trained() -> None:
    def run(seed: int) -> Any:
        accelerator = new_accelerator(commlib.algorithms.LocalSGD(period=4))
        models = [seeded(Mlp, seed), seeded(Mlp, seed + 1), seeded(Cnn, seed + 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models[::2]]
        accelerator.prepare_model(models[1], evaluation_mode=True)
        return (
            accelerator,
            models,
            [accelerator.prepare(*pair)[1] for pair in zip(models[::2], optimizers, strict=True)],
        )

    def step(models: Any, optimizers: Any) -> None:
        inputs = torch.full((4, 8), 1.0 + dist.get_rank())
        (models[0](inputs) + models[1](inputs)).square().mean().backward()
        models[2](torch.full((4, 2, 6, 6), 1.0 + dist.get_rank())).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    accelerator, models, optimizers = run(7)
    for _ in range(3):
        step(models, optimizers)
    with shared_folder() as folder:
        accelerator.save_state(str(folder))
        resumed, others, their_optimizers = run(99)
        resumed.load_state(str(folder))
    for _ in range(3):
        step(models, optimizers)
    for _ in range(3):
        step(others, their_optimizers)
    for one, other in zip(models, others, strict=True):
        assert_equal(values(one), values(other))


class Failing:
    """Registered for checkpointing; saving it fails on one rank or on all, as a full disk does."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise OSError("disk full")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@on_ranks(2)
def test_an_interrupted_save_is_not_loaded() -> None:
    with shared_folder() as folder:
        run = Run("topk")
        failing = Failing()
        run.accelerator.register_for_checkpointing(failing)
        run.accelerator.save_state(str(folder / "one"))
        saved = run.state()
        run.train(0, 2)
        failing.fails = True
        for name in ("two", "three"):
            if name == "three":  # over one that was whole
                failing.fails = False
                run.accelerator.save_state(str(folder / name))
                failing.fails = True
            with pytest.raises(OSError, match="disk full"):
                run.accelerator.save_state(str(folder / name))
            dist.barrier()
            with raises_on_every_rank(ConfigError, "incomplete", name, "earlier checkpoint"):
                run.accelerator.load_state(str(folder / name))
        run.accelerator.load_state(str(folder / "one"))
        assert_equal(run.state(), saved)


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_save_tells_the_others(rank: int) -> None:
    with shared_folder() as folder:
        run = Run("topk")
        failing = Failing()
        run.accelerator.register_for_checkpointing(failing)
        failing.fails = dist.get_rank() == rank
        with raises_on_every_rank(Exception, "disk full"):
            run.accelerator.save_state(str(folder))
        failing.fails = False
        run.accelerator.save_state(str(folder))
        run.accelerator.load_state(str(folder))


@on_ranks(2)
def test_a_rank_that_cannot_write_its_file_is_an_error_on_all_ranks() -> None:
    with shared_folder() as folder:
        run = Run("topk")
        if dist.get_rank() == 0:
            (folder / "state" / "commlib_1.pt.partial").mkdir(parents=True)
        dist.barrier()
        with raises_on_every_rank(Exception, "commlib_1.pt"):
            run.accelerator.save_state(str(folder / "state"))
        with raises_on_every_rank(ConfigError, "incomplete"):
            run.accelerator.load_state(str(folder / "state"))


@on_ranks(2)
def test_missing_files_other_algorithms_and_other_models_are_refused() -> None:
    with shared_folder() as folder:
        run = Run("topk")
        run.train(0, 2)
        run.accelerator.save_state(str(folder))
        before = values(run.model)
        with raises_on_every_rank(ConfigError, "saved with the algorithm 'topk'", "'randomk'", "commlib.json"):
            Run("randomk").accelerator.load_state(str(folder))
        more = Run("topk")
        more.accelerator.prepare_model(seeded(Mlp), evaluation_mode=True)
        with raises_on_every_rank(ConfigError, "1 models, but 2 were prepared"):
            more.accelerator.load_state(str(folder))
        dist.barrier()
        if dist.get_rank() == 0:
            os.remove(folder / "commlib_1.pt")
        dist.barrier()
        fresh = Run("topk", seed=99)
        untouched = values(fresh.model)
        with raises_on_every_rank(ConfigError, "commlib_1.pt is missing", "commlib.json"):
            fresh.accelerator.load_state(str(folder))
        assert_equal(values(fresh.model), untouched)  # nothing was loaded
        dist.barrier()
        if dist.get_rank() == 0:
            summary = json.loads((folder / "commlib.json").read_text())
            assert summary == {**formats.stamp(1), "complete": True, "world_size": 2, "algorithm": "topk"}
            os.remove(folder / "commlib.json")
        dist.barrier()
        fresh.accelerator.load_state(str(folder))  # as the message says: the weights alone
        assert_equal(values(fresh.model), before)


@on_ranks(2)
@pytest.mark.parametrize("name", ["allreduce", "diloco"])
def test_a_checkpoint_of_accelerate_alone_begins_communication_anew(name: str) -> None:
    with shared_folder() as folder:
        ddp = Run(None)
        ddp.train(0, 3)
        ddp.accelerator.save_state(str(folder))
        dist.barrier()
        run = Run(Subject(name).algorithm(), seed=99)
        run.accelerator.load_state(str(folder))
    assert_equal(values(run.model)["first.weight"], values(ddp.model)["first.weight"])
    run.train(3, 9)
    commlib.synchronize(run.model)
    assert all(torch.isfinite(value).all() for value in values(run.model).values())


def save_run(name: str, folder: Path) -> dict[str, torch.Tensor]:
    run = Run(Subject(name).algorithm(), subject=Subject(name))
    run.train(0, 3)
    run.accelerator.save_state(str(folder))
    return load_file(folder / "model.safetensors") if dist.get_rank() == 0 else {}


def load_run(name: str, folder: Path, weights: dict[str, torch.Tensor]) -> str:
    run = Run(Subject(name).algorithm(), 99, Subject(name))
    try:
        run.accelerator.load_state(str(folder))
    except ConfigError as error:
        return str(error)
    assert_equal(values(run.model), weights)
    dist.barrier()  # a rank that trains on may change another one's weights
    assert all(torch.isfinite(loss) for loss in run.train(3, 6))
    return ""


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), pytest.param(2, 3, marks=pytest.mark.slow), (1, 2)])
@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "hogwild", "topk"])
def test_another_world_size_goes_on_from_the_weights_or_says_why_not(
    name: str, saved: int, loaded: int, tmp_path: Path
) -> None:
    weights = run_ranks(save_run, saved, name, tmp_path)[0]
    errors = run_ranks(load_run, loaded, name, tmp_path, weights)
    if commlib.algorithms.create(name).portable:
        assert errors == [""] * loaded
    else:
        assert all(f"saved by {saved} rank" in error for error in errors), errors
