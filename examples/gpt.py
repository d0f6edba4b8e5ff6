"""A small GPT over bytes: pre-norm blocks, fused attention, tied input and output embeddings."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of a model.

    Attributes:
        num_layers: Transformer blocks.
        width: Features of the residual stream.
        num_heads: Attention heads; divides `width`.
        context: Longest input, in bytes.
    """

    num_layers: int
    width: int
    num_heads: int
    context: int


SIZES = {
    "tiny": Size(num_layers=2, width=64, num_heads=2, context=64),
    "1m": Size(num_layers=4, width=144, num_heads=4, context=128),
    "10m": Size(num_layers=6, width=384, num_heads=6, context=128),
    "30m": Size(num_layers=9, width=512, num_heads=8, context=256),
    "100m": Size(num_layers=14, width=768, num_heads=12, context=512),
}


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a layer norm and a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        """Mix positions of `x` [batch, time, width]; return the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [batch, time, width] to the same shape."""
        x = x + self.attend(self.norm_attention(x))
        return x + self.contract(F.gelu(self.expand(self.norm_mlp(x))))


class GPT(nn.Module):
    """Predict the next byte from up to `size.context` bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.token = nn.Embedding(256, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.num_heads) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        self.apply(self._initialize)
        self.head.weight = self.token.weight

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes [batch, time] int64 to next-byte scores [batch, time, 256] float32."""
        x = self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of `scores` [batch, time, 256] against bytes [batch, time]."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())
