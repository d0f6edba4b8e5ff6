"""The statistics of `commlib.shard`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardStats:
    """The communication of this rank inside the shard group since `commlib.shard`.

    Bytes are computed with the optimal formula of each collective.

    Attributes:
        weights: Name of the codec of the weights; "fp32" without one.
        gradients: Name of the codec of the gradients; "fp32" without one.
        num_gathers: Number of gathers of a module's weights.
        num_reductions: Number of reductions of a module's gradients.
        gathered_bytes: Bytes sent in gathers.
        reduced_bytes: Bytes sent in reductions.
        plain_gathered_bytes: Bytes of the same gathers without a codec, in the dtype in which FSDP2 gathers.
        plain_reduced_bytes: Bytes of the same reductions without a codec, in the dtype in which FSDP2 reduces.
        waited_s: Seconds that the host waited in these collectives, including encoding and decoding.
    """

    weights: str
    gradients: str
    num_gathers: int
    num_reductions: int
    gathered_bytes: int
    reduced_bytes: int
    plain_gathered_bytes: int
    plain_reduced_bytes: int
    waited_s: float

    def __str__(self) -> str:
        weights = _shown(self.plain_gathered_bytes, self.gathered_bytes)
        gradients = _shown(self.plain_reduced_bytes, self.reduced_bytes)
        return (
            f"  shard: weights in {self.weights}, {self.num_gathers} gathers, {weights}\n"
            f"  shard: gradients in {self.gradients}, {self.num_reductions} reductions, {gradients}"
        )


@dataclass
class Counts:
    """Totals of one module's gathers or reductions: number, bytes sent, bytes without a codec, and seconds waited."""

    num_calls: int = 0
    sent_bytes: float = 0.0
    plain_bytes: float = 0.0
    waited_s: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.num_calls + other.num_calls,
            self.sent_bytes + other.sent_bytes,
            self.plain_bytes + other.plain_bytes,
            self.waited_s + other.waited_s,
        )


def _shown(plain: int, sent: int) -> str:
    return f"{sent / 1e6:.2f} MB sent per rank (compression x{plain / sent if sent else 1.0:.2f})"
