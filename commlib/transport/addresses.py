"""The network addresses and interfaces of this host."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import socket
import struct
from typing import Any

import torch.distributed as dist

_log = logging.getLogger("commlib")

#: Constants of rtnetlink, which Python lacks.
_NEW_ROUTE, _GET_ROUTE, _OUTPUT_INTERFACE = 24, 26, 4


def local_address(store: Any) -> str:
    """Return this host's address for other ranks: on Gloo's interface if set, else on the route to the store."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with contextlib.suppress(OSError):
        if interface:
            return address_of(interface)
    address = _default_address(store)
    if interface:
        _warn_of_missing(interface, address)
    return address


@functools.cache  # once for each pair
def _warn_of_missing(interface: str, address: str) -> None:
    _log.warning(
        "GLOO_SOCKET_IFNAME=%s: this host has no such interface with an IPv4 address, so commlib uses %s; "
        "`ip -brief address` lists the interfaces",
        interface,
        address,
    )


def _default_address(store: Any) -> str:
    """Return the address on the route to the store, else that of the host's name, else the loopback address."""
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


def interface_towards(address: str) -> str:
    """Return the name of the interface through which this host reaches `address` (`RTM_GETROUTE`). Sends nothing.

    Raises:
        OSError: There is no route to `address`, an IPv4 or IPv6 address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    target = socket.inet_pton(family, address.partition("%")[0])
    message = struct.pack("=4B4BI", family, 8 * len(target), *[0] * 7) + struct.pack("=HH", 4 + len(target), 1) + target
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(message), _GET_ROUTE, 1, 1, 0) + message)
        answer = kernel.recv(1 << 16)
    length, kind = struct.unpack_from("=IH", answer)
    at = 28  # the attributes follow two headers, of 16 and 12 bytes
    while kind == _NEW_ROUTE and at < length:
        num_bytes, attribute = struct.unpack_from("=HH", answer, at)
        if attribute == _OUTPUT_INTERFACE:
            return socket.if_indextoname(struct.unpack_from("=I", answer, at + 4)[0])
        at += (num_bytes + 3) & ~3
    raise OSError(f"there is no route to {address}")


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface (`SIOCGIFADDR`).

    Raises:
        OSError: There is no such interface, or it has no IPv4 address.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])
