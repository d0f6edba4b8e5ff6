"""Every registered algorithm is held to every contract."""

from __future__ import annotations

import pytest

import commlib
from tests.contract.contracts import CONTRACTS, hold
from tests.multi.pool import run_ranks


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("algorithm", commlib.algorithms.list())
def test_contract(algorithm: str, contract: str) -> None:
    run_ranks(hold, 2, algorithm, contract)
