"""Gossip that asks nobody to take part: averaging with the weights that a partner published last."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms._published import Copy, Published
from commlib.algorithms.base import Algorithm, Attachment, Runner, Traits
from commlib.errors import ConfigError
from commlib.primitives.replicate import mean_all
from commlib.transport.mailbox import Message

_FETCH = 1


class PassiveGossip(Algorithm):
    """Average, every `period` steps, with the weights that a random rank published last. Nobody ever waits.

    Each rank publishes a copy of its weights c_i every `period` steps. At the same step end it asks a random partner
    for its latest copy c_j; when that has come, at some later step end:

        x_i <- x_i + (c_j - c_i) / 2

    so that steps made meanwhile are kept. The partner does nothing for it: a thread of its own answers. A partner that
    is stopped does not answer, and after `limit_s` seconds another one is asked beside it.

    Paper: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018 (AD-PSGD, eq. 2).

    Deviations: There, both of a pair set their weights to the mean in one atomic step. Here only the one that asked
    does, so the mean of all ranks is kept in expectation only; `commlib.synchronize` gives the mean.

    Args:
        period: Optimizer steps from one exchange to the next, at least.
        seed: Of the choice of partners.
        warmup_steps: Optimizer steps of plain gradient all-reduce before.
        limit_s: Seconds after which a partner that does not answer is left alone; at most two are asked at once.

    Raises:
        ConfigError: `period`, `warmup_steps` or `limit_s` is out of range.
    """

    def __init__(self, period: int = 8, *, seed: int = 0, warmup_steps: int = 0, limit_s: float = 5.0) -> None:
        if limit_s <= 0:
            raise ConfigError(f"PassiveGossip: expected limit_s > 0, got {limit_s!r}")
        self.traits = Traits(tensors="none", period=period, warmup_steps=warmup_steps)
        self.seed = seed
        self.limit_s = limit_s

    @override
    def attach(self, attachment: Attachment) -> Runner:
        return _Gossiping(attachment, self.traits.period, self.seed, self.limit_s)


class _Fetch:
    """One question to a partner, from the copy of the own weights that it starts from to the change of them."""

    def __init__(self, published: Published) -> None:
        self._published = published
        self._received = Copy(published.layout)
        self.partner: int | None = None  # None: nothing is under way
        self.has_arrived = False
        self.asked_s = 0.0
        self._own: Copy | None = None

    def start(self, partner: int, ask: Callable[..., None]) -> None:
        """Ask `partner`. Returns at once."""
        self.partner, self.has_arrived, self.asked_s = partner, False, time.monotonic()
        self._own = self._published.take()
        ask(partner, Message(_FETCH), self._on_reply, self._received.payload)

    @torch.no_grad()
    def _on_reply(self, _: Message) -> None:
        """Compute the change, on the thread that received."""
        own, self._own = self._own, None
        assert own is not None
        torch._foreach_sub_(self._received.tensors, own.tensors)
        torch._foreach_mul_(self._received.tensors, 0.5)
        self._published.give_back(own)
        self.has_arrived = True

    def take(self, weights: list[torch.Tensor]) -> None:
        """Change `weights` in place."""
        change = [delta.to(w.device) for delta, w in zip(self._received.tensors, weights, strict=True)]
        torch._foreach_add_(weights, change)
        self.drop()

    def drop(self) -> None:
        """Let go of a result that has arrived."""
        self.partner, self.has_arrived = None, False


class _Gossiping(Runner):
    """The rank's part: what it publishes, whom it asks."""

    def __init__(self, attachment: Attachment, period: int, seed: int, limit_s: float) -> None:
        self._attachment = attachment
        self._period = period
        self._limit_s = limit_s
        self._step = self._published_at = 0
        self._random = random.Random(f"{seed}/{attachment.comm.rank}")
        self._published = Published(self._weights)
        self._fetches = [_Fetch(self._published)]
        self._mailbox = attachment.connect(self._answer, 0)

    @property
    def _weights(self) -> list[torch.Tensor]:
        return [parameter.data for _, parameter in self._attachment.parameters]

    def _answer(self, peer: int, message: Message, reply: Callable[[Message], None]) -> None:
        with self._published.latest() as copy:
            reply(Message(_FETCH, copy.number, copy.payload))

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
                fetch.take(self._weights)
                self.num_rounds += 1
        if self._step - self._published_at >= self._period:
            self._publish()
            self._ask()

    def _publish(self) -> None:
        self._published.publish(self._weights, self._step)
        self._published_at = self._step

    def _ask(self) -> None:
        """Ask a partner, if none is being asked, or one alone that is late."""
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
        free.start(self._random.choice(partners), self._mailbox.ask)

    @override
    def synchronize(self) -> None:
        comm = self._attachment.comm
        self._attachment.run("the mean of the weights", mean_all(self._weights, comm))
        self.weights_were_loaded()

    @override
    def weights_were_loaded(self) -> None:
        # What was asked for before is of the time before: it is dropped, now or when it comes.
        self._fetches = [_Fetch(self._published)]
        self._publish()

    @override
    def close(self) -> None:
        self._mailbox.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "random": self._random.getstate()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = self._published_at = state["step"]
        self._random.setstate(state["random"])
        self._published.publish(self._weights, self._step)
