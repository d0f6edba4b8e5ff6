"""Latency of emulated hosts: every packet that arrives at a host waits in a netfilter queue until its time has come.

The rule comes from ``iptables``; the waiting is done by a process (`forwarder`) that lives in the hub's namespace, so
that whatever ends the processes of a cluster's namespaces ends it too.
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
    """Return a one-way latency in microseconds.

    Raises:
        ConfigError: If it is not a number from 0 to 10 s.
    """
    if not (math.isfinite(latency_us) and 0 <= latency_us <= _MAX_US):
        raise ConfigError(f"latency_us must be 0 to {_MAX_US:.0f} microseconds, got {latency_us!r}")
    return float(latency_us)


class Forwarder:
    """The process that delays what arrives at the hosts.

    Args:
        hub: The namespace that it lives in.
        hosts: The namespaces whose packets it delays.
        latency_us: How long each packet waits.

    Raises:
        ConfigError: If the machine lacks something.
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
        """Delay what arrives from now on by `latency_us`; packets stay in order.

        Raises:
            TransportError: If the process is dead, or does not answer.
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
        """Raise an error if the process is dead: then no host receives anything any more.

        Raises:
            TransportError: Names the process and says why it ended.
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
        """End the process. May be called again."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()  # which ends it
        try:
            self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._stdout.close()
        self._stderr.close()


def _hook(host: Namespace) -> None:
    """Send what arrives at a host through its queue. iptables of the nft kind knows no queues on some kernels."""
    failures = []
    for tool in filter(shutil.which, _BACKENDS):
        words = host.wrap([tool, *_RULE])
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        failures.append(f"`{' '.join([tool, *_RULE])}`: {done.stderr.strip()}")
    raise ConfigError("the kernel's packet queue, NFQUEUE (" + "; ".join(failures) + ")")


def check_latency() -> list[str]:
    """Return what this machine lacks for latency, beside `check_requirements`, in words; empty when nothing is missing.

    All of it is tried, in a namespace that is thrown away.
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
