"""AArch64 without such a machine: the extension is cross-compiled, and an emulator runs its kernels on golden files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from commlib.codecs.envelope import open_envelope
from tests import release
from tests.unit.test_wire_files import GOLDEN, chunk

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SPARSE = {"topk", "randomk", "threshold", "blocktopk"}
NAMES = sorted(path.stem for path in GOLDEN.glob("*.cmlb") if path.stem not in SPARSE)

pytestmark = [
    pytest.mark.skipif(
        not shutil.which(COMPILER), reason=f"{COMPILER} is missing (Debian: apt-get install g++-aarch64-linux-gnu)"
    ),
    pytest.mark.timeout(600),
]
needs_emulator = pytest.mark.skipif(
    not shutil.which(EMULATOR), reason=f"{EMULATOR} is missing (Debian: apt-get install qemu-user-static)"
)


@pytest.fixture(
    scope="module", params=["-O0", pytest.param("-O3", marks=pytest.mark.slow)], ids=["unoptimised", "as released"]
)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources in which the extension was built, with the build's own flags and this one."""
    copy = tmp_path_factory.mktemp("aarch64")
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    (copy / "commlib").mkdir()
    shutil.copy(ROOT / "commlib" / "version.py", copy / "commlib")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    printed = release.run(command, cwd=copy, is_silent=True, CXX=COMPILER, CXXFLAGS=request.param)
    assert "warning:" not in printed
    return copy


def test_the_extension_is_built_for_aarch64(tree: Path) -> None:
    (built,) = (tree / "commlib").glob("_native*.so")
    with built.open("rb") as file:
        assert ELFFile(file)["e_machine"] == "EM_AARCH64"
    objects = {path.stem for path in tree.glob("build/**/*.o")}
    assert objects == {path.stem for path in (ROOT / "csrc").glob("*.cpp")}
    assert b"_ZN7commlib4neon" in built.read_bytes()
    assert b"_ZN7commlib4avx2" not in built.read_bytes()


@pytest.fixture(scope="module")
def program(tree: Path) -> Path:
    """golden.cpp with the kernels of that build."""
    kernels = [path for path in tree.glob("build/**/*.o") if "bindings" not in path.stem and path.stem != "tensor_view"]
    path = tree / "golden"
    source = ROOT / "tests" / "aarch64" / "golden.cpp"
    command = [
        COMPILER,
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-static",
        f"-I{tree / 'csrc'}",
        source,
        *kernels,
        "-o",
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return path


def files_of(name: str, folder: Path) -> list[str]:
    """What golden.cpp takes for one golden file."""
    envelope = open_envelope((GOLDEN / f"{name}.cmlb").read_bytes())
    payload, values = folder / f"{name}.payload", folder / f"{name}.input"
    payload.write_bytes(envelope.payload.numpy().tobytes())
    values.write_bytes(chunk(name).numpy().tobytes())
    is_random = "1" if "stochastic" in name else "0"
    return [str(envelope.codec), is_random, str(values), str(payload), str(GOLDEN / f"{name}.f32")]


@needs_emulator
@pytest.mark.parametrize("isa", ["neon", "scalar"])
def test_the_kernels_write_and_read_the_golden_files(program: Path, isa: str, tmp_path: Path) -> None:
    files = [word for name in NAMES for word in files_of(name, tmp_path)]
    done = subprocess.run([EMULATOR, program, isa, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{len(NAMES)} files, 0 differences\n"), done.stderr


@needs_emulator
def test_a_difference_is_found(program: Path, tmp_path: Path) -> None:
    files = files_of("int8", tmp_path)
    payload = bytearray(Path(files[3]).read_bytes())
    payload[-1] ^= 1
    Path(files[3]).write_bytes(payload)
    done = subprocess.run([EMULATOR, program, "neon", *files], capture_output=True, text=True, check=False)
    assert done.returncode >= 1
    assert "int8.payload: not what neon encodes" in done.stdout
