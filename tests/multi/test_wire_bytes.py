"""What algorithms send, by the counters of emulated hosts, against the formulas of docs/reference/algorithms.md."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from commlib.emulation import EmulatedCluster
from tests.loopback import MISSING
from tests.multi.wire_bytes_script import ALGORITHMS, LAYERS, WIDTH

_ROOT = Path(__file__).parents[2]
N = 4
MATRICES, VECTORS = LAYERS * WIDTH**2, LAYERS * WIDTH

# Bits per element of the block codecs, scales included: docs/reference/wire_format.md.
INT8, INT4, ONE_BIT = 8 + 16 / 256, 4 + 16 / 128, 1 + 16 / 512
RING = 2 * (N - 1) / N
PLAIN_VECTORS = RING * 4 * VECTORS

#: By algorithm: the bytes of a step by the formula, and its collectives. The vectors are a bucket of their own where
#: they are not compressed; the engine's flags travel by themselves except with `allreduce`.
EXPECTED: dict[str, tuple[float, dict[str, int]]] = {
    "allreduce": (RING * 4 * (MATRICES + VECTORS), {"all_reduce": 1}),
    "bytegrad": (RING * INT8 / 8 * (MATRICES + VECTORS), {"all_to_all": 1, "all_gather": 1, "flags": 1}),
    "qsgd": (RING * INT4 / 8 * (MATRICES + VECTORS), {"all_to_all": 1, "all_gather": 1, "flags": 1}),
    "ef_quantized": (
        RING * INT4 / 8 * MATRICES + PLAIN_VECTORS,
        {"all_to_all": 1, "all_gather": 1, "all_reduce": 1, "flags": 1},
    ),
    "signsgd": (
        RING * ONE_BIT / 8 * MATRICES + PLAIN_VECTORS,
        {"all_to_all": 1, "all_gather": 1, "all_reduce": 1, "flags": 1},
    ),
    "topk": ((N - 1) * 8 * 0.01 * MATRICES + PLAIN_VECTORS, {"all_gather": 1, "all_reduce": 1, "flags": 1}),
    "randomk": (RING * 4 * 0.01 * MATRICES + PLAIN_VECTORS, {"all_reduce": 2, "flags": 1}),
    "dgc": ((N - 1) * 8 * 0.01 * MATRICES + PLAIN_VECTORS, {"all_gather": 1, "all_reduce": 1, "flags": 1}),
    "demo": ((N - 1) * 4 * 32 * (MATRICES / 64**2 + VECTORS / 64), {"all_gather": 1, "flags": 1}),
    "ok_topk": (
        RING * 3 * 4 * 0.01 * MATRICES + PLAIN_VECTORS,
        {"all_to_all": 1, "all_gather": 1, "all_reduce": 1, "flags": 1},
    ),
    "powersgd": (RING * 4 * 2 * LAYERS * 2 * WIDTH + PLAIN_VECTORS, {"all_reduce": 3, "flags": 1}),
    "onebit_adam": (
        RING * ONE_BIT / 8 * MATRICES + PLAIN_VECTORS,
        {"all_to_all": 1, "all_gather": 1, "all_reduce": 1, "flags": 1},
    ),
    "sparse_loco": ((N - 1) * (64 * (12 + 2) / 8 + 4) / 4096 * (MATRICES + VECTORS), {"all_gather": 1}),
    "qadam": (RING * INT8 / 8 * (MATRICES + VECTORS), {"all_to_all": 1, "all_gather": 1, "flags": 1}),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    env = {"PYTHONPATH": os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", ""))), "OMP_NUM_THREADS": "1"}
    with EmulatedCluster(hosts=N) as cluster:
        results = cluster.run([sys.executable, "-m", "tests.multi.wire_bytes_script"], env=env, timeout=150)
    return json.loads(results[0].output.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason="emulated hosts need " + "; ".join(MISSING))
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_bytes_on_the_wire_are_those_of_the_formula(measured: dict[str, Any], name: str) -> None:
    """Within 3 % of the formula plus the overhead of that many collectives, which is measured at another size."""
    formula, collectives = EXPECTED[name]
    messages = sum(count * measured["messages"][verb] for verb, count in collectives.items())
    own = measured["algorithms"][name]
    assert own["reported"] == pytest.approx(formula, rel=0.01), "commlib.stats"
    assert own["counted"] == pytest.approx(formula + messages, rel=0.03), f"messages cost {messages:.0f} of these"
