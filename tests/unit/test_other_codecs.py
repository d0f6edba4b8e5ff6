"""Codecs of other packages: discovery, rejected ones, and torch operations as the implementation of a codec."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import commlib
from commlib.codecs import (
    Feedback,
    Int8,
    Random,
    TorchBlockCodec,
    block_codec,
    by_id,
    by_name,
    open_envelope,
    register,
    seal,
    uniforms,
)
from commlib.codecs.registry import gathered_codec
from commlib.errors import CodecError, ConfigError
from commlib.kernels import meta
from commlib.kernels.reference import Stream
from commlib.network import presets
from commlib.network.model import Layer, Network, Workload
from commlib.simulation import compare
from commlib.simulation.simulator import Options
from tests import plugins

ROOT = Path(__file__).parents[2]


@pytest.fixture
def relaxed(tmp_path: Path) -> Iterator[Path]:
    """The folder of an installed package with codecs and an algorithm."""
    folder = plugins.install_relaxed(tmp_path / "relaxed")
    with plugins.on_path(folder):
        yield folder


@pytest.fixture
def path_of_nothing() -> Iterator[None]:
    """Whatever is registered is forgotten."""
    with plugins.on_path():
        yield


def package_of(name: str, number: int, *, base: str = "TorchBlockCodec", extra: str = "") -> str:
    """The source of a module with one codec, class `Codec`, of one byte for each element."""
    return f"""
import torch
from commlib.codecs import TorchBlockCodec, TorchSparseCodec
{extra}
class Codec({base}):
    id, name, block = {number}, {name!r}, 1
    def packed_bytes(self, numel): return numel
    def pack(self, values, uniforms): return torch.zeros(values.numel(), dtype=torch.uint8)
    def unpack(self, packed, numel): return torch.zeros(numel, dtype=torch.float32)
"""


def installed(folder: Path, package: str, source: str, name: str) -> Path:
    return plugins.install(folder / package, package, source, {"commlib.codecs": {name: f"{package}:Codec"}})


# --- finding them -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("relaxed")
def test_a_codec_is_found_by_name_and_by_number() -> None:
    codec = block_codec("byte64")
    assert type(codec).__module__ == "relaxed"
    assert by_name["byte64"] is by_id[40_064] is type(codec)
    assert {"byte64", "top16", "int8"} <= set(by_name)
    assert len(by_name) == len(by_id) == len(list(by_id))


@pytest.mark.usefixtures("relaxed")
def test_a_sparse_codec_is_found_where_sparse_ones_are_taken() -> None:
    assert type(gathered_codec("top16")) is by_name["top16"]
    assert type(gathered_codec("byte64")) is by_name["byte64"]
    with pytest.raises(ConfigError, match="expected a block codec .* got 'top16'"):
        block_codec("top16")


@pytest.mark.usefixtures("relaxed")
def test_a_sealed_payload_is_opened_again() -> None:
    codec, numel = block_codec("byte64"), 1000
    for own in (codec, by_name["top16"]()):
        payload = torch.empty(own.payload_bytes(numel), dtype=torch.uint8)
        own.encode(torch.randn(numel), payload)
        envelope = open_envelope(seal(own, payload, numel))
        assert (envelope.codec, envelope.numel) == (own.id, numel)
        assert torch.equal(envelope.payload, payload)


def test_a_codec_that_is_gone_is_unknown(tmp_path: Path) -> None:
    with plugins.on_path(plugins.install_relaxed(tmp_path)):
        codec = block_codec("byte64")
        data = seal(codec, torch.zeros(codec.payload_bytes(64), dtype=torch.uint8), 64)
    with pytest.raises(CodecError, match="expected the id of a known codec"):
        open_envelope(data)
    with pytest.raises(ConfigError, match="got 'byte64'"):
        block_codec("byte64")


@pytest.mark.usefixtures("path_of_nothing")
def test_a_class_may_register_itself() -> None:
    @register
    class Own(TorchBlockCodec):
        id, name, block = 50_000, "own", 1

        def packed_bytes(self, numel: int) -> int:
            return 4 * numel

        def pack(self, values: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
            return values.contiguous().view(torch.uint8)

        def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
            return packed.view(torch.float32)

    assert register(Own) is Own
    assert type(block_codec("own")) is by_id[50_000] is Own


def test_an_own_codec_is_found_without_looking_for_packages(tmp_path: Path) -> None:
    folder = installed(tmp_path, "broken", "raise RuntimeError('boom')", "broken")
    with plugins.on_path(folder):
        assert isinstance(block_codec("int8"), Int8)


# --- rejected codecs --------------------------------------------------------------------------------------------------


def test_a_package_that_fails_is_named_and_breaks_no_other(relaxed: Path, tmp_path: Path) -> None:
    folder = installed(tmp_path, "broken", "raise RuntimeError('boom')", "broken")
    with plugins.on_path(folder, relaxed):
        with pytest.warns(
            UserWarning, match=r"'broken' \(broken:Codec\) of the package 'broken' .* RuntimeError: boom"
        ):
            assert block_codec("byte64").name == "byte64"
        with pytest.raises(ConfigError, match="'broken' cannot be loaded: RuntimeError: boom"):
            block_codec("broken")
        assert "broken" not in by_name


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (package_of("other", 40_001), "refers to Codec, whose name is 'other'"),
        (package_of("one", 40_001, base="object"), "expected a subclass of TorchBlockCodec or SparseCodec"),
        (package_of("one", 40_001, base="TorchSparseCodec"), "without abstract methods; define places"),
        (package_of("one", 17), r"expected an id in 32768\.\.65535"),
        (package_of("one", 40_001) + "    block = None\n", "expected the number of elements per block"),
        ("Codec = 5", "expected a subclass of TorchBlockCodec"),
    ],
)
def test_what_is_no_codec_is_left_out(tmp_path: Path, source: str, message: str) -> None:
    with (
        plugins.on_path(installed(tmp_path, "odd", source, "one")),
        pytest.warns(UserWarning, match=message),
    ):
        assert "one" not in by_name


@pytest.mark.parametrize(
    ("names", "numbers", "field"),
    [
        (("same", "same"), (40_001, 40_002), "name, 'same'"),
        (("one", "two"), (40_001, 40_001), "id, 40001"),
        (("int8", "two"), (40_001, 40_002), "name, 'int8'"),
    ],
)
def test_a_clash_names_both_packages(
    tmp_path: Path, names: tuple[str, str], numbers: tuple[int, int], field: str
) -> None:
    folders = [
        installed(tmp_path, package, package_of(name, number), name)
        for package, name, number in zip(("first", "second"), names, numbers, strict=True)
    ]
    other = "commlib" if "int8" in names else "second"
    with plugins.on_path(*folders):
        for _ in range(2):  # the next caller gets the error too
            with pytest.raises(ConfigError, match=f"have the same {field}") as caught:
                block_codec("two")
            assert {"first", other} <= set(str(caught.value).split("'")), caught.value


@pytest.mark.usefixtures("relaxed")
def test_register_refuses_a_clash() -> None:
    class Byte64(type(block_codec("byte64"))):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigError, match="of the package 'tests' and relaxed.Byte64 of the package 'relaxed' have"):
        register(Byte64)


def test_an_algorithm_that_fails_is_named(tmp_path: Path) -> None:
    points = {"commlib.algorithms": {"failing": "failing:Algorithm"}}
    with plugins.on_path(plugins.install(tmp_path, "failing", "raise RuntimeError('boom')", points)):
        assert "failing" in commlib.algorithms.list()
        with pytest.raises(ConfigError, match=r"'failing' \(failing:Algorithm of the package 'failing'\) .*boom"):
            commlib.algorithms.get("failing")


# --- operations of codecs ---------------------------------------------------------------------------------------------


def test_chunks_are_those_of_pieces(relaxed: Path) -> None:
    codec, numel, chunk = block_codec("byte64"), 1000, 300
    x, residual = torch.randn(numel), torch.randn(numel)
    whole = torch.empty(codec.buffer_bytes(numel, chunk), dtype=torch.uint8)
    codec.encode(x, whole, chunk=chunk, feedback=Feedback(residual.clone()), random=Random(seed=3))
    at = 0
    for begin in range(0, numel, chunk):
        part, owed = x[begin : begin + chunk].clone(), residual[begin : begin + chunk].clone()
        piece = torch.empty(codec.payload_bytes(part.numel()), dtype=torch.uint8)
        codec.encode(part, piece, feedback=Feedback(owed), random=Random(seed=3, segments=[(0, begin)]))
        assert torch.equal(whole[at : at + piece.numel()], piece)
        at += piece.numel()
    out = torch.zeros(numel)
    codec.decode(whole, out, chunk=chunk)
    assert (out - x - residual).abs().max() < 0.1
    added = torch.ones(numel, dtype=torch.float64)
    codec.decode_add(whole, added, weight=0.5, chunk=chunk)
    torch.testing.assert_close(added, (1 + 0.5 * out).double())


@pytest.mark.usefixtures("relaxed")
def test_the_encoded_sum_is_the_sum_encoded() -> None:
    codec, numel = block_codec("byte64"), 500
    rows = torch.empty(3, codec.payload_bytes(numel), dtype=torch.uint8)
    for row in rows:
        codec.encode(torch.randn(numel), row)
    total, found, expected = torch.empty(numel), torch.empty_like(rows[0]), torch.empty_like(rows[0])
    codec.decode_sum(rows, total, divisor=3.0)
    codec.encode_sum(rows, numel, found, divisor=3.0, random=Random(seed=1), first=40)
    codec.encode(total, expected, random=Random(seed=1, segments=[(0, 40)]))
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("relaxed")
def test_a_residual_keeps_what_it_was_where_a_value_is_not_finite() -> None:
    for codec in (block_codec("byte64"), by_name["top16"](0.5)):
        x, residual = torch.randn(200), torch.full((200,), 0.25)
        x[3] = float("inf")
        codec.encode(x, torch.empty(codec.payload_bytes(200), dtype=torch.uint8), feedback=Feedback(residual))
        assert residual.isfinite().all()
        assert residual[3] == 0.25


def test_random_numbers_are_those_of_the_wire_format() -> None:
    source = Random(seed=2**63 + 12345, step=7, rank=3, stage=2, segments=[(0, 5), (100, 1 << 40), (250, 2)])
    stream = [
        Stream(2**63 + 12345, 7, 3, 2, offset).uniforms(start, count)
        for start, count, offset in ((0, 100, 5), (0, 150, 1 << 40), (0, 50, 2))
    ]
    expected = np.concatenate(stream)
    for first, count in ((0, 300), (0, 1), (90, 20), (100, 150), (249, 51), (299, 1), (120, 0)):
        found = uniforms(source, first, count, torch.device("cpu"))
        np.testing.assert_array_equal(found.numpy(), expected[first : first + count])


@pytest.mark.parametrize("wrong", ["pack", "unpack"])
def test_a_wrong_shape_is_named_and_nothing_is_written(wrong: str) -> None:
    class Wrong(TorchBlockCodec):
        id, name, block = 50_000, "wrong", 1

        def packed_bytes(self, numel: int) -> int:
            return numel

        def pack(self, values: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
            return torch.zeros(values.numel() + (wrong == "pack"), dtype=torch.uint8)

        def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
            return torch.zeros(numel, dtype=torch.float64)

    codec, out, x = Wrong(), torch.full((112,), 7, dtype=torch.uint8), torch.full((100,), 7.0)
    with pytest.raises(CodecError, match=rf"Wrong\(\)\.{wrong}: expected \[100\]"):
        codec.encode(x, out) if wrong == "pack" else codec.decode(out, x)
    assert (out == 7).all()
    assert (x == 7).all()


@pytest.mark.usefixtures("relaxed")
def test_on_meta_tensors_arguments_are_checked_and_work_is_counted_once() -> None:
    done: list[Any] = []
    for codec in (block_codec("byte64"), by_name["top16"](0.5)):
        x, out = (
            torch.empty(300, device="meta"),
            torch.empty(codec.payload_bytes(300), dtype=torch.uint8, device="meta"),
        )
        with meta.repeating(lambda key, work, _: (done.append(key), work())):
            codec.encode(x, out, feedback=Feedback(torch.empty_like(x)))
            codec.encode(x, out, feedback=Feedback(torch.empty_like(x)))
            codec.decode(out, x)
            codec.decode_add(out, x)
            if isinstance(codec, TorchBlockCodec):
                codec.encode(x, out, random=Random(seed=1, segments=[(0, 7), (100, 3)]))
        with pytest.raises(CodecError, match="out: expected"):
            codec.encode(x, out[:16])
    keys = [len(set(done[:5])), len(set(done[5:]))]
    assert keys == [4, 3], "the second encoding is like the first"


LAYERS = tuple(Layer(f"l{idx}", (("weight", (512, 512)), ("bias", (512,))), 1.0) for idx in range(3))
SMALL = Workload("small", LAYERS, batch_per_rank=4, forward_s=1e-3, backward_s=2e-3, optimizer_s=1e-4, device="v100")
NETWORK = Network("four", nodes=4, gpus_per_node=1, bandwidth_gbps=1.0, latency_us=20.0)


@pytest.mark.usefixtures("relaxed")
def test_compare_takes_them_by_name() -> None:
    text = "bytegrad, bytegrad(codec='byte64'), local_sgd(period=2, codec='byte64'), relaxed_mean"
    found = compare.compare(SMALL, NETWORK, presets.device("v100"), compare.candidates(text), Options(steps=2))
    assert not found.refused
    rows = {row.algorithm: row.result for row in found.rows}
    own, other = rows["bytegrad"], rows["bytegrad(codec='byte64')"]
    assert own.wire_bytes < other.wire_bytes < 1.1 * own.wire_bytes, "4 bytes for 64 elements, where int8 has 2 for 256"
    assert other.step_s > own.step_s, "many torch operations take longer than a kernel"
    assert rows["relaxed_mean"].wire_bytes > 0


@pytest.mark.usefixtures("path_of_nothing")
def test_the_contract_tests_find_them_without_a_line(tmp_path: Path) -> None:
    folder = plugins.install_relaxed(tmp_path / "relaxed")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "byte64 or top16"]
    own = ("COMMLIB_SLOW_TESTS", "COMMLIB_TEST_SHARD")  # of this session
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(
        [*command, "tests/contract/test_codecs.py"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "32 passed" in done.stdout
