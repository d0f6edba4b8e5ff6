"""One of the ranks of several_ranks.py. Not for direct use."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import commlib
from commlib.errors import ConfigError, PeerFailure, TransportError
from tests.contract.contracts_state import resume, saved_of
from tests.contract.subjects import Subject, Training, build, gathered, loss_of, set_device, spread
from tests.gpu import results, shards
from tests.gpu.several_ranks import FAILED, REFUSED, WORKS

STEPS, SAVED_AFTER = 20, 10
TIMEOUT_S = 6.0
#: How long a rank waits that comes once the others have raised, in seconds.
_GUARD_S = 30.0
#: How far losses may be from those of the CPU, in parts of them: of exact algorithms, and where a number that rounds in
#: another way is sent as another code. Weights that only one rank holds have no less.
_EXACT, _RELAXED = 1e-4, 5e-2
#: Seconds for the checks after the algorithms, by the number of ranks.
_RESERVE_S = {1: 2.0, 2: 20.0}
_RESERVE_OF_MORE_S = 9.0
#: MiB of a bucket where ranks share a device: each waits for its slice of it in every collective.
_SHARED_CAP_MB = 0.008
#: Algorithms that train on the CPU only and raise on CUDA.
_ON_CPU_ONLY = ("hogwild",)
_FIRST = (
    *("allreduce", "bytegrad", "ef_quantized", "topk", "powersgd", "diloco", "local_sgd", "signsgd", "onebit_adam"),
    *("decentralized", "async_sgd", "async_averaging", "qsgd", "dgc"),
)


class Rank:
    """State shared by the checks.

    Args:
        device: The device of the models.
        backend: Its name in the results.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._where = f"{self.world_size} ranks on {device.type}, {backend}"
        self._options = {"timeout": TIMEOUT_S}
        if self.world_size > 1 and device.type == "cuda":
            self._options["bucket_cap_mb"] = _SHARED_CAP_MB

    def hold(self, name: str, check: Callable[[], dict[str, Any]], shown: bool = True) -> bool:
        """Run a check on all ranks; rank 0 records the result (`shown`: for the table). Return if all passed."""
        begin = time.monotonic()
        facts, words = {}, None
        try:
            facts = check()
        except Exception as error:
            traceback.print_exc()
            words = f"{type(error).__name__}: {error}"
        everyone = gathered(words)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
        if self.rank == 0:
            outcome = results.FAILED if failed else results.PASSED
            seconds = round(time.monotonic() - begin, 2)
            facts |= {"text": "\n".join(failed)[:3000]} if failed else {}
            if failed:
                print(f"{FAILED} {name}", flush=True)
            results.add(f"{self._where}: {name}", outcome, seconds=seconds, shown=shown, **facts)
        return not failed

    # -- checks --------------------------------------------------------------------------------------------------------

    def backend_works(self) -> dict[str, Any]:
        """Reduce and gather on the device."""
        x = torch.full((1000,), float(self.rank + 1), device=self.device)
        dist.all_reduce(x)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        total = self.world_size * (self.world_size + 1) / 2
        assert bool((x == total).all()), f"a sum is {float(x[0])}, expected {total}"
        return {}

    def algorithm(self, name: str) -> dict[str, Any]:
        """Train 20 steps; replicas, losses against the CPU's, and a resume from the middle."""
        set_device(self.device)
        subject = Subject(name)
        if name in _ON_CPU_ONLY and self.device.type == "cuda":
            return self._refused(subject)
        whole, losses, saved = _trained(subject, **self._options)
        self._check_replicas(whole)
        far = self._check_losses(subject, losses)
        self._check_resume(subject, whole, saved)
        for training in subject._started:
            commlib.unwrap(training.model)
        subject.release()
        return {"loss": float(losses[-1]), "from_cpu": far}

    def _refused(self, subject: Subject) -> dict[str, Any]:
        try:
            subject.start(**self._options)
        except ConfigError as error:
            return {"refused": str(error)[:200]}
        raise AssertionError("it was taken, though it trains on the CPU alone")

    def _check_replicas(self, training: Training) -> None:
        if training.subject.on_gradients:
            assert spread(training.model) == 0, "replicas differ"
        assert torch.isfinite(training.flat()).all(), "weights are not finite"

    def _check_losses(self, subject: Subject, losses: torch.Tensor) -> float:
        assert torch.isfinite(losses).all(), f"losses: {losses.tolist()}"
        set_device(torch.device("cpu"))
        _, expected, _ = _trained(subject, **self._options)
        set_device(self.device)
        far = float(((losses - expected).abs() / expected.abs()).max())
        most = _EXACT if subject.is_exact else _RELAXED
        assert subject.runs_by_clocks or far <= most, f"losses are {far:.2g} of them from the CPU's, at most {most}"
        return far

    def _check_resume(self, subject: Subject, whole: Training, saved: Any) -> None:
        resumed = resume(subject, saved, SAVED_AFTER, **self._options)
        resumed.steps(STEPS - SAVED_AFTER)
        far = float((resumed.flat() - whole.flat()).abs().max())
        assert subject.runs_by_clocks or far == 0, f"the resumed run is {far} away"
        commlib.synchronize(whole.model)
        assert spread(whole.model) == 0, "replicas differ after commlib.synchronize"

    def closing(self) -> dict[str, Any]:
        """Unwrap while collectives are queued behind work that takes long: the gradients are the mean all the same."""
        expected, options = build(), {"bucket_cap_mb": _SHARED_CAP_MB, **self._options}
        for rank in range(self.world_size):
            (loss_of(expected, 2, rank) / self.world_size).backward()
        model = commlib.wrap(build(), "allreduce", **options)
        for step in range(3):  # the first ones wait for measurements
            model.zero_grad()
            if step == 2 and self.device.type == "cuda":
                torch.cuda._sleep(500_000_000)
            loss_of(model, step).backward()
        is_queued = self.device.type != "cuda" or not torch.cuda.current_stream().query()
        commlib.unwrap(model)
        assert is_queued, "the host waited for the collectives, so nothing was queued when the model was unwrapped"
        for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-6)
        gathered(None)
        return {}

    def late_rank(self) -> dict[str, Any]:
        """A rank that comes too late is an error on the others, no end of the process; then it is one here, too.

        It comes once they have raised.
        """
        training, store = Subject("allreduce").start(timeout=3.0).steps(2), dist.distributed_c10d._get_default_store()
        gathered(None)
        begin = time.monotonic()
        while self.rank == self.world_size - 1 and store.add("late_rank/raised", 0) < self.rank:
            assert time.monotonic() < begin + _GUARD_S, "the others have not raised"
            time.sleep(0.05)
        seconds, _ = self._must_fail(training, begin)
        store.add("late_rank/raised", 1)
        gathered(None)
        return {"raised_after_s": round(seconds, 2)}

    def killed_rank(self) -> None:
        """The last rank kills itself; the others must raise because of that, not of a timeout. Ends this process."""
        training = Subject("allreduce").start(timeout=TIMEOUT_S).steps(2)
        gathered(None)
        begin = time.monotonic()
        if self.rank == self.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            seconds, error = self._must_fail(training, begin)
            assert isinstance(error, PeerFailure), f"{type(error).__name__} after {seconds:.1f} s"
            assert error.ranks == {self.world_size - 1}, error
        except Exception as error:
            results.add(f"{self._where}: a rank is killed", results.FAILED, text=f"rank {self.rank}: {error}")
            raise
        results.add(
            f"{self._where}: a rank is killed", results.PASSED, rank=self.rank, raised_after_s=round(seconds, 2)
        )

    def _must_fail(self, training: Training, begin: float) -> tuple[float, TransportError]:
        """Train until it raises; return the seconds that this took, and the error."""
        began = time.monotonic()
        try:
            for _ in range(100):
                training.step()
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                time.sleep(0.05)
        except TransportError as error:
            print(f"raised after {time.monotonic() - begin:.2f} s: {error}", flush=True)
            return time.monotonic() - began, error
        raise AssertionError("no error though a rank was gone")


def _trained(subject: Subject, **options: Any) -> tuple[Training, torch.Tensor, Any]:
    """Train; return the training, its losses [STEPS] on the CPU, and the state saved on the way."""
    training = subject.start(**options)
    losses = [_step(training) for _ in range(SAVED_AFTER)]
    saved = saved_of(training)
    losses += [_step(training) for _ in range(STEPS - SAVED_AFTER)]
    return training, torch.stack(losses).cpu(), saved


def _step(training: Training) -> torch.Tensor:
    """Make a step; return its loss, on its device."""
    training.optimizer.zero_grad()
    loss = loss_of(training.model, training.num_steps)
    loss.backward()
    training.optimizer.step()
    training.num_steps += 1
    return loss.detach()


def chosen(names: str | None) -> list[str]:
    """Return the algorithms to check, families first."""
    every = names.split(",") if names else commlib.algorithms.list()
    return sorted(every, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--algorithms")
    parser.add_argument("--until", type=float, required=True, help="of the monotonic clock")
    args = parser.parse_args()
    device = torch.device(args.device, 0 if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if args.backend == "nccl" else "gloo"
    patience_s = 20 if args.device == "cuda" else 120  # a machine without a GPU may be busy with other things
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=patience_s))
    rank = Rank(device, args.backend)
    if rank.world_size > 1:
        if rank.hold("all-reduce", rank.backend_works):
            print(WORKS, flush=True)
        elif args.backend == "nccl":
            sys.stdout.flush()
            os._exit(REFUSED)  # an aborted NCCL must not hold the process up
    names, reserve_s = chosen(args.algorithms), _RESERVE_S.get(rank.world_size, _RESERVE_OF_MORE_S)
    for idx, name in enumerate(names):
        if any(gathered(time.monotonic() > args.until - reserve_s)):
            rank.hold("algorithms for which there was time", lambda idx=idx: {"count": f"{idx} of {len(names)}"})
            break
        rank.hold(name, lambda name=name: rank.algorithm(name), shown=False)
    if rank.world_size > 1:
        rank.hold("closing behind queued collectives", rank.closing)
        if rank.world_size == 2 or args.device == "cpu":
            rank.hold("encoded shards", lambda: shards.check(device, TIMEOUT_S))
            rank.hold("a late rank", rank.late_rank)
        rank.killed_rank()
    else:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
