"""Serialization of nested values to bytes, which torch.distributed.checkpoint treats as a single entry."""

from __future__ import annotations

import io
from typing import Any

import torch


def packed(value: Any) -> bytes:
    """Serialize a value of tensors, numbers, strings, lists and dictionaries."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Deserialize the output of `packed`. Tensors are on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
