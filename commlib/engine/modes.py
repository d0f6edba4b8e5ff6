"""The torch modes that the engine runs in.

[Note: modes] Users evaluate and save inside `torch.no_grad()` or `torch.inference_mode()`. A tensor that is created in
inference mode cannot be written outside of it, but tensors of the engine, such as buffers for a first exchange, must
stay usable. So functions that may create such tensors run outside of inference mode, and without autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def in_plain_mode(function: F) -> F:
    """Run a function without autograd and outside of inference mode. See [Note: modes]."""
    return torch.inference_mode(False)(torch.no_grad()(function))
