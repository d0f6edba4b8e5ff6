"""The sparse codecs on CUDA tensors: the functions of native_sparse.py, with the same arguments and bitwise results.

As in cuda_codecs.py, no call synchronizes with the device. So decoding a damaged payload cannot raise: it accesses no
memory outside the tensors, skips elements outside the chunk, leaves undefined values, and sets an error on the device.
`raise_if_damaged` synchronizes with the device and raises.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from commlib.errors import CodecError
from commlib.kernels import checks, cuda
from commlib.kernels.checks import CPU, Feedback, Random
from commlib.kernels.cuda_args import (
    THREADS,
    TYPES,
    BlockTopKArgs,
    BlockTopKDecodeArgs,
    Kernel,
    Selection,
    SparseArgs,
    SparseDecodeArgs,
    Status,
    aligned,
    block_top_k_layout,
    blocks_of,
    random_source,
)

_MOST_BLOCKS = 1024  # for kernels whose threads process several elements: about as many as a large device runs at once
_ITEMS = 16  # elements per thread of a compaction
_TILE = THREADS * _ITEMS
_RANGE = 4096  # elements that a thread block sums when decoding
_FEW_CANDIDATES = 1 << 16


def payload_bytes(places: int) -> int:
    """Return the size in bytes of a payload of `places` places.

    Raises:
        CodecError: `places` is out of range.
    """
    checks.check_places(places)
    return 2 * aligned(4 * places)


def encode_top_k(x: torch.Tensor, places: int, out: torch.Tensor, feedback: Feedback | None = None) -> None:
    """Select the `places` elements of largest magnitude; arguments as in `native_sparse.encode_top_k`, on CUDA.

    Exact for any distribution. Allocates about 32 bytes per place (at most 8 bytes per element) from torch's allocator
    for the duration of the call.

    Raises:
        CodecError: An argument is not as described, or CUDA kernels cannot be compiled here. Nothing was written.
    """
    args, source, device = _prepared(x, places, out, feedback)
    if places == 0:
        return _keep_all(args, source, device)
    capacity = min(x.numel(), 4 * places + _FEW_CANDIDATES)
    room = torch.empty(2 * capacity, dtype=torch.int32, device=device)
    args.capacity, args.indices, args.bits = capacity, room.data_ptr(), room.data_ptr() + 4 * capacity
    state = _state(args, device)
    blocks = min(_MOST_BLOCKS, blocks_of(x.numel(), _TILE))
    cuda.launch(digit_kernel(*source, 0), blocks, args, device)
    cuda.launch(compact_kernel(*source, "kCandidates"), blocks, args, device)
    cuda.launch(digit_kernel(*source, 1), blocks, args, device)
    cuda.launch(digit_kernel(*source, 2), blocks, args, device)
    cuda.launch(compact_kernel(*source, "kTopK"), blocks, args, device)
    del room, state  # referenced until all launches are queued


def encode_above(
    x: torch.Tensor, threshold: float, places: int, out: torch.Tensor, feedback: Feedback | None = None
) -> None:
    """Select the first `places` elements whose magnitude is at least `threshold`; otherwise like `encode_top_k`.

    Raises:
        CodecError: As for `encode_top_k`.
    """
    args, source, device = _prepared(x, places, out, feedback)
    args.threshold = checks.threshold_bits(threshold)
    if places == 0:
        return _keep_all(args, source, device)
    state = _state(args, device)
    blocks = min(_MOST_BLOCKS, blocks_of(x.numel(), _TILE))
    cuda.launch(compact_kernel(*source, "kThreshold"), blocks, args, device)
    cuda.launch(_FILL_UNUSED, min(_MOST_BLOCKS, blocks_of(places, THREADS)), args, device)
    del state  # referenced until both launches are queued


def encode_random_k(
    x: torch.Tensor, places: int, out: torch.Tensor, random: Random, feedback: Feedback | None = None
) -> None:
    """Select one random element in each of `places` strata of the chunk; otherwise like `encode_top_k`.

    Raises:
        CodecError: As for `encode_top_k`.
    """
    args, source, device = _prepared(x, places, out, feedback)
    args.random = random_source(Random(random.seed, random.step, random.rank, random.stage), device)
    blocks = min(_MOST_BLOCKS, blocks_of(places, THREADS))
    cuda.launch(random_kernel(*source), blocks, args, device)
    _keep_all(args, source, device)
    if feedback is not None:
        cuda.launch(_CLEAR_SENT, blocks, args, device)


def decode_sum(payloads: torch.Tensor, places: int, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Write the sum of the payloads of one chunk, divided; arguments as in `native_sparse.decode_sum`.

    Raises:
        CodecError: An argument is not as described, or CUDA kernels cannot be compiled here. Nothing was written. A
            damaged payload does not raise here; see `raise_if_damaged`.
    """
    checks.check_number("divisor", divisor, may_be_zero=False)
    args, device = _decode_args(payloads, places, out)
    args.divisor = divisor
    cuda.launch(_SUM, blocks_of(out.numel(), _RANGE), args, device)


def decode_add(payload: torch.Tensor, places: int, out: torch.Tensor, weight: float = 1.0) -> None:
    """Add `weight` times the values to the elements of `out` ([numel] fp32) that are in one payload.

    Raises:
        CodecError: As for `decode_sum`.
    """
    checks.check_number("weight", weight)
    args, device = _decode_args(payload.view(1, -1), places, out)
    args.weight = weight
    cuda.launch(_ADD, min(_MOST_BLOCKS, blocks_of(places, THREADS)), args, device)


def block_top_k_bytes(numel: int, kept: int) -> int:
    """Return the size in bytes of a payload of `numel` elements with `kept` selected per block.

    Raises:
        CodecError: `numel` or `kept` is out of range.
    """
    checks.check_numel(numel)
    checks.check_kept(kept)
    return block_top_k_layout(numel, kept).nbytes


def encode_block_top_k(x: torch.Tensor, kept: int, out: torch.Tensor, feedback: Feedback | None = None) -> None:
    """Select the `kept` elements of largest magnitude per block; see `native_sparse.encode_block_top_k`. On CUDA.

    Raises:
        CodecError: As for `encode_top_k`.
    """
    device = cuda.device_of("out", out)
    checks.check_block_encoding(x, block_top_k_bytes(x.numel(), kept), out, feedback, device)
    layout = block_top_k_layout(x.numel(), kept)
    args = BlockTopKArgs(layout=layout, x=x.data_ptr(), out=out.data_ptr(), beta=1.0, gamma=1.0)
    if feedback is not None:
        args.residual, args.beta, args.gamma = feedback.residual.data_ptr(), feedback.beta, feedback.gamma
    kernel = block_top_k_kernel(TYPES[x.dtype], feedback is not None)
    cuda.launch(kernel, blocks_of(x.numel(), checks.TOP_K_BLOCK), args, device)


def sum_block_top_k(payloads: torch.Tensor, kept: int, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Write the sum of the payloads of one chunk, divided; see `native_sparse.sum_block_top_k`. On CUDA.

    Raises:
        CodecError: As for `decode_sum`.
    """
    checks.check_number("divisor", divisor, may_be_zero=False)
    args, device = _block_decode_args(payloads, kept, out)
    args.divisor = divisor
    cuda.launch(_SUM_BLOCKS, blocks_of(out.numel(), checks.TOP_K_BLOCK), args, device)


def add_block_top_k(payload: torch.Tensor, kept: int, out: torch.Tensor, weight: float = 1.0) -> None:
    """Add `weight` times the values to the elements of `out` ([numel] fp32) that are in one payload.

    Raises:
        CodecError: As for `decode_sum`.
    """
    checks.check_number("weight", weight)
    args, device = _block_decode_args(payload.view(1, -1), kept, out)
    args.weight = weight
    cuda.launch(_ADD_BLOCKS, blocks_of(out.numel(), checks.TOP_K_BLOCK), args, device)


def raise_if_damaged(device: torch.device) -> None:
    """Synchronize with torch's current stream of `device`; raise if a payload decoded since the last call was damaged.

    Raises:
        CodecError: A payload was damaged. Its values are not in the decoded result.
    """
    damage = _damage(device)
    number = int(damage.item())
    if number:
        damage.zero_()
        raise CodecError(
            f"payload {number - 1} of a decoding on {device}: expected ascending indices within the chunk and unused "
            "places (FFFFFFFF) last; the bytes were damaged, or encoded for another number of elements"
        )


# --- launches ---------------------------------------------------------------------------------------------------------


def _prepared(
    x: torch.Tensor, places: int, out: torch.Tensor, feedback: Feedback | None
) -> tuple[SparseArgs, tuple[str, bool], torch.device]:
    """Check an encoding. Return the kernels' argument, the kernel variant (type, has feedback), and the device."""
    device = cuda.device_of("out", out)
    checks.check_sparse_encoding(x, places, payload_bytes(places), out, feedback, device)
    args = SparseArgs(x=x.data_ptr(), out=out.data_ptr(), numel=x.numel(), places=places, beta=1.0, gamma=1.0)
    args.values_at, args.nbytes = aligned(4 * places), payload_bytes(places)
    if feedback is not None:
        args.residual, args.beta, args.gamma = feedback.residual.data_ptr(), feedback.beta, feedback.gamma
    return args, (TYPES[x.dtype], feedback is not None), device


def _state(args: SparseArgs, device: torch.device) -> torch.Tensor:
    """Allocate the zeroed state of one encoding's kernels, set its addresses in `args`, and return the tensor."""
    selection, status = ctypes.sizeof(Selection), ctypes.sizeof(Status) * blocks_of(args.numel, _TILE)
    state = torch.zeros(selection + 2 * status, dtype=torch.uint8, device=device)
    args.selection = state.data_ptr()
    args.status = (ctypes.c_void_p * 2)(state.data_ptr() + selection, state.data_ptr() + selection + status)
    return state


def _keep_all(args: SparseArgs, source: tuple[str, bool], device: torch.device) -> None:
    """Update the residual for an encoding that sends nothing."""
    if args.residual:
        cuda.launch(keep_kernel(source[0]), min(_MOST_BLOCKS, blocks_of(args.numel, _TILE)), args, device)


def _decode_args(payloads: torch.Tensor, places: int, out: torch.Tensor) -> tuple[SparseDecodeArgs, torch.device]:
    device = cuda.device_of("out", out)
    nbytes = payload_bytes(places)
    count = checks.check_sparse_decoding(payloads, nbytes, out, device)
    args = SparseDecodeArgs(inputs=payloads.data_ptr(), out=out.data_ptr(), damage=_damage(device).data_ptr())
    args.numel, args.values_at, args.nbytes = out.numel(), aligned(4 * places), nbytes
    args.places, args.num_inputs, args.divisor, args.weight = places, count, 1.0, 1.0
    return args, device


def _block_decode_args(
    payloads: torch.Tensor, kept: int, out: torch.Tensor
) -> tuple[BlockTopKDecodeArgs, torch.device]:
    device = cuda.device_of("out", out)
    count = checks.check_sparse_decoding(payloads, block_top_k_bytes(out.numel(), kept), out, device)
    args = BlockTopKDecodeArgs(inputs=payloads.data_ptr(), out=out.data_ptr(), damage=_damage(device).data_ptr())
    args.layout, args.num_inputs = block_top_k_layout(out.numel(), kept), count
    args.divisor, args.weight = 1.0, 1.0
    return args, device


@functools.cache
def _damage(device: torch.device) -> torch.Tensor:
    """Return the device tensor in which kernels on `device` store the number of a damaged payload."""
    damage = torch.zeros(1, dtype=torch.int32, device=device)
    if device != CPU:
        torch.cuda.current_stream(device).synchronize()  # once, so that any stream may use it afterwards
    return damage


# --- kernels ----------------------------------------------------------------------------------------------------------

_SUM = Kernel("sparse_kernels.h", "sum_sparse", "SparseDecodeArgs")
_ADD = Kernel("sparse_kernels.h", "add_sparse", "SparseDecodeArgs")
_SUM_BLOCKS = Kernel("block_top_k_kernels.h", "sum_block_top_k", "BlockTopKDecodeArgs")
_ADD_BLOCKS = Kernel("block_top_k_kernels.h", "add_block_top_k", "BlockTopKDecodeArgs")
_CLEAR_SENT = Kernel("sparse_kernels.h", "clear_sent", "SparseArgs")
_FILL_UNUSED = Kernel("sparse_kernels.h", "fill_unused", "SparseArgs")


def digit_kernel(source: str, has_feedback: bool, number: int) -> Kernel:
    """Return the kernel that finds one digit of the top-k threshold."""
    return Kernel("select_kernels.h", f"find_digit<{source}, {_flag(has_feedback)}, {number}>", "SparseArgs")


def compact_kernel(source: str, has_feedback: bool, goal: str) -> Kernel:
    """Return the kernel that writes the selected elements in order."""
    return Kernel("select_kernels.h", f"compact<{source}, {_flag(has_feedback)}, Goal::{goal}>", "SparseArgs")


def random_kernel(source: str, has_feedback: bool) -> Kernel:
    """Return the kernel that selects random elements."""
    return Kernel("sparse_kernels.h", f"choose_at_random<{source}, {_flag(has_feedback)}>", "SparseArgs")


def keep_kernel(source: str) -> Kernel:
    """Return the kernel that updates the residual when nothing is sent."""
    return Kernel("sparse_kernels.h", f"keep_all<{source}>", "SparseArgs")


def block_top_k_kernel(source: str, has_feedback: bool) -> Kernel:
    """Return the kernel that encodes with `blocktopk`."""
    return Kernel("block_top_k_kernels.h", f"encode_block_top_k<{source}, {_flag(has_feedback)}>", "BlockTopKArgs")


def all_kernels(source: str) -> list[Kernel]:
    """Return all kernels for one input type."""
    kernels = [_SUM, _ADD, _SUM_BLOCKS, _ADD_BLOCKS, _CLEAR_SENT, _FILL_UNUSED, keep_kernel(source)]
    for has in (False, True):
        kernels += [digit_kernel(source, has, number) for number in range(3)]
        kernels += [compact_kernel(source, has, goal) for goal in ("kCandidates", "kTopK", "kThreshold")]
        kernels += [random_kernel(source, has), block_top_k_kernel(source, has)]
    return kernels


def _flag(value: bool) -> str:
    return "true" if value else "false"
