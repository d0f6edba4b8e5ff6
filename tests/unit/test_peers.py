"""`commlib doctor --peers`: its measurements between ranks that are threads, its warnings, and emulated hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from commlib import cli
from commlib.emulation import EmulatedCluster
from commlib.errors import ConfigError, PeerFailure, PeerTimeout, TransportError
from commlib.peers import job, links, report
from commlib.peers.facts import Rank
from commlib.peers.links import Link
from commlib.transport import addresses
from commlib.transport.addresses import interface_towards
from commlib.transport.connections import connect_all
from tests.loopback import MISSING
from tests.waiting import LIMIT_S

needs_hosts = pytest.mark.skipif(bool(MISSING), reason="emulated hosts need " + "; ".join(MISSING))
_COMMAND = [sys.executable, "-m", "commlib", "doctor", "--peers", "--json"]


def rank(number: int, **changes: object) -> Rank:
    """A rank without any problem, on a host of its own."""
    address, name = f"10.0.0.{number + 1}", f"host{number}"
    versions = {"commlib": "1", "torch": "2", "Python": "3"}
    return Rank(number, name, f"{name}/0", f"boot{number}.1.1", address, "", address, {}, versions)._replace(**changes)


def link(first: int, second: int, mbps: float = 900.0, **changes: object) -> Link:
    """A fast connection between two hosts."""
    addresses = (f"10.0.0.{first + 1}", f"10.0.0.{second + 1}")
    return Link((first, second), addresses, ("eth0", "eth0"), 100.0, (mbps, 950.0))._replace(**changes)


def all_links(size: int, slow: Callable[[int, int], bool] = lambda first, second: False) -> list[Link]:
    return [link(*pair, mbps=90.0 if slow(*pair) else 900.0) for pair in links.pairs(size)]


# -- measurements -----------------------------------------------------------------------------------------------------


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "seconds_per_pair", lambda num_pairs: 0.02)


def on_threads(size: int, call: Callable[[dist.Store, int], object]) -> list[object]:
    """Return the results of the ranks, or the errors that they raised."""

    def caught(number: int) -> object:
        try:
            return call(store, number)
        except TransportError as error:
            return error

    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return [future.result(LIMIT_S) for future in [pool.submit(caught, number) for number in range(size)]]


def test_every_pair_is_measured(briefly):
    results = on_threads(3, lambda store, number: job.meet_and_measure(store, number, 3, LIMIT_S))
    ranks, found = results[0]
    assert results[1:] == [None, None]
    assert [each.rank for each in ranks] == [0, 1, 2]
    assert [each.ranks for each in found] == [(0, 1), (0, 2), (1, 2)]
    assert {name for each in found for name in each.interfaces} == {"lo"}
    assert all(each.rtt_us > 0 and min(each.mbps) > 0 for each in found)
    assert report.warnings(ranks, found) == []
    assert json.loads(report.to_json(ranks, found))["links"][2]["ranks"] == [1, 2]


def test_a_rank_that_does_not_arrive_is_named():
    with pytest.raises(PeerTimeout, match=r"^rank 0 of 2: not all ranks arrived within 0.2 s: .*rank 1 wrote nothing"):
        job.meet_and_measure(dist.HashStore(), 0, 2, 0.2)


def test_a_rank_with_other_facts_is_named():
    def call(store: dist.Store, number: int) -> object:
        if number == 0:
            return job.meet_and_measure(store, 0, 2, LIMIT_S)
        return job._Introduction(store, 1, 2, LIMIT_S).gather_objects([1])

    error, _ = on_threads(2, call)
    assert str(error) == "rank 0 of 2: another version of commlib on rank 1"


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_rank_that_does_not_answer_is_named_on_all_others(briefly, monkeypatch, has_ended):
    monkeypatch.setattr(job, "pairs", lambda size: [(0, 1), (1, 2)])
    is_over = threading.Event()

    def call(store: dist.Store, number: int) -> object:
        if number == 2:
            introduction = job._Introduction(store, 2, 3, LIMIT_S)
            introduction.gather_objects(rank(2))
            made, accepted = connect_all(introduction)
            if not has_ended:
                is_over.wait(LIMIT_S)
            for connection in (*made.values(), *accepted.values()):
                connection.close()
            return None
        try:
            return job.meet_and_measure(store, number, 3, LIMIT_S if has_ended else 1.0)
        finally:
            is_over.set()

    first, second, _ = on_threads(3, call)
    if has_ended:  # rank 0 may notice first, as it tells every rank which pair is measured
        assert isinstance(first, PeerFailure)
        assert "rank 2 ended while" in str(first)
    else:
        assert isinstance(first, PeerTimeout)
        expected = "rank 1: no answer from rank 2 within 1 s while the connection of ranks 1 and 2 is measured"
        assert str(first) == expected
    assert str(second) == f"rank 1 of 3: rank 0 reports: {first}"


def test_the_number_of_pairs_is_bounded():
    assert len(links.pairs(12)) == 66
    assert links.pairs(13) == [*((each, each + 1) for each in range(12)), (0, 12)]
    assert all(links.seconds_per_pair(count) * count <= 30 for count in (1, 66, 5000))


def test_the_interface_of_a_route():
    assert interface_towards("127.0.0.1") == "lo"


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "KeyError: 'RANK'"),
        ({"RANK": "x"}, "ValueError: invalid literal"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "got WORLD_SIZE=1"),
    ],
)
def test_a_process_without_peers_is_refused(environment, why):
    with pytest.raises(ConfigError, match=why):
        job.survey(environment, 1.0)


def test_a_store_that_cannot_be_reached_is_named():
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    with pytest.raises(TransportError, match=r"^rank 1 of 2: the store of rank 0 at 127.0.0.1:9 .* reached: .*$"):
        job.survey(environment, 0.2)


def test_options_of_the_command(monkeypatch):
    def survey(environment, timeout_s):
        raise PeerTimeout(f"waited {timeout_s:g} s")

    monkeypatch.setattr(job, "survey", survey)
    result = CliRunner().invoke(cli.app, ["doctor", "--peers"])
    assert (result.exit_code, result.output) == (1, "Error: waited 60 s\n")
    assert CliRunner().invoke(cli.app, ["doctor", "--timeout", "3"]).exit_code == 2
    monkeypatch.setattr(job, "survey", lambda environment, timeout_s: ([rank(0), rank(1)], [link(0, 1)]))
    shown = CliRunner().invoke(cli.app, ["doctor", "--peers"], env={"COLUMNS": "100"}).output
    assert "0 eth0 10.0.0.1 - 1 eth0 10.0.0.2            100     900   950" in shown
    assert "no problem was found" in shown
    assert json.loads(CliRunner().invoke(cli.app, ["doctor", "--peers", "--json"]).output)["warnings"] == []


# -- warnings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"versions": {"commlib": "1", "torch": "3", "Python": "3"}}, "different versions of torch: 2 on rank 0, 3 on"),
        ({"place": "boot0.1.1"}, "ranks [0, 1] share one host and its loopback, but count as 2 nodes: host0/0"),
        ({"node": "host0/0"}, "ranks [0, 1] are on different hosts, but count as one node: host0/0"),
        ({"place": "boot0.2.1"}, "ranks [0, 1] are in different containers of one machine"),
        ({"gloo_address": "127.0.1.1"}, "rank 1: Gloo uses the loopback address 127.0.1.1 (the host name"),
        ({"gloo_address": ""}, "rank 1: the host name host1 does not resolve"),
        ({"gloo_address": "", "gloo_interface": "eth7"}, "rank 1: GLOO_SOCKET_IFNAME=eth7, but its host has no such"),
        ({"gloo_address": "10.9.0.1"}, "rank 1: Gloo uses 10.9.0.1, but commlib uses 10.0.0.2"),
        ({"gloo_address": "fd00::2", "address": "fd00::2"}, "Gloo uses IPv4 on rank 0, IPv6 on rank 1"),
    ],
)  # fmt: skip
def test_warnings_about_ranks(changes, expected):
    assert report.warnings([rank(0), rank(1)], [link(0, 1)]) == []
    (found,) = report.warnings([rank(0), rank(1, **changes)], [link(0, 1)])
    assert found.startswith(expected)


def test_a_missing_interface_is_logged_once(monkeypatch, caplog):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch7,lo")
    addresses._warn_of_missing.cache_clear()
    expected = addresses._default_address(None)
    assert [addresses.local_address(None) for _ in range(2)] == [expected] * 2
    (line,) = caplog.messages
    assert line.startswith("GLOO_SOCKET_IFNAME=nosuch7: this host has no such interface with an IPv4 address")
    assert f"so commlib uses {expected}; " in line
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert addresses.local_address(None) == "127.0.0.1"
    assert len(caplog.messages) == 1


def test_ranks_of_one_host_need_no_address_that_others_reach():
    ranks = [rank(number, place="boot.1.1", node="vm/0", gloo_address="127.0.1.1") for number in range(2)]
    assert report.warnings(ranks, [link(0, 1, mbps=1.0, interfaces=("lo", "lo"))]) == []


def test_a_slow_pair_is_named():
    ranks = [rank(number) for number in range(4)]
    assert report.warnings(ranks, all_links(4)) == []
    found = report.warnings(ranks, all_links(4, lambda first, second: (first, second) == (1, 3)))
    assert found == ["ranks 1 and 3: slow, 90 Mbit/s; others reach 900"]


def test_a_slow_rank_is_named_once():
    found = report.warnings([rank(number) for number in range(4)], all_links(4, lambda first, second: second == 3))
    assert found == [
        "rank 3: slow in every measured connection to other hosts, 90 Mbit/s at most; others reach 900",
    ]


def test_an_interface_that_is_faster_than_its_connections():
    ranks = [rank(number, speeds={"eth0": speed}) for number, speed in ((0, 2500), (1, 100_000))]
    (found,) = report.warnings(ranks, [link(0, 1)])
    assert found == "ranks 0 and 1: 900 Mbit/s over interfaces of 2500 Mbit/s"
    assert report.warnings([rank(0), ranks[1]], [link(0, 1)]) == []


def test_a_bridge_of_docker_is_named():
    (found,) = report.warnings([rank(0), rank(1)], [link(0, 1, interfaces=("docker0", "eth0"))])
    assert found.startswith("ranks 0 and 1: rank 0 talks over Docker's bridge (docker0, 10.0.0.1)")


# -- emulated hosts ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(hosts=4) as hosts:
        yield hosts


def warned(cluster: EmulatedCluster) -> list[str]:
    """Return the warnings of the command on the hosts, except that they share a machine."""
    first = cluster.run(_COMMAND, timeout=LIMIT_S)[0].output
    found = json.loads(first[first.index("{") :])
    assert {name for each in found["links"] for name in each["interfaces"]} == {"eth0"}
    return [each for each in found["warnings"] if "containers of one machine" not in each]


@pytest.mark.slow
@needs_hosts
def test_a_slow_host_is_named(cluster):
    for number in range(4):
        cluster.set_rate(number, "10mbit" if number == 2 else "100mbit")
    (found,) = warned(cluster)
    assert found.startswith("rank 2: slow in every measured connection to other hosts")


@pytest.mark.slow
@needs_hosts
def test_one_slow_connection_between_hosts_is_named(cluster):
    for number in range(4):
        cluster.set_rate(number, "100mbit")
    host = cluster._hosts[1]
    for words in (
        "qdisc replace dev eth0 root handle 1: htb default 1",
        "class add dev eth0 parent 1: classid 1:1 htb rate 100mbit quantum 20000",
        "class add dev eth0 parent 1: classid 1:2 htb rate 100mbit quantum 20000",
        "qdisc add dev eth0 parent 1:2 tbf rate 10mbit burst 20000b limit 1000000b",
        f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {cluster.address(3)}/32 flowid 1:2",
    ):
        done = subprocess.run(["tc", "-n", host.name, *words.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this kernel cannot shape one connection: tc {words}: {done.stderr.strip()}")
    (found,) = warned(cluster)
    assert found.startswith("ranks 1 and 3: slow, ")
