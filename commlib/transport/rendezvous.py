"""Rendezvous of the ranks of a group through its store, before they have connections.

[Note: meeting] A communicator needs an unused prefix of the store, named identically on all ranks. Counting calls does
not work: after a rank has missed a call, its count stays different. So each call draws a random number, its *attempt*,
and group rank 0 collects the attempts:

    every rank    here/<rank> = "+<mark>" while it is in the call, "-<time> <mark>" afterwards; a mark has the attempt
    rank 0        once all are present: invitation = (name, all attempts), with a new name whenever an attempt changed
    other ranks   on an invitation with their current attempt: ack/<name>/<rank>
    rank 0        once all have acknowledged: go/<name>, which the other ranks poll for

Stale entries (of a rank that gave up, was killed or missed the call, or of an earlier run of the job on the same store)
are never confirmed, because no rank acknowledges in their name. In its next call, rank 0 may invite an attempt that has
just succeeded. The "go" for that attempt is then already in the store, and its rank checks for it after reading the
invitation and before acknowledging. Time is a counter in the store, because the clocks of hosts differ: a rank whose
last call ended before this one began is absent.

Waiting ranks check whether present ranks die; see [Note: presence] in transport/presence.py. A rank that detects a
death notifies the others:

    before "go"   gone = (time, rank, attempt, how); valid for ranks whose call had begun, while the attempt is present
    after "go"    ended = (whether ranks were late, those ranks), in the agreed prefix of the store
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from commlib.errors import CommlibError, PeerFailure, PeerTimeout, TransportError
from commlib.transport.addresses import local_address
from commlib.transport.backends import attend, place_of
from commlib.transport.base import EndedError
from commlib.transport.connections import connect_all
from commlib.transport.plain import MalformedError, decode, encode
from commlib.transport.presence import CERTAIN_S, LOOK_S, MOMENT_S, WATCHED, Mark, Presence

#: How long a store that hangs may exceed the timeout, in seconds.
GRACE_S = 5.0

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class Meeting:
    """A completed meeting of all ranks of a group, with its own prefix of the store. Construction is collective.

    Args:
        store: The store where they meet; used by one group only.
        rank: This rank within the group.
        global_ranks: The group's ranks in the default group, for error messages.
        timeout_s: How long to wait for the other ranks, in total.
        given_up: Set when the caller no longer waits for the meeting, which then ends.

    Raises:
        PeerTimeout: Ranks did not arrive.
        PeerFailure: A rank died meanwhile.
        TransportError: The store does not answer.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        global_ranks: Sequence[int],
        timeout_s: float,
        given_up: threading.Event | None = None,
    ) -> None:
        self.rank, self.world_size, self.global_ranks = rank, len(global_ranks), global_ranks
        self.timeout_s = timeout_s
        self._given_up = given_up or threading.Event()
        self._deadline = time.monotonic() + timeout_s
        self._look_s = time.monotonic() + MOMENT_S
        self._turns = itertools.count()
        self._marks = _Marks(dist.PrefixStore("commlib/meeting", store), rank, self.world_size)
        self._address = local_address(store)
        self.presence = Presence(secrets.token_hex(8), self._address, self.world_size + 16)
        try:
            with self._asking():
                attempt = _Attempt(self._marks, self)
        except BaseException:
            self.close()
            raise
        self.name, self._attempts = attempt.name, attempt.everyone
        self.store = dist.PrefixStore(f"commlib/{self.name}", store)

    def close(self) -> None:
        """Stop listening. The other ranks must not need this rank's entries in the store any more."""
        self.presence.close()

    def own_store(self) -> dist.Store:
        """Return `store` over a separate connection, for backends.

        A backend waits in the store for its peers and occupies the connection meanwhile. With a shared connection, a
        backend whose peer has exited would block all other users of the group's store. A store that cannot be cloned
        (one written in Python) is returned as it is.
        """
        try:
            return self.store.clone()  # pyright: ignore[reportAttributeAccessIssue] (not in torch's stubs)
        except (AttributeError, RuntimeError):
            return self.store

    def local_address(self) -> str:
        """Return the address of this host for connections from other ranks; loopback if unknown."""
        return self._address

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's plain `value`, in rank order. Blocks."""
        turn = next(self._turns)
        keys = [f"told/{turn}/{rank}" for rank in range(self.world_size)]
        with self._asking():
            self.store.set(keys[self.rank], encode(value).decode("ascii"))
            if not self.wait(lambda: self.store.check(keys), self._look):
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise self.diagnose(TimeoutError("nothing was written to the store"), "the set-up", missing)
            return [self._decoded(rank, data) for rank, data in enumerate(read(self.store, keys))]

    def wait(self, condition: Callable[[], bool], look: Callable[[], None]) -> bool:
        """Wait until `condition()`, at most until the deadline of the meeting; return whether it became true.

        Args:
            condition: Polled repeatedly.
            look: Called at intervals of `LOOK_S`, after `MOMENT_S`; raises if a rank has died.
        """
        pause_s = _FIRST_PAUSE_S
        while not condition():
            if time.monotonic() > self._deadline:
                return False
            self.presence.greet()
            if time.monotonic() > self._look_s:
                look()
                self._look_s = time.monotonic() + LOOK_S
            if self._given_up.wait(pause_s):
                raise TransportError(f"{name_of(self.rank, self.global_ranks)}: the set-up was abandoned on this rank")
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _look(self) -> None:
        """Raise if a rank has died or given up since all agreed that they are present."""
        if self.store.check(["ended"]):
            timed_out, accused = self._decoded(self.rank, read(self.store, ["ended"])[0])
            raise self.failure(timed_out, "the set-up failed", accused, ConnectionError("reported by another rank"))
        marks = {peer: mark for peer, (_, mark) in self._marks.read().items() if mark.attempt == self._attempts[peer]}
        if gone := self.presence.gone(marks, is_agreed=True):
            raise self.diagnose(ConnectionError("; ".join(gone.values())), "the set-up", sorted(gone))

    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> TransportError:
        """Return the error that names the `suspects` (group ranks), or the ranks that they blamed before they ended.

        A rank that gives up writes the ranks that it blames before it closes any connection, so its own end is ignored.
        """
        timed_out, accused = isinstance(error, TimeoutError), set(suspects)
        if not timed_out:
            for peer in suspects:
                if self.store.check([f"failed/{peer}"]):
                    timed_out, others = self._decoded(peer, read(self.store, [f"failed/{peer}"])[0])
                    accused = accused - {peer} | set(others)
        said = encode((timed_out, sorted(accused))).decode("ascii")
        self.store.set(f"failed/{self.rank}", said)
        self.store.set("ended", said)
        self.store.check(["ended"])  # makes sure that both are in the store before the connections close
        return self.failure(timed_out, f"{what} failed", sorted(accused), error)

    def failure(self, timed_out: bool, what: str, ranks: Sequence[int], error: BaseException) -> TransportError:
        """Return an error that names these ranks."""
        accused = sorted(self.global_ranks[rank] for rank in ranks)
        how = f"did not arrive within {self.timeout_s:g} s" if timed_out else "died during it"
        who = f"{named(accused)} {how}" if accused else "the rank that did not answer is not known"
        kind = PeerTimeout if timed_out else PeerFailure
        return kind(f"{name_of(self.rank, self.global_ranks)}: {what}: {who}. Cause: {error}", accused)

    def _decoded(self, rank: int, data: bytes) -> Any:
        try:
            return decode(data)
        except MalformedError as error:
            raise TransportError(
                f"{name_of(self.rank, self.global_ranks)}: rank {self.global_ranks[rank]} wrote into the store {error}"
            ) from None

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Convert errors of the store within the block to errors that describe the cause."""
        try:
            yield
        except CommlibError:
            raise
        except (RuntimeError, MalformedError) as error:
            if gone := self._gone_with_the_store():
                raise self.failure(False, "commlib.wrap failed: the store was lost", gone, error) from error
            raise TransportError(
                f"{name_of(self.rank, self.global_ranks)}: commlib.wrap failed: the process group's store does not "
                f"answer; its host, often rank 0, may have exited. Cause: {error}"
            ) from error

    def _gone_with_the_store(self) -> list[int]:
        """Return the ranks that have died, when the store no longer answers; its host may be among them."""
        deadline = time.monotonic() + CERTAIN_S + 3 * LOOK_S
        while time.monotonic() < deadline:
            if gone := self.presence.ended():
                return sorted(gone)
            time.sleep(LOOK_S)
        return []


class _Marks:
    """The marks in the store of the ranks that this rank watches."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        hops = range(1, min(WATCHED + 1, world_size))
        self._watched = [(rank + hop) % world_size for hop in hops]

    def read(self) -> dict[int, tuple[str, Mark]]:
        """Return the existing marks, each with "+" or with the "-<time>" of its withdrawal."""
        there = [peer for peer in self._watched if self.store.check([f"here/{peer}"])]
        if not there:
            return {}
        words = [data.decode().partition(" ") for data in read(self.store, [f"here/{peer}" for peer in there])]
        marks = [Mark.parse(rest) for _, _, rest in words]
        return {peer: (sign, mark) for peer, (sign, _, _), mark in zip(there, words, marks, strict=True) if mark}


#: Attempts of dead ranks that this process has already reported; a later call may succeed without or with their ranks.
_told: set[str] = set()


class _Attempt:
    """One rank's side of [Note: meeting]; `name` and `everyone` are the agreed name and the attempts of all ranks."""

    def __init__(self, marks: _Marks, meeting: Meeting) -> None:
        self._store, self._rank, self._size = marks.store, meeting.rank, meeting.world_size
        self._marks, self._meeting = marks, meeting
        self._own = meeting.presence.mark.attempt
        self._began = self._store.add("time", 1)
        self._invited: list[str] = []  # the name of the last invitation, and its attempts
        self.name = ""
        self.everyone: list[str] = []
        words = meeting.presence.mark.words()
        self._store.set(f"here/{self._rank}", f"+ {words}")
        try:
            if not meeting.wait(self._lead if self._rank == 0 else self._follow, self._look):
                raise meeting.failure(
                    True, "creating the communicator in commlib.wrap failed", self._absent(), TimeoutError("no answer")
                )
        finally:
            self._store.set(f"here/{self._rank}", f"-{self._store.add('time', 1)} {words}")
            self._store.check(["time"])  # makes sure that the mark is written before this rank stops listening

    def _lead(self) -> bool:
        keys = [f"here/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return False
        marks = [data.decode().split(" ") for data in read(self._store, keys)]
        if not all(mark[0] == "+" for mark in marks):
            return False
        attempts = [mark[1] for mark in marks]
        if self._invited[1:] != attempts:
            self._invited = [secrets.token_hex(8), *attempts]
            self._store.set("invitation", encode(self._invited).decode("ascii"))
        if not self._store.check(self._acknowledgements()):
            return False
        self._store.set(f"go/{self._invited[0]}", "1")
        self.name, *self.everyone = self._invited
        return True

    def _follow(self) -> bool:
        invitation: list[str] = []
        if self._store.check(["invitation"]):
            invitation = decode(read(self._store, ["invitation"])[0])
        if self._invited and self._store.check([f"go/{self._invited[0]}"]):  # after `invitation`; see [Note: meeting]
            self.name, *self.everyone = self._invited
            return True
        if invitation[1 + self._rank : 2 + self._rank] == [self._own] and invitation != self._invited:
            self._invited = invitation
            self._store.set(f"ack/{invitation[0]}/{self._rank}", "1")
        return False

    def _acknowledgements(self) -> list[str]:
        return [f"ack/{self._invited[0]}/{rank}" for rank in range(1, self._size)]

    def _look(self) -> None:
        """Raise if a present rank has died."""
        found = self._marks.read()
        marks = {rank: mark for rank, (sign, mark) in found.items() if sign == "+" and mark.attempt not in _told}
        gone = self._meeting.presence.gone(marks, is_agreed=False)
        for rank, how in gone.items():
            said = [self._store.add("time", 1), rank, marks[rank].attempt, how]
            self._store.set("gone", encode(said).decode("ascii"))
        if not gone:
            gone = self._told_gone()
        if gone:
            _told.update(found[rank][1].attempt for rank in gone if rank in found)
            what = "creating the communicator in commlib.wrap failed"
            raise self._meeting.failure(False, what, sorted(gone), ConnectionError("; ".join(gone.values())))

    def _told_gone(self) -> Mapping[int, str]:
        """Return the rank that another rank reported as having died during this call, with the evidence."""
        if not self._store.check(["gone"]):
            return {}
        at, rank, attempt, how = decode(read(self._store, ["gone"])[0])
        now = read(self._store, [f"here/{rank}"])[0].decode().split(" ")
        return {rank: how} if at > self._began and now[:2] == ["+", attempt] else {}

    def _absent(self) -> list[int]:
        """Return the ranks absent during this call, or, if all were present, the ranks that stopped answering."""
        found = [rank for rank in range(self._size) if rank != self._rank and not self._was_here(rank)]
        if found:
            return found
        if not self._invited:
            return [0] if self._rank else []
        silent = [not self._store.check([key]) for key in self._acknowledgements()]
        return [rank for rank, is_silent in enumerate(silent, 1) if is_silent and rank != self._rank]

    def _was_here(self, rank: int) -> bool:
        key = f"here/{rank}"
        if not self._store.check([key]):
            return False
        sign = read(self._store, [key])[0].decode().partition(" ")[0]
        return sign == "+" or int(sign[1:]) > self._began


class Met(NamedTuple):
    """Ranks that have met.

    Attributes:
        place: A name that no other communicator has, the same on all ranks.
        store: A store for the communicator alone.
        made: The connections that this rank opened, by peer.
        accepted: The connections that its peers opened, by peer.
    """

    place: str
    store: dist.Store
    made: Mapping[int, socket.socket]
    accepted: Mapping[int, socket.socket]


def meet(store: dist.Store, rank: int, global_ranks: Sequence[int], timeout_s: float, last_word: bytes) -> Met:
    """Let the ranks of a group meet, and connect every pair. Collective; takes at most little more than `timeout_s`.

    Args:
        store: The group's store.
        rank: This rank within the group.
        global_ranks: The group's ranks in the default group, for error messages.
        timeout_s: How long to wait for the other ranks.
        last_word: See `connect_all`.

    Raises:
        PeerTimeout: Ranks did not arrive, or the store does not answer.
        PeerFailure: Ranks died.
        TransportError: The ranks cannot be connected.
    """
    deadline = time.monotonic() + timeout_s + GRACE_S
    thread, given_up = 0, threading.Event()

    def connect() -> Met:
        nonlocal thread
        thread = threading.get_ident()
        with contextlib.closing(Meeting(store, rank, global_ranks, timeout_s, given_up)) as meeting:
            made, accepted = connect_all(meeting, last_word)
            return Met(meeting.name, meeting.own_store(), made, accepted)

    def check() -> None:
        if time.monotonic() > deadline:
            raise PeerTimeout(
                f"{name_of(rank, global_ranks)}: creating the communicator in commlib.wrap failed: the process group's "
                f"store did not answer within {timeout_s:g} s; its host may hang, or another thread of this process "
                f"may be waiting in it. Cause: no return from {place_of(thread)}"
            )

    try:
        return attend(connect, check)
    finally:
        given_up.set()  # also if Ctrl-C ends the wait, so that this rank's mark is withdrawn


def all_said(
    store: dist.Store, rank: int, global_ranks: Sequence[int], said: str, timeout_s: float, check: Callable[[], None]
) -> list[bytes]:
    """Write a value under a dedicated prefix of the store; return the values of all ranks.

    Args:
        store: The store with this prefix.
        rank: This rank within the group.
        global_ranks: The group's ranks in the default group, for error messages.
        said: The value.
        timeout_s: How long to wait for the other ranks.
        check: Called while waiting; raises `EndedError` if the wait cannot succeed.

    Raises:
        TimeoutError: Ranks have written nothing, or the store does not answer.
        EndedError: Raised by `check`; the message names the ranks that have written nothing.
    """
    keys = [str(each) for each in range(len(global_ranks))]
    deadline = time.monotonic() + timeout_s
    has_ended, reasons = threading.Event(), list[EndedError]()

    def ask() -> list[bytes]:
        store.set(keys[rank], said)
        while not store.check(keys):
            if has_ended.wait(_FIRST_PAUSE_S) or time.monotonic() > deadline:
                silent = [each for each, key in zip(global_ranks, keys, strict=True) if not store.check([key])]
                why = f"{named(silent)} wrote nothing into the store"
                raise EndedError(f"{reasons[0]}; {why}") if reasons else TimeoutError(f"timed out: {why}")
        return read(store, keys)

    def look() -> None:
        try:
            check()
        except EndedError as error:  # the other thread raises it with the missing ranks
            reasons.append(error)
            has_ended.set()
        if time.monotonic() > deadline + GRACE_S:
            raise TimeoutError("timed out: the process group's store does not answer")

    try:
        return attend(ask, look)
    finally:
        has_ended.set()


def read(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of existing keys."""
    return list(store.multi_get(keys)) if store.has_extended_api() else [store.get(key) for key in keys]


def named(ranks: Sequence[int]) -> str:
    """Format a list of ranks for error messages."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def name_of(rank: int, global_ranks: Sequence[int]) -> str:
    """Format a rank of a group for error messages."""
    size = len(global_ranks)
    if list(global_ranks) == list(range(size)):
        return f"rank {rank} of {size}"
    return f"rank {global_ranks[rank]} ({rank} of {size} in its group)"
