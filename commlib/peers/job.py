"""The ranks of a job as `commlib doctor --peers` runs on them: they meet, rank 0 has every pair measured, and reports.

The pairs are measured one after the other, so that none shares a link with another one. Rank 0 starts each measurement
and receives its result, over the connections that the other ranks opened to it; `links` runs over those that the first
rank of a pair opened to the second.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commlib.errors import ConfigError, PeerFailure, PeerTimeout, TransportError
from commlib.peers.facts import Rank, examine
from commlib.peers.links import Line, Link, answer, measure, pairs, seconds_per_pair
from commlib.transport.addresses import local_address
from commlib.transport.connections import connect_all
from commlib.transport.plain import decode, encode
from commlib.transport.rendezvous import all_said, named

#: How much longer rank 0 waits for a result than the two measured ranks wait for each other, and the others for rank 0
#: than that, in seconds.
_GRACE_S = 5.0


def survey(environment: Mapping[str, str], timeout_s: float) -> tuple[list[Rank], list[Link]] | None:
    """Measure the connections between the ranks of this job. Collective; takes about 30 s at most on fast links.

    Args:
        environment: The variables that a launcher sets: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        timeout_s: How long to wait for a rank, in seconds: to arrive, and for each measurement.

    Returns:
        The facts about all ranks and the measured connections on rank 0, None on all other ranks.

    Raises:
        ConfigError: The variables are missing or wrong, or there is only one rank.
        PeerTimeout: A rank did not arrive or did not answer; the message names it.
        PeerFailure: A rank ended; the message names it.
        TransportError: The store of the job cannot be reached.
    """
    rank, world_size, store = _join(environment, timeout_s)
    return meet_and_measure(store, rank, world_size, timeout_s)


def meet_and_measure(
    store: dist.Store, rank: int, world_size: int, timeout_s: float
) -> tuple[list[Rank], list[Link]] | None:
    """Measure the connections between the ranks that share a store; see `survey`."""
    introduction = _Introduction(store, rank, world_size, timeout_s)
    facts = introduction.gather_objects(examine(rank, store))
    if others := [other for other, values in enumerate(facts) if len(values) != len(Rank._fields)]:
        raise TransportError(f"rank {rank} of {world_size}: another version of commlib on {named(others)}")
    ranks = [Rank(*values) for values in facts]
    made, accepted = connect_all(introduction)
    with contextlib.ExitStack() as opened:
        for connection in (*made.values(), *accepted.values()):
            opened.enter_context(contextlib.closing(connection))
        if rank:
            _follow(rank, made, accepted, timeout_s)
            return None
        return ranks, _lead(made, accepted, timeout_s)


def _join(environment: Mapping[str, str], timeout_s: float) -> tuple[int, int, dist.Store]:
    try:
        rank, world_size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        host = environment["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "--peers: a launcher has to set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every rank, as in "
            f"`torchrun --nproc_per_node 2 -m commlib doctor --peers`; got {type(error).__name__}: {error}"
        ) from None
    if world_size < 2:
        raise ConfigError(f"--peers: expected two ranks or more, got WORLD_SIZE={world_size}")
    is_host = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(
            host, port, world_size, is_host, timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"rank {rank} of {world_size}: the store of rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT) cannot be "
            f"{'opened' if is_host else 'reached'}: {_first_line(error)}"
        ) from None
    return rank, world_size, store


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class _Introduction:
    """Exchanges values through the store, for `connect_all`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._store = store
        self._turns = itertools.count()

    def local_address(self) -> str:
        """Return the address of this host for connections from other ranks."""
        return local_address(self._store)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's plain `value`, in rank order."""
        own = dist.PrefixStore(f"commlib/peers/{next(self._turns)}", self._store)
        text = encode(value).decode("ascii")
        try:
            said = all_said(own, self.rank, range(self.world_size), text, self.timeout_s, lambda: None)
        except TimeoutError as error:
            why = f"not all ranks arrived within {self.timeout_s:g} s: {error}"
            raise PeerTimeout(f"rank {self.rank} of {self.world_size}: {why}") from None
        except RuntimeError as error:
            why = f"the store does not answer; rank 0 may have ended: {_first_line(error)}"
            raise TransportError(f"rank {self.rank} of {self.world_size}: {why}") from None
        return [decode(data) for data in said]

    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> TransportError:
        """Return the error that names the `suspects`."""
        kind = PeerTimeout if isinstance(error, TimeoutError) else PeerFailure
        who = f" to {named(suspects)}" if suspects else ""
        return kind(f"rank {self.rank} of {self.world_size}: {what}{who} failed: {error}", suspects)


def _lead(made: Mapping[int, socket.socket], accepted: Mapping[int, socket.socket], timeout_s: float) -> list[Link]:
    """Let every pair be measured, and tell all ranks when this has ended."""
    others = {peer: Line(accepted[peer], 0, peer, "the ranks are measured") for peer in accepted}
    chosen = pairs(1 + len(others))
    seconds = seconds_per_pair(len(chosen))
    found, reason = list[Link](), "rank 0 was interrupted"
    try:
        for first, second in chosen:
            for line in others.values():
                line.limit(timeout_s + _GRACE_S)
                line.say(("pair", first, second, seconds))
            if first:
                found.append(_result(others[first].hear()))
            else:
                found.append(_measure(made, 0, second, seconds, timeout_s))
        reason = ""
    except TransportError as error:
        reason = str(error)
        raise
    finally:
        for line in others.values():
            with contextlib.suppress(TransportError):
                line.say(("end", reason))
    return found


def _result(said: Any) -> Link:
    """Return the result that a rank sent, or raise its error."""
    kind, *values = said
    if kind == "failed":
        is_late, text = values
        raise (PeerTimeout if is_late else PeerFailure)(text)
    return Link(*values)


def _follow(
    rank: int, made: Mapping[int, socket.socket], accepted: Mapping[int, socket.socket], timeout_s: float
) -> None:
    """Take part in the measurements of this rank's pairs, until rank 0 ends."""
    leader = Line(made[0], rank, 0, "the ranks are measured")
    while True:
        leader.limit(timeout_s + 2 * _GRACE_S)
        said: Any = leader.hear()
        match said:
            case ("end", reason):
                if reason:
                    raise PeerFailure(f"rank {rank} of {len(made) + 1}: rank 0 reports: {reason}")
                return
            case ("pair", first, second, seconds) if rank == first:
                try:
                    leader.say(("measured", *_measure(made, rank, second, seconds, timeout_s)))
                except TransportError as error:
                    leader.say(("failed", isinstance(error, PeerTimeout), str(error)))
            case ("pair", first, second, _) if rank == second:
                with contextlib.suppress(TransportError):  # the first rank of the pair reports it
                    answer(_line(accepted, rank, first, timeout_s))


def _measure(made: Mapping[int, socket.socket], rank: int, peer: int, seconds: float, timeout_s: float) -> Link:
    return measure(_line(made, rank, peer, timeout_s), (rank, peer), seconds)


def _line(connections: Mapping[int, socket.socket], rank: int, peer: int, timeout_s: float) -> Line:
    line = Line(connections[peer], rank, peer, f"the connection of ranks {rank} and {peer} is measured")
    line.limit(timeout_s)
    return line
