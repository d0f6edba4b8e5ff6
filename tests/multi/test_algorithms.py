"""The engine's support for algorithms: several collectives per bucket, warm-up, rounds over weights and optimizer
state, rounds in the background, state and resume; and `allreduce` with its options, against plain references."""

from __future__ import annotations

import copy
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.algorithms import Algorithm, AllReduce, BucketView, Channel, Gradients, OptimizerState, Weights
from commlib.errors import ConfigError
from commlib.replica import replica_of
from commlib.transport.base import Communication, Communicator
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Mlp,
    assert_close,
    assert_replicas_identical,
    assert_same_trace,
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
from tests.multi.notices import await_told, others, tell
from tests.multi.pool import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"


class GatherMean(Algorithm):
    """The mean in two collectives with local work around them, delayed at random: tests the order over many buckets."""

    channel = Gradients(window=3)

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        numel, size = bucket.flat.numel(), comm.world_size
        time.sleep(random.random() * 0.002)
        everyone = bucket.flat.new_empty(size * numel)
        yield comm.all_gather(everyone, bucket.flat)
        time.sleep(random.random() * 0.002)
        chunk = -(-numel // size)
        padded = bucket.flat.new_zeros(size * chunk)
        padded[:numel] = everyone.view(size, numel).mean(dim=0)
        own = padded.view(size, chunk)[comm.rank].contiguous()
        yield comm.all_gather(padded, own)
        bucket.flat.copy_(padded[:numel])


class Average(Algorithm):
    """The mean of whatever the buckets hold."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield comm.all_reduce(bucket.flat)
        bucket.flat.div_(comm.world_size)


class Failing(Algorithm):
    """Raises in its own work, on one rank, in the third round."""

    def __init__(self) -> None:
        self.calls = 0

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        self.calls += 1
        yield comm.all_reduce(bucket.flat)
        if self.calls == 3 and comm.rank == 0:
            raise ZeroDivisionError("a defect of the algorithm")


@on_ranks(3, slow=(2, 4))
def test_the_gradient_is_the_mean_in_every_step() -> None:
    model = wrap(seeded(Mlp), bucket_cap_mb=SMALL_BUCKET_MB)
    optimizer = sgd(model)
    for step in range(6):
        expected = mean_gradients(lambda: snapshot(model, Mlp), lambda m, r, step=step: mlp_loss_of(m, step, r))
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        for name, gradient in gradients(model).items():
            assert gradient is not None
            assert_close(gradient, expected[name], name, exact=is_exact())
        optimizer.step()


def mlp_loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    from tests.multi.common import data

    return model(data(step, 5, 8, rank=rank)).square().mean()


@on_ranks(2, 3)
@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_a_narrow_wire_costs_its_rounding_and_half_the_bytes(wire_dtype: str) -> None:
    exact = train(wrap(seeded(Mlp)), mlp_loss, 8)
    model = wrap(seeded(Mlp), algorithm=AllReduce(wire_dtype=wire_dtype))
    got = train(model, mlp_loss, 8)
    assert_replicas_identical(model)
    bound = 2.0**-8 if wire_dtype == "bf16" else 2.0**-10
    for name, gradient in got.gradients[0].items():
        reference = exact.gradients[0][name]
        assert gradient is not None
        assert reference is not None
        scale = reference.abs().max()
        assert (gradient - reference).abs().max() <= 2 * dist.get_world_size() * bound * scale
        assert not torch.equal(gradient, reference), "nothing was rounded"
    assert abs(float(got.losses[-1]) - float(exact.losses[-1])) < 0.02 * float(exact.losses[-1])
    stats = commlib.stats(model)
    assert 1.9 < stats.compression_ratio < 2.05, stats


@on_ranks(2, 3)
@pytest.mark.parametrize("predivide", [1.0, 1.5, 3.0])
def test_predivision_changes_only_the_rounding(predivide: float) -> None:
    plain = train(wrap(seeded(Mlp)), mlp_loss, 4)
    divided = train(wrap(seeded(Mlp), algorithm=AllReduce(predivide=predivide)), mlp_loss, 4)
    assert_same_trace(divided, plain, exact=False)


@on_ranks(3)
def test_the_sum_is_world_size_times_the_mean() -> None:
    mean, total = wrap(seeded(Mlp)), wrap(seeded(Mlp), algorithm=AllReduce(op="sum"))
    for model in (mean, total):
        mlp_loss(model, 0).backward()
    for name, gradient in gradients(total).items():
        expected = gradients(mean)[name]
        assert gradient is not None
        assert expected is not None
        assert_close(gradient, expected * 3, name, exact=False)


@on_ranks(2, 3, 4)
def test_many_buckets_of_two_collectives_with_random_delays() -> None:
    random.seed(dist.get_rank())
    expected = train(wrap(seeded(Mlp)), mlp_loss, 12)
    model = wrap(seeded(Mlp), algorithm=GatherMean(), bucket_cap_mb=SMALL_BUCKET_MB)
    got = train(model, mlp_loss, 12)
    assert commlib.stats(model).num_buckets >= 3
    assert_same_trace(got, expected, exact=False)
    assert_replicas_identical(model)


@on_ranks(2)
def test_the_example_of_the_documentation_computes_its_equation() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text().split("## Writing one")[1], re.DOTALL)
    assert code is not None
    model = seeded(Mlp)
    scope: dict[str, Any] = {"model": model, "commlib": commlib}
    exec(code.group(1), scope)
    bucket_of = {name: bucket.index for bucket in commlib.stats(model).buckets for name in bucket.parameters}
    mlp_loss(model, 0).backward()
    expected: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for rank in range(2):
        bare = seeded(Mlp)
        mlp_loss_of(bare, 0, rank).backward()
        for index in set(bucket_of.values()):
            own = {n: p.grad for n, p in bare.named_parameters() if bucket_of[n] == index and p.grad is not None}
            scale = torch.cat([gradient.reshape(-1) for gradient in own.values()]).abs().mean()
            for name, gradient in own.items():
                expected[name] += scale * gradient.sign() / 2
    for name, gradient in gradients(model).items():
        assert gradient is not None
        assert_close(gradient, expected[name], name, exact=False)


@on_ranks(2, 3)
def test_weights_are_averaged_every_period_after_the_warm_up() -> None:
    """Against a single process that runs all the replicas' equations."""
    period, warm_up, steps = 3, 2, 12
    model = seeded(Mlp)
    optimizer = sgd(model)
    wrap(model, algorithm=Average(Weights(period=period, warmup_steps=warm_up)), optimizer=optimizer)
    train(model, mlp_loss, steps, optimizer)

    replicas = [seeded(Mlp) for _ in range(dist.get_world_size())]
    optimizers = [sgd(replica) for replica in replicas]
    for step in range(steps):
        for rank, replica in enumerate(replicas):
            optimizers[rank].zero_grad()
            mlp_loss_of(replica, step, rank).backward()
        if step < warm_up:
            average([[p.grad for p in replica.parameters()] for replica in replicas])
        for own in optimizers:
            own.step()
        if step >= warm_up and (step + 1 - warm_up) % period == 0:
            average([[p.data for p in replica.parameters()] for replica in replicas])
    for name, value in tensors(replicas[dist.get_rank()]).items():
        assert_close(tensors(model)[name], value, name, exact=False)
    assert commlib.stats(model).rounds == warm_up + 3, "two rounds over gradients, then three over weights"
    commlib.synchronize(model)
    assert_replicas_identical_parameters(model)


def average(by_replica: list[list[Any]]) -> None:
    """Replace every tensor by its mean over the replicas."""
    for same in zip(*by_replica, strict=True):
        mean = torch.stack([tensor.detach() for tensor in same]).mean(dim=0)
        for tensor in same:
            tensor.detach().copy_(mean)


def assert_replicas_identical_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        everyone = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, parameter.detach())
        assert all(torch.equal(everyone[0], other) for other in everyone)


@on_ranks(2, 3)
def test_the_state_of_the_optimizer_is_averaged() -> None:
    model = seeded(Mlp)
    optimizer = sgd(model)
    wrap(model, algorithm=Average(OptimizerState(key="momentum_buffer", period=2)), optimizer=optimizer)
    train(model, mlp_loss, 4, optimizer)
    for parameter in model.parameters():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        everyone = [torch.empty_like(momentum) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, momentum)
        assert all(torch.equal(everyone[0], other) for other in everyone)
        own = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(own, parameter.detach())
        assert not torch.equal(own[0], own[1]), "the weights themselves were not averaged"


@on_ranks(2, 3)
def test_a_round_in_the_background_adds_its_effect_when_it_is_taken() -> None:
    """x += mean(copy) - copy, `delay` steps after the copies were made; the steps between are kept."""
    period, delay, steps = 4, 2, 11
    model = seeded(Mlp)
    optimizer = sgd(model)
    wrap(model, algorithm=Average(Weights(period=period, delay=delay)), optimizer=optimizer)
    train(model, mlp_loss, steps, optimizer)

    replicas = [seeded(Mlp) for _ in range(dist.get_world_size())]
    optimizers = [sgd(replica) for replica in replicas]
    copies: list[list[Tensor]] = []
    for step in range(1, steps + 1):
        for rank, replica in enumerate(replicas):
            optimizers[rank].zero_grad()
            mlp_loss_of(replica, step - 1, rank).backward()
            optimizers[rank].step()
        if step > delay and (step - delay) % period == 0:
            for same, held in zip(
                zip(*[r.parameters() for r in replicas], strict=True), zip(*copies, strict=True), strict=True
            ):
                mean = torch.stack(held).mean(dim=0)
                for parameter, copied in zip(same, held, strict=True):
                    parameter.data.add_(mean - copied)
        if step % period == 0:
            copies = [[p.detach().clone() for p in replica.parameters()] for replica in replicas]
    for name, value in tensors(replicas[dist.get_rank()]).items():
        assert_close(tensors(model)[name], value, name, exact=False)
    commlib.unwrap(model)


@on_ranks(2, 3)
def test_fragments_take_turns_and_results_are_mixed_in() -> None:
    """Round k carries the buckets k modulo 2; a delayed result r enters as x <- a x + (1 - a) r."""
    period, delay, mixing, steps = 2, 1, 0.25, 9
    model = seeded(Mlp)
    optimizer = sgd(model)
    algorithm = Average(Weights(period=period, delay=delay, mixing=mixing, fragments=2))
    wrap(model, algorithm=algorithm, optimizer=optimizer, bucket_cap_mb=SMALL_BUCKET_MB)
    buckets = [[s.name for s in b.slots] for b in replica_of(model).engine.channels[-1].buckets]
    assert len(buckets) >= 3
    train(model, mlp_loss, steps, optimizer)

    replicas = [seeded(Mlp) for _ in range(dist.get_world_size())]
    optimizers = [sgd(replica) for replica in replicas]
    under_way: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        for rank, replica in enumerate(replicas):
            optimizers[rank].zero_grad()
            mlp_loss_of(replica, step - 1, rank).backward()
            optimizers[rank].step()
        if (step - delay) % period == 0:
            for name, mean in under_way.items():
                for replica in replicas:
                    parameter = replica.get_parameter(name).data
                    parameter.mul_(mixing).add_(mean, alpha=1 - mixing)
        if step % period == 0:
            turn = (step // period - 1) % 2
            names = [name for members in buckets[turn::2] for name in members]
            under_way = {n: torch.stack([r.get_parameter(n).detach() for r in replicas]).mean(dim=0) for n in names}
    for name, value in tensors(replicas[dist.get_rank()]).items():
        assert_close(tensors(model)[name], value, name, exact=False)


@on_ranks(2, 3, 4)
def test_asynchronous_rounds_never_wait_and_synchronize_completes_them() -> None:
    """One rank rests: the others make all their steps meanwhile; then everyone ends at the same mean."""
    model = seeded(Mlp)
    optimizer = sgd(model)
    wrap(model, algorithm=Average(Weights(asynchronous=True, period=2)), optimizer=optimizer)
    is_slow = dist.get_rank() == 0
    for step in range(3 if is_slow else 30):
        if is_slow and step == 1:
            await_told("made all steps", others())
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()
    tell("made all steps")
    own = [parameter.detach().clone() for parameter in model.parameters()]
    commlib.synchronize(model)
    assert_replicas_identical_parameters(model)
    rounds = [0] * dist.get_world_size()
    dist.all_gather_object(rounds, commlib.stats(model).rounds)
    assert rounds == [rounds[0]] * len(rounds)
    assert rounds[0] >= 1
    distance = commlib.stats(model).consensus_distance
    assert distance is not None
    if rounds[0] == 1:  # the mean came after the last round that `own` does not hold yet
        return
    moved = sum((p.detach() - before).square().sum() for p, before in zip(model.parameters(), own, strict=True))
    assert float(moved) > 0


@on_ranks(2)
def test_the_consensus_distance_is_that_from_the_mean() -> None:
    model = seeded(Mlp)
    optimizer = sgd(model)
    wrap(model, algorithm=Average(Weights(period=100)), optimizer=optimizer)
    assert commlib.stats(model).consensus_distance is None
    train(model, mlp_loss, 3, optimizer)
    own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    commlib.synchronize(model)
    expected = torch.dist(own, torch.stack(everyone).mean(dim=0))
    assert commlib.stats(model).consensus_distance == pytest.approx(float(expected), rel=1e-5)


@on_ranks(2)
def test_weights_without_an_optimizer_are_an_error() -> None:
    with raises_on_every_rank(ConfigError, "optimizer="):
        wrap(seeded(Mlp), algorithm=Average(Weights()))


@on_ranks(2)
def test_an_error_in_an_algorithm_is_raised_as_it_is_and_ends_the_others() -> None:
    model = wrap(seeded(Mlp), algorithm=Failing())
    kind = ZeroDivisionError if dist.get_rank() == 0 else commlib.TransportError
    with pytest.raises(kind):
        train(model, mlp_loss, 5)
    with pytest.raises(commlib.CommlibError, match="earlier error") as caught:
        mlp_loss(model, 0)
    assert isinstance(caught.value, commlib.TransportError) == (dist.get_rank() != 0)


@on_ranks(2, 3)
@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_a_resumed_run_is_bit_identical(stop_after: int) -> None:
    """Also where the backend's sum depends on the bucket boundaries: the plan is part of the state."""
    whole = seeded(Mlp)
    optimizer = sgd(whole)
    wrap(whole, bucket_cap_mb=SMALL_BUCKET_MB)
    train(whole, mlp_loss, stop_after, optimizer)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), commlib.state_dict(whole)))
    rest = train(whole, lambda m, s: mlp_loss(m, s + stop_after), 4, optimizer)

    resumed = seeded(Mlp, seed=99)
    own = sgd(resumed)
    resumed.load_state_dict(saved[0])
    own.load_state_dict(saved[1])
    wrap(resumed, bucket_cap_mb=SMALL_BUCKET_MB)
    commlib.load_state_dict(resumed, saved[2])
    got = train(resumed, lambda m, s: mlp_loss(m, s + stop_after), 4, own)
    assert_same_trace(got, rest, exact=True)
    before, after = commlib.stats(whole), commlib.stats(resumed)
    assert [b.parameters for b in after.buckets] == [b.parameters for b in before.buckets]
    assert after.rounds == before.rounds


@on_ranks(2)
def test_state_of_another_run_is_refused() -> None:
    model = wrap(seeded(Mlp), algorithm="topk")
    train(model, mlp_loss, 5)
    saved = commlib.state_dict(model)
    for key, value in {"algorithm": "bytegrad", "world_size": 8, "rank": 7, "format": 99}.items():
        with pytest.raises(ConfigError, match=key):
            commlib.load_state_dict(model, {**saved, key: value})
    other = wrap(nn.Linear(3, 3), algorithm="topk")
    with pytest.raises(ConfigError, match="another model"):
        commlib.load_state_dict(other, saved)


@on_ranks(2)
def test_all_ranks_plan_alike_and_stats_show_it() -> None:
    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 700)
    stats = commlib.stats(model)
    assert stats.plan == "planned"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [bucket.parameters for bucket in stats.buckets])
    assert all(other == everyone[0] for other in everyone)
    assert sorted(n for bucket in stats.buckets for n in bucket.parameters) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert stats.rounds == 700
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    assert stats.raw_bytes_per_step == nbytes
    assert nbytes <= stats.wire_bytes_per_step <= nbytes + 4 * len(list(model.parameters()))
    assert "planned" in str(stats)


@pytest.mark.parametrize("keeps_gradients", [False, True])
@on_ranks(2)
def test_plans_lie_in_the_same_memory_unless_gradients_are_kept(keeps_gradients: bool) -> None:
    model, ddp = wrap(seeded(Mlp)), DistributedDataParallel(seeded(Mlp))
    places, kinds = [], []
    for step in range(6):
        for each in (model, ddp):
            mlp_loss(each, step).backward()
        for name, expected in gradients(ddp).items():
            assert torch.equal(gradients(model)[name], expected), name
        places.append({p.grad.untyped_storage().data_ptr() for p in model.parameters()})
        kinds.append(commlib.stats(model).plan)
        if not keeps_gradients:
            model.zero_grad()
            ddp.zero_grad()
    assert kinds[0] == "initial" != kinds[-1]
    assert all(len(place) == 1 for place in places)
    assert (places[0] == places[-1]) != keeps_gradients
