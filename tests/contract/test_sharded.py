"""Models whose parameters are DTensors are held to the contracts: FSDP2 on islands of one rank each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.contract import subjects
from tests.contract.contracts import CONTRACTS, hold
from tests.contract.subjects import Subject
from tests.contract.test_algorithms import FAMILIES, QUICK
from tests.multi.pool import run_ranks


@contextmanager
def islands_of_one() -> Iterator[None]:
    """Let models be sharded on meshes that have this rank alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    subjects.set_sharding(lambda model: fully_shard(model, mesh=mesh["shard"]))
    try:
        yield
    finally:
        subjects.set_sharding(None)


def hold_sharded(algorithm: str, *names: str) -> None:
    with islands_of_one():
        hold(algorithm, *names)


#: What FSDP2 does not do, whatever communicates.
NOT_BY_FSDP = {
    "copies": "it refuses to be copied",
    "local_evaluation": "it refuses to be copied",
    "gradient_data_is_assigned": "assigning to `data` of a DTensor changes nothing",
    "dtypes_mixed": "its parameters have one dtype",
    "memory_formats": "it cannot change the memory format",
    "inputs_stay": "after a forward without gradients the model has its gathered parameters",
    "failed_backward_before_any_communication": "a backward that fails leaves it unable to go on",
    "failed_backward_in_no_sync": "a backward that fails leaves it unable to go on",
    "expected_backward": "a backward that is refused leaves it unable to go on",
}
#: One of each channel: the others differ in the processing of a bucket.
FIRST = ("topk", "diloco")
_SECOND = "two_synchronised_backwards"
ALGORITHMS = [name for name in FAMILIES if Subject(name).channel.has_rounds]


def held(algorithm: str) -> list[str]:
    """Return the contracts that an algorithm is held to; a second backward that it refuses is one that fails."""
    refuses = not getattr(Subject(algorithm).channel, "accumulates", True)
    return [name for name in CONTRACTS if name not in NOT_BY_FSDP and not (refuses and name == _SECOND)]


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in ALGORITHMS]
)
def test_quick_contracts(algorithm: str) -> None:
    run_ranks(hold_sharded, 2, algorithm, *(name for name in held(algorithm) if name in QUICK))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "contract"), [(each, name) for each in ALGORITHMS for name in held(each)])
def test_all_contracts(algorithm: str, contract: str) -> None:
    run_ranks(hold_sharded, 2, algorithm, contract)


def test_exceptions_are_contracts() -> None:
    assert {*NOT_BY_FSDP, _SECOND} <= set(CONTRACTS)
