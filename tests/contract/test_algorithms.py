"""Every registered algorithm is held to every contract."""

from __future__ import annotations

import itertools

import pytest
from _pytest.mark.structures import ParameterSet

import commlib
from tests.contract.contracts import CONTRACTS, hold
from tests.contract.contracts_values import CONCERNS
from tests.contract.subjects import SIBLINGS, Subject
from tests.multi.pool import run_ranks

ALGORITHMS = commlib.algorithms.list()

#: One algorithm of each family, for groups of other sizes.
FAMILIES = (
    *("allreduce", "bytegrad", "topk", "powersgd", "onebit_adam", "local_sgd", "diloco", "decentralized"),
    *("async_averaging", "async_sgd"),
)
#: Contracts whose promise depends on the number of ranks, and which are quick.
QUICK = (
    *("replicas_alike", "synchronize", "accumulation_in_no_sync", "nonfinite_step_without_a_scaler", "change_of_plan"),
    *("unused_parameters", "buffers", "rounds_and_steps", "state_dict_is_plain", "join"),
    "leaving_after_the_last_step",
    *CONCERNS,
)

#: What the engine alone promises: slow tests for siblings.
OF_THE_ENGINE = (
    *("autocast", "clip_grad_norm", "closure", "copies", "failed_backward_before_any_communication"),
    "hooks_on_gradients",
    *("failed_backward_in_no_sync", "local_evaluation", "optimizer_list", "optimizer_proxy", "own_buffers"),
    *("unwrap_restores", "leaving_after_the_last_step", "collected_within_a_lock", "an_end_starts_no_thread"),
)


def pairs() -> list[ParameterSet]:
    """Return every algorithm with every contract; a new algorithm is held to all of them in the fast part."""
    found = []
    for algorithm, contract in itertools.product(ALGORITHMS, CONTRACTS):
        if contract in CONCERNS and not CONCERNS[contract](Subject(algorithm)):
            continue
        is_slow = Subject(algorithm).measures_first and contract not in QUICK
        is_slow |= algorithm in SIBLINGS and contract in OF_THE_ENGINE
        marks = [pytest.mark.slow] if is_slow else []
        found.append(pytest.param(algorithm, contract, marks=marks, id=f"{algorithm}-{contract}"))
    return found


@pytest.mark.parametrize(("algorithm", "contract"), pairs())
def test_two_ranks(algorithm: str, contract: str) -> None:
    run_ranks(hold, 2, algorithm, contract)


#: Options of algorithms (`tests.contract.variants`), and whether each is a slow test: its relatives are not.
VARIANTS = {
    "EF21TopK": False,
    "EF21Quantized": False,
    "SparseDiLoCo": False,
    "EF21RandomK": True,
    "EF21SignSGD": True,
    "SparseStreamingDiLoCo": True,
    "BalancedSparseLoCo": True,
}


@pytest.mark.parametrize("contract", [name for name in CONTRACTS if name not in OF_THE_ENGINE])
@pytest.mark.parametrize(
    "cls", [pytest.param(c, marks=pytest.mark.slow if slow else ()) for c, slow in VARIANTS.items()]
)
def test_options_on_two_ranks(cls: str, contract: str) -> None:
    run_ranks(hold, 2, f"tests.contract.variants:{cls}", contract)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("algorithm", FAMILIES)
def test_other_numbers_of_ranks(algorithm: str, world_size: int) -> None:
    run_ranks(hold, world_size, algorithm, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3, 5])
@pytest.mark.parametrize("algorithm", FAMILIES)
def test_all_contracts_on_other_numbers_of_ranks(algorithm: str, world_size: int) -> None:
    run_ranks(hold, world_size, algorithm, *CONTRACTS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_limits_name_contracts_and_reasons(algorithm: str) -> None:
    limits = Subject(algorithm).limits
    assert set(limits) <= set(CONTRACTS), "a limit is the name of a contract"
    assert all(len(reason) > 10 for reason in limits.values()), "say why"
