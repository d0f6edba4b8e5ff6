"""Every argument of `DistributedDataParallel` is accepted by `commlib.wrap`, or rejected with an alternative."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib import ddp_arguments
from commlib.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
#: Those of torch 2.11 and of 2.13, whichever is installed.
KNOWN = {
    *("module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group"),
    *("bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph"),
    *("delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh"),
    *("skip_all_reduce_unused_params", "bucket_cap_mb_list", "batched_grad_copy", "forward_sync_buffers"),
}


#: What DDP takes where nothing is given.
DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DistributedDataParallel).parameters.items()
    if name in ddp_arguments.ARGUMENTS
}


def of_ddp() -> set[str]:
    return set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self"}


def test_every_argument_of_ddp_is_known() -> None:
    own = set(inspect.signature(commlib.wrap).parameters)
    assert of_ddp() <= KNOWN
    assert {*ddp_arguments.ARGUMENTS, *own} >= KNOWN - {"module"}
    assert not own & set(ddp_arguments.ARGUMENTS)
    assert list(ddp_arguments.DDPArguments.__annotations__) == list(ddp_arguments.ARGUMENTS)


@pytest.mark.parametrize(
    ("name", "value", "device"),
    [
        *((name, value, CPU) for name, value in DEFAULTS.items()),
        ("device_ids", [1], CUDA),
        ("device_ids", [torch.device("cuda", 1)], CUDA),
        ("device_ids", [], CPU),
        ("output_device", 1, CUDA),
        ("output_device", "cuda", CUDA),
        ("find_unused_parameters", True, CPU),
        ("static_graph", True, CPU),
        ("gradient_as_bucket_view", True, CPU),
        ("batched_grad_copy", True, CPU),
        ("forward_sync_buffers", False, CPU),
    ],
)
def test_what_asks_for_no_more_than_commlib_does_is_taken(name: str, value: Any, device: torch.device) -> None:
    ddp_arguments.check({name: value}, device)


@pytest.mark.parametrize(
    ("name", "value", "device", "words"),
    [
        ("device_ids", [0], CUDA, "move the model"),
        ("device_ids", [0, 1], CUDA, "move the model"),
        ("device_ids", [0], CPU, "move the model"),
        ("device_ids", 1, CUDA, "move the model"),
        ("output_device", 0, CUDA, "move the model"),
        ("output_device", object(), CUDA, "move the model"),
        ("dim", 1, CPU, "not scattered"),
        ("find_unused_parameters", "yes", CPU, "a bool"),
        ("delay_all_reduce_named_params", [("w", None)], CPU, "ignored_parameters"),
        ("param_to_hook_all_reduce", torch.ones(1), CPU, "Leave it out"),
        ("mixed_precision", object(), CPU, "autocast"),
        ("skip_all_reduce_unused_params", True, CPU, "ignored_parameters"),
        ("bucket_cap_mb_list", [1, 2], CPU, "bucket_cap_mb"),
        ("forward_sync_buffers", "no", CPU, "a bool or None"),
    ],
)
def test_what_asks_for_something_else_is_refused(name: str, value: Any, device: torch.device, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*{words}"):
        ddp_arguments.check({name: value}, device)


@pytest.mark.parametrize("value", [[0], (0, 1), [torch.device("cuda", 0)], 0, torch.device("cpu")])
def test_positional_device_ids_are_explained(value: Any) -> None:
    with pytest.raises(ConfigError, match="device_ids, is not needed"):
        ddp_arguments.check({}, CPU, value)


def test_names_that_ddp_has_not_either_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'find_unused'"):
        ddp_arguments.group(None, {"find_unused": True})


@pytest.mark.parametrize("algorithm", ["diloco", commlib.algorithms.DiLoCo()])
def test_options_of_the_algorithm_are_told_from_unknown_names(algorithm: Any) -> None:
    words = "'period'. Pass options to the algorithm: algorithm=commlib.algorithms.DiLoCo(period=10)"
    with pytest.raises(TypeError, match=re.escape(words)):
        ddp_arguments.group(None, {"period": 10}, algorithm)
    for other in (algorithm, "dilocco", [0], None):
        with pytest.raises(TypeError, match="unexpected keyword argument 'perod'$"):
            ddp_arguments.group(None, {"perod": 10}, other)


def test_a_mesh_takes_the_place_of_the_process_group() -> None:
    assert ddp_arguments.group(None, {"device_mesh": "mesh"}) == "mesh"
    assert ddp_arguments.group("group", {"device_mesh": None}) == "group"
    with pytest.raises(ConfigError, match="both given"):
        ddp_arguments.group("group", {"device_mesh": "mesh"})


@pytest.mark.parametrize(
    ("broadcast_buffers", "forward_sync_buffers", "copies", "at_once"),
    [
        (True, None, True, True),
        (None, None, True, True),
        (False, None, False, False),
        (True, False, False, True),
        (False, False, False, True),
        (None, True, True, True),
        (False, True, True, True),
    ],
)
def test_buffers_are_copied_as_by_ddp(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, copies: bool, at_once: bool
) -> None:
    given = {"forward_sync_buffers": forward_sync_buffers}
    assert ddp_arguments.copies_buffers(broadcast_buffers, given) is copies
    assert ddp_arguments.copies_buffers_at_once(broadcast_buffers, given) is at_once
