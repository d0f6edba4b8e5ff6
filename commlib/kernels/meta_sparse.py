"""The sparse codecs on `meta` tensors; see meta.py. Functions and arguments are those of native_sparse.py."""

from __future__ import annotations

import torch

from commlib.kernels import checks
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.meta import META, SPARSE, of_feedback, report
from commlib.kernels.native_sparse import block_top_k_bytes, payload_bytes


def encode_top_k(x: torch.Tensor, places: int, out: torch.Tensor, feedback: Feedback | None = None) -> None:
    """Report the selection of the largest elements."""
    _encode_sparse("encode_top_k", x, places, out, feedback)


def encode_above(
    x: torch.Tensor, threshold: float, places: int, out: torch.Tensor, feedback: Feedback | None = None
) -> None:
    """Report the selection of the elements above a threshold."""
    checks.threshold_bits(threshold)
    _encode_sparse("encode_above", x, places, out, feedback)


def encode_random_k(
    x: torch.Tensor, places: int, out: torch.Tensor, random: Random, feedback: Feedback | None = None
) -> None:
    """Report the selection of random elements."""
    _encode_sparse("encode_random_k", x, places, out, feedback)


def decode_sum(payloads: torch.Tensor, places: int, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Report the decoding of a sum of payloads. Every selected element is read and written once more."""
    count = checks.check_sparse_decoding(payloads, payload_bytes(places), out, META)
    report("decode_sparse", SPARSE, payloads.nbytes + out.nbytes + 8 * count * places)


def decode_add(payload: torch.Tensor, places: int, out: torch.Tensor, weight: float = 1.0) -> None:
    """Report the addition of the selected elements."""
    checks.check_sparse_decoding(payload.view(1, -1), payload_bytes(places), out, META)
    report("decode_sparse", SPARSE, payload.nbytes + 8 * places)


def encode_block_top_k(x: torch.Tensor, kept: int, out: torch.Tensor, feedback: Feedback | None = None) -> None:
    """Report the selection of the largest elements of each block."""
    checks.check_block_encoding(x, block_top_k_bytes(x.numel(), kept), out, feedback, META)
    report("encode_top_k", SPARSE, x.nbytes + out.nbytes + of_feedback(feedback))


def sum_block_top_k(payloads: torch.Tensor, kept: int, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Report the decoding of a sum of payloads, like `decode_sum`."""
    count = checks.check_sparse_decoding(payloads, block_top_k_bytes(out.numel(), kept), out, META)
    report("decode_sparse", SPARSE, payloads.nbytes + out.nbytes + 8 * count * _places(kept, out))


def add_block_top_k(payload: torch.Tensor, kept: int, out: torch.Tensor, weight: float = 1.0) -> None:
    """Report the addition of the selected elements."""
    checks.check_sparse_decoding(payload.view(1, -1), block_top_k_bytes(out.numel(), kept), out, META)
    report("decode_sparse", SPARSE, payload.nbytes + 8 * _places(kept, out))


def _places(kept: int, x: torch.Tensor) -> int:
    """Return the number of elements of `x` that a payload of `blocktopk` has."""
    full, rest = divmod(x.numel(), checks.TOP_K_BLOCK)
    return full * kept + min(kept, rest)


def _encode_sparse(name: str, x: torch.Tensor, places: int, out: torch.Tensor, feedback: Feedback | None) -> None:
    checks.check_sparse_encoding(x, places, payload_bytes(places), out, feedback, META)
    report(name, SPARSE, x.nbytes + out.nbytes + of_feedback(feedback))
