"""Latency of emulated hosts: every packet that arrives at a host waits in a netfilter queue for a fixed time.

``iptables`` adds the rule, and a process (`forwarder`) delays the packets. It runs in the hub's namespace, so that
killing all processes of a cluster's namespaces terminates it too.
"""

from __future__ import annotations

import contextlib
import math
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from commlib.emulation.netns import Namespace, Owner
from commlib.errors import ConfigError, TransportError

_FORWARDER = Path(__file__).with_name("forwarder.py")
_RULE = ("-w", "-t", "mangle", "-A", "PREROUTING", "-i", "eth0", "-j", "NFQUEUE", "--queue-num", "0")
_BACKENDS = ("iptables", "iptables-legacy")
_MAX_US = 10e6
_END_S, _ANSWER_S = 3.0, 10.0


def parse_latency(latency_us: float) -> float:
    """Validate a one-way latency and return it in microseconds.

    Raises:
        ConfigError: If it is not between 0 and 10 s.
    """
    if not (math.isfinite(latency_us) and 0 <= latency_us <= _MAX_US):
        raise ConfigError(f"latency_us must be 0 to {_MAX_US:.0f} microseconds, got {latency_us!r}")
    return float(latency_us)


class Forwarder:
    """The process that delays packets that arrive at the hosts.

    Args:
        hub: The namespace in which the process runs.
        hosts: The namespaces whose packets it delays.
        latency_us: Delay of each packet, in microseconds.

    Raises:
        ConfigError: If the machine does not meet the requirements.
    """

    def __init__(self, hub: Namespace, hosts: Sequence[Namespace], latency_us: float) -> None:
        command = [sys.executable, "-I", "-S", str(_FORWARDER), *(host.name for host in hosts)]
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(
            hub.wrap(command), stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._stdin, self._stdout, self._stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        self._said = ""
        try:
            self.set(latency_us)
            for host in hosts:
                _hook(host)
        except TransportError as error:
            self.close()
            raise ConfigError(f"the forwarder cannot start: {error}") from None
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    def set(self, latency_us: float) -> None:
        """Delay packets that arrive from now on by `latency_us`; packets stay in order.

        Raises:
            TransportError: If the process has exited or does not answer.
        """
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(f"{latency_us}\n")
            self._stdin.flush()
        if not select.select([self._stdout], [], [], _ANSWER_S)[0]:
            raise TransportError(f"the forwarder (process {self.pid}) did not answer within {_ANSWER_S:g} s")
        if self._stdout.readline() != "ready\n":
            self._popen.wait(_END_S)
            self.check()

    def check(self) -> None:
        """Raise an error if the process has exited, because hosts then no longer receive packets.

        Raises:
            TransportError: If it has exited; the message contains the process id and the reason.
        """
        code = self._popen.poll()
        if code is None:
            return
        self._said = self._said or self._stderr.read().strip()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise TransportError(
            f"the forwarder that delays the packets of emulated hosts (process {self.pid}) {how}"
            f"{': ' + self._said if self._said else ''}; no host receives anything without it"
        )

    def close(self) -> None:
        """Terminate the process. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()  # the process exits at end of file
        try:
            self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._stdout.close()
        self._stderr.close()


def _hook(host: Namespace) -> None:
    """Route packets that arrive at a host through its queue. On some kernels nft-based iptables lacks NFQUEUE."""
    failures = []
    for tool in filter(shutil.which, _BACKENDS):
        words = host.wrap([tool, *_RULE])
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        failures.append(f"`{' '.join([tool, *_RULE])}`: {done.stderr.strip()}")
    raise ConfigError("the kernel's packet queue, NFQUEUE (" + "; ".join(failures) + ")")


def check_latency() -> list[str]:
    """Return descriptions of the unmet requirements of latency, in addition to those of `check_requirements`.

    The list is empty if this machine meets all. Each requirement is tested in a temporary namespace.
    """
    if shutil.which("iptables") is None:
        return ["the `iptables` command (Debian, Ubuntu: apt-get install iptables)"]
    probe = Namespace(Owner.current().name(f"probe{time.monotonic_ns()}"))
    try:
        probe.create()
        Forwarder(probe, [probe], 0.0).close()
    except ConfigError as error:
        return [str(error)]
    finally:
        probe.delete()
    return []
