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
    """Approximates each gradient matrix by P Q', with one step of power iteration per round and error feedback.

        M_r = G_r + E_r,   P = orth(sum_r M_r Q),   Q = 1/N sum_r M_r' P,   G = P Q',   E_r = M_r - G

    Q starts from the previous round's value. A parameter of more than two dimensions is treated as a matrix of its
    first dimension by the others, for any memory format. Tensors of one dimension, and matrices whose factors are not
    at least `min_compression` times smaller, are averaged in full precision. Each bucket takes two all-reduces, with
    (rows + columns) * rank elements per matrix in total.

    Args:
        rank: Rank of the approximation.
        warmup_steps: Steps of plain averaging before compression starts.
        min_compression: Minimum ratio of the size of a matrix to the size of its factors.
        seed: Seed of the initial Q; the same on all ranks.
        hierarchical: Whether gradients are first summed inside each node in full precision. Local ranks then share the
            work on a bucket by whole matrices.
        compress: Selects the parameters to consider; all by default.
        rescale_residuals: Whether residuals are rescaled with the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019), algorithms 1 and 2.
    Deviations: orthogonalisation uses Householder QR on a CPU and repeated Gram-Schmidt on CUDA, with matrices of the
    same shape batched. Replicas stay bit-identical if all ranks compute identically (the same kind of processor).
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
