"""The contract about set-up with another group."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.algorithms import Algorithm, Context
from commlib.primitives.parts import Part
from commlib.transport.base import Communicator
from commlib.transport.groups import resolve_group
from commlib.transport.torch_dist import TorchTransport
from tests.contract.contracts_state import are_pieces, entries
from tests.contract.subjects import TIMEOUT_S, Subject, data, gathered

_SHAPES = {"wide": (48, 40), "tall": (70, 33), "small": (9, 5), "bias": (21,)}
_NUM_ROUNDS = 3


@dataclasses.dataclass
class _Bucket:
    """A bucket of parameters of one group."""

    index: int
    group: Any
    parts: Sequence[Part]
    flat: Tensor
    parameters: Sequence[torch.nn.Parameter] = dataclasses.field(default_factory=list)

    @property
    def payload(self) -> Tensor:
        return self.flat


def contract_other_groups(subject: Subject) -> None:
    """Set up again with fewer ranks, then with more: results equal those of a fresh object with the carried state.

    All state is kept, except that which `State.is_shared` declares to be reset. While no rank joins, gradients are
    identical on all ranks.
    """
    if not subject.channel.has_rounds or subject.runs_by_clocks:
        return  # it is attached to one group, or its results depend on time
    world_size, carried = dist.get_world_size(), subject.algorithm()
    buckets = _buckets(carried)
    sizes = (max(world_size - 1, 1), max(world_size - 2, 1), world_size)
    for size in sizes:
        error = None
        with _group_of(size, subject.channel.wants_nodes) as member:
            if member is not None:
                try:
                    _compare_with_fresh(subject, carried, buckets, *member)
                except Exception as raised:
                    error = raised
        outcomes = gathered(None if error is None else f"{type(error).__name__}: {error}")
        assert not any(outcomes), f"with {size} ranks: {outcomes}"
        if subject.on_gradients and size < world_size:
            everyone = gathered([bucket.flat.tolist() for bucket in buckets])[:size]
            assert all(each == everyone[0] for each in everyone), f"with {size} ranks: gradients differ"


def _compare_with_fresh(
    subject: Subject,
    carried: Algorithm,
    buckets: Sequence[_Bucket],
    transport: TorchTransport,
    comm: Communicator,
) -> None:
    """Set up with a group, and compare its rounds with those of a fresh object that has loaded its state."""
    device = torch.device("cpu")
    before = _kept(carried.state_dict(), comm.world_size)
    carried.setup(Context(comm, buckets, device))
    state = copy.deepcopy(carried.state_dict())
    reset = {kind for own in carried.states if own.is_shared for kind in own.save()}
    assert not any(state[kind] for kind in reset), f"{sorted(reset)} were declared to be reset"
    _assert_kept({key: each for key, each in before.items() if key[0] not in reset}, _kept(state, comm.world_size))
    fresh, own = subject.algorithm(), [dataclasses.replace(b, flat=b.flat.clone()) for b in buckets]
    fresh.setup(Context(comm, own, device))
    fresh.load_state_dict(copy.deepcopy(state))
    for step in range(_NUM_ROUNDS):
        comm.step = comm.optimizer_step = step
        _round(subject, carried, buckets, comm, transport, begins=step == 0)
        _round(subject, fresh, own, comm, transport, begins=step == 0)
        for one, other in zip(buckets, own, strict=True):
            assert torch.equal(one.flat, other.flat), f"round {step}: bucket {one.index} differs"


@contextlib.contextmanager
def _group_of(size: int, with_nodes: bool) -> Iterator[tuple[TorchTransport, Communicator] | None]:
    """Connect the first ranks, two on each node where that is asked for and possible. Collective over all ranks."""
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=TIMEOUT_S))
    if dist.get_rank() >= size:
        yield None
        return
    transport = TorchTransport(resolve_group(group), torch.device("cpu"), timedelta(seconds=TIMEOUT_S))
    try:
        comm = Communicator(transport.rank, size)
        if with_nodes:
            os.environ["COMMLIB_NODE"] = str(transport.rank // 2 if size % 2 == 0 else transport.rank)
            comm.nodes = transport.split_by_node()
            assert (comm.nodes is None) == (size < 4 or size % 2 == 1), "the nodes are not those that were asked for"
        yield transport, comm
    finally:
        os.environ.pop("COMMLIB_NODE", None)
        transport.close()
        dist.destroy_process_group(group)


def _buckets(algorithm: Algorithm) -> list[_Bucket]:
    by_group: dict[Any, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in _SHAPES.items():
        by_group.setdefault(algorithm.group(name, torch.zeros(shape)), []).append((name, shape))
    buckets, offset = [], 0
    for group, members in by_group.items():
        parts, start = [], 0
        for name, shape in members:
            numel = torch.Size(shape).numel()
            parts.append(Part(name, shape, start, numel, offset))
            start, offset = start + numel, offset + numel
        buckets.append(_Bucket(len(buckets), group, parts, data(1, 0, start)))
    return buckets


def _round(
    subject: Subject,
    algorithm: Algorithm,
    buckets: Sequence[_Bucket],
    comm: Communicator,
    transport: TorchTransport,
    *,
    begins: bool,
) -> None:
    """Make one round: of gradients, or of weights that this rank has moved."""
    for bucket in buckets:
        if not subject.on_gradients and begins:
            algorithm.begin(bucket)
        noise = data(comm.step + 17 * comm.world_size + bucket.index, comm.rank, bucket.flat.numel())
        bucket.flat.mul_(0.0 if subject.on_gradients else 1.0).add_(noise, alpha=0.1)
        for request in algorithm.communicate(bucket, comm):
            transport.issue(request).wait()


def _kept(state: dict[str, Any], world_size: int) -> dict[tuple[str, str], Tensor]:
    """Return the state by kind and parameter; errors of an owner as those of a worker, times the number of ranks."""
    found: dict[tuple[str, str], Tensor] = {}
    for kind, name, start, piece in entries({k: pieces for k, pieces in state.items() if are_pieces(pieces)}):
        key = ("worker" if kind in ("owner", "owed") else kind, name)
        values = piece.double().reshape(-1) * (world_size if kind == "owner" else 1)
        whole = found.setdefault(key, torch.zeros(torch.Size(_SHAPES[name]).numel(), dtype=torch.float64))
        whole[start : start + values.numel()] += values
    return found


def _assert_kept(before: dict[tuple[str, str], Tensor], after: dict[tuple[str, str], Tensor]) -> None:
    for (kind, name), values in before.items():
        got = after.get((kind, name), torch.zeros_like(values))
        torch.testing.assert_close(got, values, rtol=1e-5, atol=1e-6, msg=f"{kind} of {name!r} was lost")
