"""Copies between device tensors and host buffers that do not block the training thread.

Host memory that the device accesses is pinned. A copy is queued on the current stream, and an event marks its
completion. A thread of the mailbox waits for the event (`TensorBuffer.wait`) before it reads or changes the bytes. Host
tensors are copied synchronously.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def are_remote(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any tensor is on a device other than the CPU."""
    return any(tensor.device.type != "cpu" for tensor in tensors)


def host_buffer(nbytes: int, is_pinned: bool) -> torch.Tensor:
    """Return a zero tensor [nbytes] uint8 in host memory."""
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


def copy(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Any:
    """Copy tensors; asynchronous between a device and pinned memory.

    Returns:
        An event whose `synchronize` waits for the copies; None if they are complete.
    """
    if not source:
        return None
    device = next((tensor.device for tensor in (*to, *source) if tensor.device.type == "cuda"), None)
    if device is not None:  # convert dtypes on the device: torch would convert on the host, into unpinned memory
        differ = [t.device == device and t.dtype != s.dtype for t, s in zip(to, source, strict=True)]
        source = [s.to(device, non_blocking=True) if d else s for s, d in zip(source, differ, strict=True)]
    torch._foreach_copy_(list(to), list(source), non_blocking=True)
    return None if device is None else torch.cuda.current_stream(device).record_event()
