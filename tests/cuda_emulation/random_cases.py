"""The CUDA executor against the CPU's on calls drawn at random: codec, options, types, sizes, chunks and values.

Every output is poisoned beforehand, twice in different ways: a byte that depends on the poison was not written.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from commlib.kernels import cuda_codecs, cuda_sparse, native_codecs, native_sparse
from commlib.kernels.checks import CPU, Feedback, Random
from commlib.kernels.reference import F32
from tests.cuda_emulation.cases import TYPES, Guarded
from tests.unit.test_block_codecs import IDS, STOCHASTIC, inputs
from tests.unit.test_sparse_codecs import distributions

_POISONS = (0xA5, 0x3C)
NAMES = tuple(IDS)


def check_block_codec(seed: int, device: torch.device, most: int, name: str | None = None) -> None:
    """Encode, decode, add, sum and encode the sum of up to `most` elements, with options drawn by the seed."""
    draw, rng = python_random.Random(seed), np.random.default_rng(seed)
    name, numel = name or draw.choice(NAMES), draw.choice([draw.randrange(1, 600), draw.randrange(1, most)])
    codec, dtype = IDS[name], draw.choice(TYPES)
    label, values = draw.choice(inputs(rng, numel))
    x = torch.from_numpy(values).to(dtype)
    chunk = draw.choice([numel, draw.randrange(1, numel + 1), 256, 1024])
    options: dict[str, Any] = {"chunk": chunk}
    if name in STOCHASTIC and draw.random() < 0.5:
        options["random"] = _random(draw, numel)
    beta, gamma = draw.choice([(1.0, 1.0), (0.9, -1.25), (2.0**-7, 128.0)])
    residual = torch.from_numpy((rng.standard_normal(numel) * 0.1).astype(F32)) if draw.random() < 0.6 else None
    what = f"seed {seed}: {name}, {label}, {numel} of {dtype}, chunks of {chunk}, {options.get('random')}"

    def encode(executor: Any, tensors: _Tensors) -> None:
        feedback = None if residual is None else Feedback(tensors("residual", residual), beta, gamma)
        out = tensors.room("payload", executor.buffer_bytes(codec, numel, chunk))
        executor.encode(codec, tensors("x", x), out, feedback=feedback, **options)

    payload = compare(encode, native_codecs, cuda_codecs, device, what)["payload"]
    target = draw.choice(TYPES)

    def decode(executor: Any, tensors: _Tensors) -> None:
        sent = tensors("payload", payload)
        executor.decode(codec, sent, tensors.room("decoded", numel, target), chunk=chunk)
        added = tensors("added", torch.linspace(-1, 1, numel).to(target))
        executor.decode_add(codec, sent, added, weight=0.3, chunk=chunk)

    compare(decode, native_codecs, cuda_codecs, device, f"{what}, decoded to {target}")
    _check_sums(codec, draw, x.float()[:chunk], device, what)


def _check_sums(codec: int, draw: python_random.Random, x: torch.Tensor, device: torch.device, what: str) -> None:
    numel, count = x.numel(), draw.choice([1, 2, 3, 8, 17])
    rows = torch.zeros(count, native_codecs.payload_bytes(codec, numel), dtype=torch.uint8)
    for idx in range(count):
        native_codecs.encode(codec, (x * (1 + idx / 4)).contiguous(), rows[idx])
    divisor = draw.choice([1.0, float(count), 3.0])

    def add_up(executor: Any, tensors: _Tensors) -> None:
        sent = tensors("rows", rows)
        executor.decode_sum(codec, sent, tensors.room("total", numel, torch.float32), divisor=divisor)
        executor.encode_sum(codec, sent, numel, tensors.room("again", rows.shape[1]), divisor=divisor)

    compare(add_up, native_codecs, cuda_codecs, device, f"{what}, {count} payloads over {divisor}")


KINDS = ("top_k", "above", "random_k")


def check_sparse_codec(seed: int, device: torch.device, most: int, kind: str | None = None) -> None:
    """Encode up to `most` elements with a sparse codec, decode and add, with options drawn by the seed."""
    draw, rng = python_random.Random(seed), np.random.default_rng(seed)
    numel = draw.choice([draw.randrange(1, 600), draw.randrange(1, most)])
    places = draw.choice([1, numel, max(1, numel // 100), draw.randrange(1, numel + 1)])
    kind, dtype = kind or draw.choice(KINDS), draw.choice(TYPES)
    label, values = draw.choice([each for each in distributions(rng, numel) if not np.isnan(each[1]).any()])
    x = torch.from_numpy(values).to(dtype)
    residual = torch.from_numpy((rng.standard_normal(numel) * 0.1).astype(F32)) if draw.random() < 0.6 else None
    beta, gamma = draw.choice([(1.0, 1.0), (0.9, -1.25)])
    source, threshold = _random(draw, 1), draw.choice([1e-30, 0.5, 2.5])

    def encode(executor: Any, tensors: _Tensors) -> None:
        feedback = None if residual is None else Feedback(tensors("residual", residual), beta, gamma)
        own, out = tensors("x", x), tensors.room("payload", executor.payload_bytes(places))
        if kind == "top_k":
            executor.encode_top_k(own, places, out, feedback)
        elif kind == "above":
            executor.encode_above(own, threshold, places, out, feedback)
        else:
            executor.encode_random_k(own, places, out, source, feedback)

    what = f"seed {seed}: {kind}, {label}, {places} of {numel} of {dtype}"
    payload = compare(encode, native_sparse, cuda_sparse, device, what)["payload"]

    def decode(executor: Any, tensors: _Tensors) -> None:
        rows = torch.stack([payload] * draw_count)
        executor.decode_sum(tensors("rows", rows), places, tensors.room("total", numel, torch.float32), 2.0)
        executor.decode_add(tensors("payload", payload), places, tensors("added", torch.ones(numel)), 0.3)

    draw_count = draw.choice([1, 3])
    compare(decode, native_sparse, cuda_sparse, device, what)
    cuda_sparse.raise_if_damaged(device)


class _Tensors:
    """The tensors of one call, with guard bytes around them; outputs are full of `poison`."""

    def __init__(self, device: torch.device, poison: int) -> None:
        self._device = device
        self._poison = poison
        self._guarded: dict[str, Guarded] = {}

    def __call__(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of `values` on the device."""
        self._guarded[name] = Guarded(values, self._device)
        return self._guarded[name].tensor

    def room(self, name: str, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return poisoned memory for an output."""
        filled = torch.full((numel * dtype.itemsize,), self._poison, dtype=torch.uint8).view(dtype)
        return self(name, filled)

    def values(self) -> dict[str, torch.Tensor]:
        """Return all tensors as bytes, after a check of the bytes around them."""
        for guarded in self._guarded.values():
            guarded.check()
        return {name: guarded.tensor.cpu().view(torch.uint8) for name, guarded in self._guarded.items()}


def compare(
    call: Callable[[Any, _Tensors], None], ours: Any, theirs: Any, device: torch.device, what: str
) -> dict[str, torch.Tensor]:
    """Make a call with both executors; all tensors must have the same bytes afterwards, however they were poisoned.

    Args:
        call: Takes the executor and the factory of its tensors.
        ours: The executor whose bytes are right, for tensors on the CPU.
        theirs: The one that is compared, for tensors on `device`.
        device: See above.
        what: The name of the call in error messages.

    Returns:
        The bytes of each tensor.
    """
    found = []
    for executor, where, poison in ((ours, CPU, _POISONS[0]), *((theirs, device, poison) for poison in _POISONS)):
        tensors = _Tensors(where, poison)
        call(executor, tensors)
        found.append(tensors.values())
    for values in found[1:]:
        for name, expected in found[0].items():
            wrong = (values[name] != expected).nonzero()
            assert not len(wrong), f"{what}: {len(wrong)} bytes of {name} differ, the first at {int(wrong[0])}"
    return found[0]


def _random(draw: python_random.Random, numel: int) -> Random:
    starts = sorted({0, *(draw.randrange(numel) for _ in range(draw.choice([0, 0, 3])))})
    segments = [(start, draw.randrange(1 << 40)) for start in starts]
    seed, step, rank, stage = (draw.randrange(1 << bits) for bits in (64, 32, 24, 8))
    return Random(seed, step, rank, stage, segments)
