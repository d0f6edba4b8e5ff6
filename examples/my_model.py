"""Input of `commlib profile`: a model, and a step up to the end of backward. Replace them with your own.

commlib profile examples/my_model.py --batch-per-rank 32 --output mine.json
"""

import torch
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())


def step(model: nn.Module) -> None:
    """Run forward and backward of one batch."""
    model(torch.randn(32, 512)).square().mean().backward()
