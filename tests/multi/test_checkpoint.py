"""`commlib.Checkpoint` and the state of ranks: what is saved at any step goes on bit for bit, for every algorithm."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import commlib
from commlib.checkpoint import consensus_state_dict
from commlib.errors import ConfigError
from tests.contract import subjects
from tests.contract.subjects import Subject, Training, build, flat, gathered, slow_for_siblings
from tests.multi.pool import on_ranks, run_ranks

ALGORITHMS = commlib.algorithms.list()


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks of the group see."""
    with tempfile.TemporaryDirectory() as own:
        yield gathered(own)[0]
        gathered(None)


def checkpoint_of(training: Training) -> commlib.Checkpoint:
    return commlib.Checkpoint(training.model, training.optimizer)


def save(training: Training, folder: str, group: Any = None) -> None:
    with quiet():
        dcp.save({"app": checkpoint_of(training)}, checkpoint_id=folder, process_group=group)


def load(training: Training, folder: str, group: Any = None) -> None:
    with quiet():
        dcp.load({"app": checkpoint_of(training)}, checkpoint_id=folder, process_group=group)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of its own deprecated parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def resumes_after(name: str, steps: int) -> None:
    """A run that is saved after some steps goes on in a fresh run as it does itself."""
    subject = Subject(name)
    whole = subject.start(bucket_cap_mb=None).steps(steps)
    with shared_folder() as folder:
        save(whole, folder)
        resumed = subject.start(build(seed=99), bucket_cap_mb=None)
        load(resumed, folder)
    resumed.num_steps = steps
    if subject.runs_by_clocks:
        resumed.assert_trains_on()
        whole.assert_trains_on()
        return
    assert torch.equal(resumed.flat(), whole.flat()), "other weights were loaded"
    for after in range(3):
        whole.step()
        resumed.step()
        assert torch.equal(resumed.flat(), whole.flat()), f"differs {after + 1} steps after step {steps}"


@pytest.mark.parametrize("name", slow_for_siblings(ALGORITHMS))
def test_a_run_resumes_from_a_distributed_checkpoint(name: str) -> None:
    run_ranks(resumes_at_several_steps, 2, name)


def resumes_at_several_steps(name: str) -> None:
    for steps in (0, 1, 4, 9):
        resumes_after(name, steps)
        dist.barrier()


def names_in(folder: str) -> set[str]:
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def test_the_tree_has_one_shape_in_every_phase_and_for_every_algorithm() -> None:
    run_ranks(check_shapes, 2)


def check_shapes() -> None:
    found = {}
    for name in ("allreduce", "topk", "powersgd", "diloco", "async_sgd"):
        training = Subject(name).start()
        for steps in (0, 1, 5):
            training.steps(steps)
            with shared_folder() as folder:
                save(training, folder)
                found[name, steps] = names_in(folder)
        commlib.unwrap(training.model)
    first = next(iter(found.values()))
    assert "app.model.first.weight" in first
    assert "app.optimizer.state.first.weight.momentum_buffer" in first
    assert [key for key, names in found.items() if names != first] == []


@on_ranks(2)
def test_an_asynchronous_save_is_of_its_moment() -> None:
    for name in ("topk", "diloco"):
        subject = Subject(name)
        whole = subject.start().steps(3)
        with shared_folder() as folder:
            with quiet():
                future = dcp.async_save({"app": checkpoint_of(whole)}, checkpoint_id=folder)
            expected = whole.steps(3).flat()
            future.result()
            resumed = subject.start(build(seed=99))
            load(resumed, folder)
        resumed.num_steps = 3
        assert torch.equal(resumed.steps(3).flat(), expected), name


def test_another_world_size_goes_on_from_the_consensus_or_says_why_not() -> None:
    run_ranks(check_other_sizes, 4, 2, (1, 3, 4))
    run_ranks(check_other_sizes, 4, 3, (2,))


def check_other_sizes(num_saved: int, sizes: tuple[int, ...]) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in {num_saved, *sizes}}
    for name in ALGORITHMS if num_saved == 2 else ("allreduce", "topk", "local_sgd"):
        if name == "auto":  # measures the network for seconds; what it chose is saved as that
            continue
        with shared_folder() as folder:
            expected = saved_by(name, groups[num_saved], num_saved, folder)
            for size in sizes:
                if dist.get_rank() < size:
                    subjects.set_group(groups[size])
                    check_other_size(name, groups[size], folder, expected)
                    subjects.set_group(None)
                dist.barrier()


def saved_by(name: str, group: Any, size: int, folder: str) -> torch.Tensor:
    """Save a run of some steps on that group, and return the consensus of its weights on all ranks."""
    consensus = torch.zeros_like(flat(build()))
    if dist.get_rank() < size:
        subjects.set_group(group)
        training = Subject(name).start().steps(3)
        save(training, folder, group)
        state = consensus_state_dict(training.model)
        consensus = subjects.joined(state[key] for key, _ in training.model.named_parameters())
        commlib.unwrap(training.model)
        subjects.set_group(None)
    dist.broadcast(consensus, 0)
    return consensus


def check_other_size(name: str, group: Any, folder: str, expected: torch.Tensor) -> None:
    subject = Subject(name)
    training = subject.start(build(seed=99))
    if not training.engine.algorithm.portable:
        with pytest.raises(ConfigError, match=r"saved by 2 ranks|saved by 3 ranks|server|rank"):
            load(training, folder, group)
        gathered(None)
    else:
        load(training, folder, group)
        gathered(None)
        torch.testing.assert_close(training.flat(), expected, rtol=1e-6, atol=1e-7)
        training.num_steps = 3
        training.assert_trains_on()
    commlib.unwrap(training.model)
