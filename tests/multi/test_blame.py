"""A rank that dies, stops, leaves or gives up is named by all others, at once and alone, whatever they wait for.

"At once" is before any timeout: timeouts are longer than the time after which a test considers a rank to hang.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.errors import CommlibError, ConfigError, PeerTimeout, TransportError
from commlib.transport import connections, rendezvous, torch_dist
from commlib.transport.base import Communicator, Request
from commlib.transport.groups import resolve_group
from commlib.transport.torch_dist import TorchTransport
from tests.contract.subjects import of_each_kind
from tests.multi.common import Mlp, mlp_loss, seeded, sgd
from tests.multi.fault_scripts import HANG_S, LONG_S, SHORT_S, report, report_error, report_later
from tests.multi.notices import LIMIT_S, await_told, meet, others, tell
from tests.multi.pool import RankExit, on_ranks, start_ranks
from tests.multi.rank_worker import default_group_from_env
from tests.thin import fast
from tests.waiting import eventually

VICTIM = 1


def facts(rank: RankExit, event: str) -> dict[str, Any]:
    lines = [line.partition("REPORT ")[2] for line in rank.output.splitlines() if f'"event": "{event}"' in line]
    assert lines, f"rank {rank.rank} (exit code {rank.returncode}) reported no {event!r}:\n{rank.output}"
    return json.loads(lines[0])


def die() -> None:
    tell("dying")
    report(event="dying", at_s=time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def connect(timeout_s: float = LONG_S, group: Any = None) -> tuple[TorchTransport, Communicator]:
    transport = TorchTransport(resolve_group(group), torch.device("cpu"), timedelta(seconds=timeout_s))
    return transport, Communicator(transport.rank, transport.world_size)


def check(
    script: Callable[..., None],
    world_size: int,
    *args: Any,
    kind: str = "PeerFailure",
    accused: tuple[int, ...] = (VICTIM,),
    words: str = "",
    speakers: tuple[int, ...] | None = None,
) -> list[RankExit]:
    """Run a script; check that all other ranks name the accused, and end; return how these ended."""
    speakers = tuple(rank for rank in range(world_size) if rank not in accused) if speakers is None else speakers
    with start_ranks(script, world_size, *args) as ranks:
        exits = ranks.wait(HANG_S, speakers)
    for exit_ in exits:
        found = facts(exit_, "error")
        assert found["kind"] == kind, found
        assert found["ranks"] == list(accused), found
        assert words in found["message"], found
        said = found["message"].partition(": ")[2].partition(". Cause:")[0]  # without the speaker's own name
        assert list(map(int, re.findall(r"\brank (\d+)", said))) == list(accused), found
        assert exit_.returncode == 1, exit_.output
    return exits


# --- every algorithm -------------------------------------------------------------------------------------------------


def train_until_killed(algorithm: str, victim: int, last_step: int) -> None:
    """Train; the victim is killed after some steps. Some algorithms wait only in `synchronize`."""
    rank = default_group_from_env(timeout_s=LONG_S)
    for build in (sgd, lambda model: commlib.optim.FrozenVarianceAdam(model.parameters(), lr=0.01)):
        model = seeded(Mlp)
        optimizer = build(model)
        try:
            commlib.wrap(model, algorithm, optimizer=optimizer, timeout=LONG_S, bucket_cap_mb=0.001)
            break
        except ConfigError as error:  # some want an optimizer of their own
            refused = error
    else:
        raise refused
    tell("wrapped")
    try:
        for step in range(200):
            if rank == victim and step == last_step:
                await_told("wrapped", others())
                die()
            optimizer.zero_grad()
            mlp_loss(model, step).backward()
            optimizer.step()
        commlib.synchronize(model)
    except CommlibError as error:
        report_error(error)
        report_later(lambda: mlp_loss(model, 0))
        raise


@pytest.mark.parametrize("algorithm", of_each_kind(commlib.algorithms.list()))
def test_every_algorithm_names_a_killed_rank_and_nobody_else(algorithm: str) -> None:
    chance = random.Random(algorithm)
    world_size = chance.choice([4, 5])
    victim = chance.randrange(world_size)
    script = train_until_killed
    exits = check(script, world_size, algorithm, victim, chance.randrange(1, 12), accused=(victim,))
    for exit_ in exits:  # later errors say so, too
        later = facts(exit_, "later")
        assert (later["kind"], later["ranks"]) == ("PeerFailure", [victim]), later


def die_before_synchronize(algorithm: str) -> None:
    rank = default_group_from_env(timeout_s=60)
    model = seeded(Mlp)
    commlib.wrap(model, algorithm, optimizer=sgd(model), timeout=LONG_S)
    tell("wrapped")
    if rank == VICTIM:
        await_told("wrapped", others())
        die()
    try:
        commlib.synchronize(model)
    except CommlibError as error:
        report_error(error)
        report_later(lambda: mlp_loss(model, 0))
        raise


@pytest.mark.parametrize(
    "algorithm", fast(["diloco", "hogwild", "async_sgd", "async_averaging"], "diloco", "async_sgd")
)
def test_what_synchronize_has_met_is_said_again_by_the_next_step(algorithm: str) -> None:
    for exit_ in check(die_before_synchronize, 3, algorithm):
        later = facts(exit_, "later")
        assert (later["kind"], later["ranks"]) == ("PeerFailure", [VICTIM]), later


# --- every verb ------------------------------------------------------------------------------------------------------


def requests(verb: str, comm: Communicator) -> Request:
    size, large = comm.world_size, 1 << 20
    beside = [(comm.rank + 1) % size, (comm.rank - 1) % size]
    match verb:
        case "all_reduce":
            return comm.all_reduce(torch.ones(4 * large))
        case "all_gather":
            return comm.all_gather(torch.empty(size * large), torch.ones(large))
        case "all_to_all":
            return comm.all_to_all(torch.empty(size * large), torch.ones(size * large))
        case "small all_to_all":
            return comm.all_to_all(torch.empty(size), torch.ones(size))
        case "broadcast":
            return comm.broadcast(torch.ones(large), 2)
    values = [torch.empty(large) for _ in beside]
    return comm.exchange(
        [(peer, torch.ones(large)) for peer in beside], list(zip(reversed(beside), values, strict=True))
    )


def repeat_until_killed(verb: str) -> None:
    """Make one collective after another; the victim is killed in the middle of one."""
    rank = default_group_from_env(timeout_s=LONG_S)
    transport, comm = connect()
    tell("connected")
    if rank == VICTIM:
        await_told("connected", others())
        threading.Timer(random.uniform(0.2, 0.5), die).start()
    try:
        while True:
            transport.complete(requests(verb, comm), "a collective")
    except CommlibError as error:
        report_error(error)
        raise


MORE_VERBS = [("all_reduce", 5), ("all_gather", 4), ("all_gather", 5), ("small all_to_all", 4), ("broadcast", 4)]


@pytest.mark.parametrize(
    ("verb", "world_size"),
    [
        ("all_reduce", 4),
        ("all_to_all", 5),
        ("exchange", 5),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_VERBS),
    ],
)
def test_every_verb_names_a_killed_rank_and_nobody_else(verb: str, world_size: int) -> None:
    check(repeat_until_killed, world_size, verb, words="a collective failed: a peer was lost; rank 1 was killed")


@pytest.mark.timing
def test_a_killed_rank_is_told_of_within_seconds() -> None:
    with start_ranks(repeat_until_killed, 4, "all_reduce") as ranks:
        exits = ranks.wait(HANG_S)
    died_s = facts(exits[VICTIM], "dying")["at_s"]
    took_s = [facts(exit_, "error")["at_s"] - died_s for exit_ in exits if exit_.rank != VICTIM]
    assert max(took_s) < 5.0, took_s


def all_reduce_beside(busy: tuple[int, ...], ending: str) -> None:
    """All but the victim, which ends in some way instead, make a large all-reduce; the busy ones once the others know.

    A victim that is stopped is not known of before the timeout, so the busy ones are late by a second only.
    """
    rank, is_stopped = default_group_from_env(timeout_s=LONG_S), ending == "stopped"
    transport, comm = connect(SHORT_S if is_stopped else LONG_S)
    transport.complete(requests("all_reduce", comm), "the first collective")
    tell("here")
    if rank == VICTIM:
        await_told("here", others())  # the next line ends the collective if it is not over yet
        ENDINGS[ending](transport)
        return
    if rank in busy:
        time.sleep(1.0)
        await_told("failed", [] if is_stopped else [each for each in others() if each not in (VICTIM, *busy)])
    try:
        transport.complete(requests("all_reduce", comm), "the second collective")
    except CommlibError as error:
        report_error(error)
        tell("failed")
        raise


def stop(transport: TorchTransport) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(transport: TorchTransport) -> None:
    transport.close()
    await_told("failed", others())


def give_up(transport: TorchTransport) -> None:
    transport.abort()
    await_told("failed", others())


def raise_an_error(transport: TorchTransport) -> None:
    raise KeyError("the user's own error")


def die_with_a_child(transport: TorchTransport) -> None:
    """A data loader's worker, say, holds copies of all connections and outlives its parent."""
    if os.fork() == 0:
        deadline = time.monotonic() + LONG_S
        while os.fstat(1).st_nlink and time.monotonic() < deadline:  # the test is over when the log is removed
            time.sleep(0.05)
        os._exit(0)
    die()


ENDINGS: dict[str, Callable[[TorchTransport], None]] = {
    "killed": lambda transport: die(),
    "killed, with a child": die_with_a_child,
    "stopped": stop,
    "left": leave,
    "gave up": give_up,
    "failed": raise_an_error,
    "script over": lambda transport: None,
}


@pytest.mark.parametrize(
    ("world_size", "busy", "ending", "words"),
    [
        (4, (3,), "killed", "was killed"),
        (5, (0, 2), "killed", "was killed"),  # ranks that would see the victim's connections break are busy
        (4, (), "killed, with a child", "was killed"),
        (4, (3,), "left", "rank 1 left"),
        (4, (3,), "script over", "rank 1 left"),
        (4, (3,), "gave up", "rank 1 ended this model's communication"),
        (4, (3,), "failed", "rank 1 ended with an exception"),
    ],
    ids=["killed", "killed-beside-busy-ones", "killed-with-a-child", "left", "script-over", "gave-up", "failed"],
)
def test_how_a_rank_ended_is_told_while_another_one_is_busy(
    world_size: int, busy: tuple[int, ...], ending: str, words: str
) -> None:
    check(all_reduce_beside, world_size, busy, ending, words=words)


def test_a_stopped_rank_is_named_alone_and_late() -> None:
    with start_ranks(all_reduce_beside, 4, (3,), "stopped") as ranks:
        for exit_ in ranks.wait(HANG_S, [0, 2, 3]):
            found = facts(exit_, "error")
            assert (found["kind"], found["ranks"]) == ("PeerTimeout", [VICTIM]), found
            assert f"no answer within {SHORT_S:g} s; rank 1 did not arrive" in found["message"], found


def come_late() -> None:
    """The victim comes to a collective when the others have given up, and they stay: an end would be told of, too."""
    rank = default_group_from_env(timeout_s=LONG_S)
    transport, comm = connect(SHORT_S)
    if rank == VICTIM:
        await_told("failed", others())
    try:
        transport.complete(requests("all_reduce", comm), "the collective")
    except CommlibError as error:
        report_error(error)
        tell("failed")
        await_told("failed", others())
        raise


def test_a_rank_that_comes_too_late_is_told_that_it_was_the_one() -> None:
    check(come_late, 3, kind="PeerTimeout", speakers=(0, 1, 2), words="rank 1 ")


def in_a_subgroup() -> None:
    """Ranks 1 and 3 have a communicator of their own; 3 is killed."""
    rank = default_group_from_env(timeout_s=LONG_S)
    group = dist.new_group([1, 3], timeout=timedelta(seconds=LONG_S))
    if rank in (0, 2):
        await_told("failed", [1])
        return
    transport, comm = connect(group=group)
    tell("connected")
    if rank == 3:
        await_told("connected", [1])
        die()
    try:
        transport.complete(requests("all_reduce", comm), "the collective")
    except CommlibError as error:
        report_error(error)
        tell("failed")
        raise


def test_ranks_are_those_of_the_default_group() -> None:
    check(in_a_subgroup, 4, accused=(3,), speakers=(1,), words="rank 1 (0 of 2 in its group): the collective failed")


# --- set-up ----------------------------------------------------------------------------------------------------------


def come_and_die(moment: str, victim: int) -> None:
    """Have the victim killed at a moment of the meeting of the ranks, seen from inside."""
    is_there = {
        "here": lambda attempt: True,
        "invited": lambda attempt: attempt._store.check(["invitation"]),
        "acknowledged": lambda attempt: attempt._invited,
    }[moment]
    name = "_follow" if victim else "_lead"
    go_on = getattr(rendezvous._Attempt, name)

    def look(attempt: Any) -> bool:
        if moment != "acknowledged" and is_there(attempt):
            die()
        went_on = go_on(attempt)
        if is_there(attempt):
            die()
        return went_on

    setattr(rendezvous._Attempt, name, look)


#: Where the victim is killed, in the order of the set-up; the first three are moments of the meeting.
MOMENTS: dict[str, Any] = {
    "here": None,
    "invited": None,
    "acknowledged": None,
    "met": (rendezvous, "connect_all"),
    "listening": (connections, "_family"),
    "dialing": (connections, "_dial"),
    "connecting": (connections, "_accept"),
    "backend": (torch_dist, "_make_backend"),
    "connected": (TorchTransport, "_await_all"),
    "agreeing": (commlib.verify, "agree"),
}


def wrap_and_die(moment: str, victim: int = VICTIM, late: tuple[int, ...] = ()) -> None:
    """The victim is killed at some moment of `wrap`; the late ones come when the others know, or else when it dies."""
    rank = default_group_from_env(timeout_s=LONG_S)
    meet()
    if rank == victim and MOMENTS[moment] is None:
        come_and_die(moment, victim)
    elif rank == victim:
        setattr(*MOMENTS[moment], lambda *_, **__: die())
    if rank in late:
        prompt = [each for each in others() if each not in (victim, *late)]
        await_told("failed" if prompt else "dying", prompt or [victim])
    try:
        commlib.wrap(seeded(Mlp), timeout=LONG_S)
    except CommlibError as error:
        tell("failed")  # which nothing holds up
        report_error(error)
        raise


@pytest.mark.parametrize("moment", fast(MOMENTS, "invited", "met", "dialing", "backend", "connected"))
@pytest.mark.parametrize("world_size", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_a_rank_that_is_killed_during_wrap(moment: str, world_size: int) -> None:
    check(wrap_and_die, world_size, moment)


@pytest.mark.parametrize("moment", ["here", "invited", "acknowledged"])
def test_the_rank_that_invites_is_killed_during_wrap(moment: str) -> None:
    check(wrap_and_die, 3, moment, 0, accused=(0,))


def host_the_store_and_die() -> None:
    """The rank that invites hosts the store, too, as under `torch.multiprocessing`, and is killed while all wait."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), world_size, False)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        shared.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(shared.get("port")), world_size, False)
    limit = timedelta(seconds=LONG_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    meet()
    if rank == 0:
        watchers = lambda attempt: len(attempt._meeting.presence._guests)  # noqa: E731
        rendezvous._Attempt._lead = lambda attempt: die() if watchers(attempt) == world_size - 1 else False
    try:
        commlib.wrap(seeded(Mlp), timeout=LONG_S)
    except CommlibError as error:
        report_error(error)
        raise


def test_the_rank_that_hosts_the_store_is_killed_during_wrap() -> None:
    check(host_the_store_and_die, 3, accused=(0,), words="commlib.wrap failed: the store was lost")


def test_a_rank_that_is_killed_while_another_one_is_late() -> None:
    """The late one is told as well, though all others have gone by then."""
    check(wrap_and_die, 4, "here", VICTIM, (3,))


def test_a_rank_that_is_killed_before_any_other_comes() -> None:
    check(wrap_and_die, 3, "here", VICTIM, (0, 2))


#: Longer than a machine may stand still, and shorter than `SHORT_S`, as it is waited out twice.
TWICE_S = 6.0


def wrap_late() -> None:
    """The victim comes to `wrap` later than the timeout, and not to the second collective."""
    rank = default_group_from_env(timeout_s=LONG_S)
    tell("here")
    if rank == VICTIM:
        await_told("here", others())
        time.sleep(TWICE_S + 1)
    model = commlib.wrap(seeded(Mlp), timeout=TWICE_S)
    mlp_loss(model, 0).backward()
    report(event="wrapped")
    if rank == VICTIM:
        await_told("failed", others())
    try:
        mlp_loss(model, 1).backward()
    except CommlibError as error:
        report_error(error)
        tell("failed")
        raise


def test_the_timeout_holds_once_all_ranks_have_come() -> None:
    """Set-up waits as long as the group's own timeout says."""
    with start_ranks(wrap_late, 3) as ranks:
        for exit_ in ranks.wait(HANG_S, [0, 2]):
            facts(exit_, "wrapped")
            found = facts(exit_, "error")
            assert (found["kind"], found["ranks"]) == ("PeerTimeout", [VICTIM]), found
            assert f"no answer within {TWICE_S:g} s; rank 1 did not arrive" in found["message"], found


@on_ranks(2)
@pytest.mark.parametrize("verb", ["all_reduce", "all_to_all", "small all_to_all", "exchange"])
def test_the_timeout_holds_for_each_kind_of_work(verb: str) -> None:
    """None has that of the set-up, with which the backend was made: far longer than ranks may take here."""
    limits = timedelta(seconds=1), timedelta(hours=1)
    transport = TorchTransport(resolve_group(None), torch.device("cpu"), *limits)
    if transport.rank == 0:
        with pytest.raises(PeerTimeout, match="no answer within 1 s; rank 1 did not arrive"):
            transport.complete(requests(verb, Communicator(0, 2)), "a collective")
    dist.barrier()
    transport.close()


def wrap_beside_a_stopped_one() -> None:
    """The victim is stopped as soon as it is here."""
    rank = default_group_from_env(timeout_s=SHORT_S)
    if rank == VICTIM:
        rendezvous._Attempt._follow = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        commlib.wrap(seeded(Mlp), timeout=1)
    except CommlibError as error:
        report_error(error)
        raise


def test_a_rank_that_is_stopped_during_wrap_is_late_and_not_dead() -> None:
    words = f"rank 1 did not arrive within {SHORT_S:g} s"
    check(wrap_beside_a_stopped_one, 3, kind="PeerTimeout", words=words)


@on_ranks(3)
def test_a_wrap_that_ranks_missed_does_not_poison_the_next() -> None:
    """Rank 1 misses one, rank 2 two; then all make several communicators, in the whole group and in a part of it."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    for absent in ({1, 2}, {2}):
        if rank not in absent:
            with pytest.raises(PeerTimeout) as caught:
                connect(0.5 if rank == 0 and len(absent) == 2 else TWICE_S)
            assert caught.value.ranks == absent, caught.value
            assert f"failed: {'rank 2' if len(absent) == 1 else 'ranks [1, 2]'} did not arrive" in str(caught.value)
        dist.barrier()
    for _ in range(3):
        transport, comm = connect()
        total = torch.ones(5)
        transport.complete(comm.all_reduce(total), "the collective")
        assert (total == 3).all()
        transport.close()
    if rank != 1:
        transport, comm = connect(group=pair)
        total = torch.ones(5)
        transport.complete(comm.all_reduce(total), "the collective")
        assert (total == 2).all()
        transport.close()


# --- errors at set-up ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_no_plain_value_is_an_error_on_all_ranks() -> None:
    transport, _ = connect()
    with pytest.raises((ConfigError, TransportError)) as caught:
        transport.gather_objects(object() if dist.get_rank() == 1 else "plain")
    words = "it is of type object" if dist.get_rank() == 1 else "rank 1 could not send its value: cannot send value"
    assert words in str(caught.value)
    assert transport.gather_objects((dist.get_rank(), b"x", None)) == [(0, b"x", None), (1, b"x", None)]
    transport.close()


@on_ranks(2)
@pytest.mark.parametrize("data", [b"\x80\x04K\x05.", b'{"t": [true', b"3", b'{"t": [true]}', b" "], ids=range(5))
def test_malformed_bytes_name_their_sender(data: bytes) -> None:
    transport, _ = connect()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(torch_dist, "encode", lambda value: data)
        with pytest.raises(TransportError, match="rank 1 sent malformed set-up information"):
            transport.gather_objects("plain")
    transport.close()


@on_ranks(2)
@pytest.mark.parametrize("announced", [-1, 0, 1 << 62])
def test_a_senseless_size_names_its_sender(announced: int) -> None:
    transport, comm = connect()
    if dist.get_rank() == 1:
        transport.complete(comm.all_gather(torch.empty(2, dtype=torch.int64), torch.tensor([announced])), "a trick")
    else:
        with pytest.raises(TransportError, match=rf"rank 1 sent malformed .* announced {announced} bytes"):
            transport.gather_objects("plain")
    transport.close()


# --- nothing is left, nothing is lost --------------------------------------------------------------------------------


@on_ranks(3)
def test_lifelines_cost_one_connection_a_peer_and_end_with_the_transport() -> None:
    before = set(threading.enumerate())  # one of another test may still be about to end
    transport, comm = connect()
    lines = transport._lifelines
    assert lines is not None
    assert len(lines._sockets) == 2
    assert [t.name for t in threading.enumerate() if t not in before and "lifelines" in t.name] == ["commlib-lifelines"]
    transport.complete(comm.all_reduce(torch.ones(3)), "a collective")
    dist.barrier()
    transport.close()
    assert eventually(lambda: set(threading.enumerate()) <= before), threading.enumerate()
    assert all(each.fileno() == -1 for each in lines._sockets.values())


@on_ranks(2)
def test_a_store_that_does_not_answer_is_told_and_where() -> None:
    """Nothing ends a call of the store, so a thread of its own makes it."""
    over, returned = threading.Event(), threading.Event()

    def hanging(*_: object) -> None:
        over.wait(LIMIT_S)
        returned.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "Meeting", hanging)
        patch.setattr(rendezvous, "GRACE_S", 0.2)
        with pytest.raises(PeerTimeout, match=r"did not answer within 0\.3 s.*no return from wait, threading\.py:\d+"):
            connect(0.3)
        assert not returned.is_set(), "the call was waited for"
    over.set()
    dist.barrier()
    commlib.unwrap(commlib.wrap(seeded(Mlp)))
