"""DeMo: exchange of the largest components of each rank's momentum in a discrete cosine transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from commlib import optim
from commlib.algorithms.channels import Gradients
from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import EVERYTHING
from commlib.errors import ConfigError
from commlib.primitives.aggregators import Components
from commlib.primitives.components import MAX_CHUNK


class DeMo(Compressed):
    """Each rank keeps a local momentum and sends its largest components, by a DCT of its chunks.

        m_r <- decay m_r + g_r
        q_r = the `kept` largest components of each chunk of DCT(m_r),   m_r <- m_r - IDCT(q_r)
        g = IDCT(1/N sum_r q_r)

    Matrices are split into chunks of `chunk` x `chunk` elements, vectors into chunks of `chunk` elements. If `chunk`
    does not divide a dimension, the dimension's largest smaller divisor is used. A parameter of more than two
    dimensions is treated as a matrix of its first dimension by the others. A component is sent in 4 bytes, its place as
    int16 and its value as bf16, half of the payload with fp32 values; the rounding error stays in the momentum. Every
    rank receives N - 1 payloads of 4 `kept` bytes per chunk; with the defaults, each is 1/128 of an fp32 matrix.

    The paper's optimizer steps along the sign of g, as `commlib.optim.DeMo` does. Components that are sent are removed
    from the momentum, so every gradient is applied once in total, not 1 / (1 - decay) times, and g has the magnitude of
    a gradient for any optimizer.

    Args:
        decay: Decay of the momentum, in [0, 1]; 1 is plain error feedback.
        kept: Number of components of each chunk that are sent; all if a chunk has fewer.
        chunk: Side of a chunk, 1 to 181.
        sign: Whether to return sign(g) in place of g, for optimizers that do not apply the sign.
        compress: Selects the parameters to compress; all by default. The others are averaged in full precision.
        rescale_residuals: Whether the momentum is rescaled with the learning rate of `commlib.optim.DeMo` or
            `torch.optim.SGD`: m_r <- decay (lr_then / lr) m_r + g_r, as in the authors' code. See `Compressed`.

    Paper: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization" (2024, arXiv 2411.19870), algorithm 1.
    Deviations: the momentum is stored as its DCT, which is linear and orthonormal; this saves one transform. It has the
    units of gradients, as in the paper's algorithm. The authors' code adds lr g_r, which is equivalent to
    `rescale_residuals` as long as the learning rates of all parameter groups change in proportion. If ranks select
    different components, the authors' code divides each component by the number of ranks that selected it, not by N.
    Values are bf16.
    """

    made_for = "sgd"  # or `commlib.optim.DeMo`; error feedback is analysed for SGD
    rescaled_for = (torch.optim.SGD, optim.DeMo)
    channel = Gradients(accumulates=False)  # a single rank has momentum too

    def __init__(
        self,
        decay: float = 0.999,
        kept: int = 32,
        chunk: int = 64,
        sign: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
        rescale_residuals: bool = False,
    ) -> None:
        if not 0 <= decay <= 1 or kept < 1 or not 1 <= chunk <= MAX_CHUNK:
            raise ConfigError(
                f"DeMo: expected 0 <= decay <= 1, kept >= 1 and 1 <= chunk <= {MAX_CHUNK}, got "
                f"{decay=}, {kept=}, {chunk=}"
            )
        super().__init__(
            Components(decay=decay, kept=kept, chunk=chunk, sign=sign),
            compress=compress,
            rescale_residuals=rescale_residuals,
        )
        self.exactness = "any" if sign else "compensated"
        self.decay = decay
        self.kept = kept
        self.chunk = chunk
        self.sign = sign

    @override
    def group(self, name: str, parameter: torch.Tensor) -> str:
        has_chunks = parameter.is_floating_point() and parameter.numel() > 0
        return super().group(name, parameter) if has_chunks else "full precision"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "chunk": self.chunk}

    @override
    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        saved = state["chunk"]
        if saved != self.chunk:
            raise ConfigError(f"DeMo.chunk: expected {saved}, as in the saved state, got {self.chunk}")
