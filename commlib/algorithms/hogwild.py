"""Hogwild: the ranks of one machine train the same parameters in shared memory, without locks."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm, Attachment, Runner, Traffic
from commlib.algorithms.channels import SelfRunning
from commlib.algorithms.families.published import Packing
from commlib.errors import ConfigError

_TOKEN_BYTES = 16


class Hogwild(Algorithm):
    """Lets all ranks of one machine update the same parameters in shared memory, without locks.

        w <- w - lr g(w_read)      elementwise, where other ranks may change w_read while it is read

    There is no communication. The parameters of all ranks share one memory, so an optimizer step is immediately visible
    to all ranks, also during their forward and backward. Of two simultaneous updates of an element, one may be lost.
    Each rank's optimizer has its own state. N ranks make N steps in place of one all-reduce step; divide the learning
    rate by N to make about the same progress.

    Weights may change at any time while any rank makes steps, including during evaluation and saving;
    `commlib.synchronize` waits until every rank has called it. `commlib.unwrap` gives each rank its own copy.

    Paper: Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
    NeurIPS 2011, algorithm 1.

    Deviations: the paper's updates are sparse, so that few collide; here they are as dense as the model's gradients.
    Any optimizer may be used; only the weights are shared, not its state.

    Raises:
        ConfigError: When the algorithm is attached: the ranks are on several machines, the model is not on the CPU, or
            the machine's shared memory is too small.
    """

    made_for = "sgd"
    portable = True
    channel = SelfRunning()

    @override
    def traffic(self, parameters: Sequence[torch.Tensor], world_size: int) -> Traffic:
        raise ConfigError(
            "hogwild sends nothing: its ranks interact only through the caches of one machine, which no network models"
        )

    @override
    def attach(self, attachment: Attachment) -> Runner:
        return _Sharing(attachment)


class _Sharing(Runner):
    """The parameters of this rank, moved into memory that all ranks map."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._parameters = [parameter for _, parameter in attachment.parameters]
        device = self._parameters[0].device
        if device.type != "cpu":
            raise ConfigError(
                f"hogwild shares the memory of one machine: the model must be on the CPU, not on {device}"
            )
        packing = Packing(self._parameters)
        buffer = _share(attachment, packing.nbytes)
        shared = [_strided_as(view, p) for view, p in zip(packing.views(buffer), self._parameters, strict=True)]
        if attachment.comm.rank == 0:
            for view, parameter in zip(shared, self._parameters, strict=True):
                view.copy_(parameter.data)
        attachment.gather(None)  # wait for rank 0's values
        for view, parameter in zip(shared, self._parameters, strict=True):
            parameter.data = view
        self._addresses = [view.data_ptr() for view in shared]
        self._is_sharing = True

    @override
    def before_step(self) -> None:
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            named = zip(self._attachment.parameters, addresses, self._addresses, strict=True)
            name = next(name for (name, _), now, before in named if now != before)
            raise ConfigError(
                f"rank {self._attachment.comm.rank}: hogwild: the memory of {name!r} was replaced (for example by a "
                "new memory format) and is no longer shared with the other ranks. Change the model before wrapping"
            )

    @override
    def synchronize(self) -> None:
        self._attachment.gather(None)  # all ranks have arrived, so no rank is inside a step

    @override
    def close(self) -> None:
        if self._is_sharing:
            self._is_sharing = False
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()


def _share(attachment: Attachment, nbytes: int) -> torch.Tensor:
    """Return a tensor [nbytes] uint8 that all ranks map. Its file is removed before this returns.

    Raises:
        ConfigError: A rank could not map it. Raised on all ranks.
    """
    path, error = None, None
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        if attachment.comm.rank == 0:
            path, error = _make_file(nbytes, token)
        path, token, error = attachment.gather((path, token, error))[0]
        buffer = None
        if error is None and path is not None:
            buffer, error = _map_file(path, nbytes, token)
        errors = attachment.gather(error)
    finally:
        if attachment.comm.rank == 0 and path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
    failed = {rank: why for rank, why in enumerate(errors) if why is not None}
    if failed or buffer is None:
        rank, why = next(iter(failed.items()))
        raise ConfigError(f"hogwild: ranks {sorted(failed)} cannot share memory with rank 0; rank {rank}: {why}")
    return buffer


def _make_file(nbytes: int, token: bytes) -> tuple[str | None, str | None]:
    """Create a file that begins with `token`; return its path and an error message, or None for either."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    path = None
    try:
        descriptor, path = tempfile.mkstemp(prefix="commlib-hogwild-", dir=folder)
        with open(descriptor, "r+b") as file:
            file.write(token)
            file.flush()
            os.posix_fallocate(descriptor, 0, _TOKEN_BYTES + nbytes)  # fail here rather than at the first access
    except OSError as error:
        return path, f"{folder} has no room for {nbytes} bytes, or cannot be written: {error}"
    return path, None


def _map_file(path: str, nbytes: int, token: bytes) -> tuple[torch.Tensor | None, str | None]:
    """Map rank 0's file; return the buffer or an error message."""
    if not Path(path).is_file():
        return None, "it does not find rank 0's file: all ranks must be on one machine"
    try:
        storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=_TOKEN_BYTES + nbytes)
    except RuntimeError as error:
        return None, str(error)
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # pyright: ignore[reportArgumentType]
    if bytes(buffer[:_TOKEN_BYTES].tolist()) != token:
        return None, "it finds a different file than rank 0 created: all ranks must be on one machine"
    return buffer[_TOKEN_BYTES:], None


def _strided_as(view: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous `view` with the strides of a dense parameter."""
    strides = torch.empty_like(parameter.data).stride()
    return view.as_strided(parameter.shape, strides, view.storage_offset())
