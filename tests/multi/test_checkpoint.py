"""`commlib.Checkpoint` and the state of ranks: a run saved at any step continues bit for bit, for every algorithm."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import commlib
from commlib.checkpoint import consensus_state_dict, rank_state, read_rank_file, replicas_differ, write_rank_file
from commlib.errors import ConfigError
from commlib.replica import replica_of
from tests.contract import subjects
from tests.contract.probes import transports
from tests.contract.subjects import (
    ConvNet,
    Mlp,
    Subject,
    Training,
    build,
    everyones,
    flat,
    gathered,
    loss_of,
    of_each_kind,
)
from tests.multi.common import raises_on_every_rank
from tests.multi.pool import on_ranks, run_ranks
from tests.thin import fast

ALGORITHMS = commlib.algorithms.list()


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks of the group see."""
    with tempfile.TemporaryDirectory() as own:
        yield gathered(own)[0]
        gathered(None)


def checkpoint_of(training: Training, resize: Literal["raise", "reset"] = "raise") -> commlib.Checkpoint:
    return commlib.Checkpoint(training.model, training.optimizer, resize)


def save(training: Training, folder: str, group: Any = None) -> None:
    with quiet():
        dcp.save({"app": checkpoint_of(training)}, checkpoint_id=folder, process_group=group)


def load(training: Training, folder: str, group: Any = None, resize: Literal["raise", "reset"] = "raise") -> None:
    with quiet():
        dcp.load({"app": checkpoint_of(training, resize)}, checkpoint_id=folder, process_group=group)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of its own deprecated parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


#: Of ranks that wait in another communicator than the one that misses them: longer than a machine may stand still.
PATIENCE_S = 8.0


def be_impatient(training: Training) -> None:
    """Have this rank wait shortly for words of its peers from now on."""
    for transport in transports(training):
        transport.timeout_s = 1.0


@on_ranks(3)
@pytest.mark.parametrize("name", fast(["allreduce", "topk", "diloco"], "topk", "diloco"))
def test_a_rank_that_loads_no_state_is_missed(name: str) -> None:
    training = Subject(name).start(timeout=PATIENCE_S).steps(3)
    state = commlib.state_dict(training.model)
    if dist.get_rank() == 0:
        be_impatient(training)
        commlib.load_state_dict(training.model, state)
    words = ["load_state_dict", "ranks [1, 2] wrote nothing"] if dist.get_rank() == 0 else ["failed"]
    with raises_on_every_rank(commlib.PeerTimeout, *words):
        training.steps(4)


@on_ranks(3)
@pytest.mark.parametrize("name", fast(["diloco", "low_precision_decentralized"], "diloco"))
def test_a_rank_that_alone_loads_weights_is_told(name: str) -> None:
    training = Subject(name).start(timeout=PATIENCE_S).steps(3)
    if dist.get_rank() == 0:
        be_impatient(training)
        training.model.load_state_dict({name: 0.5 * value for name, value in training.model.state_dict().items()})
    words = ["load_state_dict", "ranks [1, 2] wrote nothing"] if dist.get_rank() == 0 else ["failed"]
    with raises_on_every_rank(commlib.PeerTimeout, *words):
        training.steps(4)


@on_ranks(2)
def test_one_rank_alone_evaluates_what_it_has_loaded() -> None:
    training = Subject("diloco").start().steps(3)
    commlib.load_state_dict(training.model, commlib.state_dict(training.model))
    if dist.get_rank() == 0:
        loss_of(training.model.eval(), 0)  # with gradients enabled, as happens
        training.model.train()
    gathered(None)
    training.steps(3).assert_sound()


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


@pytest.mark.parametrize("name", of_each_kind(ALGORITHMS))
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


#: One of each kind: no state, residuals, weights of their own, rounds that start again, shared memory, a server.
KINDS = ("allreduce", "topk", "bytegrad", "diloco", "decentralized", "hogwild", "async_sgd")


@pytest.mark.parametrize(
    ("num_saved", "sizes", "names"),
    [
        (2, (1, 3), KINDS),
        pytest.param(2, (1, 3, 4), [name for name in ALGORITHMS if name != "auto"], marks=pytest.mark.slow),
        pytest.param(3, (2, 4), KINDS, marks=pytest.mark.slow),
    ],
)
def test_another_world_size_goes_on_from_the_consensus_or_says_why_not(
    num_saved: int, sizes: tuple[int, ...], names: tuple[str, ...]
) -> None:
    run_ranks(check_other_sizes, 4, num_saved, sizes, names)


def check_other_sizes(num_saved: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in {num_saved, *sizes}}
    for name in names:
        with shared_folder() as folder:
            expected = saved_by(name, groups[num_saved], num_saved, folder)
            for size in sizes:
                if dist.get_rank() < size:
                    subjects.set_group(groups[size])
                    check_other_size(name, groups[size], folder, expected, num_saved)
                    subjects.set_group(None)
                dist.barrier()


def saved_by(name: str, group: Any, size: int, folder: str) -> torch.Tensor:
    """Save a run of some steps on that group, and return the consensus of its weights on all ranks."""
    consensus = torch.zeros_like(flat(build()))
    if dist.get_rank() < size:
        subjects.set_group(group)
        training = Subject(name).start().steps(3)
        gathered(None)  # some algorithms' ranks share their weights
        save(training, folder, group)
        state = consensus_state_dict(training.model)
        consensus = subjects.joined(state[key] for key, _ in training.model.named_parameters())
        commlib.unwrap(training.model)
        subjects.set_group(None)
    dist.broadcast(consensus, 0)
    return consensus


def check_other_size(name: str, group: Any, folder: str, expected: torch.Tensor, num_saved: int) -> None:
    subject = Subject(name)
    training = subject.start(build(seed=99))
    if not training.engine.algorithm.portable:
        with pytest.raises(ConfigError, match=f"saved by {num_saved} ranks"):
            load(training, folder, group)
        gathered(None)
    load(training, folder, group, resize="reset")
    gathered(None)
    torch.testing.assert_close(training.flat(), expected, rtol=1e-6, atol=1e-7, msg=lambda text: f"{name}: {text}")
    gathered(None)  # some algorithms' ranks share their weights
    training.num_steps = 3
    training.assert_trains_on()
    commlib.unwrap(training.model)


@on_ranks(2)
def test_the_files_of_ranks_resume_beside_a_common_checkpoint() -> None:
    """As other tools save: one model and one optimizer state, of rank 0, and a file of each rank."""
    for name in ("allreduce", "topk", "diloco", "low_precision_decentralized"):
        subject = Subject(name)
        whole = subject.start(build(ConvNet)).steps(5)
        with shared_folder() as folder:
            write_rank_file(folder, whole.model, whole.optimizer)
            common = [consensus_state_dict(whole.model), whole.optimizer.state_dict()]
            dist.broadcast_object_list(common, 0)
            common = copy.deepcopy(common)
            resumed = subject.start(build(ConvNet, seed=99))
            resumed.model.load_state_dict(common[0])
            resumed.optimizer.load_state_dict(common[1])
            read_rank_file(folder, resumed.model, resumed.optimizer)
        resumed.num_steps = 5
        for _ in range(4):
            assert torch.equal(resumed.flat(), whole.flat()), name
            whole.step()
            resumed.step()


@on_ranks(2)
def test_what_a_rank_has_alone_is_saved_with_it() -> None:
    """Parameters that commlib ignores, and buffers that are not copied."""
    subject = Subject("allreduce")
    options = {"ignored_parameters": ["head.weight"], "broadcast_buffers": False}
    whole = subject.start(build(ConvNet), **options).steps(4)
    state = rank_state(whole.model, whole.optimizer)
    assert state["model"].keys() == {"head.weight", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    with shared_folder() as folder:
        save(whole, folder)
        resumed = subject.start(build(ConvNet, seed=99), **options)
        load(resumed, folder)
    resumed.num_steps = 4
    for training in (whole, resumed):
        training.steps(3)
    assert torch.equal(whole.flat(), resumed.flat())
    assert torch.equal(whole.model.norm.running_mean, resumed.model.norm.running_mean)
    assert not torch.equal(*[rows[0] for rows in everyones(whole.model.head.weight.flatten()).chunk(2)])


@on_ranks(2)
def test_a_missing_or_foreign_file_of_a_rank_is_an_error() -> None:
    training = Subject("topk").start().steps(2)
    with shared_folder() as folder:
        with raises_on_every_rank(ConfigError, "is missing"):
            read_rank_file(folder, training.model)
        path = write_rank_file(folder, training.model)
        gathered(None)
        other = Subject("bytegrad").start()
        with raises_on_every_rank(ConfigError, "topk"):
            read_rank_file(folder, other.model)
        gathered(None)
        if dist.get_rank() == 1:
            path.unlink()
        gathered(None)
        if dist.get_rank() == 0:
            read_rank_file(folder, training.model)
        else:
            with pytest.raises(ConfigError, match=r"commlib-rank1.pt is missing"):
                read_rank_file(folder, training.model)


@on_ranks(3)
def test_the_consensus_is_the_mean_and_changes_nothing() -> None:
    for name in ("topk", "diloco", "decentralized"):
        training = Subject(name).start(build(ConvNet)).steps(3)
        commlib.state_dict(training.model)  # takes a round that is under way
        before = copy.deepcopy(training.model.state_dict())
        session = replica_of(training.model).engine.session
        with mock.patch.object(session, "run", wraps=session.run) as run:
            consensus = consensus_state_dict(training.model)
        assert replicas_differ(training.model) is (name != "topk")
        hint = "every rank must save; consensus_state_dict is collective if replicas differ"
        assert all(hint in call.args[0] for call in run.call_args_list)  # shown to a rank that waits for the others
        assert run.called is (name != "topk")
        for key, value in training.model.state_dict().items():
            assert torch.equal(value, before[key])
        mean = everyones(training.flat()).mean(dim=0)
        found = subjects.joined(consensus[key] for key, _ in training.model.named_parameters())
        torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-7)
        everyone = gathered(dict(consensus))
        assert all(torch.equal(each[key], value) for each in everyone for key, value in consensus.items())


@on_ranks(2)
def test_frozen_parameters_and_several_optimizers_are_saved() -> None:
    subject = Subject("topk")
    trainings = []
    for seed in (7, 99):
        model = build(Mlp, seed=seed)
        model.second.requires_grad_(False)
        optimizers = [torch.optim.AdamW(model.first.parameters()), torch.optim.SGD(model.third.parameters(), lr=0.1)]
        optimizers.append(torch.optim.Adam([*model.last.parameters(), *model.second.parameters()]))
        trainings.append(Training(subject, model, _All(optimizers), given=optimizers))
    whole, resumed = trainings
    whole.steps(3)
    with shared_folder() as folder, quiet():
        dcp.save({"app": commlib.Checkpoint(whole.model, whole.optimizer.all)}, checkpoint_id=folder)
        dcp.load({"app": commlib.Checkpoint(resumed.model, resumed.optimizer.all)}, checkpoint_id=folder)
    resumed.num_steps = 3
    assert not resumed.optimizer.all[2].state.keys() & set(resumed.model.second.parameters()), "state of frozen ones"
    assert torch.equal(whole.steps(3).flat(), resumed.steps(3).flat())


class _All:
    """Several optimizers, stepped one after the other."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.all = optimizers

    def zero_grad(self) -> None:
        for each in self.all:
            each.zero_grad()

    def step(self) -> None:
        for each in self.all:
            each.step()


@on_ranks(1)
def test_optimizers_whose_state_no_stand_in_can_make_say_so() -> None:
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters())
    commlib.wrap(model, "allreduce", optimizer=optimizer)
    with pytest.raises(ConfigError, match="LBFGS: its state is created in a step that needs more than gradients"):
        commlib.Checkpoint(model, optimizer).state_dict()
    assert not optimizer.state
    commlib.Checkpoint(model).state_dict()  # as the error says: without it, or after a step of it

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    commlib.Checkpoint(model, optimizer).state_dict()
    commlib.unwrap(model)
    with pytest.raises(ConfigError, match="not wrapped"):
        commlib.Checkpoint(model)


@on_ranks(2)
def test_saving_before_the_first_step_leaves_the_optimizer_without_state() -> None:
    training = Subject("allreduce").start()
    other = Subject("allreduce").start()
    checkpoint_of(training).state_dict()
    assert not training.optimizer.state
    assert torch.equal(training.steps(2).flat(), other.steps(2).flat())


@on_ranks(2)
def test_the_checkpoint_of_another_algorithm_is_refused() -> None:
    topk, bytegrad = (Subject(name).start().steps(2) for name in ("topk", "bytegrad"))
    with shared_folder() as folder:
        save(topk, folder)
        with raises_on_every_rank(ConfigError, "'topk'"):
            load(bytegrad, folder)


@on_ranks(2)
def test_the_model_of_a_checkpoint_is_loaded_without_commlib() -> None:
    training = Subject("local_sgd").start().steps(3)
    with shared_folder() as folder:
        save(training, folder)
        expected = consensus_state_dict(training.model)
        bare = build(Mlp, seed=99)
        state = {"app": {"model": bare.state_dict()}}
        with quiet():
            dcp.load(state, checkpoint_id=folder)
        bare.load_state_dict(state["app"]["model"])
    assert all(torch.equal(value, expected[key]) for key, value in bare.state_dict().items())
