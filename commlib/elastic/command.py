"""`commlib rendezvous`: runs the service, or shows the members of one that runs."""

from __future__ import annotations

import logging
import signal
import socket
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from commlib.elastic.registry import Rules
from commlib.elastic.service import HANDSHAKE_S, Service
from commlib.elastic.views import Status, StatusReply, packed, unpacked
from commlib.elastic.wire import Wire, WireError, WrongToken
from commlib.errors import CommlibError, ConfigError

#: How often the live table asks, in seconds.
_REFRESH_S = 1.0


def read_token(path: Path | None) -> bytes:
    """Return the content of a token file without surrounding white space; b"" without a file.

    Raises:
        ConfigError: The file cannot be read, or has fewer than 16 bytes.
    """
    if path is None:
        return b""
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"token: cannot read {str(path)!r}: {error}") from error
    if len(token) < 16:
        raise ConfigError(f"token: expected at least 16 bytes in {str(path)!r}, got {len(token)}")
    return token


def serve(host: str, port: int, token: bytes, journal: Path, rules: Rules) -> None:
    """Run a service until SIGINT or SIGTERM. Prints its address when it is ready.

    Raises:
        ConfigError: As for `Service`.
        CommlibError: The journal can no longer be written.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    service = Service(host, port, token, journal, rules)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: service.stop())
    newest = service.registry.view
    state = f"continues view {newest.number}" if newest else "begins a job" if rules.is_fresh else _WAITS
    print(f"commlib rendezvous: {_shown(service.address)}: {state}", flush=True)
    try:
        service.run()
    except OSError as error:
        raise CommlibError(f"rendezvous: cannot write the journal {str(journal)!r}: {error}") from error


_WAITS = "waits for the members of an earlier job; --fresh lets new members begin one"


def show_status(host: str, port: int, token: bytes) -> None:
    """Print the members of a service: on a terminal until interrupted, else once.

    Raises:
        CommlibError: The service does not answer.
    """
    console = Console()
    if not console.is_terminal:
        console.print(_table(ask(host, port, token)))
        return
    with Live(console=console) as live:
        try:
            while True:
                live.update(_table(ask(host, port, token)))
                time.sleep(_REFRESH_S)
        except KeyboardInterrupt:
            pass


def ask(host: str, port: int, token: bytes) -> StatusReply:
    """Return the state of a service.

    Raises:
        CommlibError: The service does not answer.
        ConfigError: It has another token.
    """
    wire, found = Wire("member", token), []
    try:
        with socket.create_connection((host, port), HANDSHAKE_S) as connection:
            is_asked = False
            while not found:
                connection.sendall(wire.take_bytes_to_send())
                if wire.is_open and not is_asked:
                    connection.sendall(wire.pack(packed(Status())))
                    is_asked = True
                if not (data := connection.recv(1 << 16)):
                    raise OSError("the connection ended")
                found = wire.unpack(data)
                connection.sendall(wire.take_bytes_to_send())
    except WrongToken as error:
        raise ConfigError(f"rendezvous: the service at {host}:{port} has another token") from error
    except (OSError, WireError) as error:
        raise CommlibError(f"rendezvous: no answer from {host}:{port}: {error}") from error
    reply = unpacked(found[0], (StatusReply,))
    assert isinstance(reply, StatusReply)
    return reply


def _table(reply: StatusReply) -> Table:
    view = reply.view
    title = "no view yet" if view is None else f"view {view.number} of {len(view.ids)} members"
    title += "" if reply.rows else "; no member is connected"
    table = Table(title=title, title_justify="left")
    for column in ("id", "name", "generation", "address", "state", "connected in view", "silent, s"):
        table.add_column(column, justify="left" if column in ("name", "address", "state") else "right")
    for member, stage, settled, silent_s in reply.rows:
        table.add_row(
            *(str(member.id), member.name, str(member.generation), member.address, stage),
            *(str(settled), f"{silent_s:.1f}"),
        )
    return table


def _shown(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
