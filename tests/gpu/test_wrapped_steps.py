"""Wrapped steps on a GPU: pretended ranks whose collectives take time, against the CPU, bit by bit; nothing waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import commlib
from commlib.algorithms import Algorithm
from commlib.kernels import cuda
from tests.gpu.pretended import NUM_RANKS, StreamWork, pretended_ranks
from tests.gpu.waits import no_waiting, waits_of
from tests.gpu.wrapped import STEPS, Steps, assert_same_steps, gradients_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(120),
]

#: By name: algorithms whose operations round identically on GPU and CPU, since their factors are powers of two.
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "allreduce": commlib.algorithms.AllReduce,
    "allreduce-bf16": lambda: commlib.algorithms.AllReduce(wire_dtype="bf16"),
    "bytegrad": commlib.algorithms.ByteGrad,
    "qsgd": commlib.algorithms.QSGD,
    "ef_quantized": commlib.algorithms.EFQuantized,
    "signsgd": commlib.algorithms.SignSGD,
    "topk": lambda: commlib.algorithms.TopK(ratio=0.05),
    "topk-ef21": lambda: commlib.algorithms.TopK(ratio=0.05, ef21=0.5),
    "ok_topk": lambda: commlib.algorithms.OkTopK(ratio=0.05),
    "randomk": lambda: commlib.algorithms.RandomK(ratio=0.05),
    "dgc": lambda: commlib.algorithms.DGC(ratio=0.05, momentum=0.5),
    "local_sgd": lambda: commlib.algorithms.LocalSGD(period=3),
    "diloco": lambda: commlib.algorithms.DiLoCo(period=3, outer_lr=0.5, outer_momentum=0.5, codec="int8"),
    "sparse_loco": lambda: commlib.algorithms.SparseLoCo(period=3, kept=256, error_decay=0.5),
    "sparse_loco-balanced": lambda: commlib.algorithms.SparseLoCo(
        period=3, kept=256, error_decay=0.5, exchange="balanced"
    ),
    "decentralized": lambda: commlib.algorithms.Decentralized("one_peer_exponential"),
    "low_precision_decentralized": lambda: commlib.algorithms.LowPrecisionDecentralized(topology="fully_connected"),
}
#: MiB of a bucket: one per parameter, some, and one for all.
CAPS = (0.001, 0.1, 25.0)
#: Steps after which kernels are compiled, segments copied and momenta made.
WARM = 5


@pytest.fixture(scope="module")
def device() -> torch.device:
    cuda.supported_architectures()
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("cap_mb", CAPS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_have_the_cpu_s_bits(name: str, cap_mb: float, device: torch.device) -> None:
    with pretended_ranks() as made:
        assert_same_steps(ALGORITHMS[name], cap_mb, device, torch.device("cpu"))
    assert made[0].num_issued + made[-1].num_issued >= STEPS // 3


def test_a_plan_that_is_found_on_the_way_changes_no_bit_of_exact_gradients(device: torch.device) -> None:
    """Boundaries follow the clock, so they differ from the CPU's; sums of fp32 do not."""
    with pretended_ranks():
        assert_same_steps(commlib.algorithms.AllReduce, None, device, torch.device("cpu"))  # type: ignore[arg-type]


def test_collectives_that_nobody_waits_for_are_noticed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would find an engine that does not wait for its collectives."""
    monkeypatch.setattr(StreamWork, "wait", lambda self: None)
    with pretended_ranks(delays=[5_000_000]), pytest.raises(AssertionError, match="elements of gradient"):
        assert_same_steps(commlib.algorithms.AllReduce, 0.1, device, torch.device("cpu"), steps=3)
    torch.cuda.synchronize()


def test_what_waits_for_the_device_is_found(device: torch.device) -> None:
    x = torch.ones(1000, device=device)
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()
    assert "cudaStreamSynchronize" in waits_of(lambda: x.sum().item())
    assert "cudaDeviceSynchronize" in waits_of(lambda: (x.add_(1), torch.cuda.synchronize()))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_step_waits_for_the_device(name: str, device: torch.device) -> None:
    with pretended_ranks():
        training = Steps(ALGORITHMS[name](), 0.1, device)
        for _ in range(WARM):
            training.step()
        with no_waiting():
            for _ in range(6):
                training.step()
        commlib.unwrap(training.model)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_step_waits_in_a_trace_of_the_driver_s_calls(name: str, device: torch.device) -> None:
    with pretended_ranks():
        training = Steps(ALGORITHMS[name](), 0.1, device)
        for _ in range(WARM):
            training.step()

        def run() -> None:
            for _ in range(6):
                training.step()

        assert waits_of(run) == []
        commlib.unwrap(training.model)


def test_steps_return_before_their_collectives_end(device: torch.device) -> None:
    """The host runs ahead: after a step whose collectives take long, the device is still at it."""
    with pretended_ranks(delays=[200_000_000]):
        training = Steps(commlib.algorithms.AllReduce(), 0.1, device)
        training.step()
        training.step()  # the first one may take the host long
        assert not torch.cuda.current_stream(device).query(), "the host waited for the collectives"
        commlib.unwrap(training.model)
        torch.cuda.synchronize()


def test_closing_behind_a_queued_collective_loses_nothing(device: torch.device) -> None:
    with pretended_ranks(delays=[100_000_000]):
        training = Steps(commlib.algorithms.AllReduce(), 0.1, device)
        training.optimizer.zero_grad()
        training.model(gradients_of(0, device)).backward()
        commlib.unwrap(training.model)
        found = [parameter.grad.cpu() for parameter in training.model.parameters()]
    for gradient, given in zip(found, gradients_of(0, torch.device("cpu")), strict=True):
        given = given / NUM_RANKS
        expected = given + given * 0.5 + given * -0.25 + given * 2.0
        assert torch.equal(gradient, expected)


def test_two_models_on_streams_of_their_own(device: torch.device) -> None:
    """Each trains on its stream while the other's collectives are under way; both have the CPU's bits."""
    with pretended_ranks():
        streams = [torch.cuda.Stream(device) for _ in range(2)]
        trainings = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                trainings.append(Steps(commlib.algorithms.ByteGrad(), 0.1, device))
        for _ in range(10):
            for stream, training in zip(streams, trainings, strict=True):
                with torch.cuda.stream(stream):
                    training.step()
        torch.cuda.synchronize()
        reference = Steps(commlib.algorithms.ByteGrad(), 0.1, torch.device("cpu"))
        for _ in range(10):
            reference.step()
        for training in trainings:
            for one, other in zip(training.states(), reference.states(), strict=True):
                assert torch.equal(one.cpu(), other)
            commlib.unwrap(training.model)
        commlib.unwrap(reference.model)
