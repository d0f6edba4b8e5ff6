"""The C++ kernels against NumPy and torch: the same bits on every instruction set."""

import functools
import math
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.errors import CodecError, CommlibError, ConfigError
from commlib.kernels import checks, native
from tests.waiting import eventually

FLOAT_TYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_TYPES = [*FLOAT_TYPES, torch.float64]
FACTORS = [1.0, 2.0, 0.5, -8.0, 1 / 3, 1 / 7, 1e-3, 2.0**-126, 2.0**127, 2.0**-140, 1e30]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def all_isas() -> list[str]:
    return native.supported_isas()


@pytest.fixture(params=all_isas())
def isa(request, monkeypatch):
    monkeypatch.setenv(native.FORCE_ISA_VARIABLE, request.param)
    native.load.cache_clear()
    yield request.param
    monkeypatch.undo()
    native.load.cache_clear()
    native.load()


@functools.cache
def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit type; for wider ones random bits, ordinary numbers, and the edges of the narrow types."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = np.random.default_rng(7)
    random_bits = torch.from_numpy(generator.integers(0, 2**63 - 1, 30_000)) * 2 + 1
    named = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1e-45,
        -1e-40,
        65504,
        65519.996,
        65520,
        3.4e38,
        2.0**-24,
        2.0**-25,
    ]
    halves = special_values(torch.float16).to(dtype)
    midway = halves * (1 + 2.0**-11)
    normal = torch.from_numpy(generator.normal(size=9_999))
    return torch.cat([random_bits.view(dtype), torch.tensor(named, dtype=dtype), normal.to(dtype), halves, midway])


def pack_one(src: torch.Tensor, factor: float) -> torch.Tensor:
    dst = torch.full_like(src, 7)
    native.PackPlan([src.numel()], src.dtype).pack(dst, [src], factor)
    return dst


def reference(src: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the expected result: one product in float32 (float64), one rounding, the canonical NaN in 16 bits."""
    if factor == 1.0:
        return src.clone()
    compute = np.float64 if src.dtype == torch.float64 else np.float32
    with np.errstate(all="ignore"):
        product = src.to(torch.float64 if compute == np.float64 else torch.float32).numpy() * compute(factor)
        if src.dtype == torch.bfloat16:
            result = round_to_bfloat16(product)
        else:
            result = torch.from_numpy(product.astype(np.float16) if src.dtype == torch.float16 else product)
    is_nan = torch.from_numpy(np.isnan(product))
    return torch.where(is_nan, canonical_nan(src.dtype), result)


def round_to_bfloat16(values: np.ndarray) -> torch.Tensor:
    raw = values.view(np.uint32).astype(np.uint64)
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return torch.from_numpy(rounded.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def canonical_nan(dtype: torch.dtype) -> torch.Tensor:
    codes = {torch.float64: 0x7FF8 << 48, torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
    return torch.tensor(codes[dtype], dtype=BITS[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_pack_is_bit_equal_to_numpy(isa, dtype, factor):
    src = special_values(dtype)
    dst, want = pack_one(src, factor), reference(src, factor)
    if dtype.itemsize > 2 and factor != 1.0:
        # The payload of a NaN is left to the processor.
        dst = torch.where(dst.isnan(), canonical_nan(dtype), dst)
    assert torch.equal(bits(dst), bits(want))


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("factor", [1 / 3, 0.25])
def test_all_instruction_sets_give_the_same_bits(dtype, factor, monkeypatch):
    src, results = special_values(dtype), []
    for name in all_isas():
        monkeypatch.setenv(native.FORCE_ISA_VARIABLE, name)
        native.load.cache_clear()
        results.append(pack_one(src, factor))
    native.load.cache_clear()
    assert all(torch.equal(bits(results[0]), bits(result)) for result in results)


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_pack_agrees_with_torch_for_numbers(isa, dtype):
    src = torch.randn(1001).to(dtype)
    assert torch.equal(bits(pack_one(src, 1 / 3)), bits(src * (1 / 3)))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127])
@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_tails_write_exactly_their_elements(isa, dtype, count):
    src = torch.randn(count + 1).to(dtype)[1:]  # not aligned to a vector
    dst = torch.full((count + 8,), 5.0, dtype=dtype)
    native.PackPlan([count], dtype).pack(dst, [src], 1 / 3)
    assert torch.equal(bits(dst[:count]), bits(reference(src, 1 / 3)))
    assert (dst[count:] == 5.0).all()


def test_pack_gathers_any_shapes(isa):
    shapes = [(3, 5), (), (0, 4), (17,), (2, 2, 2), (1,)]
    srcs = [torch.randn(shape) for shape in shapes]
    dst = torch.empty(sum(src.numel() for src in srcs))
    native.PackPlan([src.numel() for src in srcs], torch.float32).pack(dst, srcs, 1 / 3)
    assert torch.equal(dst, torch.cat([src.reshape(-1) * (1 / 3) for src in srcs]))


def test_pack_leaves_gaps_alone_and_writes_zeros_for_none(isa):
    plan = native.PackPlan([2, 3, 2], torch.float32, offsets=[6, 0, 4])
    dst = torch.full((10,), 9.0)
    plan.pack(dst, [torch.ones(2), torch.full((3,), 2.0), None])
    assert dst.tolist() == [2, 2, 2, 9, 0, 0, 1, 1, 9, 9]
    assert plan.extent == 8


def test_pack_multiplies_in_place_where_the_source_is_its_own_place():
    dst = torch.arange(6.0)
    native.PackPlan([2, 4], torch.float32).pack(dst, [dst[:2], dst[2:]], 1 / 3)
    assert torch.equal(dst, torch.arange(6.0) * (1 / 3))


def test_views_are_in_place_until_their_memory_is_exchanged():
    dst = torch.zeros(12)
    plan = native.PackPlan([4, 0, 4], torch.float32, offsets=[6, 6, 1])
    views = [dst[6:10].view(2, 2), torch.empty(0), dst[1:5]]
    assert plan.are_in_place(dst, views)
    assert not plan.are_in_place(dst, views[:2])
    assert not plan.are_in_place(dst[:8], views)
    assert not plan.are_in_place(dst.double(), views)
    assert not plan.are_in_place(dst, [views[0].t(), *views[1:]])
    assert not plan.are_in_place(dst, [*views[:2], dst[2:6]])
    views[0].data = views[0].data.clone()
    assert not plan.are_in_place(dst, views)


def test_pack_takes_parameters_and_tensors_that_require_grad():
    dst = torch.empty(4)
    native.PackPlan([2, 2], torch.float32).pack(
        dst, [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)]
    )
    assert dst.tolist() == [1, 1, 1, 1]


def test_an_empty_plan_does_nothing():
    dst = torch.empty(0)
    native.PackPlan([], torch.float32).pack(dst, [], 2.0)
    native.PackPlan([0, 0], torch.float32).pack(dst, [torch.empty(0), torch.empty(0, 3)], 2.0)


@settings(max_examples=50, deadline=None)
@given(numels=st.lists(st.integers(0, 70), max_size=12), factor=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_pack_equals_multiplication_and_concatenation(numels, factor, seed):
    torch.manual_seed(seed)
    srcs = [torch.randn(numel) for numel in numels]
    dst = torch.empty(sum(numels))
    native.PackPlan(numels, torch.float32).pack(dst, srcs, factor)
    want = [src.numpy() * np.float32(factor) for src in srcs]
    assert np.array_equal(dst.numpy(), np.concatenate([*want, np.empty(0, np.float32)]))


def test_denormals_are_kept_when_the_thread_flushes_them(isa):
    src = torch.tensor([1e-40, -1e-45, 3e-39])
    want = src.numpy() * np.float32(1 / 3)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush denormals")
    try:
        dst = pack_one(src, 1 / 3)
        flushed = torch.tensor([1e-40]) / 3.0
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(dst.numpy().view(np.int32), want.view(np.int32))
    assert flushed.view(torch.int32).item() == 0  # the kernel put the thread's own mode back


@pytest.fixture
def no_forced_switch():
    """A thread keeps the GIL until it releases it voluntarily."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    yield
    sys.setswitchinterval(interval)


def turns_during(kernel: Callable[[], None], num_calls: int = 20) -> int:
    """How often this thread came to run Python while another one did nothing but call a kernel."""
    turns, seen = 0, []

    def work():
        before = turns
        for _ in range(num_calls):
            kernel()
        seen.append(turns - before)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0)  # gives the GIL up
    thread.join()
    return seen[0]


@pytest.mark.usefixtures("no_forced_switch")
def test_kernels_run_without_the_gil():
    src, dst = torch.randn(4_000_000), torch.empty(4_000_000)
    plan = native.PackPlan([src.numel()], torch.float32)  # whose checks on the way call nothing that gives the GIL up
    assert turns_during(lambda: sum(range(1000))) == 0  # what holds the GIL lets nobody in
    assert eventually(lambda: turns_during(lambda: plan.pack(dst, [src], 3.0)) > 0)


def not_contiguous():
    return torch.randn(4, 3).t()


BAD_SOURCES = {
    "contiguous": (not_contiguous, 12),
    "float32": (lambda: torch.randn(12, dtype=torch.float64), 12),
    "12 elements": (lambda: torch.randn(11), 12),
    "CPU": (lambda: torch.empty(12, device="meta"), 12),
    "dense": (lambda: torch.eye(4)[:3].to_sparse(), 12),
    "must be a tensor": (lambda: [0.0] * 12, 12),
    "negated": (lambda: torch.tensor([1 + 2j]).conj().imag, 1),
}


@pytest.mark.parametrize("what", BAD_SOURCES)
def test_pack_refuses_a_bad_source_and_writes_nothing(what):
    make, numel = BAD_SOURCES[what]
    dst = torch.full((2 + numel,), 3.0)
    with pytest.raises(ConfigError, match=rf"source 1 .*{what}"):
        native.PackPlan([2, numel], torch.float32).pack(dst, [torch.zeros(2), make()])
    assert (dst == 3.0).all()


def test_pack_refuses_a_bad_buffer():
    plan, srcs = native.PackPlan([4], torch.float16), [torch.ones(4, dtype=torch.half)]
    for bad in (torch.empty(4), torch.empty(3, dtype=torch.half), torch.empty(8, dtype=torch.half)[::2]):
        with pytest.raises(ConfigError, match="dst must"):
            plan.pack(bad, srcs)
    with pytest.raises(ConfigError, match="packs 1 tensors, got 2"):
        plan.pack(torch.empty(4, dtype=torch.half), srcs * 2)


def test_pack_refuses_overlap():
    flat = torch.arange(8.0)
    plan = native.PackPlan([4, 4], torch.float32)
    with pytest.raises(ConfigError, match="source 0 overlaps"):
        plan.pack(flat, [flat[4:], torch.ones(4)])
    with pytest.raises(ConfigError, match="source 1 overlaps"):
        plan.pack(flat, [torch.ones(4), flat[3:7]])
    assert flat.tolist() == list(range(8))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e39])
def test_a_factor_that_is_none_is_refused(factor):
    with pytest.raises(ConfigError, match="factor must be finite"):
        pack_one(torch.ones(2), factor)


def test_a_plan_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="share elements"):
        native.PackPlan([4, 4], torch.float32, offsets=[0, 3])
    with pytest.raises(ConfigError, match="one offset"):
        native.PackPlan([4, 4], torch.float32, offsets=[0])
    with pytest.raises(ConfigError, match="negative"):
        native.PackPlan([4], torch.float32, offsets=[-1])
    with pytest.raises(ConfigError, match=r"No kernel supports torch\.int32"):
        native.PackPlan([4], torch.int32)


def test_isa_is_the_best_one_unless_forced(isa):
    assert native.isa() == isa


def test_the_environment_must_name_a_supported_isa(monkeypatch):
    monkeypatch.setenv(native.FORCE_ISA_VARIABLE, "mmx")
    native.load.cache_clear()
    with pytest.raises(ConfigError, match=r"COMMLIB_FORCE_ISA='mmx'.*scalar"):
        native.isa()
    monkeypatch.undo()
    native.load.cache_clear()
    assert native.isa() == native.supported_isas()[0]


def test_a_missing_extension_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "commlib._native", None)
    monkeypatch.delattr("commlib._native", raising=False)
    native.load.cache_clear()
    with pytest.raises(CommlibError, match="C\\+\\+ compiler"):
        native.isa()
    monkeypatch.undo()
    native.load.cache_clear()
    assert native.isa()


def test_bytes_are_gathered_and_scattered() -> None:
    tensors = [torch.randn(3, 5), torch.arange(4), torch.tensor(True), torch.empty(0), torch.randn(7).half()]
    flat = torch.zeros(200, dtype=torch.uint8)
    assert native.gather_bytes(flat, tensors)
    want = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    assert flat.numpy().tobytes() == want + bytes(200 - len(want))
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    assert native.scatter_bytes(flat, copies)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert [tensor._version for tensor in copies] == [1] * 5


UNFIT = {
    "transposed": lambda: torch.randn(4, 3).t(),
    "complex": lambda: torch.randn(2, dtype=torch.complex64),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "elsewhere": lambda: torch.empty(4, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "no tensor": lambda: [1.0, 2.0],
    "too large": lambda: torch.randn(100),
}


@pytest.mark.parametrize("what", UNFIT)
def test_unfit_tensors_are_left_to_torch_and_nothing_is_written(what) -> None:
    first, flat = torch.zeros(4), torch.full((64,), 7, dtype=torch.uint8)
    tensors = [first, UNFIT[what]()]
    assert not native.gather_bytes(flat, tensors)
    assert (flat == 7).all()
    if isinstance(tensors[1], torch.Tensor):
        assert not native.scatter_bytes(flat, tensors)
        assert (first == 0).all()


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_payloads_begin_at_multiples_of_16_bytes(offset: int) -> None:
    """The kernels of all instruction sets read sections of a payload as vectors."""
    room = torch.zeros(64, dtype=torch.uint8)
    start = -room.data_ptr() % 16
    checks.check_payload("payload", room[start : start + 32], 32)
    with pytest.raises(CodecError, match="payload: expected an address that is a multiple of 16"):
        checks.check_payload("payload", room[start + offset : start + offset + 32], 32)
