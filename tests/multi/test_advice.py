"""The advice of error messages works: each error is triggered, and its advice followed, on two ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.multi.advice import FOLLOWED, run
from tests.multi.pool import run_ranks


def follow(words: list[str]) -> None:
    for each in words:
        try:
            run(each)
        except Exception as error:
            raise AssertionError(f"the advice {each!r} ({FOLLOWED[each].__name__}): {error!r}") from error
        dist.barrier()


@pytest.mark.parametrize("part", range(4))
def test_advice_that_is_followed_works(part: int) -> None:
    run_ranks(follow, 2, list(FOLLOWED)[part::4])
