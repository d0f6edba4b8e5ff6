"""The functions that benchmarks/kernels.py measures: kernels of each codec, copies, and those of other libraries."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commlib import codecs
from commlib.codecs import Feedback, Random
from commlib.kernels import cuda_codecs, native, native_codecs

INPUTS = 8  # of decode-sum and decode-sum-encode
RATIO, THRESHOLD = 0.01, 2.6  # of normally distributed elements, 0.93 % reach the threshold
ROTATION = "hadamard"  # in place of a codec


@dataclass(frozen=True)
class Kernel:
    """One measured function.

    Attributes:
        name: The name of the operation.
        codec: The codec, or the name of the other library.
        bytes_moved: Bytes that it must read and write, each counted once.
        run: Calls it once.
        payload_bytes: Size of the whole tensor's payload; 0 if it has no payload.
        peer_of: For functions of other libraries, the kernel (name, codec) that they are compared with.
    """

    name: str
    codec: str
    bytes_moved: int
    run: Callable[[], object]
    payload_bytes: int = 0
    peer_of: tuple[str, str] | None = None


@dataclass(frozen=True)
class Tensors:
    """The tensors shared by all kernels of a size: three fp32 tensors of equal size."""

    x: torch.Tensor
    out: torch.Tensor
    residual: torch.Tensor


def new_tensors(numel: int, device: str) -> Tensors:
    x = torch.randn(numel, generator=torch.Generator(device).manual_seed(0), device=device)
    return Tensors(x, torch.zeros_like(x), torch.zeros_like(x))


def copies(tensors: Tensors) -> list[Kernel]:
    """Return memcpy, which everything is compared with, and a copy that goes past the caches."""
    out, x = tensors.out, tensors.x
    if x.device.type != "cpu":
        return [Kernel("memcpy", "-", 2 * x.nbytes, lambda: out.copy_(x))]
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    libc.memcpy.restype = None
    arguments = out.data_ptr(), x.data_ptr(), x.nbytes
    stream_copy = native.load().stream_copy
    return [
        Kernel("memcpy", "-", 2 * x.nbytes, lambda: (libc.memcpy(*arguments), out, x)[0]),
        Kernel("non-temporal copy", "-", 2 * x.nbytes, lambda: (stream_copy(out, x), out)[1]),
    ]


def shared_by_threads(tensors: Tensors) -> list[Kernel]:
    """Return simple operations that torch runs on all threads, which show the gain for reading and for writing.

    Not to be measured just before another kernel with several threads: torch's spin for a while after it.
    """
    out, x = tensors.out, tensors.x
    return [
        Kernel("torch sum", "-", x.nbytes, x.sum),
        Kernel("torch add_", "-", 3 * x.nbytes, lambda: out.add_(x)),
    ]


def kernels_of(name: str, tensors: Tensors) -> list[Kernel]:
    """Return the kernels of the codec `name`, or those of the rotation."""
    if name == ROTATION:
        return _rotation(tensors)
    codec = codecs.by_name[name]
    if not issubclass(codec, codecs.SparseCodec):
        return _block(codec(), tensors)
    options = {codecs.Threshold: (THRESHOLD, RATIO), codecs.BlockTopK: ()}.get(codec, (RATIO,))
    return _sparse(codec(*options), tensors)


def _bytes(nbytes: int, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)


def _block(codec: codecs.BlockCodec, tensors: Tensors) -> list[Kernel]:
    x, out = tensors.x, tensors.out
    full, size = x.nbytes, codec.payload_bytes(x.numel())
    payload, feedback, random = _bytes(size, x), Feedback(tensors.residual), Random(seed=1)
    codec.encode(x, payload)

    def made(name: str, moved: int, run: Callable[[], object]) -> Kernel:
        return Kernel(name, codec.name, moved, run, size)

    result = [
        made("encode", full + size, lambda: codec.encode(x, payload)),
        made("encode + feedback", 3 * full + size, lambda: codec.encode(x, payload, feedback=feedback)),
        made("decode", full + size, lambda: codec.decode(payload, out)),
        made("decode-add", 2 * full + size, lambda: codec.decode_add(payload, out, weight=0.5)),
    ]
    if codec.rounds_stochastically:
        result.append(made("encode, stochastic", full + size, lambda: codec.encode(x, payload, random=random)))
    chunk = max(x.numel() // INPUTS, 1)
    small = codec.payload_bytes(chunk)
    rows, again, total = _bytes(INPUTS * small, x).view(INPUTS, small), _bytes(small, x), out[:chunk]
    for row in rows:
        codec.encode(x[:chunk], row)
    sums, divisor = (INPUTS + 1) * small, float(INPUTS)
    result.append(
        made("decode-sum", INPUTS * small + 4 * chunk, lambda: codec.decode_sum(rows, total, divisor=divisor))
    )
    result.append(made("decode-sum-encode", sums, lambda: codec.encode_sum(rows, chunk, again, divisor=divisor)))
    return result


def _sparse(codec: Any, tensors: Tensors) -> list[Kernel]:
    x, out = tensors.x, tensors.out
    full, size, places = x.nbytes, codec.payload_bytes(x.numel()), codec.places(x.numel())
    # The residual is read and written but not added (beta 0): else the same values, given again and again, would grow
    # in it from call to call, and soon all of them would reach the threshold.
    payload, feedback, random = _bytes(size, x), Feedback(tensors.residual, beta=0.0), Random(seed=1)
    read = min(64 * places, full) if isinstance(codec, codecs.RandomK) else full  # a cache line for each random element
    codec.encode(x, payload, random=random)

    def made(name: str, moved: int, run: Callable[[], object]) -> Kernel:
        return Kernel(name, codec.name, moved, run, size)

    return [
        made("encode", read + size, lambda: codec.encode(x, payload, random=random)),
        made("encode + feedback", 3 * full + size, lambda: codec.encode(x, payload, feedback=feedback, random=random)),
        made("decode", full + size, lambda: codec.decode(payload, out)),
        made("decode-add", min(128 * places, 2 * full) + size, lambda: codec.decode_add(payload, out, weight=0.5)),
    ]


def _rotation(tensors: Tensors) -> list[Kernel]:
    x, out, random = tensors.x, tensors.out, Random(seed=1)
    moved = 2 * x.nbytes
    executor = native_codecs if x.device.type == "cpu" else cuda_codecs
    return [
        Kernel("rotate", ROTATION, moved, lambda: executor.rotate(x, out, random)),
        Kernel("rotate back", ROTATION, moved, lambda: executor.rotate(x, out, random, is_inverse=True)),
    ]


# -- other libraries --------------------------------------------------------------------------------------------------


def peers_of(name: str, tensors: Tensors) -> list[Kernel]:
    """Return the functions of other libraries for the codec's tasks, without allocation if possible."""
    x = tensors.x
    made: list[Kernel] = []
    if name in ("bf16", "fp16"):
        made += _torch_casts(name, tensors)
    if name == "topk":
        made += _selections(x)
    if name == "uint8_minmax":
        made.append(_peer("torch min, max, round", "torch", x.nbytes * 5 // 4, lambda: _torch_uint8(x), "encode", name))
    if name == "int8" and _has("triton") and x.is_cuda:
        made += _triton(tensors)
    if name in ("int8", "uint8_minmax") and _has("fbgemm_gpu") and x.numel() % 256 == 0:
        made += _fbgemm(name, tensors)
    if name == "int8" and _has("bitsandbytes") and x.numel() % 256 == 0:
        made += _bitsandbytes(x)
    if name == "mxfp8" and _has("torchao") and x.numel() % 32 == 0:
        made += _torchao(x)
    return made


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _peer(name: str, library: str, moved: int, run: Callable[[], object], kernel: str, codec: str) -> Kernel:
    return Kernel(name, library, moved, run, peer_of=(kernel, codec))


def _torch_casts(name: str, tensors: Tensors) -> list[Kernel]:
    x, out = tensors.x, tensors.out
    half = torch.empty_like(x, dtype=torch.bfloat16 if name == "bf16" else torch.float16)
    moved = x.nbytes + half.nbytes
    return [
        _peer("torch copy_", "torch", moved, lambda: half.copy_(x), "encode", name),
        _peer("torch copy_", "torch", moved, lambda: out.copy_(half), "decode", name),
    ]


def _selections(x: torch.Tensor) -> list[Kernel]:
    places = max(1, round(x.numel() * RATIO))
    made = [_peer("torch.topk", "torch", x.nbytes, lambda: torch.topk(x.abs(), places), "encode", "topk")]
    if x.device.type == "cpu":

        def select() -> object:
            return np.argpartition(np.abs(x.numpy()), -places)

        made.append(_peer("numpy argpartition", "numpy", x.nbytes, select, "encode", "topk"))
    return made


def _torch_uint8(x: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1, 256) if x.numel() % 256 == 0 else x.view(1, -1)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    return ((rows - low) * (255 / (high - low).clamp_min(1e-30))).round_().to(torch.uint8)


def _triton(tensors: Tensors) -> list[Kernel]:
    from triton_peer import Int8

    peer, x, out = Int8(tensors.x), tensors.x, tensors.out
    moved = x.nbytes + peer.nbytes
    return [
        _peer("Triton int8", "triton", moved, lambda: peer.encode(x), "encode", "int8"),
        _peer("Triton int8", "triton", moved, lambda: peer.decode(out), "decode", "int8"),
    ]


def _fbgemm(name: str, tensors: Tensors) -> list[Kernel]:
    import fbgemm_gpu  # noqa: F401  (registers the operators)

    ops, rows = torch.ops.fbgemm, tensors.x.view(-1, 256)
    packed = ops.FloatToFused8BitRowwiseQuantized(rows)
    moved = rows.nbytes + packed.nbytes
    into = getattr(ops, "FloatToFused8BitRowwiseQuantizedOut", None)
    encode = (lambda: into(packed, rows)) if into else (lambda: ops.FloatToFused8BitRowwiseQuantized(rows))
    back = getattr(ops, "Fused8BitRowwiseQuantizedToFloatOut", None)
    view = tensors.out.view(-1, 256)
    decode = (lambda: back(view, packed)) if back else (lambda: ops.Fused8BitRowwiseQuantizedToFloat(packed))
    return [
        _peer("FBGEMM 8-bit quantize", "fbgemm", moved, encode, "encode", name),
        _peer("FBGEMM 8-bit dequantize", "fbgemm", moved, decode, "decode", name),
    ]


def _bitsandbytes(x: torch.Tensor) -> list[Kernel]:
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    codes, state = quantize_blockwise(x, blocksize=256)
    moved = x.nbytes + codes.nbytes + x.numel() // 64
    return [
        _peer(
            "bitsandbytes quantize",
            "bitsandbytes",
            moved,
            lambda: quantize_blockwise(x, blocksize=256),
            "encode",
            "int8",
        ),
        _peer(
            "bitsandbytes dequantize",
            "bitsandbytes",
            moved,
            lambda: dequantize_blockwise(codes, state),
            "decode",
            "int8",
        ),
    ]


def _torchao(x: torch.Tensor) -> list[Kernel]:
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    moved = x.nbytes * 5 // 4 + x.numel() // 32
    return [
        _peer("torchao to_mx", "torchao", moved, lambda: to_mx(x, torch.float8_e4m3fn, 32), "encode", "mxfp8"),
    ]
