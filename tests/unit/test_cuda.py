"""Finding the compiler and the device, launching, and which executor a tensor gets; all without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commlib import doctor
from commlib.codecs import Int8, TopK
from commlib.codecs.sparse import raise_if_damaged
from commlib.errors import CodecError
from commlib.kernels import cuda, cuda_codecs, cuda_sparse, meta_codecs, meta_sparse, native_codecs, native_sparse
from commlib.kernels.checks import CPU, Random
from commlib.kernels.cuda_args import DecodeArgs, Kernel, random_source
from commlib.kernels.executor import block_executor, sparse_executor

KERNEL = Kernel("decode_kernels.h", "decode<Int8, Float32, false>", "DecodeArgs")


def test_the_architecture_is_the_device_s_or_the_next_that_runs_there() -> None:
    known = [75, 80, 86, 89, 90, 100, 120]
    assert cuda.architecture_for((9, 0), known) == "sm_90"
    assert cuda.architecture_for((8, 7), known) == "sm_86"
    assert cuda.architecture_for((10, 3), known) == "sm_100"
    assert cuda.architecture_for((12, 1), known) == "sm_120"
    with pytest.raises(CodecError, match=r"a device of sm_70; it knows sm_75, .*CUDA 12"):
        cuda.architecture_for((7, 0), known)


def test_the_options_forbid_what_changes_bits() -> None:
    options = cuda.options_for("sm_90")
    assert options[0] == "--gpu-architecture=sm_90"
    assert {"--fmad=false", "--ftz=false", "--prec-div=true"} <= set(options)
    assert not any("fast" in option for option in options)


def test_the_cache_s_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMLIB_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cuda.cache_dir() == Path.home() / ".cache" / "commlib"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cuda.cache_dir() == Path("/elsewhere/commlib")
    monkeypatch.setenv("COMMLIB_CACHE_DIR", "/here")
    assert cuda.cache_dir() == Path("/here")


@pytest.fixture
def without_cupy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    for name in [name for name in sys.modules if name.startswith("cupy_backends.")]:
        monkeypatch.delitem(sys.modules, name)
    for function in (cuda._driver, cuda._nvrtc):
        function.cache_clear()
    yield
    for function in (cuda._driver, cuda._nvrtc):
        function.cache_clear()


def test_without_cupy_the_error_says_how_to_install_it(without_cupy: None) -> None:
    with pytest.raises(CodecError, match=r"pip install 'cupy-cuda1[23]x>=14' "):
        cuda.supported_architectures()


def test_doctor_says_what_is_missing(without_cupy: None) -> None:
    (finding,) = list(doctor._cuda_kernels())
    assert (finding.name, finding.status) == ("CUDA kernels", "absent")
    assert "pip install 'cupy-cuda1" in finding.value


def test_doctor_says_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(cuda, "supported_architectures", lambda: [75, 90])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda idx: [(9, 0), (7, 0)][idx])
    monkeypatch.setenv(cuda.CACHE_VARIABLE, str(tmp_path))
    findings = {finding.name: finding for finding in doctor._cuda_kernels()}
    assert findings["CUDA kernels"].value.startswith("NVRTC 13.5, for sm_75 to sm_90")
    assert findings["compiled kernels"].value.startswith(f"0 in {tmp_path}")
    assert findings["kernels for device 0"].value == "compiled for sm_90"
    assert findings["kernels for device 1"].status == "absent"


class FakeDriver:
    """Records the arguments of each launch."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launches: list[tuple] = []
        self.refuses = 0

    def moduleLoadData(self, image: bytes) -> int:
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        self.loaded.append(image)
        return 7

    def moduleGetFunction(self, module: int, name: str) -> int:
        assert (module, name) == (7, "commlib_decode_Int8_Float32_false")
        return 8

    def launchKernel(self, *arguments: int) -> None:
        addresses = (ctypes.c_void_p * 1).from_address(arguments[9])
        args = DecodeArgs.from_buffer_copy(ctypes.string_at(addresses[0], ctypes.sizeof(DecodeArgs)))
        self.launches.append((*arguments[:9], arguments[10], args))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """A device that is not there: launching as far as the driver."""
    fake = FakeDriver()
    monkeypatch.setattr(cuda, "_driver", lambda: fake)
    monkeypatch.setattr(cuda, "supported_architectures", lambda: [80, 90])
    monkeypatch.setattr(cuda, "cubin", lambda kernel, architecture, ignores_cache=False: architecture.encode())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda idx: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=55))
    cuda._function.cache_clear()
    yield fake
    cuda._function.cache_clear()


def test_a_launch_passes_grid_stream_and_argument(driver: FakeDriver) -> None:
    for blocks in (11, 0, 12):
        cuda.launch(KERNEL, blocks, DecodeArgs(num_inputs=5, weight=0.25), torch.device("cuda", 3))
    assert driver.loaded == [b"sm_90"], "loaded once"
    assert [launch[:10] for launch in driver.launches] == [
        (8, blocks, 1, 1, 256, 1, 1, 0, 55, 0) for blocks in (11, 12)
    ]
    assert (driver.launches[0][10].num_inputs, driver.launches[0][10].weight) == (5, 0.25)


def test_a_kernel_that_the_driver_refuses_is_compiled_again(driver: FakeDriver) -> None:
    driver.refuses = 1
    cuda.launch(KERNEL, 1, DecodeArgs(), torch.device("cuda", 3))
    assert len(driver.launches) == 1


def test_segments_are_copied_once() -> None:
    several = Random(1 << 40 | 5, 1, 2, 3, [(0, 7), (10, 100)])
    first, second = random_source(several, CPU), random_source(several, CPU)
    assert first.segments == second.segments
    assert (first.num_segments, list(first.key), first.stage_and_rank) == (2, [5, 256], 3 << 24 | 2)
    alone = random_source(Random(1, segments=[(0, 2**40)]), CPU)
    assert (alone.segments, alone.num_segments, alone.offset) == (None, 1, 2**40)
    assert random_source(None, CPU).num_segments == 0


def test_the_executor_is_that_of_the_tensor_s_device() -> None:
    assert block_executor(torch.empty(1)) is native_codecs
    assert block_executor(torch.empty(1, device="meta")) is meta_codecs
    assert sparse_executor(torch.empty(1, device="meta")) is meta_sparse
    fake = SimpleNamespace(device=torch.device("cuda", 0))
    assert block_executor(fake) is cuda_codecs
    assert sparse_executor(fake) is cuda_sparse
    assert sparse_executor(torch.empty(1)) is native_sparse
    with pytest.raises(CodecError, match="expected the CPU or a CUDA device"):
        block_executor(SimpleNamespace(device=torch.device("xpu", 0)))


def test_a_cpu_tensor_is_not_taken_by_the_cuda_executor() -> None:
    with pytest.raises(CodecError, match="out: expected a tensor on a CUDA device, got cpu"):
        cuda_codecs.decode(1, torch.empty(16, dtype=torch.uint8), torch.empty(0))
    with pytest.raises(CodecError, match="out: expected a tensor on a CUDA device, got cpu"):
        cuda_sparse.encode_top_k(torch.empty(1), 1, torch.empty(32, dtype=torch.uint8))


def test_codecs_work_on_the_cpu_as_before() -> None:
    x = torch.randn(1000)
    for codec in (Int8(), TopK(0.1)):
        payload, back = torch.empty(codec.payload_bytes(1000), dtype=torch.uint8), torch.empty(1000)
        codec.encode(x, payload)
        codec.decode(payload, back)
        assert (x - back).norm() < x.norm()
    raise_if_damaged(CPU)
