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
from commlib.algorithms.families.published import Layout
from commlib.errors import ConfigError

_TOKEN_BYTES = 16


class Hogwild(Algorithm):
    """Let all ranks of one machine update the same parameters, each whenever it makes a step, without locks.

        w <- w - lr g(w_read)      element by element, where w_read may be changed by others while it is read

    Nothing is sent. The parameters of all ranks are one memory, so an optimizer's step is seen by all at once, in the
    middle of their forwards and backwards too; two updates of an element at the same moment may lose one of them.
    Each rank's optimizer has a state of its own, and N ranks make N steps where all-reduce makes one: divide the
    learning rate by N to go about as far.

    Weights change at any time, evaluation and saving included, for as long as any rank makes steps;
    `commlib.synchronize` waits until every rank has called it. `commlib.unwrap` gives each rank its own copy.

    Paper: Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
    NeurIPS 2011, algorithm 1.

    Deviations: The paper's updates are sparse, so that few collide; these are whatever the model's gradients are. Any
    optimizer may be used; only the weights are shared, not its state.

    Raises:
        ConfigError: When it is attached: the ranks are on several machines, the model is not on the CPU, or the
            machine's shared memory is too small.
    """

    made_for = "sgd"
    portable = True
    channel = SelfRunning()

    @override
    def traffic(self, parameters: Sequence[torch.Tensor], world_size: int) -> Traffic:
        raise ConfigError(
            "hogwild sends nothing: what ranks cost one another is in one machine's caches, which no network describes"
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
        layout = Layout(self._parameters)
        buffer = _share(attachment, layout.nbytes)
        shared = [_strided_as(view, p) for view, p in zip(layout.views(buffer), self._parameters, strict=True)]
        if attachment.comm.rank == 0:
            for view, parameter in zip(shared, self._parameters, strict=True):
                view.copy_(parameter.data)
        attachment.gather(None)  # all see rank 0's values
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
                f"rank {self._attachment.comm.rank}: hogwild: the memory of {name!r} was replaced (a change of memory "
                "format does that), and is not shared with the other ranks any more. Change the model before wrapping"
            )

    @override
    def synchronize(self) -> None:
        self._attachment.gather(None)  # every rank is here, so nobody is in the middle of a step

    @override
    def close(self) -> None:
        if self._is_sharing:
            self._is_sharing = False
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()


def _share(attachment: Attachment, nbytes: int) -> torch.Tensor:
    """Return [nbytes] uint8 that all ranks map. Its file is removed before this returns.

    Raises:
        ConfigError: Some rank could not map it; alike on all ranks.
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
    """Make a file that begins with `token`; return its path, or what went wrong."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    path = None
    try:
        descriptor, path = tempfile.mkstemp(prefix="commlib-hogwild-", dir=folder)
        with open(descriptor, "r+b") as file:
            file.write(token)
            file.flush()
            os.posix_fallocate(descriptor, 0, _TOKEN_BYTES + nbytes)  # a file without room would fail at first use
    except OSError as error:
        return path, f"{folder} has no room for {nbytes} bytes, or cannot be written: {error}"
    return path, None


def _map_file(path: str, nbytes: int, token: bytes) -> tuple[torch.Tensor | None, str | None]:
    """Map rank 0's file; return the buffer, or why there is none."""
    if not Path(path).is_file():
        return None, "it does not see rank 0's file: all ranks must be on one machine"
    try:
        storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=_TOKEN_BYTES + nbytes)
    except RuntimeError as error:
        return None, str(error)
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # pyright: ignore[reportArgumentType]
    if bytes(buffer[:_TOKEN_BYTES].tolist()) != token:
        return None, "it sees another file than rank 0 made: all ranks must be on one machine"
    return buffer[_TOKEN_BYTES:], None


def _strided_as(view: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous `view` with the strides of a dense parameter."""
    strides = torch.empty_like(parameter.data).stride()
    return view.as_strided(parameter.shape, strides, view.storage_offset())
