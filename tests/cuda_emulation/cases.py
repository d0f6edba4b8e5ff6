"""Expected bytes of the CUDA executor: the same cases on the CPU (emulated) and on a GPU (tests/gpu).

Every function takes the device that the tensors are on; the expected bytes are the NumPy reference's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from commlib.errors import CodecError
from commlib.kernels import cuda_codecs, cuda_sparse, reference_ops
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.reference import BLOCK_CODECS, F32, Bytes, Floats, Stream
from tests.unit.test_block_codecs import IDS, SIZES, inputs
from tests.unit.test_sparse_codecs import distributions

SLACK = 64  # bytes behind a buffer that nobody may write
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Guarded:
    """A tensor with bytes on both sides that must stay as they are."""

    def __init__(self, values: np.ndarray | torch.Tensor, device: torch.device) -> None:
        flat = torch.as_tensor(values).contiguous()
        room = torch.full((2 * SLACK + flat.nbytes,), 0xA5, dtype=torch.uint8, device=device)
        self._room = room
        self.tensor = room[SLACK : SLACK + flat.nbytes].view(flat.dtype).view(flat.shape)
        self.tensor.copy_(flat)

    def check(self) -> None:
        """Look at the surroundings."""
        edges = torch.cat([self._room[:SLACK], self._room[self._room.numel() - SLACK :]])
        assert bool((edges == 0xA5).all()), "written outside of a buffer"

    def numpy(self) -> np.ndarray:
        """The values, after the surroundings were looked at."""
        self.check()
        return self.tensor.cpu().numpy()


def payload_room(nbytes: int, device: torch.device) -> Guarded:
    return Guarded(np.full(nbytes, 0x5A, np.uint8), device)


def equal(got: np.ndarray, expected: np.ndarray, message: str = "") -> None:
    """Compare bits."""
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8), err_msg=message)


# --- block codecs -----------------------------------------------------------------------------------------------------


def encode(name: str, x: Floats | torch.Tensor, device: torch.device, **options) -> Bytes:
    out = payload_room(cuda_codecs.payload_bytes(IDS[name], len(x)), device)
    cuda_codecs.encode(IDS[name], Guarded(x, device).tensor, out.tensor, **options)
    return out.numpy()


def decode(name: str, payload: Bytes, numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Guarded:
    out = Guarded(torch.full((numel,), 7.0, dtype=dtype), device)
    cuda_codecs.decode(IDS[name], Guarded(payload, device).tensor, out.tensor)
    return out


def check_bytes_and_values(name: str, device: torch.device) -> None:
    rng, codec = np.random.default_rng(1), BLOCK_CODECS[name]
    for numel in SIZES:
        for label, x in inputs(rng, numel):
            expected = codec.encode(x)
            equal(encode(name, x, device), expected, f"{label}, {numel}")
            equal(decode(name, expected, numel, device).numpy(), codec.decode(expected, numel), f"{label}, {numel}")


def check_any_bytes(name: str, device: torch.device) -> None:
    rng, codec = np.random.default_rng(2), BLOCK_CODECS[name]
    for numel in SIZES:
        payload = rng.integers(0, 256, codec.sections(numel)[3], dtype=np.uint8)
        equal(decode(name, payload, numel, device).numpy(), codec.decode(payload, numel), str(numel))


def check_stochastic(name: str, device: torch.device) -> None:
    rng = np.random.default_rng(3)
    for numel in SIZES:
        for offset in (0, 5, 8, 2**35 + 3):
            stream = Stream(seed=0x1234_5678_9ABC_DEF0, step=7, rank=3, stage=2, offset=offset)
            source = Random(stream.seed, stream.step, stream.rank, stream.stage, [(0, offset)])
            for label, x in inputs(rng, numel):
                got = encode(name, x, device, random=source)
                equal(got, BLOCK_CODECS[name].encode(x, stream), f"{label}, {numel}, {offset}")


def check_segments(name: str, device: torch.device) -> None:
    """Segments shorter and longer than a block; chunks, and the chunk of `encode_sum`, begin somewhere in them."""
    rng, numel, chunk = np.random.default_rng(8), 3000, 700
    x = rng.standard_normal(numel).astype(F32)
    segments = [(0, 100), (3, 8), (4, 1000), (700, 5), (1500, 2**40), (2999, 1)]
    source = Random(9, 1, 2, 3, segments)
    ends = [start for start, _ in segments[1:]] + [numel]
    uniforms = np.concatenate(
        [Stream(9, 1, 2, 3, at).uniforms(0, end - start) for (start, at), end in zip(segments, ends, strict=True)]
    )

    class Fixed(Stream):
        def uniforms(self, start: int, count: int) -> Floats:
            return uniforms[self.offset + start : self.offset + start + count]

    out = payload_room(cuda_codecs.buffer_bytes(IDS[name], numel, chunk), device)
    cuda_codecs.encode(IDS[name], Guarded(x, device).tensor, out.tensor, chunk=chunk, random=source)
    starts = range(0, numel, chunk)
    expected = [BLOCK_CODECS[name].encode(x[at : at + chunk], Fixed(0, offset=at)) for at in starts]
    equal(out.numpy(), np.concatenate(expected))
    payloads = np.stack([BLOCK_CODECS[name].encode(x[:chunk]), BLOCK_CODECS[name].encode(x[chunk : 2 * chunk])])
    again = payload_room(payloads.shape[1], device)
    cuda_codecs.encode_sum(IDS[name], Guarded(payloads, device).tensor, chunk, again.tensor, random=source, first=chunk)
    total = reference_ops.decode_sum([BLOCK_CODECS[name].decode(payload, chunk) for payload in payloads])
    equal(again.numpy(), BLOCK_CODECS[name].encode(total, Fixed(0, offset=chunk)))


def check_feedback(name: str, device: torch.device) -> None:
    rng, codec = np.random.default_rng(4), BLOCK_CODECS[name]
    for numel in (0, 1, 300, 1025):
        for beta, gamma in ((1.0, 1.0), (0.9, -1.1)):
            for label, x in inputs(rng, numel):
                residual = rng.standard_normal(numel).astype(F32)
                payload, expected = reference_ops.encode_with_feedback(codec, x, residual, beta, gamma)
                own = Guarded(residual, device)
                got = encode(name, x, device, feedback=Feedback(own.tensor, beta, gamma))
                equal(got, payload, f"{label}, {numel}")
                equal(own.numpy(), expected, f"{label}, {numel}")


def check_sums(name: str, device: torch.device) -> None:
    rng, codec = np.random.default_rng(5), BLOCK_CODECS[name]
    for numel, count, scale in ((700, 5, 1.0), (700, 1, 1.0), (1024, 9, 1e36), (33, 4, 1e-39)):
        xs = [rng.standard_normal(numel).astype(F32) * F32(scale) for _ in range(count)]
        payloads = np.stack([codec.encode(x) for x in xs])
        rows = Guarded(payloads, device).tensor
        decoded = [codec.decode(payload, numel) for payload in payloads]
        for divisor in (1.0, 5.0):
            expected = reference_ops.decode_sum(decoded, divisor)
            out = Guarded(np.empty(numel, F32), device)
            cuda_codecs.decode_sum(IDS[name], rows, out.tensor, divisor=divisor)
            equal(out.numpy(), expected)
            again, residual = payload_room(payloads.shape[1], device), rng.standard_normal(numel).astype(F32)
            cuda_codecs.encode_sum(IDS[name], rows, numel, again.tensor, divisor=divisor)
            equal(again.numpy(), codec.encode(expected))
            payload, rest = reference_ops.encode_with_feedback(codec, expected, residual, 0.9)
            own = Guarded(residual, device)
            cuda_codecs.encode_sum(
                IDS[name], rows, numel, again.tensor, divisor=divisor, feedback=Feedback(own.tensor, 0.9)
            )
            equal(again.numpy(), payload)
            equal(own.numpy(), rest)
        added = Guarded(xs[-1], device)
        cuda_codecs.decode_add(IDS[name], Guarded(payloads[0], device).tensor, added.tensor, weight=0.3)
        equal(added.numpy(), reference_ops.decode_add(xs[-1], decoded[0], 0.3))


def check_casts(device: torch.device) -> None:
    rng = np.random.default_rng(6)
    for numel in SIZES:
        for label, x in inputs(rng, numel):
            for name, to, back in (
                ("bf16", reference_ops.cast_to_bf16, reference_ops.cast_from_bf16),
                ("fp16", reference_ops.cast_to_fp16, reference_ops.cast_from_fp16),
            ):
                expected = to(x)
                equal(encode(name, x, device), expected, f"{name}, {label}, {numel}")
                equal(decode(name, expected, numel, device).numpy(), back(expected, numel), f"{name}, {label}, {numel}")


def check_types(name: str, device: torch.device) -> None:
    """bf16, fp16 and fp64 in and out; the conversions are the native executor's, which has tests of its own."""
    for dtype in TYPES:
        for numel in (3, 1024, 1500):
            x = torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(numel)).to(dtype)
            payload = encode(name, x, device)
            equal(payload, BLOCK_CODECS[name].encode(x.float().numpy()), f"{dtype}, {numel}")
            decoded = torch.from_numpy(BLOCK_CODECS[name].decode(payload, numel))
            out = Guarded(torch.zeros(numel, dtype=dtype), device)
            cuda_codecs.decode(IDS[name], Guarded(payload, device).tensor, out.tensor)
            assert torch.equal(out.tensor.cpu(), decoded.to(dtype)), f"{dtype}, {numel}"
            cuda_codecs.decode_add(IDS[name], Guarded(payload, device).tensor, out.tensor, weight=0.5)
            expected = decoded.to(dtype).float() + F32(0.5) * decoded
            assert torch.equal(out.tensor.cpu(), expected.to(dtype)), f"{dtype}, {numel}"


def check_chunks(name: str, device: torch.device) -> None:
    """Chunks that begin at any address, and the shorter last one."""
    rng, codec = np.random.default_rng(7), BLOCK_CODECS[name]
    x = rng.standard_normal(5000).astype(F32)
    for chunk in (5000, 1024, 999, 37):
        expected = np.concatenate([codec.encode(x[at : at + chunk]) for at in range(0, 5000, chunk)])
        out = payload_room(cuda_codecs.buffer_bytes(IDS[name], 5000, chunk), device)
        own = Guarded(np.zeros(5000, F32), device)
        feedback = Feedback(own.tensor)
        cuda_codecs.encode(IDS[name], Guarded(x, device).tensor, out.tensor, chunk=chunk, feedback=feedback)
        equal(out.numpy(), expected, str(chunk))
        back = Guarded(np.zeros(5000, F32), device)
        cuda_codecs.decode(IDS[name], out.tensor, back.tensor, chunk=chunk)
        parts = [
            codec.decode(codec.encode(x[at : at + chunk]), len(x[at : at + chunk])) for at in range(0, 5000, chunk)
        ]
        equal(back.numpy(), np.concatenate(parts), str(chunk))
        equal(own.numpy(), reference_ops.new_residual(x, np.concatenate(parts), x), str(chunk))


def check_unaligned(name: str, device: torch.device) -> None:
    """Tensors that begin between two multiples of 16 bytes."""
    rng, codec = np.random.default_rng(9), BLOCK_CODECS[name]
    for shift in (1, 2, 3):
        x = Guarded(rng.standard_normal(1100).astype(F32), device)
        expected = codec.encode(x.numpy()[shift:])
        out, own = payload_room(len(expected), device), Guarded(np.zeros(1100, F32), device)
        feedback = Feedback(own.tensor[shift:])
        cuda_codecs.encode(IDS[name], x.tensor[shift:], out.tensor, feedback=feedback)
        equal(out.numpy(), expected)
        back = Guarded(np.zeros(1100, F32), device)
        cuda_codecs.decode(IDS[name], out.tensor, back.tensor[shift:])
        equal(back.numpy()[shift:], codec.decode(expected, 1100 - shift))


# --- the rotation -----------------------------------------------------------------------------------------------------


def check_rotation(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    for offset in (0, 77, 127):
        stream, random = Stream(5, 1, 2, 3, offset), Random(5, 1, 2, 3, [(0, offset)])
        for numel in (0, 1, 2, 3, 63, 127, 255, 256, 257, 511, 1000, 7001):
            for x in (rng.standard_normal(numel), np.full(numel, 3e38), rng.standard_normal(numel) * 1e-40):
                x = x.astype(F32)
                if numel > 300:
                    x[290] = np.nan
                for is_inverse, reference in ((False, reference_ops.rotate), (True, reference_ops.rotate_back)):
                    out, expected = Guarded(np.full(numel, 9, F32), device), reference(x, stream)
                    cuda_codecs.rotate(Guarded(x, device).tensor, out.tensor, random, is_inverse=is_inverse)
                    equal(out.numpy(), expected, f"{numel}, {offset}")
                    own = Guarded(x, device)
                    cuda_codecs.rotate(own.tensor, own.tensor, random, is_inverse=is_inverse)
                    equal(own.numpy(), expected, f"in place, {numel}, {offset}")


def check_rotation_segments(device: torch.device) -> None:
    x = np.random.default_rng(1).standard_normal(1000).astype(F32)
    whole, parts = Random(9, segments=[(0, 100)]), Random(9, segments=[(0, 100), (5, 105), (300, 400), (301, 401)])
    first, second = Guarded(x, device), Guarded(x, device)
    cuda_codecs.rotate(first.tensor, first.tensor, whole)
    cuda_codecs.rotate(second.tensor, second.tensor, parts)
    equal(second.numpy(), first.numpy())
    equal(first.numpy(), reference_ops.rotate(x, Stream(9, offset=100)))


# --- sparse codecs ----------------------------------------------------------------------------------------------------


def counts(numel: int) -> list[int]:
    return sorted({0, min(1, numel), numel // 100, numel // 3, numel})


def check_top_k(numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    rng = np.random.default_rng(numel)
    for label, x in distributions(rng, numel):
        tensor = torch.from_numpy(x).to(dtype)
        plain = tensor.float().numpy()
        for places in counts(numel):
            out = payload_room(cuda_sparse.payload_bytes(places), device)
            cuda_sparse.encode_top_k(Guarded(tensor, device).tensor, places, out.tensor)
            expected = reference_ops.sparse_payload(plain, reference_ops.top_k(plain, places), places)
            equal(out.numpy(), expected, f"{label}, {places} of {numel}")


def check_top_k_feedback(numel: int, device: torch.device, beta: float = 1.0, gamma: float = 1.0) -> None:
    rng = np.random.default_rng(numel)
    for label, x in distributions(rng, numel):
        for places in counts(numel):
            residual = (rng.standard_normal(numel) * 0.1).astype(F32)
            v = reference_ops.compensated(x, residual, beta)
            named = reference_ops.top_k(v, places)
            payload, expected = reference_ops.sparse_with_feedback(v, residual, named, places, gamma)
            own, out = Guarded(residual, device), payload_room(cuda_sparse.payload_bytes(places), device)
            feedback = Feedback(own.tensor, beta, gamma)
            cuda_sparse.encode_top_k(Guarded(x, device).tensor, places, out.tensor, feedback)
            equal(out.numpy(), payload, f"{label}, {places} of {numel}")
            equal(own.numpy(), expected, f"{label}, {places} of {numel}")


def check_threshold(numel: int, device: torch.device) -> None:
    rng = np.random.default_rng(numel)
    for label, x in distributions(rng, numel):
        for places in counts(numel):
            for threshold in (1e-30, 1.0, 2.5):
                residual = (rng.standard_normal(numel) * 0.1).astype(F32)
                v = reference_ops.compensated(x, residual)
                named = reference_ops.above(v, places, threshold)
                payload, expected = reference_ops.sparse_with_feedback(v, residual, named, places)
                own, out = Guarded(residual, device), payload_room(cuda_sparse.payload_bytes(places), device)
                tensor = Guarded(x, device).tensor
                cuda_sparse.encode_above(tensor, threshold, places, out.tensor, Feedback(own.tensor))
                equal(out.numpy(), payload, f"{label}, {places} of {numel}")
                equal(own.numpy(), expected, f"{label}, {places} of {numel}")


def check_random_k(numel: int, device: torch.device) -> None:
    rng = np.random.default_rng(numel)
    x = rng.standard_normal(numel).astype(F32)
    if numel > 5:
        x[5] = np.inf
    for places in counts(numel):
        named = reference_ops.random_k(numel, places, Stream(seed=11, step=3, rank=1, stage=2))
        residual = (rng.standard_normal(numel) * 0.1).astype(F32)
        v = reference_ops.compensated(x, residual)
        payload, expected = reference_ops.sparse_with_feedback(v, residual, named, places)
        own, out = Guarded(residual, device), payload_room(cuda_sparse.payload_bytes(places), device)
        random = Random(11, 3, 1, 2)
        cuda_sparse.encode_random_k(Guarded(x, device).tensor, places, out.tensor, random, Feedback(own.tensor))
        equal(out.numpy(), payload, f"{places} of {numel}")
        equal(own.numpy(), expected, f"{places} of {numel}")


def check_sparse_sums(device: torch.device) -> None:
    rng, numel, places = np.random.default_rng(3), 9000, 300
    xs = [rng.standard_normal(numel).astype(F32) for _ in range(4)]
    xs[1][10], xs[2][20] = np.nan, -0.0
    named = [reference_ops.top_k(x, places) for x in xs]
    named[3] = named[3][:200]  # a payload with unused places
    payloads = np.stack([reference_ops.sparse_payload(x, idx, places) for x, idx in zip(xs, named, strict=True)])
    decoded = [reference_ops.sparse_values(payload, places, numel) for payload in payloads]
    for count in (1, 4):
        for divisor in (1.0, 4.0, -4.0):
            out = Guarded(np.full(numel, 3, F32), device)
            cuda_sparse.decode_sum(Guarded(payloads[:count], device).tensor, places, out.tensor, divisor)
            equal(out.numpy(), reference_ops.decode_sum(decoded[:count], divisor))
    for j in range(4):
        added = Guarded(xs[0], device)
        cuda_sparse.decode_add(Guarded(payloads[j], device).tensor, places, added.tensor, 0.3)
        is_named = np.isin(np.arange(numel), named[j])
        equal(added.numpy(), np.where(is_named, reference_ops.decode_add(xs[0], decoded[j], 0.3), xs[0]))
    cuda_sparse.raise_if_damaged(device)


def check_block_top_k(kept: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    for numel in (0, 1, 3, 65, 4095, 4096, 4097, 9000):
        rng = np.random.default_rng(numel)
        nbytes = cuda_sparse.block_top_k_bytes(numel, kept)
        for label, x in distributions(rng, numel):
            tensor, residual = torch.from_numpy(x).to(dtype), (rng.standard_normal(numel) * 0.1).astype(F32)
            plain = tensor.float().numpy()
            v = reference_ops.compensated(plain, residual, 0.95)
            payload = reference_ops.block_top_k_payload(v, kept)
            values = reference_ops.block_top_k_values(payload, kept, numel)
            own, out = Guarded(residual, device), payload_room(nbytes, device)
            feedback = Feedback(own.tensor, 0.95, -1.5)
            cuda_sparse.encode_block_top_k(Guarded(tensor, device).tensor, kept, out.tensor, feedback)
            equal(out.numpy(), payload, f"{label}, {numel}")
            equal(own.numpy(), reference_ops.new_residual(v, values, residual, -1.5), f"{label}, {numel}")
            cuda_sparse.encode_block_top_k(Guarded(tensor, device).tensor, kept, out.tensor)
            equal(out.numpy(), reference_ops.block_top_k_payload(plain, kept), f"{label}, {numel}")


def check_block_top_k_sums(device: torch.device) -> None:
    rng, numel, kept = np.random.default_rng(3), 9000, 300
    xs = [rng.integers(-3, 4, numel).astype(F32) for _ in range(4)]
    xs[1][10] = np.nan
    payloads = np.stack([reference_ops.block_top_k_payload(x, kept) for x in xs])
    decoded = [reference_ops.block_top_k_values(payload, kept, numel) for payload in payloads]
    for count in (1, 4):
        for divisor in (1.0, 4.0, -4.0):
            out = Guarded(np.full(numel, 3, F32), device)
            cuda_sparse.sum_block_top_k(Guarded(payloads[:count], device).tensor, kept, out.tensor, divisor)
            equal(out.numpy(), reference_ops.decode_sum(decoded[:count], divisor))
    added = Guarded(xs[0], device)
    cuda_sparse.add_block_top_k(Guarded(payloads[2], device).tensor, kept, added.tensor, 0.3)
    equal(added.numpy(), reference_ops.decode_add(xs[0], decoded[2], 0.3))
    cuda_sparse.raise_if_damaged(device)


def check_block_top_k_damage(device: torch.device) -> None:
    """Any bytes: nothing outside is touched, and the device remembers indices that are out of order."""
    rng, numel, kept = np.random.default_rng(5), 5000, 64
    for _ in range(20):
        noise = Guarded(rng.integers(0, 256, cuda_sparse.block_top_k_bytes(numel, kept), dtype=np.uint8), device)
        out = Guarded(np.zeros(numel, F32), device)
        for decode in (
            lambda noise=noise, out=out: cuda_sparse.sum_block_top_k(noise.tensor.view(1, -1), kept, out.tensor),
            lambda noise=noise, out=out: cuda_sparse.add_block_top_k(noise.tensor, kept, out.tensor),
        ):
            decode()
            out.check()
            with pytest.raises(CodecError, match="payload 0 of a decoding"):
                cuda_sparse.raise_if_damaged(device)


def check_many_payloads(device: torch.device) -> None:
    """More of them than a block of threads searches at once."""
    rng, numel, places, count = np.random.default_rng(4), 500, 20, 150
    xs = rng.standard_normal((count, numel)).astype(F32)
    payloads = np.stack([reference_ops.sparse_payload(x, reference_ops.top_k(x, places), places) for x in xs])
    out = Guarded(np.zeros(numel, F32), device)
    cuda_sparse.decode_sum(Guarded(payloads, device).tensor, places, out.tensor, float(count))
    decoded = [reference_ops.sparse_values(payload, places, numel) for payload in payloads]
    equal(out.numpy(), reference_ops.decode_sum(decoded, float(count)))


def check_damage(device: torch.device) -> None:
    """Damaged payloads: nothing outside is written, valid elements are decoded, and the device records the error."""
    x, places = np.arange(1, 101, dtype=F32), 10
    good = reference_ops.sparse_payload(x, reference_ops.top_k(x, places), places)
    for place, index in ((0, 100), (9, 2**31), (5, 3), (0, 0xFFFFFFFF), (4, 93)):
        bad = good.copy()
        bad[4 * place : 4 * place + 4] = np.array([index], np.uint32).view(np.uint8)
        for decoding in ("sum", "add"):
            out = Guarded(np.zeros(100, F32), device)
            if decoding == "sum":
                rows = Guarded(np.stack([good, bad]), device)
                cuda_sparse.decode_sum(rows.tensor, places, out.tensor)
            else:
                cuda_sparse.decode_add(Guarded(bad, device).tensor, places, out.tensor)
            assert not np.isnan(out.numpy()).any()
            with pytest.raises(CodecError, match=f"payload {int(decoding == 'sum')} of a decoding"):
                cuda_sparse.raise_if_damaged(device)
            cuda_sparse.raise_if_damaged(device)  # told once
    rng = np.random.default_rng(5)
    for _ in range(50):
        noise = rng.integers(0, 256, len(good), dtype=np.uint8)
        noise[:40] = rng.integers(0, 130, 10).astype(np.uint32).view(np.uint8)
        out = Guarded(np.zeros(100, F32), device)
        cuda_sparse.decode_sum(Guarded(noise, device).tensor.view(1, -1), places, out.tensor)
        cuda_sparse.decode_add(Guarded(noise, device).tensor, places, out.tensor)
        out.numpy()
    with pytest.raises(CodecError, match="ascending indices"):
        cuda_sparse.raise_if_damaged(device)
