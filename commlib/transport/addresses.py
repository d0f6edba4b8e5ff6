"""The network address of this host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from typing import Any

import torch.distributed as dist


def local_address(store: Any) -> str:
    """Return this host's address for other ranks: on Gloo's interface if set, else on the route to the store."""
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
    """Return the address from which this host reaches `host` (a name or an address). Sends nothing.

    Raises:
        OSError: There is no route to `host`.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # on a datagram socket, this only selects the route
        return probe.getsockname()[0]


def is_loopback(address: str) -> bool:
    """Return whether an address is valid on its own host only."""
    return address.startswith("127.") or address == "::1"


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface (`SIOCGIFADDR`)."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])
