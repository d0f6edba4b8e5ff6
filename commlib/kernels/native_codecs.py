"""The crossing into the C++ loops of the codecs; like native.py, it checks every tensor whose address it passes.

Tensors are dense, contiguous and on the CPU; payloads are uint8. A tensor of `numel` elements is cut into chunks of
`chunk` elements, whose payloads follow one another at the distance of a full chunk's payload (docs/wire_format.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commlib.errors import CodecError
from commlib.kernels.native import load

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


@dataclass(frozen=True)
class Random:
    """The source of random numbers of one encoding (docs/wire_format.md, "Random numbers").

    Attributes:
        seed: In 0..2**64 - 1; the same on all ranks.
        step: In 0..2**32 - 1.
        rank: In 0..2**24 - 1.
        stage: In 0..255.
        segments: (first element in the tensor, its global offset), ascending, the first at element 0.
    """

    seed: int
    step: int = 0
    rank: int = 0
    stage: int = 0
    segments: Sequence[tuple[int, int]] = ((0, 0),)

    def __post_init__(self) -> None:
        for name, bits in (("seed", 64), ("step", 32), ("rank", 24), ("stage", 8)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise CodecError(f"Random.{name}: expected 0..2**{bits} - 1, got {value}")
        starts = [start for start, _ in self.segments]
        if not starts or starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
            raise CodecError(f"Random.segments: expected ascending first elements from 0 on, got {starts[:5]}")
        if any(not 0 <= offset < 1 << 63 for _, offset in self.segments):
            raise CodecError("Random.segments: expected global offsets in 0..2**63 - 1")

    def native(self) -> Any:
        """Return what the extension takes."""
        return load().RandomSource(self.seed, self.step, self.stage << 24 | self.rank, list(self.segments))


@dataclass(frozen=True)
class Feedback:
    """Error feedback of one encoding: v = x + beta * e is encoded, e becomes (v - decoded) * gamma.

    Attributes:
        residual: [numel] fp32, e; changed in place.
        beta: See above; finite.
        gamma: See above; finite.
    """

    residual: torch.Tensor
    beta: float = 1.0
    gamma: float = 1.0


def payload_bytes(codec: int, numel: int) -> int:
    """Return the bytes of the payload of one chunk of `numel` elements.

    Raises:
        CodecError: No block codec has this id.
    """
    try:
        return load().payload_bytes(codec, numel)
    except ValueError as error:
        raise CodecError(f"codec: expected the id of a block codec, got {codec}") from error


def buffer_bytes(codec: int, numel: int, chunk: int) -> int:
    """Return the bytes of the payloads of all chunks of a tensor."""
    full, rest = divmod(numel, chunk)
    return full * payload_bytes(codec, chunk) + payload_bytes(codec, rest)


def encode(
    codec: int,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    chunk: int | None = None,
    feedback: Feedback | None = None,
    random: Random | None = None,
) -> None:
    """Encode `x` into `out`.

    Args:
        codec: The id of a block codec.
        x: [numel] fp32, bf16, fp16 or fp64.
        out: [buffer_bytes(codec, numel, chunk)] uint8, aligned to 16 bytes.
        chunk: Elements of a chunk; the whole tensor by default.
        feedback: Error feedback, if any.
        random: For stochastic rounding.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    numel = x.numel() if isinstance(x, torch.Tensor) else 0
    chunk = _check_chunk(chunk, numel)
    check_values("x", x)
    check_payload("out", out, buffer_bytes(codec, numel, chunk))
    check_apart(("out", out), ("x", x))
    if feedback is not None:
        check_feedback(feedback, numel, ("out", out), ("x", x))
    code = DTYPE_CODES[x.dtype]
    threads = torch.get_num_threads()
    source = None if random is None else random.native()
    load().encode(codec, x.data_ptr(), code, numel, chunk, native_feedback(feedback), source, out.data_ptr(), threads)


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
    """Encode the sum of the payloads, in their order, divided by `divisor`: decode-sum-encode.

    Args:
        codec: The id of a block codec.
        payloads: [count, payload_bytes(codec, numel)] uint8, aligned to 16 bytes.
        numel: Elements of the chunk.
        out: [payload_bytes(codec, numel)] uint8, aligned to 16 bytes.
        divisor: Finite and not zero, used as a float32.
        feedback: Error feedback, if any.
        random: For stochastic rounding.
        first: Where the chunk begins in its tensor, for `random`.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    count = _check_payloads(codec, payloads, numel)
    check_payload("out", out, payload_bytes(codec, numel))
    check_apart(("out", out), ("payloads", payloads))
    check_number("divisor", divisor, may_be_zero=False)
    if first < 0:
        raise CodecError(f"first: expected an element of the tensor, got {first}")
    if feedback is not None:
        check_feedback(feedback, numel, ("out", out), ("payloads", payloads))
    source = None if random is None else random.native()
    load().encode_sum(
        codec,
        payloads.data_ptr(),
        count,
        divisor,
        numel,
        native_feedback(feedback),
        source,
        first,
        out.data_ptr(),
        torch.get_num_threads(),
    )


def decode(codec: int, payload: torch.Tensor, out: torch.Tensor, *, chunk: int | None = None) -> None:
    """Decode the payloads of all chunks into `out`.

    Args:
        codec: The id of a block codec.
        payload: [buffer_bytes(codec, numel, chunk)] uint8, aligned to 16 bytes.
        out: [numel] fp32, bf16, fp16 or fp64.
        chunk: Elements of a chunk; the whole tensor by default.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    _decode(codec, payload, out, chunk, adds=False, weight=1.0)


def decode_add(
    codec: int, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0, chunk: int | None = None
) -> None:
    """Add `weight` times the decoded values to `out`; arguments as in `decode`.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    check_number("weight", weight)
    _decode(codec, payload, out, chunk, adds=True, weight=weight)


def decode_sum(codec: int, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
    """Write the sum of the payloads of one chunk, in their order, divided by `divisor`.

    Args:
        codec: The id of a block codec.
        payloads: [count, payload_bytes(codec, numel)] uint8, aligned to 16 bytes.
        out: [numel] fp32, bf16, fp16 or fp64.
        divisor: Finite and not zero, used as a float32.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    check_values("out", out)
    count = _check_payloads(codec, payloads, out.numel())
    check_apart(("out", out), ("payloads", payloads))
    check_number("divisor", divisor, may_be_zero=False)
    code, threads = DTYPE_CODES[out.dtype], torch.get_num_threads()
    load().decode_sum(codec, payloads.data_ptr(), count, divisor, out.numel(), out.data_ptr(), code, threads)


def rotate(x: torch.Tensor, out: torch.Tensor, random: Random, *, is_inverse: bool = False) -> None:
    """Apply the random Hadamard rotation of docs/wire_format.md to a chunk, or undo it.

    Args:
        x: [numel] fp32.
        out: [numel] fp32; `x` itself, or apart from it.
        random: Chooses the signs.
        is_inverse: Undo the rotation that the same `random` made.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    check_tensor("x", x, (torch.float32,))
    check_tensor("out", out, (torch.float32,))
    if x.numel() != out.numel():
        raise CodecError(f"out: expected {x.numel()} elements, got {out.numel()}")
    if x.data_ptr() != out.data_ptr():
        check_apart(("out", out), ("x", x))
    load().rotate(x.data_ptr(), x.numel(), random.native(), is_inverse, out.data_ptr(), torch.get_num_threads())


def _decode(
    codec: int, payload: torch.Tensor, out: torch.Tensor, chunk: int | None, *, adds: bool, weight: float
) -> None:
    check_values("out", out)
    numel = out.numel()
    chunk = _check_chunk(chunk, numel)
    check_payload("payload", payload, buffer_bytes(codec, numel, chunk))
    check_apart(("out", out), ("payload", payload))
    code, threads = DTYPE_CODES[out.dtype], torch.get_num_threads()
    load().decode(codec, payload.data_ptr(), numel, chunk, out.data_ptr(), code, adds, weight, threads)


# --- checks -----------------------------------------------------------------------------------------------------------


def native_feedback(feedback: Feedback | None) -> Any:
    """Return what the extension takes."""
    native = load().Feedback
    return (
        native(0, 1.0, 1.0) if feedback is None else native(feedback.residual.data_ptr(), feedback.beta, feedback.gamma)
    )


def _check_chunk(chunk: int | None, numel: int) -> int:
    if chunk is None:
        return max(numel, 1)
    if chunk < 1:
        raise CodecError(f"chunk: expected at least one element, got {chunk}")
    return chunk


def check_tensor(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless `tensor` is dense, contiguous, on the CPU and of one of `dtypes`."""
    if not isinstance(tensor, torch.Tensor):
        raise CodecError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    wanted = " or ".join(str(dtype) for dtype in dtypes)
    checks = (
        (tensor.layout is torch.strided, f"a dense tensor, got {tensor.layout}"),
        (tensor.dtype in dtypes, f"{wanted}, got {tensor.dtype}"),
        (tensor.device.type == "cpu", f"a tensor on the CPU, got {tensor.device}"),
        (
            tensor.layout is torch.strided and tensor.is_contiguous(),
            f"a contiguous tensor, got strides {_strides(tensor)}",
        ),
        (not tensor.is_neg(), "a tensor with its own values, got a negated view (resolve_neg())"),
    )
    for is_good, expected in checks:
        if not is_good:
            raise CodecError(f"{name}: expected {expected}")


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def check_values(name: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor` holds values that a codec takes."""
    check_tensor(name, tensor, tuple(DTYPE_CODES))


def check_payload(name: str, tensor: torch.Tensor, nbytes: int) -> None:
    """Raise unless `tensor` is a payload buffer of `nbytes`."""
    check_tensor(name, tensor, (torch.uint8,))
    if tensor.numel() != nbytes:
        raise CodecError(f"{name}: expected {nbytes} bytes, got {tensor.numel()}")
    if nbytes and tensor.data_ptr() % 16:
        raise CodecError(f"{name}: expected an address that is a multiple of 16, got {tensor.data_ptr():#x}")


def _check_payloads(codec: int, payloads: torch.Tensor, numel: int) -> int:
    """Return how many payloads of a chunk of `numel` elements there are."""
    if numel < 0:
        raise CodecError(f"numel: expected a number of elements, got {numel}")
    check_tensor("payloads", payloads, (torch.uint8,))
    nbytes = payload_bytes(codec, numel)
    if payloads.dim() != 2 or payloads.shape[0] < 1 or payloads.shape[1] != nbytes:
        raise CodecError(f"payloads: expected the shape [count, {nbytes}] with count >= 1, got {list(payloads.shape)}")
    check_payload("payloads", payloads, payloads.numel())
    return payloads.shape[0]


def check_feedback(feedback: Feedback, numel: int, *others: tuple[str, torch.Tensor]) -> None:
    """Raise unless the residual belongs to `numel` elements and overlaps no other tensor."""
    residual = feedback.residual
    check_tensor("residual", residual, (torch.float32,))
    if residual.numel() != numel:
        raise CodecError(f"residual: expected {numel} elements, got {residual.numel()}")
    check_number("beta", feedback.beta)
    check_number("gamma", feedback.gamma)
    for other in others:
        check_apart(("residual", residual), other)


def check_number(name: str, value: float, *, may_be_zero: bool = True) -> None:
    """Raise unless `value` is a finite float32."""
    smallest = 0.0 if may_be_zero else 2.0**-149
    if not (math.isfinite(value) and smallest <= abs(value) <= torch.finfo(torch.float32).max):
        expected = "a number that is finite" + ("" if may_be_zero else " and not zero")
        raise CodecError(f"{name}: expected {expected} as a float32, got {value}")


def check_apart(first: tuple[str, torch.Tensor], second: tuple[str, torch.Tensor]) -> None:
    """Raise if two named tensors share memory."""
    (name, a), (other, b) = first, second
    if a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes:
        raise CodecError(f"{name} and {other}: expected separate memory, got tensors that overlap")
