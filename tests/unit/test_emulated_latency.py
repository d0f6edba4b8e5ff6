"""Latency of emulated hosts: packets have the requested delay, none is lost, and a dead forwarder is an error."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commlib.emulation import EmulatedCluster, forwarder, latency, linkprobe, netns
from commlib.emulation.hostrun import HostProcess
from commlib.emulation.links import OFF_LATENCY, OFF_RATE
from commlib.errors import ConfigError, TransportError
from tests.loopback import MISSING
from tests.waiting import ENDLESS_S, LIMIT_S, eventually

_MISSING = MISSING or latency.check_latency()
needs_latency = pytest.mark.skipif(bool(_MISSING), reason="emulated latency needs " + "; ".join(_MISSING))
_ROOT = Path(__file__).parents[2]
# This machine may be busy with other tests; the assertions here have their own limits.
pytestmark = pytest.mark.filterwarnings(f"ignore:{OFF_RATE}:UserWarning", f"ignore:{OFF_LATENCY}:UserWarning")


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(hosts=2, rate="200mbit", latency_us=1000) as made:
        yield made


def _in_order(pair: tuple[socket.socket, socket.socket], count: int) -> bool:
    """Send numbered datagrams and tell whether all came, in order."""
    sender, receiver = pair
    for number in range(count):
        sender.send(number.to_bytes(4, "big"))
    return [int.from_bytes(receiver.recv(4), "big") for _ in range(count)] == list(range(count))


@needs_latency
class TestLatency:
    """Behaviour of a running cluster, which all tests share."""

    @pytest.mark.parametrize("latency_us", [1000.0, 5000.0, 20_000.0])
    def test_a_round_trip_takes_at_least_twice_the_latency(self, cluster: EmulatedCluster, latency_us: float) -> None:
        cluster.set_latency(latency_us)
        cluster.calibrate()
        # A packet is never early by more than calibration subtracts; it may be late on a busy machine.
        assert cluster.latency_s >= 2e-6 * (latency_us - cluster._lateness_us)
        assert f"{2 * latency_us:.0f} us added" in str(cluster)
        assert cluster.latency_us == latency_us

    @pytest.mark.timing
    def test_a_round_trip_takes_little_more_than_twice_the_latency(self, cluster: EmulatedCluster) -> None:
        cluster.set_latency(20_000)
        cluster.calibrate()
        assert cluster.latency_s < 0.04 * 1.2

    def test_a_measurement_of_the_rate_makes_room_for_what_is_under_way(
        self, cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send, receive, room = linkprobe._send_for, linkprobe._receive, []

        def sends(client: socket.socket, duration_s: float) -> None:
            room.append(client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
            send(client, duration_s)

        def receives(peer: socket.socket, warmup_s: float) -> float:
            room.append(peer.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
            return receive(peer, warmup_s)

        monkeypatch.setattr(linkprobe, "_send_for", sends)
        monkeypatch.setattr(linkprobe, "_receive", receives)
        cluster.set_latency(20_000)
        cluster._measure_link(0)
        under_way = int(0.04 * 200e6 / 8)
        assert min(room) >= 2 * under_way  # the kernel keeps half of it for itself

    def test_nothing_is_lost_or_sent_again(self, cluster: EmulatedCluster) -> None:
        cluster.set_latency(2000)
        before = [cluster.counters(rank) for rank in range(2)]
        of_tcp = [tcp_counters(host) for host in cluster._hosts]
        linkprobe.measure_goodput(cluster._hosts[0], cluster._hosts[1], cluster.address(1), 1.0, 1 << 20)
        counted = [cluster.counters(rank) - before[rank] for rank in range(2)]
        assert counted[1].rx_bytes > 1e6
        assert all(each.tx_dropped == each.rx_dropped == 0 for each in counted)
        for host, earlier in zip(cluster._hosts, of_tcp, strict=True):
            fields = host_queue(host)
            assert fields["dropped"] == fields["user_dropped"] == 0
            tcp = {name: value - earlier[name] for name, value in tcp_counters(host).items()}
            # A busy machine makes acknowledgements late, with and without latency: TCP then probes for a lost tail.
            assert tcp["RetransSegs"] <= tcp["TCPLossProbes"]
            assert tcp["TCPTimeouts"] == tcp["TCPFastRetrans"] == tcp["TCPLossUndo"] == 0

    def test_packets_stay_in_order_when_the_latency_falls(self, cluster: EmulatedCluster) -> None:
        receiver = linkprobe.in_namespace(cluster._hosts[1], _datagrams)
        sender = linkprobe.in_namespace(cluster._hosts[0], _datagrams)
        with receiver, sender:
            receiver.settimeout(LIMIT_S)
            receiver.bind((cluster.address(1), 0))
            sender.connect(receiver.getsockname())
            cluster.set_latency(300_000)
            begin_s, before = time.monotonic(), host_queue(cluster._hosts[1])["last"]
            sender.send(b"a")
            assert eventually(lambda: host_queue(cluster._hosts[1])["last"] > before), "it is not in the queue"
            cluster.set_latency(0)
            sender.send(b"b")
            assert [receiver.recv(4), receiver.recv(4)] == [b"a", b"b"]
            assert time.monotonic() - begin_s > 0.25
            assert _in_order((sender, receiver), 200)

    def test_gloo_runs(self, cluster: EmulatedCluster) -> None:
        cluster.set_latency(20_000)
        code = (
            "import time, torch, torch.distributed as dist; dist.init_process_group('gloo'); x = torch.ones(10);"
            "dist.all_reduce(x); begin = time.monotonic(); dist.all_reduce(x);"
            "print(x[0].item(), time.monotonic() - begin);"
            "dist.barrier(); dist.destroy_process_group()"
        )
        for result in cluster.run(_python(code), timeout=60):
            value, elapsed_s = map(float, result.output.split()[-2:])
            assert value == 4.0
            assert elapsed_s > 0.035


@pytest.mark.slow
@needs_latency
def test_the_benchmark_times_collectives_with_latency(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--hosts", "2", "--latencies-us", "2000", "--sizes", "4,65536", "--reps", "2", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "benchmarks/latency.py", *options],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["rows"]
    assert [row["latency_us"] for row in found] == [0.0] * (len(found) // 2) + [2000.0] * (len(found) // 2)
    assert all(row["predicted_s"] is None for row in found if row["latency_us"] == 0)
    rows = {(row["verb"], row["bytes"]): row for row in found if row["latency_us"]}
    verbs = ["all_reduce", "all_gather", "all_to_all", "broadcast", "exchange"]
    assert list(rows) == [("barrier", 0), *((verb, nbytes) for verb in verbs for nbytes in (4, 65536))]
    for (verb, nbytes), row in rows.items():
        assert (row["hosts"], row["rate"], row["latency_us"], len(row["times_s"])) == (2, "1gbit", 2000.0, 2)
        assert row["seconds"] >= 1.8e-3  # one way at least
        assert row["predicted_s"] is None if verb == "barrier" else row["predicted_s"] > 0
        assert f"{verb} " in done.stdout
        assert f"{nbytes:,} " in done.stdout
    assert rows["all_reduce", 4]["seconds"] >= 3.6e-3  # there and back


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def tcp_counters(host: netns.Namespace) -> dict[str, int]:
    """The counters of a host's TCP."""
    words = host.wrap(["cat", "/proc/net/snmp", "/proc/net/netstat"])
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, int] = {}
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        found |= zip(names.split()[1:], map(int, values.split()[1:]), strict=True)
    return found


def host_queue(host: netns.Namespace) -> dict[str, int]:
    """The kernel's counters of a host's packet queue."""
    text = subprocess.run(
        host.wrap(["cat", "/proc/net/netfilter/nfnetlink_queue"]), capture_output=True, text=True, check=True
    ).stdout
    names = ("queue", "port", "waiting", "mode", "range", "dropped", "user_dropped", "last", "one")
    return dict(zip(names, map(int, text.split()), strict=True))


# -- what calibration makes of measurements ---------------------------------------------------------------------------


class _Delays(list[float]):
    """Stands in for the forwarder; notes the delays that are asked for, in microseconds."""

    set = list.append

    def check(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("measured_us", "found_us", "delays_us"),
    [
        ([8060], 8060, []),
        ([8400], 8400, [3830, 3750]),
        ([8260, 8070], 8070, [3900]),  # 100 us late, each way
        ([9215, 8100], 8100, []),  # other work on the machine, for a while
        ([9215, 9400, 11_000, 8100], 8100, []),
        ([8500, 9215, 9215, 9215], 8500, [3780, 3750]),
        ([9215], 9215, [3750, 3750]),  # all the time: not all of it is corrected
        ([7000], 7000, [4250, 4250]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_what_was_measured_is_corrected_or_warned_of(
    monkeypatch: pytest.MonkeyPatch, measured_us: list[int], found_us: int, delays_us: list[int]
) -> None:
    """4 ms are asked for each way, and a round trip of this machine's own takes 60 us: 8,060 us, give or take 5 %."""
    monkeypatch.setattr("commlib.emulation.cluster.check_requirements", list)
    monkeypatch.setattr("commlib.emulation.cluster.check_latency", list)
    cluster, delays = EmulatedCluster(hosts=2, latency_us=4000), _Delays()
    numbers = itertools.cycle(measured_us)
    monkeypatch.setattr(cluster, "_own_rtt_s", 60e-6)
    monkeypatch.setattr(cluster, "_forwarder", delays)
    monkeypatch.setattr(cluster, "_measure_rtt", lambda rounds: 1e-6 * next(numbers))
    monkeypatch.setattr(cluster, "_measure_rates", lambda: None)
    is_asked = abs(found_us - 8060) <= 403
    with contextlib.nullcontext() if is_asked else pytest.warns(UserWarning, match="round-trip time does not match"):
        cluster.calibrate()
    assert cluster.latency_s == pytest.approx(1e-6 * found_us)
    assert cluster.is_calibrated == is_asked
    assert delays == pytest.approx(delays_us)


# -- a dead forwarder -------------------------------------------------------------------------------------------------


@needs_latency
@pytest.mark.parametrize("wait", ["run", "popen"])
def test_a_killed_forwarder_is_named_while_the_hosts_still_run(wait: str) -> None:
    with EmulatedCluster(hosts=2, latency_us=500) as cluster:
        assert cluster._forwarder is not None
        pid = cluster._forwarder.pid
        started = threading_start(cluster, wait)
        with pytest.raises(TransportError, match=rf"forwarder .*\(process {pid}\) was ended by signal 9"):
            started()
        with pytest.raises(TransportError, match=rf"process {pid}"):
            cluster.set_latency(100)


def threading_start(cluster: EmulatedCluster, wait: str) -> Callable[[], object]:
    """Return what starts a command that would last for an hour, kills the forwarder meanwhile, and waits."""
    assert cluster._forwarder is not None
    pid, lines = cluster._forwarder.pid, []

    def on_line(rank: int, line: str) -> None:
        lines.append(rank)
        if len(lines) == 2 or wait == "popen":
            os.kill(pid, signal.SIGKILL)

    code = _python(f"import time; print('up', flush=True); time.sleep({ENDLESS_S})")
    if wait == "run":
        return lambda: cluster.run(code, timeout=LIMIT_S, on_line=on_line)

    def one() -> object:
        process: HostProcess = cluster.popen(0, code, on_line=on_line)
        return process.wait(LIMIT_S)

    return one


@needs_latency
def test_a_dead_forwarder_fails_the_calibration_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmulatedCluster(hosts=2, latency_us=500) as cluster:
        monkeypatch.setattr(linkprobe, "_TIMEOUT_S", 1.0)
        assert cluster._forwarder is not None
        os.kill(cluster._forwarder.pid, signal.SIGKILL)
        with pytest.raises(TransportError, match="the forwarder that delays the packets"):
            cluster.calibrate()


@pytest.mark.parametrize(("code", "said"), [(errno.ENOBUFS, "lost .ENOBUFS"), (errno.EPROTO, "not what was expected")])
def test_a_forwarder_that_may_have_lost_packets_ends(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    class Receiver:
        def recv_into(self, buffer: bytearray) -> int:
            raise OSError(code, "not what was expected")

    queue = object.__new__(forwarder._Queue)
    monkeypatch.setattr(queue, "socket", Receiver(), raising=False)
    monkeypatch.setattr(queue, "_buffer", bytearray(64), raising=False)
    monkeypatch.setattr(forwarder, "_forward", lambda queues: queues[0].take(0.0))
    monkeypatch.setattr(forwarder, "_Queue", lambda name: queue)
    monkeypatch.setattr(forwarder.os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(forwarder.gc, "disable", lambda: None)
    monkeypatch.setattr(sys, "argv", ["forwarder.py", "host"])
    with pytest.raises(SystemExit, match=said):
        forwarder.main()


# -- missing requirements ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency_us", [-1.0, float("nan"), float("inf"), 1e9])
def test_wrong_latencies(latency_us: float) -> None:
    with pytest.raises(ConfigError, match="latency_us must be 0 to 10000000 microseconds"):
        EmulatedCluster(hosts=2, latency_us=latency_us)


def test_without_iptables_only_latency_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlib.emulation.cluster.check_requirements", list)
    monkeypatch.setattr(latency.shutil, "which", lambda tool: None if "iptables" in tool else f"/sbin/{tool}")
    EmulatedCluster(hosts=2)
    with pytest.raises(ConfigError, match=r"cannot emulate latency; missing: .*`iptables`.*apt-get install iptables"):
        EmulatedCluster(hosts=2, latency_us=1)


@needs_latency
@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (("_RULE", ("-t", "mangle", "-A", "PREROUTING", "-j", "NOSUCH")), r"NFQUEUE \(`iptables -t mangle .*NOSUCH"),
        (("_FORWARDER", "/nowhere/forwarder.py"), r"forwarder cannot start.*exit code 2.*/nowhere/forwarder.py"),
    ],
)
def test_what_the_kernel_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, patch: tuple[str, object], expected: str
) -> None:
    monkeypatch.setattr(latency, *patch)
    (missing,) = latency.check_latency()
    assert re.search(expected, missing)


@needs_latency
def test_without_the_right_to_run_first_there_is_no_latency() -> None:
    """CAP_SYS_NICE is what SCHED_FIFO takes."""
    code = "import commlib.emulation.latency as l; print(l.check_latency())"
    drop = ["setpriv", "--bounding-set", "-sys_nice", "--inh-caps", "-sys_nice"]
    done = subprocess.run([*drop, *_python(code)], capture_output=True, text=True, cwd=_ROOT, check=True)
    assert "SCHED_FIFO" in done.stdout
    assert "CAP_SYS_NICE" in done.stdout


# -- nothing is left --------------------------------------------------------------------------------------------------

_HOLD = """
import sys, time, types, warnings
package = sys.modules["commlib"] = types.ModuleType("commlib")
package.__path__ = [{path!r}]
warnings.simplefilter("ignore")
from commlib.emulation import EmulatedCluster, netns
with EmulatedCluster(hosts=2, latency_us=1000) as cluster, netns.temporary_folder() as folder:
    print(cluster._forwarder.pid, cluster._reaper.pid, folder, flush=True)
    time.sleep(300)
"""


def hold() -> types.SimpleNamespace:
    """Start another process with a cluster and a temporary folder."""
    command = _python(_HOLD.format(path=str(_ROOT / "commlib")))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    forwarder, reaper, folder = process.stdout.readline().split()
    return types.SimpleNamespace(process=process, forwarder=int(forwarder), reaper=int(reaper), folder=Path(folder))


def _names_of(pid: int) -> list[str]:
    return [namespace.name for owner, namespace in netns.owned_namespaces() if owner.pid == pid]


@needs_latency
def test_a_killed_owner_leaves_no_forwarder_and_its_folder_goes_with_the_next_cluster() -> None:
    held = hold()
    try:
        assert held.folder.is_dir()
        held.process.kill()
        held.process.wait(LIMIT_S)
        assert eventually(lambda: not _names_of(held.process.pid) and netns._start_time(held.forwarder) is None)
        with EmulatedCluster(hosts=2):
            assert not held.folder.exists()
    finally:
        held.process.kill()
        held.process.communicate()


@needs_latency
def test_what_an_owner_leaves_that_was_killed_with_its_reaper_goes_with_the_next_cluster() -> None:
    held = hold()
    try:
        os.kill(held.reaper, signal.SIGKILL)
        os.kill(held.forwarder, signal.SIGSTOP)  # it cannot see that its owner is gone
        held.process.kill()
        held.process.wait(LIMIT_S)
        assert _names_of(held.process.pid)
        assert netns._start_time(held.forwarder) is not None
        with EmulatedCluster(hosts=2, latency_us=200):
            assert not _names_of(held.process.pid)
            assert eventually(lambda: netns._start_time(held.forwarder) is None)
            assert not held.folder.exists()
    finally:
        held.process.kill()
        held.process.communicate()


def test_a_folder_of_a_live_process_is_spared() -> None:
    with netns.temporary_folder() as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())
        netns._sweep_folders()
        assert Path(folder).is_dir()
