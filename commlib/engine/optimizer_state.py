"""The state of the user's optimizer: its comparison and synchronisation between ranks.

Sharded optimizers such as ZeRO keep state of different parameters on different ranks. So only the state of parameters
for which several ranks have state is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commlib.engine.bits import sums
from commlib.engine.planning.plan import Parameter
from commlib.engine.session import Session
from commlib.errors import ConfigError
from commlib.primitives.replicate import broadcast_all, mean_all
from commlib.sharding.local import local_of
from commlib.transport.base import Transport

#: One entry of the state of a parameter: the parameter's name, the entry's, and its value.
Entry = tuple[str, str, Any]


def entries(optimizer: Any, parameters: Sequence[Parameter]) -> list[Entry]:
    """Return the entries of the state of these parameters, in the same order on all ranks."""
    return [
        (parameter.name, str(key), local_of(value) if isinstance(value, torch.Tensor) else value)
        for parameter in parameters
        for key, value in sorted(optimizer.state.get(parameter.param, {}).items(), key=lambda item: str(item[0]))
    ]


def digests(optimizer: Any, parameters: Sequence[Parameter]) -> dict[str, str]:
    """Return a string for each parameter that has state. Equal strings mean bit-identical state."""
    found = [] if optimizer is None else entries(optimizer, parameters)
    tensors = [value for _, _, value in found if isinstance(value, torch.Tensor) and value.numel()]
    by_place = iter(sums(tensors))
    words: dict[str, str] = {}
    for name, key, value in found:
        own = repr(value) if not isinstance(value, torch.Tensor) else str(next(by_place) if value.numel() else 0)
        words[name] = f"{words.get(name, '')} {key}={own}"
    return words


def agree(transport: Transport, own: dict[str, str]) -> None:
    """Check that ranks have the same state for each parameter that several of them have state for. Collective.

    Args:
        transport: Carries the digests.
        own: The result of `digests` on this rank.

    Raises:
        ConfigError: The states differ. Raised on every rank.
    """
    everyone = transport.gather_objects(own)
    first: dict[str, str] = {}
    for other, words in enumerate(everyone):
        different = [name for name, word in words.items() if first.setdefault(name, word) != word]
        if different:
            transport.part()
            raise ConfigError(
                f"rank {transport.rank}: the ranks' optimizers have different state, for example for {different[0]!r} "
                f"on rank {other}, as after training with local steps, so replicas would drift apart. Call "
                "commlib.synchronize(model, optimizer=True) on all ranks before commlib.unwrap(model), or load the "
                "same state into all"
            )


def synchronize(session: Session, optimizer: Any, parameters: Sequence[Parameter]) -> None:
    """Give all ranks the same state: the mean of floating-point tensors, and rank 0's counters. Collective.

    Counters are numbers, tensors of one element and tensors of integers. If a parameter has a tensor of integers, as
    quantized state does, all its state is copied from rank 0.

    Raises:
        ConfigError: The ranks' states differ in kinds or shapes. Raised on every rank, and nothing has changed.
    """
    found = entries(optimizer, parameters)
    gather = session.transport.gather_objects
    shapes = [[name, key, _shape(value)] for name, key, value in found]
    if any([list(row) for row in each] != shapes for each in gather(shapes)):
        session.transport.part()
        raise ConfigError(
            f"rank {session.comm.rank}: the ranks' optimizers have state of different parameters or shapes, which has "
            "no mean. Make as many steps on all ranks first"
        )
    coded = {name for name, _, value in found if _is_tensor(value) and not _has_mean(value) and value.numel() > 1}
    means = [value for name, _, value in found if _is_tensor(value) and _is_averaged(value) and name not in coded]
    copies = [
        value for name, _, value in found if _is_tensor(value) and not (_is_averaged(value) and name not in coded)
    ]
    with torch.no_grad():
        session.run("the mean of the optimizer's state", mean_all(means, session.comm))
        session.run("the copy of the optimizer's counters", broadcast_all(copies, session.comm))
    numbers = gather([value if _is_number(value) else None for _, _, value in found])[0]
    by_name = {parameter.name: parameter.param for parameter in parameters}
    for (name, key, value), number in zip(found, numbers, strict=True):
        if _is_number(value):
            optimizer.state[by_name[name]][key] = number


def _shape(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if _is_tensor(value) else type(value).__name__


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_averaged(tensor: torch.Tensor) -> bool:
    return _has_mean(tensor) and tensor.numel() > 1
