"""In which of torch's modes the engine works where the user calls it.

[Note: modes] Users evaluate and save within `torch.no_grad()` or `torch.inference_mode()`. A tensor that is made within
the latter can be written nowhere else any more, and what the engine makes, such as buffers that a first exchange needs,
lives on. So whatever may make some is done outside of that mode, and without autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def in_plain_mode(function: F) -> F:
    """Run a function without autograd and outside of inference mode; see [Note: modes]."""
    return torch.inference_mode(False)(torch.no_grad()(function))
