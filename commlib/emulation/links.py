"""A host's link to the hub: the veth pair, its shapers and counters, and the parsing of rates."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from commlib.emulation.netns import Namespace, command, tbf_words
from commlib.errors import ConfigError

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_RATE = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z/]+)\s*$", re.IGNORECASE)
_MIN_RATE = 1e6

# [Note: segments and burst]
# After a pause, a token bucket passes `burst` bytes at once. A small burst limits the error for short messages, a large
# burst tolerates late timers, and a burst below one segment makes the kernel split the segment. TCP passes segments of
# at most four packets to the link: single packets cost more processor time, and segments of 64 KiB would need a burst
# of the same size. The measurements are in docs/explanation/emulation.md.
_SEGMENT_PACKETS = 4
_MAX_SEGMENT_BYTES = 65536
_BURST_SEGMENTS = 1.5
_BURST_S = 0.0004

# [Note: no drops]
# Both queues of a link can hold all bytes that the senders' sockets may have in flight. A sender's own queue is short,
# like the ring of a network card. So nothing is dropped, and acknowledgements do not wait behind megabytes of data.
# Without drops the choice of congestion control hardly matters; reno is in every kernel and, unlike bbr, does not pace.
_QUEUE_BYTES = 16 << 20
_SENDER_QUEUE_BYTES = 128 << 10
_CONGESTION = "reno"

#: The beginnings of the warnings of `EmulatedCluster.calibrate`.
OFF_RATE = "emulated links are more than 2 % off the requested rate"
OFF_LATENCY = "the emulated round-trip time does not match the requested latency"


def parse_rate(rate: str | float | None) -> float | None:
    """Parse a link rate and return it in bit/s.

    Args:
        rate: A number in bit/s, a string such as ``"200mbit"`` or ``"1.5gbit"``, or None for an unshaped link.

    Raises:
        ConfigError: If it is not a rate of at least 1 Mbit/s.
    """
    if rate is None:
        return None
    value = _parse_text(rate) if isinstance(rate, str) else float(rate)
    if not (math.isfinite(value) and value >= _MIN_RATE):
        raise ConfigError(f"a link rate must be at least 1mbit (1e6 bit/s), got {rate!r}")
    return value


def _parse_text(rate: str) -> float:
    match = _RATE.match(rate)
    unit = match[2].lower().removesuffix("/s") if match else ""
    if match is None or unit not in _UNITS:
        why = " ('bps' is bits per second to some and bytes to tc)" if unit.endswith("ps") else ""
        raise ConfigError(
            f"unknown link rate {rate!r}{why}; write a number and one of {', '.join(_UNITS)}, such as '200mbit'"
        )
    return float(match[1]) * _UNITS[unit]


def format_rate(rate: float) -> str:
    """Format a rate in bit/s for display."""
    return f"{rate / 1e9:.3f} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.1f} Mbit/s"


@dataclass(frozen=True)
class InterfaceCounters:
    """Counters of a host's interface since the cluster was created.

    Bytes include payload and headers; the interface counts headers once per segment passed to it.

    Attributes:
        tx_bytes: Bytes sent.
        rx_bytes: Bytes received.
        tx_packets: Segments sent; each may contain several packets (`Link.segment_bytes`).
        rx_packets: Segments received.
        tx_dropped: Outgoing segments dropped by the queue at the host's end.
        rx_dropped: Incoming segments dropped by the queue at the hub's end.
    """

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int
    tx_dropped: int
    rx_dropped: int

    def __sub__(self, earlier: InterfaceCounters) -> InterfaceCounters:
        """Return the counts since `earlier`."""
        pairs = zip(vars(self).values(), vars(earlier).values(), strict=True)
        return InterfaceCounters(*(now - then for now, then in pairs))


@dataclass(frozen=True)
class Link:
    """A veth pair from ``eth0`` of `host` to `port` of the bridge ``br0`` in `hub`."""

    host: Namespace
    hub: Namespace
    port: str
    mtu: int

    @property
    def ends(self) -> tuple[tuple[Namespace, str], tuple[Namespace, str]]:
        """The devices with a shaper: the first shapes the host's outgoing traffic, the second its incoming traffic."""
        return (self.host, "eth0"), (self.hub, self.port)

    @property
    def segment_bytes(self) -> int:
        """Largest segment, in bytes, that TCP passes to the link. See [Note: segments and burst]."""
        return min(_SEGMENT_PACKETS * (self.mtu + 14), _MAX_SEGMENT_BYTES)

    def burst_bytes(self, rate: float) -> int:
        """Return the number of bytes that an idle link passes at once, for `rate` in bit/s."""
        return int(max(_BURST_SEGMENTS * self.segment_bytes, _BURST_S * rate / 8))

    def plug(self, address: str) -> None:
        """Create the pair and bring both ends up; `address` is the host's, such as ``10.77.0.1/24``.

        Both ends are created inside their namespaces and never appear in the machine's own.
        """
        peer = ["peer", "name", self.port, "netns", self.hub.name, "mtu", str(self.mtu)]
        self.host.ip("link", "add", "eth0", "mtu", str(self.mtu), "type", "veth", *peer)
        for namespace, device in self.ends:
            namespace.ip("link", "set", "dev", device, "addrgenmode", "none")  # no IPv6 traffic
            namespace.ip("link", "set", "dev", device, "gso_max_size", str(self.segment_bytes))
        self.hub.ip("link", "set", "dev", self.port, "master", "br0", "up")
        self.host.ip("addr", "add", address, "noprefixroute", "dev", "eth0")
        self.host.ip("link", "set", "dev", "eth0", "up")
        self._tune_sender(address)

    def _tune_sender(self, address: str) -> None:
        """Set congestion control and the limit of the sender's queue. See [Note: no drops]."""
        subnet = address.rpartition(".")[0] + ".0/24"
        self.host.ip("route", "add", subnet, "dev", "eth0", "congctl", _CONGESTION)
        limit = f"echo {_SENDER_QUEUE_BYTES} >/proc/sys/net/ipv4/tcp_limit_output_bytes"
        command(*self.host.wrap(["/bin/sh", "-c", limit]))

    def shape(self, rate: float | None, overhead: float) -> None:
        """Shape both directions to `rate` bit/s of payload, `rate * overhead` on the wire; None removes shaping."""
        for namespace, device in self.ends:
            if rate is None:
                namespace.tc("qdisc", "replace", "dev", device, "root", "noqueue")
            else:
                words = tbf_words(rate * overhead, self.burst_bytes(rate), _QUEUE_BYTES)
                namespace.tc("qdisc", "replace", "dev", device, "root", *words)

    def counters(self) -> InterfaceCounters:
        """Read the counters of the host's interface."""
        stats = json.loads(self.host.ip("-s", "-j", "link", "show", "dev", "eth0"))[0]["stats64"]
        tx_dropped, rx_dropped = (_queue_drops(namespace, device) for namespace, device in self.ends)
        return InterfaceCounters(
            tx_bytes=stats["tx"]["bytes"],
            rx_bytes=stats["rx"]["bytes"],
            tx_packets=stats["tx"]["packets"],
            rx_packets=stats["rx"]["packets"],
            tx_dropped=tx_dropped,
            rx_dropped=rx_dropped,
        )


def _queue_drops(namespace: Namespace, device: str) -> int:
    queues = json.loads(namespace.tc("-s", "-j", "qdisc", "show", "dev", device))
    return sum(queue.get("drops", 0) for queue in queues if queue.get("root"))
