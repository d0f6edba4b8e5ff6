"""Lightning outside of training steps: evaluation, several fits, ends and failures, options, statistics, launchers."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import commlib
from commlib.replica import find
from tests.contract.subjects import gathered, spread
from tests.integrations import lightning_common as common
from tests.integrations.lightning_common import pl
from tests.integrations.test_lightning import Manual
from tests.multi.common import raises_on_every_rank, tensors
from tests.multi.pool import on_ranks, run_ranks

# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluated(strategy: Any) -> tuple[Any, ...]:
    """Fit with validation, then validate, test and predict; return all results."""
    module = common.Module()
    trainer = common.trainer(strategy, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module, common.loader(), common.loader())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    data = common.loader()
    results = [getattr(trainer, stage)(module, data, verbose=False) for stage in ("validate", "test")]
    assert find(module) is None
    predictions = trainer.predict(module, data)
    return module, metrics, results, predictions


@on_ranks(2)
def test_validation_test_and_prediction_are_ddps():
    with common.run_on_rank():
        expected, metrics, results, predictions = evaluated(common.ddp())
        got = evaluated(common.strategy())
        common.assert_equal_runs(got[0], expected)
        assert got[1:3] == (metrics, results)
        assert len(predictions) == common.STEPS
        assert all(map(torch.equal, got[3], predictions))


@on_ranks(2)
def test_stages_without_fit_begin_with_rank_0s_weights():
    with common.run_on_rank():
        modules = [common.Module() for _ in range(2)]
        runs = [
            common.trainer(strategy).test(module, common.loader(), verbose=False)
            for strategy, module in zip((common.ddp(), common.strategy("local_sgd")), modules, strict=True)
        ]
        assert runs[0] == runs[1]
        common.assert_equal(tensors(modules[1]), tensors(modules[0]))


# --- several fits, and their ends -------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_second_fit_goes_on_from_the_first_as_ddps_does():
    with common.run_on_rank():
        runs = []
        for strategy in (common.ddp(), common.strategy()):
            module, trainer = common.fit(common.Module(), strategy)
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, common.loader())
            assert len(module.losses) == 2 * common.STEPS
            runs.append(module)
        common.assert_equal_runs(runs[1], runs[0])


class Looks(pl.Callback):
    """Notes whether replicas differ in the last epoch, and when fit has ended."""

    def __init__(self) -> None:
        self.spreads: dict[str, float] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert isinstance(trainer.model, common.Module)
        self.spreads["train end"] = spread(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        assert find(pl_module) is None
        self.spreads["fit end"] = spread(pl_module)


@on_ranks(2)
def test_after_fit_the_module_is_as_it_was_and_holds_the_consensus():
    with common.run_on_rank():
        looks, module = Looks(), common.Module()
        of_ddp, _ = common.fit(common.Module(), common.ddp())
        algorithm = commlib.algorithms.get("local_sgd")(period=100)
        _, trainer = common.fit(module, common.strategy(algorithm), callbacks=[looks])
        assert looks.spreads["train end"] > 0
        assert looks.spreads["fit end"] == 0
        assert type(module) is common.Module
        left = vars(module).keys() ^ (vars(of_ddp).keys() - {"forward"})  # DDP leaves one
        assert not left, left
        optimizer = trainer.optimizers[0]
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        reference = weakref.ref(module)
        del module, trainer, optimizer, looks, _
        gc.collect()
        assert reference() is None, "something of commlib's keeps the module"


def leave() -> None:
    """Destroy the default group, as at process exit: before every batch Lightning asks rank 0 in it for SIGTERM."""
    dist.destroy_process_group()


class Failing(common.Module):
    """Raises in the third step of one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and dist.get_rank() == 1:
            raise RuntimeError("as the test wants it")
        return super().training_step(batch, batch_idx)


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("algorithm", ["allreduce", "decentralized"])
def test_a_rank_that_fails_is_an_error_on_the_others_and_the_module_is_unwrapped(algorithm):
    with common.run_on_rank():
        module = Failing()
        kinds = (RuntimeError,) if dist.get_rank() == 1 else (commlib.PeerFailure,)
        with pytest.raises(kinds, match="as the test wants it" if dist.get_rank() == 1 else "rank 1"):
            common.fit(module, common.strategy(algorithm))
        leave()
        assert find(module) is None
        assert type(module) is Failing


# --- gradients that stay ----------------------------------------------------------------------------------------------


class CountsRounds(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.rounds = commlib.stats(pl_module).rounds


@on_ranks(2)
@pytest.mark.parametrize(("batches", "expected"), [(1, common.STEPS), (2, 3), (5, 1)])
def test_accumulated_batches_communicate_once(batches, expected):
    with common.run_on_rank():
        counts = CountsRounds()
        common.fit(common.Module(), common.strategy(), accumulate_grad_batches=batches, callbacks=[counts])
        assert counts.rounds == expected


# --- batch norm, uneven data, compilation -----------------------------------------------------------------------------


class Normed(common.Module):
    """Has a batch norm, which is in evaluation while it trains: torch has no synchronised one for the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.kinds: list[type] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.norm.eval()
        return super().forward(self.norm(inputs))

    def on_train_start(self) -> None:
        self.kinds.append(type(self.norm))


@on_ranks(2)
def test_batch_norms_are_made_synchronised_and_back():
    with common.run_on_rank():
        with pytest.raises(ValueError, match="SyncBatchNorm"):  # DDP refuses them on the CPU
            common.fit(Normed(), common.ddp(), sync_batchnorm=True)
        expected, _ = common.fit(Normed(), common.ddp())
        got, _ = common.fit(Normed(), common.strategy(), sync_batchnorm=True)
        common.assert_equal_runs(got, expected)
        assert got.kinds == [nn.SyncBatchNorm]
        assert not isinstance(got.norm, nn.SyncBatchNorm)


class TrainedNorm(Normed):
    """Its batch norm really trains: ranks have statistics of their own until rank 0's are everyone's."""

    def forward(self, inputs: Tensor) -> Tensor:
        return common.Module.forward(self, self.norm(inputs))


@on_ranks(2)
def test_statistics_of_batch_norms_are_rank_0s_as_under_ddp():
    """DDP copies them before the next forward, commlib at the end of backward: after both, validation sees the same."""
    with common.run_on_rank():
        runs = []
        for strategy in (common.ddp(), common.strategy()):
            module = TrainedNorm()
            trainer = common.trainer(strategy)
            trainer.fit(module, common.loader())
            runs.append(module)
        common.assert_equal(dict(runs[1].named_parameters()), dict(runs[0].named_parameters()))
        dist.broadcast(runs[0].norm.running_mean, 0)
        dist.broadcast(runs[0].norm.running_var, 0)
        common.assert_equal(dict(runs[1].named_buffers()), dict(runs[0].named_buffers()))


def uneven_loader() -> DataLoader[Any]:
    """Rank 1 has two batches less."""
    return DataLoader(common.Data(20 - 8 * dist.get_rank()), batch_size=4)


@on_ranks(2, timeout=40)
def test_a_rank_that_runs_out_of_data_is_named_at_once():
    """Lightning's DDP waits until the process group's timeout, and names no rank."""
    with common.run_on_rank():
        options = {"data": uneven_loader(), "use_distributed_sampler": False}
        is_longer = dist.get_rank() == 0
        with pytest.raises(commlib.TransportError, match="rank 1") if is_longer else contextlib.nullcontext():
            common.fit(common.Module(), common.strategy(), **options)
        leave()


class Compiled(common.Module):
    """Logs nothing in its `training_step`: torch 2.13 cannot compile Lightning's `log`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].clone())


@on_ranks(2)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_module_trains_as_under_ddp(backend):
    with common.run_on_rank():
        runs = []
        for strategy in (common.ddp(), common.strategy()):
            module = Compiled()
            common.fit(torch.compile(module, backend=backend), strategy)
            assert type(module) is Compiled
            runs.append(module)
        common.assert_equal_runs(runs[1], runs[0])


# --- bad input --------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_unknown_algorithms_and_options_are_named():
    for name, options, words in (
        ("topkk", {}, "topkk"),
        ("topk", {"find_unused_parameters": True}, "find_unused_parameters.*commlib.wrap.*unannounced"),
        ("topk", {"optimizer": None}, "optimizer"),
        ("topk", {"ratio": 0.1}, "ratio"),
    ):
        with pytest.raises(commlib.ConfigError, match=words):
            common.CommlibStrategy(name, **options)
    with pytest.raises(ValueError, match="commlib_topkk"):
        pl.Trainer(strategy="commlib_topkk", accelerator="cpu", devices=2, logger=False)


@on_ranks(1)
def test_every_algorithm_is_a_registered_strategy():
    from lightning.pytorch.strategies import StrategyRegistry

    for name in commlib.algorithms.list():
        found = StrategyRegistry.get(f"commlib_{name}")
        assert isinstance(found, common.CommlibStrategy)
        assert found.algorithm == name


class NoOptimizer(common.Module):
    def configure_optimizers(self) -> None:
        return None


class OptimizerOfNothing(common.Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


class StepsUnseen(Manual):
    """Makes steps with an optimizer that Lightning does not know."""

    def configure_optimizers(self) -> Any:
        self.unseen = torch.optim.SGD(self.parameters(), lr=0.1)
        return []

    def optimizers(self, *_: Any, **__: Any) -> Any:
        self.on_before_optimizer_step(None)
        return self.unseen


class NothingTrained(NoOptimizer, Manual):
    """Has only parameters that need no gradient, which DDP refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.losses.append(self.loss_of(batch))


@on_ranks(2)
def test_a_module_without_optimizers_is_trained_as_by_ddp():
    with common.run_on_rank(), common.Warnings() as warned:
        for kind in (NoOptimizer, StepsUnseen):
            expected, _ = common.fit(kind(), common.ddp())
            for name in ("allreduce", "topk", "diloco"):
                got, _ = common.fit(kind(), common.strategy(name))
                common.assert_equal_runs(got, expected)
        module, _ = common.fit(NothingTrained(), common.strategy("diloco"))
        assert len(module.losses) == common.STEPS
    told = [f"{kind}.configure_optimizers returned no" for kind in ("NoOptimizer", "StepsUnseen") for _ in range(2)]
    assert [text[: len(told[0])] for text in warned] == (told if dist.get_rank() == 0 else [])


@on_ranks(2)
def test_an_optimizer_of_other_parameters_is_refused():
    name = OptimizerOfNothing.__name__
    with common.run_on_rank(), raises_on_every_rank(commlib.ConfigError, "configure_optimizers", name):
        common.fit(OptimizerOfNothing(), common.strategy())


@on_ranks(2)
def test_options_go_to_wrap():
    with common.run_on_rank(), raises_on_every_rank(commlib.ConfigError, "unannounced", "'never'"):
        common.fit(common.Module(), common.strategy(unannounced="never"))
    with common.run_on_rank():
        module = common.Module()
        ignored = common.strategy("local_sgd", ignored_parameters=["head.bias"], init_sync=False)
        common.fit(module, ignored)
        assert len({tuple(values) for values in gathered(module.head.bias.tolist())}) == 2
        assert len({tuple(values) for values in gathered(module.head.weight[0].tolist())}) == 1


class OtherShape(common.Module):
    """Rank 1's head has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 4, bias=dist.get_rank() == 0)


@on_ranks(2)
def test_a_module_that_differs_between_ranks_is_named():
    with common.run_on_rank(), raises_on_every_rank(commlib.ConfigError, "head.bias"):
        common.fit(OtherShape(), common.strategy())


class KeepsACopy(torch.optim.SGD):
    """Copies the weights when it is made."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]


class Keeps(common.Module):
    def configure_optimizers(self) -> Any:
        return KeepsACopy(self.parameters())


@on_ranks(2)
def test_optimizers_are_made_of_rank_0s_weights():
    with common.run_on_rank():
        _, trainer = common.fit(Keeps(), common.strategy())
        kept = [value.tolist() for value in trainer.optimizers[0].kept]
        assert gathered(kept) == [kept, kept]


class LogsFigures(pl.Callback):
    """Logs statistics as the documents show for any tracker."""

    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.figures.append(commlib.stats(pl_module).as_dict())


@on_ranks(1)
def test_one_process_trains_as_ddp_does():
    with common.run_on_rank():
        expected, _ = common.fit(common.Module(), common.ddp())
        for name in ("allreduce", "local_sgd"):
            logs = LogsFigures()
            got, _ = common.fit(common.Module(), f"commlib_{name}", callbacks=[logs])
            common.assert_equal_runs(got, expected)
            steps = got.trainer.global_step
            assert [each["wire_bytes"] for each in logs.figures] == [0] * steps
            assert {each["world_size"] for each in logs.figures} == {1}


@on_ranks(1)
def test_devices_of_other_kinds_are_refused():
    with common.run_on_rank():
        strategy = common.CommlibStrategy("topk", parallel_devices=[torch.device("meta")])
        with pytest.raises(commlib.ConfigError, match="'cpu' or 'cuda'.*'meta'"):
            common.fit(common.Module(), strategy)


# --- statistics -------------------------------------------------------------------------------------------------------


def logs_statistics(folder: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with common.run_on_rank():
        logger = pl.loggers.TensorBoardLogger(folder, name="run", version="1")
        callback = common.StatsCallback(every_n_steps=2)
        options = {"callbacks": [callback], "logger": logger, "max_epochs": 2, "log_every_n_steps": 100}
        _, trainer = common.fit(common.Module(), common.strategy("bytegrad"), **options)
        assert trainer.global_step == 10
        if dist.get_rank() == 0:
            found = EventAccumulator(f"{folder}/run/1").Reload()
            rounds = [(event.step, event.value) for event in found.Scalars("comm/rounds")]
            assert rounds == [(step, step) for step in (2, 4, 6, 8, 10)]
            sent = [event.value for event in found.Scalars("comm/wire_bytes")]
            assert 0 < sent[0] < sent[-1]


@pytest.mark.filterwarnings("ignore")
def test_statistics_are_in_tensorboards_file(tmp_path):
    run_ranks(logs_statistics, 2, str(tmp_path))


class WrapsItself(common.Module):
    """Wraps one of its submodules, for a strategy without commlib."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        commlib.wrap(self.head, "bytegrad", optimizer=torch.optim.SGD(self.head.parameters(), lr=0.1))
        return optimizer


class Remembers(pl.loggers.Logger):
    """A logger that keeps its inputs."""

    name, version = "test", "1"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, metrics))


@on_ranks(2)
def test_statistics_work_without_the_strategy_and_refuse_a_model_that_is_not_wrapped():
    with common.run_on_rank():
        logger = Remembers()
        options = {"logger": logger, "devices": 1}
        callback = common.StatsCallback(every_n_steps=5, prefix="c.")
        with _single_process():
            module, _ = common.fit(WrapsItself(), "auto", callbacks=[callback], **options)
        rows = [(step, row) for step, row in logger.rows if any(name.startswith("c.") for name in row)]
        assert [(step, row["c.rounds"]) for step, row in rows] == [(5, 5), (10, 10)]
        commlib.unwrap(module.head)
        with pytest.raises(commlib.ConfigError, match="StatsCallback"), _single_process():
            common.fit(common.Module(), "auto", callbacks=[callback], **options)
    with pytest.raises(commlib.ConfigError, match="every_n_steps"):
        common.StatsCallback(every_n_steps=0)


@contextlib.contextmanager
def _single_process() -> Iterator[None]:
    """An environment in which Lightning sees one process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_RANK"):
            patch.delenv(name, raising=False)
        yield
