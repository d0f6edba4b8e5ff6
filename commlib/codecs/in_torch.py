"""Base classes for codecs of other packages, implemented in torch operations (CONTRIBUTING.md, "Adding a codec").

The operations run on the device of the tensors: the CPU, a CUDA device, or the meta device, where a simulator counts
them. They must not wait for a value of a tensor (`item`, `nonzero`, boolean masks as indices).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from commlib.codecs.base import BlockCodec, Feedback, Random
from commlib.codecs.sparse import SparseCodec
from commlib.errors import CodecError
from commlib.kernels import checks, meta
from commlib.kernels.codec_table import aligned

_LOW, _WORD = 0xFFFF, 0xFFFFFFFF


class _Shown:
    """Defines a `repr` with the codec's attributes that is the same on all ranks."""

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name[0] != "_")
        return f"{type(self).__name__}({options})"


class TorchBlockCodec(_Shown, BlockCodec, ABC):
    """A block codec whose encoding and decoding of one chunk are torch operations.

    A subclass sets `id` (one of `FOREIGN_IDS`), `name` and `block`, optionally `version` and `rounds_stochastically`,
    and defines `packed_bytes`, `pack` and `unpack`. It must be constructible without arguments to be used by name.
    """

    @abstractmethod
    def packed_bytes(self, numel: int) -> int:
        """Return the number of bytes that `pack` returns for `numel` elements, at least one."""

    @abstractmethod
    def pack(self, values: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
        """Return the bytes of a chunk.

        Args:
            values: [numel] fp32, at least one element; must not be modified.
            uniforms: [numel] fp32 in [0, 1) for stochastic rounding: round up where fraction + uniform reaches 1. None
                to round to nearest.

        Returns:
            [packed_bytes(numel)] uint8. A non-finite element must decode to a non-finite value.
        """

    @abstractmethod
    def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the [numel] fp32 values of a packed chunk, which starts at a multiple of 16 bytes."""

    @override
    def payload_bytes(self, numel: int) -> int:
        return aligned(self.packed_bytes(numel)) if numel else 0

    @override
    def buffer_bytes(self, numel: int, chunk: int) -> int:
        return checks.bytes_of_chunks(self.payload_bytes, numel, chunk)

    @override
    def encode(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        chunk: int | None = None,
        feedback: Feedback | None = None,
        random: Random | None = None,
    ) -> None:
        self._check_random(random)
        chunk = checks.check_encoding(x, self.payload_bytes, out, chunk, feedback, _device_of(out))

        def work() -> None:
            self._encode(x.float(), out, chunk, feedback, random, 0)

        _run(work, out, self, "encode", x.numel(), x.dtype, chunk, feedback is None, random is None)

    @override
    def encode_sum(
        self,
        payloads: torch.Tensor,
        numel: int,
        out: torch.Tensor,
        *,
        divisor: float = 1.0,
        feedback: Feedback | None = None,
        random: Random | None = None,
        first: int = 0,
    ) -> None:
        self._check_random(random)
        count = checks.check_sum_encoding(payloads, self.payload_bytes, numel, out, feedback, _device_of(out))
        checks.check_number("divisor", divisor, may_be_zero=False)
        checks.check_first(first)

        def work() -> None:
            total = _sum(payloads, lambda payload: self._unpacked(payload, numel), divisor)
            self._encode(total, out, max(numel, 1), feedback, random, first)

        _run(work, out, self, "encode_sum", numel, count, feedback is None, random is None)

    @override
    def decode(self, payload: torch.Tensor, out: torch.Tensor, *, chunk: int | None = None) -> None:
        chunk = checks.check_decoding(payload, self.payload_bytes, out, chunk, _device_of(out))

        def work() -> None:
            for part, values in self._decoded_chunks(payload, out, chunk):
                part.copy_(values)

        _run(work, out, self, "decode", out.numel(), out.dtype, chunk)

    @override
    def decode_add(
        self, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0, chunk: int | None = None
    ) -> None:
        checks.check_number("weight", weight)
        chunk = checks.check_decoding(payload, self.payload_bytes, out, chunk, _device_of(out))

        def work() -> None:
            for part, values in self._decoded_chunks(payload, out, chunk):
                part.copy_(part.float() + weight * values)

        _run(work, out, self, "decode_add", out.numel(), out.dtype, chunk)

    @override
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        count = checks.check_sum_decoding(payloads, self.payload_bytes, out, _device_of(out))
        checks.check_number("divisor", divisor, may_be_zero=False)

        def work() -> None:
            out.copy_(_sum(payloads, lambda payload: self._unpacked(payload, out.numel()), divisor))

        _run(work, out, self, "decode_sum", out.numel(), out.dtype, count)

    def _encode(
        self,
        values: torch.Tensor,
        out: torch.Tensor,
        chunk: int,
        feedback: Feedback | None,
        random: Random | None,
        first: int,
    ) -> None:
        values = _with_feedback(values, feedback)
        parts = values.split(chunk) if values.numel() else ()
        packed = []
        for idx, part in enumerate(parts):
            u = None if random is None else uniforms(random, first + idx * chunk, part.numel(), part.device)
            packed.append(_padded(self.pack(part, u), self.packed_bytes(part.numel()), self))
        _write(packed, out)
        if feedback is not None and parts:
            decoded = [self._unpacked(each, part.numel()) for each, part in zip(packed, parts, strict=True)]
            _keep(values, torch.cat(decoded), feedback)

    def _decoded_chunks(
        self, payload: torch.Tensor, out: torch.Tensor, chunk: int
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return each chunk of `out` with its decoded [elements] fp32 values."""
        if not out.numel():
            return ()
        payloads = payload.split(self.payload_bytes(chunk)) if out.numel() > chunk else (payload,)
        return [(p, self._unpacked(b, p.numel())) for p, b in zip(out.split(chunk), payloads, strict=True)]

    def _unpacked(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        if not numel:
            return payload.new_zeros(0, dtype=torch.float32)
        return _checked_values(self.unpack(payload[: self.packed_bytes(numel)], numel), numel, self)


class TorchSparseCodec(_Shown, SparseCodec):
    """A sparse codec whose encoding and decoding of a chunk are torch operations.

    A subclass sets `id` (one of `FOREIGN_IDS`) and `name`, optionally `version`, and defines `places`, `packed_bytes`,
    `pack` and `unpack`.
    """

    @override
    def capacity(self, numel: int) -> int:
        return self.places(numel)

    @classmethod
    @override
    def bytes_of(cls, numel: int, capacity: int) -> int:
        return aligned(cls.packed_bytes(numel, capacity)) if numel else 0

    @classmethod
    @abstractmethod
    def packed_bytes(cls, numel: int, capacity: int) -> int:
        """Return the number of bytes that `pack` returns for `numel` elements, at least one, and that `capacity`."""

    @abstractmethod
    def pack(self, values: torch.Tensor, random: Random | None) -> torch.Tensor:
        """Return [packed_bytes(numel, capacity(numel))] uint8 for a chunk `values` ([numel] fp32, at least one)."""

    @abstractmethod
    def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the [numel] fp32 values of a packed chunk: 0 for elements that it does not name.

        Raises:
            CodecError: The bytes are damaged (raised on the CPU only).
        """

    @override
    def encode(
        self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, random: Random | None = None
    ) -> None:
        checks.check_block_encoding(x, self.payload_bytes(x.numel()), out, feedback, _device_of(out))

        def work() -> None:
            values = _with_feedback(x.float(), feedback)
            if not values.numel():
                return
            packed = _padded(self.pack(values, random), self._packed_bytes(x.numel()), self)
            _write([packed], out)
            if feedback is not None:
                _keep(values, self._unpacked(packed, x.numel()), feedback)

        _run(work, out, self, "encode", x.numel(), x.dtype, feedback is None)

    @override
    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0) -> None:
        checks.check_number("weight", weight)
        checks.check_sparse_decoding(payload.view(1, -1), self.payload_bytes(out.numel()), out, _device_of(out))

        def work() -> None:
            out.add_(weight * self._unpacked(payload, out.numel()))

        _run(work, out, self, "decode_add", out.numel())

    @override
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        count = checks.check_sparse_decoding(payloads, self.payload_bytes(out.numel()), out, _device_of(out))
        checks.check_number("divisor", divisor, may_be_zero=False)

        def work() -> None:
            out.copy_(_sum(payloads, lambda payload: self._unpacked(payload, out.numel()), divisor))

        _run(work, out, self, "decode_sum", out.numel(), count)

    def _packed_bytes(self, numel: int) -> int:
        return self.packed_bytes(numel, self.capacity(numel))

    def _unpacked(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        if not numel:
            return payload.new_zeros(0, dtype=torch.float32)
        return _checked_values(self.unpack(payload[: self._packed_bytes(numel)], numel), numel, self)


def uniforms(random: Random, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the random numbers of docs/reference/wire_format.md for stochastic rounding, in torch operations.

    Args:
        random: The source of the random numbers.
        first: Offset of the first element in its tensor.
        count: Number of elements.
        device: The device of the computation.

    Returns:
        [count] fp32, multiples of 2**-16 in [0, 1).
    """
    starts = [start for start, _ in random.segments if start < first + count]
    ends = [*starts[1:], first + count]
    runs = [
        torch.arange(max(start, first), end, dtype=torch.int64, device=device) + (offset - start)
        for (start, offset), end in zip(random.segments, ends, strict=False)
        if end > first
    ]
    offsets = torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64, device=device)
    words = torch.stack(_philox(offsets >> 3, random), dim=1)
    word = words.gather(1, (offsets >> 1 & 3).view(-1, 1)).view(-1)
    return (word >> (offsets & 1) * 16 & _LOW).float() * 2.0**-16


def _philox(counters: torch.Tensor, random: Random) -> list[torch.Tensor]:
    """Return the four words ([count] int64) of Philox4x32-10. 64-bit products wrap around, as intended."""
    zero = torch.zeros_like(counters)
    c = [counters & _WORD, counters >> 32 & _WORD, zero + random.step, zero + random.stage_and_rank]
    key = [random.seed & _WORD, random.seed >> 32]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (second >> 32 & _WORD) ^ c[1] ^ key[0],
            second & _WORD,
            (first >> 32 & _WORD) ^ c[3] ^ key[1],
            first & _WORD,
        ]
        key = [key[0] + 0x9E3779B9 & _WORD, key[1] + 0xBB67AE85 & _WORD]
    return c


# --- helpers ----------------------------------------------------------------------------------------------------------


def _device_of(out: torch.Tensor) -> torch.device:
    """Return the expected device of the tensors. Arguments that are not tensors are rejected by the later checks."""
    return getattr(out, "device", checks.CPU)


def _run(work: Callable[[], None], out: torch.Tensor, *key: object) -> None:
    """Run `work`. On meta tensors run it once per key; the simulator counts the recorded result from then on."""
    with torch.no_grad():
        if out.is_meta:
            meta.repeated(work, *key)
        else:
            work()


def _with_feedback(values: torch.Tensor, feedback: Feedback | None) -> torch.Tensor:
    return values if feedback is None else values + feedback.beta * feedback.residual


def _keep(values: torch.Tensor, decoded: torch.Tensor, feedback: Feedback) -> None:
    """Write the encoding error to the residual where it is finite."""
    lost = values - decoded
    torch.where(lost.isfinite(), lost * feedback.gamma, feedback.residual, out=feedback.residual)


def _sum(payloads: torch.Tensor, unpacked: Callable[[torch.Tensor], torch.Tensor], divisor: float) -> torch.Tensor:
    total = unpacked(payloads[0])
    for payload in payloads[1:]:
        total = total + unpacked(payload)
    # Divide by a tensor: torch multiplies by the inverse of a Python number on CUDA devices.
    return total if divisor == 1.0 else total / torch.full((1,), divisor, dtype=torch.float32, device=total.device)


def _padded(packed: torch.Tensor, nbytes: int, codec: object) -> torch.Tensor:
    """Return the payload: the output of `pack`, padded with zeros."""
    if packed.dtype != torch.uint8 or packed.shape != (nbytes,):
        shape = list(packed.shape)
        raise CodecError(f"{codec!r}.pack: expected [{nbytes}] torch.uint8 (packed_bytes), got {shape} {packed.dtype}")
    return torch.nn.functional.pad(packed, (0, aligned(nbytes) - nbytes))


def _write(payloads: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    if payloads:
        torch.cat(list(payloads), out=out)


def _checked_values(values: torch.Tensor, numel: int, codec: object) -> torch.Tensor:
    if values.dtype != torch.float32 or values.shape != (numel,):
        shape = list(values.shape)
        raise CodecError(f"{codec!r}.unpack: expected [{numel}] torch.float32, got {shape} {values.dtype}")
    return values
