"""One synchronisation of gradients: from complete buckets to communicated gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients
from commlib.engine.buckets.bucket import Bucket, EmbeddingBucket
from commlib.engine.buckets.slot import TAKEN
from commlib.engine.gradients.inputs import Inputs
from commlib.engine.gradients.loss_scale import NUM_LEVELS, LossScale
from commlib.engine.rounds import marks
from commlib.engine.rounds.task import Round, Task
from commlib.engine.session import Session
from commlib.errors import ConfigError
from commlib.primitives.centralized import centralized_full_precision, sparse_sum
from commlib.transport.base import Communication


class GradientRound:
    """Launches the buckets of a plan in any order, each once.

    The bucket with the flags is launched last, because only then is it known which parameters had a gradient. If an
    algorithm cannot sum the flags together with its values (`Gradients.reduces_flags`), a separate task sends them.

    Args:
        buckets: All buckets of the plan, in plan order.
        algorithm: Communicates each bucket.
        session: Carries the round.
        tail: Creates further tasks, launched once backward has ended.
        loss_scale: Compares the loss scales of the ranks. The plan's buckets must then have space for its marks.
        inputs: Keeps the buckets' values, so that `repeat` is possible.

    Attributes:
        num_pending: Number of buckets that have not been given to the driver; see the note in `slot.py`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket | EmbeddingBucket],
        algorithm: Algorithm,
        session: Session,
        tail: Callable[[], Sequence[Task]] = list,
        loss_scale: LossScale | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self._buckets = buckets
        self._dense = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        self._last = self._dense[-1] if self._dense else None
        self._algorithm = algorithm
        self._loss_scale = loss_scale
        self._session = session
        self._tail = tail
        self._inputs = inputs
        self._comm = session.comm
        self._driver = session.driver
        self.num_pending = len(buckets)
        self._open()

    def _open(self) -> None:
        channel = self._algorithm.channel
        assert isinstance(channel, Gradients)
        tasks = [Task(each.describe, self._communication(each), **_kind(channel, each)) for each in self._buckets]
        self._sends_flags = self._last is not None and not channel.reduces_flags
        if self._sends_flags:
            tasks.append(Task(lambda: "the flags of unused parameters", self._communicate_flags))
        self._num_gradient_tasks = len(tasks)
        self._round = Round(self._session.transport, [*tasks, *self._tail()], channel.window)
        self._driver.open(self._round)

    def repeat(self) -> None:
        """Run the round once more with the inputs that were kept, after an error in an elastic group."""
        assert self._inputs is not None
        self._inputs.restore(self._dense, self._algorithm.predivisor(self._comm))
        self.drop()
        self._open()
        self._launch_all()

    @property
    def tasks(self) -> list[Task]:
        """The tasks that carry gradients: one per bucket, in plan order, then one for separately sent flags."""
        return self._round.tasks[: self._num_gradient_tasks]

    @property
    def has_begun(self) -> bool:
        """Whether any bucket has been given to the driver."""
        return self.num_pending < len(self._buckets)

    def _communication(self, bucket: Bucket | EmbeddingBucket) -> Callable[[], Communication]:
        if isinstance(bucket, EmbeddingBucket):
            own = bucket.gradient if self._comm.contributes else _no_gradient
            return lambda: sparse_sum(own(), bucket.slots[0].param, self._comm, bucket.result)
        return lambda: self._communicate(bucket)

    def _communicate(self, bucket: Bucket) -> Communication:
        if self._inputs is not None:
            self._inputs.keep(bucket)
        return self._algorithm.communicate(bucket, self._comm)

    def _communicate_flags(self) -> Communication:
        assert self._last is not None
        return centralized_full_precision(self._last.flags, self._comm)

    def launch(self, bucket: Bucket | EmbeddingBucket) -> None:
        """Gather a bucket and give it to the driver. The bucket with the flags is held back until it is the last."""
        if bucket.num_pending == TAKEN or (bucket is self._last and self.num_pending > 1):
            return
        with marks.phase("gather", bucket.describe):
            bucket.gather(self._algorithm.predivisor(self._comm))
        self.num_pending -= 1
        if self.num_pending == 0 and self._last is not None:
            self._write_flags(self._last.flags)
        self._driver.ready(self._round, bucket.index)
        if self.num_pending == 0 and self._sends_flags:
            self._driver.ready(self._round, len(self._buckets))
        if self.num_pending == 1 and self._last is not None and self._last.num_pending == 0:
            self.launch(self._last)

    def flush(self) -> None:
        """Launch the remaining buckets and the further tasks at the end of backward."""
        for bucket in [*(b for b in self._buckets if b is not self._last), *([self._last] if self._last else [])]:
            self.launch(bucket)
        self._launch_tail()

    def _launch_tail(self) -> None:
        for idx in range(self._num_gradient_tasks, len(self._round.tasks)):
            self._driver.ready(self._round, idx)

    def contribute_nothing(self) -> None:
        """Launch every bucket with zeros, on a rank without data."""
        for bucket in self._dense:
            bucket.zero()
        self._launch_all()

    def _launch_all(self) -> None:
        for idx in range(len(self._round.tasks)):
            self._driver.ready(self._round, idx)

    def _write_flags(self, flags: torch.Tensor) -> None:
        if self._loss_scale is not None:
            self._loss_scale.mark(flags[-NUM_LEVELS:])
            flags = flags[:-NUM_LEVELS]
        had = [slot.had_gradient for bucket in self._dense for slot in bucket.slots]
        if all(had):
            flags.fill_(1)
        else:
            own = torch.tensor(had, dtype=flags.dtype, device="cpu", pin_memory=flags.device.type == "cuda")
            flags.copy_(own, non_blocking=True)

    def wait(self) -> None:
        """Wait until every bucket has been communicated.

        Raises:
            TransportError: A collective failed or timed out.
        """
        with marks.phase("wait", self._round.describe):
            self._driver.wait(self._round)

    def cancel(self, error: BaseException) -> None:
        """Cancel the round with an error."""
        self._driver.cancel(self._round, error)

    def discard(self) -> None:
        """Discard the round, before anything was given to the driver."""
        self._driver.discard(self._round)

    @property
    def frozen(self) -> list[str]:
        """The names of parameters that are frozen now, so that they had no gradient in this round."""
        slots = (slot for bucket in self._dense if not bucket.is_plain for slot in bucket.slots)
        return [slot.name for slot in slots if not slot.whole.requires_grad]

    def publish(self) -> None:
        """Publish the results as the parameters' gradients.

        Raises:
            ConfigError: The loss scale differs between ranks.
        """
        if self._loss_scale is not None and self._last is not None:
            try:
                self._loss_scale.take(self._last.flags[-NUM_LEVELS:])
            except ConfigError:
                self._round.transport.part()
                raise
        divisor = self._algorithm.divisor(self._comm)
        is_used: list[bool] | None = None
        start = 0
        for bucket in self._buckets:
            if isinstance(bucket, EmbeddingBucket):
                bucket.finish(divisor)
                continue
            if not bucket.is_plain:  # read the flags only if needed: on CUDA this synchronises
                is_used = is_used or [value > 0 for value in self._dense[-1].flags.tolist()]
                bucket.finish(is_used[start : start + len(bucket.slots)])
            start += len(bucket.slots)

    def drop(self) -> None:
        """Discard the results; the parameters' gradients do not change."""
        for bucket in self._buckets:
            if isinstance(bucket, EmbeddingBucket):
                bucket.result.clear()


def _no_gradient() -> None:
    return None


def _kind(channel: Gradients, bucket: Bucket | EmbeddingBucket) -> dict[str, bool]:
    is_dense = isinstance(bucket, Bucket)
    return {"is_prompt": is_dense and channel.prompt, "is_single": is_dense and channel.single}
