"""The algorithm that docs/how-to/write-an-algorithm.md makes: the page shows the file, and it keeps every contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import worked
from tests.contract.contracts import CONTRACTS, hold
from tests.contract.test_algorithms import OWN
from tests.multi.pool import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-an-algorithm.md"


def test_the_page_shows_the_file() -> None:
    source = Path(worked.__file__).read_text(encoding="utf-8").partition("\n\n")[2]
    assert f"```python\n{source}```" in PAGE.read_text(encoding="utf-8")


def test_it_keeps_contracts_of_its_own_code() -> None:
    run_ranks(hold, 2, "tests.contract.worked:RoundedFeedback", *OWN)


@pytest.mark.slow
@pytest.mark.parametrize("contract", CONTRACTS)
def test_it_keeps_the_contract(contract: str) -> None:
    run_ranks(hold, 2, "tests.contract.worked:RoundedFeedback", contract)
