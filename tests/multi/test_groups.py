"""Process groups other than the default: subgroups, mesh dimensions, one rank, odd numbers of ranks."""

from __future__ import annotations

import copy
import tempfile
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.multi.common import (
    SMALL_BUCKET_MB,
    Cnn,
    Mlp,
    assert_replicas_identical,
    assert_same_trace,
    cnn_loss,
    ddp,
    mlp_loss,
    seeded,
    take_buffers_of_rank_0,
    tensors,
    train,
    wrap,
)
from tests.multi.pool import on_ranks


def check_group(wrap_group: Any, ddp_group: dist.ProcessGroup) -> nn.Module:
    """Train in DDP and through `wrap` over two ranks of the world; bit-equal, replicas identical in the group."""
    original = seeded(Cnn, seed=dist.get_rank())
    oracle = ddp(copy.deepcopy(original), process_group=ddp_group)
    expected = train(oracle, cnn_loss, 4)
    take_buffers_of_rank_0(oracle, expected)
    model = wrap(original, process_group=wrap_group, bucket_cap_mb=SMALL_BUCKET_MB)
    got = train(model, cnn_loss, 4)
    assert_same_trace(got, expected, exact=True)
    assert_replicas_identical(model, ddp_group, buffers=False)
    return model


def assert_groups_differ(model: nn.Module) -> None:
    """Check that groups that started from different models are still apart."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensors(model)["head.weight"].sum().item())
    assert len(set(everyone)) == 2, everyone


@on_ranks(4)
def test_two_subgroups_train_apart() -> None:
    import commlib

    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group = groups[dist.get_rank() % 2]
    model = check_group(group, group)
    assert_groups_differ(model)
    assert commlib.stats(model).world_size == 2


@on_ranks(3)
def test_a_subgroup_of_some_ranks() -> None:
    """Rank 0 of the group is not rank 0 of the world; the others go their own way."""
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        check_group(group, group)
    dist.barrier()


@on_ranks(2)
def test_a_group_without_this_rank_is_an_error() -> None:
    import commlib.errors

    group = dist.new_group([0])
    if dist.get_rank() == 0:
        model = wrap(Mlp(), process_group=group)
        train(model, mlp_loss, 2)
    else:
        with pytest.raises(commlib.errors.ConfigError, match="not a member"):
            wrap(Mlp(), process_group=group)
    dist.barrier()


@on_ranks(2)
def test_a_group_that_is_no_group_is_an_error() -> None:
    import commlib.errors

    with pytest.raises(commlib.errors.ConfigError, match="process_group"):
        wrap(Mlp(), process_group="everyone")


@on_ranks(4)
def test_a_dimension_of_a_device_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = check_group(mesh["data"], mesh["data"].get_group())
    assert_groups_differ(model)


@on_ranks(2)
def test_a_device_mesh_of_one_dimension() -> None:
    mesh = init_device_mesh("cpu", (2,))
    check_group(mesh, mesh.get_group())


@on_ranks(4)
def test_a_device_mesh_of_two_dimensions_is_an_error() -> None:
    import commlib.errors

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    with pytest.raises(commlib.errors.ConfigError, match="data"):
        wrap(Mlp(), process_group=mesh)


@on_ranks(2)
def test_models_on_two_groups_at_once() -> None:
    """The groups span the same ranks; each rank creates its models in the same order."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models = [wrap(seeded(Mlp, seed=i), process_group=group) for i, group in enumerate(groups)]
    for step in range(4):
        for model in models:
            model.zero_grad()
        sum(mlp_loss(model, step) for model in models).backward()  # type: ignore[union-attr]
        for model in models:
            assert_replicas_identical(model)


@on_ranks(1)
def test_one_rank_alone() -> None:
    import commlib

    original = seeded(Cnn)
    expected = train(copy.deepcopy(original), cnn_loss, 4)
    model = wrap(original)
    assert_same_trace(train(model, cnn_loss, 4), expected, exact=True)
    with model.no_sync():
        cnn_loss(model, 0).backward()
    with model.join():
        train(model, cnn_loss, 2)
    assert commlib.stats(model).world_size == 1
    commlib.unwrap(model)


@on_ranks(2)
def test_wrapping_works_over_a_new_group_after_one_rank_failed_alone() -> None:
    """A rank whose peer did not arrive has made one more attempt; over a new group both start from the beginning."""
    import commlib.errors

    path = [tempfile.mkdtemp()]
    dist.broadcast_object_list(path)
    rank, hasty = dist.get_rank(), dist.new_group()
    c10d._set_pg_timeout(timedelta(seconds=1), hasty)  # how long a set-up waits
    if rank == 0:
        with pytest.raises(commlib.errors.PeerTimeout, match="rank 1 did not arrive within 1 s"):
            wrap(Mlp(), process_group=hasty)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{path[0]}/store", 2), rank=rank, world_size=2)
    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 2)
    assert_replicas_identical(model)


@on_ranks(2)
def test_the_default_group_stays_usable_between_steps() -> None:
    """The user's own collectives on the same ranks may come at any point between backwards."""
    model = wrap(seeded(Mlp))
    for step in range(3):
        model.zero_grad()
        loss = mlp_loss(model, step)
        mine = loss.detach().clone()
        dist.all_reduce(mine)
        loss.backward()
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == dist.get_world_size()
    assert_replicas_identical(model)
