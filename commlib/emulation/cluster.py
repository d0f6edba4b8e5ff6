"""Emulated hosts: network namespaces connected by veth pairs and a bridge, with shaped links and real processes.

Each host and the hub is its own network namespace. The machine's own namespace is not modified::

    host 0 [eth0] ---- [h0]
    host 1 [eth0] ---- [h1]  hub: br0
    host N [eth0] ---- [hN]

A token bucket (``tbf``) shapes each direction of a link: ``eth0`` shapes outgoing traffic, the hub's end incoming
traffic. A host's name is its IPv4 address: libraries send it to peers, and the namespaces cannot resolve names.
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
from commlib.emulation.links import OFF_LATENCY, OFF_RATE, InterfaceCounters, Link, format_rate, parse_rate
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
#: Rate used to size the buffers of unshaped links with latency, in bit/s.
_UNSHAPED_RATE = 1e10

_RTT_TOLERANCE, _RTT_TOLERANCE_S = 0.05, 2e-4
_FINE_US, _MAX_LATENESS_US = 25.0, 250.0
_RTT_ROUNDS, _MIN_RTT_ROUNDS, _RTT_S = 200, 15, 0.5
#: Maximum number of measurements of the round-trip time: load on the machine increases it temporarily.
_RTT_PROBES = 4

_cluster_ids = itertools.count()


class EmulatedCluster:
    """Hosts in network namespaces, connected by shaped links. Use it as a context manager.

    On entry the links are calibrated: the shapers are adjusted so that the measured goodput of a TCP stream between two
    hosts matches the requested rate. Everything is removed on exit, even if this process is killed.

    Args:
        hosts: Number of hosts, 2 to 250.
        rate: Payload rate of each host's link in each direction: bit/s, or a string such as ``"200mbit"``. None leaves
            the links unshaped.
        mtu: Maximum packet size in bytes, 1280 to 65535.
        latency_us: Delay of every packet that arrives at a host, in microseconds; the round-trip time grows by twice as
            much.

    Raises:
        ConfigError: If an argument is invalid, or the machine does not meet the requirements (`check_requirements`;
            with a latency also `check_latency`).
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
            raise ConfigError("this machine cannot run emulated hosts; missing: " + "; ".join(missing))
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

    # -- setup --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> EmulatedCluster:
        """Create the hosts and calibrate their links."""
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
        """Call `close`."""
        self.close()

    def close(self) -> None:
        """Terminate every process on the hosts and remove the namespaces. Idempotent."""
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
        """Payload goodput from each host to the next one, in bit/s, as measured by the last `calibrate`."""
        return self._rates

    @property
    def latency_s(self) -> float:
        """Measured median round-trip time of one byte between hosts 0 and 1 on idle links, in seconds."""
        return self._latency_s

    @property
    def latency_us(self) -> float:
        """The requested delay of every packet that arrives at a host, in microseconds."""
        return self._latency_us

    @property
    def is_calibrated(self) -> bool:
        """Whether the measured rates and the round-trip time match the requested rate and latency.

        Every rate must be within 2 % of the requested one; unshaped links always pass. With a latency, the round-trip
        time must be within 5 % or 0.2 ms, whichever is larger, of the machine's own plus twice the latency.
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
        """Measure every link of the idle cluster. If a rate is off, correct the shapers and measure again.

        Returns:
            The measured rates, as in `rates`. Warns if `is_calibrated` is false afterwards.

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
            warnings.warn(f"{OFF_RATE}: {self}", stacklevel=2)
        if not self._has_latency():
            warnings.warn(f"{OFF_LATENCY}: {self}", stacklevel=2)
        return self._rates

    def _measure_latency(self) -> None:
        """Measure the round-trip time and reduce the packet delay by the measured lateness; at most twice.

        The lateness depends on the load of the machine. The correction is limited to `_MAX_LATENESS_US`.
        """
        for last in (False, False, True):
            self._latency_s = self._measure_asked_rtt()
            off_us = (self._latency_s - self._asked_rtt_s) * 1e6 / 2
            if not self._latency_us or last or abs(off_us) < _FINE_US:
                break
            self._lateness_us = min(_MAX_LATENESS_US, max(-_MAX_LATENESS_US, self._lateness_us + off_us))
            self.set_latency(self._latency_us)

    def _measure_asked_rtt(self) -> float:
        """Return the minimum of several round-trip times; other load only adds to them. Stop at the first match."""
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

        A measurement that does not match the requested rate is repeated for longer: on a busy machine, the scheduling
        of the two ends biases a short measurement in either direction.
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
        """Scale all shapers by the error of the median link; return whether a correction was applied.

        The cause of the error is the same on all links. Errors above 5 % are not corrected: the machine is then too
        busy or too slow for the rate, and a raised shaper rate would be wrong as soon as the load drops.
        """
        ratios = [asked / rate for rate, asked in self._measured_links() if asked is not None]
        ratio = statistics.median(ratios)
        if abs(ratio - 1) > _MAX_CORRECTION:
            return False
        self._overhead *= ratio
        self._shape_all()
        return True

    def _asked_between(self, rank: int) -> float | None:
        """Return the requested rate from a host to the next one: the minimum of the two links' rates."""
        rates = [rate for rate in (self._asked[rank], self._asked[(rank + 1) % self.hosts]) if rate is not None]
        return min(rates, default=None)

    def _measured_links(self) -> list[tuple[float, float | None]]:
        return [(rate, self._asked_between(rank)) for rank, rate in enumerate(self._rates)]

    def set_rate(self, rank: int, rate: str | float | None) -> None:
        """Change the rate of one host's link in both directions, immediately. Running processes are not interrupted.

        The existing calibration is applied without a new measurement; `rates` is updated by the next `calibrate`.
        """
        self._asked[self._check_rank(rank)] = parse_rate(rate)
        self._links[rank].shape(self._asked[rank], self._overhead)

    def set_latency(self, latency_us: float) -> None:
        """Change the latency of all hosts immediately. Running processes are not interrupted; packets stay in order.

        The existing calibration is applied without a new measurement; `latency_s` is updated by the next `calibrate`.

        Raises:
            ConfigError: If the value is invalid, or the machine does not meet the requirements (`check_latency`).
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
        """Run a command on every host and wait for all. No process remains on any host afterwards.

        Args:
            cmd: The command line, the same on every host.
            env: Environment variables, added to those of this process and of `environment`.
            timeout: Time limit of the whole run, in seconds; None for no limit.
            on_line: Called as ``on_line(rank, line)`` from another thread for each line of output.

        Returns:
            One result per host, in rank order.

        Raises:
            PeerFailure: If the command fails on a host. The other hosts are terminated immediately; the message
                contains the host's rank, exit code and last lines of output.
            PeerTimeout: If `timeout` expires. All hosts are terminated; the message lists the ranks that were still
                running.
            TransportError: If the process that delays packets dies. All hosts are terminated.
        """
        self._port += 1  # an exiting process may still hold the previous run's port
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
        """Start a command on one host and return immediately. `close` terminates it if it still runs."""
        variables = {**os.environ, **self.environment(rank), **(env or {})}
        pinned = ["taskset", "--cpu-list", ",".join(map(str, self.processors(rank))), *cmd]
        host, check = self._hosts[rank], self._check_forwarder
        process = HostProcess(rank, host, self.address(rank), pinned, variables, on_line, check)
        self._processes.append(process)
        return process

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables with which a process on a host finds its peers."""
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
        """Return the processors that a host's processes are pinned to: an equal share of those of this process.

        If there are more hosts than processors, each host is pinned to one shared processor. Without pinning, one host
        may have a processor of its own while three share the other, and the slowest host changes over time.
        """
        own = sorted(os.sched_getaffinity(0))
        share = max(1, len(own) // self.hosts)
        first = self._check_rank(rank) * share % len(own)
        return own[first : first + share]

    def kill(self, rank: int) -> int:
        """Kill every process of a host (SIGKILL) and return the number of processes."""
        return self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> int:
        """Freeze every process of a host (SIGSTOP) to emulate a hanging host. Its kernel still acknowledges packets."""
        return self._signal(rank, signal.SIGSTOP)

    def cont(self, rank: int) -> int:
        """Resume the processes of a stopped host (SIGCONT)."""
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
        raise ConfigError("this machine cannot emulate latency; missing: " + "; ".join(missing))


def _is_within(rate: float, asked: float | None) -> bool:
    return asked is None or abs(rate / asked - 1) <= _TOLERANCE
