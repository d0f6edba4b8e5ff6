"""The block codecs on CUDA tensors: the functions of native_codecs.py, with the same arguments and bitwise results.

Kernels are launched on torch's current stream of the tensors' device, one launch for all chunks of a tensor (two for
`uint8_bagua`), without synchronization. As with any work on a stream, the caller must synchronize tensors that were
created on another stream, or that are freed while another stream uses them.
"""

from __future__ import annotations

import torch

from commlib.errors import CodecError
from commlib.kernels import checks, cuda
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.codec_table import BLOCK_BY_ID, BLOCK_ROWS, BlockRow
from commlib.kernels.cuda_args import (
    TYPES,
    WARPS_PER_BLOCK,
    DecodeArgs,
    EncodeArgs,
    Kernel,
    RotateArgs,
    blocks_of,
    chunks_of,
    codec_asserts,
    random_source,
)

ROTATE_KERNEL = Kernel("rotate_kernels.h", "rotate", "RotateArgs")
_ASSERTS = {row.struct: codec_asserts(row) for row in BLOCK_ROWS}
_PIECE = 256  # elements of the longest piece of the rotation
_MOST_PARTS = 64  # maximum parts of a chunk whose ranges uint8_bagua computes separately


def payload_bytes(codec: int, numel: int) -> int:
    """Return the size in bytes of the payload of one chunk of `numel` elements.

    Raises:
        CodecError: No block codec has this id.
    """
    return _row(codec).payload_bytes(numel)


def buffer_bytes(codec: int, numel: int, chunk: int) -> int:
    """Return the size in bytes of the payloads of all chunks of a tensor."""
    return checks.bytes_of_chunks(_row(codec).payload_bytes, numel, chunk)


def encode(
    codec: int,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    chunk: int | None = None,
    feedback: Feedback | None = None,
    random: Random | None = None,
) -> None:
    """Encode `x` into `out`; arguments as in `native_codecs.encode`, all on one CUDA device.

    Raises:
        CodecError: An argument is not as described, or CUDA kernels cannot be compiled here. Nothing was written.
    """
    device, row = cuda.device_of("out", out), _row(codec)
    chunk = checks.check_encoding(x, row.payload_bytes, out, chunk, feedback, device)
    args = _encode_args(row, x.numel(), chunk, out, feedback, random)
    args.x = x.data_ptr()
    _launch_encode(row, TYPES[x.dtype], args, device, is_sum=False)


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
    """Encode the sum of the payloads, divided; arguments as in `native_codecs.encode_sum`, all on one CUDA device.

    Raises:
        CodecError: An argument is not as described, or CUDA kernels cannot be compiled here. Nothing was written.
    """
    device, row = cuda.device_of("out", out), _row(codec)
    count = checks.check_sum_encoding(payloads, row.payload_bytes, numel, out, feedback, device)
    checks.check_number("divisor", divisor, may_be_zero=False)
    checks.check_first(first)
    args = _encode_args(row, numel, max(numel, 1), out, feedback, random)
    args.inputs, args.num_inputs, args.divisor, args.first = payloads.data_ptr(), count, divisor, first
    _launch_encode(row, "Float32", args, device, is_sum=True)


def decode(codec: int, payload: torch.Tensor, out: torch.Tensor, *, chunk: int | None = None) -> None:
    """Decode the payloads of all chunks into `out`; arguments as in `native_codecs.decode`, all on one CUDA device.

    Raises:
        CodecError: An argument is not as described, or CUDA kernels cannot be compiled here. Nothing was written.
    """
    _decode(codec, payload, out, chunk, DecodeArgs(num_inputs=1, divisor=1.0))


def decode_add(
    codec: int, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0, chunk: int | None = None
) -> None:
    """Add `weight` times the decoded values to `out`; arguments as in `decode`.

    Raises:
        CodecError: As for `decode`.
    """
    checks.check_number("weight", weight)
    _decode(codec, payload, out, chunk, DecodeArgs(num_inputs=1, divisor=1.0, adds=1, weight=weight))


def decode_sum(codec: int, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
    """Write the sum of the payloads, divided; arguments as in `native_codecs.decode_sum`, all on one CUDA device.

    Raises:
        CodecError: An argument is not as described, or CUDA kernels cannot be compiled here. Nothing was written.
    """
    device, row = cuda.device_of("out", out), _row(codec)
    count = checks.check_sum_decoding(payloads, row.payload_bytes, out, device)
    checks.check_number("divisor", divisor, may_be_zero=False)
    _launch_decode(row, payloads, out, max(out.numel(), 1), DecodeArgs(num_inputs=count, divisor=divisor))


def rotate(x: torch.Tensor, out: torch.Tensor, random: Random, *, is_inverse: bool = False) -> None:
    """Apply the random Hadamard rotation, or undo it; arguments as in `native_codecs.rotate`, on one CUDA device.

    Raises:
        CodecError: An argument is not as described, or CUDA kernels cannot be compiled here. Nothing was written.
    """
    device = cuda.device_of("out", out)
    checks.check_rotation(x, out, device)
    args = RotateArgs(x.data_ptr(), out.data_ptr(), x.numel(), random_source(random, device), is_inverse)
    cuda.launch(ROTATE_KERNEL, blocks_of(x.numel(), _PIECE * WARPS_PER_BLOCK), args, device)


# --- launches ---------------------------------------------------------------------------------------------------------


def _row(codec: int) -> BlockRow:
    try:
        return BLOCK_BY_ID[codec]
    except KeyError:
        raise CodecError(f"codec: expected the id of a block codec, got {codec}") from None


def _encode_args(
    row: BlockRow, numel: int, chunk: int, out: torch.Tensor, feedback: Feedback | None, random: Random | None
) -> EncodeArgs:
    args = EncodeArgs(chunks=chunks_of(row, numel, chunk), out=out.data_ptr(), divisor=1.0, beta=1.0, gamma=1.0)
    if feedback is not None:
        args.residual, args.beta, args.gamma = feedback.residual.data_ptr(), feedback.beta, feedback.gamma
    if random is not None:
        args.random = random_source(random, out.device)
    return args


def _launch_encode(row: BlockRow, source: str, args: EncodeArgs, device: torch.device, *, is_sum: bool) -> None:
    has_feedback, is_random = bool(args.residual), bool(args.random.num_segments)
    # Keep a reference until both launches are queued; the allocator then reuses the memory only for later work.
    ranges = _find_ranges(row, source, args, device, is_sum=is_sum) if row.is_one_block else None
    kernel = encode_kernel(row.struct, source, has_feedback, is_random, is_sum)
    cuda.launch(kernel, blocks_of(args.chunks.num_tiles, WARPS_PER_BLOCK), args, device)
    del ranges


def _find_ranges(row: BlockRow, source: str, args: EncodeArgs, device: torch.device, *, is_sum: bool) -> torch.Tensor:
    num_chunks = blocks_of(args.chunks.numel, args.chunks.chunk)
    args.parts = min(_MOST_PARTS, max(1, blocks_of(args.chunks.tiles_per_chunk, WARPS_PER_BLOCK)))
    ranges = torch.empty(num_chunks * args.parts * 2, dtype=torch.int32, device=device)
    args.ranges = ranges.data_ptr()
    kernel = ranges_kernel(row.struct, source, bool(args.residual), is_sum)
    cuda.launch(kernel, num_chunks * args.parts, args, device)
    return ranges


def _decode(codec: int, payload: torch.Tensor, out: torch.Tensor, chunk: int | None, args: DecodeArgs) -> None:
    device, row = cuda.device_of("out", out), _row(codec)
    chunk = checks.check_decoding(payload, row.payload_bytes, out, chunk, device)
    _launch_decode(row, payload, out, chunk, args)


def _launch_decode(row: BlockRow, payloads: torch.Tensor, out: torch.Tensor, chunk: int, args: DecodeArgs) -> None:
    args.chunks = chunks_of(row, out.numel(), chunk)
    args.inputs, args.out = payloads.data_ptr(), out.data_ptr()
    kernel = decode_kernel(row.struct, TYPES[out.dtype], args.num_inputs > 1 or args.divisor != 1.0)
    cuda.launch(kernel, blocks_of(args.chunks.num_tiles, WARPS_PER_BLOCK), args, out.device)


def encode_kernel(codec: str, source: str, has_feedback: bool, is_random: bool, is_sum: bool) -> Kernel:
    """Return the kernel that encodes tensors of the type `source`, or sums of payloads."""
    flags = ", ".join(str(flag).lower() for flag in (has_feedback, is_random, is_sum))
    return _kernel("encode_kernels.h", f"encode<{codec}, {source}, {flags}>", "EncodeArgs", codec)


def ranges_kernel(codec: str, source: str, has_feedback: bool, is_sum: bool) -> Kernel:
    """Return the kernel that computes the ranges of the parts of chunks."""
    flags = ", ".join(str(flag).lower() for flag in (has_feedback, is_sum))
    return _kernel("encode_kernels.h", f"find_ranges<{codec}, {source}, {flags}>", "EncodeArgs", codec)


def decode_kernel(codec: str, target: str, is_sum: bool) -> Kernel:
    """Return the kernel that decodes one payload, or a sum or quotient, into tensors of the type `target`."""
    return _kernel("decode_kernels.h", f"decode<{codec}, {target}, {str(is_sum).lower()}>", "DecodeArgs", codec)


def _kernel(header: str, call: str, args: str, codec: str) -> Kernel:
    return Kernel(header, call, args, _ASSERTS[codec])
