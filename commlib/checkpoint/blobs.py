"""Values as bytes, which torch.distributed.checkpoint takes for one thing, whatever they are."""

from __future__ import annotations

import io
from typing import Any

import torch


def packed(value: Any) -> bytes:
    """Return the bytes of a value of tensors, numbers, strings, lists and dictionaries."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return what was `packed`, tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
