"""commlib in accelerate: accumulation, clipping, precision and compilation as with DDP, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.replica import Replica, find
from tests.contract.subjects import Subject, of_each_kind
from tests.integrations.accelerate_common import (
    assert_equal,
    dataset,
    epoch,
    loader,
    mse,
    new_accelerator,
    values,
)
from tests.multi.common import Mlp, assert_replicas_identical, seeded
from tests.multi.pool import on_ranks


def run(algorithm: Any, *, epochs: int = 2, clip: str = "", samples: int = 40, **options: Any) -> tuple[Any, Any]:
    """Train for some epochs with DDP (None) or commlib; returns losses and values."""
    accelerator = new_accelerator(algorithm, use={"bucket_cap_mb": 0.001} if algorithm else None, **options)
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(samples), scheduler)
    assert is_wrapped(model) if algorithm else isinstance(model, DistributedDataParallel)
    before = {
        "": None,
        "norm": lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1),
        "value": lambda: accelerator.clip_grad_value_(model.parameters(), 0.01),
    }[clip]
    losses = [epoch(accelerator, model, optimizer, batches, scheduler, before) for _ in range(epochs)]
    assert_replicas_identical(model)
    return losses, [values(model), torch.tensor(scheduler.get_last_lr())]


def is_wrapped(model: Any) -> bool:
    return isinstance(find(model), Replica)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},  # 5 batches per epoch: the last step is short
        {"gradient_accumulation_steps": 2, "samples": 38},
        {"clip": "norm"},
        {"clip": "value", "gradient_accumulation_steps": 2},
        {"mixed_precision": "bf16"},
        {"mixed_precision": "fp16"},  # on the CPU accelerate trains in float32, without a scaler
        {"split_batches": True, "clip": "norm"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_allreduce_is_ddp_bit_for_bit(options: dict[str, Any]) -> None:
    assert_equal(run("allreduce", **options), run(None, **options))


@on_ranks(1, slow=(3,))
def test_other_numbers_of_ranks() -> None:
    got, expected = run("allreduce", gradient_accumulation_steps=2), run(None, gradient_accumulation_steps=2)
    if dist.get_world_size() == 1:
        assert_equal(got, expected)
    for name, value in expected[1][0].items():
        torch.testing.assert_close(got[1][0][name], value, rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("name", of_each_kind(commlib.algorithms.list()))
def test_every_algorithm_trains_as_by_wrap(name: str) -> None:
    """`prepare` gives the results of `commlib.wrap`, bit for bit unless they depend on clocks."""
    subject = Subject(name)
    options = {"bucket_cap_mb": 0.002, "timeout": 30}
    accelerator = new_accelerator(subject.algorithm(), use=options)
    model, direct = seeded(Mlp), seeded(Mlp)
    optimizer = accelerator.prepare(subject.optimizer(list(model.parameters())))
    model, batches = accelerator.prepare(model, loader())
    for _ in range(2):
        losses = epoch(accelerator, model, optimizer, batches)
    own = subject.optimizer(list(direct.parameters()))
    commlib.wrap(direct, subject.algorithm(), optimizer=own, **options)
    for _ in range(2):
        expected = []
        for inputs, targets in batches:
            expected.append(mse(direct(inputs), targets))
            expected[-1].backward()
            own.step()
            own.zero_grad()
    assert commlib.stats(model).algorithm == commlib.stats(direct).algorithm
    assert all(math.isfinite(loss) for loss in losses)
    if not subject.runs_by_clocks:
        assert_equal(losses, [loss.detach() for loss in expected])
        commlib.synchronize(model)
        commlib.synchronize(direct)
        assert_equal(values(model), values(direct))


@on_ranks(2)
def test_no_sync_and_trigger_sync_in_backward_as_with_ddp() -> None:
    results = []
    for algorithm in ("allreduce", None):
        accelerator = new_accelerator(algorithm)
        model = accelerator.prepare(seeded(Mlp))
        first, second = (dataset(8, seed=2 * step + dist.get_rank()).tensors for step in range(2))
        grads = []
        with accelerator.no_sync(model):
            losses = [mse(model(inputs), targets) for inputs, targets in (first, second)]
            accelerator.backward(losses[0])
        grads.append([p.grad.clone() for p in model.parameters()])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
        grads.append([p.grad.clone() for p in model.parameters()])
        assert_replicas_identical(model)
        results.append(grads)
    assert_equal(*results)


class PretendedGpus:
    """Makes accelerate assume several devices: it refuses uneven inputs on the CPU, but DDP and `Join` accept them."""

    multi_device = True


@on_ranks(2)
def test_join_uneven_inputs_as_with_ddp() -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    results = []
    for algorithm in ("allreduce", None):
        kind = type("Pretended", (PretendedGpus, Accelerator), {})
        config = DataLoaderConfiguration(even_batches=False)
        accelerator = new_accelerator(algorithm, kind if algorithm else None, dataloader_config=config)
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader(20))
        if algorithm is None:
            accelerator.__class__ = kind
        assert len(list(batches)) == 3 - dist.get_rank()
        with accelerator.join_uneven_inputs([model]):
            for inputs, targets in batches:
                accelerator.backward(mse(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        results.append([values(model)] if dist.get_rank() == 0 else [])
    if dist.get_rank() == 0:
        assert_equal(*results)


@on_ranks(2)
def test_gathering_and_loaders_are_accelerates_own() -> None:
    results = []
    for algorithm in ("topk", None):
        accelerator = new_accelerator(algorithm)
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader(22))
        gathered = [accelerator.gather_for_metrics(inputs) for inputs, _ in batches]
        assert sum(map(len, gathered)) == 22
        skipped = [inputs for inputs, _ in accelerator.skip_first_batches(batches, 2)]
        outputs = model(torch.ones(2, 8) * dist.get_rank())
        results.append([gathered, skipped, accelerator.gather(outputs.detach())])
    assert_equal(*results)


@on_ranks(2)
def test_compiled_by_the_dynamo_plugin_as_with_ddp() -> None:
    from accelerate.utils import is_compiled_module

    try:
        results = []
        for algorithm in ("allreduce", None):
            accelerator = new_accelerator(algorithm, dynamo_backend="aot_eager", gradient_accumulation_steps=2)
            model = seeded(Mlp)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
            assert is_compiled_module(model)
            results.append([epoch(accelerator, model, optimizer, batches), values(model)])
            bare = accelerator.unwrap_model(model, keep_torch_compile=False)
            assert type(bare) is Mlp
            assert is_compiled_module(accelerator.unwrap_model(model))
            if algorithm is not None:  # of DDP's, `unwrap_model` has taken the DDP away
                assert accelerator.prepare(model) is model
                accelerator.backward(mse(model(torch.ones(4, 8) * dist.get_rank()), torch.ones(4, 4)))
                assert_replicas_identical(bare)
    finally:
        torch.compiler.reset()
    assert_equal(*results)


@on_ranks(2)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_compiled_by_the_user_before_as_with_ddp(precision: str) -> None:
    try:
        results = []
        for algorithm in ("allreduce", None):
            accelerator = new_accelerator(algorithm, mixed_precision=precision, gradient_accumulation_steps=2)
            own = seeded(Mlp)
            compiled: Any = torch.compile(own, backend="aot_eager")
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            model, optimizer, batches = accelerator.prepare(compiled, optimizer, loader())
            results.append([epoch(accelerator, model, optimizer, batches), values(model)])
            assert_replicas_identical(own)
            if algorithm is not None:
                assert is_wrapped(own)
                assert type(accelerator.unwrap_model(model, keep_torch_compile=False)) is Mlp
    finally:
        torch.compiler.reset()
    assert_equal(*results)


@on_ranks(2)
def test_a_step_that_one_ranks_scaler_skips_counts_on_all() -> None:
    """accelerate has a scaler on GPUs alone; one given to it reaches commlib, so rounds keep in step."""
    accelerator = new_accelerator(commlib.algorithms.LocalSGD(period=2), use={"timeout": 20})
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(32))
    skipped = []
    for step, (inputs, targets) in enumerate(batches):
        loss = mse(model(inputs), targets)
        accelerator.backward(loss * float("inf") if step == 1 and dist.get_rank() == 1 else loss)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        optimizer.zero_grad()
        if step % 2 == 1:
            assert_replicas_identical(model)
    assert skipped == [step == 1 and dist.get_rank() == 1 for step in range(4)]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@on_ranks(2)
def test_a_scaler_as_with_ddp() -> None:
    """Its scale grows until a step overflows and is skipped, the scheduler with it, again and again."""
    results = []
    for algorithm in ("allreduce", None):
        accelerator = new_accelerator(algorithm, gradient_accumulation_steps=2)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(96), scheduler)
        losses, made = [], []
        for _ in range(2):
            for inputs, targets in batches:
                with accelerator.accumulate(model):
                    losses.append(4 * mse(model(inputs), targets))
                    accelerator.backward(losses[-1])
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            made.append(round(math.log(scheduler.get_last_lr()[0] / 0.1, 0.9)) // 2)
        assert 0 < made[-1] < 12, "of the 12 steps some are made and some are skipped"
        results.append(
            [[loss.detach() for loss in losses], values(model), torch.tensor([accelerator.scaler.get_scale(), *made])]
        )
    assert_equal(*results)


@on_ranks(2)
def test_stats_go_to_trackers() -> None:
    from accelerate.tracking import GeneralTracker, on_main_process

    class Memory(GeneralTracker):
        name, requires_logging_directory = "memory", False

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[Any] = []

        @property
        def tracker(self) -> Any:
            return self.rows

        @on_main_process
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        @on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            self.rows.append((step, values))

    tracker = Memory()
    accelerator = new_accelerator("allreduce", log_with=tracker)
    accelerator.init_trackers("test")
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    epoch(accelerator, model, optimizer, batches)
    accelerator.log(commlib.stats(model).as_dict("comm/"), step=5)
    accelerator.end_training()
    if accelerator.is_main_process:
        ((step, row),) = tracker.rows
        assert step == 5
        assert row
        assert all(name.startswith("comm/") for name in row)
        assert any(value > 0 for name, value in row.items() if "bytes" in name)
