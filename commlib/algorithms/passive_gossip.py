"""Gossip that asks nobody to take part: averaging with the weights that a partner published."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm, Attachment, Runner, Traffic
from commlib.algorithms.channels import SelfRunning
from commlib.algorithms.families.published import Copy, Published, Snapshot
from commlib.errors import ConfigError
from commlib.primitives.replicate import mean_all
from commlib.primitives.topology import RandomMatching
from commlib.transport.mailbox import HEADER_BYTES, Message

#: Questions: for the copy of a number; for that, or the latest in its place.
_FETCH, _FETCH_ANY = 1, 2
#: Answers: a copy; that there is none yet, with the number of the latest.
_COPY, _NOTHING = 1, 2
#: How many copies a partner may be behind for its copy of the same number to be waited for.
_PATIENCE = 2


class PassiveGossip(Algorithm):
    """Average, every `period` steps, with the weights that a partner published. Nobody ever waits.

    Each rank publishes a copy of its weights every `period` steps, c_i,k for the k-th time, and asks the partner that a
    shared seed pairs it with for the copy of the same number, c_j,k: at once, and again at the ends of the next steps
    if the partner has not come to it. When the copy is there, at the end of a step that is a steps later than c_i,k:

        x_i <- x_i + 1/2 period / (period + a) (c_j,k - c_i,k)

    so that steps made meanwhile are kept. The partner does nothing for it, a thread of its own answers, and makes the
    same change with the opposite sign: the mean of the ranks stays what it is. The longer ago the difference was, the
    less of it is true still, so the less of it is made up for.

    Where the partner is more than two periods behind, or so far ahead that it has that copy no more, its latest copy,
    of number l, is taken, and compared with the own one of the nearest number, m, with l / (l + m) instead of 1/2: a
    rank that has come less far counts less. The one that is behind counts what it took as steps of its own: its next
    number is as much higher as it was brought nearer to l. A partner that stands still is left behind: its copy is
    taken again, with an a that grows. One that does not answer is left alone after `limit_s` seconds, and another one
    is asked beside it.

    Paper: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018 (AD-PSGD, eq. 2).

    Deviations: There, both of a pair set their weights to the mean in one atomic step, at any time. Here each moves by
    itself, by a difference of copies of equal numbers. Both make up for the same difference, so the mean is kept, but
    for unequal a and for partners that are far behind; `commlib.synchronize` gives the mean. A difference to a copy
    that is some steps older would pull the weights back by half of those steps, in every exchange: two ranks then learn
    less together than each of them alone. Partners are drawn from a shared seed, not by each rank.

    Args:
        period: Optimizer steps from one exchange to the next, at least.
        seed: Of the choice of partners; 0 to 2**64 - 1, the same on all ranks.
        warmup_steps: Optimizer steps of plain gradient all-reduce before.
        limit_s: Seconds after which a partner that does not answer is left alone; at most two are asked at once.

    Raises:
        ConfigError: `period`, `seed`, `warmup_steps` or `limit_s` is out of range.
    """

    made_for = "sgd"

    def __init__(self, period: int = 8, *, seed: int = 0, warmup_steps: int = 0, limit_s: float = 5.0) -> None:
        if limit_s <= 0:
            raise ConfigError(f"PassiveGossip: expected limit_s > 0, got {limit_s!r}")
        self.channel = SelfRunning(period=period, warmup_steps=warmup_steps)
        self.period = period
        self.matching = RandomMatching(seed)
        self.limit_s = limit_s

    @override
    def traffic(self, parameters: Sequence[torch.Tensor], world_size: int) -> Traffic:
        """See `Algorithm`: a copy of the weights each way, as each of a pair asks the other."""
        nbytes = sum(parameter.nbytes for parameter in parameters)
        return Traffic(
            peers=1,
            question_bytes=HEADER_BYTES,
            answer_bytes=HEADER_BYTES + nbytes,
            ask_bytes=2 * nbytes,  # a copy is published
            beside_bytes=3 * nbytes,  # the difference to the own one
            take_bytes=3 * nbytes,  # which is added
            memory_bytes=(_PATIENCE + 2) * nbytes,  # copies, and one that is received
        )

    @override
    def attach(self, attachment: Attachment) -> Runner:
        return _Gossiping(attachment, self.period, self.matching, self.limit_s)


class _Fetch:
    """One question to a partner, from the copy of the own weights that it is about to the change of them.

    Attributes:
        partner: Who is asked; None while nothing is under way.
        number: The copy that is wanted.
        has_arrived: Whether the answer is there.
        has_found: Whether a copy came.
        found: The number of that copy; where none came, that of the partner's latest.
        own_number: That of the own copy that it was compared with.
        made_at: The own steps of the time at which that one was made.
        asked_s: When it was asked.
    """

    def __init__(self, published: Published) -> None:
        self._published = published
        self._received = Copy(published.layout)
        self.partner: int | None = None
        self.number = 0
        self.has_arrived = self.has_found = False
        self.found = 0
        self.own_number = self.made_at = 0
        self.asked_s = 0.0

    def start(self, partner: int, question: Message, ask: Callable[..., None]) -> None:
        """Ask `partner`. Returns at once."""
        self.partner, self.number = partner, question.number
        self.has_arrived, self.asked_s = False, time.monotonic()
        made = functools.partial(self._after_copies, question) if self._published.layout.is_remote else question
        ask(partner, made, self._on_reply, self._received.payload)

    def _after_copies(self, question: Message) -> Message:
        """Return the question once a device does not read the answer before it any more. On the line's thread."""
        self._received.wait()
        return question

    @torch.no_grad()
    def _on_reply(self, answer: Message) -> None:
        """Compute the difference, on the thread that received."""
        self.found, self.has_found = answer.number, False
        if answer.kind == _COPY:
            with self._published.holding(functools.partial(_counterpart, answer.number)) as own:
                if own is not None:
                    torch._foreach_sub_(self._received.tensors, own.tensors)
                    self.own_number, self.made_at = own.number, own.step
                    self.has_found = True
        self.has_arrived = True

    def share(self) -> float:
        """Return for how much the partner counts: a half, or more if its copy has more steps behind it than the own."""
        return self.found / (self.found + self.own_number) if self.found != self.own_number else 0.5

    def take(self, parameters: Sequence[torch.nn.Parameter], share: float) -> None:
        """Change parameters that are not frozen by the difference times `share`."""
        places = [place for place, parameter in enumerate(parameters) if parameter.requires_grad]
        if places:
            weights = [parameters[place].data for place in places]
            torch._foreach_add_(weights, self._received.on_device_of(weights, places), alpha=share)

    def drop(self) -> None:
        """Let go of an answer that has arrived."""
        self.partner, self.has_arrived = None, False


def _of_number(copies: Sequence[Snapshot], number: int) -> Snapshot | None:
    return next((copy for copy in copies if copy.number == number), None)


def _later_than(number: int, copies: Sequence[Snapshot]) -> Snapshot | None:
    return next((copy for copy in copies if copy.number > number), None)


def _answer_to(question: Message, copies: Sequence[Snapshot]) -> Snapshot | None:
    """Return the copy that was asked for; where it is gone, or any will do, the latest."""
    copy = _of_number(copies, question.number)
    if copy is None and copies and (question.kind == _FETCH_ANY or copies[-1].number > question.number):
        return copies[-1]
    return copy


def _counterpart(number: int, own: Sequence[Snapshot]) -> Snapshot | None:
    """Return the copy of the same number, or of the nearest."""
    return min(own, key=lambda copy: abs(copy.number - number), default=None)


class _Gossiping(Runner):
    """The rank's part: what it publishes, whom it asks.

    [Note: numbers] A copy's number says how far its rank had come, in periods, since all ranks were alike: what is
    compared has as many steps behind it. A rank that takes over more from one ahead has come as far as that brings it.
    """

    def __init__(self, attachment: Attachment, period: int, matching: RandomMatching, limit_s: float) -> None:
        self._attachment = attachment
        self._period = period
        self._matching = matching
        self._limit_s = limit_s
        self._step = self._published_at = self._number = 0
        self._random = random.Random(f"{matching.seed}/{attachment.comm.rank}")  # of partners for those that have left
        self._published = Published(self._weights, _PATIENCE + 1)
        self._republish(0)
        self._mailbox = attachment.connect(self._answer, 0)

    def _begin_anew(self) -> None:
        """Forget what was published and asked for; what still comes of it is dropped."""
        self._published.forget()
        self._fetches = [_Fetch(self._published)]
        self._wanted: Snapshot | None = None  # the own copy to which the partner's was not had yet; held for it too
        self._paired_with: int | None = None  # the partner for it
        self._takes_any = False  # whether the partner's latest copy will do
        self._has_waited = False  # whether the partner had not come to it when it was asked
        self._done = 0  # the number of the last own copy that was wanted for
        # By partner, the number of its copy that was had last, and the own steps of the time at which it was new.
        self._had: dict[int, tuple[int, int]] = {}

    @property
    def _weights(self) -> list[torch.Tensor]:
        return [parameter.data for _, parameter in self._attachment.parameters]

    def _answer(self, peer: int, message: Message, reply: Callable[[Message], None]) -> None:
        with self._published.holding(functools.partial(_answer_to, message)) as copy:
            if copy is None:
                reply(Message(_NOTHING, self._number))
            else:
                reply(Message(_COPY, copy.number, copy.payload))

    @property
    @override
    def bytes_sent(self) -> float:
        return self._mailbox.bytes_sent

    @override
    def after_step(self) -> None:
        self._mailbox.check()
        self._step += 1
        for fetch in self._fetches:
            if fetch.has_arrived:
                self._take(fetch)
        if self._step - self._published_at >= self._period:
            self._publish(self._number + 1)
            if self._wanted is None:
                self._want_next()
        if self._wanted is not None:
            self._ask(self._wanted.number)

    def _want_next(self) -> None:
        """Want the partner's copy to the first of the own ones that has not had its turn."""
        self._takes_any = self._has_waited = False
        while (own := self._published.take(functools.partial(_later_than, self._done))) is not None:
            self._paired_with = self._paired(own.number)
            if self._paired_with is not None:
                self._wanted = own
                return
            self._published.give_back(own)  # of an odd number of ranks one rests
            self._done = own.number

    def _publish(self, number: int) -> None:
        self._number, self._published_at = number, self._step
        self._published.publish(self._weights, number, self._step)

    def _take(self, fetch: _Fetch) -> None:
        """Take an answer that has arrived; where it was "none yet", the same copy is asked for again."""
        wanted = self._wanted if self._wanted is not None and fetch.number == self._wanted.number else None
        if fetch.has_found:
            self._apply(fetch)
            if wanted is not None:
                self._published.give_back(wanted)
                self._wanted = None
                self._done = self._next_done(wanted.number)
                self._want_next()
        elif wanted is not None:
            self._has_waited = True
            self._takes_any = self._number - fetch.found > _PATIENCE
        fetch.drop()

    def _next_done(self, number: int) -> int:
        """Return up to which number own copies have had their turn, now that the one of `number` has.

        A partner that is a little behind comes to each of them in turn. Where answers take longer than a period, only
        the latest is of use.
        """
        if self._takes_any:
            return self._number
        return number if self._has_waited else max(number, self._number - 1)

    def _apply(self, fetch: _Fetch) -> None:
        assert fetch.partner is not None
        number, made_at = self._had.get(fetch.partner, (None, 0))
        if number != fetch.found:  # else it is the same copy again, and was new when it was had first
            made_at = fetch.made_at
        self._had[fetch.partner] = fetch.found, made_at
        share = fetch.share() * self._period / (self._period + self._step - made_at)
        fetch.take([parameter for _, parameter in self._attachment.parameters], share)
        self._number += max(0, round(share * (fetch.found - fetch.own_number)))
        self.num_rounds += 1

    def _ask(self, wanted: int) -> None:
        """Ask for a copy of that number, if nobody is being asked, or one alone that is late."""
        present = self._mailbox.present()
        self._fetches = [fetch for fetch in self._fetches if fetch.partner is None or fetch.partner in present]
        under_way = [fetch for fetch in self._fetches if fetch.partner is not None]
        is_late = all(time.monotonic() - fetch.asked_s > self._limit_s for fetch in under_way)
        partners = [rank for rank in present if rank not in [fetch.partner for fetch in under_way]]
        if not partners or len(under_way) > 1 or not is_late:
            return
        if len(under_way) == len(self._fetches):
            self._fetches.append(_Fetch(self._published))
        free = next(fetch for fetch in self._fetches if fetch.partner is None)
        partner = self._paired_with if self._paired_with in partners else self._random.choice(partners)
        assert partner is not None
        kind = _FETCH_ANY if self._takes_any else _FETCH
        free.start(partner, Message(kind, wanted), self._mailbox.ask)

    def _paired(self, number: int) -> int | None:
        """Return the rank that this one is paired with for a number; of an odd number of ranks one has none."""
        comm = self._attachment.comm
        return next(iter(self._matching.neighbours(comm.rank, comm.world_size, number).sources), None)

    @override
    def synchronize(self) -> None:
        self._attachment.run("the mean of the weights", mean_all(self._weights, self._attachment.comm))
        self._republish(0)
        self._attachment.gather(None)  # nobody asks before all have published what they are now

    @override
    def weights_were_loaded(self) -> None:
        self._republish(self._number)

    def _republish(self, number: int) -> None:
        """Publish the weights, which have become others; what was published and asked for before is of no use now."""
        self._begin_anew()
        self._publish(number)
        self._done = number

    @override
    def close(self) -> None:
        self._mailbox.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "number": self._number, "random": self._random.getstate()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._random.setstate(state["random"])
        self._republish(state["number"])
