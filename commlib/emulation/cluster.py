"""Emulated hosts: network namespaces joined by veth pairs and a bridge, with shaped links, running real processes.

Picture of a cluster, every box a network namespace; nothing of it is in the machine's own::

    host 0 [eth0] ---- [h0]
    host 1 [eth0] ---- [h1]  hub: br0
    host N [eth0] ---- [hN]

A link is shaped in both directions by a token bucket (``tbf``): on ``eth0`` what the host sends, on the hub's end what
it receives. A host's name is its address: nothing in there resolves names, and libraries tell peers their host's name.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType

from commlib.emulation import hostrun, linkprobe, netns
from commlib.emulation.hostrun import HostProcess, HostResult, LineHandler
from commlib.emulation.latency import Forwarder, check_latency, parse_latency
from commlib.emulation.links import InterfaceCounters, Link, format_rate, parse_rate
from commlib.emulation.netns import Namespace, check_requirements
from commlib.errors import ConfigError

__all__ = ["EmulatedCluster", "HostResult", "InterfaceCounters", "check_requirements", "parse_rate"]

_MIN_MTU, _MAX_MTU = 1280, 65535
_MAX_HOSTS = 250
_SUBNET = "10.77.0"
_FIRST_PORT = 29500

_TOLERANCE = 0.02
_MAX_CORRECTION = 0.05
_PASS_S = (0.3, 0.6, 1.2)
_PASS_PACKETS = 60
_SEND_BUFFER_S = 0.02
#: What is made room for on unshaped links with latency, in bit/s.
_UNSHAPED_RATE = 1e10

_RTT_TOLERANCE, _RTT_TOLERANCE_S = 0.05, 2e-4
_FINE_US, _MAX_LATENESS_US = 25.0, 250.0
_RTT_ROUNDS, _MIN_RTT_ROUNDS, _RTT_S = 200, 15, 0.5
#: How often a round trip is measured that is not the one asked for: a busy machine makes it longer, for a while.
_RTT_PROBES = 4

_cluster_ids = itertools.count()


class EmulatedCluster:
    """Hosts in network namespaces, joined by shaped links. Use it as a context manager.

    The links are calibrated on entry: the payload goodput of a TCP stream between two hosts is measured, and the shaper
    is set so that it is the asked rate. Everything is removed on exit, and also when the process is killed.

    Args:
        hosts: Number of hosts, 2 to 250.
        rate: Payload rate of each host's link in each direction: bit/s, or text such as ``"200mbit"``. None leaves the
            links unshaped.
        mtu: Largest packet in bytes, 1280 to 65535.
        latency_us: Delay of every packet that arrives at a host, in microseconds: a round trip takes twice that longer.

    Raises:
        ConfigError: If an argument makes no sense, or the machine lacks something (`check_requirements`; with a latency
            also `check_latency`).
    """

    def __init__(self, hosts: int, rate: str | float | None = None, mtu: int = 9000, latency_us: float = 0.0) -> None:
        if not 2 <= hosts <= _MAX_HOSTS:
            raise ConfigError(f"an emulated cluster has 2 to {_MAX_HOSTS} hosts, got {hosts}")
        if not _MIN_MTU <= mtu <= _MAX_MTU:
            raise ConfigError(f"mtu must be {_MIN_MTU} to {_MAX_MTU} bytes, got {mtu}")
        self.hosts = hosts
        self.mtu = mtu
        self.asked_rate = parse_rate(rate)
        self._latency_us = parse_latency(latency_us)
        missing = check_requirements()
        if missing:
            raise ConfigError("emulated hosts need what this machine lacks: " + "; ".join(missing))
        _require_latency(self._latency_us)
        self._asked = [self.asked_rate] * hosts
        self._overhead = (mtu + 14) / (mtu - 52)  # Ethernet header against IPv4, TCP and TCP timestamps
        self._rates: tuple[float, ...] = ()
        self._latency_s = self._own_rtt_s = math.nan
        self._lateness_us = 0.0
        self._forwarder: Forwarder | None = None
        self._processes: list[HostProcess] = []
        self._port = _FIRST_PORT
        self._reaper: subprocess.Popen[bytes] | None = None
        self._hub, self._hosts = _name_namespaces(hosts)
        self._links = [Link(host, self._hub, f"h{rank}", mtu) for rank, host in enumerate(self._hosts)]

    # -- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> EmulatedCluster:
        """Build the hosts and calibrate their links."""
        netns.sweep_stale()
        try:
            self._reaper = netns.start_reaper([*self._hosts, self._hub])
            self._build()
            self._own_rtt_s = min(self._measure_rtt(_RTT_ROUNDS) for _ in range(_RTT_PROBES))
            if self._latency_us:
                self._forwarder = Forwarder(self._hub, self._hosts, self._latency_us)
            self.calibrate()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove everything."""
        self.close()

    def close(self) -> None:
        """End every process on the hosts and remove the namespaces. May be called again."""
        hostrun.terminate(self._processes, self._hosts)
        self._processes.clear()
        if self._forwarder is not None:
            self._forwarder.close()
        for namespace in (*self._hosts, self._hub):
            namespace.delete()
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait()

    def _build(self) -> None:
        self._hub.create()
        self._hub.ip(
            "link", "add", "br0", "mtu", str(self.mtu), "type", "bridge", "stp_state", "0", "mcast_snooping", "0"
        )
        self._hub.ip("link", "set", "dev", "br0", "up")
        for rank, link in enumerate(self._links):
            link.host.create()
            link.plug(f"{self.address(rank)}/24")
        self._shape_all()

    def _shape_all(self) -> None:
        for link, rate in zip(self._links, self._asked, strict=True):
            if rate is not None:
                link.shape(rate, self._overhead)

    # -- links --------------------------------------------------------------------------------------------------------

    @property
    def rates(self) -> tuple[float, ...]:
        """Measured payload goodput from each host to the next one, in bit/s, as of the last `calibrate`."""
        return self._rates

    @property
    def latency_s(self) -> float:
        """Measured median round trip of one byte between hosts 0 and 1, in seconds, on idle links."""
        return self._latency_s

    @property
    def latency_us(self) -> float:
        """The asked delay of every packet that arrives at a host, in microseconds."""
        return self._latency_us

    @property
    def is_calibrated(self) -> bool:
        """Whether every measured rate is within 2 % of the asked one, and the round trip is what latency makes it.

        Unshaped links have any rate. A round trip may be 5 %, or 0.2 ms where that is more, away from the machine's own
        and twice the latency.
        """
        return self._has_rates() and self._has_latency()

    def _has_rates(self) -> bool:
        return all(_is_within(rate, asked) for rate, asked in self._measured_links())

    def _has_latency(self) -> bool:
        return not self._latency_us or self._is_asked_rtt(self._latency_s)

    def _is_asked_rtt(self, rtt_s: float) -> bool:
        tolerance_s = max(_RTT_TOLERANCE * self._asked_rtt_s, _RTT_TOLERANCE_S)
        return abs(rtt_s - self._asked_rtt_s) <= tolerance_s

    @property
    def _asked_rtt_s(self) -> float:
        return self._own_rtt_s + 2e-6 * self._latency_us

    def calibrate(self) -> tuple[float, ...]:
        """Measure every link of the idle cluster; where that misses the asked rate, correct the shapers and repeat.

        Returns:
            The measured rates, as in `rates`. A warning is given when one is further than 2 % from what was asked, or
            the round trip from what latency makes it (`is_calibrated`).

        Raises:
            TransportError: If the process that delays packets is dead.
        """
        try:
            self._measure_rates()
            if not self._has_rates() and self._correct():
                self._measure_rates()
            self._measure_latency()
        except OSError:
            self._check_forwarder()
            raise
        if not self._has_rates():
            warnings.warn(f"emulated links are further than 2 % from the asked rate: {self}", stacklevel=2)
        if not self._has_latency():
            warnings.warn(f"the emulated round trip is not what the asked latency makes it: {self}", stacklevel=2)
        return self._rates

    def _measure_latency(self) -> None:
        """Measure the round trip, and delay packets for less by what they are late; twice at most.

        How late they are depends on how busy the machine is: more than `_MAX_LATENESS_US` are not corrected.
        """
        for last in (False, False, True):
            self._latency_s = self._measure_asked_rtt()
            off_us = (self._latency_s - self._asked_rtt_s) * 1e6 / 2
            if not self._latency_us or last or abs(off_us) < _FINE_US:
                break
            self._lateness_us = min(_MAX_LATENESS_US, max(-_MAX_LATENESS_US, self._lateness_us + off_us))
            self.set_latency(self._latency_us)

    def _measure_asked_rtt(self) -> float:
        """Return the least of some round trips: other work on the machine only adds to them. The first fit is taken."""
        rounds = max(_MIN_RTT_ROUNDS, min(_RTT_ROUNDS, int(_RTT_S / self._asked_rtt_s)))
        least_s = math.inf
        for _ in range(_RTT_PROBES if self._latency_us else 1):
            least_s = min(least_s, self._measure_rtt(rounds))
            if self._is_asked_rtt(least_s):
                break
        return least_s

    def _measure_rtt(self, rounds: int) -> float:
        first, second = self._hosts[:2]
        return linkprobe.measure_rtt(first, second, self.address(1), rounds)

    def _measure_rates(self) -> None:
        self._rates = tuple(self._measure_link(rank) for rank in range(self.hosts))

    def _measure_link(self, rank: int) -> float:
        """Return the goodput from a host to the next one.

        A measurement that misses the asked rate is made again, for longer: on a busy machine the scheduling of the two
        ends disturbs a short one in both directions.
        """
        peer = (rank + 1) % self.hosts
        asked = self._asked_between(rank)
        send_buffer = int((asked or 1e12) * _SEND_BUFFER_S / 8)
        shortest_s = _PASS_PACKETS * 8 * self.mtu / (asked or math.inf)
        rtt_s = 2e-6 * self._latency_us
        latency = rtt_s, int(rtt_s * (asked or _UNSHAPED_RATE) / 8)
        goodput = 0.0
        for pass_s in _PASS_S:
            link = (self._hosts[rank], self._hosts[peer], self.address(peer))
            goodput = linkprobe.measure_goodput(*link, max(pass_s, shortest_s), send_buffer, latency)
            if _is_within(goodput, asked):
                break
        return goodput

    def _correct(self) -> bool:
        """Scale all shapers by what the median link lacks (the cause is the same on all); tell whether that was done.

        A link that is far off is not corrected: then the machine is too busy or too slow for the rate, and a shaper set
        higher would be wrong as soon as it is not.
        """
        ratios = [asked / rate for rate, asked in self._measured_links() if asked is not None]
        ratio = statistics.median(ratios)
        if abs(ratio - 1) > _MAX_CORRECTION:
            return False
        self._overhead *= ratio
        self._shape_all()
        return True

    def _asked_between(self, rank: int) -> float | None:
        """Return the asked rate from a host to the next one: the smaller of the two links."""
        rates = [rate for rate in (self._asked[rank], self._asked[(rank + 1) % self.hosts]) if rate is not None]
        return min(rates, default=None)

    def _measured_links(self) -> list[tuple[float, float | None]]:
        return [(rate, self._asked_between(rank)) for rank, rate in enumerate(self._rates)]

    def set_rate(self, rank: int, rate: str | float | None) -> None:
        """Change the rate of one host's link, in both directions, at once; what runs on the hosts goes on.

        The calibration found before is applied, nothing is measured: `rates` stays until the next `calibrate`.
        """
        self._asked[self._check_rank(rank)] = parse_rate(rate)
        self._links[rank].shape(self._asked[rank], self._overhead)

    def set_latency(self, latency_us: float) -> None:
        """Change the latency of all hosts at once; what runs on the hosts goes on, and packets stay in order.

        The calibration found before is applied, nothing is measured: `latency_s` stays until the next `calibrate`.

        Raises:
            ConfigError: If it makes no sense, or the machine lacks something (`check_latency`).
            TransportError: If the process that delays packets is dead.
        """
        self._latency_us = parse_latency(latency_us)
        delay_us = max(0.0, self._latency_us - self._lateness_us) if self._latency_us else 0.0
        if self._forwarder is not None:
            self._forwarder.set(delay_us)
        elif delay_us:
            _require_latency(delay_us)
            self._forwarder = Forwarder(self._hub, self._hosts, delay_us)

    def _check_forwarder(self) -> None:
        if self._forwarder is not None:
            self._forwarder.check()

    def address(self, rank: int) -> str:
        """Return the IPv4 address of a host."""
        return f"{_SUBNET}.{self._check_rank(rank) + 1}"

    def counters(self, rank: int) -> InterfaceCounters:
        """Read the counters of a host's interface."""
        return self._links[self._check_rank(rank)].counters()

    def __str__(self) -> str:
        """Describe the cluster in one line."""
        asked = "unshaped" if self.asked_rate is None else f"{format_rate(self.asked_rate)} asked"
        measured = f"{format_rate(min(self._rates))} to {format_rate(max(self._rates))}" if self._rates else "nothing"
        latency = (
            f"{2 * self._latency_us:.0f} us added, {self._own_rtt_s * 1e6:.0f} are this machine's own"
            if self._latency_us
            else "no latency is added: it is this machine's own"
        )
        return (
            f"{self.hosts} emulated hosts, mtu {self.mtu}, {asked}, {measured} measured (TCP payload), "
            f"round trip {self._latency_s * 1e6:.0f} us ({latency})"
        )

    def _check_rank(self, rank: int) -> int:
        if not 0 <= rank < self.hosts:
            raise ConfigError(f"this cluster has hosts 0 to {self.hosts - 1}, got rank {rank}")
        return rank

    # -- processes ----------------------------------------------------------------------------------------------------

    def run(
        self,
        cmd: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        on_line: LineHandler | None = None,
    ) -> list[HostResult]:
        """Run a command on every host and wait for all. When it returns or raises, nothing runs on any host.

        Args:
            cmd: The command line, the same on every host.
            env: Environment variables on top of this process's own and of those of `environment`.
            timeout: Seconds that the whole run may take; None for ever.
            on_line: Called as ``on_line(rank, line)`` from a thread for each line of output as it comes.

        Returns:
            One result per host, in order of rank.

        Raises:
            PeerFailure: If the command fails on a host. The others are ended at once; the message names the host, the
                exit code and its last lines.
            PeerTimeout: If it takes longer than `timeout`. All are ended; the message names who still ran.
            TransportError: If the process that delays packets dies. All are ended.
        """
        self._port += 1  # the former run's port may still be held by a process that is ending
        processes: list[HostProcess] = []
        try:
            for rank in range(self.hosts):
                processes.append(self.popen(rank, cmd, env, on_line))
            return hostrun.wait_all(processes, timeout)
        finally:
            hostrun.terminate(processes, self._hosts)
            self._processes.clear()

    def popen(
        self,
        rank: int,
        cmd: Sequence[str],
        env: Mapping[str, str] | None = None,
        on_line: LineHandler | None = None,
    ) -> HostProcess:
        """Start a command on one host and return at once. It is ended, if it still runs, when the cluster is closed."""
        variables = {**os.environ, **self.environment(rank), **(env or {})}
        pinned = ["taskset", "--cpu-list", ",".join(map(str, self.processors(rank))), *cmd]
        host, check = self._hosts[rank], self._check_forwarder
        process = HostProcess(rank, host, self.address(rank), pinned, variables, on_line, check)
        self._processes.append(process)
        return process

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that a process on a host finds the others by."""
        return {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(self._port),
            "RANK": str(self._check_rank(rank)),
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": str(len(self.processors(rank))),
        }

    def processors(self, rank: int) -> list[int]:
        """Return the processors that a host's processes run on: an equal share of those of this process.

        Where hosts are more than processors each has one, which it shares. Left to float, one host may have a processor
        for itself while three share the other, and hosts that are equal take turns in being late.
        """
        own = sorted(os.sched_getaffinity(0))
        share = max(1, len(own) // self.hosts)
        first = self._check_rank(rank) * share % len(own)
        return own[first : first + share]

    def kill(self, rank: int) -> int:
        """Kill every process of a host (SIGKILL) and return how many there were."""
        return self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> int:
        """Freeze every process of a host (SIGSTOP), as a host that hangs; its kernel still answers for it."""
        return self._signal(rank, signal.SIGSTOP)

    def cont(self, rank: int) -> int:
        """Let the processes of a stopped host go on (SIGCONT)."""
        return self._signal(rank, signal.SIGCONT)

    def _signal(self, rank: int, number: int) -> int:
        return self._hosts[self._check_rank(rank)].signal(number)


def _name_namespaces(hosts: int) -> tuple[Namespace, list[Namespace]]:
    owner, cluster_id = netns.Owner.current(), next(_cluster_ids)
    names = [owner.name(f"{cluster_id}-{role}") for role in ("hub", *(f"host{rank}" for rank in range(hosts)))]
    hub, *others = [Namespace(name) for name in names]
    return hub, others


def _require_latency(latency_us: float) -> None:
    missing = check_latency() if latency_us else []
    if missing:
        raise ConfigError("emulated latency needs what this machine lacks: " + "; ".join(missing))


def _is_within(rate: float, asked: float | None) -> bool:
    return asked is None or abs(rate / asked - 1) <= _TOLERANCE
