"""Arguments of `DistributedDataParallel` that `commlib.wrap` accepts or rejects.

A script ported from DDP can keep arguments that request commlib's own behavior. For an argument that requests different
or unsupported behavior, the error names the replacement. `wrap` has DDP's `broadcast_buffers`, `init_sync`,
`process_group` and `bucket_cap_mb` as parameters of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from commlib import algorithms
from commlib.errors import ConfigError


class DDPArguments(TypedDict, total=False):
    """The arguments of `DistributedDataParallel` for which `wrap` has no parameter, for type checkers."""

    device_ids: Any
    output_device: Any
    dim: Any
    find_unused_parameters: Any
    check_reduction: Any
    gradient_as_bucket_view: Any
    static_graph: Any
    delay_all_reduce_named_params: Any
    param_to_hook_all_reduce: Any
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: Any
    bucket_cap_mb_list: Any
    batched_grad_copy: Any
    forward_sync_buffers: Any


@dataclass(frozen=True)
class Argument:
    """An argument of `DistributedDataParallel.__init__`.

    Attributes:
        does: The behavior of commlib, as one clause for the documentation.
        is_taken: Whether a value is compatible with that behavior. Called with the value and the parameters' device.
        advice: The remedy for an incompatible value, for the error message.
    """

    does: str
    is_taken: Callable[[Any, torch.device], bool]
    advice: str


def _either(value: Any, _: torch.device) -> bool:
    return isinstance(value, bool)


def _not_set(value: Any, _: torch.device) -> bool:
    return value is None or value is False


def _own_device(value: Any, device: torch.device) -> bool:
    if value is None:
        return True
    try:
        given = torch.device(device.type, value) if isinstance(value, int) else torch.device(value)
    except (RuntimeError, TypeError):
        return False
    return device.type != "cpu" and given.type == device.type and given.index in (None, device.index)


def _own_devices(value: Any, device: torch.device) -> bool:
    is_list = isinstance(value, list | tuple)
    return value is None or (is_list and len(value) <= 1 and all(_own_device(each, device) for each in value))


_MOVE = "Leave the argument out, or move the model to that device before wrapping"

#: The arguments for which `wrap` has no parameter, by name.
ARGUMENTS: Mapping[str, Argument] = {
    "device_ids": Argument("only the device of the model's parameters may be named", _own_devices, _MOVE),
    "output_device": Argument("only the device of the model's parameters may be named", _own_device, _MOVE),
    "dim": Argument(
        "inputs are not scattered", lambda value, _: value == 0, "commlib does not scatter inputs: leave it out"
    ),
    "find_unused_parameters": Argument(
        "unused parameters are found in every backward, at no cost", _either, "Expected a bool"
    ),
    "check_reduction": Argument("no effect; DDP ignores it, too", _either, "Expected a bool"),
    "gradient_as_bucket_view": Argument("gradients are always views of the buckets", _either, "Expected a bool"),
    "static_graph": Argument("the first backward records how often each gradient is ready", _either, "Expected a bool"),
    "delay_all_reduce_named_params": Argument(
        "each gradient is communicated in its bucket",
        _not_set,
        "Name the parameters in ignored_parameters and reduce them",
    ),
    "param_to_hook_all_reduce": Argument("same as `delay_all_reduce_named_params`", _not_set, "Leave it out"),
    "mixed_precision": Argument(
        "parameters are communicated in their dtype",
        _not_set,
        "Use torch.autocast, or cast the model; commlib.algorithms.AllReduce(wire_dtype='bf16') sends fewer bits",
    ),
    "device_mesh": Argument("the group of a 1-D mesh, same as `process_group=mesh`", lambda *_: True, ""),
    "skip_all_reduce_unused_params": Argument(
        "parameters unused on all ranks are sent as zeros, so that the used parameters may differ between ranks",
        _not_set,
        "Name parameters that are never used in ignored_parameters",
    ),
    "bucket_cap_mb_list": Argument(
        "all buckets have one size, or are planned", _not_set, "Leave it out, or pass one size as bucket_cap_mb"
    ),
    "batched_grad_copy": Argument(
        "the gradients of a contiguous part of a bucket are always copied in one pass", _either, "Expected a bool"
    ),
    "forward_sync_buffers": Argument(
        "takes precedence over `broadcast_buffers`; with False, `wrap` still copies rank 0's buffers once",
        lambda value, _: value is None or isinstance(value, bool),
        "Expected a bool or None",
    ),
}


def group(process_group: Any, given: Mapping[str, Any], algorithm: Any = None) -> Any:
    """Return the process group, which may be passed as `device_mesh`.

    Args:
        process_group: The argument of `wrap`.
        given: Further arguments of `wrap`, by name.
        algorithm: The algorithm, or its name, whose options may be among them.

    Raises:
        TypeError: An argument is unknown to DDP as well.
        ConfigError: Both are passed.
    """
    if unknown := [name for name in given if name not in ARGUMENTS]:
        hint = _option_hint(algorithm, unknown[0], given[unknown[0]])
        raise TypeError(f"wrap() got an unexpected keyword argument {unknown[0]!r}{hint}")
    mesh = given.get("device_mesh")
    if mesh is not None and process_group is not None:
        raise ConfigError("process_group and device_mesh are both given. Leave one of them out")
    return process_group if mesh is None else mesh


def _option_hint(algorithm: Any, name: str, value: Any) -> str:
    """Return how to pass an option of the algorithm that was passed to `wrap`; "" for any other name."""
    try:
        cls = algorithms.get(algorithm) if isinstance(algorithm, str) else type(algorithm)
    except ConfigError:
        return ""
    if not issubclass(cls, algorithms.Algorithm) or name not in inspect.signature(cls).parameters:
        return ""
    return f". Pass options to the algorithm: algorithm={algorithms.shown_name(cls)}({name}={value!r})"


def copies_buffers(broadcast_buffers: bool | None, given: Mapping[str, Any]) -> bool:
    """Return whether backwards copy rank 0's buffers, by DDP's `broadcast_buffers` and `forward_sync_buffers`."""
    replacement = given.get("forward_sync_buffers")
    return bool(replacement) if replacement is not None else broadcast_buffers is None or bool(broadcast_buffers)


def copies_buffers_at_once(broadcast_buffers: bool | None, given: Mapping[str, Any]) -> bool:
    """Return whether `wrap` copies rank 0's buffers: not if `broadcast_buffers=False` alone decides, as in DDP."""
    return given.get("forward_sync_buffers") is not None or broadcast_buffers is None or bool(broadcast_buffers)


def check(given: Mapping[str, Any], device: torch.device, algorithm: Any = None) -> None:
    """Check that DDP's arguments request only behavior that commlib provides.

    Args:
        given: The arguments by name; all are in `ARGUMENTS`.
        device: The device of the model's parameters.
        algorithm: The second positional argument, which is `device_ids` in DDP.

    Raises:
        ConfigError: An argument is incompatible. The message states commlib's behavior and the remedy.
    """
    if _are_devices(algorithm):
        raise ConfigError(
            f"algorithm={algorithm!r}: expected the name of an algorithm or an Algorithm. DDP's second argument, "
            "device_ids, is not needed: commlib uses the model's own device"
        )
    for name, value in given.items():
        argument = ARGUMENTS[name]
        if not argument.is_taken(value, device):
            raise ConfigError(f"{name}={value!r}: in commlib {argument.does}. {argument.advice}")


def _are_devices(value: Any) -> bool:
    each = value if isinstance(value, list | tuple) else [value]
    return bool(each) and all(isinstance(item, int | torch.device) and not isinstance(item, bool) for item in each)
