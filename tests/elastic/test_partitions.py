"""Members on emulated hosts whose links fail: there is one history, and nobody hangs.

The service has a host of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from commlib.emulation import EmulatedCluster
from tests.elastic.job import Job, Template, running
from tests.loopback import MISSING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(MISSING), reason="emulated hosts need " + "; ".join(MISSING)),
]

NAMES = "abcd"
SERVICE = len(NAMES)
NOBODY = "02:00:00:00:00:01"
_CLONE_NEWNET = 0x40000000
COMMON: dict[str, Any] = {"rounds": 10**9, "sleep_s": 0.05, "members_at": {"1": 4}, "heartbeat_s": 3.0}


class Network:
    """The hosts of a job, and the failures of their links.

    Args:
        cluster: The hosts.
    """

    def __init__(self, cluster: EmulatedCluster) -> None:
        self._cluster = cluster
        self._dropped: set[tuple[int, int]] = set()
        self.template = Template([each.wrap(["env", "GLOO_SOCKET_IFNAME=eth0"]) for each in cluster._hosts[:SERVICE]])

    def drop(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Drop all packets from hosts to others."""
        for source, target in itertools.product(sources, targets):
            address = ["lladdr", NOBODY, "nud", "permanent", "dev", "eth0"]
            self._cluster._hosts[source].ip("neigh", "replace", self._cluster.address(target), *address)
            self._dropped.add((source, target))

    def part(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Drop all packets between two groups of hosts."""
        self.drop(one, other)
        self.drop(other, one)

    def set_link(self, host: int, is_up: bool) -> None:
        """Take the link of a host down, or up again."""
        self._cluster._hub.ip("link", "set", "dev", f"h{host}", "up" if is_up else "down")

    def repair(self) -> None:
        """Let all packets pass."""
        for source, target in self._dropped:
            self._cluster._hosts[source].ip("neigh", "del", self._cluster.address(target), "dev", "eth0")
        self._dropped.clear()
        for host in range(SERVICE):
            self.set_link(host, is_up=True)

    @contextlib.contextmanager
    def running(self, journal: Path) -> Iterator[Job]:
        """Run a service on its host for the duration of a block."""
        enter = lambda: in_namespace(self._cluster._hosts[SERVICE].path)  # noqa: E731
        with running(self.template, journal, host=self._cluster.address(SERVICE), enter=enter) as job:
            yield job


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with EmulatedCluster(hosts=SERVICE + 1) as cluster:
        made = Network(cluster)
        yield made
        made.template.close()


@pytest.fixture
def network(hosts: Network) -> Iterator[Network]:
    yield hosts
    hosts.repair()


@pytest.fixture
def job(network: Network, tmp_path: Path) -> Iterator[Job]:
    """Four members that train, each on a host."""
    with network.running(tmp_path / "journal") as made:
        for host, name in enumerate(NAMES):
            made.start(name, host=host, timeout_s=15.0, **COMMON)
        made.wait(*(f"{name} round 5" for name in NAMES))
        yield made


def in_namespace(path: str) -> None:
    """Let this thread create its sockets in a network namespace."""
    assert threading.current_thread() is not threading.main_thread()
    with open(path) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def check_one_history(job: Job) -> None:
    """Check that each round has the same members and results wherever it was made."""
    found: dict[int, set[tuple[int, str]]] = {}
    for number, result in (each for name in job.names() for each in job.rounds(name).items()):
        found.setdefault(number, set()).add(result)
    assert [number for number, results in found.items() if len(results) > 1] == []


def after(job: Job, name: str, count: int, world: int) -> None:
    """Wait until a member has made as many further rounds of so many members."""
    last = max(job.rounds(name))
    job.until(lambda: sum(n > last and each[0] == world for n, each in job.rounds(name).items()) >= count)


def test_a_link_is_down_for_a_moment(job: Job, network: Network) -> None:
    """For less than the heartbeats' limit: the members wait, and the view stays."""
    before = job.view_number
    network.set_link(3, is_up=False)
    time.sleep(1.0)
    network.set_link(3, is_up=True)
    for name in NAMES:
        after(job, name, 5, 4)
    assert job.view_number == before
    check_one_history(job)


def test_a_link_is_down_for_long(job: Job, network: Network) -> None:
    """The others continue; the member finds out when its link is up again."""
    network.set_link(3, is_up=False)
    for name in "abc":
        after(job, name, 5, 3)
    network.set_link(3, is_up=True)
    job.wait("d failed Excluded")
    for name in "abc":
        after(job, name, 5, 3)
    check_one_history(job)


@pytest.mark.parametrize("inside", [(0, 1, 2), (0, 1), (3,)])
def test_a_partition(job: Job, network: Network, inside: tuple[int, ...]) -> None:
    """Those that reach the service continue. The others wait, raise, and are not members when the network is whole."""
    outside = [host for host in range(len(NAMES)) if host not in inside]
    network.part(outside, [*inside, SERVICE])
    for host in inside:
        after(job, NAMES[host], 5, len(inside))
    network.repair()
    job.wait(*(f"{NAMES[host]} failed Excluded" for host in outside))
    check_one_history(job)


def test_one_direction_between_two_members(job: Job, network: Network) -> None:
    """The younger of the two is excluded once a collective has timed out."""
    network.drop([1], [2])
    for name in "abd":
        after(job, name, 5, 3)
    job.wait("c failed Excluded")
    check_one_history(job)
