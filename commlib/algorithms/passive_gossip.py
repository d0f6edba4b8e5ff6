"""Passive gossip: averaging with weights that a partner has published, without its participation."""

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
from commlib.algorithms.families.published import Published, Snapshot, TensorBuffer
from commlib.errors import ConfigError
from commlib.primitives.replicate import mean_all
from commlib.primitives.topology import RandomMatching
from commlib.transport.mailbox import HEADER_BYTES, Message

#: Questions: request the copy with a given number; request that copy or else the latest one.
_FETCH, _FETCH_ANY = 1, 2
#: Answers: a copy; no copy yet, with the number of the latest one.
_COPY, _NOTHING = 1, 2
#: Maximum number of copies that a partner may be behind for this rank to wait for its copy with the same number.
_PATIENCE = 2


class PassiveGossip(Algorithm):
    """Averages weights with the published weights of a partner every `period` steps. No rank waits for another.

    Every `period` steps, rank i publishes a copy of its weights; c_i,k is its k-th copy. It requests the copy with the
    same number, c_j,k, from the partner j that a shared seed selects. If the partner has not published it yet, the
    request is repeated at the end of each following step. When the copy has arrived, at the end of a step that is a
    steps later than c_i,k:

        x_i <- x_i + 1/2 period / (period + a) (c_j,k - c_i,k)

    This update keeps the steps made in the meantime. A background thread of the partner answers the request. The
    partner applies the same difference with the opposite sign, so the mean over the ranks does not change. The factor
    decreases with the age a of the difference, since an older difference describes the current weights less accurately.

    If the partner is more than two periods behind, or so far ahead that it no longer has this copy, its latest copy,
    with number l, is used. It is compared with the rank's own copy of the nearest number m, and the factor is l / (l +
    m) instead of 1/2, so that a rank with fewer steps has less weight. The number of the rank that is behind then
    increases in proportion to the distance by which it was moved towards l. A stalled partner has a decreasing effect:
    the same copy is used again, with growing a. After `limit_s` seconds without an answer, the rank asks a second
    partner in addition.

    Paper: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018 (AD-PSGD, eq. 2).

    Deviations: in the paper, both ranks of a pair set their weights to the mean in one atomic step, at any time. Here
    each rank updates its own weights, by a difference of copies with equal numbers. Both ranks of a pair apply the same
    difference, so the mean is preserved, except for unequal a and for partners that are far behind;
    `commlib.synchronize` sets all weights to the mean. A difference to a copy that is several steps older would undo
    half of those steps in every exchange, and two ranks together would then converge more slowly than each of them
    alone. Partners are drawn from a shared seed, not by each rank.

    Args:
        period: Minimum number of optimizer steps between exchanges.
        seed: Seed of the choice of partners, 0 to 2**64 - 1; the same on all ranks.
        warmup_steps: Optimizer steps of plain gradient all-reduce before the first exchange.
        limit_s: Timeout of a partner's answer, in seconds, after which another partner is asked. At most two are asked
            at once.

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
        """See `Algorithm`. The two ranks of a pair ask each other, so each sends one copy of its weights."""
        nbytes = sum(parameter.nbytes for parameter in parameters)
        return Traffic(
            peers=1,
            question_bytes=HEADER_BYTES,
            answer_bytes=HEADER_BYTES + nbytes,
            ask_bytes=2 * nbytes,  # publish a copy
            beside_bytes=3 * nbytes,  # compute the difference to the own copy
            take_bytes=3 * nbytes,  # add the difference
            memory_bytes=(_PATIENCE + 2) * nbytes,  # published copies and a received one
        )

    @override
    def attach(self, attachment: Attachment) -> Runner:
        return _Gossiping(attachment, self.period, self.matching, self.limit_s)


class _Fetch:
    """One request for a copy of a partner, from the question to the update of the weights.

    Attributes:
        partner: The rank that is asked; None if no request is in flight.
        number: The number of the requested copy.
        has_arrived: Whether the answer has arrived.
        has_found: Whether the answer contains a copy.
        found: The number of that copy, or else the number of the partner's latest copy.
        own_number: The number of the own copy that it was compared with.
        made_at: This rank's step at which that own copy was made.
        asked_s: Time of the request, in seconds.
    """

    def __init__(self, published: Published) -> None:
        self._published = published
        self._received = TensorBuffer(published.packing)
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
        made = functools.partial(self._after_copies, question) if self._published.packing.is_remote else question
        ask(partner, made, self._on_reply, self._received.payload)

    def _after_copies(self, question: Message) -> Message:
        """Return the question after the device has read the previous answer. Runs on the mailbox's thread."""
        self._received.wait()
        return question

    @torch.no_grad()
    def _on_reply(self, answer: Message) -> None:
        """Compute the difference on the receiving thread."""
        self.found, self.has_found = answer.number, False
        if answer.kind == _COPY:
            with self._published.holding(functools.partial(_counterpart, answer.number)) as own:
                if own is not None:
                    torch._foreach_sub_(self._received.tensors, own.tensors)
                    self.own_number, self.made_at = own.number, own.step
                    self.has_found = True
        self.has_arrived = True

    def share(self) -> float:
        """Return the partner's weight: one half, or more if its copy has a higher number than the own one."""
        return self.found / (self.found + self.own_number) if self.found != self.own_number else 0.5

    def take(self, parameters: Sequence[torch.nn.Parameter], share: float) -> None:
        """Add the difference times `share` to the parameters that are not frozen."""
        places = [place for place, parameter in enumerate(parameters) if parameter.requires_grad]
        if places:
            weights = [parameters[place].data for place in places]
            torch._foreach_add_(weights, self._received.on_device_of(weights, places), alpha=share)

    def drop(self) -> None:
        """Release an answer that has arrived."""
        self.partner, self.has_arrived = None, False


def _of_number(copies: Sequence[Snapshot], number: int) -> Snapshot | None:
    return next((copy for copy in copies if copy.number == number), None)


def _later_than(number: int, copies: Sequence[Snapshot]) -> Snapshot | None:
    return next((copy for copy in copies if copy.number > number), None)


def _answer_to(question: Message, copies: Sequence[Snapshot]) -> Snapshot | None:
    """Return the requested copy, or the latest one if the requested one is obsolete or any copy is accepted."""
    copy = _of_number(copies, question.number)
    if copy is None and copies and (question.kind == _FETCH_ANY or copies[-1].number > question.number):
        return copies[-1]
    return copy


def _counterpart(number: int, own: Sequence[Snapshot]) -> Snapshot | None:
    """Return the own copy with the nearest number."""
    return min(own, key=lambda copy: abs(copy.number - number), default=None)


class _Gossiping(Runner):
    """The runner of one rank: publishes its weights and requests copies of its partners.

    [Note: numbers] The number of a copy is its rank's progress in periods since the weights of all ranks were
    identical, so that compared copies have equal progress. A rank that moves towards a rank ahead of it increases its
    number in proportion.
    """

    def __init__(self, attachment: Attachment, period: int, matching: RandomMatching, limit_s: float) -> None:
        self._attachment = attachment
        self._period = period
        self._matching = matching
        self._limit_s = limit_s
        self._step = self._published_at = self._number = 0
        self._random = random.Random(f"{matching.seed}/{attachment.comm.rank}")  # draws substitutes of partners
        self._published = Published(self._weights, _PATIENCE + 1)
        self._republish(0)
        self._mailbox = attachment.connect(self._answer, 0)

    def _begin_anew(self) -> None:
        """Drop published copies and pending requests; late answers are ignored."""
        self._published.forget()
        self._fetches = [_Fetch(self._published)]
        self._wanted: Snapshot | None = None  # own copy whose counterpart is outstanding; held until it arrives
        self._paired_with: int | None = None  # the partner for this copy
        self._takes_any = False  # whether the partner's latest copy is accepted
        self._has_waited = False  # whether the partner had not published the copy when it was asked
        self._done = 0  # the number of the last own copy that was processed
        # By partner: the number of its copy that was applied last, and this rank's step when that copy was new.
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
        """Select the first own copy that was not processed yet, and its partner."""
        self._takes_any = self._has_waited = False
        while (own := self._published.take(functools.partial(_later_than, self._done))) is not None:
            self._paired_with = self._paired(own.number)
            if self._paired_with is not None:
                self._wanted = own
                return
            self._published.give_back(own)  # with an odd number of ranks, one has no partner
            self._done = own.number

    def _publish(self, number: int) -> None:
        self._number, self._published_at = number, self._step
        self._published.publish(self._weights, number, self._step)

    def _take(self, fetch: _Fetch) -> None:
        """Process an answer that has arrived; if the partner has no such copy yet, it is requested again."""
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
        """Return the number up to which own copies are processed, after the copy with `number` was.

        If the partner is slightly behind, it reaches each copy in turn. If answers take longer than a period, only the
        latest copy is useful.
        """
        if self._takes_any:
            return self._number
        return number if self._has_waited else max(number, self._number - 1)

    def _apply(self, fetch: _Fetch) -> None:
        assert fetch.partner is not None
        number, made_at = self._had.get(fetch.partner, (None, 0))
        if number != fetch.found:  # otherwise the same copy again, whose age counts from its first use
            made_at = fetch.made_at
        self._had[fetch.partner] = fetch.found, made_at
        share = fetch.share() * self._period / (self._period + self._step - made_at)
        fetch.take([parameter for _, parameter in self._attachment.parameters], share)
        self._number += max(0, round(share * (fetch.found - fetch.own_number)))
        self.num_rounds += 1

    def _ask(self, wanted: int) -> None:
        """Request the copy with this number, unless a request is in flight that is not late, or two are in flight."""
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
        """Return the partner for a copy's number; with an odd number of ranks, one rank has none."""
        comm = self._attachment.comm
        return next(iter(self._matching.neighbours(comm.rank, comm.world_size, number).sources), None)

    @override
    def synchronize(self) -> None:
        self._attachment.run("the mean of the weights", mean_all(self._weights, self._attachment.comm))
        self._republish(0)
        self._attachment.gather(None)  # no rank asks before all ranks have published their new weights

    @override
    def weights_were_loaded(self) -> None:
        self._republish(self._number)

    def _republish(self, number: int) -> None:
        """Publish replaced weights, and drop earlier copies and requests."""
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
