"""Authenticated messages over one TCP connection, without the socket: bytes in, messages out.

[Note: wire] The side that connects is the "member", the side that accepts is the "service". Both prove that they know
the token before either of them interprets a message:

    member  -> service    magic, a nonce of 32 bytes
    service -> member     magic, a nonce of 32 bytes, HMAC(token, "service" + both nonces)
    member  -> service    HMAC(token, "member" + both nonces)

Each direction then has a key of its own, HMAC(token, "from member" or "from service" + both nonces), so bytes recorded
on one connection are worthless on another. A frame is

    heartbeat    1 byte, 0
    message      1 byte, 1; 4 bytes, the size; 16 bytes, HMAC(key, number + kind + size + payload); the payload
    data         the same with the kind 2

The number of a frame is implicit, so a repeated, omitted or reordered one fails. Heartbeats are not authenticated: they
only show that the process runs, and a native thread sends them without the interpreter. The payload of a message is a
plain value (`transport.plain`), that of data is bytes; nothing that was received is executed. Everything is SHA-256 and
big-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Any, Literal

from commlib.transport import plain

Role = Literal["member", "service"]

#: The largest payload of a message, in bytes. A view of 1,000 members has about 200 KB.
MOST_BYTES = 1 << 20
HEARTBEAT = b"\x00"

_MAGIC = b"CMR2"
_MESSAGE, _DATA = 1, 2  # kinds of frames
_NONCE_BYTES, _PROOF_BYTES, _MAC_BYTES = 32, 32, 16
_HEADER = struct.Struct(f">BI{_MAC_BYTES}s")


class WireError(Exception):
    """Bytes that the other side, if it knows the token, does not send. The connection must be closed."""


class WrongToken(WireError):
    """The other side does not know the token."""


class Wire:
    """One side of a connection: turns received bytes into messages, and messages into bytes to send.

    Args:
        role: This side.
        token: The shared secret.

    Attributes:
        is_open: Whether both sides have proved that they know the token. Messages can be packed from then on.
        num_heartbeats: Number of heartbeats received.
    """

    def __init__(self, role: Role, token: bytes) -> None:
        self.is_open = False
        self.num_heartbeats = 0
        self._role: Role = role
        self._token = token
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._received = bytearray()
        self._to_send = bytearray(_MAGIC + self._nonce if role == "member" else b"")
        self._nonces = b""  # of both sides
        self._keys: dict[Role, bytes] = {}
        self._num_packed = self._num_unpacked = 0

    def take_bytes_to_send(self) -> bytes:
        """Return the bytes of the handshake that have to be sent now, in order."""
        taken = bytes(self._to_send)
        self._to_send.clear()
        return taken

    def pack(self, message: Any) -> bytes:
        """Return the frame of a message, which must be sent in the order of the calls.

        Args:
            message: A plain value (`transport.plain`).

        Raises:
            ConfigError: The message is not plain.
            WireError: It is larger than `MOST_BYTES`.
        """
        return self._framed(_MESSAGE, plain.encode(message))

    def pack_data(self, data: memoryview) -> bytes:
        """Return the frame of at most `MOST_BYTES` bytes of data, which must be sent in the order of the calls."""
        return self._framed(_DATA, data)

    def _framed(self, kind: int, payload: bytes | memoryview) -> bytes:
        if len(payload) > MOST_BYTES:
            raise WireError(f"a message of {len(payload)} bytes; at most {MOST_BYTES} are allowed")
        mac = self._mac(self._role, self._num_packed, kind, payload)
        self._num_packed += 1
        return b"".join((_HEADER.pack(kind, len(payload), mac), payload))

    def unpack(self, data: bytes) -> list[Any]:
        """Take received bytes; return the messages and data that are complete.

        Raises:
            WireError: The bytes are not those of the other side; nothing that follows can be trusted.
        """
        self._received += data
        if not self.is_open and not self._shake_hands():
            return []
        messages: list[Any] = []
        while self._received:
            if self._received[0] == HEARTBEAT[0]:
                self.num_heartbeats += 1
                del self._received[0]
                continue
            if self._received[0] not in (_MESSAGE, _DATA):
                raise WireError(f"a frame of the unknown kind {self._received[0]}")
            if len(self._received) < _HEADER.size:
                break
            kind, size, mac = _HEADER.unpack_from(self._received)
            if size > MOST_BYTES:
                raise WireError(f"a message of {size} bytes; at most {MOST_BYTES} are allowed")
            if len(self._received) < _HEADER.size + size:
                break
            payload = bytes(self._received[_HEADER.size : _HEADER.size + size])
            del self._received[: _HEADER.size + size]
            if not hmac.compare_digest(mac, self._mac(self._other, self._num_unpacked, kind, payload)):
                raise WireError("a message whose authentication code is wrong")
            self._num_unpacked += 1
            try:
                messages.append(plain.decode(payload) if kind == _MESSAGE else payload)
            except plain.MalformedError as error:
                raise WireError(str(error)) from None
        return messages

    @property
    def _other(self) -> Role:
        return "service" if self._role == "member" else "member"

    def _shake_hands(self) -> bool:
        """Take the other side's part of the handshake, once it is complete; return whether the connection is open."""
        if self._role == "service" and not self._keys:
            if (nonce := self._taken(_MAGIC, _NONCE_BYTES)) is None:
                return False
            self._derive(nonce + self._nonce)
            self._to_send += _MAGIC + self._nonce + self._proof("service")
        if self._role == "member":
            if (reply := self._taken(_MAGIC, _NONCE_BYTES + _PROOF_BYTES)) is None:
                return False
            self._derive(self._nonce + reply[:_NONCE_BYTES])
            self._check(reply[_NONCE_BYTES:], "service")
            self._to_send += self._proof("member")
        else:
            if (proof := self._taken(b"", _PROOF_BYTES)) is None:
                return False
            self._check(proof, "member")
        self.is_open = True
        return True

    def _taken(self, magic: bytes, size: int) -> bytes | None:
        """Remove `magic` and the next `size` bytes from the received ones; None if they have not all arrived."""
        head = bytes(self._received[: len(magic)])
        if head != magic[: len(head)]:
            raise WireError("bytes that do not begin the handshake of commlib")
        if len(self._received) < len(magic) + size:
            return None
        taken = bytes(self._received[len(magic) : len(magic) + size])
        del self._received[: len(magic) + size]
        return taken

    def _derive(self, nonces: bytes) -> None:
        self._nonces = nonces
        self._keys = {role: self._hmac(self._token, f"from {role}".encode() + nonces) for role in ("member", "service")}

    def _proof(self, role: Role) -> bytes:
        return self._hmac(self._token, role.encode() + self._nonces)

    def _check(self, proof: bytes, role: Role) -> None:
        if not hmac.compare_digest(proof, self._proof(role)):
            raise WrongToken("the other side does not know the token")

    def _mac(self, role: Role, number: int, kind: int, payload: bytes | memoryview) -> bytes:
        mac = hmac.new(self._keys[role], struct.pack(">QBI", number, kind, len(payload)), hashlib.sha256)
        mac.update(payload)
        return mac.digest()[:_MAC_BYTES]

    @staticmethod
    def _hmac(key: bytes, data: bytes) -> bytes:
        return hmac.new(key, data, hashlib.sha256).digest()
