"""Checkpoints in Lightning: one file, with which a run resumes bit for bit, and which needs no commlib to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from tests.contract.subjects import Subject, of_each_kind, spread
from tests.integrations import lightning_common as common
from tests.integrations.lightning_common import pl
from tests.integrations.test_lightning import Gan, Subjected
from tests.multi.common import raises_on_every_rank
from tests.multi.pool import run_ranks

ALGORITHMS = commlib.algorithms.list()


def keep_all(folder: Any, **options: Any) -> Any:
    """The callback that saves after every epoch, and keeps all files."""
    chosen = {"save_top_k": -1, "filename": "{epoch}", **options}
    return pl.callbacks.ModelCheckpoint(str(folder), **chosen)


def train(module: Any, algorithm: Any, epochs: int, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Any:
    """Train until `epochs` are done; return the trainer."""
    options = {"max_epochs": epochs, "callbacks": list(callbacks), "enable_checkpointing": bool(callbacks), **options}
    strategy = algorithm if isinstance(algorithm, pl.strategies.Strategy) else common.strategy(algorithm)
    return common.fit(module, strategy, ckpt_path=ckpt_path, **options)[1]


def file_of(folder: Any) -> str:
    """A path on which all ranks agree: rank 0's."""
    agreed = [str(folder)]
    dist.broadcast_object_list(agreed, 0)
    return agreed[0]


def assert_resumed(resumed: Any, trainer: Any, whole: Any, whole_trainer: Any) -> None:
    """Check that a resumed run made the last steps of a whole one: losses, gradients, weights, optimizer states."""
    count = len(resumed.losses)
    assert 0 < count < len(whole.losses)
    whole.losses, whole.gradients = whole.losses[-count:], whole.gradients[-count:]
    common.assert_equal_runs(resumed, whole)
    for own, other in zip(trainer.optimizers, whole_trainer.optimizers, strict=True):
        own_state, other_state = own.state_dict(), other.state_dict()
        assert own_state["param_groups"] == other_state["param_groups"]
        assert own_state["state"].keys() == other_state["state"].keys()
        for key, values in own_state["state"].items():
            common.assert_equal(tensors_of(values), tensors_of(other_state["state"][key]), "optimizer state")


def tensors_of(values: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.as_tensor(value) for name, value in values.items() if value is not None}


def resumes(name: str, folder: str) -> None:
    subject = Subject(name)
    with common.run_on_rank():
        whole = Subjected(subject)
        whole_trainer = train(whole, subject.algorithm(), 3, keep_all(folder))
        resumed = Subjected(subject)
        trainer = train(resumed, subject.algorithm(), 3, keep_all(folder + "-2"), ckpt_path=f"{folder}/epoch=0.ckpt")
        assert trainer.global_step == whole_trainer.global_step == 3 * common.STEPS
        assert len(resumed.losses) == 2 * common.STEPS
        assert spread(resumed) == 0
        if not subject.runs_by_clocks:
            assert_resumed(resumed, trainer, whole, whole_trainer)


@pytest.mark.parametrize("name", of_each_kind(ALGORITHMS))
def test_every_algorithm_resumes_bit_for_bit(name, tmp_path):
    """Those that depend on clocks only continue; two of their runs differ."""
    run_ranks(resumes, 2, name, str(tmp_path / "run"))


def resumes_after_fit(name: str, folder: str) -> None:
    subject = Subject(name)
    with common.run_on_rank():
        whole = Subjected(subject)
        whole_trainer = train(whole, subject.algorithm(), 3)
        first = Subjected(subject)
        train(first, subject.algorithm(), 2).save_checkpoint(f"{folder}/after.ckpt")
        assert type(first) is Subjected
        resumed = Subjected(subject)
        trainer = train(resumed, subject.algorithm(), 3, ckpt_path=f"{folder}/after.ckpt")
        assert_resumed(resumed, trainer, whole, whole_trainer)


@pytest.mark.parametrize("name", ["allreduce", "topk", "local_sgd", pytest.param("diloco", marks=pytest.mark.slow)])
def test_what_is_saved_after_fit_resumes_as_if_fit_had_gone_on(name, tmp_path):
    """Although all ranks have the consensus by then."""
    run_ranks(resumes_after_fit, 2, name, str(tmp_path))


class KeepsOwn(pl.Callback):
    """Keeps this rank's own weights at each save, and the contents of files that it is shown."""

    def __init__(self) -> None:
        self.own: list[dict[str, Any]] = []
        self.shown: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.own.append({name: value.clone() for name, value in pl_module.state_dict().items()})
        self.shown.append(checkpoint)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.shown.append(checkpoint)


def holds_the_consensus(folder: str) -> None:
    with common.run_on_rank():
        noted = KeepsOwn()
        algorithm = commlib.algorithms.get("local_sgd")(period=100)
        train(common.Module(), algorithm, 1, keep_all(folder), noted)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, noted.own[-1])
        saved = torch.load(f"{folder}/epoch=0.ckpt", weights_only=True)
        for name, value in saved["state_dict"].items():
            assert not torch.equal(everyone[0][name], everyone[1][name])
            assert torch.equal(value, (everyone[0][name] + everyone[1][name]) / 2)
        plain = common.Module.load_from_checkpoint(f"{folder}/epoch=0.ckpt")
        common.assert_equal(dict(plain.state_dict()), saved["state_dict"])
        options = {"ckpt_path": f"{folder}/epoch=0.ckpt", "enable_checkpointing": False}
        train(common.Module(), algorithm, 2, noted, **options)
        assert len(noted.shown) == 2
        assert all(checkpoint.keys() == saved.keys() - {"commlib"} for checkpoint in noted.shown)
        dist.barrier()


def test_the_file_holds_the_consensus_and_needs_no_commlib(tmp_path):
    run_ranks(holds_the_consensus, 2, str(tmp_path))


def survives(folder: str, links: Any) -> None:
    with common.run_on_rank():
        options = {"save_top_k": 1, "monitor": "loss", "mode": "max", "save_last": links}
        whole = common.Module()
        whole_trainer = train(whole, "topk", 3, keep_all(folder))
        kept = keep_all(f"{folder}/few", **options)
        train(common.Module(), "topk", 2, kept)
        dist.barrier()
        names = sorted(path.name for path in Path(folder, "few").iterdir())
        assert names in (["epoch=0.ckpt", "last.ckpt"], ["epoch=1.ckpt", "last.ckpt"])
        moved = Path(folder, "moved.ckpt")
        if dist.get_rank() == 0:
            moved.write_bytes(Path(folder, "few", "last.ckpt").read_bytes())
        dist.barrier()
        resumed = common.Module()
        trainer = train(resumed, "topk", 3, ckpt_path=moved)
        assert_resumed(resumed, trainer, whole, whole_trainer)


@pytest.mark.parametrize("links", [True, pytest.param("link", marks=pytest.mark.slow)])
def test_files_are_removed_linked_and_moved_whole(tmp_path, links):
    run_ranks(survives, 2, str(tmp_path), links)


def weights_only(folder: str) -> None:
    with common.run_on_rank():
        path = f"{folder}/epoch=0.ckpt"
        module = common.Module()
        train(module, "local_sgd", 1, keep_all(folder, save_weights_only=True))
        saved = torch.load(path, weights_only=True)
        assert "commlib" not in saved
        common.assert_equal(saved["state_dict"], dict(module.state_dict()), "weight")  # fit ended with the consensus
        other = common.Module()
        found = common.trainer(common.strategy("local_sgd")).validate(
            other, common.loader(), ckpt_path=path, verbose=False
        )
        expected = common.trainer(common.ddp()).validate(module, common.loader(), verbose=False)
        assert found == expected
        common.assert_equal(dict(other.state_dict()), saved["state_dict"])
        with pytest.raises(KeyError, match="contains only the model"):
            train(common.Module(), "local_sgd", 2, ckpt_path=path)


def test_weights_alone_are_saved_and_validated(tmp_path):
    run_ranks(weights_only, 2, str(tmp_path))


def save_on_some_ranks(name: str, path: str) -> None:
    with common.run_on_rank():
        train(common.Module(), name, 1).save_checkpoint(path)


def load_on_other_ranks(name: str, path: str) -> float:
    with common.run_on_rank():
        module = common.Module()
        train(module, name, 2, ckpt_path=path)
        assert module.losses
        return spread(module)


def refuses_on_other_ranks(name: str, path: str) -> None:
    with common.run_on_rank(), raises_on_every_rank(commlib.ConfigError, "world"):
        train(common.Module(), name, 2, ckpt_path=path)


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_world_size_goes_on_where_the_state_is_the_same_on_all_ranks(tmp_path, world_size):
    path = str(tmp_path / "file.ckpt")
    run_ranks(save_on_some_ranks, 2, "allreduce", path)
    assert len(torch.load(path, weights_only=True)["commlib"]["ranks"]) == 1
    assert run_ranks(load_on_other_ranks, world_size, "allreduce", path) == [0] * world_size


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_world_size_is_refused_where_it_is_not(tmp_path, world_size):
    path = str(tmp_path / "file.ckpt")
    run_ranks(save_on_some_ranks, 2, "topk", path)
    assert len(torch.load(path, weights_only=True)["commlib"]["ranks"]) == 2
    run_ranks(refuses_on_other_ranks, world_size, "topk", path)


def to_and_from_ddp(folder: str) -> None:
    with common.run_on_rank():
        train(common.Module(), common.ddp(), 1, keep_all(f"{folder}/ddp"))
        train(common.Module(), "allreduce", 1, keep_all(f"{folder}/commlib"))
        runs = []
        for strategy in (common.ddp, common.strategy):
            for source in ("ddp", "commlib"):
                module = common.Module()
                with common.Warnings() as found:
                    train(module, strategy(), 2, ckpt_path=f"{folder}/{source}/epoch=0.ckpt")
                warned = dist.get_rank() == 0 and source == "ddp" and strategy is common.strategy
                assert ["no commlib state" in text for text in found] == [True] * warned
                runs.append(module)
        for other in runs[1:]:
            common.assert_equal_runs(other, runs[0])


def test_files_of_ddp_and_of_commlib_go_on_in_either(tmp_path):
    run_ranks(to_and_from_ddp, 2, str(tmp_path))


def other_algorithm(folder: str) -> None:
    with common.run_on_rank():
        train(common.Module(), "topk", 1, keep_all(folder))
        with raises_on_every_rank(commlib.ConfigError, "algorithm", "topk"):
            train(common.Module(), "bytegrad", 2, ckpt_path=f"{folder}/epoch=0.ckpt")


def test_the_state_of_another_algorithm_is_refused(tmp_path):
    run_ranks(other_algorithm, 2, str(tmp_path))


def changed_after_fit(folder: str) -> None:
    with common.run_on_rank():
        module = common.Module()
        trainer = train(module, "local_sgd", 1)
        trainer.save_checkpoint(f"{folder}/same.ckpt")
        with torch.no_grad():
            module.head.bias.zero_()
        trainer.save_checkpoint(f"{folder}/changed.ckpt")
        same, changed = (torch.load(f"{folder}/{name}.ckpt", weights_only=True) for name in ("same", "changed"))
        assert "commlib" in same
        assert "commlib" not in changed  # which would bring back each rank's weights of before
        assert not changed["state_dict"]["head.bias"].any()
        dist.barrier()


def test_weights_that_were_changed_after_fit_are_what_is_resumed(tmp_path):
    run_ranks(changed_after_fit, 2, str(tmp_path))


def two_optimizers(folder: str) -> None:
    with common.run_on_rank():
        algorithm = commlib.algorithms.get("local_sgd")(period=4)
        whole, resumed = Gan(), Gan()
        whole_trainer = train(whole, algorithm, 2, keep_all(folder))
        trainer = train(resumed, algorithm, 2, ckpt_path=f"{folder}/epoch=0.ckpt")
        assert_resumed(resumed, trainer, whole, whole_trainer)


def test_several_optimizers_resume_bit_for_bit(tmp_path):
    run_ranks(two_optimizers, 2, str(tmp_path))
