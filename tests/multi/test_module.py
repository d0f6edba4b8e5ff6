"""The wrapped model is still the user's model: class, names, state_dict, `.module`, copies, unwrap, several at once."""

from __future__ import annotations

import copy
import io
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.multi.common import (
    SMALL_BUCKET_MB,
    Cnn,
    Mlp,
    assert_close,
    assert_replicas_identical,
    assert_same_tensors,
    cnn_loss,
    data,
    ddp,
    gradients,
    is_exact,
    mean_gradients,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    snapshot,
    tensors,
    train,
    wrap,
)
from tests.multi.pool import on_ranks
from tests.waiting import eventually

SMALL = {"bucket_cap_mb": SMALL_BUCKET_MB}


def assert_synchronises(model: nn.Module, step: int = 5) -> None:
    """Check that a backward of this MLP yields the mean over the ranks."""
    base = snapshot(model, Mlp)
    model.zero_grad()
    mlp_loss(model, step).backward()
    expected = mean_gradients(
        lambda: copy.deepcopy(base), lambda m, rank: m(data(step, 5, 8, rank=rank)).square().mean()
    )
    assert_same_tensors(gradients(model), expected, "gradient", exact=is_exact())


def assert_local(model: nn.Module, step: int = 5) -> None:
    """Check that a backward of this MLP yields this rank's own gradients."""
    bare = Mlp()
    bare.load_state_dict(model.state_dict())
    for candidate in (model, bare):
        candidate.zero_grad()
        mlp_loss(candidate, step).backward()
    assert_same_tensors(gradients(model), gradients(bare), "local gradient", exact=True)


# --- Class and names -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_same_object_comes_back_with_its_class_and_names() -> None:
    original = Mlp()
    names = [name for name, _ in original.named_parameters()]
    modules = [name for name, _ in original.named_modules()]
    model = wrap(original)
    assert model is original
    assert isinstance(model, Mlp)
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_modules()] == modules
    assert "Linear" in repr(model)


@on_ranks(2)
def test_state_dict_is_that_of_the_bare_model() -> None:
    bare, model = seeded(Cnn), wrap(seeded(Cnn))
    oracle = ddp(seeded(Cnn))
    assert list(model.state_dict()) == list(bare.state_dict())
    train(model, cnn_loss, 3)
    train(oracle, cnn_loss, 3)
    expected = oracle.module.state_dict()
    for name, _ in model.named_buffers():  # DDP copies them at the next forward, commlib has done so already
        dist.broadcast(expected[name], 0)
    for name, tensor in model.state_dict().items():
        assert_close(tensor, expected[name], name, exact=True)
    bare.load_state_dict(model.state_dict())
    model.load_state_dict(bare.state_dict())
    train(model, cnn_loss, 1)
    assert_replicas_identical(model, buffers=False)


@on_ranks(2)
def test_load_state_dict_with_assign_is_refused_at_the_next_forward() -> None:
    """`assign=True` replaces the parameters; training on with the old ones would be silent and wrong."""
    import commlib.errors

    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 2)
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    with raises_on_every_rank(commlib.errors.ConfigError, "first.weight"):
        mlp_loss(model, 0)


@on_ranks(2)
def test_module_is_a_bare_object_that_shares_everything() -> None:
    model = wrap(seeded(Mlp))
    bare = model.module
    assert type(bare) is Mlp
    assert bare is not model
    assert bare.first is model.first
    assert bare.state_dict().keys() == model.state_dict().keys()
    bare.note = "shared"
    assert model.note == "shared"
    while hasattr(bare, "module"):  # the recursive unwrapping idiom ends
        bare = bare.module
    assert_synchronises(model)


@on_ranks(2)
def test_a_backward_of_the_bare_module_stays_local() -> None:
    """As with DDP, a backward of `.module` is not synchronised, before and after synchronised steps."""
    model, oracle = wrap(seeded(Mlp)), ddp(seeded(Mlp))
    for step in range(3):
        for candidate in (model, oracle):
            candidate.zero_grad()
            mlp_loss(candidate.module, step).backward()
        assert_same_tensors(gradients(model), gradients(oracle), "local gradient", exact=True)
        assert_local(model.module)
        for candidate in (model, oracle):
            candidate.zero_grad()
            mlp_loss(candidate, step).backward()
        assert_same_tensors(gradients(model), gradients(oracle), "gradient", exact=True)


@on_ranks(2)
def test_a_submodule_named_module_wins() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.module(inputs)

    model = wrap(seeded(Holder))
    assert type(model.module) is Mlp
    mlp_loss(model, 0).backward()
    assert_replicas_identical(model)


@on_ranks(2)
def test_a_forward_patched_on_the_instance_synchronises() -> None:
    """Tools such as Accelerate replace `model.forward` on the instance, before or after wrapping."""
    before, after = seeded(Mlp), seeded(Mlp)
    before.forward = torch.autocast("cpu", enabled=False)(before.forward)  # type: ignore[method-assign]
    wrap(before)
    wrap(after)
    after.forward = torch.autocast("cpu", enabled=False)(after.forward)  # type: ignore[method-assign]
    for model in (before, after):
        for step in range(3):
            model.zero_grad()
            mlp_loss(model, step).backward()
            assert_replicas_identical(model)


@on_ranks(2)
def test_a_direct_call_of_forward_synchronises() -> None:
    model = wrap(seeded(Mlp))
    for step in range(3):
        model.zero_grad()
        model.forward(data(step, 5, 8)).square().mean().backward()
        assert_replicas_identical(model)


@on_ranks(2)
def test_user_hooks_on_the_module_still_run() -> None:
    calls: list[str] = []
    original = seeded(Mlp)
    original.register_forward_hook(lambda *_: calls.append("forward"))
    original.register_full_backward_hook(lambda *_: calls.append("backward"))
    model = wrap(original)
    model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    for step in range(2):
        model.zero_grad()
        model(data(step, 5, 8).requires_grad_()).square().mean().backward()
        assert_replicas_identical(model)
    assert calls == ["pre", "forward", "backward"] * 2


@on_ranks(2)
def test_training_flag_moves_and_apply_pass_through() -> None:
    model = wrap(seeded(Cnn))
    assert model.eval() is model
    assert not model.norm.training
    assert model.train() is model
    assert model.apply(lambda module: None) is model
    assert model.to("cpu") is model
    assert model.requires_grad_(True) is model
    train(model, cnn_loss, 1)
    assert_replicas_identical(model, buffers=False)


# --- Copies ----------------------------------------------------------------------------------------------------------


def copies(model: nn.Module) -> dict[str, nn.Module]:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(stream, weights_only=False),
    }


@on_ranks(2)
def test_copies_are_wrapped_again_and_independent() -> None:
    import commlib

    model = wrap(seeded(Mlp), **SMALL)
    train(model, mlp_loss, 2)
    model.zero_grad()
    before = tensors(model)
    for kind, twin in copies(model).items():
        assert isinstance(twin, Mlp), kind
        assert commlib.stats(twin).world_size == 2, kind
        assert_same_tensors(tensors(twin), before, f"{kind}: value", exact=True)
        assert_synchronises(twin)
        train(twin, mlp_loss, 2)
        assert_replicas_identical(twin)
        assert_same_tensors(tensors(model), before, f"{kind}: value of the original", exact=True)
    assert_synchronises(model)


@on_ranks(2)
def test_a_copy_of_the_bare_module_is_bare() -> None:
    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 1)
    twin = copy.deepcopy(model.module)
    assert type(twin) is Mlp
    assert_local(twin)


@on_ranks(2)
def test_a_pickle_opens_and_trains_without_a_group() -> None:
    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 2)
    content = pickle.dumps(model)
    dist.destroy_process_group()
    twin = pickle.loads(content)
    assert isinstance(twin, Mlp)
    assert_same_tensors(tensors(twin), tensors(model), "value", exact=True)
    mlp_loss_alone = twin(torch.ones(2, 8)).sum()
    mlp_loss_alone.backward()
    assert twin.first.weight.grad is not None


# --- Unwrap ----------------------------------------------------------------------------------------------------------


def hook_counts(model: nn.Module) -> dict[str, int]:
    """Count every hook on the modules and parameters of `model`."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        for table in [key for key in vars(module) if key.endswith("_hooks")]:
            counts[f"{name}:{table}"] = len(getattr(module, table) or ())
    for name, p in model.named_parameters():
        for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            counts[f"{name}:{table}"] = len(getattr(p, table, None) or ())
    return counts


@on_ranks(2)
def test_unwrap_gives_the_model_as_it_was() -> None:
    import commlib

    original = seeded(Mlp)
    before, attributes = hook_counts(original), set(vars(original))
    model = wrap(original, **SMALL)
    train(model, mlp_loss, 3)
    values = tensors(model)
    bare = commlib.unwrap(model)
    assert bare is original
    assert type(bare) is Mlp
    assert hook_counts(bare) == before
    assert set(vars(bare)) == attributes
    assert not hasattr(bare, "no_sync")
    assert_same_tensors(tensors(bare), values, "value", exact=True)
    assert_local(bare)
    optimizer = sgd(bare)
    optimizer.step()


@on_ranks(2)
def test_a_model_can_be_wrapped_again_after_unwrap() -> None:
    import commlib

    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 2)
    again = wrap(commlib.unwrap(model), **SMALL)
    train(again, mlp_loss, 2)
    assert_synchronises(again)


@on_ranks(2)
def test_unwrap_keeps_the_users_hooks() -> None:
    import commlib

    calls: list[int] = []
    model = seeded(Mlp)
    model.first.weight.register_hook(lambda gradient: calls.append(1))
    wrap(model)
    mlp_loss(commlib.unwrap(model), 0).backward()
    assert calls == [1]


@on_ranks(2)
def test_unwrapping_a_bare_model_is_an_error() -> None:
    import commlib.errors

    with raises_on_every_rank(commlib.errors.ConfigError, "wrap"):
        commlib.unwrap(Mlp())


# --- Several models --------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_two_models_in_one_joint_backward() -> None:
    """A generator and a critic, trained in turn and through each other, as with two DDP models."""

    def play(generator: nn.Module, critic: nn.Module) -> dict[str, Tensor]:
        optimizers = sgd(generator), sgd(critic)
        for step in range(4):
            generator.zero_grad()
            critic.zero_grad()
            made = nn.functional.pad(generator(data(step, 5, 8)), (0, 4))
            (critic(made).square().mean() + critic(data(step + 20, 5, 8)).mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
        return tensors(generator) | {f"critic.{name}": tensor for name, tensor in tensors(critic).items()}

    expected = play(ddp(seeded(Mlp)), ddp(seeded(Mlp, seed=8)))
    one, two = wrap(seeded(Mlp), **SMALL), wrap(seeded(Mlp, seed=8))
    assert_same_tensors(play(one, two), expected, "final value", exact=is_exact())
    assert_replicas_identical(one)
    assert_replicas_identical(two)


@on_ranks(2)
def test_a_generator_and_a_critic_take_turns() -> None:
    def play(generator: nn.Module, critic: nn.Module) -> dict[str, Tensor]:
        optimizers = sgd(generator), sgd(critic)
        for step in range(6):
            critic.requires_grad_(step % 2 == 0)
            generator.zero_grad()
            critic.zero_grad()
            made = nn.functional.pad(generator(data(step, 5, 8)), (0, 4))
            critic(made.detach() if step % 2 == 0 else made).square().mean().backward()
            optimizers[(step + 1) % 2].step()
        return tensors(generator) | {f"critic.{name}": tensor for name, tensor in tensors(critic).items()}

    unused = {"find_unused_parameters": True}
    expected = play(ddp(seeded(Mlp), **unused), ddp(seeded(Mlp, seed=8), **unused))
    got = play(wrap(seeded(Mlp)), wrap(seeded(Mlp, seed=8)))
    assert_same_tensors(got, expected, "final value", exact=True)


@on_ranks(2, 3)
def test_three_models_with_delays_of_their_own_on_each_rank() -> None:
    """The ranks' backwards reach the models at other times; they must still agree on the order of collectives."""
    models = [wrap(seeded(Mlp, seed=seed), **SMALL) for seed in range(3)]
    rank = dist.get_rank()
    for number, model in enumerate(models):
        pause = 0.01 * ((number + rank) % 3)
        model.second.register_full_backward_hook(lambda *_, pause=pause: time.sleep(pause))
    for step in range(4):
        for model in models:
            model.zero_grad()
        sum(mlp_loss(model, step) for model in models).backward()  # type: ignore[union-attr]
        for model in models:
            assert_replicas_identical(model)


@on_ranks(2, 3)
def test_a_wrapped_submodule() -> None:
    def build(wrapper: Any) -> nn.Module:
        head = seeded(lambda: nn.Linear(4, 2), seed=9 + dist.get_rank())
        return nn.Sequential(wrapper(seeded(Mlp)), head)

    def named(model: nn.Module) -> dict[str, Tensor]:
        return {name.replace(".module.", "."): tensor for name, tensor in tensors(model).items()}

    expected, got = build(ddp), build(wrap)
    train(expected, mlp_loss, 4)
    train(got, mlp_loss, 4)
    assert_same_tensors(named(got), named(expected), "final value", exact=is_exact())
    assert_replicas_identical(got[0])


@on_ranks(2)
def test_models_come_and_go() -> None:
    """Wrapping, training and dropping models many times neither hangs nor piles up threads."""
    import gc
    import threading

    idle = threading.active_count()
    for seed in range(6):
        model = wrap(seeded(Mlp, seed=seed))
        train(model, mlp_loss, 2)
        assert_replicas_identical(model)
        del model
        gc.collect()
        assert eventually(lambda: threading.active_count() <= idle), threading.enumerate()


# --- Algorithm options, state and statistics -------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_narrow_wire_types_are_close_and_identical_on_all_ranks(wire_dtype: str) -> None:
    import commlib

    model = wrap(seeded(Mlp), algorithm=commlib.algorithms.AllReduce(wire_dtype=wire_dtype), **SMALL)
    mlp_loss(model, 0).backward()
    expected = mean_gradients(lambda: seeded(Mlp), lambda m, rank: m(data(0, 5, 8, rank=rank)).square().mean())
    for name, gradient in gradients(model).items():
        assert gradient is not None
        error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert 0 < error < 0.02, f"{name}: relative error {error}"
    for _ in range(3):
        train(model, mlp_loss, 1)
        assert_replicas_identical(model)


@on_ranks(2, 3)
def test_sum_and_predivision() -> None:
    import commlib

    means = wrap(seeded(Mlp))
    sums = wrap(seeded(Mlp), algorithm=commlib.algorithms.AllReduce(op="sum"))
    predivided = wrap(seeded(Mlp), algorithm=commlib.algorithms.AllReduce(predivide=4.0))
    for model in (means, sums, predivided):
        mlp_loss(model, 0).backward()
    scaled = {name: g * dist.get_world_size() for name, g in gradients(means).items() if g is not None}
    assert_same_tensors(gradients(sums), scaled, "summed gradient", exact=is_exact())
    assert_same_tensors(gradients(predivided), gradients(means), "predivided gradient", exact=is_exact())


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, SMALL], ids=["planned", "small-buckets"])
def test_a_resumed_run_is_bit_identical(options: dict[str, float]) -> None:
    import commlib

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
        found = []
        for step in steps:
            optimizer.zero_grad()
            loss = mlp_loss(model, step)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return found

    straight = wrap(seeded(Mlp), **options)
    optimizer = sgd(straight)
    losses(straight, optimizer, range(3))
    saved = pickle.loads(pickle.dumps((straight.state_dict(), optimizer.state_dict(), commlib.state_dict(straight))))
    expected = losses(straight, optimizer, range(3, 8))
    resumed = wrap(seeded(Mlp, seed=99), **options)
    other = sgd(resumed)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    commlib.load_state_dict(resumed, saved[2])
    assert losses(resumed, other, range(3, 8)) == expected
    assert_same_tensors(tensors(resumed), tensors(straight), "final value", exact=True)


@on_ranks(2)
def test_statistics() -> None:
    import commlib

    model = wrap(seeded(Mlp), **SMALL)
    train(model, mlp_loss, 4)
    stats = commlib.stats(model)
    raw = sum(p.numel() * 4 for p in model.parameters())
    assert stats.algorithm == "allreduce"
    assert (stats.world_size, stats.rounds) == (2, 4)
    assert stats.raw_bytes_per_step == raw
    assert raw <= stats.wire_bytes_per_step <= raw * 1.5 + 4096
    assert stats.wire_bytes >= 4 * raw
    assert stats.exposed_s >= 0
    assert stats.num_buckets == len(stats.buckets) > 1
    assert sorted(name for bucket in stats.buckets for name in bucket.parameters) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert sum(bucket.numel for bucket in stats.buckets) >= raw // 4
    assert "allreduce" in str(stats)


@on_ranks(2)
def test_synchronize_keeps_identical_replicas() -> None:
    import commlib

    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 3)
    before = tensors(model)
    commlib.synchronize(model)
    assert_same_tensors(tensors(model), before, "value", exact=False)
    assert_replicas_identical(model)
