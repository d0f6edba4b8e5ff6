"""Training in Lightning: beside its own DDP bit for bit, and every algorithm."""

from __future__ import annotations

from tests.integrations import lightning_common as common
from tests.multi.pool import on_ranks


@on_ranks(2)
def test_allreduce_is_ddp_bit_for_bit():
    with common.run_on_rank():
        expected, _ = common.fit(common.Module(), common.ddp())
        got, _ = common.fit(common.Module(), common.strategy())
        common.assert_equal_runs(got, expected)
        assert type(got) is common.Module
