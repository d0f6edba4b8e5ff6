"""Arguments that the codec executors share, and their validation.

The executors for CUDA and meta tensors validate every tensor here. The executor for the CPU does so only to name the
argument that the extension has refused. The checks differ only in the device.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from commlib.errors import CodecError
from commlib.kernels.codec_table import TOP_K_BLOCK

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
CPU = torch.device("cpu")
MOST_SPARSE_ELEMENTS = 2**32 - 2
"""Maximum number of elements in a chunk of a sparse codec that sends pairs."""


@dataclass(frozen=True)
class Random:
    """The source of random numbers of one encoding (docs/reference/wire_format.md, "Random numbers").

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

    @property
    def stage_and_rank(self) -> int:
        """The last word of the Philox counter."""
        return self.stage << 24 | self.rank


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


# --- tensors ----------------------------------------------------------------------------------------------------------


def check_tensor(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], device: torch.device = CPU) -> None:
    """Raise unless `tensor` is dense, contiguous, on `device` and of one of `dtypes`."""
    if not isinstance(tensor, torch.Tensor):
        raise CodecError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise CodecError(f"{name}: expected a dense tensor, got {tensor.layout}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise CodecError(f"{name}: expected {wanted}, got {tensor.dtype}")
    if tensor.device != device:
        where = "the CPU" if device == CPU else device
        raise CodecError(f"{name}: expected a tensor on {where}, got {tensor.device}")
    if not tensor.is_contiguous():
        raise CodecError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    if tensor.is_neg():
        raise CodecError(f"{name}: expected a tensor with its own values, got a negated view (resolve_neg())")


def check_values(name: str, tensor: torch.Tensor, device: torch.device = CPU) -> None:
    """Raise unless a codec can encode from or decode to `tensor`."""
    check_tensor(name, tensor, tuple(DTYPE_CODES), device)


def check_payload(name: str, tensor: torch.Tensor, nbytes: int, device: torch.device = CPU) -> None:
    """Raise unless `tensor` is a payload buffer of `nbytes`."""
    check_tensor(name, tensor, (torch.uint8,), device)
    if tensor.numel() != nbytes:
        raise CodecError(f"{name}: expected {nbytes} bytes, got {tensor.numel()}")
    if nbytes and tensor.data_ptr() % 16:
        raise CodecError(f"{name}: expected an address that is a multiple of 16, got {tensor.data_ptr():#x}")


def check_payloads(payloads: torch.Tensor, nbytes: int, device: torch.device = CPU) -> int:
    """Return the number of payloads. Raise unless the rows of `payloads` have `nbytes` bytes each."""
    check_tensor("payloads", payloads, (torch.uint8,), device)
    if payloads.dim() != 2 or payloads.shape[0] < 1 or payloads.shape[1] != nbytes:
        raise CodecError(f"payloads: expected the shape [count, {nbytes}] with count >= 1, got {list(payloads.shape)}")
    check_payload("payloads", payloads, payloads.numel(), device)
    return payloads.shape[0]


def check_apart(first: tuple[str, torch.Tensor], second: tuple[str, torch.Tensor]) -> None:
    """Raise if two named tensors share memory. Meta tensors never do."""
    (name, a), (other, b) = first, second
    if not a.is_meta and a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes:
        raise CodecError(f"{name} and {other}: expected separate memory, got tensors that overlap")


def check_state(
    name: str, state: torch.Tensor, numel: int, *others: tuple[str, torch.Tensor], device: torch.device = CPU
) -> None:
    """Raise unless `state` has `numel` fp32 elements and overlaps no other tensor."""
    check_tensor(name, state, (torch.float32,), device)
    if state.numel() != numel:
        raise CodecError(f"{name}: expected {numel} elements, got {state.numel()}")
    for other in others:
        check_apart((name, state), other)


def check_feedback(
    feedback: Feedback, numel: int, *others: tuple[str, torch.Tensor], device: torch.device = CPU
) -> None:
    """Raise unless the factors are finite and the residual is valid for `numel` elements."""
    check_state("residual", feedback.residual, numel, *others, device=device)
    check_number("beta", feedback.beta)
    check_number("gamma", feedback.gamma)


def check_encoded(
    out: torch.Tensor,
    nbytes: int,
    source: tuple[str, torch.Tensor],
    numel: int,
    feedback: Feedback | None,
    device: torch.device = CPU,
) -> None:
    """Raise unless `out` fits the payload, does not overlap the named source, and the residual is valid."""
    check_payload("out", out, nbytes, device)
    check_apart(("out", out), source)
    if feedback is not None:
        check_feedback(feedback, numel, ("out", out), source, device=device)


# --- numbers ----------------------------------------------------------------------------------------------------------


def check_number(name: str, value: float, *, may_be_zero: bool = True) -> None:
    """Raise unless `value` is a finite float32."""
    smallest = 0.0 if may_be_zero else 2.0**-149
    if not (math.isfinite(value) and smallest <= abs(value) <= torch.finfo(torch.float32).max):
        expected = "a number that is finite" + ("" if may_be_zero else " and not zero")
        raise CodecError(f"{name}: expected {expected} as a float32, got {value}")


def check_numel(numel: int) -> None:
    """Raise unless `numel` is not negative."""
    if numel < 0:
        raise CodecError(f"numel: expected a number of elements, got {numel}")


def check_first(first: int) -> None:
    """Raise unless `first` is a valid offset in a tensor."""
    if first < 0:
        raise CodecError(f"first: expected an element of the tensor, got {first}")


def chunk_or_whole(chunk: int | None, numel: int) -> int:
    """Return the number of elements per chunk. None means a single chunk."""
    if chunk is None:
        return max(numel, 1)
    if chunk < 1:
        raise CodecError(f"chunk: expected at least one element, got {chunk}")
    return chunk


def threshold_bits(threshold: float) -> int:
    """Return the bits of `threshold` as a float32. Raise unless it is positive and finite."""
    if not (threshold > 0 and math.isfinite(threshold)) or threshold > torch.finfo(torch.float32).max:
        raise CodecError(f"threshold: expected a positive finite float32, got {threshold}")
    return struct.unpack("<I", struct.pack("<f", threshold))[0]


# --- block codecs -----------------------------------------------------------------------------------------------------

#: Maps the number of elements of a chunk to the size of its payload in bytes.
PayloadBytes = Callable[[int], int]


def bytes_of_chunks(payload_bytes: PayloadBytes, numel: int, chunk: int) -> int:
    """Return the size in bytes of the payloads of all chunks of a tensor. The last chunk may be shorter."""
    full, rest = divmod(numel, chunk)
    return full * payload_bytes(chunk) + payload_bytes(rest)


def check_encoding(
    x: torch.Tensor,
    payload_bytes: PayloadBytes,
    out: torch.Tensor,
    chunk: int | None,
    feedback: Feedback | None,
    device: torch.device = CPU,
) -> int:
    """Check the arguments of an encoding: sizes, overlap and residual. Return the number of elements per chunk."""
    numel = x.numel() if isinstance(x, torch.Tensor) else 0
    chunk = chunk_or_whole(chunk, numel)
    check_values("x", x, device)
    check_encoded(out, bytes_of_chunks(payload_bytes, numel, chunk), ("x", x), numel, feedback, device)
    return chunk


def check_sum_encoding(
    payloads: torch.Tensor,
    payload_bytes: PayloadBytes,
    numel: int,
    out: torch.Tensor,
    feedback: Feedback | None,
    device: torch.device = CPU,
) -> int:
    """Check the arguments of an encoding of a sum of payloads of one chunk. Return the number of payloads."""
    check_numel(numel)
    nbytes = payload_bytes(numel)
    count = check_payloads(payloads, nbytes, device)
    check_encoded(out, nbytes, ("payloads", payloads), numel, feedback, device)
    return count


def check_decoding(
    payload: torch.Tensor,
    payload_bytes: PayloadBytes,
    out: torch.Tensor,
    chunk: int | None,
    device: torch.device = CPU,
) -> int:
    """Check the arguments of a decoding of all chunks. Return the number of elements per chunk."""
    check_values("out", out, device)
    chunk = chunk_or_whole(chunk, out.numel())
    check_payload("payload", payload, bytes_of_chunks(payload_bytes, out.numel(), chunk), device)
    check_apart(("out", out), ("payload", payload))
    return chunk


def check_sum_decoding(
    payloads: torch.Tensor, payload_bytes: PayloadBytes, out: torch.Tensor, device: torch.device = CPU
) -> int:
    """Check the arguments of a decoding of a sum of payloads of one chunk. Return the number of payloads."""
    check_values("out", out, device)
    count = check_payloads(payloads, payload_bytes(out.numel()), device)
    check_apart(("out", out), ("payloads", payloads))
    return count


def check_rotation(x: torch.Tensor, out: torch.Tensor, device: torch.device = CPU) -> None:
    """Raise unless `x` and `out` have equally many elements, and are the same tensor or do not overlap."""
    check_tensor("x", x, (torch.float32,), device)
    check_tensor("out", out, (torch.float32,), device)
    if x.numel() != out.numel():
        raise CodecError(f"out: expected {x.numel()} elements, got {out.numel()}")
    if x.data_ptr() != out.data_ptr():
        check_apart(("out", out), ("x", x))


# --- sparse codecs ----------------------------------------------------------------------------------------------------


def check_places(places: int, numel: int = MOST_SPARSE_ELEMENTS) -> None:
    """Raise unless `places` is valid for a chunk of `numel` elements."""
    if not 0 <= places <= numel:
        raise CodecError(f"places: expected 0..{numel} (the elements of the chunk), got {places}")


def check_sparse_encoding(
    x: torch.Tensor,
    places: int,
    nbytes: int,
    out: torch.Tensor,
    feedback: Feedback | None,
    device: torch.device = CPU,
    *,
    name: str = "x",
) -> None:
    """Check the arguments of a sparse encoding: a chunk, its payload with its number of places, and the residual."""
    check_values(name, x, device)
    if x.numel() > MOST_SPARSE_ELEMENTS:
        most = MOST_SPARSE_ELEMENTS
        raise CodecError(f"{name}: expected at most {most} elements in a chunk of a sparse codec, got {x.numel()}")
    check_places(places, x.numel())
    check_encoded(out, nbytes, (name, x), x.numel(), feedback, device)


def check_sparse_decoding(payloads: torch.Tensor, nbytes: int, out: torch.Tensor, device: torch.device = CPU) -> int:
    """Check the arguments of a sparse decoding of payloads of `nbytes`. Return the number of payloads."""
    check_tensor("out", out, (torch.float32,), device)
    count = check_payloads(payloads, nbytes, device)
    check_apart(("out", out), ("payloads", payloads))
    return count


def check_kept(kept: int) -> None:
    """Raise unless `kept` is a valid number of elements per block of `blocktopk`."""
    if not 1 <= kept <= TOP_K_BLOCK:
        raise CodecError(f"kept: expected 1..{TOP_K_BLOCK} (the elements of a block), got {kept}")


def check_block_encoding(
    x: torch.Tensor, nbytes: int, out: torch.Tensor, feedback: Feedback | None, device: torch.device = CPU
) -> None:
    """Check the arguments of an encoding with `blocktopk`: a chunk, its payload, and the residual."""
    check_values("x", x, device)
    check_encoded(out, nbytes, ("x", x), x.numel(), feedback, device)
