"""The mailbox: questions are answered, foreign and malformed bytes are dropped, and how a peer ends is known."""

from __future__ import annotations

import fcntl
import gc
import logging
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from commlib.errors import PeerFailure, PeerTimeout, TransportError
from commlib.transport import connections
from commlib.transport import mailbox as mailboxes
from commlib.transport.mailbox import Mailbox, Message, Presence
from tests.waiting import ENDLESS_S, LIMIT_S, eventually


class Meeting:
    """Lets threads stand for ranks: what `gather_objects` needs."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=LIMIT_S)
        self.values: list[Any] = [None] * world_size


class FakeTransport:
    """The attributes of a transport that a mailbox uses."""

    timeout_s = LIMIT_S

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, len(meeting.values), meeting
        self.global_ranks = [10 * rank for rank in range(self.world_size)]
        self.others_hurt: set[int] = set()
        self.has_blamed = False

    def bystanders(self) -> set[int]:
        return self.others_hurt

    def blame(self) -> None:
        self.has_blamed = True

    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
        kind = PeerTimeout if isinstance(error, TimeoutError) else PeerFailure
        return kind(f"{what}: {error}", suspects)

    def local_address(self) -> str:
        return "127.0.0.1"

    def gather_objects(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values


class Echo:
    """Answers with the number plus its rank, and the payload backwards."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asked: list[tuple[int, int]] = []
        self.is_asked = threading.Event()
        self.hold = threading.Event()
        self.hold.set()

    def answer(self, peer: int, message: Message, reply: Callable[[Message], None]) -> None:
        self.is_asked.set()
        self.hold.wait(LIMIT_S)
        self.asked.append((peer, message.number))
        if message.number < 0:
            raise RuntimeError("the answer's own error")
        reply(Message(message.kind, message.number + self.rank, bytes(message.payload)[::-1]))


class Ranks:
    def __init__(self, world_size: int, max_request: int = 64) -> None:
        meeting = Meeting(world_size)
        self.echoes = [Echo(rank) for rank in range(world_size)]
        with ThreadPoolExecutor(world_size) as pool:
            self.transports = [FakeTransport(rank, meeting) for rank in range(world_size)]
            made = [
                pool.submit(Mailbox, transport, echo.answer, max_request)
                for transport, echo in zip(self.transports, self.echoes, strict=True)
            ]
            self.boxes = [future.result(LIMIT_S) for future in made]

    def ask(self, rank: int, peer: int, message: Message, room: int = 64) -> tuple[Message, bytes]:
        done, found, into = threading.Event(), [], bytearray(room)

        def on_reply(reply: Message) -> None:
            found.append((reply, bytes(reply.payload)))
            done.set()

        self.boxes[rank].ask(peer, message, on_reply, into)
        assert done.wait(LIMIT_S), "no reply"
        return found[0]

    def close(self) -> None:
        for box in self.boxes:
            box.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.close()


def test_every_rank_asks_every_other(ranks: Ranks) -> None:
    for rank in range(3):
        for peer in {0, 1, 2} - {rank}:
            reply, payload = ranks.ask(rank, peer, Message(3, 10 * rank, b"abc"))
            assert (reply.kind, reply.number, payload) == (3, 10 * rank + peer, b"cba")


def test_questions_to_a_peer_are_answered_in_order_and_do_not_wait_for_other_peers(ranks: Ranks) -> None:
    ranks.echoes[1].hold.clear()
    replies: list[int] = []
    for number in range(5):
        ranks.boxes[0].ask(1, Message(0, number), lambda reply: replies.append(reply.number))
    assert ranks.ask(0, 2, Message(0, 7))[0].number == 9
    assert replies == []
    ranks.echoes[1].hold.set()
    assert eventually(lambda: len(replies) == 5)
    assert replies == [1, 2, 3, 4, 5]


def test_payloads_larger_than_the_buffers_of_the_network() -> None:
    ranks = Ranks(2, max_request=8 << 20)
    sent = bytes(range(256)) * (8 << 12)
    assert ranks.ask(0, 1, Message(0, 0, sent), room=len(sent))[1] == sent[::-1]
    assert ranks.boxes[0].bytes_sent == len(sent) == ranks.boxes[1].bytes_sent
    ranks.close()


def test_a_goodbye_is_not_a_failure(ranks: Ranks) -> None:
    ranks.boxes[2].close()
    assert eventually(lambda: ranks.boxes[0].presence(2) is Presence.LEFT)
    assert ranks.boxes[0].present() == [1]
    ranks.boxes[0].check()
    ranks.boxes[0].ask(2, Message(0), lambda _: pytest.fail("a rank that left answered"))


def test_a_goodbye_is_read_though_the_answer_cannot_be_sent(ranks: Ranks) -> None:
    """The asking rank leaves while its question is being answered."""
    ranks.echoes[1].hold.clear()
    ranks.boxes[0].ask(1, Message(0, 0, b"x"), lambda _: None, bytearray(8))
    assert ranks.echoes[1].is_asked.wait(LIMIT_S)
    ranks.boxes[0].close()
    ranks.echoes[1].hold.set()
    assert eventually(lambda: ranks.boxes[1].presence(0) is Presence.LEFT)
    ranks.boxes[1].check()


def test_closing_with_questions_in_the_queue_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    ranks = Ranks(2)
    ranks.echoes[1].hold.clear()
    for number in range(3):
        ranks.boxes[0].ask(1, Message(0, number), lambda _: None)
    assert ranks.echoes[1].is_asked.wait(LIMIT_S)
    ranks.boxes[0].close()
    ranks.echoes[1].hold.set()
    assert eventually(lambda: ranks.boxes[1].presence(0) is Presence.LEFT)
    ranks.boxes[1].close()
    assert eventually(lambda: set(threading.enumerate()) <= before)


def test_a_process_that_ends_with_an_exception_has_failed(ranks: Ranks) -> None:
    mailboxes._close(ranks.boxes[2]._state, mailboxes._FAILED)
    assert eventually(lambda: ranks.boxes[0].presence(2) is Presence.FAILED)
    with pytest.raises(PeerFailure, match="rank 20 ended with an exception") as caught:
        ranks.boxes[0].check()
    assert caught.value.ranks == {20}, "of the default group"


def test_a_connection_that_ends_without_a_goodbye_is_a_lost_peer(ranks: Ranks) -> None:
    for connection in [asker.connection for asker in ranks.boxes[2]._state.askers.values()]:
        connection.shutdown(socket.SHUT_RDWR)
    assert eventually(lambda: ranks.boxes[0].presence(2) is Presence.LOST)
    with pytest.raises(PeerFailure, match="rank 20 disconnected without a goodbye") as caught:
        ranks.boxes[0].check()
    assert caught.value.ranks == {20}
    assert ranks.transports[0].has_blamed
    assert ranks.ask(0, 1, Message(0, 1))[0].number == 2


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n____________", mailboxes._HEADER.pack(mailboxes._MAGIC, 0, 0, 0, 65)],
    ids=["foreign", "too-long"],
)
def test_malformed_bytes_end_the_connection_with_a_log_line(
    ranks: Ranks, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "commlib"):
        ranks.boxes[2]._state.askers[0].connection.sendall(garbage)
        assert eventually(lambda: ranks.boxes[0].presence(2) is Presence.LOST)
    assert "dropped the connection of rank 2" in caplog.text
    assert ranks.ask(0, 1, Message(0, 1))[0].number == 2


def test_an_error_in_an_answer_is_raised_on_the_answering_rank(ranks: Ranks) -> None:
    ranks.boxes[0].ask(1, Message(0, -1), lambda _: None)
    assert eventually(lambda: ranks.boxes[1]._state.error is not None)
    with pytest.raises(TransportError, match="the answer's own error"):
        ranks.boxes[1].check()


def accept(
    listener: socket.socket,
    token: bytes,
    expected: Sequence[int],
    deadline: float,
    made: dict[int, socket.socket] | None = None,
) -> dict[int, socket.socket]:
    """Take the expected ranks' connections as rank 0."""
    return connections._accept(connections._Door(listener, token, expected, 0), deadline, made or {})


def test_foreign_connections_are_dropped_at_set_up(caplog: pytest.LogCaptureFixture) -> None:
    token, wrong = b"t" * 16, b"w" * 16
    with socket.create_server(("127.0.0.1", 0)) as listener:
        opened = []
        for hello in (
            b"GET / HTTP/1.1\r\n\r\n___________",
            connections._HELLO.pack(connections._MAGIC, wrong, 1),
            b"short",
        ):
            opened.append(socket.create_connection(listener.getsockname()))
            opened[-1].sendall(hello)
            opened[-1].shutdown(socket.SHUT_WR)
        opened.append(socket.create_connection(listener.getsockname()))
        opened[-1].sendall(connections._HELLO.pack(connections._MAGIC, token, 1))
        with caplog.at_level(logging.WARNING, "commlib"):
            ((peer, connection),) = accept(listener, token, [1], time.monotonic() + LIMIT_S).items()
        assert peer == 1
        assert caplog.text.count("dropped a foreign connection") == 3
        for each in (*opened, connection):
            each.close()


def test_a_rank_that_does_not_connect_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(connections.PeersMissing, match=r"ranks \[1, 3\] did not connect") as caught,
    ):
        accept(listener, b"t" * 16, [1, 3], time.monotonic() + 0.1)
    assert (caught.value.ranks, caught.value.is_late) == ([1, 3], True)


def test_a_rank_that_dies_while_others_connect_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as dying:
        made = {3: socket.create_connection(dying.getsockname())}
        dying.accept()[0].close()
        with pytest.raises(connections.PeersMissing) as caught:
            accept(listener, b"t" * 16, [1, 3], time.monotonic() + LIMIT_S, made)
        made[3].close()
    assert (caught.value.ranks, caught.value.is_late) == ([3], False)


@pytest.mark.parametrize("hello", [True, False], ids=["known", "not yet known"])
def test_a_rank_that_gives_up_says_so_to_those_who_have_already_connected(hello: bool) -> None:
    """They are past connecting, and would take its end for a death of its own."""
    listeners = {rank: socket.create_server(("127.0.0.1", 0)) for rank in (1, 2)}
    heard: list[socket.socket] = []

    class Introduction:
        rank, world_size, timeout_s = 0, 3, LIMIT_S

        def local_address(self) -> str:
            return "127.0.0.1"

        def gather_objects(self, value: Any) -> list[Any]:
            if isinstance(value, str):
                return [value] * 3
            heard.append(socket.create_connection(value[:2]))
            if hello:
                heard[0].sendall(connections._HELLO.pack(connections._MAGIC, value[2], 1))
            return [value, *[(*each.getsockname(), b"t" * 16) for each in listeners.values()]]

        def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
            assert (what, suspects) == ("connecting the ranks", [2])
            return error

    def die() -> None:
        heard.append(listeners[1].accept()[0])
        listeners[2].accept()[0].close()

    dying = threading.Thread(target=die)
    dying.start()
    with pytest.raises(ConnectionError, match=r"ranks \[2\] ended"):
        connections.connect_all(Introduction(), b"L")
    dying.join()
    assert heard[0].recv(1) == b"L"
    heard[1].recv(connections._HELLO.size)
    assert heard[1].recv(1) == b"L"
    for each in (*heard, *listeners.values()):
        each.close()


def test_strangers_that_say_nothing_or_little_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of them, silent or slow, connect before the peers; the peers are connected nevertheless."""
    monkeypatch.setattr(connections, "_HELLO_S", ENDLESS_S)  # a wait for one of them never ends
    token, opened, over = b"t" * 16, [], threading.Event()

    def drip() -> None:
        for _ in range(connections._HELLO.size - 2):
            for connection in opened[::2]:
                connection.send(b"C")
            if over.wait(0.05):
                return

    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        opened += [socket.create_connection(listener.getsockname()) for _ in range(100)]
        for connection in opened[::2]:
            connection.send(b"C")
        for rank in (1, 2):
            opened.append(socket.create_connection(listener.getsockname()))
            opened[-1].sendall(connections._HELLO.pack(connections._MAGIC, token, rank))
        dripping, peers = threading.Thread(target=drip), opened[-2:]
        del opened[-2:]
        dripping.start()
        try:
            found = accept(listener, token, [1, 2], time.monotonic() + LIMIT_S)
        finally:
            over.set()
            dripping.join()
            for each in (*opened, *peers):
                each.close()
        assert sorted(found) == [1, 2]
        for each in found.values():
            each.close()


def test_of_very_many_strangers_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MOST_UNKNOWN", 8)
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        opened = [socket.create_connection(listener.getsockname()) for _ in range(50)]
        door = connections._Door(listener, b"t" * 16, [1], 0)
        for _ in range(50):
            door.turn(LIMIT_S)
        assert len(door._unknown) == 9
        door.close()
        for each in opened:
            each.close()


def test_a_rank_that_ended_because_another_one_had_is_not_blamed(ranks: Ranks) -> None:
    for connection in [asker.connection for asker in ranks.boxes[2]._state.askers.values()]:
        connection.shutdown(socket.SHUT_RDWR)
    assert eventually(lambda: ranks.boxes[0].presence(2) is Presence.LOST)
    mailboxes._close(ranks.boxes[1]._state, mailboxes._FAILED)
    assert eventually(lambda: ranks.boxes[0].presence(1) is Presence.FAILED)
    ranks.transports[0].others_hurt = {1}
    with pytest.raises(PeerFailure, match="rank 20 disconnected") as caught:
        ranks.boxes[0].check()
    assert caught.value.ranks == {20}
    assert "rank 10" not in str(caught.value)


def test_no_thread_is_left_by_close_nor_by_garbage_collection() -> None:
    before = set(threading.enumerate())
    ranks = Ranks(3)
    threads = [each.name for each in set(threading.enumerate()) - before]
    assert len(threads) == 12 + threads.count("commlib-closing")
    ranks.close()
    assert eventually(lambda: set(threading.enumerate()) <= before)
    ranks = Ranks(2)
    del ranks
    gc.collect()
    assert eventually(lambda: set(threading.enumerate()) <= before)


class Neighbourhood(FakeTransport):
    """Knows the address that every rank reports."""

    def __init__(self, addresses: list[str]) -> None:
        super().__init__(0, Meeting(1))
        self._addresses = addresses

    def gather_objects(self, value: Any) -> list[Any]:
        return self._addresses


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.1", "127.0.0.1"], "127.0.0.1"),  # all on one machine
        (["10.1.2.3", "127.0.0.1"], "10.1.2.3"),
        (["127.0.1.1", "127.0.0.2"], "127.0.1.1"),
    ],
)
def test_the_address_is_one_that_others_reach(addresses: list[str], expected: str) -> None:
    assert connections._reachable(addresses[0], Neighbourhood(addresses)) == expected


def test_a_loopback_address_is_replaced_where_others_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "address_towards", lambda host: f"towards {host}")
    assert connections._reachable("127.0.1.1", Neighbourhood(["127.0.1.1", "10.1.2.3"])) == "towards 10.1.2.3"


def test_a_rank_asks_itself(ranks: Ranks) -> None:
    reply, payload = ranks.ask(1, 1, Message(2, 5, b"xyz"))
    assert (reply.number, payload) == (6, b"zyx")


# --- receiving -------------------------------------------------------------------------------------------------------


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        yield sender, receiver


def queued(connection: socket.socket, which: int) -> int:
    """Return the bytes that a socket has received and nobody has read, or has sent and the other side has not got."""
    return int.from_bytes(fcntl.ioctl(connection, which, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("sizes", [[600_000, 900_000], [1 << 20, 1 << 20, 1], [5], [3_000_000], [1] * 7 + [1_500_000]])
def test_a_message_is_received_whole_wherever_it_is_cut(
    wire: tuple[socket.socket, socket.socket], sizes: list[int]
) -> None:
    sender, receiver = wire
    sent = bytes(range(251)) * (sum(sizes) // 251 + 1)
    got = bytearray(sum(sizes))
    with ThreadPoolExecutor(1) as pool:
        first, done = 0, None
        for size in sizes:
            sender.sendall(sent[first : first + size])
            first += size
            assert done or eventually(lambda: queued(receiver, termios.FIONREAD) > 0)
            done = done or pool.submit(connections.fill, receiver, memoryview(got))  # which finds the first part
            assert eventually(lambda: not queued(sender, termios.TIOCOUTQ)), "a part is not on the other side"
        assert done is not None
        try:
            done.result(LIMIT_S)
        finally:
            sender.close()
    assert got == sent[: len(got)]


def test_a_message_that_ends_or_stops_early_is_an_error(wire: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = wire
    receiver.settimeout(0.1)
    sender.sendall(b"abc")
    with pytest.raises(TimeoutError):
        connections.fill(receiver, memoryview(bytearray(4)))
    receiver.settimeout(None)
    sender.sendall(b"abc")
    sender.close()
    with pytest.raises(EOFError):
        connections.fill(receiver, memoryview(bytearray(9)))


class Counting(socket.socket):
    """Counts how often something was taken from it."""

    num_received = 0

    def recv_into(self, *args: Any) -> int:
        self.num_received += 1
        return super().recv_into(*args)


def test_a_large_message_wakes_its_receiver_seldom(wire: tuple[socket.socket, socket.socket]) -> None:
    """Sent in 1,024 portions with pauses between, 16 MiB wake the thread about 16 times."""
    sender, receiver = wire
    portion, got = bytes(1 << 14), bytearray(1 << 24)
    with Counting(fileno=receiver.detach()) as counting:
        thread = threading.Thread(target=connections.fill, args=(counting, memoryview(got)))
        thread.start()
        for idx in range(len(got) // len(portion)):
            sender.sendall(portion)
            if idx % 4 == 0:
                time.sleep(0.0005)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert counting.num_received <= 32
