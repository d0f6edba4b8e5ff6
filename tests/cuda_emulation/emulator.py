"""The CUDA kernels on the CPU: compiled by g++ with cuda_on_cpu.h, launched with the arguments for a GPU.

`emulated_cuda` replaces `cuda.launch` by this, so the executor's checks, grids and structs are those that a GPU would
see. It shows that the kernels compute the right bytes; it does not replace a run on a GPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from commlib.kernels import cuda, cuda_codecs, cuda_sparse
from commlib.kernels.codec_table import BLOCK_ROWS
from commlib.kernels.cuda_args import TYPES, Kernel

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "csrc"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wno-unknown-pragmas",
]
# sm_80 and later find a warp's maximum by one instruction, older ones by shuffles; each way is taken by some groups.
WITH_REDUX = ("Int8", "OneBit", "Bagua")
STOCHASTIC = tuple(row.struct for row in BLOCK_ROWS if row.rounds_stochastically)


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++").split()[0])


@functools.cache
def groups() -> dict[str, list[Kernel]]:
    """All kernels, in groups that are compiled together."""
    found = {row.struct: block_kernels(row.struct) for row in BLOCK_ROWS}
    found["rotation"] = [cuda_codecs.ROTATE_KERNEL]
    found |= {f"sparse-{name}": cuda_sparse.all_kernels(name) for name in TYPES.values()}
    return found


def block_kernels(codec: str) -> list[Kernel]:
    """All instances that the executor can ask for."""
    randomness = (False, True) if codec in STOCHASTIC else (False,)
    flags = list(itertools.product((False, True), randomness))
    kernels = [cuda_codecs.encode_kernel(codec, name, *both, False) for name in TYPES.values() for both in flags]
    kernels += [cuda_codecs.encode_kernel(codec, "Float32", *both, True) for both in flags]
    kernels += [cuda_codecs.decode_kernel(codec, name, is_sum) for name in TYPES.values() for is_sum in (False, True)]
    if codec == "Bagua":
        kernels += [
            cuda_codecs.ranges_kernel(codec, name, has, False) for name in TYPES.values() for has in (False, True)
        ]
        kernels += [cuda_codecs.ranges_kernel(codec, "Float32", has, True) for has in (False, True)]
    return kernels


def program(kernels: list[Kernel]) -> str:
    """One translation unit with all of these and a function that runs each."""
    parts = [f'#include "{HERE / "cuda_on_cpu.h"}"\n']
    for idx, kernel in enumerate(kernels):
        parts.append(kernel.source(f"kernel_{idx}"))
        parts.append(
            f'extern "C" void run_{idx}(unsigned blocks, int is_reversed, int at_once, const void* args) {{\n'
            f"  emulation::launch(blocks, is_reversed != 0, at_once, "
            f"[=] {{ kernel_{idx}(*static_cast<const {kernel.args}*>(args)); }});\n}}\n"
            f'extern "C" unsigned long size_{idx}() {{ return sizeof({kernel.args}); }}\n'
        )
    return "".join(parts)


@functools.cache
def library(group: str) -> ctypes.CDLL:
    """Compile a group, unless these very sources were compiled before."""
    text = program(groups()[group])
    digest = hashlib.sha256(text.encode())
    for path in [HERE / "cuda_on_cpu.h", SOURCES / "codec_math.h", *sorted((SOURCES / "cuda").glob("*.h"))]:
        digest.update(path.read_bytes())
    flags = [*FLAGS, "-DCOMMLIB_EMULATE_REDUX"] if group in WITH_REDUX else FLAGS
    digest.update(" ".join(flags).encode())
    folder = HERE.parents[1] / "build" / "cuda-emulation"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{group}-{digest.hexdigest()[:32]}.so"
    with open(folder / f"{group}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of these tests may be at the same
        if not target.exists():
            compile_to(target, text, flags)
    return ctypes.CDLL(str(target))


def compile_to(target: Path, text: str, flags: list[str]) -> None:
    """Compile a translation unit to a library, which is there wholly or not at all."""
    built = target.with_suffix(f".{os.getpid()}")
    source = built.with_suffix(".cpp")
    source.write_text(text)
    command = [compiler() or "g++", *flags, f"-I{SOURCES}", f"-I{SOURCES / 'cuda'}", str(source), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:8000]
    os.replace(built, target)
    source.unlink()


@functools.cache
def places() -> dict[Kernel, tuple[str, int]]:
    """Where each kernel was compiled."""
    return {kernel: (name, idx) for name, group in groups().items() for idx, kernel in enumerate(group)}


class Launches:
    """The launches; the order of their threads, and the number of concurrent blocks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.is_reversed = False
        self.blocks_at_once = 1

    def launch(self, kernel: Kernel, num_blocks: int, args: ctypes.Structure, device: torch.device) -> None:
        """Stand in for `cuda.launch`."""
        assert device.type == "cpu"
        if num_blocks == 0:
            return
        self.calls.append((kernel.call, num_blocks))
        group, idx = places()[kernel]
        assert library(group)[f"size_{idx}"]() == ctypes.sizeof(args), f"{kernel.args} is not laid out as in the source"
        order = int(self.is_reversed), min(self.blocks_at_once, num_blocks)
        library(group)[f"run_{idx}"](ctypes.c_uint(num_blocks), *order, ctypes.byref(args))


@contextmanager
def emulated_cuda() -> Iterator[Launches]:
    """Make the CUDA executor take CPU tensors and run its kernels here."""
    launches, before = Launches(), (cuda.DEVICE_TYPE, cuda.launch)
    cuda.DEVICE_TYPE, cuda.launch = "cpu", launches.launch
    try:
        yield launches
    finally:
        cuda.DEVICE_TYPE, cuda.launch = before
