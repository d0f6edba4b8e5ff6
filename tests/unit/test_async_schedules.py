"""The asynchronous algorithms under scripted orders of events, against independent NumPy references.

The ranks are objects in one process; their mailboxes deliver when the script says so.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from commlib.algorithms import AsyncSGD, PassiveGossip
from commlib.algorithms.base import Algorithm, Attachment, Runner
from commlib.algorithms.families.published import Published
from commlib.algorithms.families.shard_client import PUSH, PUSH_FOR_CHANGE
from commlib.codecs.base import BlockCodec, Feedback
from commlib.errors import ConfigError
from commlib.primitives.topology import RandomMatching
from commlib.transport.base import Communicator
from commlib.transport.mailbox import Message

WORLD_SIZES = [1, 2, 3, 4, 8]
SHAPES = [(3, 5), (7,), (2, 2, 2)]
NUMEL = 30
LR = 0.1


class Network:
    """Questions under way, by asking and answering rank; `deliver` answers the oldest of a pair."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.answers: list[Callable[..., None]] = []
        self.under_way: dict[tuple[int, int], deque[Any]] = {}
        self.sizes: list[int] = []

    def connect(self, rank: int) -> Callable[..., Any]:
        def connect(answer: Callable[..., None], max_request: int) -> ScriptedMailbox:
            assert len(self.answers) == rank
            self.answers.append(answer)
            self.sizes.append(max_request)
            return ScriptedMailbox(rank, self)

        return connect

    def deliver(self, asking: int, answering: int) -> bool:
        """Answer a question and receive the reply; False if there is no question."""
        questions = self.under_way.get((asking, answering))
        if not questions:
            return False
        message, on_reply, into = questions.popleft()
        assert len(message.payload) <= self.sizes[answering]

        def reply(answer: Message) -> None:
            into[: len(answer.payload)] = answer.payload
            on_reply(answer)

        self.answers[answering](asking, message, reply)
        return True


class ScriptedMailbox:
    bytes_sent = 0.0

    def __init__(self, rank: int, network: Network) -> None:
        self.rank, self.network = rank, network

    def ask(self, peer: int, message: Message, on_reply: Callable[..., None], into: Any = None) -> None:
        self.network.under_way.setdefault((self.rank, peer), deque()).append((message, on_reply, into))

    def present(self) -> list[int]:
        return [rank for rank in range(self.network.world_size) if rank != self.rank]

    def check(self) -> None: ...

    def close(self) -> None: ...


def attachment_of(
    rank: int,
    network: Network,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer,
) -> Attachment:
    return Attachment(
        comm=Communicator(rank, network.world_size),
        parameters=named,
        optimizer=optimizer,
        gather=lambda value: [value],
        run=lambda what, communication: None,
        connect=network.connect(rank),
        timeout_s=1.0,
    )


def set_gradients(parameters: Sequence[torch.nn.Parameter], gradient: np.ndarray) -> None:
    start = 0
    for parameter in parameters:
        part = gradient[start : start + parameter.numel()].reshape(parameter.shape)
        parameter.grad = torch.tensor(part, dtype=parameter.dtype)
        start += parameter.numel()


def flat(parameters: Sequence[torch.Tensor]) -> np.ndarray:
    return np.concatenate([parameter.detach().to(torch.float32).numpy().reshape(-1) for parameter in parameters])


class Ranks:
    """The ranks' parameters, optimizers and runners; a step's gradient is given."""

    def __init__(
        self,
        algorithm: Algorithm,
        world_size: int,
        make: Callable[..., torch.optim.Optimizer],
        alike: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.network = Network(world_size)
        self.parameters, self.optimizers, self.runners = [], [], []
        for rank in range(world_size):
            values = np.random.default_rng(0 if alike else rank).standard_normal(NUMEL).astype(np.float32)
            pieces = np.split(values, np.cumsum([np.prod(shape) for shape in SHAPES])[:-1])
            own = [
                torch.nn.Parameter(torch.tensor(piece.reshape(shape), dtype=dtype))
                for piece, shape in zip(pieces, SHAPES, strict=True)
            ]
            self.parameters.append(own)
            self.optimizers.append(make(own))
            self.runners.append(self._attach(algorithm, rank))

    def _attach(self, algorithm: Algorithm, rank: int) -> Runner:
        named = [(f"p{idx}", parameter) for idx, parameter in enumerate(self.parameters[rank])]
        return algorithm.attach(attachment_of(rank, self.network, named, self.optimizers[rank]))

    def weights(self, rank: int) -> np.ndarray:
        return flat(self.parameters[rank])

    @torch.no_grad()
    def step(self, rank: int, gradient: np.ndarray) -> None:
        set_gradients(self.parameters[rank], gradient)
        self.runners[rank].before_step()
        self.optimizers[rank].step()
        self.runners[rank].after_step()
        assert all(parameter.grad is not None for parameter in self.parameters[rank])


def gradient_of(weights: np.ndarray, step: int, rank: int) -> np.ndarray:
    noise = np.random.default_rng((step, rank)).standard_normal(NUMEL)
    return (0.5 * weights.astype(np.float64) + noise).astype(np.float32)


def script(world_size: int, seed: int, length: int) -> list[tuple[int, int | None]]:
    """Steps `(rank, None)` and deliveries `(asking, answering)` in random order; rank 0 makes few steps."""
    rng = random.Random(seed)
    events: list[tuple[int, int | None]] = []
    for _ in range(length):
        rank = rng.randrange(world_size)
        if rng.random() < 0.35 and (rank != 0 or rng.random() < 0.4):
            events.append((rank, None))
        else:
            events.append((rank, rng.randrange(world_size)))
    return events


# --- asynchronous SGD ------------------------------------------------------------------------------------------------


KEPT = 0.75


class Shrinking(BlockCodec):
    """Loses a quarter of every value: much, but as a continuous function, so that rounding stays rounding."""

    name, block = "shrinking", 1

    def payload_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, **_: Any) -> None:
        whole = x if feedback is None else x + feedback.residual
        out.view(torch.float32).copy_(KEPT * whole)
        if feedback is not None:
            feedback.residual.copy_(whole - out.view(torch.float32))

    def decode(self, payload: torch.Tensor, out: torch.Tensor, **_: Any) -> None:
        out.copy_(payload.view(torch.float32))

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, **_: Any) -> None:
        out.add_(payload.view(torch.float32))


class ReferenceSgd:
    """Parameter servers with momentum SGD, in float64, one number after the other."""

    def __init__(self, weights: np.ndarray, world_size: int, momentum: float, **options: Any) -> None:
        self.size, self.momentum, self.options = world_size, momentum, options
        cuts = [NUMEL * idx // world_size for idx in range(world_size + 1)]
        self.ranges = [slice(*pair) for pair in itertools.pairwise(cuts)]
        self.server = weights.astype(np.float64)
        self.velocity = np.zeros(NUMEL)
        self.versions = [0] * world_size
        self.local = [self.server.copy() for _ in range(world_size)]
        self.own_velocity: list[np.ndarray | None] = [None] * world_size
        self.origin = [self.server.copy() for _ in range(world_size)]
        self.installed = [[(0, self.server[r].copy()) for r in self.ranges] for _ in range(world_size)]
        self.computed_on: list[list[Any]] = [[None] * world_size for _ in range(world_size)]
        self.pending: list[list[np.ndarray | None]] = [[None] * world_size for _ in range(world_size)]
        self.num_pending = [[0] * world_size for _ in range(world_size)]
        self.line: list[list[Any]] = [[None] * world_size for _ in range(world_size)]
        self.residual = [[np.zeros(where.stop - where.start) for where in self.ranges] for _ in range(world_size)]
        self.told: list[list[np.ndarray | None]] = [[None] * world_size for _ in range(world_size)]
        self.stale: list[int] = []

    def step(self, rank: int, gradient: np.ndarray) -> None:
        for shard, where in enumerate(self.ranges):
            if not self.num_pending[rank][shard]:
                self.origin[rank][where] = self.local[rank][where]
        velocity = self.own_velocity[rank]
        self.own_velocity[rank] = gradient + (0 if velocity is None else self.momentum * velocity)
        self.local[rank] = self.local[rank] - LR * self.own_velocity[rank]
        for shard, where in enumerate(self.ranges):
            part = gradient[where].astype(np.float64)
            before = self.pending[rank][shard]
            if before is None:
                self.computed_on[rank][shard] = self.installed[rank][shard]
            self.pending[rank][shard] = part if before is None else before + part
            self.num_pending[rank][shard] += 1
            line = self.line[rank][shard]
            if line is not None and line[0] == "reply":
                self.installed[rank][shard] = line[1]
                self.local[rank][where] += line[1][1] - self.origin[rank][where]
                self.origin[rank][where] = line[1][1]
                line = None
            if line is None and self.num_pending[rank][shard] >= self.options["period"]:
                pushed_on = self.computed_on[rank][shard]
                count = self.num_pending[rank][shard]
                pushed = mean = self.pending[rank][shard] / count
                if self.options["push"] == "updates":
                    pushed = mean = self.local[rank][where] - self.origin[rank][where]
                self.origin[rank][where] = self.local[rank][where]
                if self.options.get("codec"):
                    pushed = KEPT * (mean + self.residual[rank][shard])
                    self.residual[rank][shard] += mean - pushed
                line = ("push", pushed_on, pushed, count)
                self.pending[rank][shard] = None
                self.num_pending[rank][shard] = 0
            self.line[rank][shard] = line

    def deliver(self, rank: int, shard: int) -> None:
        line = self.line[rank][shard]
        if line is None or line[0] == "reply":
            return
        _, (version, old), gradient, count = line
        staleness = self.versions[shard] - version
        self.stale.append(staleness)
        limit = self.options["max_staleness"]
        if staleness <= limit or self.options["on_stale"] == "damp":
            now = self.server[self.ranges[shard]]
            gradient = gradient + self.options["delay_compensation"] * gradient * gradient * (now - old)
            if staleness > limit:
                gradient = gradient * (limit / staleness)
            if self.options["push"] == "updates":
                self.server[self.ranges[shard]] = now + gradient / self.size
            else:
                velocity = gradient
                if self.versions[shard]:
                    velocity = self.momentum * self.velocity[self.ranges[shard]] + gradient
                self.velocity[self.ranges[shard]] = velocity
                self.server[self.ranges[shard]] = now - count * LR / self.size * velocity
            self.versions[shard] += 1
        newest, told = self.server[self.ranges[shard]].copy(), self.told[rank][shard]
        if self.options.get("codec") and told is not None:
            newest = told + KEPT * (newest - told)
        self.told[rank][shard] = newest
        self.line[rank][shard] = ("reply", (self.versions[shard], newest))


@pytest.mark.parametrize(
    "options",
    [
        {"max_staleness": 100},
        {"max_staleness": 1},
        {"max_staleness": 1, "on_stale": "drop"},
        {"max_staleness": 2, "delay_compensation": 0.3},
        {"max_staleness": 2, "delay_compensation": 0.3, "period": 3},
        {"max_staleness": 100, "codec": Shrinking()},
        {"max_staleness": 2, "delay_compensation": 0.3, "period": 3, "codec": Shrinking()},
        {"push": "updates", "max_staleness": 100},
        {"push": "updates", "max_staleness": 1},
        {"push": "updates", "max_staleness": 1, "on_stale": "drop"},
        {"push": "updates", "max_staleness": 2, "period": 3, "codec": Shrinking()},
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_async_sgd_follows_the_reference(world_size: int, options: dict[str, Any]) -> None:
    options = {"push": "gradients", "on_stale": "damp", "delay_compensation": 0.0, "period": 1, **options}
    algorithm = AsyncSGD(rest=0, **options)
    ranks = Ranks(algorithm, world_size, lambda p: torch.optim.SGD(p, LR, momentum=0.5), alike=True)
    reference = ReferenceSgd(ranks.weights(0), world_size, 0.5, **options)
    for number, (rank, shard) in enumerate(script(world_size, seed=world_size, length=300)):
        if shard is None:
            gradient = gradient_of(ranks.weights(rank), number, rank)
            ranks.step(rank, gradient)
            reference.step(rank, gradient)
        else:
            ranks.network.deliver(rank, shard)
            reference.deliver(rank, shard)
        for each in range(world_size):
            np.testing.assert_allclose(ranks.weights(each), reference.local[each], rtol=1e-5, atol=1e-6)
    assert len(reference.stale) > 30 / options["period"]
    assert world_size < 3 or max(reference.stale) > 2, "the script never made a gradient stale"


@pytest.mark.parametrize("push", ["updates", "gradients"])
def test_async_sgd_with_int8_leaves_every_rank_with_what_the_owners_know(push: Any) -> None:
    """Bit by bit, and near the owners' weights; errors of pushes are below a step of the codec."""
    ranks = Ranks(
        AsyncSGD(push=push, period=1, rest=0, codec="int8"), 3, lambda p: torch.optim.Adam(p, LR), alike=False
    )
    for number, (rank, shard) in enumerate(script(3, seed=5, length=400)):
        if shard is None:
            ranks.step(rank, gradient_of(ranks.weights(rank), number, rank))
        else:
            ranks.network.deliver(rank, shard)
    zero = np.zeros(NUMEL, np.float32)
    for rank, runner in enumerate(ranks.runners):
        while any(ranks.network.deliver(rank, owner) for owner in range(3)):
            pass
        ranks.step(rank, zero)
        for shard in runner._shards:
            server = ranks.runners[shard.owner]._server
            assert shard.version == server._replies[rank][-1].number > 20
            # the push of the zero gradient is not answered yet: the previous reply is the owner's latest state
            assert torch.equal(shard.wire.received.buffer, server._replies[rank][-1].buffer)
            away = (shard.wire.received.flat - torch.cat([w.detach() for w in server.weights])).abs().max()
            assert away < 1.0
            assert shard.wire.residual.abs().max() < 0.1
            assert shard.wire.residual.any(), "int8 lost nothing, so the test shows nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_async_sgd_with_a_codec_takes_other_dtypes(dtype: torch.dtype) -> None:
    ranks = Ranks(AsyncSGD(period=1, rest=0, codec="int8"), 2, lambda p: torch.optim.SGD(p, LR), True, dtype)
    before = ranks.weights(0)
    for _ in range(3):
        ranks.step(0, np.ones(NUMEL, np.float32))
        assert ranks.network.deliver(0, 0)
        assert ranks.network.deliver(0, 1)
    np.testing.assert_allclose(server_weights(ranks), before - 1.5 * LR, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(ranks.weights(0), before - 2 * LR, rtol=0.02, atol=0.02)


def test_small_updates_of_half_precision_weights_add_up_at_the_owner() -> None:
    """An update of 1/128 of which the owner takes half: in bf16 1 + 1/256 is 1, however often it is added."""
    ranks = Ranks(AsyncSGD(period=1, rest=0), 2, lambda p: torch.optim.SGD(p, 1 / 128), True, torch.bfloat16)
    for parameter in ranks.parameters[0]:
        parameter.data.fill_(1.0)
    for runner in ranks.runners:
        for weight in runner._server.weights:
            weight.fill_(1.0)
    for _ in range(8):
        ranks.step(0, -np.ones(NUMEL, np.float32))
        assert ranks.network.deliver(0, 0)
        assert ranks.network.deliver(0, 1)
    assert server_weights(ranks).min() > 1.02


def test_the_owner_of_updates_takes_any_optimizer_and_no_state_of_another_kind() -> None:
    ranks = Ranks(AsyncSGD(period=1, rest=0), 1, lambda p: torch.optim.Adagrad(p, LR), alike=True)
    before = ranks.weights(0)
    ranks.step(0, np.ones(NUMEL, np.float32))
    assert ranks.network.deliver(0, 0)
    np.testing.assert_allclose(server_weights(ranks), ranks.weights(0), rtol=1e-6)
    assert np.abs(server_weights(ranks) - before).min() > 0.5 * LR
    other = Ranks(AsyncSGD(push="gradients"), 1, lambda p: torch.optim.SGD(p, LR), alike=True)
    with pytest.raises(ConfigError, match="saved with push='updates'; this model has 'gradients'"):
        other.runners[0].check_state_dict(ranks.runners[0].state_dict())
    with pytest.raises(ConfigError, match="saved with push='gradients'; this model has 'updates'"):
        ranks.runners[0].check_state_dict(other.runners[0].state_dict())


def test_weights_that_were_loaded_between_steps_are_no_update() -> None:
    ranks = Ranks(AsyncSGD(period=1, rest=0), 1, lambda p: torch.optim.SGD(p, LR), alike=True)
    before = ranks.weights(0)
    for parameter in ranks.parameters[0]:
        parameter.data.add_(100.0)
    ranks.step(0, np.ones(NUMEL, np.float32))
    assert ranks.network.deliver(0, 0)
    np.testing.assert_allclose(server_weights(ranks), before - LR, atol=1e-4)


def test_async_sgd_with_a_codec_asks_for_whole_weights_once() -> None:
    """Also a rank that goes back to a saved state alone, between a question and its answer, does not lose track."""
    ranks = Ranks(AsyncSGD(period=1, rest=0, codec="int8"), 2, lambda p: torch.optim.SGD(p, LR), alike=False)
    kinds, saved = [], {}
    for number in range(12):
        if number == 1:
            saved = ranks.runners[0].state_dict()
        for rank in (0, 1):
            ranks.step(rank, np.full(NUMEL, 1.0 if number < 4 else 0.0, np.float32))
        kinds.append({questions[-1][0].kind for questions in ranks.network.under_way.values()})
        if number == 3:
            ranks.runners[0].load_state_dict(saved)
        for pair in itertools.product((0, 1), (0, 1)):
            assert ranks.network.deliver(*pair)
    assert kinds == [{PUSH}] + 11 * [{PUSH_FOR_CHANGE}]
    for rank in (0, 1):
        ranks.step(rank, np.zeros(NUMEL, np.float32))
        np.testing.assert_allclose(ranks.weights(rank), server_weights(ranks), atol=1e-3)
    for weight, before in zip(ranks.runners[0]._server.weights, saved["server"]["weights"], strict=True):
        assert (weight - before).abs().max() < 0.3, "the saved weights were not taken over"


def test_async_sgd_with_a_codec_refuses_complex_parameters() -> None:
    with pytest.raises(ConfigError, match=r"with a codec takes parameters of .*'p0' is torch.complex64"):
        Ranks(AsyncSGD(codec="int8"), 2, lambda p: torch.optim.SGD(p, LR), True, torch.complex64)


def test_async_sgd_rests_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as long as push and answer took; after one that took long, as long as after the one before."""
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr("commlib.algorithms.families.shard_client.time", clock)
    ranks = Ranks(AsyncSGD(period=1, rest=3.0), 1, lambda p: torch.optim.SGD(p, LR), alike=True)
    ones = np.ones(NUMEL, np.float32)
    pushed_at_s = []
    took_s = {100.0: 2.0, 108.0: 10.0, 124.0: 1.0}
    while clock.now_s < 130:
        ranks.step(0, ones)
        if ranks.network.under_way[0, 0]:
            pushed_at_s.append(clock.now_s)
            clock.now_s += took_s.get(clock.now_s, 1.0)
            assert ranks.network.deliver(0, 0)
        else:
            clock.now_s += 0.25
    assert pushed_at_s == [100.0, 108.0, 124.0, 128.0]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
def test_async_sgd_alone_is_adam(options: dict[str, bool]) -> None:
    """One rank: the update received at the end of the next step equals that of its own optimizer.

    The server uses the same implementation of the optimizer: a fused one is as fast there, and the bits are equal.
    """

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, LR, weight_decay=0.01, **options)

    ranks = Ranks(AsyncSGD(push="gradients", period=1, rest=0), 1, make, alike=True)
    assert {key: ranks.runners[0]._server._optimizer.own.param_groups[0][key] for key in options} == options
    plain = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ranks.parameters[0]]
    optimizer = make(plain)
    for number in range(20):
        gradient = gradient_of(ranks.weights(0), number, 0)
        ranks.step(0, gradient)
        set_gradients(plain, gradient)
        optimizer.step()
        np.testing.assert_allclose(ranks.weights(0), flat(plain), rtol=1e-5, atol=1e-6)
        assert ranks.network.deliver(0, 0)
    np.testing.assert_array_equal(server_weights(ranks), flat(plain))


def test_async_sgd_follows_the_learning_rate_of_the_owners_optimizer() -> None:
    ranks = Ranks(AsyncSGD(push="gradients", period=1, rest=0), 2, lambda p: torch.optim.SGD(p, LR), alike=True)
    before, ones = ranks.weights(0), np.ones(NUMEL, np.float32)
    ranks.optimizers[1].param_groups[0]["lr"] = 0.5
    ranks.step(0, ones)
    ranks.network.deliver(0, 0)
    ranks.network.deliver(0, 1)
    of_owners = before - np.repeat([LR / 2, 0.5 / 2], NUMEL // 2)
    np.testing.assert_allclose(server_weights(ranks), of_owners, rtol=1e-6)
    ranks.step(0, ones)
    np.testing.assert_allclose(ranks.weights(0), of_owners - LR, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make", "factor"), [(torch.optim.SGD, 3.0), (torch.optim.Adam, 3**0.5)])
def test_a_push_of_several_steps_goes_as_far_as_a_larger_batch(
    make: Callable[..., torch.optim.Optimizer], factor: float
) -> None:
    """Three gradients of 1, 2 and 3: their mean is 2, and Adam's first step is lr whatever the gradient."""
    ranks = Ranks(AsyncSGD(push="gradients", period=3, rest=0, lr_scale=1.0), 1, lambda p: make(p, LR), alike=True)
    before = ranks.weights(0)
    for size in (1.0, 2.0, 3.0):
        ranks.step(0, np.full(NUMEL, size, np.float32))
    assert ranks.network.deliver(0, 0)
    gone = before - server_weights(ranks)
    np.testing.assert_allclose(gone, factor * LR * (2.0 if make is torch.optim.SGD else 1.0), rtol=1e-4)


def server_weights(ranks: Ranks) -> np.ndarray:
    return flat([weight for runner in ranks.runners for weight in runner._server.weights])


def test_async_sgd_takes_over_the_state_of_the_users_optimizer() -> None:
    """Wrapped after some steps, momenta go on; cut into the shards of two ranks."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(parameters, LR)
        for parameter in parameters:
            parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        optimizer.step()
        return optimizer

    ranks = Ranks(AsyncSGD(push="gradients", period=1, lr_scale=1.0), 2, make, alike=True)
    plain = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ranks.parameters[0]]
    optimizer = torch.optim.Adam(plain, LR)
    optimizer.load_state_dict(copy.deepcopy(ranks.optimizers[0].state_dict()))
    gradient = gradient_of(ranks.weights(0), 0, 0)
    ranks.step(0, gradient)
    ranks.network.deliver(0, 0)
    ranks.network.deliver(0, 1)
    set_gradients(plain, gradient)
    optimizer.step()
    np.testing.assert_array_equal(server_weights(ranks), flat(plain))


def test_async_sgd_takes_over_momenta_that_only_some_parameters_have() -> None:
    """A parameter that is never used has none. torch's fused SGD fails on such a mixture; the server's is not fused."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, LR, momentum=0.5, fused=True)
        parameters[0].grad = torch.ones_like(parameters[0])
        optimizer.step()
        return optimizer

    ranks = Ranks(AsyncSGD(push="gradients", period=1), 1, make, alike=True)
    used = ranks.parameters[0][0]
    before, first = ranks.weights(0), used.numel()
    for hook in (ranks.runners[0].before_step, ranks.optimizers[0].step, ranks.runners[0].after_step):
        hook()
    assert ranks.network.deliver(0, 0)
    np.testing.assert_allclose(server_weights(ranks)[:first], before[:first] - 1.5 * LR, rtol=1e-5)
    np.testing.assert_array_equal(server_weights(ranks)[first:], before[first:])


def test_async_sgd_resumes_from_its_state() -> None:
    def run(ranks: Ranks, steps: range) -> None:
        for number in steps:
            for rank in (0, 1):
                ranks.step(rank, gradient_of(ranks.weights(rank), number, rank))
            for pair in ((0, 0), (1, 1), (1, 0), (0, 1)):
                ranks.network.deliver(*pair)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, LR)

    kept = Ranks(AsyncSGD(push="gradients", period=1, rest=0), 2, make, alike=True)
    run(kept, range(6))
    resumed = Ranks(AsyncSGD(push="gradients", period=1, rest=0), 2, make, alike=True)
    for rank in (0, 1):
        resumed.runners[rank].load_state_dict(kept.runners[rank].state_dict())
        servers = [ranks.runners[rank]._server for ranks in (kept, resumed)]
        for mine, other in zip(servers[0].weights, servers[1].weights, strict=True):
            assert torch.equal(mine, other)
            assert mine is not other
        gradient = [torch.ones_like(weight) for weight in servers[0].weights]
        for server in servers:
            server.push(0, server.version, [each.clone() for each in gradient])
        for mine, other in zip(servers[0].weights, servers[1].weights, strict=True):
            assert torch.equal(mine, other), "the optimizer's state was not taken over"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.LBFGS(p), "elementwise optimizer, one of SGD, Adam, AdamW, got LBFGS"),
        (lambda p: torch.optim.Adagrad(p), "got Adagrad"),
    ],
)
def test_async_sgd_refuses_what_it_cannot_cut(make: Callable[..., Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Ranks(AsyncSGD(push="gradients"), 2, make, alike=True)


@pytest.mark.parametrize(
    "options",
    [
        {"push": "weights"},
        {"delay_compensation": 0.1},
        {"period": 0},
        {"rest": -1.0},
        {"rest": math.nan},
        {"max_staleness": 0},
        {"on_stale": "keep"},
        {"delay_compensation": -1.0},
        {"lr_scale": 0.0},
    ],
)
def test_async_sgd_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="AsyncSGD: expected"):
        AsyncSGD(**options)


# --- passive gossip --------------------------------------------------------------------------------------------------


class CopyOf(NamedTuple):
    number: int
    step: int
    weights: np.ndarray


class ReferenceRank:
    """The weights, copies and requests of one rank, in float64."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights.astype(np.float64)
        self.step = self.number = self.published_at = self.done = 0
        self.kept = [CopyOf(0, 0, self.weights.copy())]
        self.wanted: CopyOf | None = None
        self.takes_any = self.has_waited = False
        self.question: Any = None  # partner, number, takes_any
        self.answer: Any = None
        self.had: dict[int, tuple[int, int]] = {}

    def available(self) -> list[CopyOf]:
        held = [self.wanted] if self.wanted and all(self.wanted.number != copy.number for copy in self.kept) else []
        return [*held, *self.kept]


class ReferenceGossip:
    def __init__(self, weights: list[np.ndarray], period: int) -> None:
        self.ranks = [ReferenceRank(each) for each in weights]
        self.period = period
        self.takes: Counter[str] = Counter()

    def partner(self, rank: int, number: int) -> int | None:
        matrix = RandomMatching(0).matrix(len(self.ranks), number)
        others = [other for other in range(len(self.ranks)) if other != rank and matrix[rank][other]]
        return others[0] if others else None

    def step(self, rank: int, gradient: np.ndarray) -> None:
        own = self.ranks[rank]
        own.weights = own.weights - LR * gradient.astype(np.float64)
        own.step += 1
        if own.answer is not None:
            self._take(own)
        if own.step - own.published_at >= self.period:
            own.number, own.published_at = own.number + 1, own.step
            own.kept = [*own.kept, CopyOf(own.number, own.step, own.weights.copy())][-3:]
            if own.wanted is None:
                self._want_next(rank)
        if own.wanted is not None and own.question is None:
            own.question = (self.partner(rank, own.wanted.number), own.wanted.number, own.takes_any)

    def _want_next(self, rank: int) -> None:
        own = self.ranks[rank]
        own.takes_any, own.has_waited, own.wanted = False, False, None
        for copy_ in own.kept:
            if copy_.number > own.done:
                if self.partner(rank, copy_.number) is not None:
                    own.wanted = copy_
                    return
                own.done = copy_.number

    def _take(self, own: ReferenceRank) -> None:
        (partner, number, _), (found, latest) = own.question, own.answer
        own.question = own.answer = None
        if found is None:
            own.has_waited, own.takes_any = True, own.number - latest > 2
            return
        theirs, mine = found
        share = 0.5 if theirs.number == mine.number else theirs.number / (theirs.number + mine.number)
        before = own.had.get(partner, (None, 0))
        made_at = before[1] if before[0] == theirs.number else mine.step
        own.had[partner] = theirs.number, made_at
        share *= self.period / (self.period + own.step - made_at)
        own.weights += share * (theirs.weights - mine.weights)
        kind = theirs.number - mine.number
        self.takes["equal" if kind == 0 else "ahead" if kind > 0 else "behind"] += 1
        own.number += max(0, round(share * kind))
        own.done = own.number if own.takes_any else number if own.has_waited else max(number, own.number - 1)
        self._want_next(self.ranks.index(own))

    def deliver(self, rank: int, partner: int) -> None:
        own = self.ranks[rank]
        if own.question is None or own.question[0] != partner or own.answer is not None:
            return
        _, number, takes_any = own.question
        copies = self.ranks[partner].available()
        found = [copy for copy in copies if copy.number == number]
        if not found and (takes_any or copies[-1].number > number):
            found = [copies[-1]]
        if not found:
            own.answer = (None, self.ranks[partner].number)
            return
        mine = sorted(own.available(), key=lambda copy: abs(copy.number - found[0].number))
        own.answer = ((found[0], mine[0]), found[0].number)


@pytest.mark.thin
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_passive_gossip_follows_the_reference(world_size: int, period: int) -> None:
    algorithm = PassiveGossip(period, limit_s=math.inf)
    ranks = Ranks(algorithm, world_size, lambda p: torch.optim.SGD(p, LR), alike=False)
    reference = ReferenceGossip([ranks.weights(rank) for rank in range(world_size)], period)
    events = list(script(world_size, seed=10 + world_size, length=200 * world_size))
    for number, (rank, partner) in enumerate(events):
        if partner is None:
            gradient = gradient_of(ranks.weights(rank), number, rank)
            ranks.step(rank, gradient)
            reference.step(rank, gradient)
        else:
            ranks.network.deliver(rank, partner)
            reference.deliver(rank, partner)
        for each in range(world_size):
            expected = reference.ranks[each].weights
            np.testing.assert_allclose(ranks.weights(each), expected, rtol=1e-5, atol=1e-5)
    assert world_size == 1 or reference.takes.total() > 10
    assert world_size == 1 or reference.takes["ahead"] > 0


@pytest.mark.thin
@pytest.mark.parametrize(("behind", "delay"), [(0, 0), (1, 0), (3, 1), (4, 1), (5, 1), (7, 1), (7, 0), (1, 5), (3, 5)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_passive_gossip_pulls_nobody_back(world_size: int, behind: int, delay: int) -> None:
    """Ranks that go the same way come as far as alone, however many steps one of them is behind."""
    period, num_steps = 4, 60
    ranks = Ranks(PassiveGossip(period, limit_s=math.inf), world_size, lambda p: torch.optim.SGD(p, LR), alike=True)
    start = ranks.weights(0)
    gradient = np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)
    for now in range(num_steps + behind):
        for rank in range(world_size):
            if (behind if rank == 0 else 0) <= now < num_steps + (behind if rank == 0 else 0):
                ranks.step(rank, gradient)
        if now % (delay + 1) == 0:
            for pair in list(ranks.network.under_way):
                ranks.network.deliver(*pair)
    for rank in range(world_size):
        np.testing.assert_allclose(ranks.weights(rank), start - LR * num_steps * gradient, rtol=1e-4, atol=1e-4)
        assert ranks.runners[rank].num_rounds >= 3, "of an odd number of ranks one rests"


def test_passive_gossip_leaves_a_partner_that_stands_still_behind() -> None:
    period, num_steps, stops_at = 4, 400, 40
    ranks = Ranks(PassiveGossip(period, limit_s=math.inf), 2, lambda p: torch.optim.SGD(p, LR), alike=True)
    start, gradient = ranks.weights(0), np.ones(NUMEL, np.float32)
    for now in range(num_steps):
        for rank in range(2 if now < stops_at else 1):
            ranks.step(rank, gradient)
        for pair in list(ranks.network.under_way):
            ranks.network.deliver(*pair)
    distance = (start - ranks.weights(0)) / LR
    assert (distance > 0.8 * num_steps).all(), f"{distance.min():.0f} steps of {num_steps} are left"


def test_passive_gossip_asks_another_partner_when_one_is_late() -> None:
    ranks = Ranks(PassiveGossip(1, limit_s=1e-9), 4, lambda p: torch.optim.SGD(p, LR), alike=False)
    zero = np.zeros(NUMEL, np.float32)
    for _ in range(5):
        ranks.step(0, zero)
    asked = {pair[1] for pair, questions in ranks.network.under_way.items() if questions}
    assert len(asked) == 2, "at most two are asked at once"


def test_a_published_copy_stays_whole_while_it_is_held() -> None:
    tensors = [torch.zeros(5), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.complex64)]
    published = Published(tensors, depth=2)
    held = published.take(lambda copies: copies[-1])
    for number in range(1, 5):
        for tensor in tensors:
            tensor.fill_(number)
        published.publish(tensors, number)
        assert all(float(each.abs().max()) == 0 for each in held.tensors)
    with published.holding(lambda copies: copies[-1]) as latest:
        assert latest.number == 4
        assert all(torch.equal(each, tensor) for each, tensor in zip(latest.tensors, tensors, strict=True))
    with published.holding(lambda copies: copies[0]) as oldest:
        assert oldest is held, "a copy that is held can be taken by others too"
    published.give_back(held)
    published.publish(tensors, 5)
    assert len(published._copies) == 3, "buffers are used again"
    assert [copy.number for copy in published._kept] == [4, 5]
    published.forget()
    assert published.take(lambda copies: copies[-1] if copies else None) is None
