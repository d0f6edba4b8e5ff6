"""Compilation and launch of CUDA kernels.

A kernel (cuda_args.py) is compiled by NVRTC on first use, for the device's architecture, and cached on disk; see
docs/explanation/kernels.md. CuPy is used only as the binding to NVRTC and the driver: its RawModule would append
-ftz=true, but denormals must be kept (docs/reference/wire_format.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import logging
import os
import tempfile
import threading
from pathlib import Path
from types import ModuleType

import torch

from commlib import locks
from commlib.errors import CodecError
from commlib.installation import install
from commlib.kernels.cuda_args import THREADS, Kernel

DEVICE_TYPE = "cuda"
"""The device type of the CUDA executor's tensors (replaced by tests that emulate CUDA)."""
CACHE_VARIABLE = "COMMLIB_CACHE_DIR"
"""The environment variable for the folder of compiled kernels."""

_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)
_threads = threading.local()
_compiling = locks.lock("kernels.cuda", is_of_process=True)


def device_of(name: str, tensor: torch.Tensor) -> torch.device:
    """Return the CUDA device of a tensor.

    Raises:
        CodecError: `tensor` is not a CUDA tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise CodecError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device.type != DEVICE_TYPE:
        raise CodecError(f"{name}: expected a tensor on a CUDA device, got {tensor.device}")
    return tensor.device


def launch(kernel: Kernel, num_blocks: int, args: ctypes.Structure, device: torch.device) -> None:
    """Launch a kernel on torch's current stream of `device`, asynchronously.

    Args:
        kernel: The kernel; compiled first if it is not cached.
        num_blocks: Number of thread blocks; 0 launches nothing.
        args: The kernel's argument; copied.
        device: A CUDA device.

    Raises:
        CodecError: The kernel cannot be compiled or launched.
    """
    if num_blocks == 0:
        return
    with torch.cuda.device(device):
        _ensure_context(device)
        function = _function(kernel, torch.cuda.current_device())
        addresses = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        stream = torch.cuda.current_stream(device).cuda_stream
        _driver().launchKernel(function, num_blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(addresses), 0)


def _ensure_context(device: torch.device) -> None:
    """Make the device's context current in a thread that has not used the device yet."""
    seen = _threads.__dict__.setdefault("devices", set())
    if device not in seen:
        torch.cuda.mem_get_info(device)  # a runtime call, which sets the context for driver calls
        seen.add(device)


@functools.cache
def _function(kernel: Kernel, device_idx: int) -> int:
    """Return the driver's handle of a kernel on a device. Modules stay loaded."""
    architecture = architecture_for(torch.cuda.get_device_capability(device_idx), supported_architectures())
    with _compiling:
        try:
            return _loaded(kernel, cubin(kernel, architecture))
        except Exception as error:
            if isinstance(error, CodecError):
                raise
            # The digest is correct, but the image is for another device or from another compiler.
            _log.warning("compiling %s again, because the driver rejected the cached kernel: %s", kernel.call, error)
            return _loaded(kernel, cubin(kernel, architecture, ignores_cache=True))


def _loaded(kernel: Kernel, image: bytes) -> int:
    return _driver().moduleGetFunction(_driver().moduleLoadData(image), kernel.symbol)


# --- CuPy's bindings --------------------------------------------------------------------------------------------------


@functools.cache
def _driver() -> ModuleType:
    return _binding("cupy_backends.cuda.api.driver")


@functools.cache
def _nvrtc() -> ModuleType:
    return _binding("cupy_backends.cuda.libs.nvrtc")


def _binding(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # CuPy or one of its libraries is missing
        extra = "cuda12" if (torch.version.cuda or "").startswith("12") else "cuda13"
        raise CodecError(
            f"CUDA kernels are compiled through CuPy, which cannot be loaded: {error}. "
            f"Install it: {install(extra)}, or move the tensors to the CPU."
        ) from error


def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC.

    Raises:
        CodecError: CuPy or NVRTC is missing.
    """
    try:
        return _nvrtc().getVersion()
    except CodecError:
        raise
    except Exception as error:  # any error of a missing or incompatible library
        raise CodecError(
            f"NVRTC, NVIDIA's run-time compiler, cannot be loaded: {error}. "
            "Install the nvrtc package for your CUDA version, as torch's CUDA builds do."
        ) from error


def supported_architectures() -> list[int]:
    """Return the architectures that NVRTC supports, such as 90 for sm_90.

    Raises:
        CodecError: CuPy or NVRTC is missing.
    """
    nvrtc_version()
    return list(_nvrtc().getSupportedArchs())


# --- compiling --------------------------------------------------------------------------------------------------------


def architecture_for(capability: tuple[int, int], supported: list[int]) -> str:
    """Return the architecture to compile for: the device's, or the closest lower one with compatible machine code.

    Args:
        capability: Compute capability of the device, such as (9, 0).
        supported: Architectures that the compiler supports.

    Raises:
        CodecError: The compiler supports no architecture of this device.
    """
    major, minor = capability
    candidates = [one for one in supported if one // 10 == major and one % 10 <= minor]
    if not candidates:
        known = ", ".join(f"sm_{one}" for one in supported)
        raise CodecError(
            f"NVRTC cannot compile for a device of sm_{major}{minor}; it knows {known}. Install the CuPy and the NVRTC "
            "of a CUDA version that supports the device (CUDA 12 for sm_70)."
        )
    return f"sm_{max(candidates)}"


def options_for(architecture: str) -> list[str]:
    """Return the compiler options: no contraction, no flushing of denormals, exact division."""
    return [f"--gpu-architecture={architecture}", *_OPTIONS]


@functools.cache
def headers(module: Path = Path(__file__)) -> dict[str, str]:
    """Return the texts of the CUDA sources, by the names used to include them.

    Args:
        module: The path of this module.

    Raises:
        CodecError: The sources are not installed.
    """
    here = module.resolve()
    # A wheel has the sources next to this file (copied by setup.py), a checkout has them at its root.
    for folder in (here.parent / "cuda_sources", here.parents[2] / "csrc"):
        if (folder / "cuda").is_dir():
            paths = [folder / "codec_math.h", *sorted((folder / "cuda").glob("*.h"))]
            return {path.name: path.read_text(encoding="utf-8") for path in paths}
    raise CodecError(f"the sources of the CUDA kernels are not next to {here}; install commlib again")


def cubin(kernel: Kernel, architecture: str, *, ignores_cache: bool = False) -> bytes:
    """Return the machine code of a kernel, from the disk cache if it has a valid entry.

    Raises:
        CodecError: The kernel cannot be compiled.
    """
    source, options = kernel.source(), options_for(architecture)
    path = _cache_path(source, options)
    image = None if ignores_cache else _read_cache(path)
    if image is None:
        image = _compile(kernel, source, options)
        _write_cache(path, image)
    return image


def _compile(kernel: Kernel, source: str, options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    names = [name.encode() for name in headers()]
    texts = [text.encode() for text in headers().values()]
    program = nvrtc.createProgram(source, "commlib.cu", texts, names)
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program)
    except Exception as error:
        raise CodecError(f"NVRTC cannot compile {kernel.call}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


# --- the cache on disk ------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Return the folder of compiled kernels: COMMLIB_CACHE_DIR, or commlib/ in XDG_CACHE_HOME (by default ~/.cache)."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "commlib"


def _cache_path(source: str, options: list[str]) -> Path:
    """Return the path of a cached kernel. Its name is a hash of everything that the machine code depends on."""
    digest = hashlib.sha256()
    for text in (*headers(), *headers().values(), source, *options, repr(nvrtc_version())):
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    return cache_dir() / f"{digest.hexdigest()}.cubin"


def _read_cache(path: Path) -> bytes | None:
    """Return the cached kernel, or None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    image = data[_DIGEST_BYTES:]
    if hashlib.sha256(image).digest() == data[:_DIGEST_BYTES]:
        return image
    _log.warning("the cached kernel %s is damaged and is compiled again", path)
    return None


def _write_cache(path: Path, image: bytes) -> None:
    """Write a file atomically. If it cannot be written, the kernel is not cached."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
    except OSError as error:
        _log.warning("compiled kernels are not cached, because %s cannot be written: %s", path.parent, error)
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(image).digest() + image)
        os.replace(name, path)
    except OSError as error:
        _log.warning("a compiled kernel was not cached: %s", error)
        with contextlib.suppress(OSError):
            os.unlink(name)
