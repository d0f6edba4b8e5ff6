"""EF21-SGDM in place of error feedback, against a NumPy reference that keeps what the paper keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from commlib.algorithms import Algorithm, CompressionPolicy, EFQuantized, RandomK, SignSGD, TopK
from commlib.kernels import reference_ops
from commlib.kernels.reference import BLOCK_CODECS, Stream
from tests.multi.pool import on_ranks
from tests.multi.relaxation_references import EF21Reference, Floats
from tests.multi.test_relaxations import EVERYTHING, check, numels


def chosen(choose: Callable[[Floats, int, int], Any]) -> Callable[[Floats, int, int], Floats]:
    def compress(v: Floats, step: int, bucket: int) -> Floats:
        sent = np.zeros_like(v)
        indices = choose(v, step, bucket)
        sent[indices] = v[indices]
        return sent

    return compress


def top_k(v: Floats, step: int, bucket: int) -> Any:
    return reference_ops.top_k(v, max(1, round(0.1 * len(v))))


def random_k(v: Floats, step: int, bucket: int) -> Any:
    return reference_ops.random_k(len(v), max(1, round(0.1 * len(v))), Stream(11, step, 0, bucket))


def by_chunks(name: str) -> Callable[[Floats, int, int], Floats]:
    """Compress as two stages do: a chunk for each rank."""
    codec = BLOCK_CODECS[name]

    def compress(v: Floats, step: int, bucket: int) -> Floats:
        chunk = -(-len(v) // (dist.get_world_size() * 16)) * 16
        pieces = [v[begin : begin + chunk] for begin in range(0, len(v), chunk)]
        return np.concatenate([codec.decode(codec.encode(piece, None), len(piece)) for piece in pieces])

    return compress


def is_matrix(names: Sequence[str]) -> bool:
    return all(name.endswith("weight") for name in names)


# The algorithm, how the reference compresses, and its other options.
CASES: dict[str, tuple[Callable[[], Algorithm], Callable[[Floats, int, int], Floats], dict[str, Any]]] = {
    "topk": (lambda: TopK(0.1, compress=EVERYTHING, ef21=0.2), chosen(top_k), {"weight": 0.2}),
    "topk without momentum": (lambda: TopK(0.1, compress=EVERYTHING, ef21=1.0), chosen(top_k), {"weight": 1.0}),
    "topk of matrices": (
        lambda: TopK(0.1, compress=CompressionPolicy(min_dims=2), ef21=0.2),
        chosen(top_k),
        {"weight": 0.2, "is_sent": is_matrix},
    ),
    "randomk": (lambda: RandomK(0.1, seed=11, compress=EVERYTHING, ef21=0.2), chosen(random_k), {"weight": 0.2}),
    "ef_quantized": (
        lambda: EFQuantized(compress=EVERYTHING, ef21=0.2),
        by_chunks("int4"),
        {"weight": 0.2, "compresses_mean": True},
    ),
    "signsgd": (
        lambda: SignSGD(compress=EVERYTHING, ef21=0.3),
        by_chunks("onebit"),
        {"weight": 0.3, "compresses_mean": True},
    ),
}


@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("case", CASES)
def test_gradients_follow_the_equations(case: str) -> None:
    make, compress, options = CASES[case]
    reference = EF21Reference(compress, dist.get_world_size(), numels(), **options)
    check(make(), reference, bucket_cap_mb=1.0, tolerance=1e-5)
