"""Ranks started by hand on two hosts (docs/how-to/clusters.md): which ports and which interface they use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commlib.emulation.netns import Namespace, Owner
from tests.loopback import MISSING

ROOT = Path(__file__).parents[2]
_ABSENT = [*MISSING, *([] if shutil.which("iptables") else ["`iptables`"])]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_ABSENT), reason="two hosts with a firewall need " + "; ".join(_ABSENT)),
]
_MASTER_PORT, _FIRST_PORT, _LAST_PORT = 29500, 40000, 40999


@pytest.fixture
def hosts() -> Iterator[list[Namespace]]:
    """Two hosts with two links: eth0, 10.88.0.1 and .2, and eth1, 10.88.1.1 and .2. A firewall closes other ports."""
    found = [Namespace(Owner.current().name(f"hand{number}")) for number in range(2)]
    try:
        for host in found:
            host.create()
        for link in range(2):
            ends = ("name", f"eth{link}", "type", "veth", "peer", "name", f"eth{link}", "netns", found[1].name)
            found[0].ip("link", "add", *ends)
            for number, host in enumerate(found):
                host.ip("address", "add", f"10.88.{link}.{number + 1}/24", "dev", f"eth{link}")
                host.ip("link", "set", f"eth{link}", "up")
        for host in found:
            run(host, "sh", "-c", f"echo {_FIRST_PORT} {_LAST_PORT} >/proc/sys/net/ipv4/ip_local_port_range")
            ports = f"{_MASTER_PORT},{_FIRST_PORT}:{_LAST_PORT}"
            accepted = ("-p", "tcp", "-m", "multiport", "--dports", ports, "-j", "ACCEPT")
            run(host, "iptables", "-A", "INPUT", "-i", "eth1", *accepted)
            run(host, "iptables", "-A", "INPUT", "!", "-i", "lo", "-j", "DROP")
        yield found
    finally:
        for host in found:
            host.delete()


def run(host: Namespace, *words: str) -> str:
    return subprocess.run(host.wrap(list(words)), check=True, capture_output=True, text=True, timeout=60).stdout


def start(host: Namespace, number: int, *words: str) -> subprocess.Popen[str]:
    """Start one of two ranks with the variables of the page."""
    by_hand = {
        "MASTER_ADDR": "10.88.1.1",
        "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": "eth1",
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "PYTHONPATH": str(ROOT),
    }
    command = host.wrap([sys.executable, *words], hostname=f"host{number}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **by_hand}, **pipes)


def outputs(hosts: list[Namespace], *words: str) -> list[str]:
    ranks = [start(host, number, *words) for number, host in enumerate(hosts)]
    try:
        found = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(found)
    return found


def received(host: Namespace, interface: str) -> int:
    return int(run(host, "cat", f"/sys/class/net/{interface}/statistics/rx_bytes"))


@pytest.mark.parametrize("algorithm", ["bytegrad", "passive_gossip"])
def test_training_uses_the_ports_and_the_interface_of_the_page(hosts: list[Namespace], algorithm: str) -> None:
    first, _ = outputs(hosts, "examples/train_digits.py", "--epochs", "1", "--algorithm", algorithm)
    assert "epoch   1" in first
    rules = run(hosts[0], "iptables", "--list", "INPUT", "--numeric", "--verbose", "--exact").splitlines()
    assert int(rules[2].split()[0]) > 100, rules  # the packets of the rule that opens the ports
    least = sum if algorithm == "passive_gossip" else min  # of gossip, a slow rank sends little
    assert least(received(host, "eth1") for host in hosts) > 1_000_000
    assert max(received(host, "eth0") for host in hosts) < 10_000


def test_the_command_shows_the_interface_of_the_page(hosts: list[Namespace]) -> None:
    first, second = outputs(hosts, "-m", "commlib", "doctor", "--peers")
    assert "0 eth1 10.88.1.1 - 1 eth1 10.88.1.2" in first
    assert "Mbit/s" not in second
