"""Authenticated messages: what one side packs the other unpacks, and nothing else is taken for a message."""

import contextlib
import random

import pytest

from commlib.elastic.wire import MOST_BYTES, Wire, WireError, WrongToken
from commlib.transport import plain


def connected(token=b"secret", other=b"secret"):
    """Both sides after the handshake; the bytes that each sent, for replays."""
    member, service = Wire("member", token), Wire("service", other)
    said = [member.take_bytes_to_send()]
    assert service.unpack(said[0]) == []
    reply = service.take_bytes_to_send()
    assert member.unpack(reply) == []
    said.append(member.take_bytes_to_send())
    assert service.unpack(said[1]) == []
    return member, service, b"".join(said)


MESSAGES = [None, {"kind": "Join", "name": "é"}, (1, 2.5, b"\x00"), [float("inf")], "x" * 10_000]


@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 20])
def test_messages_arrive_in_order_however_the_bytes_are_cut(size):
    for sender, receiver in (pair := connected()[:2], pair[::-1]):
        assert sender.is_open
        assert receiver.is_open
        data = b"\x00".join(sender.pack(message) for message in MESSAGES) + b"\x00"
        found = [m for at in range(0, len(data), size) for m in receiver.unpack(data[at : at + size])]
        assert found == MESSAGES
        assert receiver.num_heartbeats == len(MESSAGES)


def test_the_handshake_may_arrive_byte_by_byte():
    member, service = Wire("member", b"t"), Wire("service", b"t")
    while not (member.is_open and service.is_open):
        for one, other in ((member, service), (service, member)):
            for byte in one.take_bytes_to_send():
                other.unpack(bytes([byte]))
    assert service.unpack(member.pack("hello")) == ["hello"]


def test_a_wrong_token_is_refused_by_the_member_first():
    with pytest.raises(WrongToken, match="does not know the token"):
        connected(b"secret", b"other")


def test_a_member_with_a_wrong_token_is_refused_by_the_service():
    member, service = Wire("member", b"right"), Wire("service", b"right")
    service.unpack(member.take_bytes_to_send())
    with pytest.raises(WrongToken):
        service.unpack(bytes(32))
    assert not service.is_open


def test_the_proof_of_one_side_is_not_that_of_the_other():
    """A man in the middle who sends the service's own proof back to it."""
    member, service = Wire("member", b"t"), Wire("service", b"t")
    service.unpack(member.take_bytes_to_send())
    with pytest.raises(WrongToken):
        service.unpack(service.take_bytes_to_send()[-32:])


def test_recorded_bytes_are_worthless_on_another_connection():
    member, _, said = connected()
    recorded = said + member.pack("hello")
    with pytest.raises(WrongToken):
        Wire("service", b"secret").unpack(recorded)


@pytest.mark.parametrize("change", ["repeated", "omitted", "reordered", "reflected"])
def test_messages_cannot_be(change):
    member, service, _ = connected()
    one, two = member.pack("one"), member.pack("two")
    sent = {"repeated": one + one, "omitted": two, "reordered": two + one, "reflected": service.pack("one")}[change]
    with pytest.raises(WireError, match="authentication code is wrong"):
        service.unpack(sent)


def test_every_changed_bit_of_a_frame_is_noticed():
    frame = connected()[0].pack("message")
    for bit in range(8, 8 * len(frame)):  # the first byte is the frame's kind
        member, service, _ = connected()
        changed = bytearray(member.pack("message"))
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = service.unpack(bytes(changed) + bytes(1000))
        except WireError:
            continue
        assert found == [], bit  # a larger size: it waits for the rest


def test_data_arrive_as_they_are_between_messages():
    member, service, _ = connected()
    data = bytes(range(256)) * 4096
    frames = (
        member.pack([1]) + member.pack_data(memoryview(data)) + member.pack_data(memoryview(b"")) + member.pack("x")
    )
    assert service.unpack(frames) == [[1], data, b"", "x"]
    too_much = memoryview(bytes(MOST_BYTES + 1))
    with pytest.raises(WireError, match="bytes; at most"):
        member.pack_data(too_much)


def test_data_cannot_be_turned_into_a_message():
    member, service, _ = connected()
    frame = bytearray(member.pack_data(memoryview(plain.encode([1]))))
    frame[0] = 1
    with pytest.raises(WireError, match="authentication code"):
        service.unpack(bytes(frame))


def test_too_large_a_message_is_refused_on_both_sides():
    member, service, _ = connected()
    with pytest.raises(WireError, match="at most"):
        member.pack(bytes(MOST_BYTES))
    with pytest.raises(WireError, match="at most"):
        service.unpack(b"\x01" + (MOST_BYTES + 1).to_bytes(4, "big") + bytes(16))


def test_an_authenticated_message_that_is_not_plain_is_refused(monkeypatch):
    member, service, _ = connected()
    monkeypatch.setattr("commlib.transport.plain.encode", lambda message: b"\xff")
    frame = member.pack("anything")
    with pytest.raises(WireError, match="not a plain value"):
        service.unpack(frame)


def test_garbage_raises_or_waits_and_never_passes():
    source = random.Random(0)
    for _ in range(300):
        data = source.randbytes(source.randrange(1, 300))
        for wire in (Wire("service", b"t"), Wire("member", b"t"), connected()[1]):
            was_open = wire.is_open
            with contextlib.suppress(WireError):
                assert wire.unpack(data) == []
            assert wire.is_open == was_open
