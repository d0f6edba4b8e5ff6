"""The CUDA kernels compile without a GPU: by NVRTC as cuda.py calls it, and by nvcc, for the promised architectures."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from commlib.errors import CodecError
from commlib.kernels import cuda, cuda_codecs, cuda_sparse
from commlib.kernels.codec_table import BLOCK_ROWS
from commlib.kernels.cuda_args import Kernel
from tests.cuda_emulation import emulator, nvrtc

pytestmark = pytest.mark.timeout(180)

SOURCES = Path(__file__).parents[2] / "csrc"
ARCHITECTURES = [75, 80, 90, 100]
ALL = os.environ.get("COMMLIB_SLOW_TESTS") == "1"


def full_encoder(group: str) -> Kernel:
    """The one for fp32 that does everything that it can."""
    return cuda_codecs.encode_kernel(group, "Float32", True, group in emulator.STOCHASTIC, True)


def kernels(group: str) -> list[Kernel]:
    """Those of a group for fp32, with everything that they can do; all of them in the long run."""
    everything = emulator.groups()[group]
    if ALL or group.startswith("sparse") or group == "rotation":
        return everything
    chosen = [
        cuda_codecs.encode_kernel(group, "Float32", False, False, False),
        full_encoder(group),
        cuda_codecs.decode_kernel(group, "Float32", True),
        cuda_codecs.decode_kernel(group, "Float16", False),
    ]
    return chosen + [kernel for kernel in everything if "find_ranges<Bagua, Float32" in kernel.call]


def groups() -> list[str]:
    found = list(emulator.groups())
    return found if ALL else [name for name in found if name not in ("sparse-Float16", "sparse-Float64")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cuda.CACHE_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> nvrtc.Nvrtc:
    """The newest NVRTC, in the place of CuPy's binding to it."""
    if not nvrtc.libraries():
        pytest.skip("NVRTC is not here (pip install nvidia-cuda-nvrtc)")
    found = nvrtc.Nvrtc(max(nvrtc.libraries()))
    monkeypatch.setattr(cuda, "_nvrtc", lambda: found)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("group", groups())
def test_nvrtc_compiles(compiler: nvrtc.Nvrtc, group: str, architecture: int) -> None:
    assert architecture in cuda.supported_architectures()
    for kernel in kernels(group):
        assert cuda.cubin(kernel, f"sm_{architecture}")[:4] == b"\x7fELF"


def test_nvrtc_12_compiles_for_sm_70(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if 12 not in nvrtc.libraries():
        pytest.skip("NVRTC 12 is not here (pip install nvidia-cuda-nvrtc-cu12); CUDA 13 has dropped sm_70")
    monkeypatch.setattr(cuda, "_nvrtc", lambda: nvrtc.Nvrtc(12))
    for group in groups():
        for kernel in kernels(group):
            assert cuda.cubin(kernel, "sm_70")[:4] == b"\x7fELF"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_compiles(architecture: int, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not here")
    chosen = [full_encoder(group) for group in ("Int8", "MinMax", "OneBit", "MxFp4", "CastFloat16")]
    chosen += [cuda_codecs.ROTATE_KERNEL]
    chosen += [cuda_sparse.compact_kernel("BFloat16", True, goal) for goal in ("kCandidates", "kTopK", "kThreshold")]
    chosen += [cuda_sparse.block_top_k_kernel("BFloat16", True)]  # which works in shared memory
    source, target = tmp_path / "all.cu", tmp_path / "all.ptx"
    source.write_text("".join(kernel.source(f"kernel_{idx}") for idx, kernel in enumerate(chosen)))
    options = [option for option in cuda.options_for("") if not option.startswith("--gpu-architecture")]
    arch = [f"--gpu-architecture=compute_{architecture}", "--ptx", "-Werror", "all-warnings"]
    command = [nvcc, *arch, *options, f"-I{SOURCES}", f"-I{SOURCES / 'cuda'}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = target.read_text()
    bodies = text.split(".entry ")[1:]
    assert sorted(body.partition("(")[0] for body in bodies) == [f"kernel_{idx}" for idx in range(len(chosen))]
    element_by_element = f"kernel_{len(chosen) - 1}"
    for body in bodies:  # full tiles: 16 bytes at once
        if body.partition("(")[0] == element_by_element:
            continue
        assert "ld.global.v4." in body
        assert "st.global.v4.f32" in body
    # [Note: exactness] in codec_math.h: every operation is rounded separately, and denormals count.
    assert "fma." not in text
    assert ".ftz" not in text
    assert "div.approx" not in text
    assert ("redux.sync.max" in text) == (architecture >= 80)


# --- the cache --------------------------------------------------------------------------------------------------------

KERNEL = cuda_codecs.decode_kernel("Int8", "Float32", False)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_a_kernel_is_compiled_once(compiler: nvrtc.Nvrtc, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cuda.cubin(KERNEL, "sm_90")
    (file,) = files(cache)
    assert file.suffix == ".cubin"
    monkeypatch.setattr(compiler, "compileProgram", None)  # would fail if it was called
    assert cuda.cubin(KERNEL, "sm_90") == first


def test_another_architecture_option_source_or_compiler_is_another_file(
    compiler: nvrtc.Nvrtc, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.cubin(KERNEL, "sm_90")
    cuda.cubin(KERNEL, "sm_80")
    cuda.cubin(cuda_codecs.decode_kernel("Int4", "Float32", False), "sm_90")
    monkeypatch.setattr(cuda, "_OPTIONS", (*cuda._OPTIONS, "--define-macro=ANOTHER=1"))
    cuda.cubin(KERNEL, "sm_90")
    changed = {name: text + "\n" for name, text in cuda.headers().items()}
    monkeypatch.setattr(cuda, "headers", lambda: changed)
    cuda.cubin(KERNEL, "sm_90")
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: (99, 0))
    cuda.cubin(KERNEL, "sm_90")
    assert len(files(cache)) == 6


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_file_is_compiled_again(compiler: nvrtc.Nvrtc, cache: Path, damage: str) -> None:
    good = cuda.cubin(KERNEL, "sm_90")
    (file,) = files(cache)
    whole = file.read_bytes()
    file.write_bytes({"truncated": whole[:-9], "changed": whole[:-9] + b"x" * 9, "empty": b""}[damage])
    assert cuda.cubin(KERNEL, "sm_90") == good
    assert file.read_bytes() == whole
    assert files(cache) == [file], "no temporary files stay"


def test_without_a_place_for_the_cache_it_compiles(
    compiler: nvrtc.Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cuda.CACHE_VARIABLE, str(tmp_path / "file" / "kernels"))
    assert cuda.cubin(KERNEL, "sm_90")[:4] == b"\x7fELF"


def test_a_source_that_does_not_compile_is_an_error_with_the_compiler_s_message(compiler: nvrtc.Nvrtc) -> None:
    with pytest.raises(CodecError, match=r"NVRTC cannot compile decode<Nonsense>(.|\n)*Nonsense.*undefined"):
        cuda.cubin(Kernel("decode_kernels.h", "decode<Nonsense>", "DecodeArgs"), "sm_90")


def test_every_header_is_found(compiler: nvrtc.Nvrtc) -> None:
    assert {"codec_math.h", "device.h", "encode_kernels.h", "decode_kernels.h", "select_kernels.h"} <= set(
        cuda.headers()
    )
    assert {row.struct for row in BLOCK_ROWS} <= set(emulator.groups())
