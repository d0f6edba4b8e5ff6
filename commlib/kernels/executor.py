"""The executors of the codecs: one implementation for each type of device, with the same functions.

native_*.py run on the CPU, cuda_*.py on CUDA devices, meta_*.py on meta tensors; reference.py is the definition in
NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch

from commlib.errors import CodecError
from commlib.kernels import cuda_codecs, cuda_sparse, meta_codecs, meta_sparse, native_codecs, native_sparse
from commlib.kernels.checks import Feedback, Random


class BlockExecutor(Protocol):
    """Runs block codecs, by id. native_codecs.py describes the arguments.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """

    def encode(
        self,
        codec: int,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        chunk: int | None = None,
        feedback: Feedback | None = None,
        random: Random | None = None,
    ) -> None:
        """Encode the chunks of a tensor."""
        ...

    def encode_sum(
        self,
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
        """Encode the sum of payloads of one chunk."""
        ...

    def decode(self, codec: int, payload: torch.Tensor, out: torch.Tensor, *, chunk: int | None = None) -> None:
        """Decode the payloads of all chunks."""
        ...

    def decode_add(
        self, codec: int, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0, chunk: int | None = None
    ) -> None:
        """Add decoded values."""
        ...

    def decode_sum(self, codec: int, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Decode the sum of payloads of one chunk."""
        ...

    def rotate(self, x: torch.Tensor, out: torch.Tensor, random: Random, *, is_inverse: bool = False) -> None:
        """Rotate a chunk."""
        ...


class SparseExecutor(Protocol):
    """Runs sparse codecs. native_sparse.py describes the arguments.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """

    def encode_top_k(self, x: torch.Tensor, places: int, out: torch.Tensor, feedback: Feedback | None = None) -> None:
        """Encode the largest elements."""
        ...

    def encode_above(
        self, x: torch.Tensor, threshold: float, places: int, out: torch.Tensor, feedback: Feedback | None = None
    ) -> None:
        """Encode the first elements above a threshold."""
        ...

    def encode_random_k(
        self, x: torch.Tensor, places: int, out: torch.Tensor, random: Random, feedback: Feedback | None = None
    ) -> None:
        """Encode random elements."""
        ...

    def decode_sum(self, payloads: torch.Tensor, places: int, out: torch.Tensor, divisor: float = 1.0) -> None:
        """Decode the sum of payloads."""
        ...

    def decode_add(self, payload: torch.Tensor, places: int, out: torch.Tensor, weight: float = 1.0) -> None:
        """Add decoded elements."""
        ...

    def encode_block_top_k(
        self, x: torch.Tensor, kept: int, out: torch.Tensor, feedback: Feedback | None = None
    ) -> None:
        """Encode the largest elements of each block."""
        ...

    def sum_block_top_k(self, payloads: torch.Tensor, kept: int, out: torch.Tensor, divisor: float = 1.0) -> None:
        """Decode the sum of payloads of `encode_block_top_k`."""
        ...

    def add_block_top_k(self, payload: torch.Tensor, kept: int, out: torch.Tensor, weight: float = 1.0) -> None:
        """Add decoded elements of `encode_block_top_k`."""
        ...


#: By the type of the device.
BLOCK_EXECUTORS: Mapping[str, BlockExecutor] = {"cpu": native_codecs, "cuda": cuda_codecs, "meta": meta_codecs}
SPARSE_EXECUTORS: Mapping[str, SparseExecutor] = {"cpu": native_sparse, "cuda": cuda_sparse, "meta": meta_sparse}

_E = TypeVar("_E")


def block_executor(tensor: torch.Tensor) -> BlockExecutor:
    """Return the executor for the device of a tensor.

    Raises:
        CodecError: No executor supports this type of device.
    """
    try:
        return BLOCK_EXECUTORS[tensor.device.type]
    except (KeyError, AttributeError):
        return _of_no_tensor(BLOCK_EXECUTORS, tensor)


def sparse_executor(tensor: torch.Tensor) -> SparseExecutor:
    """Return the executor for the device of a tensor.

    Raises:
        CodecError: No executor supports this type of device.
    """
    try:
        return SPARSE_EXECUTORS[tensor.device.type]
    except (KeyError, AttributeError):
        return _of_no_tensor(SPARSE_EXECUTORS, tensor)


def _of_no_tensor(executors: Mapping[str, _E], value: Any) -> _E:
    """Return the CPU's executor for a value that is no tensor: its checks raise the error."""
    if hasattr(value, "device"):
        raise CodecError(f"no codec kernels for tensors on {value.device}; expected the CPU or a CUDA device")
    return executors["cpu"]
