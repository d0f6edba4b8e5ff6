"""The facts about a rank that the others cannot see: its host, its addresses, its interfaces and its versions."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch

from commlib.transport.addresses import address_of, local_address
from commlib.transport.groups import name_of_node
from commlib.transport.presence import own_place
from commlib.version import __version__

_INTERFACES = Path("/sys/class/net")


class Rank(NamedTuple):
    """The facts about one rank; all are plain values.

    Attributes:
        rank: The rank.
        host: Its host name.
        node: The name by which commlib decides which ranks are on one node.
        place: Its host, the boot of the host, and its network and time namespace, separated by dots; "-" if unknown.
        address: The address that commlib listens on.
        gloo_interface: The interface in `GLOO_SOCKET_IFNAME`; "" if unset.
        gloo_address: The address that Gloo listens on: of that interface, or of the host name; "" if unknown.
        speeds: The speed of each physical interface that reports one, in Mbit/s.
        versions: The versions of commlib, torch and Python.
    """

    rank: int
    host: str
    node: str
    place: str
    address: str
    gloo_interface: str
    gloo_address: str
    speeds: dict[str, int]
    versions: dict[str, str]

    @property
    def machine(self) -> str:
        """The boot of the machine; containers of one machine share it. "-" if unknown."""
        return self.place.partition(".")[0]


def examine(rank: int, store: Any) -> Rank:
    """Return the facts about this rank. `store` determines the route if no interface is set."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    versions = {"commlib": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    return Rank(
        rank=rank,
        host=socket.gethostname(),
        node=name_of_node(),
        place=own_place(),
        address=local_address(store),
        gloo_interface=interface,
        gloo_address=_gloo_address(interface),
        speeds=_speeds(),
        versions=versions,
    )


def _gloo_address(interface: str) -> str:
    with contextlib.suppress(OSError):
        if interface:
            return address_of(interface)
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def _speeds() -> dict[str, int]:
    found: dict[str, int] = {}
    for interface in _INTERFACES.glob("*"):
        with contextlib.suppress(OSError, ValueError):  # an interface that is down refuses to be read
            speed = int((interface / "speed").read_text())
            if speed > 0 and (interface / "device").exists():  # virtual interfaces report a nominal speed
                found[interface.name] = speed
    return found
