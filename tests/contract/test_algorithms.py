"""Every registered algorithm is held to every contract."""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet

import commlib
from tests.contract.contracts import CONTRACTS, hold, hold_each
from tests.contract.contracts_values import CONCERNS
from tests.contract.subjects import REPRESENTATIVES, Subject
from tests.contract.variants import NODES
from tests.multi.pool import run_ranks

ALGORITHMS = commlib.algorithms.list()

#: Those that are held to each contract in the fast part: one of each kind of channel, and of gradients also one that is
#: exact and one that goes over to another channel after its warm-up.
FAST = ("allreduce", "onebit_adam", *REPRESENTATIVES.values())
#: One algorithm of each family, for groups of other sizes.
FAMILIES = (
    *("allreduce", "bytegrad", "topk", "powersgd", "onebit_adam", "local_sgd", "diloco", "decentralized"),
    *("async_averaging", "async_sgd"),
)
#: Contracts about results of the algorithm's own code: the fast part checks them for all algorithms.
OWN = (
    *("replicas_alike", "nonfinite_step_without_a_scaler", "change_of_plan", "state_dict_is_plain", "join"),
    "falling_learning_rate",
    *CONCERNS,
)
#: The costliest of these: in the fast part, one algorithm of each family is held to it.
RESUME = "resume_at_any_step"
#: Set-up with other groups: all algorithms are held to it, on 5 ranks.
GROUPS = "other_groups"
#: Contracts that depend on the number of ranks, and are quick.
QUICK = (
    *(*OWN, RESUME),
    *("synchronize", "accumulation_in_no_sync", "unused_parameters", "buffers", "rounds_and_steps"),
    "leaving_after_the_last_step",
)
#: How many contracts one job of several ranks is held to.
_AT_ONCE = 16


def pairs() -> list[ParameterSet]:
    """Return every algorithm with every contract that concerns it; another package's are all in the fast part."""
    found = []
    for algorithm in ALGORITHMS:
        subject = Subject(algorithm)
        is_foreign = not subject.cls.__module__.startswith("commlib.")
        marks = () if algorithm in FAST or is_foreign else pytest.mark.slow
        for contract in CONTRACTS:
            if contract not in CONCERNS or CONCERNS[contract](subject):
                found.append(pytest.param(algorithm, contract, marks=marks, id=f"{algorithm}-{contract}"))
    return found


@pytest.mark.parametrize(("algorithm", "contract"), pairs())
def test_two_ranks(algorithm: str, contract: str) -> None:
    run_ranks(hold, 2, algorithm, contract)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in (*FAST, "auto")])
def test_own_contracts_on_two_ranks(algorithm: str) -> None:
    """Not `auto`, which measures for seconds before it is another one of them."""
    run_ranks(hold, 2, algorithm, *OWN, *([RESUME] if algorithm in FAMILIES else []))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in (*FAST, *FAMILIES, "auto")])
def test_resume_on_two_ranks(algorithm: str) -> None:
    run_ranks(hold, 2, algorithm, RESUME)


#: Options of algorithms (`tests.contract.variants`), and whether each is a slow test: its relatives are not.
VARIANTS = {
    "EF21TopK": False,
    "EF21Quantized": True,
    "SparseDiLoCo": False,
    "EF21RandomK": True,
    "EF21SignSGD": True,
    "SparseStreamingDiLoCo": True,
    "BalancedSparseLoCo": True,
}


@pytest.mark.parametrize(
    "names",
    [
        *(ALGORITHMS[::2], ALGORITHMS[1::2]),
        [f"tests.contract.variants:{name}" for name in (*VARIANTS, *NODES)],  # 4 ranks are on two nodes
    ],
)
def test_other_groups(names: list[str]) -> None:
    """All algorithms on 4, then 3, then 5 ranks; in few jobs, as each is short."""
    run_ranks(hold_each, 5, names, GROUPS)


@pytest.mark.parametrize("cls", [name for name, is_slow in VARIANTS.items() if not is_slow])
def test_own_contracts_of_options(cls: str) -> None:
    run_ranks(hold, 2, f"tests.contract.variants:{cls}", *OWN, RESUME)


@pytest.mark.slow
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("cls", VARIANTS)
def test_options_on_two_ranks(cls: str, contract: str) -> None:
    run_ranks(hold, 2, f"tests.contract.variants:{cls}", contract)


@pytest.mark.parametrize(
    ("algorithm", "world_size"),
    [pytest.param(name, 3, marks=() if name in REPRESENTATIVES.values() else pytest.mark.slow) for name in FAMILIES]
    + [pytest.param(name, 1, marks=() if name in REPRESENTATIVES.values() else pytest.mark.slow) for name in FAMILIES],
)
def test_other_numbers_of_ranks(algorithm: str, world_size: int) -> None:
    run_ranks(hold, world_size, algorithm, *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3, 5])
@pytest.mark.parametrize("algorithm", FAMILIES)
def test_all_contracts_on_other_numbers_of_ranks(algorithm: str, world_size: int) -> None:
    names = list(CONTRACTS)
    for first in range(0, len(names), _AT_ONCE):  # the time limit is that of one job
        run_ranks(hold, world_size, algorithm, *names[first : first + _AT_ONCE])


def test_kinds_have_representatives() -> None:
    kinds = {name: type(Subject(name).channel).__name__ for name in ALGORITHMS}
    assert {kinds[name]: name for name in REPRESENTATIVES.values()} == REPRESENTATIVES
    assert set(kinds.values()) == set(REPRESENTATIVES), "a kind of channel is not in REPRESENTATIVES"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_limits_name_contracts_and_reasons(algorithm: str) -> None:
    limits = Subject(algorithm).limits
    assert set(limits) <= set(CONTRACTS), "a limit is the name of a contract"
    assert all(len(reason) > 10 for reason in limits.values()), "say why"
