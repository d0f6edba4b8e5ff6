"""Requirements of a check on the machine, found or built: packages, the extension, and compiled kernels."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Imports of the parts, with the package that provides each.
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "setuptools": "setuptools",
    "pybind11": "pybind11",
    "ninja": "ninja",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
    "typing_extensions": "typing-extensions",
    "rich": "rich",
}
#: Packages required only with a GPU, and optional ones.
ON_A_GPU = {"cupy_backends": "cupy-cuda13x"}
#: Exit status of the compilation of kernels where there is no compiler.
NO_COMPILER = 3
OPTIONAL = {"triton": "triton", "matplotlib": "matplotlib", "typer": "typer", "pytest_timeout": "pytest-timeout"}


def install_wheels(wheels: Path, site: Path) -> list[str]:
    """Unpack all wheels of a folder into `site`, without dependencies; return their names.

    Raises:
        FileNotFoundError: The folder has no wheels.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise FileNotFoundError(f"--wheels {wheels}: no file there ends in .whl")
    for path in found:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    return [path.name for path in found]


def missing(names: dict[str, str], site: Path) -> list[str]:
    """Return the packages of those that can be imported neither here nor from `site`."""
    sys.path.insert(0, str(site))
    try:
        importlib.invalidate_caches()
        return [package for name, package in names.items() if importlib.util.find_spec(name) is None]
    finally:
        sys.path.remove(str(site))


def is_built() -> bool:
    """Return whether the extension of this interpreter is there and later than its sources."""
    suffix = next(iter(importlib.machinery.EXTENSION_SUFFIXES))
    target = ROOT / "commlib" / f"_native{suffix}"
    sources = [ROOT / "setup.py", *(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc").glob("*.h")]
    return target.exists() and target.stat().st_mtime >= max(path.stat().st_mtime for path in sources)


def build_command() -> list[str]:
    """Return the command that builds the extension in place, without the compiler's thousands of warnings."""
    return ["env", "CXXFLAGS=-w", sys.executable, "setup.py", "-q", "build_ext", "--inplace"]


def environment(site: Path, cache: Path, **extra: str) -> dict[str, str]:
    """Return the environment of all processes: the checkout and the wheels first, one thread each, loopback only."""
    path = os.pathsep.join(part for part in (str(ROOT), str(site), os.environ.get("PYTHONPATH", "")) if part)
    fixed = {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "COMMLIB_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "MASTER_ADDR": "127.0.0.1",
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]),
    }
    return {**os.environ, **fixed, **extra}


def device_of_this_machine(env: dict[str, str]) -> tuple[str, str] | None:
    """Return the name and the architecture ("90") of the first CUDA device; None without one. Imports torch apart."""
    code = (
        "import torch\n"
        "if torch.cuda.is_available():\n"
        "    print(torch.cuda.get_device_name(0))\n"
        "    print('%d%d' % torch.cuda.get_device_capability(0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return (lines[0], lines[1]) if done.returncode == 0 and len(lines) == 2 else None
