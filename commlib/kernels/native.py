"""The only module that calls the C++ extension with tensor addresses.

It takes an address only after checking that the tensor fits the kernel: on the CPU, of the right type, contiguous,
large enough, and not overlapping the output. The kernels run without the GIL.

Numerics: arithmetic is in float32 (float64 for float64), followed by one rounding to nearest even. Denormals are kept,
regardless of `torch.set_flush_denormal`. All instruction sets give the same bits.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NoReturn

import torch

from commlib.errors import CommlibError, ConfigError
from commlib.installation import reinstall
from commlib.kernels import codec_table

FORCE_ISA_VARIABLE = "COMMLIB_FORCE_ISA"
"""The environment variable that overrides the instruction set, by default the best one (for tests)."""

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


@functools.cache
def load() -> ModuleType:
    """Load the extension and select the instruction set.

    Returns:
        The module `commlib._native`. Only this file may call its functions with addresses.

    Raises:
        CommlibError: The extension cannot be loaded.
        ConfigError: `COMMLIB_FORCE_ISA` names an instruction set that this machine does not support.
    """
    try:
        from commlib import _native
    except ImportError as error:
        raise CommlibError(
            f"The compiled extension commlib._native cannot be loaded: {error}. "
            f"Install commlib again, with a C++ compiler present if from source: {reinstall()}"
        ) from error
    wanted = os.environ.get(FORCE_ISA_VARIABLE, "").strip()
    supported = _native.supported_isas()
    if wanted and wanted not in supported:
        raise ConfigError(
            f"{FORCE_ISA_VARIABLE}={wanted!r} is not an instruction set of this machine; expected one of "
            f"{', '.join(supported)}. Unset it to use the best one, {supported[0]}."
        )
    _native.select_isa(wanted or supported[0])
    _bind_tensors(_native)
    _check_codecs(_native)
    return _native


def isa() -> str:
    """Return the instruction set in use: "avx512", "avx2", "neon" or "scalar".

    Raises:
        CommlibError: The extension cannot be loaded.
        ConfigError: `COMMLIB_FORCE_ISA` names an instruction set that this machine does not support.
    """
    return load().isa()


def supported_isas() -> list[str]:
    """Return the instruction sets that this machine supports, the best first.

    Raises:
        CommlibError: The extension cannot be loaded.
    """
    return load().supported_isas()


class PackPlan:
    """The places of a list of tensors in one flat buffer. Created once and used in every step.

    Args:
        numels: Number of elements of each tensor.
        dtype: dtype of the tensors and of the flat buffer: float32, bfloat16, float16 or float64.
        offsets: First element of each tensor in the flat buffer; consecutive by default. Places must not overlap.

    Raises:
        ConfigError: No kernel supports the dtype, a size is negative, or places overlap.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        *,
        offsets: Sequence[int] | None = None,
    ) -> None:
        self._numels = [int(numel) for numel in numels]
        self._dtype = dtype
        starts = list(itertools.accumulate(self._numels, initial=0))[:-1] if offsets is None else list(offsets)
        _check_places(self._numels, starts)
        code = _dtype_code(dtype)
        try:
            self._native = load().PackPlan(starts, self._numels, code)
        except ValueError as error:
            raise ConfigError(f"This pack plan cannot be created: {error}.") from None

    @property
    def extent(self) -> int:
        """The minimum number of elements of the flat buffer."""
        return self._native.extent

    def are_in_place(self, dst: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
        """Return whether every tensor is the view of `dst` at its place.

        Args:
            dst: As in `pack`.
            tensors: One per size of the plan. A tensor without elements is always in place; a tensor that `pack` would
                reject never is.
        """
        return self._native.are_in_place(dst, tensors)

    def pack(self, dst: torch.Tensor, srcs: Sequence[torch.Tensor | None], factor: float = 1.0) -> None:
        """Write every source, times `factor`, to its place in `dst`.

        Elements of `dst` outside all places are unchanged. A source may be the view of `dst` at its own place; it is
        then multiplied in place.

        Args:
            dst: `[>= extent] dtype`, contiguous, on the CPU; changed in place.
            srcs: One contiguous CPU tensor of `dtype` per size of the plan, of any shape; `None` writes zeros.
            factor: Finite; used as a float32 (float64 for float64).

        Raises:
            ConfigError: A tensor or the factor is not as described; the message names it. Nothing was written.
        """
        # The extension does all checks. In Python they took 1.5 µs in a loop, but 44 µs between matrix products, where
        # the interpreter's code is not in the cache.
        refused = self._native.pack(dst, srcs if isinstance(srcs, list) else list(srcs), factor)
        if refused >= 0:
            self._explain(dst, srcs, factor, refused)

    def _explain(self, dst: torch.Tensor, srcs: Sequence[torch.Tensor | None], factor: float, index: int) -> NoReturn:
        """Raise the reason why the extension wrote nothing. `index` is the index of the rejected source, if any."""
        _check_flat(dst, self._dtype, self.extent, "dst")
        _check_factor(factor, self._dtype)
        if len(srcs) != len(self._numels):
            raise ConfigError(f"The plan packs {len(self._numels)} tensors, got {len(srcs)}.")
        src = srcs[index] if index < len(srcs) else None
        if src is not None:
            _check_tensor(src, self._dtype, f"source {index}")
            if src.numel() != self._numels[index]:
                raise ConfigError(f"source {index} must have {self._numels[index]} elements, got {src.numel()}.")
        raise ConfigError(
            f"source {index} overlaps the flat buffer outside of its own place, or one of both has no memory. "
            "Pass a copy of it (clone())."
        )


def gather_bytes(flat: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Copy tensors of any types into `flat`, one after another.

    Args:
        flat: `[bytes of the tensors or more] uint8`; changed in place.
        tensors: Contiguous, on the CPU, not complex.

    Returns:
        Whether the copy was made. If a tensor is not as described, nothing was written.
    """
    return load().copy_bytes(flat, tensors, True)


def scatter_bytes(flat: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Copy the bytes of `gather_bytes` back into the tensors, as an in-place change for autograd.

    Returns:
        Whether the copy was made, as in `gather_bytes`. Inference tensors are rejected, too.
    """
    if any(map(torch.Tensor.is_inference, tensors)) or not load().copy_bytes(flat, tensors, False):
        return False
    torch.autograd.graph.increment_version(tensors)
    return True


def _bind_tensors(native: ModuleType) -> None:
    """Pass the torch functions that the extension needs to read tensors."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    try:
        native.bind_tensor_type(torch.Tensor, capsule, torch.Tensor.is_neg)
    except (RuntimeError, ValueError) as error:
        raise CommlibError(
            f"This torch ({torch.__version__}) cannot be used: {error}. Install torch 2.11 or later."
        ) from None


def _check_codecs(native: ModuleType) -> None:
    try:
        built, top_k_block = native.block_codecs(), native.top_k_block
    except AttributeError:
        raise CommlibError(
            "The compiled extension commlib._native is of another version of commlib: it does not report its codecs. "
            f"Install commlib again: {reinstall()}"
        ) from None
    codec_table.check_built(built, top_k_block)


def _dtype_code(dtype: torch.dtype) -> int:
    code = _DTYPE_CODES.get(dtype)
    if code is None:
        expected = ", ".join(str(known) for known in _DTYPE_CODES)
        raise ConfigError(f"No kernel supports {dtype}; expected one of {expected}. Convert the tensor first.")
    return code


def _check_places(numels: Sequence[int], starts: Sequence[int]) -> None:
    if len(starts) != len(numels):
        raise ConfigError(f"Every tensor needs one offset: got {len(starts)} offsets for {len(numels)} tensors.")
    if any(value < 0 for value in itertools.chain(numels, starts)):
        raise ConfigError("Sizes and offsets must not be negative.")


def _check_tensor(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Raise unless a kernel that reads `dtype` can access `tensor` by its address."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    problems = _problems(tensor, dtype)
    if problems:
        raise ConfigError(f"{name} {problems[0]}, got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}.")


def _problems(tensor: torch.Tensor, dtype: torch.dtype) -> list[str]:
    if tensor.layout is not torch.strided:
        return [f"must be dense, not {tensor.layout} (to_dense())"]
    checks: Iterable[tuple[bool, str]] = (
        (tensor.device.type == "cpu", "must be on the CPU (cpu())"),
        (tensor.dtype == dtype, f"must be {dtype} (to({dtype}))"),
        (tensor.is_contiguous(), "must be contiguous (contiguous())"),
        (not tensor.is_neg(), "must not be a negated view (resolve_neg())"),
    )
    return [problem for is_good, problem in checks if not is_good]


def _check_flat(tensor: torch.Tensor, dtype: torch.dtype, numel: int, name: str) -> None:
    _check_tensor(tensor, dtype, name)
    if tensor.numel() < numel:
        raise ConfigError(f"{name} must have at least {numel} elements, got {tensor.numel()}.")


def _check_factor(factor: float, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype if dtype == torch.float64 else torch.float32).max
    if not abs(factor) <= largest:
        raise ConfigError(f"The factor must be finite in a {dtype} computation, got {factor}.")
