"""Emulated hosts: rates, requirements, links, processes, and that nothing is ever left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from commlib.emulation import (
    EmulatedCluster,
    InterfaceCounters,
    check_requirements,
    hostrun,
    linkprobe,
    netns,
    parse_rate,
)
from commlib.emulation.links import OFF_RATE, Link
from commlib.errors import ConfigError, PeerFailure, PeerTimeout
from tests.loopback import MISSING
from tests.waiting import LIMIT_S, Alarm, eventually

needs_hosts = pytest.mark.skipif(bool(MISSING), reason="emulated hosts need " + "; ".join(MISSING))
_ROOT = Path(__file__).parents[2]
_MISS = f"ignore:{OFF_RATE}:UserWarning"


def _own_names() -> list[str]:
    """The namespaces that this process has made and not yet removed."""
    owner = netns.Owner.current()
    return [namespace.name for maker, namespace in netns.owned_namespaces() if maker == owner]


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _rate_from(cluster: EmulatedCluster, sources: list[int], target: int, num_bytes: int) -> float:
    """Return the bit/s of so many bytes from each source at once, until the last has come.

    A machine under load makes it smaller than the links are; nothing makes it larger.
    """

    def receive(peer: socket.socket) -> None:
        left, buffer = num_bytes, bytearray(1 << 16)
        while left:
            left -= peer.recv_into(buffer)

    with contextlib.ExitStack() as opened, ThreadPoolExecutor(2 * len(sources)) as pool:
        where = cluster._hosts[target], cluster.address(target)
        pairs = [opened.enter_context(linkprobe.connected_pair(cluster._hosts[each], *where)) for each in sources]
        begin_s = time.monotonic()
        jobs = [pool.submit(client.sendall, bytes(num_bytes)) for client, _ in pairs]
        jobs += [pool.submit(receive, peer) for _, peer in pairs]
        for each in jobs:
            each.result(LIMIT_S)
        seconds = time.monotonic() - begin_s
    return 8 * num_bytes * len(sources) / seconds


def _states(host: netns.Namespace) -> set[str]:
    """The states of a host's processes, as letters: "T" is a frozen one."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in host.pids()]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


# -- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200mbit", 200e6),
        ("1gbit", 1e9),
        ("1.5 Gbit/s", 1.5e9),
        (".5gbit", 0.5e9),
        ("1000kbit", 1e6),
        (25e9, 25e9),
        (10**7, 1e7),
        (None, None),
    ],
)
def test_parse_rate(text: str | float | None, expected: float | None) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize(
    "text", ["", "fast", "200", "mbit", "-1gbit", "1e3mbit", "1gib", "0gbit", 0, -1e9, float("nan")]
)
def test_parse_rate_refuses_nonsense(text: str | float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        parse_rate(text)


def test_parse_rate_explains_the_ambiguous_unit() -> None:
    with pytest.raises(ConfigError, match="'bps' is bits per second to some"):
        parse_rate("200mbps")


# -- requirements -----------------------------------------------------------------------------------------------------


def test_missing_requirements_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    missing = check_requirements()
    assert len(missing) == 5
    assert "root" in missing[0]
    assert "`ip`" in missing[1]
    assert "`tc`" in missing[2]
    assert "`unshare`" in missing[3]
    assert "`taskset`" in missing[4]
    with pytest.raises(ConfigError, match=r"root privileges.*`ip`.*`tc`.*install iproute2"):
        EmulatedCluster(hosts=2, rate="100mbit")


def test_a_kernel_feature_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*words: str) -> str:
        if "tbf" in words:
            raise ConfigError("Specified qdisc kind is unknown")
        return ""

    monkeypatch.setattr(netns, "command", command)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: f"/sbin/{tool}")
    assert check_requirements() == ["the tbf queue (Specified qdisc kind is unknown)"]


@pytest.mark.parametrize(
    "arguments", [{"hosts": 1}, {"hosts": 251}, {"hosts": 2, "mtu": 500}, {"hosts": 2, "rate": "x"}]
)
def test_wrong_arguments(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        EmulatedCluster(**arguments)


@needs_hosts
@pytest.mark.parametrize(
    ("available", "expected"),
    [
        ({0, 1}, [[0], [1], [0]]),
        ({5}, [[5], [5], [5]]),
        ({1, 2, 4, 6, 7}, [[1], [2], [4]]),
        (set(range(8)), [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_processors_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, available: set[int], expected: list[list[int]]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: available)
    cluster = EmulatedCluster(hosts=3)
    assert [cluster.processors(rank) for rank in range(3)] == expected


def test_counters_subtract() -> None:
    now, then = InterfaceCounters(9, 8, 7, 6, 5, 4), InterfaceCounters(1, 2, 3, 4, 5, 0)
    assert now - then == InterfaceCounters(8, 6, 4, 2, 0, 4)


# -- a cluster --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(hosts=3, rate="100mbit") as made:
        yield made
    assert _own_names() == []


@needs_hosts
class TestCluster:
    """Behaviour of a running cluster, which all tests share."""

    pytestmark = pytest.mark.filterwarnings(_MISS)  # this machine may be busy with other tests

    def test_the_machines_own_network_is_untouched(self, cluster: EmulatedCluster) -> None:
        devices = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        assert "br0" not in devices
        assert "veth" not in devices
        assert "10.77.0" not in subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout

    def test_links_are_calibrated(self, cluster: EmulatedCluster) -> None:
        assert len(cluster.rates) == 3
        assert all(abs(rate / 100e6 - 1) <= 0.02 for rate in cluster.rates) == cluster.is_calibrated
        assert all(rate > 0 for rate in cluster.rates)
        assert cluster.latency_s > 0
        assert "3 emulated hosts" in str(cluster)
        assert "no latency is added" in str(cluster)

    @pytest.mark.timing
    def test_links_have_about_the_rate_that_was_asked_for(self, cluster: EmulatedCluster) -> None:
        assert all(20e6 < rate < 105e6 for rate in cluster.rates)

    def test_both_directions_are_shaped(self, cluster: EmulatedCluster) -> None:
        """Two senders to one host share its link: only the receiving side's shaper can hold them to that."""
        assert _rate_from(cluster, [1], 0, 2_000_000) < 120e6
        assert _rate_from(cluster, [1, 2], 0, 2_000_000) < 120e6

    def test_set_rate_takes_effect(self, cluster: EmulatedCluster) -> None:
        cluster.set_rate(1, "20mbit")
        try:
            assert _rate_from(cluster, [0], 1, 500_000) < 24e6
        finally:
            cluster.set_rate(1, "100mbit")

    def test_a_host_has_a_name_that_leads_to_it(self, cluster: EmulatedCluster) -> None:
        before = socket.gethostname()
        code = "import socket; name = socket.gethostname(); print(name, socket.gethostbyname(name))"
        for result in cluster.run(_python(code), timeout=30):
            address = cluster.address(result.rank)
            assert result.output.split() == [address, address]
        assert socket.gethostname() == before

    def test_run_gives_each_host_its_environment(self, cluster: EmulatedCluster) -> None:
        names = [
            "MASTER_ADDR",
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GLOO_SOCKET_IFNAME",
            "OMP_NUM_THREADS",
            "EXTRA",
        ]
        code = f"import os; print(*[os.environ[name] for name in {names}])"
        lines: list[tuple[int, str]] = []
        results = cluster.run(_python(code), env={"EXTRA": "7"}, timeout=30, on_line=lambda *line: lines.append(line))
        expected = [f"10.77.0.1 {rank} 3 0 1 eth0 1 7" for rank in range(3)]
        assert [result.output.strip() for result in results] == expected
        assert [(result.rank, result.returncode) for result in results] == [(0, 0), (1, 0), (2, 0)]
        assert sorted(lines) == list(enumerate(expected))

    def test_each_host_runs_on_its_share_of_the_processors(self, cluster: EmulatedCluster) -> None:
        code = "import os; print(sorted(os.sched_getaffinity(0)))"
        results = cluster.run(_python(code), timeout=30)
        assert [result.output.strip() for result in results] == [str(cluster.processors(rank)) for rank in range(3)]

    def test_each_run_has_its_own_port(self, cluster: EmulatedCluster) -> None:
        code = _python("import os; print(os.environ['MASTER_PORT'])")
        ports = [{result.output for result in cluster.run(code, timeout=30)} for _ in range(2)]
        assert len(ports[0]) == len(ports[1]) == 1
        assert ports[0] != ports[1]

    def test_counters_follow_a_transfer(self, cluster: EmulatedCluster) -> None:
        before = [cluster.counters(rank) for rank in range(3)]
        with linkprobe.connected_pair(cluster._hosts[0], cluster._hosts[1], cluster.address(1)) as (client, peer):
            client.sendall(bytes(100_000))
            received = sum(len(peer.recv(10_000)) for _ in range(5))
            while received < 100_000:
                received += len(peer.recv(100_000))
        sent, got, other = (cluster.counters(rank) - before[rank] for rank in range(3))
        assert 100_000 < sent.tx_bytes < 110_000
        assert 100_000 < got.rx_bytes < 110_000
        assert other.tx_bytes < 2_000
        assert sent.tx_dropped == got.rx_dropped == 0

    def test_a_failing_host_ends_the_others(self, cluster: EmulatedCluster) -> None:
        code = "import os, time; print('step 3', flush=True); os.environ['RANK'] == '1' and exit(5); time.sleep(3600)"
        with pytest.raises(PeerFailure, match=r"(?s)host 1 failed with exit code 5.*last lines of host 1:\n    step 3"):
            cluster.run(_python(code), timeout=LIMIT_S)
        assert all(host.pids() == [] for host in cluster._hosts)

    def test_a_timeout_names_who_still_ran(self, cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[int] = []
        ended: set[int] = set()
        poll = hostrun.HostProcess.poll

        def noted(process: hostrun.HostProcess) -> int | None:
            if (code := poll(process)) is not None:
                ended.add(process.rank)
            return code

        def is_late() -> bool:
            return len(said) == 3 and ended == {0, 1}

        monkeypatch.setattr(hostrun.HostProcess, "poll", noted)
        monkeypatch.setattr(hostrun, "time", Alarm(is_late))
        code = "import os, time; print('waiting', flush=True); time.sleep(3600 * (os.environ['RANK'] == '2'))"
        with pytest.raises(
            PeerTimeout, match=r"(?s)1 of 3 hosts \(rank 2\) still ran after 1.5 s.*host 2:\n    waiting"
        ):
            cluster.run(_python(code), timeout=1.5, on_line=lambda rank, line: said.append(rank))
        assert all(host.pids() == [] for host in cluster._hosts)

    def test_processes_that_ignore_sigterm_and_leave_the_session_are_ended(
        self, cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, said = "trap '' TERM; setsid sleep 3600 & echo up; sleep 3600", []
        monkeypatch.setattr(hostrun, "time", Alarm(lambda: len(said) == 3))
        with pytest.raises(PeerTimeout):
            cluster.run(["/bin/sh", "-c", code], timeout=0.3, on_line=lambda rank, line: said.append(rank))
        assert all(host.pids() == [] for host in cluster._hosts)

    def test_stop_cont_and_kill(self, cluster: EmulatedCluster) -> None:
        code = "import time\nfor count in range(10000): print(count, flush=True); time.sleep(0.01)"
        process = cluster.popen(1, _python(code))
        assert eventually(lambda: len(process.output) > 10)
        assert cluster.stop(1) == 1
        assert eventually(lambda: _states(cluster._hosts[1]) == {"T"})
        assert _states(cluster._hosts[0]) == set()
        assert process.poll() is None
        before = process.output
        cluster.cont(1)
        assert eventually(lambda: _states(cluster._hosts[1]) <= set("RSD"))
        assert eventually(lambda: len(process.output) > len(before) + 100)  # more than was on its way
        with pytest.raises(PeerTimeout, match="host 1 still runs"):
            process.wait(0.05)
        cluster.kill(1)
        assert process.wait(LIMIT_S).returncode == -signal.SIGKILL

    def test_rank_out_of_range(self, cluster: EmulatedCluster) -> None:
        with pytest.raises(ConfigError, match="hosts 0 to 2, got rank 3"):
            cluster.address(3)

    def test_gloo_all_reduce(self, cluster: EmulatedCluster) -> None:
        code = (
            "import torch, torch.distributed as dist; dist.init_process_group('gloo');"
            "x = torch.ones(10) * dist.get_rank(); dist.all_reduce(x); print(x[0].item()); dist.destroy_process_group()"
        )
        results = cluster.run(_python(code), timeout=50)
        assert [result.output.split()[-1] for result in results] == ["3.0"] * 3


# -- nothing is left --------------------------------------------------------------------------------------------------

# The package is entered without its __init__, which imports torch: that takes seconds, and these tests do not need it.
_HOLD = """
import os, sys, time, types, warnings
package = sys.modules["commlib"] = types.ModuleType("commlib")
package.__path__ = [{path!r}]
warnings.simplefilter("ignore")
from commlib.emulation import EmulatedCluster
with EmulatedCluster(hosts=2, rate="1gbit") as cluster:
    cluster.popen(0, ["sleep", "300"])
    print("ready", flush=True)
    sys.stdin.readline()
    {then}
"""


class _Holder:
    """Another process with a cluster and a process on its host 0. It goes on to `then` when told to."""

    def __init__(self, then: str = "time.sleep(300)") -> None:
        command = _python(_HOLD.format(path=str(_ROOT / "commlib"), then=then))
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        owned = netns.owned_namespaces()
        self.namespaces = [namespace for owner, namespace in owned if owner.pid == self.process.pid]
        host = next(namespace for namespace in self.namespaces if namespace.name.endswith("host0"))
        assert eventually(lambda: len(host.pids()) == 1)
        self.pid_on_host = host.pids()[0]

    def close(self) -> None:
        """Kill it; does nothing when it has ended."""
        self.process.kill()
        self.process.communicate()

    def has_left_nothing(self) -> bool:
        """Whether its namespaces, and the process on its host, are gone."""
        left = any(os.path.exists(namespace.path) for namespace in self.namespaces)
        return not left and netns._start_time(self.pid_on_host) is None


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number: int) -> None:
    with contextlib.closing(_Holder()) as holder:
        assert len(holder.namespaces) == 3
        holder.process.send_signal(number)
        holder.process.wait(LIMIT_S)
        assert eventually(holder.has_left_nothing)


@needs_hosts
@pytest.mark.parametrize("then", ["raise ValueError('x')", "os._exit(1)", "pass"])
def test_nothing_is_left_after_an_exit(then: str) -> None:
    with contextlib.closing(_Holder(then)) as holder:
        holder.process.communicate(b"go on\n", timeout=LIMIT_S)
        assert eventually(holder.has_left_nothing)


@needs_hosts
@pytest.mark.filterwarnings(_MISS)
def test_leftovers_of_a_dead_run_are_swept_and_a_live_run_is_spared() -> None:
    dead = subprocess.Popen(["sleep", "300"])
    start = netns._start_time(dead.pid)
    assert start is not None
    left = netns.Namespace(netns.Owner(dead.pid, start).name("0-host0"))
    left.create()
    stray = subprocess.Popen(left.wrap(["sleep", "300"]))
    try:
        assert left.name not in netns.sweep_stale()  # its owner lives
        assert eventually(lambda: left.pids() == [stray.pid])
        dead.kill()
        dead.wait()
        with contextlib.closing(_Holder()) as holder:  # a new run removes it, and another run does not harm that one
            assert not os.path.exists(left.path)
            assert stray.wait(LIMIT_S) == -signal.SIGKILL
            with EmulatedCluster(hosts=2, rate="1gbit"):
                pass
            assert all(os.path.exists(namespace.path) for namespace in holder.namespaces)
            assert netns._start_time(holder.pid_on_host) is not None
    finally:
        dead.kill()
        stray.kill()
        left.delete()


@needs_hosts
def test_a_reused_process_id_is_not_taken_for_the_owner() -> None:
    own = netns.Owner.current()
    assert own.is_alive()
    assert not netns.Owner(own.pid, own.start - 1).is_alive()


@needs_hosts
def test_nothing_is_left_when_building_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    before = _own_names()
    monkeypatch.setattr(Link, "shape", fail)
    with pytest.raises(KeyboardInterrupt), EmulatedCluster(hosts=2, rate="1gbit"):
        pass
    assert _own_names() == before
