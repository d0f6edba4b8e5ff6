"""The block codecs on `meta` tensors; see meta.py. Functions and arguments are those of native_codecs.py."""

from __future__ import annotations

from functools import partial

import torch

from commlib.kernels import checks
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.meta import META, SPARSE, of_feedback, report
from commlib.kernels.native_codecs import payload_bytes


def encode(
    codec: int,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    chunk: int | None = None,
    feedback: Feedback | None = None,
    random: Random | None = None,
) -> None:
    """Report the encoding of `x` into `out`."""
    checks.check_encoding(x, partial(payload_bytes, codec), out, chunk, feedback, META)
    report("encode", codec, x.nbytes + out.nbytes + of_feedback(feedback))


def encode_sum(
    codec: int,
    payloads: torch.Tensor,
    numel: int,
    out: torch.Tensor,
    *,
    divisor: float = 1.0,
    feedback: Feedback | None = None,
    random: Random | None = None,
    first: int = 0,
) -> None:
    """Report the encoding of a sum of payloads."""
    checks.check_sum_encoding(payloads, partial(payload_bytes, codec), numel, out, feedback, META)
    report("encode_sum", codec, payloads.nbytes + out.nbytes + of_feedback(feedback))


def decode(codec: int, payload: torch.Tensor, out: torch.Tensor, *, chunk: int | None = None) -> None:
    """Report the decoding of payloads."""
    checks.check_decoding(payload, partial(payload_bytes, codec), out, chunk, META)
    report("decode", codec, payload.nbytes + out.nbytes)


def decode_add(
    codec: int, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0, chunk: int | None = None
) -> None:
    """Report the decoding of payloads with addition to `out`."""
    checks.check_decoding(payload, partial(payload_bytes, codec), out, chunk, META)
    report("decode_add", codec, payload.nbytes + 2 * out.nbytes)


def decode_sum(codec: int, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
    """Report the decoding of a sum of payloads."""
    checks.check_sum_decoding(payloads, partial(payload_bytes, codec), out, META)
    report("decode_sum", codec, payloads.nbytes + out.nbytes)


def rotate(x: torch.Tensor, out: torch.Tensor, random: Random, *, is_inverse: bool = False) -> None:
    """Report the random rotation of a chunk."""
    checks.check_rotation(x, out, META)
    report("rotate", SPARSE, x.nbytes + out.nbytes)
