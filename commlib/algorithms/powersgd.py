"""Low-rank gradient averaging: PowerSGD."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from typing_extensions import override

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import EVERYTHING
from commlib.errors import ConfigError
from commlib.primitives.aggregators import LowRank
from commlib.primitives.low_rank import matrix_shape


class PowerSGD(Compressed):
    """One step of power iteration per round gives each gradient matrix as P Q', with error feedback.

        M_r = G_r + E_r,   P = orth(sum_r M_r Q),   Q = 1/N sum_r M_r' P,   G = P Q',   E_r = M_r - G

    Q starts from the last round's. A parameter of more than two dimensions counts as its first dimension against the
    others, whatever its memory format. Tensors of one dimension, and matrices that would not become smaller by
    `min_compression`, are averaged in full precision. Each bucket takes two all-reduces of (rows + columns) * rank
    elements per matrix.

    Args:
        rank: Of the approximation.
        warmup_steps: Steps of plain averaging before it starts.
        min_compression: How many times smaller the factors of a matrix must be than the matrix.
        seed: Of the first Q; the same on all ranks.
        hierarchical: Whether gradients are summed inside each node first, in full precision. Local ranks then share out
            the matrices of a bucket, whole ones.
        compress: Which parameters are considered; all by default.
        rescale_residuals: Whether residuals follow the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019), algorithms 1 and 2.
    Deviations: orthogonalisation by Householder QR on a CPU and by Gram-Schmidt, repeated, on CUDA, same-shape matrices
    together. Replicas stay bit-identical where all ranks compute alike (the same kind of processor).
    """

    made_for = "sgd"

    def __init__(
        self,
        rank: int = 2,
        warmup_steps: int = 0,
        min_compression: float = 2.0,
        seed: int = 0,
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
        rescale_residuals: bool = False,
    ) -> None:
        if rank < 1 or min_compression < 1:
            raise ConfigError(f"PowerSGD: expected rank >= 1 and min_compression >= 1, got {rank=}, {min_compression=}")
        super().__init__(
            LowRank(rank, seed), compress=compress, hierarchical=hierarchical, rescale_residuals=rescale_residuals
        )
        self.rank = rank
        self.min_compression = min_compression
        self.seed = seed
        self.channel = dataclasses.replace(self.channel, warmup_steps=warmup_steps)

    @override
    def group(self, name: str, parameter: torch.Tensor) -> str:
        is_matrix = parameter.dim() >= 2 and parameter.numel() > 0 and self.compress(name, parameter)
        return "compressed" if is_matrix and self._becomes_smaller(parameter) else "full precision"

    def _becomes_smaller(self, parameter: torch.Tensor) -> bool:
        rows, columns = matrix_shape(parameter.shape, parameter.is_complex())
        return (rows + columns) * min(self.rank, rows, columns) * self.min_compression <= rows * columns
