"""DeMo: the largest components of each rank's momentum, by a discrete cosine transform of its chunks."""

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
    """Each rank keeps a momentum of its own and sends the largest components of it, by a DCT of its chunks.

        m_r <- decay m_r + g_r
        q_r = the `kept` largest components of each chunk of DCT(m_r),   m_r <- m_r - IDCT(q_r)
        g = IDCT(1/N sum_r q_r)

    Matrices are cut into chunks of `chunk` x `chunk`, vectors into such of `chunk`; a dimension that does not divide is
    cut by its largest divisor below. A parameter of more than two dimensions counts as its first against the others.
    A component is sent in 4 bytes, its place as int16 and its value as bf16: half of an fp32 value's payload, and what
    the value loses stays in the momentum. So every rank receives N - 1 payloads of 4 `kept` bytes per chunk: of an fp32
    matrix with the defaults 1/128 each.

    The paper descends along the sign of g, which `commlib.optim.DeMo` does. All that is sent leaves the momentum, so
    that a gradient counts once in all, not 1 / (1 - decay) times: g is of a gradient's size for any optimizer.

    Args:
        decay: Of the momentum, 0 to 1; 1 is plain error feedback.
        kept: Components of each chunk that are sent; all, where it has no more.
        chunk: The side of a chunk, 1 to 181.
        sign: Whether sign(g) is left in the place of g, for optimizers that do not take it.
        compress: Which parameters are compressed; all by default. The others are averaged in full precision.
        rescale_residuals: Whether the momentum follows the learning rate of `commlib.optim.DeMo` or `torch.optim.SGD`:
            m_r <- decay (lr_then / lr) m_r + g_r, as in the authors' code. See `Compressed`.

    Paper: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization" (2024, arXiv 2411.19870), algorithm 1.
    Deviations: the momentum is kept as its DCT, which is linear and orthonormal: one transform fewer. It has the units
    of gradients, as in the paper's algorithm; the authors' code adds lr g_r, which `rescale_residuals` is as long as
    parameter groups change their learning rates in proportion. Where ranks choose different components, the authors'
    code divides each component by the number of ranks that chose it, not by N. Values are bf16.
    """

    made_for = "sgd"  # or its own sign descent; error feedback is analysed for SGD
    rescaled_for = (torch.optim.SGD, optim.DeMo)
    channel = Gradients(accumulates=False)  # one rank alone has a momentum too

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
            raise ConfigError(f"DeMo.chunk: expected {saved}, with which the state was saved, got {self.chunk}")
