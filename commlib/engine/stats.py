"""The statistics that `commlib.stats` returns."""

from __future__ import annotations

from dataclasses import dataclass, fields

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Channel, Gradients, Weights
from commlib.arguments import changed_options
from commlib.engine.buckets.bucket import Bucket, EmbeddingBucket
from commlib.engine.engine import Engine
from commlib.engine.gradients.reducer import LastRound
from commlib.engine.planning.plan import Plan
from commlib.engine.planning.sizes import BucketTimes
from commlib.sharding.stats import ShardStats


@dataclass(frozen=True)
class BucketStats:
    """One bucket of the plan.

    Attributes:
        index: Position in the plan.
        num_parameters: Number of parameters.
        numel: Number of elements.
        nbytes: Bytes of its values. For an embedding with sparse gradients, bytes of the dense parameter.
        dtype: The values' dtype.
        parameters: The parameters' names, in the bucket's order.
        ready_s: Seconds from the start of backward until its last gradient is ready, as recorded on rank 0; or None.
        wire_bytes: Bytes that this rank sent for it in the last round over gradients.
        seconds: Duration of its communication in that round (on CUDA: as issued by the host).
    """

    index: int
    num_parameters: int
    numel: int
    nbytes: int
    dtype: str
    parameters: tuple[str, ...]
    ready_s: float | None
    wire_bytes: int
    seconds: float


@dataclass(frozen=True)
class Stats:
    """The communication of one wrapped model, as measured on this rank.

    A round is one synchronisation of gradients in a backward or of weights after an optimizer step, or one exchange of
    an algorithm that runs without rounds. Bytes are computed with the optimal formula of each collective, or from the
    payloads of algorithms that send without collectives.

    Attributes:
        algorithm: The algorithm's name. With `auto`, that of the algorithm in use.
        world_size: The number of ranks.
        plan: "initial", "trial", "planned", "fixed" (also if no gradient is communicated), "settled" (by a checkpoint)
            or "restored".
        num_buckets: Number of gradient buckets in the plan.
        rounds: Number of rounds whose result this rank has applied, independent of the number of steps or backwards.
        wire_bytes: Bytes that this rank has sent since `wrap`, in rounds of every kind and in set-up.
        wire_bytes_per_step: Bytes that this rank sends per optimizer step (without an optimizer, per synchronised
            backward). If every step has a round over gradients, the bytes of the last one, including flags of unused
            parameters. Otherwise the mean over the last steps, in whole periods of the algorithm. 0 before the first
            such round or step.
        raw_bytes_per_step: Bytes per step of an all-reduce of all gradients, dense and in the parameters' dtypes.
            Sparse gradients count as dense ones. 0 before the first step.
        compression_ratio: `raw_bytes_per_step / wire_bytes_per_step`. None as long as nothing was sent per step; 1.0 on
            one rank. Below 1 if indices and values of sparse gradients exceed the dense gradient.
        step_s: Mean seconds per step over the last steps, including everything between them. 0.0 before two steps.
        waited_share: Fraction of `step_s` that the training thread waited for communication (on CUDA: the host).
        consensus_distance: L2 distance between this rank's weights and the result of the last round over weights, or of
            the last `commlib.synchronize`: the mean of all ranks or, on a graph, of the neighbours. If every step waits
            for a round, it is measured in every tenth step. None for algorithms on gradients, whose replicas are
            identical, for algorithms without rounds, and before the first round.
        exposed_s: Seconds that the last round over gradients kept the training thread waiting at the end of backward
            (on CUDA: host time only). 0.0 if it did not wait.
        cost: The measured cost of a bucket, on rank 0. None if the plan was not measured.
        buckets: One entry per gradient bucket.
        shard: The communication of `commlib.shard`; None if it was not called for the model.
        options: The algorithm's options that differ from the defaults, as in a call: "period=30, codec='int4'".
        preset: The name of the preset in use, or "".
        next_round_in: Number of optimizer steps after which the next round over weights begins. None if there are no
            such rounds, or if a rank begins them by the clock.
        view: The number of the view of an elastic group that this rank takes part in; otherwise None.
        repeated_rounds: How often this rank repeated a round because a member of an elastic group was lost.
    """

    algorithm: str
    world_size: int
    plan: str
    num_buckets: int
    rounds: int
    wire_bytes: int
    wire_bytes_per_step: int
    raw_bytes_per_step: int
    compression_ratio: float | None
    step_s: float
    waited_share: float
    consensus_distance: float | None
    exposed_s: float
    cost: BucketTimes | None
    buckets: tuple[BucketStats, ...]
    shard: ShardStats | None = None
    options: str = ""
    preset: str = ""
    next_round_in: int | None = None
    view: int | None = None
    repeated_rounds: int = 0

    def __str__(self) -> str:
        lines = [self._head]
        if self.wire_bytes_per_step or not self.wire_bytes:
            ratio = "" if self.compression_ratio is None else f" (compression x{self.compression_ratio:.2f})"
            exposed = f", {self.exposed_s * 1e3:.1f} ms exposed" if self.buckets or not self.wire_bytes else ""
            lines.append(f"  per step: {self.wire_bytes_per_step / 1e6:.2f} MB sent per rank{ratio}{exposed}")
        else:  # before the first round over weights: bytes of set-up
            lines.append(f"  since wrap: {self.wire_bytes / 1e6:.2f} MB sent per rank")
        if self.step_s and not self.buckets:  # no round over gradients that backward waits for
            lines.append(
                f"  {self.step_s * 1e3:.1f} ms a step, {self.waited_share:.0%} of it waiting for communication"
            )
        if self.cost is not None:
            per_bucket, per_mib = self.cost.latency_s * 1e3, self.cost.s_per_byte * 2**20 * 1e3
            lines.append(f"  measured: {per_bucket:.2f} ms a bucket and {per_mib:.2f} ms a MiB")
        if self.consensus_distance is not None:
            lines.append(f"  distance to the consensus: {self.consensus_distance:.3g}")
        for bucket in self.buckets:
            ready = "" if bucket.ready_s is None else f", ready at {bucket.ready_s * 1e3:.1f} ms"
            lines.append(
                f"  bucket {bucket.index}: {bucket.num_parameters} parameters, {bucket.nbytes / 2**20:.2f} MiB "
                f"{bucket.dtype}{ready}, {bucket.seconds * 1e3:.1f} ms in flight"
            )
        if self.shard is not None:
            lines.append(str(self.shard))
        return "\n".join(lines)

    @property
    def _head(self) -> str:
        preset = f"{self.preset}: " if self.preset else ""
        options = f"({self.options})" if self.options else ""
        buckets = f"{self.num_buckets} buckets ({self.plan}), " if self.buckets or self.next_round_in is None else ""
        due = self.next_round_in
        following = "" if due is None else f", the next over weights after {due} step{'s' if due != 1 else ''}"
        return f"{preset}{self.algorithm}{options} on {self.world_size} ranks: {buckets}{self.rounds} rounds{following}"

    def as_dict(self, prefix: str = "") -> dict[str, int | float]:
        """Return the numeric fields, for a logger, with `prefix` before each name.

        All values are ints or floats, so TensorBoard's `add_scalar` accepts them. Names of `shard` begin with `shard_`.
        Omits texts, the buckets, and fields without a value (such as `consensus_distance`, and the two numbers of
        `cost`).
        """
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.cost is not None:
            found |= {"cost_latency_s": self.cost.latency_s, "cost_s_per_byte": self.cost.s_per_byte}
        if self.shard is not None:
            found |= {f"shard_{field.name}": getattr(self.shard, field.name) for field in fields(self.shard)}
        return {f"{prefix}{name}": value for name, value in found.items() if isinstance(value, int | float)}


def collect(engine: Engine) -> Stats:
    """Return the statistics of the engine's communication so far."""
    gradients, channels = engine.gradients, engine.channels
    plan, last, means = gradients.search.plan, gradients.reducer.last, engine.pace.means()
    declared, world_size = engine.algorithm.channel, engine.comm.world_size
    is_in_every_step = engine.counter.is_warming_up or (declared.cycle == 1 and isinstance(declared, Gradients))
    sent = sum(last.sent_bytes) if is_in_every_step else means.bytes
    has_steps = bool(last.sent_bytes) if is_in_every_step else means.num_steps > 0
    raw = 2 * (world_size - 1) / world_size * _dense_bytes(engine) if has_steps else 0.0
    distances = [each.consensus_distance for each in channels]
    return Stats(
        algorithm=engine.algorithm.name,
        world_size=world_size,
        plan="fixed"
        if gradients.is_idle
        else gradients.search.plan.kind,  # buckets of rounds over weights have a fixed size
        num_buckets=len(gradients.buckets),
        rounds=sum(each.num_rounds for each in channels),
        wire_bytes=round(sum(each.bytes_sent for each in channels)),
        wire_bytes_per_step=round(sent),
        raw_bytes_per_step=round(raw),
        compression_ratio=_ratio(raw, sent, world_size),
        step_s=means.seconds,
        waited_share=means.waited_s / means.seconds if means.seconds else 0.0,
        consensus_distance=next((each for each in distances if each is not None), None),
        exposed_s=last.exposed_s,
        cost=plan.cost,
        buckets=tuple(_of_bucket(plan, last, bucket) for bucket in gradients.buckets),
        options=changed_options(engine.algorithm),
        preset=engine.algorithm.preset,
        next_round_in=_next_round_in(declared, engine.counter.step) if world_size > 1 else None,
        view=engine.transport.view_number,
        repeated_rounds=engine.session.num_repeated,
    )


def _ratio(raw: float, sent: float, world_size: int) -> float | None:
    if sent:
        return raw / sent
    return None if world_size > 1 else 1.0


def _next_round_in(declared: Channel, step: int) -> int | None:
    """See `Stats.next_round_in`; `step` is the number of steps so far."""
    if not isinstance(declared, Weights) or declared.asynchronous:
        return None
    since = step - declared.warmup_steps
    return declared.period - (since % declared.period if since > 0 else since)


def of_sharded(shard: ShardStats, world_size: int, num_backwards: int) -> Stats:
    """Return the statistics of a model that is sharded and not wrapped."""
    sent, plain = shard.gathered_bytes + shard.reduced_bytes, shard.plain_gathered_bytes + shard.plain_reduced_bytes
    return Stats(
        algorithm="shard",
        world_size=world_size,
        plan="fixed",
        num_buckets=0,
        rounds=num_backwards,
        wire_bytes=sent,
        wire_bytes_per_step=round(sent / num_backwards) if num_backwards else 0,
        raw_bytes_per_step=round(plain / num_backwards) if num_backwards else 0,
        compression_ratio=_ratio(plain, sent, world_size),
        step_s=0.0,
        waited_share=0.0,
        consensus_distance=None,
        exposed_s=0.0,
        cost=None,
        buckets=(),
        shard=shard,
    )


def before_rounds(algorithm: str | Algorithm, world_size: int) -> Stats:
    """Return the statistics of a model that has not communicated."""
    name, made = (algorithm, None) if isinstance(algorithm, str) else (algorithm.name, algorithm)
    return Stats(
        *(name, world_size, "initial", 0, 0, 0, 0, 0),
        *(_ratio(0.0, 0.0, world_size), 0.0, 0.0),
        consensus_distance=None,
        exposed_s=0.0,
        cost=None,
        buckets=(),
        options="" if made is None else changed_options(made),
        preset="" if made is None else made.preset,
    )


def _dense_bytes(engine: Engine) -> int:
    """Return the bytes of all gradients as dense tensors, without padding."""
    return sum(parameter.part.nbytes for parameter in engine.parameters)


def _of_bucket(plan: Plan, last: LastRound, bucket: Bucket | EmbeddingBucket) -> BucketStats:
    ready_s = plan.ready_s
    has_last = bucket.index < len(last.sent_bytes)
    return BucketStats(
        index=bucket.index,
        num_parameters=len(bucket.slots),
        numel=sum(slot.param.numel() for slot in bucket.slots),
        nbytes=bucket.nbytes,
        dtype=str(bucket.slots[0].param.dtype).removeprefix("torch."),
        parameters=tuple(slot.name for slot in bucket.slots),
        ready_s=max(ready_s[idx] for idx in plan.buckets[bucket.index]) if ready_s else None,
        wire_bytes=round(last.sent_bytes[bucket.index]) if has_last else 0,
        seconds=last.seconds[bucket.index] if has_last else 0.0,
    )
