"""Where this host is reached."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from typing import Any

import torch.distributed as dist


def local_address(store: Any) -> str:
    """Return the address of this host at which the other ranks reach it: as for Gloo, else on the way to the store."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with contextlib.suppress(OSError):
        if interface:
            return _address_of(interface)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        with contextlib.suppress(OSError):
            return address_towards(store.host)
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches `host` (a name or an address). Nothing is sent.

    Raises:
        OSError: There is no way to it.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # of a datagram socket: only chooses the way
        return probe.getsockname()[0]


def _address_of(interface: str) -> str:
    """Return a network interface's IPv4 address, as the system's `SIOCGIFADDR` gives it."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])
