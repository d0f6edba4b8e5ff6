"""Options that change what an algorithm keeps, as algorithms of their own: held to the contracts like those."""

from __future__ import annotations

from commlib.algorithms import (
    DGC,
    ByteGrad,
    Decentralized,
    DiLoCo,
    EFQuantized,
    LowPrecisionDecentralized,
    PowerSGD,
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


class NodesByteGrad(ByteGrad):
    """`bytegrad` with error feedback across nodes."""

    def __init__(self) -> None:
        super().__init__(feedback=True, hierarchical=True)


class NodesTopK(TopK):
    """`topk` across nodes."""

    def __init__(self, ratio: float = 0.25) -> None:
        super().__init__(ratio, hierarchical=True)


class NodesDGC(DGC):
    """`dgc` across nodes."""

    def __init__(self, ratio: float = 0.25) -> None:
        super().__init__(ratio, hierarchical=True)


class NodesPowerSGD(PowerSGD):
    """`powersgd` across nodes."""

    def __init__(self) -> None:
        super().__init__(hierarchical=True)


class NodesDecentralized(Decentralized):
    """`decentralized` across nodes."""

    def __init__(self) -> None:
        super().__init__(hierarchical=True)


class NodesLowPrecisionDecentralized(LowPrecisionDecentralized):
    """`low_precision_decentralized` across nodes."""

    def __init__(self) -> None:
        super().__init__(hierarchical=True)
