"""Copies between a device's tensors and buffers of the host, for which no thread that trains waits.

Host memory that the device reads and writes by itself is pinned; a copy is queued on the current stream, and an event
says when it is done. Who needs the bytes, or is about to change them, waits for the event: a thread of the mailbox,
which has time (`Copy.wait`). Tensors of the host are copied at once, and nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def are_remote(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are on a device other than the host."""
    return any(tensor.device.type != "cpu" for tensor in tensors)


def host_buffer(nbytes: int, is_pinned: bool) -> torch.Tensor:
    """Return [nbytes] uint8 zeros in host memory."""
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


def copy(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Any:
    """Copy tensors, between a device and pinned memory without waiting.

    Returns:
        An event whose `synchronize` waits for the copies; None where they are done.
    """
    if not source:
        return None
    device = next((tensor.device for tensor in (*to, *source) if tensor.device.type == "cuda"), None)
    if device is not None:  # of another dtype, torch would convert it on the host, into memory that is not pinned
        differ = [t.device == device and t.dtype != s.dtype for t, s in zip(to, source, strict=True)]
        source = [s.to(device, non_blocking=True) if d else s for s, d in zip(source, differ, strict=True)]
    torch._foreach_copy_(list(to), list(source), non_blocking=True)
    return None if device is None else torch.cuda.current_stream(device).record_event()
