"""Requests on torch.distributed: the one place that knows torch's process groups and their versions."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commlib.errors import ConfigError, PeerFailure, PeerTimeout, TransportError
from commlib.transport.base import AllGather, AllReduce, AllToAll, Broadcast, Request, Transport, Work

# torch 2.13 renames the single-tensor verbs and warns about the old names; 2.11 has only those.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

#: How long a rank that saw a collective fail waits for the others to report, in seconds.
_DIAGNOSIS_S = 2.0


def resolve_group(process_group: Any) -> dist.ProcessGroup:
    """Return the `ProcessGroup` meant by `process_group`: None (the default group), a group, or a 1-D `DeviceMesh`.

    Raises:
        ConfigError: No default group exists, the mesh has several dimensions, or this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "commlib.wrap needs a process group, and none is initialised. Call "
            "torch.distributed.init_process_group('gloo' or 'nccl') first, under torchrun for example."
        )
    if process_group is None:
        return dist.distributed_c10d._get_default_group()
    if hasattr(process_group, "get_group") and hasattr(process_group, "ndim"):
        if process_group.ndim != 1:
            raise ConfigError(
                f"process_group is a DeviceMesh of {process_group.ndim} dimensions; commlib.wrap takes one dimension. "
                f"Slice it, for example mesh[{(process_group.mesh_dim_names or ('dp',))[0]!r}]."
            )
        process_group = process_group.get_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group: expected a ProcessGroup, a 1-D DeviceMesh or None, got {type(process_group).__name__}. "
            "If new_group() gave it, this process is not a member and must not wrap a model on it."
        )
    return process_group


def as_timedelta(timeout: float | timedelta | None, group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return `timeout` (seconds, a timedelta, or None for the group's own) as a timedelta.

    Raises:
        ConfigError: It is not a positive duration.
    """
    if timeout is None:
        return group._get_backend(device).options._timeout
    value = timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
    if value <= timedelta(0):
        raise ConfigError(f"timeout: expected a positive number of seconds or timedelta, got {timeout!r}")
    return value


class _TorchWork:
    """A torch `Work` whose completion can call back."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._work.get_future().add_done_callback(lambda _: callback())


class _Done:
    """A work with nothing to do."""

    def wait(self) -> None: ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        callback()


DONE: Work = _Done()


class TorchTransport(Transport):
    """A communicator of its own over the ranks of a process group.

    It never shares the user's communicator: the user's thread and the issuing thread could otherwise interleave
    their collectives differently on two ranks.

    Args:
        group: The user's process group; the ranks, the backend and the store are taken from it.
        timeout: How long a collective may wait for its peers.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.parent = group
        self.timeout_s = timeout.total_seconds()
        self._group: Any = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout,
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc="commlib",
        )
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self.bytes_sent = 0.0
        self._pending: list[Any] = []
        self._failed = False

    def issue(self, request: Request) -> Work:
        if self.world_size == 1:
            return self._issue_alone(request)
        if request.is_empty():
            return DONE
        self.bytes_sent += request.wire_bytes(self.world_size)
        work = self._issue(request)
        self._pending = [other for other in self._pending if not other.is_completed()]
        self._pending.append(work)
        return _TorchWork(work)

    @property
    def has_pending(self) -> bool:
        return any(not work.is_completed() for work in self._pending)

    def _issue(self, request: Request) -> Any:
        match request:
            case AllReduce(tensor, op):
                return dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=self._group, async_op=True)
            case AllGather(output, input):
                return _all_gather_single(output, input, group=self._group, async_op=True)
            case AllToAll(output, input):
                return dist.all_to_all_single(output, input, group=self._group, async_op=True)
            case Broadcast(tensor, source):
                return dist.broadcast(tensor, group_src=source, group=self._group, async_op=True)
        raise TypeError(f"{type(request).__name__} is not a request that torch.distributed can run")

    def _issue_alone(self, request: Request) -> Work:
        if isinstance(request, AllGather | AllToAll):
            request.output.copy_(request.input)
        return DONE

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self.diagnose(error, "the exchange of set-up information") from error
        return values

    def diagnose(self, error: BaseException, what: str) -> TransportError:
        """Name the ranks that did not report.

        Every rank that sees a failure writes so into the store, then aborts its communicator, which makes the others
        see it too; a rank that is dead, stopped or busy elsewhere writes nothing.
        """
        self._failed = True
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        silent = self._silent_ranks()
        timed_out = "timed out" in text.lower() or "timeout" in text.lower()
        who = "the ranks that did not answer are unknown (the store did not answer: its host may be gone)"
        if silent is not None:
            who = f"ranks that did not answer: {silent}" if silent else "every rank reported this failure"
        reason = f"no answer within {self.timeout_s:g} s" if timed_out else "the connection to a peer was lost"
        kind = PeerTimeout if timed_out else PeerFailure
        return kind(f"rank {self.rank} of {self.world_size}: {what} failed: {reason}; {who}. Cause: {text}")

    def _silent_ranks(self) -> list[int] | None:
        """Return the ranks that reported no failure, or None where the store cannot be asked."""
        result: list[list[int]] = []

        def ask() -> None:
            store = dist.PrefixStore("commlib/failure", dist.distributed_c10d._get_process_group_store(self._group))
            store.set(str(self.rank), "1")
            self.abort()
            deadline = time.monotonic() + _DIAGNOSIS_S
            silent = [rank for rank in range(self.world_size) if rank != self.rank]
            while silent and time.monotonic() < deadline:
                silent = [rank for rank in silent if not store.check([str(rank)])]
                time.sleep(0.02)
            result.append(silent)

        thread = threading.Thread(target=_quietly, args=(ask,), name="commlib-diagnosis", daemon=True)
        thread.start()
        thread.join(2 * _DIAGNOSIS_S)
        return result[0] if result else None

    def abort(self) -> None:
        self._failed = True
        with contextlib.suppress(Exception):
            self._group.abort()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None or not dist.is_initialized():
            return
        with contextlib.suppress(Exception):
            if self._failed:
                dist.distributed_c10d._abort_process_group(group)
            else:
                dist.destroy_process_group(group)


def _quietly(function: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        function()
