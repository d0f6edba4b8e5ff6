"""The report of `commlib doctor --peers`: warnings about the ranks and their connections, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from commlib.peers.facts import Rank
from commlib.peers.links import Link
from commlib.reports import tables
from commlib.transport.rendezvous import named

#: A connection is slow below this fraction of the fastest one, or of its interface's speed.
_SLOW = 0.5
#: The rate that one TCP stream reaches on any faster interface, in Mbit/s.
_STREAM_MBPS = 10_000


def warnings(ranks: Sequence[Rank], links: Sequence[Link]) -> list[str]:
    """Return the problems that the facts and measurements show, one line each.

    Args:
        ranks: The facts about all ranks, in order.
        links: The measured connections.
    """
    between = [link for link in links if not _is_within_host(ranks, link)]
    return [
        *_versions(ranks),
        *_nodes(ranks),
        *(_addresses(ranks) if between else ()),
        *_bridges(links, between),
        *_slow(between),
        *_slower_than_interface(ranks, between),
    ]


def _is_within_host(ranks: Sequence[Rank], link: Link) -> bool:
    first, second = (ranks[rank] for rank in link.ranks)
    return "lo" in link.interfaces or (first.place != "-" and first.place == second.place)


def _grouped(ranks: Iterable[Rank], key: Callable[[Rank], str]) -> dict[str, list[int]]:
    """Return the ranks by a value, in order."""
    found: dict[str, list[int]] = {}
    for each in ranks:
        found.setdefault(key(each), []).append(each.rank)
    return found


def _versions(ranks: Sequence[Rank]) -> Iterator[str]:
    for name in ranks[0].versions:
        found = _grouped(ranks, lambda each, name=name: each.versions.get(name, "unknown"))
        if len(found) > 1:
            listed = ", ".join(f"{version} on {named(members)}" for version, members in found.items())
            yield f"different versions of {name}: {listed}; install the same one everywhere"


def _nodes(ranks: Sequence[Rank]) -> Iterator[str]:
    """Warn about hosts that count as several nodes, nodes of several hosts, and machines of several containers."""
    known = [each for each in ranks if each.place != "-"]
    for members in _grouped(known, lambda each: each.place).values():
        names = _grouped([ranks[rank] for rank in members], lambda each: each.node)
        if len(names) > 1:
            yield (
                f"{named(members)} share one host and its loopback, but count as {len(names)} nodes: "
                f"{', '.join(names)}; set COMMLIB_NODE to one name on them"
            )
    for node, members in _grouped(known, lambda each: each.node).items():
        if len({ranks[rank].place for rank in members}) > 1:
            yield (
                f"{named(members)} are on different hosts, but count as one node: {node}; give the hosts different "
                "names, or set COMMLIB_NODE to a different name on each"
            )
    for members in _grouped(known, lambda each: each.machine).values():
        if len({ranks[rank].place for rank in members}) > 1:
            yield f"{named(members)} are in different containers of one machine and share its network adapter"


def _addresses(ranks: Sequence[Rank]) -> Iterator[str]:
    """Warn about addresses of Gloo and commlib that other hosts cannot reach."""
    for each in ranks:
        rank, name, gloo = f"rank {each.rank}", each.gloo_interface, each.gloo_address
        if name and not gloo:
            yield f"{rank}: GLOO_SOCKET_IFNAME={name}, but its host has no such interface with an IPv4 address"
        elif not gloo:
            yield f"{rank}: the host name {each.host} does not resolve; set GLOO_SOCKET_IFNAME to an interface"
        elif _is_loopback(gloo):
            source = f"GLOO_SOCKET_IFNAME={name}" if name else f"the host name {each.host} resolves to it"
            yield (
                f"{rank}: Gloo uses the loopback address {gloo} ({source}), which other hosts cannot reach; set "
                "GLOO_SOCKET_IFNAME to the interface that connects the hosts"
            )
        elif gloo != each.address and not _is_loopback(each.address):
            yield f"{rank}: Gloo uses {gloo}, but commlib uses {each.address}; set GLOO_SOCKET_IFNAME to one interface"
    families = _grouped(
        [each for each in ranks if each.gloo_address], lambda each: "IPv6" if ":" in each.gloo_address else "IPv4"
    )
    if len(families) > 1:
        listed = ", ".join(f"{family} on {named(members)}" for family, members in families.items())
        yield f"Gloo uses {listed}; set GLOO_SOCKET_IFNAME, or correct the host names in /etc/hosts"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _bridges(links: Sequence[Link], between: Sequence[Link]) -> Iterator[str]:
    for link in between:
        for rank, address, interface in zip(link.ranks, link.addresses, link.interfaces, strict=True):
            if interface.startswith(("docker", "br-")) or address.startswith("172.17."):
                where = f"{interface}, {address}"
                yield f"{_pair(link)}: rank {rank} talks over Docker's bridge ({where}), which ends at its machine"


def _slow(between: Sequence[Link]) -> Iterator[str]:
    """Name the ranks all of whose connections to other hosts are slow, and the slow connections of other ranks."""
    fastest = max((min(link.mbps) for link in between), default=0.0)
    slow = [link for link in between if min(link.mbps) < _SLOW * fastest]
    culprits: dict[int, float] = {}
    for rank in sorted({rank for link in slow for rank in link.ranks}):
        own = [link for link in between if rank in link.ranks]
        if len(own) > 1 and all(link in slow for link in own):
            culprits[rank] = max(min(link.mbps) for link in own)
    for rank, mbps in culprits.items():
        limit = f"{_rate(mbps)} Mbit/s at most"
        yield f"rank {rank}: slow in every measured connection to other hosts, {limit}; others reach {_rate(fastest)}"
    for link in slow:
        if not culprits.keys() & set(link.ranks):
            yield f"{_pair(link)}: slow, {_rate(min(link.mbps))} Mbit/s; others reach {_rate(fastest)}"


def _slower_than_interface(ranks: Sequence[Rank], between: Sequence[Link]) -> Iterator[str]:
    for link in between:
        speeds = [ranks[rank].speeds.get(name, 0) for rank, name in zip(link.ranks, link.interfaces, strict=True)]
        speed = min(speeds)
        if min(link.mbps) < _SLOW * min(speed, _STREAM_MBPS):
            yield f"{_pair(link)}: {_rate(min(link.mbps))} Mbit/s over interfaces of {speed} Mbit/s"


def _pair(link: Link) -> str:
    return f"ranks {link.ranks[0]} and {link.ranks[1]}"


def _rate(mbps: float) -> str:
    return f"{mbps:.3g}" if mbps < 1000 else f"{mbps:.0f}"


def to_json(ranks: Sequence[Rank], links: Sequence[Link]) -> str:
    """Return the report as a JSON object with the lists `ranks`, `links` and `warnings`."""
    rows = {"ranks": [each._asdict() for each in ranks], "links": [link._asdict() for link in links]}
    return json.dumps({**rows, "warnings": warnings(ranks, links)}, indent=2)


def show(ranks: Sequence[Rank], links: Sequence[Link]) -> None:
    """Print the ranks by node, the measured connections and the warnings."""
    console = tables.console()
    versions = ", ".join(f"{name} {version}" for name, version in ranks[0].versions.items())
    for node, members in _grouped(ranks, lambda each: each.node).items():
        tables.show(tables.wrapped(f"node {node}: {named(members)}", console.width, "  "), console)
    tables.show(tables.wrapped(f"rank 0 has {versions}", console.width, "  "), console)
    ends = ([*zip(link.ranks, link.interfaces, link.addresses, strict=True)] for link in links)
    names = [" - ".join(f"{rank} {name} {address}" for rank, name, address in both) for both in ends]
    columns = [
        tables.Column("ranks, interfaces, addresses", names),
        tables.Column("round trip us", [f"{link.rtt_us:.0f}" for link in links]),
        tables.Column("Mbit/s", [_rate(link.mbps[0]) for link in links]),
        tables.Column("back", [_rate(link.mbps[1]) for link in links]),
    ]
    tables.show(tables.fitted(columns, console.width, required=len(columns)), console)
    for line in warnings(ranks, links) or ["no problem was found"]:
        is_problem = line != "no problem was found"
        text = f"warning: {line}" if is_problem else line
        tables.show(tables.wrapped(text, console.width, "  "), console, "yellow" if is_problem else "")
