"""What `commlib.stats` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketStats:
    """One bucket of the plan.

    Attributes:
        index: Its place in the plan.
        num_parameters: How many parameters it holds.
        numel: How many elements.
        nbytes: Bytes of its values.
        dtype: Their dtype.
        parameters: The parameters' names, in the bucket's order.
        ready_s: Seconds from the start of backward until its last gradient is ready, as profiled on rank 0; None before.
        wire_bytes: Bytes that this rank sent for it in the last round.
        seconds: From its start to its end in the last round (on CUDA: as issued by the host).
    """

    index: int
    num_parameters: int
    numel: int
    nbytes: int
    dtype: str
    parameters: tuple[str, ...]
    ready_s: float | None
    wire_bytes: float
    seconds: float


@dataclass(frozen=True)
class Stats:
    """The communication of one wrapped model, as this rank sees it.

    Attributes:
        algorithm: The algorithm's name.
        world_size: The number of ranks.
        plan: "initial", "planned", "fixed" or "restored".
        num_buckets: How many buckets the plan has.
        steps: How many rounds (synchronisations) there were.
        wire_bytes: Bytes that this rank has sent since `wrap`, set-up included, by each verb's bandwidth-optimal formula.
        wire_bytes_per_step: The same for the last round.
        raw_bytes_per_step: What a full-precision all-reduce of the same values would send.
        compression_ratio: `raw_bytes_per_step / wire_bytes_per_step`; 1.0 where nothing was sent.
        exposed_s: Seconds that the last round kept the training thread waiting (on CUDA: host time only).
        buckets: One entry per bucket.
    """

    algorithm: str
    world_size: int
    plan: str
    num_buckets: int
    steps: int
    wire_bytes: float
    wire_bytes_per_step: float
    raw_bytes_per_step: float
    compression_ratio: float
    exposed_s: float
    buckets: tuple[BucketStats, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.algorithm} on {self.world_size} ranks: {self.num_buckets} buckets ({self.plan}), {self.steps} rounds, "
            f"{self.wire_bytes_per_step / 1e6:.2f} MB a round on the wire (x{self.compression_ratio:.2f} compression), "
            f"{self.exposed_s * 1e3:.1f} ms exposed in the last"
        ]
        for bucket in self.buckets:
            ready = "" if bucket.ready_s is None else f", ready at {bucket.ready_s * 1e3:.1f} ms"
            lines.append(
                f"  bucket {bucket.index}: {bucket.num_parameters} parameters, {bucket.nbytes / 2**20:.2f} MiB "
                f"{bucket.dtype}{ready}, {bucket.seconds * 1e3:.1f} ms in flight"
            )
        return "\n".join(lines)
