"""Options that change an algorithm's state, as separate algorithms, which must keep the same contracts."""

from __future__ import annotations

import inspect
from typing import Any

from commlib import algorithms
from commlib.algorithms import (
    Algorithm,
    ByteGrad,
    DiLoCo,
    EFQuantized,
    RandomK,
    SignSGD,
    SparseLoCo,
    StreamingDiLoCo,
    TopK,
)
from commlib.codecs import BlockTopK
from commlib.codecs import TopK as TopKCodec


class EF21TopK(TopK):
    """`topk` with EF21-SGDM."""

    def __init__(self, ratio: float = 0.25) -> None:
        super().__init__(ratio, ef21=0.5)


class EF21RandomK(RandomK):
    """`randomk` with EF21-SGDM."""

    def __init__(self, ratio: float = 0.25) -> None:
        super().__init__(ratio, ef21=0.5)


class EF21Quantized(EFQuantized):
    """`ef_quantized` with EF21-SGDM."""

    def __init__(self) -> None:
        super().__init__(ef21=0.5)


class EF21SignSGD(SignSGD):
    """`signsgd` with EF21-SGDM."""

    def __init__(self) -> None:
        super().__init__(ef21=0.5)


class SparseDiLoCo(DiLoCo):
    """`diloco` that sends a few elements."""

    def __init__(self, period: int = 2) -> None:
        super().__init__(period, codec=TopKCodec(0.25), error_decay=0.9)


class SparseStreamingDiLoCo(StreamingDiLoCo):
    """`streaming_diloco` that sends a few elements."""

    def __init__(self, period: int = 4, fragments: int = 2, delay: int = 1) -> None:
        super().__init__(period, fragments, delay, codec=BlockTopK(512), error_decay=0.9)


class BalancedSparseLoCo(SparseLoCo):
    """`sparse_loco` whose choices are summed by regions."""

    def __init__(self, period: int = 2) -> None:
        super().__init__(period, kept=1024, exchange="balanced")


class FeedbackByteGradAcrossNodes(ByteGrad):
    """`bytegrad` with error feedback across nodes."""

    def __init__(self) -> None:
        super().__init__(feedback=True, hierarchical=True)


def across_nodes() -> dict[str, type[Algorithm]]:
    """Return a class across nodes for each algorithm that can communicate hierarchically, by the class's name."""
    found: dict[str, type[Algorithm]] = {}
    for name in algorithms.list():
        base = algorithms.get(name)
        if "hierarchical" in inspect.signature(base).parameters:
            own = f"{base.__name__}AcrossNodes"
            found[own] = type(own, (base,), {"__init__": _hierarchical(base), "__module__": __name__})
    return found


def _hierarchical(base: type[Algorithm]) -> Any:
    def __init__(self: Any) -> None:  # a method
        base.__init__(self, hierarchical=True)  # type: ignore[call-arg]

    return __init__


#: Algorithms across nodes, by name; also attributes of this module, from which ranks import them.
NODES = across_nodes()
globals().update(NODES)
NODES[FeedbackByteGradAcrossNodes.__name__] = FeedbackByteGradAcrossNodes
