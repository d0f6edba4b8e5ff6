"""Compile every CUDA kernel for one architecture into the cache, on all cores. Needs NVRTC and no GPU.

python -m tests.gpu.compile_kernels --architecture 90
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import sys
import time

from commlib.errors import CodecError
from commlib.kernels import cuda
from commlib.kernels.cuda_args import Kernel
from tests.cuda_emulation import emulator, nvrtc
from tests.gpu import results
from tests.gpu.machine import NO_COMPILER


def all_kernels() -> list[Kernel]:
    """Return every kernel that the executor can ask for, once."""
    return list(dict.fromkeys(kernel for group in emulator.groups().values() for kernel in group))


def choose_compiler() -> str | None:
    """Take CuPy's binding to NVRTC, as the library does, or else the tests' own; return its version."""
    try:
        major, minor = cuda.nvrtc_version()
        return f"NVRTC {major}.{minor} through CuPy"
    except CodecError:
        pass
    if not nvrtc.libraries():
        return None
    found = nvrtc.Nvrtc(max(nvrtc.libraries()))
    cuda._nvrtc = lambda: found  # type: ignore[assignment]
    return "NVRTC {}.{} through ctypes".format(*found.getVersion())


def compile_one(kernel: Kernel, architecture: str) -> tuple[str, int, str]:
    """Return the kernel's name, the size of its machine code, and the error message."""
    try:
        return kernel.call, len(cuda.cubin(kernel, architecture)), ""
    except CodecError as error:
        return kernel.call, 0, str(error)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="90", help="as 90 for sm_90")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    compiler = choose_compiler()
    if compiler is None:
        text = "NVRTC is not here (pip install nvidia-cuda-nvrtc, or CuPy on a machine with CUDA)"
        print(text)
        results.add("compile kernels", results.SKIPPED, text=text)
        return NO_COMPILER
    begin, kernels, architecture = time.monotonic(), all_kernels(), f"sm_{args.architecture}"
    before = {path.name for path in cuda.cache_dir().glob("*.cubin")} if cuda.cache_dir().is_dir() else set()
    with concurrent.futures.ProcessPoolExecutor(args.jobs, initializer=choose_compiler) as pool:
        done = list(pool.map(compile_one, kernels, [architecture] * len(kernels), chunksize=4))
    failed = [f"{name}: {error}" for name, _, error in done if error]
    new = len({path.name for path in cuda.cache_dir().glob("*.cubin")} - before)
    facts = {"compiler": compiler, "kernels": len(kernels), "compiled": new, "nbytes": sum(size for _, size, _ in done)}
    seconds = round(time.monotonic() - begin, 1)
    print(f"{compiler}: {len(kernels)} kernels for {architecture}, {new} of them compiled now, in {seconds} s")
    print("\n".join(failed[:3]))
    outcome = results.FAILED if failed else results.PASSED
    results.add(
        f"compile kernels for {architecture}", outcome, seconds=seconds, text="\n".join(failed[:3])[:4000], **facts
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
