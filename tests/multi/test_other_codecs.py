"""Another package's codec in every algorithm that takes one, and its algorithm in all contracts."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import commlib
from commlib.algorithms import Algorithm
from commlib.codecs import BlockCodec, block_codec
from tests import plugins
from tests.contract.contracts import CONTRACTS, hold
from tests.contract.subjects import Subject, of_each_kind, settings_of
from tests.multi.pool import run_ranks

TAKERS = [
    name for name in commlib.algorithms.list() if "codec" in inspect.signature(commlib.algorithms.get(name)).parameters
]


class WithCodec(Subject):
    """An algorithm with a codec that is given to it."""

    def __init__(self, name: str, codec: BlockCodec | str) -> None:
        self.codec = codec
        super().__init__(name)

    def algorithm(self) -> Algorithm:
        return self.cls(**settings_of(self.cls), codec=self.codec)  # type: ignore[call-arg]


def train_with(name: str, folder: str) -> None:
    """Train with the codec by its name, then with an object of it, and with the sparse one where such are taken."""
    takes_sparse = "SparseCodec" in str(inspect.signature(commlib.algorithms.get(name)).parameters["codec"].annotation)
    with plugins.on_path(folder):
        for codec in ("byte64", block_codec("byte64"), *(["top16"] if takes_sparse else [])):
            subject = WithCodec(name, codec)
            training = subject.start().steps(5)
            training.assert_sound()
            training.assert_trains_on()
            subject.release()


def hold_with(folder: str, algorithm: str, *names: str) -> None:
    """Hold the package's algorithm to contracts."""
    with plugins.on_path(folder):
        hold(algorithm, *names)


def test_there_are_algorithms_that_take_a_codec() -> None:
    assert {"bytegrad", "diloco", "gossip", "async_sgd"} <= set(TAKERS)


@pytest.mark.parametrize("name", of_each_kind(TAKERS))
def test_every_algorithm_with_a_codec_trains_with_another_packages(name: str, tmp_path: Path) -> None:
    run_ranks(train_with, 2, name, str(plugins.install_relaxed(tmp_path / "relaxed")))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_another_packages_algorithm_keeps_all_contracts(part: int, tmp_path: Path) -> None:
    folder = plugins.install_relaxed(tmp_path / "relaxed")
    run_ranks(hold_with, 2, str(folder), "relaxed_mean", *sorted(CONTRACTS)[part::3])


def test_another_packages_algorithm_on_three_ranks(tmp_path: Path) -> None:
    folder = plugins.install_relaxed(tmp_path / "relaxed")
    names = ("replicas_alike", "change_of_plan", "join", "resume_at_any_step", "nonfinite_step_without_a_scaler")
    run_ranks(hold_with, 3, str(folder), "relaxed_mean", *names)
