"""Arguments of `use` and `prepare`: accepted objects and orders, and refused ones."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib.errors import ConfigError
from commlib.replica import Replica, find, replica_of
from tests.integrations.accelerate_common import assert_equal, epoch, loader, mse, new_accelerator, values
from tests.multi.common import Mlp, assert_replicas_identical, data, raises_on_every_rank, seeded
from tests.multi.pool import on_ranks, spawn_ranks

ROOT = Path(__file__).parents[2]
ORDERS = ("model-optimizer", "optimizer-model", "model, optimizer", "optimizer, model")


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)


def is_wrapped(model: Any) -> bool:
    return isinstance(find(model), Replica)


def prepared_in(order: str, accelerator: Any, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """Prepare both, in one call or one after the other."""
    given = {"model": model, "optimizer": optimizer}
    if ", " in order:
        found = {name: accelerator.prepare(given[name]) for name in order.split(", ")}
    else:
        found = dict(zip(order.split("-"), accelerator.prepare(*map(given.get, order.split("-"))), strict=True))
    assert found["model"] is model
    return found["model"], found["optimizer"]


@on_ranks(2)
@pytest.mark.parametrize("name", ["allreduce", "topk", "local_sgd"])
def test_model_and_optimizer_are_prepared_in_any_order(name: str) -> None:
    results = []
    for order in ORDERS:
        accelerator = new_accelerator(name, use={"bucket_cap_mb": 1})
        own = seeded(Mlp)
        model, optimizer = prepared_in(order, accelerator, own, raw := sgd(own))
        batches = accelerator.prepare(loader())
        assert replica_of(model).engine.optimizer is raw, order
        results.append([epoch(accelerator, model, optimizer, batches), values(model)])
    for each in results[1:]:
        assert_equal(each, results[0])


@on_ranks(2)
def test_training_before_the_needed_optimizer_is_prepared_is_refused() -> None:
    accelerator = new_accelerator("local_sgd")
    model = accelerator.prepare(seeded(Mlp))
    with torch.no_grad():
        model(data(0, 5, 8))
    with raises_on_every_rank(ConfigError, "local_sgd", "Mlp", "prepare(model, optimizer)"):
        model(data(0, 5, 8))
    accelerator.prepare(sgd(model))
    assert is_wrapped(model)
    accelerator.backward(model(data(0, 5, 8)).sum())
    compiling = new_accelerator("local_sgd", dynamo_backend="eager")
    with raises_on_every_rank(ConfigError, "Prepare both in one call"):
        compiling.prepare(seeded(Mlp))


@on_ranks(2)
def test_ignored_parameters_need_no_optimizer() -> None:
    accelerator = new_accelerator("local_sgd", use={"ignored_parameters": ["first.weight", "first.bias"]})
    model = seeded(Mlp)
    optimizer = torch.optim.SGD([*model.second.parameters(), *model.third.parameters()], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert is_wrapped(model)


@on_ranks(2)
def test_several_models_and_optimizers_as_with_ddp() -> None:
    results = []
    for algorithm in ("allreduce", None):
        accelerator = new_accelerator(algorithm, gradient_accumulation_steps=2)
        first, second = seeded(Mlp), seeded(lambda: nn.Linear(4, 4), 8)
        early, late = sgd(first), torch.optim.Adam(second.parameters())
        first, second, early, late, batches = accelerator.prepare(first, second, early, late, loader())
        losses = []
        for inputs, targets in batches:
            with accelerator.accumulate(first, second):
                losses.append(mse(second(first(inputs)), targets))
                accelerator.backward(losses[-1])
                for optimizer in (early, late):
                    optimizer.step()
                    optimizer.zero_grad()
        results.append([[loss.detach() for loss in losses], values(first), values(second)])
    assert_equal(*results)


@on_ranks(2)
@pytest.mark.parametrize("name", ["allreduce", "local_sgd"])
def test_one_optimizer_of_two_models_and_two_of_one(name: str) -> None:
    accelerator = new_accelerator(name)
    first, second = seeded(Mlp), seeded(lambda: nn.Linear(4, 4), 8)
    joint = sgd(first, second)
    one, other, _ = accelerator.prepare(first, second, joint)
    assert replica_of(one).engine.optimizer is replica_of(other).engine.optimizer is joint
    third = seeded(Mlp)
    bottom, top = sgd(third.first), sgd(third.second, third.third)
    accelerator.prepare(bottom, third)  # the other one comes later
    assert is_wrapped(third) == (name == "allreduce")
    accelerator.prepare(top)
    assert replica_of(third).engine.optimizer.optimizers == (bottom, top)
    for each in (first, second, third):
        each(data(0, 5, 4 if each is second else 8)).sum().backward()
    for optimizer in (joint, bottom, top):
        optimizer.step()
    for each in (first, second, third):
        commlib.synchronize(each)
        each.zero_grad()
        assert_replicas_identical(each)


@on_ranks(2)
def test_models_that_are_not_trained_stay_bare() -> None:
    accelerator = new_accelerator("allreduce")
    evaluated, frozen = seeded(Mlp), seeded(Mlp).requires_grad_(False)
    assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated
    assert accelerator.prepare(frozen) is frozen
    assert not is_wrapped(evaluated)
    assert not is_wrapped(frozen)
    assert accelerator.get_state_dict(evaluated).keys() == evaluated.state_dict().keys()
    accelerator.prepare(evaluated, sgd(evaluated))  # it is to be trained after all
    assert is_wrapped(evaluated)
    assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated
    assert is_wrapped(evaluated)


@on_ranks(2)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_second_training_after_free_memory_as_with_ddp(precision: str) -> None:
    """The user keeps the model, and prepares it again with another optimizer, as a trainer does."""
    results = []
    for algorithm in ("allreduce", None):
        accelerator = new_accelerator(algorithm, mixed_precision=precision)
        own = seeded(Mlp)
        losses = []
        for _ in range(2):
            model, optimizer, batches = accelerator.prepare(own, sgd(own), loader())
            losses.append(epoch(accelerator, model, optimizer, batches))
            accelerator.free_memory()
        results.append([losses, values(own)])
        if algorithm is not None:
            assert replica_of(own).engine.optimizer is optimizer.optimizer
    assert_equal(*results)


@on_ranks(2)
def test_prepared_twice_it_goes_on_as_it_was() -> None:
    accelerator = new_accelerator("topk")
    model = seeded(Mlp)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    epoch(accelerator, model, optimizer, batches)
    engine = replica_of(model).engine
    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    assert replica_of(model).engine is engine
    commlib.unwrap(model)
    accelerator.prepare(model)
    assert replica_of(model).engine.optimizer is optimizer.optimizer


@on_ranks(2)
def test_unwrap_model_gives_the_bare_model() -> None:
    accelerator = new_accelerator("allreduce", mixed_precision="bf16")
    own = seeded(Mlp)
    names = list(own.state_dict())
    model, _ = accelerator.prepare(own, sgd(own))
    bare = accelerator.unwrap_model(model)
    assert type(bare) is Mlp
    assert not is_wrapped(bare)
    assert list(bare.state_dict()) == list(accelerator.get_state_dict(model)) == names
    assert all(one is other for one, other in zip(bare.parameters(), model.parameters(), strict=True))
    inputs = data(0, 5, 8)
    exact = seeded(Mlp)(inputs)
    assert not torch.equal(bare(inputs), exact)  # in bfloat16
    assert accelerator.unwrap_model(seeded(Mlp)).__class__ is Mlp
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert type(plain) is Mlp
    assert torch.equal(plain(inputs), exact)
    assert find(copy.deepcopy(plain)) is None
    accelerator.backward(mse(model(inputs), torch.zeros(5, 4)))
    assert_replicas_identical(model)


@on_ranks(2)
def test_the_accelerators_own_class_is_kept() -> None:
    from accelerate import Accelerator

    class Own(Accelerator):
        def prepare(self, *args: Any, **kwargs: Any) -> Any:
            self.seen = len(args)
            return super().prepare(*args, **kwargs)

    accelerator = new_accelerator("allreduce", Own)
    model = seeded(Mlp)
    model, _ = accelerator.prepare(model, sgd(model))
    assert isinstance(accelerator, Own)
    assert type(accelerator).__name__ == "Own"
    assert accelerator.seen == 2
    assert is_wrapped(model)


@on_ranks(2)
def test_an_accelerator_is_pickled_with_its_algorithm() -> None:
    accelerator = new_accelerator("topk", use={"bucket_cap_mb": 1.0}, gradient_accumulation_steps=3)
    model = seeded(Mlp)
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.own = accelerator  # a cycle
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        copied = pickle.loads(pickle.dumps(accelerator, protocol))
        assert type(copied).__bases__ == type(accelerator).__bases__
        assert copied.own is copied
        assert copied.gradient_accumulation_steps == 3
        other = copied.prepare(seeded(Mlp))
        assert (commlib.stats(other).algorithm, commlib.stats(other).world_size) == ("topk", 2)
    epoch(accelerator, model, optimizer, accelerator.prepare(loader()))
    assert commlib.stats(model).rounds


@on_ranks(2)
def test_wrong_uses_are_refused() -> None:
    from accelerate import DistributedDataParallelKwargs

    import commlib.integrations.accelerate as integration

    with raises_on_every_rank(ConfigError, "not registered", "topk"):
        new_accelerator("topq")
    with raises_on_every_rank(ConfigError, "expected an accelerate.Accelerator", "Linear"):
        integration.use(nn.Linear(2, 2), "topk")
    with raises_on_every_rank(ConfigError, "optimizer=", "prepare"):
        new_accelerator("topk", use={"optimizer": None})
    with raises_on_every_rank(ConfigError, "unknown options ['ratio']", "TopK(ratio=0.01)"):
        new_accelerator("topk", use={"ratio": 0.1})
    with raises_on_every_rank(ConfigError, "'topk' already"):
        integration.use(new_accelerator("topk"), "allreduce")
    handler = DistributedDataParallelKwargs(comm_hook="fp16")
    with raises_on_every_rank(ConfigError, "communication hook", "fp16"):
        new_accelerator("topk", kwargs_handlers=[handler])
    odd = new_accelerator()
    del odd._models
    with raises_on_every_rank(ConfigError, "has no list _models", "pip install 'accelerate=="):
        integration.use(odd, "topk")
    late = new_accelerator()
    late.prepare(seeded(Mlp))
    with raises_on_every_rank(ConfigError, "prepared already"):
        integration.use(late, "topk")
    model = commlib.wrap(seeded(Mlp))
    with raises_on_every_rank(ConfigError, "wrapped by commlib already", "unwrap"):
        new_accelerator("topk").prepare(model)
    with raises_on_every_rank(ConfigError, "commlib.integrations.accelerate.use"):
        new_accelerator().prepare(model)


@on_ranks(2)
def test_ddps_broadcast_buffers_is_heeded() -> None:
    from accelerate import DistributedDataParallelKwargs

    for given, expected in (({}, False), ({"broadcast_buffers": True}, True)):
        handler = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
        accelerator = new_accelerator("allreduce", use=given, kwargs_handlers=[handler])
        assert replica_of(accelerator.prepare(seeded(Mlp))).copies_buffers is expected


@on_ranks(2)
@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_what_shards_models_is_refused(kind: str) -> None:
    """These need devices or libraries that are not here, so the accelerator only says that it is set up for them."""
    from accelerate.utils import DistributedType

    import commlib.integrations.accelerate as integration

    accelerator = new_accelerator()
    accelerator.state.distributed_type = DistributedType[kind]
    with raises_on_every_rank(ConfigError, "commlib replaces DDP", kind.split("_")[0]):
        integration.use(accelerator, "topk")


@on_ranks(2)
def test_other_parallelism_and_regional_compilation_are_refused() -> None:
    from accelerate import ParallelismConfig
    from accelerate.utils import TorchDynamoPlugin

    import commlib.integrations.accelerate as integration

    with raises_on_every_rank(ConfigError, "parallelism_config", "dp_replicate_size"):
        accelerator = new_accelerator()  # which itself refuses it on the CPU
        accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
        integration.use(accelerator, "topk")
    regional = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    with raises_on_every_rank(ConfigError, "regional compilation"):
        new_accelerator("topk", dynamo_plugin=regional)


@on_ranks(2)
def test_without_a_process_group_prepare_says_so() -> None:
    accelerator = new_accelerator("allreduce")
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(ConfigError, match="process group"):
        accelerator.prepare(seeded(Mlp))


def alone(folder: str) -> None:
    """Train in a process without any group, as a script does that is not launched by a launcher."""
    from accelerate import Accelerator

    import commlib.integrations.accelerate as integration

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    with pytest.raises(ConfigError, match="not registered"):
        integration.use(Accelerator(cpu=True), "topq")
    accelerator = integration.use(Accelerator(cpu=True, gradient_accumulation_steps=2), "local_sgd")
    model = nn.Linear(8, 4)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    assert type(model) is nn.Linear
    epoch(accelerator, model, optimizer, batches)
    for each in (model, torch.compile(model, backend="eager")):
        figures = commlib.stats(each)
        assert (figures.algorithm, figures.world_size, figures.rounds, figures.buckets) == ("local_sgd", 1, 0, ())
        assert figures.as_dict("comm/")["comm/wire_bytes"] == 0
        commlib.synchronize(each)
    for bare in (nn.Linear(8, 4), accelerator.prepare_model(nn.Linear(8, 4), evaluation_mode=True)):
        with pytest.raises(ConfigError, match="not wrapped"):
            commlib.stats(bare)
    accelerator.save_state(folder)
    saved = values(model)
    epoch(accelerator, model, optimizer, batches)
    accelerator.load_state(folder)
    assert_equal(values(model), saved)
    assert accelerator.unwrap_model(model) is model
    assert not [name for name in os.listdir(folder) if "commlib" in name]
    print("went well")


def test_one_process_without_a_group_trains_as_with_accelerate_alone(tmp_path: Any) -> None:
    (rank,) = spawn_ranks(alone, 1, str(tmp_path), timeout=60)
    assert rank.returncode == 0, rank.output
    assert "went well" in rank.output


def test_processes_that_accelerate_does_not_see_are_refused(tmp_path: Path) -> None:
    """Without accelerators and `cpu=True`, accelerate uses one process in each that torchrun starts."""
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "from commlib.integrations import accelerate\n"
        "accelerate.use(Accelerator())\n"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    env.pop("ACCELERATE_USE_CPU", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "ConfigError: use: WORLD_SIZE is 2, but accelerate uses one process" in done.stderr
    assert "pass Accelerator(cpu=True) or set ACCELERATE_USE_CPU=true" in done.stderr
