"""The codecs on `meta` tensors: arguments are checked, nothing is computed, and the work is reported.

A simulator listens (`reporting`) and computes the cost of the work. The module has the executors of both the block
codecs and the sparse codecs, with the functions of native_codecs.py and native_sparse.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from commlib.kernels import checks
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.native_codecs import payload_bytes
from commlib.kernels.native_sparse import block_top_k_bytes
from commlib.kernels.native_sparse import payload_bytes as sparse_payload_bytes

META = torch.device("meta")

#: The codec id in reports of sparse codec kernels.
SPARSE = -1


@dataclass(frozen=True, slots=True)
class Kernel:
    """A call of a codec kernel.

    Attributes:
        name: The function's name.
        codec: The block codec's id, or `SPARSE`.
        nbytes: Bytes read and written, each counted once: values, payloads and residual.
    """

    name: str
    codec: int
    nbytes: int


_listeners: list[Callable[[Kernel], None]] = []
_repeaters: list[Callable[[Hashable, Callable[[], object], int], None]] = []


@contextlib.contextmanager
def reporting(listener: Callable[[Kernel], None]) -> Iterator[None]:
    """Call `listener` with every kernel called on meta tensors within the context, in this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextlib.contextmanager
def repeating(repeater: Callable[[Hashable, Callable[[], object], int], None]) -> Iterator[None]:
    """Pass the arguments of `repeated` to `repeater` within the context."""
    _repeaters.append(repeater)
    try:
        yield
    finally:
        _repeaters.remove(repeater)


def repeated(work: Callable[[], object], *key: Hashable, times: int = 1) -> None:
    """Run work on meta tensors `times` times. The work must have no result and be the same for equal keys.

    A simulator runs it once per key and then counts the recorded result.
    """
    if _repeaters:
        _repeaters[-1](key, work, times)
    else:
        for _ in range(times):
            work()


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
    _report("encode", codec, x.nbytes + out.nbytes + _of_feedback(feedback))


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
    _report("encode_sum", codec, payloads.nbytes + out.nbytes + _of_feedback(feedback))


def decode(codec: int, payload: torch.Tensor, out: torch.Tensor, *, chunk: int | None = None) -> None:
    """Report the decoding of payloads."""
    checks.check_decoding(payload, partial(payload_bytes, codec), out, chunk, META)
    _report("decode", codec, payload.nbytes + out.nbytes)


def decode_add(
    codec: int, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0, chunk: int | None = None
) -> None:
    """Report the decoding of payloads with addition to `out`."""
    checks.check_decoding(payload, partial(payload_bytes, codec), out, chunk, META)
    _report("decode_add", codec, payload.nbytes + 2 * out.nbytes)


def decode_sum(codec: int, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
    """Report the decoding of a sum of payloads."""
    checks.check_sum_decoding(payloads, partial(payload_bytes, codec), out, META)
    _report("decode_sum", codec, payloads.nbytes + out.nbytes)


def rotate(x: torch.Tensor, out: torch.Tensor, random: Random, *, is_inverse: bool = False) -> None:
    """Report the random rotation of a chunk."""
    checks.check_rotation(x, out, META)
    _report("rotate", SPARSE, x.nbytes + out.nbytes)


class Sparse:
    """The executor of the sparse codecs; see native_sparse.py."""

    @staticmethod
    def encode_top_k(x: torch.Tensor, places: int, out: torch.Tensor, feedback: Feedback | None = None) -> None:
        """Report the selection of the largest elements."""
        _encode_sparse("encode_top_k", x, places, out, feedback)

    @staticmethod
    def encode_above(
        x: torch.Tensor, threshold: float, places: int, out: torch.Tensor, feedback: Feedback | None = None
    ) -> None:
        """Report the selection of the elements above a threshold."""
        checks.threshold_bits(threshold)
        _encode_sparse("encode_above", x, places, out, feedback)

    @staticmethod
    def encode_random_k(
        x: torch.Tensor, places: int, out: torch.Tensor, random: Random, feedback: Feedback | None = None
    ) -> None:
        """Report the selection of random elements."""
        _encode_sparse("encode_random_k", x, places, out, feedback)

    @staticmethod
    def decode_sum(payloads: torch.Tensor, places: int, out: torch.Tensor, divisor: float = 1.0) -> None:
        """Report the decoding of a sum of payloads. Every selected element is read and written once more."""
        count = checks.check_sparse_decoding(payloads, sparse_payload_bytes(places), out, META)
        _report("decode_sparse", SPARSE, payloads.nbytes + out.nbytes + 8 * count * places)

    @staticmethod
    def decode_add(payload: torch.Tensor, places: int, out: torch.Tensor, weight: float = 1.0) -> None:
        """Report the addition of the selected elements."""
        checks.check_sparse_decoding(payload.view(1, -1), sparse_payload_bytes(places), out, META)
        _report("decode_sparse", SPARSE, payload.nbytes + 8 * places)

    @staticmethod
    def encode_block_top_k(x: torch.Tensor, kept: int, out: torch.Tensor, feedback: Feedback | None = None) -> None:
        """Report the selection of the largest elements of each block."""
        checks.check_block_encoding(x, block_top_k_bytes(x.numel(), kept), out, feedback, META)
        _report("encode_top_k", SPARSE, x.nbytes + out.nbytes + _of_feedback(feedback))

    @staticmethod
    def sum_block_top_k(payloads: torch.Tensor, kept: int, out: torch.Tensor, divisor: float = 1.0) -> None:
        """Report the decoding of a sum of payloads, like `decode_sum`."""
        count = checks.check_sparse_decoding(payloads, block_top_k_bytes(out.numel(), kept), out, META)
        _report("decode_sparse", SPARSE, payloads.nbytes + out.nbytes + 8 * count * _places(kept, out))

    @staticmethod
    def add_block_top_k(payload: torch.Tensor, kept: int, out: torch.Tensor, weight: float = 1.0) -> None:
        """Report the addition of the selected elements."""
        checks.check_sparse_decoding(payload.view(1, -1), block_top_k_bytes(out.numel(), kept), out, META)
        _report("decode_sparse", SPARSE, payload.nbytes + 8 * _places(kept, out))


def _places(kept: int, x: torch.Tensor) -> int:
    """Return the number of elements of `x` that a payload of `blocktopk` has."""
    full, rest = divmod(x.numel(), checks.TOP_K_BLOCK)
    return full * kept + min(kept, rest)


def _encode_sparse(name: str, x: torch.Tensor, places: int, out: torch.Tensor, feedback: Feedback | None) -> None:
    checks.check_sparse_encoding(x, places, sparse_payload_bytes(places), out, feedback, META)
    _report(name, SPARSE, x.nbytes + out.nbytes + _of_feedback(feedback))


def _of_feedback(feedback: Feedback | None) -> int:
    """Return the number of bytes read and written for the residual."""
    return 0 if feedback is None else 2 * feedback.residual.nbytes


def _report(name: str, codec: int, nbytes: int) -> None:
    for listener in _listeners:
        listener(Kernel(name, codec, nbytes))
