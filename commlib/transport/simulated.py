"""A transport for simulations: it counts the bytes of requests and moves no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from commlib.errors import TransportError
from commlib.transport.backends import DONE
from commlib.transport.base import Communicator, Nodes, Request, Transport, Work, is_own


class SimulatedTransport(Transport):
    """One rank's view of a simulated group.

    The driver models time. All ranks are assumed to contribute the same values as this one.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        ranks_per_node: Consecutive ranks that share a node.
    """

    stands_for_all = True

    def __init__(self, rank: int, world_size: int, ranks_per_node: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.global_ranks = range(world_size)
        self.bytes_sent = 0.0
        self.timeout_s = 3600.0  # not reached, because the clock is virtual
        self._ranks_per_node = ranks_per_node

    @override
    def split_by_node(self) -> Nodes | None:
        node, place = divmod(self.rank, self._ranks_per_node)
        num_nodes = self.world_size // self._ranks_per_node
        if num_nodes == 1 or self._ranks_per_node == 1:
            return None
        return Nodes(Communicator(place, self._ranks_per_node, "local"), Communicator(node, num_nodes, "across"))

    @override
    def issue(self, request: Request) -> Work:
        if request.size > 1 and not request.is_empty():
            self.bytes_sent += request.wire_bytes()
        return DONE

    @override
    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    @override
    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
        return error if is_own(error) else TransportError(f"{what} failed in a simulation: {error}")

    @override
    def abort(self) -> None: ...

    @override
    def close(self) -> None: ...
