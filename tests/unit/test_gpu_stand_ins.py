"""What tests/gpu stands on, as far as it goes without a GPU: pretended ranks, exact training, traces, results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import commlib
from commlib.transport.base import AllGather, AllReduce, AllToAll, Communicator
from tests.gpu import pretended, report, results, waits
from tests.gpu.pretended import NUM_RANKS, pretended_ranks
from tests.gpu.test_wrapped_steps import ALGORITHMS
from tests.gpu.wrapped import Steps, assert_same_steps, gradients_of, trained

CPU = torch.device("cpu")
COMM = Communicator(0, NUM_RANKS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_repeats_itself_and_communicates(name: str) -> None:
    with pretended_ranks() as made:
        assert_same_steps(ALGORITHMS[name], 0.1, CPU, CPU, steps=4)
    assert sum(transport.num_issued for transport in made) >= 2


def test_another_bit_is_found() -> None:
    algorithms = iter([commlib.algorithms.ByteGrad(), commlib.algorithms.AllReduce()])
    with pretended_ranks(), pytest.raises(AssertionError, match="of 4096 elements of gradient 0 differ"):
        assert_same_steps(lambda: next(algorithms), 0.1, CPU, CPU, steps=2)


def test_gradients_are_sums_of_what_the_ranks_have() -> None:
    with pretended_ranks():
        states = next(trained(commlib.algorithms.AllReduce, 0.1, CPU, steps=1))
    given = gradients_of(0, CPU)[0] / NUM_RANKS
    assert torch.equal(states[0], given + given * 0.5 + given * -0.25 + given * 2.0)


def test_an_output_is_poisoned_until_the_collective_ends() -> None:
    x = torch.arange(8.0)
    for request, output in (
        (COMM.all_reduce(x.clone()), None),
        (COMM.all_gather(torch.zeros(32), x), "output"),
        (COMM.all_to_all(torch.zeros(8), x), "output"),
    ):
        tensor = getattr(request, output or "tensor")
        seen: list[bytes] = []
        pretended.carry_out(request, lambda tensor=tensor, seen=seen: seen.append(tensor.numpy().tobytes()))
        assert set(seen[0]) == {0xCB}
        expected = {AllReduce: x * 3.25, AllGather: x.repeat(4), AllToAll: x[:2].repeat(4)}[type(request)]
        assert torch.equal(tensor, expected)


def test_unwrapping_leaves_the_transport_as_it_was() -> None:
    import sys

    before = sys.modules["commlib.wrap"].TorchTransport
    with pretended_ranks():
        Steps(commlib.algorithms.AllReduce(), 1.0, CPU, steps=1).step()
    assert sys.modules["commlib.wrap"].TorchTransport is before


def test_calls_are_those_within_the_region() -> None:
    events = [
        {"name": "commlib region", "cat": "gpu_user_annotation", "ts": 0, "dur": 1},
        {"name": "cudaDeviceSynchronize", "cat": "cuda_runtime", "ts": 1, "dur": 1},
        {"name": "commlib region", "cat": "user_annotation", "ts": 5, "dur": 10},
        {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 6, "dur": 1},
        {"name": "cuLaunchKernel", "cat": "cuda_driver", "ts": 7, "dur": 1},
        {"name": "aten::add", "cat": "cpu_op", "ts": 8, "dur": 1},
        {"name": "cudaStreamSynchronize", "cat": "cuda_runtime", "ts": 20, "dur": 1},
    ]
    assert waits.calls_within(events) == ["cudaLaunchKernel", "cuLaunchKernel"]


def test_a_trace_without_launches_shows_nothing() -> None:
    with pytest.raises(AssertionError, match="no launch is in the trace"):
        waits.waits_of(lambda: torch.ones(3) + 1)
    assert any(event["name"] == "aten::add" for event in waits.trace_of(lambda: torch.ones(3) + 1))


def test_results_come_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.add("nowhere", results.PASSED)
    path = tmp_path / "results.jsonl"
    monkeypatch.setenv(results.FILE_VARIABLE, str(path))
    monkeypatch.setenv(results.PART_VARIABLE, "bits")
    results.add("one", results.PASSED, ms=1.5)
    results.add("other", results.FAILED, text="E   AssertionError: wrong\nmore")
    path.write_text(path.read_text() + '{"cut')
    found = results.read(path)
    assert found[0] == {"part": "bits", "name": "one", "outcome": "passed", "ms": 1.5}
    assert len(found) == 2
    shown = report.table(found, {"bits": 3.0, "train": 1.0})
    assert "  one: ms 1.5" in shown
    assert "failed  bits: other: AssertionError: wrong" in shown
    assert "bits             1       1        0        3" in shown
    many = [{"part": "bits", "name": f"test {idx}", "outcome": "skipped", "text": "no device"} for idx in range(200)]
    assert "skipped bits: 190 more" in report.table(many, {})


def test_the_archive_leaves_out_what_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (tmp_path / "results.jsonl").write_text(json.dumps({"a": 1}))
    (made / "small.json").write_text("{}")
    (made / "large.bin").write_bytes(torch.randint(256, (200_000,), dtype=torch.uint8).numpy().tobytes())
    monkeypatch.setattr(report, "MOST_BYTES", 50_000)
    assert report.archive(tmp_path, made) == ["large.bin"]
    assert (tmp_path / report.ARCHIVE).stat().st_size < 50_000
    import tarfile

    with tarfile.open(tmp_path / report.ARCHIVE) as archive:
        assert archive.getnames() == ["results.jsonl", "small.json"]
