"""The contracts catch their faults: an algorithm with one fault breaks the contract that names it."""

from __future__ import annotations

import pytest

import commlib
from commlib.algorithms import Algorithm
from tests.contract import wrong_values
from tests.contract.contracts import CONTRACTS, hold
from tests.contract.contracts_values import CONCERNS
from tests.contract.subjects import Subject
from tests.multi.equations import compared
from tests.multi.pool import RankError, RankHang, run_ranks
from tests.thin import fast

#: By class in `wrong.py`, the contract that must catch it; on two ranks if no other number is given.
CAUGHT_BY = {
    "ForgetsItsResidual": "resume_at_any_step",
    "FollowsTheLearningRate": "falling_learning_rate",
    "KeepsWhatIsNotFinite": "nonfinite_step_without_a_scaler",
    "DrawsFromTheGlobalGenerator": "random_state",
    "AsksOnOneRankOnly": "replicas_alike",
    "KeepsStateByBucket": "change_of_plan",
    "DividesByItsFirstGroup": "other_groups",
    "LosesItsResidualWithTheGroup": "other_groups",
    "LivesInItsState": "state_dict_is_plain",
    "SavesAnObject": "state_dict_is_plain",
    "TrustsTheDefaultDtype": "default_dtype",
    "IgnoresTheScaler": "amp",
    "LooksAtTheClock": "two_runs_are_alike",
    "SharesNothing": "replicas_alike",
    "CountsTwoRanks": "accumulation_in_no_sync",
    "FillsGradients": "unused_parameters",
    "LeavesAHook": "unwrap_restores",
    "WaitsForData": "join",
    "MovesWhatIsFrozen": "frozen_layer_stays",
    "ComesBackToItsAnchor": "loaded_weights_stay",
    **wrong_values.CAUGHT_BY,
}
NUM_RANKS = {"CountsTwoRanks": 3, "DividesByItsFirstGroup": 3, "LosesItsResidualWithTheGroup": 3}
#: Sends messages that its peer does not expect; Gloo may then end the process before the contract reports.
MAY_DIE = ("AsksOnOneRankOnly",)


def name_of(cls: str) -> str:
    module = "wrong_values" if cls in wrong_values.CAUGHT_BY else "wrong"
    return f"tests.contract.{module}:{cls}"


@pytest.mark.parametrize("cls", CAUGHT_BY)
def test_a_wrong_algorithm_breaks_the_contract(cls: str) -> None:
    contract = CAUGHT_BY[cls]
    words = f"breaks the contract '{contract}'" + ("|died with exit code -6" if cls in MAY_DIE else "")
    words += r" on ranks [^:]*: \[.AssertionError" if cls in wrong_values.CAUGHT_BY else ""
    with pytest.raises((RankError, RankHang), match=words):
        run_ranks(hold, NUM_RANKS.get(cls, 2), name_of(cls), contract)


@pytest.mark.parametrize("cls", fast(["Careful", "CarefulWeights"], "Careful"))
def test_a_right_algorithm_keeps_the_contracts_that_wrong_ones_break(cls: str) -> None:
    broken = {contract for name, contract in CAUGHT_BY.items() if name not in wrong_values.CAUGHT_BY}
    run_ranks(hold, 2, name_of(cls), *sorted(broken))


@pytest.mark.slow
@pytest.mark.parametrize("cls", ["Careful", "CarefulWeights"])
def test_a_right_algorithm_keeps_every_contract(cls: str) -> None:
    run_ranks(hold, 2, name_of(cls), *CONTRACTS)


@pytest.mark.parametrize(("cls", "contract"), [(cls, name) for cls, name in wrong_values.CLASSES.items()])
def test_what_wrong_values_are_derived_from_keeps_the_contract(cls: type[Algorithm], contract: str) -> None:
    run_ranks(hold, 2, f"{cls.__module__}:{cls.__name__}", contract)


def test_every_class_has_wrong_algorithms_and_every_algorithm_a_class() -> None:
    assert set(wrong_values.CLASSES.values()) == set(CONCERNS)
    for name in commlib.algorithms.list():
        held = [contract for contract, concerned in CONCERNS.items() if concerned(Subject(name))]
        assert held, f"no contract about values concerns {name}"


def test_every_algorithm_that_repeats_itself_is_compared_with_its_equations() -> None:
    """If gradients are exact, the contract compares them itself; algorithms that depend on clocks have no equations."""
    found = compared()
    for name in commlib.algorithms.list():
        subject = Subject(name)
        is_compared = subject.is_exact or subject.runs_by_clocks or subject.cls in found
        assert is_compared, f"no test compares {name} with its paper (tests.multi.equations)"
