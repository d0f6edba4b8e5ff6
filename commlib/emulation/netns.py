"""Network namespaces: create them, find their processes, remove them, and clean up after dead runs.

All operations use the ``ip`` and ``tc`` commands of iproute2. A namespace is named after the process that created it
(`Owner`), which distinguishes leftovers of a dead run from namespaces of a live one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from commlib.errors import ConfigError

_PREFIX = "commlib"
_NAME = re.compile(rf"^{_PREFIX}-(\d+)-(\d+)-")
_COMMAND_TIMEOUT_S = 20.0
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "taskset": "util-linux"}
_SET_HOSTNAME = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'

# Waits for end of file on standard input, which the kernel closes when the owner exits for any reason, even SIGKILL.
_REAPER = """
cat >/dev/null
for name in "$@"; do
    [ -e "/run/netns/$name" ] || continue
    kill -KILL $(ip netns pids "$name") 2>/dev/null
    ip netns del "$name"
done
"""


def command(*words: str) -> str:
    """Run a command and return its standard output.

    Raises:
        ConfigError: If it fails; the message contains the command and its output.
    """
    result = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip()
        raise ConfigError(f"`{' '.join(words)}` failed with exit code {result.returncode}: {said}")
    return result.stdout


@dataclass(frozen=True)
class Namespace:
    """A named network namespace (``/run/netns/<name>``)."""

    name: str

    @property
    def path(self) -> str:
        """The file that keeps the namespace alive."""
        return f"/run/netns/{self.name}"

    def create(self) -> None:
        """Create the namespace and bring its loopback up."""
        command("ip", "netns", "add", self.name)
        self.ip("link", "set", "dev", "lo", "up")

    def ip(self, *words: str) -> str:
        """Run ``ip`` inside the namespace."""
        return command("ip", "-n", self.name, *words)

    def tc(self, *words: str) -> str:
        """Run ``tc`` inside the namespace."""
        return command("tc", "-n", self.name, *words)

    def wrap(self, words: list[str], hostname: str | None = None) -> list[str]:
        """Return the command line that runs `words` inside the namespace, without an additional process.

        `hostname` sets the host name of the process and its children only.
        """
        named = [] if hostname is None else ["unshare", "--uts", "/bin/sh", "-c", _SET_HOSTNAME, hostname]
        return ["ip", "netns", "exec", self.name, *named, *words]

    def pids(self) -> list[int]:
        """Return the ids of the processes in the namespace, including all descendants."""
        if not os.path.exists(self.path):
            return []
        return [int(word) for word in command("ip", "netns", "pids", self.name).split()]

    def signal(self, number: int) -> int:
        """Send a signal to every process of the namespace and return the number of processes."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(pids)

    def kill_all(self, timeout_s: float = 5.0) -> None:
        """Kill every process of the namespace and wait until all have exited."""
        deadline = time.monotonic() + timeout_s
        while self.signal(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.01)

    def delete(self) -> None:
        """Kill all processes of the namespace and remove it with its interfaces. Idempotent."""
        if os.path.exists(self.path):
            self.kill_all()
            command("ip", "netns", "del", self.name)


@dataclass(frozen=True)
class Owner:
    """A process, identified by its id and its start time. Process ids are reused, the pair is not."""

    pid: int
    start: int

    @staticmethod
    def current() -> Owner:
        """Return the calling process."""
        start = _start_time(os.getpid())
        assert start is not None
        return Owner(os.getpid(), start)

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return _start_time(self.pid) == self.start

    def name(self, suffix: str) -> str:
        """Return the name of a namespace or temporary folder of this owner."""
        return f"{_PREFIX}-{self.pid}-{self.start}-{suffix}"


def _start_time(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command name before it may contain spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[19])


def owned_namespaces() -> list[tuple[Owner, Namespace]]:
    """Return every namespace that a process of this package, dead or alive, has created, with its owner."""
    directory = Path("/run/netns")
    names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    found = ((_NAME.match(name), name) for name in names)
    return [(Owner(int(match[1]), int(match[2])), Namespace(name)) for match, name in found if match]


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder that is removed with the object, or by `sweep_stale` if this process is killed."""
    return tempfile.TemporaryDirectory(prefix=Owner.current().name(""))


def _sweep_folders() -> None:
    for folder in Path(tempfile.gettempdir()).iterdir():
        match = _NAME.match(folder.name)
        if match and not Owner(int(match[1]), int(match[2])).is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def sweep_stale() -> list[str]:
    """Remove namespaces, processes and folders of dead owners. Return the names of the removed namespaces."""
    _sweep_folders()
    stale = [namespace for owner, namespace in owned_namespaces() if not owner.is_alive()]
    for namespace in stale:
        # The owner's reaper, or another run, may remove the same namespace concurrently.
        with contextlib.suppress(ConfigError):
            namespace.delete()
    return [namespace.name for namespace in stale if not os.path.exists(namespace.path)]


def start_reaper(namespaces: list[Namespace]) -> subprocess.Popen[bytes]:
    """Start the process that removes `namespaces` when this process exits for any reason.

    It runs in its own session, so that neither Ctrl-C nor a signal to the process group reaches it. When its standard
    input is closed, it cleans up and exits.
    """
    names = [namespace.name for namespace in namespaces]
    return subprocess.Popen(
        ["/bin/sh", "-c", _REAPER, "reaper", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def check_requirements() -> list[str]:
    """Return descriptions of the unmet requirements of emulated hosts; empty if this machine meets all."""
    if not sys.platform.startswith("linux"):
        return [f"Linux (this is {sys.platform})"]
    missing = []
    if os.geteuid() != 0:
        missing.append(f"root privileges (the effective user id is {os.geteuid()}; run it with sudo)")
    missing += [
        f"the `{tool}` command (install {package})" for tool, package in _TOOLS.items() if shutil.which(tool) is None
    ]
    return missing or _check_kernel()


def _check_kernel() -> list[str]:
    """Test each kernel feature in a temporary namespace and return those that do not work."""
    probe = Namespace(Owner.current().name(f"probe{time.monotonic_ns()}"))
    steps: list[tuple[str, Callable[[], object]]] = [
        ("network namespaces", probe.create),
        ("separate host names (UTS namespaces)", lambda: command(*probe.wrap(["true"], hostname="probe"))),
        ("veth pairs", lambda: probe.ip("link", "add", "p0", "mtu", "9000", "type", "veth", "peer", "name", "p1")),
        ("bridges", lambda: probe.ip("link", "add", "br0", "type", "bridge")),
        ("the tbf queue", lambda: probe.tc("qdisc", "add", "dev", "p0", "root", *tbf_words(1e8, 20000, 10**6))),
    ]
    missing = []
    try:
        for feature, step in steps:
            reason = _failure(step)
            if reason:
                missing.append(f"{feature} ({reason})")
            if reason and feature != "bridges":
                break  # the later steps depend on this one
    finally:
        probe.delete()
    return missing


def _failure(step: Callable[[], object]) -> str | None:
    try:
        step()
    except ConfigError as error:
        return str(error)
    return None


def tbf_words(rate: float, burst: int, limit: int) -> list[str]:
    """Return the ``tc`` arguments for a token bucket with `rate` in bit/s, and `burst` and `limit` in bytes."""
    return ["tbf", "rate", f"{round(rate)}bit", "burst", f"{burst}b", "limit", f"{limit}b"]
