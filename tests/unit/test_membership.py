"""The service and its members over real connections: joins, ends, silence, restarts, strangers."""

import contextlib
import ctypes
import errno
import logging
import random
import signal
import socket
import subprocess
import sys
import threading

import pytest

from commlib import elastic
from commlib.elastic import membership
from commlib.elastic.membership import Membership
from commlib.elastic.registry import Rules
from commlib.elastic.service import MOST_UNKNOWN, Service
from commlib.elastic.views import Join
from commlib.elastic.wire import HEARTBEAT, Wire
from commlib.errors import ConfigError, Excluded, StoreLost
from commlib.kernels import native
from tests.waiting import LIMIT_S, eventually

TOKEN = b"a secret of the test"


class Serving:
    """A service on a thread, which can be stopped and started again on the same port and journal."""

    def __init__(self, journal, rules):
        self._journal, self._rules, self._port = journal, rules, 0
        self.start()

    def start(self):
        self.service = Service("127.0.0.1", self._port, TOKEN, self._journal, self._rules)
        self._port = self.service.address[1]
        self._thread = threading.Thread(target=self.service.run, daemon=True)
        self._thread.start()

    def stop(self):
        self.service.stop()
        self._thread.join(LIMIT_S)

    @property
    def address(self):
        return f"127.0.0.1:{self._port}"


@pytest.fixture
def serving(tmp_path):
    found = Serving(tmp_path / "journal", Rules(is_fresh=True, min_members=2))
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(lambda: found.stop())
        found.members = stack
        yield found


def join(serving, name="", heartbeat_s=LIMIT_S, **more):
    made = Membership(serving.address, TOKEN, Join(name, "", "", 1, heartbeat_s, **more), LIMIT_S)
    serving.members.callback(made.close)
    return made


def settle(*members):
    newest = max(member.view.number for member in members if member.view)
    for member in members:
        member.settled(member.wait_newer(newest - 1).number)
    return newest


def job(serving, count):
    """A job of this many members in one view."""
    members = [join(serving, "first"), join(serving, "second")]
    members[0].wait_newer(0)
    settle(*members)
    while len(members) < count:
        number = members[0].view.number
        late = join(serving)
        members.append(late)
        late.ready(number)
        late.wait_newer(number)
        settle(*members)
    return members


def test_members_get_the_same_views_and_a_place_by_their_address(serving):
    members = job(serving, 3)
    views = {member.view for member in members}
    (view,) = views
    assert (view.number, view.ids) == (2, (0, 1, 2))
    assert [member.name for member in view.members] == ["first", "second", "member-2"]
    assert {member.address for member in view.members} == {"127.0.0.1"}


def test_the_end_of_a_connection_is_told_to_the_others(serving):
    members = job(serving, 3)
    members[1].close()
    assert members[0].wait_newer(2).ids == members[2].wait_newer(2).ids == (0, 2)


def test_below_the_least_number_the_members_wait(serving):
    members = job(serving, 2)
    members[1].close()
    with pytest.raises(StoreLost, match=r"waited 0.2 s for a view after number 1; the service at .* is connected"):
        members[0].wait_newer(1, 0.2)
    late = join(serving)
    members[0].settled(members[0].view.number)
    late.ready(members[0].view.number)
    assert len(late.wait_newer(0).ids) == 2
    assert members[0].wait_newer(1) == late.view


def test_training_goes_on_while_the_service_is_gone_and_nothing_changes_when_it_returns(serving):
    members = job(serving, 3)
    view = members[0].view
    serving.stop()
    for member in members:
        member.check()
        assert member.view == view
    with pytest.raises(StoreLost, match="is not connected"):
        members[0].wait_newer(view.number, 0.3)
    serving.start()
    late = join(serving)  # answered only after the service runs
    assert serving.service.registry.view == view
    members[2].close()
    shrunk = members[0].wait_newer(view.number)
    assert (shrunk.ids, shrunk.number) == ((0, 1), view.number + 1)
    assert shrunk.epoch != view.epoch
    assert late.view is None


def test_a_member_that_was_excluded_hears_of_it(serving):
    members = job(serving, 3)
    for member in members[:2]:
        member.suspect((2,), 2)
    assert members[0].wait_newer(2).ids == (0, 1)
    with pytest.raises(Excluded, match="not in view 3 of 2 members: member-2 cannot reach other members"):
        members[2].wait_newer(2)


def test_one_that_leaves_is_not_waited_for(serving):
    members = job(serving, 3)
    members[0].leave()
    assert members[1].wait_newer(2).ids == (1, 2)


def test_a_wrong_token_is_an_error_on_both_sides(serving, caplog):
    with caplog.at_level(logging.WARNING, "commlib"):
        for _ in range(3):
            with pytest.raises(ConfigError, match="has another token"):
                Membership(serving.address, b"another secret here", Join("", "", "", 1, 1.0), LIMIT_S)
        stranger = socket.create_connection(("127.0.0.1", int(serving.address.split(":")[1])))
        with stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            stranger.settimeout(LIMIT_S)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(100):
                    pass
    lines = [record.message for record in caplog.records if "refused a connection" in record.message]
    assert len(lines) == 1, "once per address"


def test_no_service_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreLost, match="waited 0.3 s for a reply of the service at .* is not connected"):
            Membership(address, TOKEN, Join("", "", "", 1, 1.0), 0.3)


def test_a_long_wait_for_the_service_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(membership, "SILENT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreLost):
            Membership(address, TOKEN, Join("", "", "", 1, 1.0), 0.3)
    assert f"waiting for a reply of the service at {address}, at most 0.3 s" in caplog.text


@pytest.mark.parametrize("address", ["", "host", "host:", "host:x", ":1", "host:0", "host:65536"])
def test_a_malformed_address_is_refused(address):
    with pytest.raises(ConfigError, match="expected host:port"):
        Membership(address, TOKEN, Join("", "", "", 1, 1.0), 1.0)


def test_without_a_token_only_loopback_is_served(tmp_path):
    with pytest.raises(ConfigError, match="not a loopback address; give a token"):
        Service("0.0.0.0", 0, b"", tmp_path / "journal")


def test_a_journal_belongs_to_one_service(serving, tmp_path):
    with pytest.raises(ConfigError, match="another process has"):
        Service("127.0.0.1", 0, TOKEN, tmp_path / "journal")
    (tmp_path / "text").write_text("no journal\n")
    with pytest.raises(ConfigError, match="is not a journal of commlib"):
        Service("127.0.0.1", 0, TOKEN, tmp_path / "text")


def test_half_open_connections_and_garbage_keep_nobody_out(serving):
    """More connections than may be unknown at once, and what an attacker without the token can send."""
    members = job(serving, 2)
    source, where = random.Random(0), ("127.0.0.1", int(serving.address.split(":")[1]))
    with contextlib.ExitStack() as strangers:
        for _ in range(MOST_UNKNOWN + 40):
            half_open = strangers.enter_context(socket.create_connection(where))
            with contextlib.suppress(OSError):
                half_open.sendall(Wire("member", TOKEN).take_bytes_to_send()[: source.randrange(36)])
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(where) as stranger:
                stranger.sendall(source.randbytes(source.randrange(1, 3000)))
        late = join(serving)
        late.ready(1)
        assert late.wait_newer(0).ids == (0, 1, 2)
        assert members[0].wait_newer(1) == late.view


def test_a_member_that_says_what_no_member_says_is_dropped(serving):
    members = job(serving, 2)
    members[1]._sender.send(members[1]._wire.pack({"kind": "NewView"}), LIMIT_S)
    with pytest.raises(Excluded, match="view 2 of 1 members: you were excluded"):
        members[1].wait_newer(1)


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path):
    """A service in a process of its own: its process and address."""
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    options = ["--port", "0", "--fresh", "--min-members", "1", "--token-file", token, "--journal", tmp_path / "journal"]
    process = subprocess.Popen(
        [sys.executable, "-m", "commlib", "rendezvous", *map(str, options)], stdout=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait, LIMIT_S)
        stack.callback(process.kill)
        stack.callback(process.stdout.close)
        yield process, line.split()[2].rstrip(":"), stack


def test_heartbeats_need_no_interpreter():
    """`PyDLL` calls without releasing it."""
    near, far = socket.socketpair()
    with near, far:
        heartbeat = native.load().Heartbeat(near.fileno(), 0.01)
        ctypes.PyDLL(None).usleep(500_000)
        assert far.recv(1000, socket.MSG_DONTWAIT).count(HEARTBEAT) > 1
        assert heartbeat.send(b"message", LIMIT_S) == 0
        heartbeat.close()
        heartbeat.close()
        assert far.recv(1000).replace(HEARTBEAT, b"") == b"message"
        assert heartbeat.send(b"message", LIMIT_S) == errno.EBADF


def test_a_peer_that_reads_nothing_ends_a_send_in_time():
    near, far = socket.socketpair()
    with near, far:
        heartbeat = native.load().Heartbeat(near.fileno(), LIMIT_S)
        assert heartbeat.send(bytes(1 << 24), 0.1) == errno.ETIMEDOUT
        heartbeat.close()


STOPPED = """
import sys
from commlib.elastic.membership import Membership
from commlib.elastic.views import Join
from commlib.errors import Excluded
member = Membership(sys.argv[1], sys.argv[2].encode(), Join("stopped", "", "", 1, 5.0), 60.0)
print("view", member.wait_newer(0).number, flush=True)
try:
    member.wait_newer(1)
except Excluded as error:
    print(error, flush=True)
"""


def test_a_stopped_process_is_excluded_and_hears_of_it(serving):
    arguments = [sys.executable, "-c", STOPPED, serving.address, TOKEN.decode()]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    serving.members.callback(child.wait, LIMIT_S)
    serving.members.callback(child.kill)
    serving.members.enter_context(child.stdout)
    member = join(serving)
    assert child.stdout.readline() == "view 1\n"
    member.wait_newer(0)
    child.send_signal(signal.SIGSTOP)
    assert eventually(lambda: member.view.number == 2)
    assert len(member.view.ids) == 1
    child.send_signal(signal.SIGCONT)
    assert "not in view 2 of 1 members" in child.stdout.readline()


def test_status_shows_the_members(command):
    process, address, stack = command
    member = Membership(address, TOKEN, Join("me", "", "", 1, LIMIT_S), LIMIT_S)
    stack.callback(member.close)
    member.wait_newer(0)
    options = [address.split(":")[1], "--token-file", process.args[process.args.index("--token-file") + 1]]
    found = subprocess.run(
        [sys.executable, "-m", "commlib", "rendezvous", "--status", "--port", *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "view 1 of 1 members" in found.stdout
    assert "me" in found.stdout


def test_the_last_member_leaves(serving):
    """It is not taken back, although its view would wait for it."""
    members = job(serving, 2)
    members[1].close()
    assert eventually(lambda: len(members[0].view.ids) == 1)
    members[0].leave()
    with pytest.raises(Excluded, match="has left the job"):
        members[0].wait_newer(99)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"min_members": 1.5}, "min_members: expected a positive integer"),
        ({"min_members": 0}, "min_members: expected a positive integer"),
        ({"heartbeat_s": 0}, "heartbeat_s: expected a positive number"),
        ({"timeout": float("inf")}, "timeout: expected a positive number"),
    ],
)
def test_arguments_of_join(options, match):
    with pytest.raises(ConfigError, match=match):
        elastic.join("127.0.0.1:1", **options)


def test_whole_numbers_of_seconds(serving):
    with elastic.join(serving.address, token=TOKEN, heartbeat_s=60, timeout=60) as members:
        assert members.name
