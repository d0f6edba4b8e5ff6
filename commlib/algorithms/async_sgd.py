"""Asynchronous SGD: the ranks themselves are the parameter servers."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from commlib.algorithms._published import Copy, Layout
from commlib.algorithms._shard_server import Piece, Rule, ShardServer, check_elementwise, cut, shards
from commlib.algorithms.base import Algorithm, Attachment, Runner, Traits
from commlib.codecs.base import BlockCodec, Feedback
from commlib.codecs.registry import block_codec
from commlib.errors import ConfigError, PeerFailure, PeerTimeout
from commlib.transport.mailbox import Message

_log = logging.getLogger("commlib")

#: Questions: a gradient, answered with the whole weights; nothing, answered so; a gradient, answered with their change.
_PUSH, _PULL, _PUSH_FOR_CHANGE = 1, 2, 3

#: What parameters a codec takes; they are accumulated and sent in fp32.
_CODED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class AsyncSGD(Algorithm):
    """Push every gradient to the ranks that own its shards, and take over what has come of all ranks' pushes.

    The parameters are cut into one shard per rank. Each rank trains with its own optimizer as if it were alone, and
    sends each shard's gradient to the shard's owner, where a thread applies it to weights W, in the order of arrival,

        W <- Optimizer(W, g, s(k) lr / N)       version <- version + 1

    and answers with the newest W. At the first step end at which it is there the rank's weights w become

        w <- W + (w - w_at_push)

    so that what its own optimizer has done since the push is kept until it comes back from the owner. Nobody waits: at
    most one push per shard is under way, and gradients that find it so are averaged for the next one, as are those of
    `period` steps, and those of the time that a shard rests after an answer: `rest` times as long as push and answer
    took (the shorter of the last two), so that a slow network is not busy all the time. The mean of k gradients counts
    as a batch k times as large: s(k) is k for SGD, so that they count as their sum, and sqrt(k) for Adam, which goes no
    further with a sum than with one of them. Staleness is the number of updates of the shard since the W that the rank
    had taken over when it computed the first gradient of a push; with N ranks of the same speed it is about 2N where
    nothing is averaged.

    With a codec C both ways are compressed. The push is C(g + e), where e is what the push before has lost; the answer
    is C(W - W_r), where W_r is the sum of the owner's answers to rank r, so what the rank has. The first answer is W
    itself, as are those of `commlib.synchronize`.

    The owner's update is that of the user's optimizer: its class, its hyper-parameters, its learning rate as it is at
    that time on the shard's owner, and a state of its own. Adam with `fused=True` is fused there too, on the CPU.

    Paper: Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012 (Downpour SGD). Damping: Zhang et al.,
    "Staleness-aware Async-SGD", IJCAI 2016. Delay compensation: Zheng et al., "Asynchronous Stochastic Gradient
    Descent with Delay Compensation", ICML 2017, eq. 10: g + lambda g * g * (w_now - w_old). The square root: Malladi et
    al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS 2022.

    Deviations: Downpour overwrites w with W, and so forgets for a while what is on its way; it sends sums. The learning
    rate of W is divided by the number of ranks N, so that a step of all ranks goes about as far as one with their mean
    gradient; Downpour leaves that to the user. Only gradients older than `max_staleness` are damped, by
    `max_staleness / staleness`; in the paper all are, by 1 / staleness. A parameter without a gradient counts as one
    with zeros. Shards live in host memory, also where the model is on CUDA (which has not been run). A rank that leaves
    takes its shard along: each of the others trains it alone from there on.

    Args:
        period: Optimizer steps from one push to the next, at least (the paper's n_push and n_fetch).
        rest: How many times as long as its push and the answer took a shard rests before its next push, at least. With
            0 a slow network is full all the time, which takes processor time from training.
        max_staleness: Versions; None means four times the number of ranks.
        on_stale: What happens to older gradients: "damp" or "drop".
        delay_compensation: The factor lambda; 0 for none. It needs a second copy of the shard per rank.
        lr_scale: What the learning rate is multiplied by; None means 1 / N.
        codec: Any block codec or its name, for gradients and weights; None sends them in the parameters' dtypes.

    Raises:
        ConfigError: An option is out of range; when it is attached: the optimizer is not elementwise (SGD, Adam,
            AdamW), or a parameter does not fill a stretch of memory.
    """

    traits = Traits(tensors="none")

    def __init__(
        self,
        *,
        period: int = 4,
        rest: float = 7.0,
        max_staleness: int | None = None,
        on_stale: Literal["damp", "drop"] = "damp",
        delay_compensation: float = 0.0,
        lr_scale: float | None = None,
        codec: BlockCodec | str | None = None,
    ) -> None:
        if period < 1 or not rest >= 0:
            raise ConfigError(f"AsyncSGD: expected period >= 1 and rest >= 0, got {period!r} and {rest!r}")
        if max_staleness is not None and max_staleness < 1:
            raise ConfigError(f"AsyncSGD: expected max_staleness >= 1 or None, got {max_staleness!r}")
        if on_stale not in ("damp", "drop"):
            raise ConfigError(f"AsyncSGD: expected on_stale 'damp' or 'drop', got {on_stale!r}")
        if delay_compensation < 0 or (lr_scale is not None and lr_scale <= 0):
            raise ConfigError(
                "AsyncSGD: expected delay_compensation >= 0 and lr_scale > 0 or None, got "
                f"{delay_compensation!r} and {lr_scale!r}"
            )
        self.period = period
        self.rest = rest
        self.max_staleness = max_staleness
        self.on_stale = on_stale
        self.delay_compensation = delay_compensation
        self.lr_scale = lr_scale
        self.codec = None if codec is None else block_codec(codec)

    @override
    def attach(self, attachment: Attachment) -> Runner:
        world_size = attachment.comm.world_size
        rule = Rule(
            lr_scale=1 / world_size if self.lr_scale is None else self.lr_scale,
            max_staleness=4 * world_size if self.max_staleness is None else self.max_staleness,
            drops=self.on_stale == "drop",
            compensation=self.delay_compensation,
        )
        return _Worker(attachment, rule, self.period, self.rest, self.codec)


class _Shard(ABC):
    """What a worker has to do with one shard: the gradients for it, and its newest weights."""

    def __init__(
        self,
        owner: int,
        pieces: Sequence[Piece],
        tensors: Sequence[torch.Tensor],
        rest: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.owner = owner
        self._rest = rest
        self._asked_s = self._rests_until_s = 0.0
        self._took_s = math.inf  # from the last question to its answer
        self.pieces = pieces
        self._layout = Layout(cut(tensors, pieces), dtype)
        self._pending, self._received = Copy(self._layout), Copy(self._layout)
        self._at_push = [torch.empty_like(piece) for piece in cut(tensors, pieces)]
        self.num_pending = 0  # gradients added up in `_pending`
        self.version = 0  # of the weights that were taken over last
        self.is_under_way = False
        self.has_arrived = threading.Event()

    @abstractmethod
    def _packed(self) -> tuple[Message, memoryview]:
        """Return the mean in `_pending` as a push, and where its answer goes; `_pending` may be written again."""

    @abstractmethod
    def _unpack(self) -> None:
        """Make `_received` the weights that have arrived."""

    def add(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add gradients of all parameters, of which the shard's are taken."""
        own = cut(gradients, self.pieces)
        if self.num_pending:
            torch._foreach_add_(self._pending.tensors, [each.to("cpu") for each in own])
        else:
            torch._foreach_copy_(self._pending.tensors, own)
            self._pending.number = self.version  # stays so, also when newer weights come before the push
        self.num_pending += 1

    def push(self, weights: Sequence[torch.Tensor], ask: Callable[..., None]) -> None:
        """Send what is pending, and remember the weights. Returns at once."""
        torch._foreach_copy_(self._at_push, cut(weights, self.pieces))
        if self.num_pending > 1:
            torch._foreach_mul_(self._pending.tensors, 1 / self.num_pending)
        message, into = self._packed()
        self.num_pending = 0
        self._ask(message, into, ask)

    def pull(self, ask: Callable[..., None]) -> None:
        """Ask for the newest weights. Returns at once."""
        self._ask(Message(_PULL, self.version, b""), self._received.payload, ask)

    def has_rested(self) -> bool:
        """Return whether the next push may begin."""
        return time.monotonic() >= self._rests_until_s

    def _ask(self, message: Message, into: memoryview, ask: Callable[..., None]) -> None:
        self.is_under_way = True
        self._asked_s = time.monotonic()
        self.has_arrived.clear()
        ask(self.owner, message, self._on_reply, into)

    def _on_reply(self, message: Message) -> None:
        self._received.number = message.number
        now_s = time.monotonic()
        before_s, self._took_s = self._took_s, now_s - self._asked_s
        self._rests_until_s = now_s + self._rest * min(before_s, self._took_s)
        self.has_arrived.set()

    def take_over(self, weights: Sequence[torch.Tensor]) -> None:
        """Make the parameters the weights that have arrived, and what was done to them since the push."""
        self._unpack()
        own = cut(weights, self.pieces)
        torch._foreach_sub_(own, self._at_push)
        torch._foreach_add_(own, [each.to(o.device) for each, o in zip(self._received.tensors, own, strict=True)])
        self._end()

    def overwrite(self, weights: Sequence[torch.Tensor]) -> None:
        """Make the parameters the weights that have arrived, after `pull`."""
        torch._foreach_copy_(cut(weights, self.pieces), self._received.tensors)
        self._end()

    def _end(self) -> None:
        self.version = self._received.number
        self.is_under_way = False
        self.has_arrived.clear()


class _WholeShard(_Shard):
    """Gradients and weights go as they are."""

    def __init__(self, owner: int, pieces: Sequence[Piece], tensors: Sequence[torch.Tensor], rest: float) -> None:
        super().__init__(owner, pieces, tensors, rest)
        self._sending = Copy(self._layout)

    @override
    def _packed(self) -> tuple[Message, memoryview]:
        self._pending, self._sending = self._sending, self._pending
        return Message(_PUSH, self._sending.number, self._sending.payload, self.num_pending), self._received.payload

    @override
    def _unpack(self) -> None:
        pass


class _CompressedShard(_Shard):
    """Gradients go through a codec, with error feedback; of the weights what has changed since the last answer."""

    def __init__(
        self, owner: int, pieces: Sequence[Piece], tensors: Sequence[torch.Tensor], rest: float, codec: BlockCodec
    ) -> None:
        super().__init__(owner, pieces, tensors, rest, torch.float32)
        self._codec = codec
        numel = self._pending.flat.numel()
        self._residual = torch.zeros(numel)
        self._push, self._change = (torch.empty(codec.payload_bytes(numel), dtype=torch.uint8) for _ in range(2))
        self._has_base = False  # whether the owner knows what is in `_received`
        self._asked_for_change = False

    @override
    def _packed(self) -> tuple[Message, memoryview]:
        self._codec.encode(self._pending.flat, self._push, feedback=Feedback(self._residual))
        self._asked_for_change = self._has_base
        kind, into = (_PUSH_FOR_CHANGE, self._change) if self._has_base else (_PUSH, self._received.buffer)
        message = Message(kind, self._pending.number, self._push.numpy().data, self.num_pending)
        return message, into.numpy().data

    @override
    def _unpack(self) -> None:
        if self._asked_for_change:
            self._codec.decode_add(self._change, self._received.flat)
        self._has_base = True


class _Worker(Runner):
    """The rank's part: its own shard, and its questions to the owners of all."""

    def __init__(self, attachment: Attachment, rule: Rule, period: int, rest: float, codec: BlockCodec | None) -> None:
        self._attachment = attachment
        self._period = period
        optimizer = attachment.optimizer
        check_elementwise(optimizer)
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(name, parameter) for name, parameter in attachment.parameters if id(parameter) in in_optimizer]
        self._parameters = [parameter for _, parameter in named]
        for name, parameter in named:
            _check_dense(name, parameter)
            if codec is not None and parameter.dtype not in _CODED:
                known = ", ".join(str(each) for each in _CODED)
                raise ConfigError(f"async_sgd with a codec takes parameters of {known}; {name!r} is {parameter.dtype}")
        self._lock = threading.Lock()
        rank, world_size = attachment.comm.rank, attachment.comm.world_size
        of_ranks = shards([parameter.numel() for parameter in self._parameters], world_size)
        self._shards = [
            _WholeShard(r, pieces, self._weights, rest)
            if codec is None
            else _CompressedShard(r, pieces, self._weights, rest, codec)
            for r, pieces in enumerate(of_ranks)
            if pieces
        ]
        self._server = ShardServer(of_ranks[rank], self._parameters, optimizer, world_size, rule, codec)
        self._mailbox = attachment.connect(self._answer, self._server.push_bytes)

    @property
    def _weights(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self._parameters]

    @property
    @override
    def bytes_sent(self) -> float:
        return self._mailbox.bytes_sent

    # --- the shard that this rank owns, on the threads of those that ask --------------------------------------------

    @torch.no_grad()
    def _answer(self, peer: int, message: Message, reply: Callable[[Message], None]) -> None:
        with self._lock:
            if message.kind != _PULL:
                self._server.push(peer, message.number, self._server.gradient(message.payload), message.num_terms)
            if message.kind == _PUSH_FOR_CHANGE:
                payload = self._server.change(peer).numpy().data
            else:
                payload = self._server.reply(peer).payload
            version = self._server.version
        reply(Message(message.kind, version, payload))

    # --- the steps --------------------------------------------------------------------------------------------------

    @override
    def before_step(self) -> None:
        if getattr(self._attachment.optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                "async_sgd takes gradients before the optimizer's step, and a fused optimizer unscales them within it. "
                "Call scaler.unscale_(optimizer) first, or make the optimizer with fused=False"
            )
        gradients = [parameter.grad for parameter in self._parameters]
        if all(gradient is None for gradient in gradients):
            return
        laid_out = [_laid_out(g, p) for g, p in zip(gradients, self._parameters, strict=True)]
        for shard in self._shards:
            shard.add(laid_out)

    @override
    def after_step(self) -> None:
        self._mailbox.check()
        self._forget_shards_of_ranks_that_left()
        for shard in self._shards:
            self._take_over(shard)
            if shard.num_pending >= self._period and shard.has_rested():
                self._push(shard)

    def _take_over(self, shard: _Shard) -> None:
        """Take over the weights that have arrived, if they have."""
        if shard.has_arrived.is_set():
            shard.take_over(self._weights)
            self.num_rounds += 1

    def _push(self, shard: _Shard) -> None:
        """Push what is pending, if nothing is under way."""
        if shard.num_pending and not shard.is_under_way:
            shard.push(self._weights, self._mailbox.ask)

    def _forget_shards_of_ranks_that_left(self) -> None:
        here = {self._attachment.comm.rank, *self._mailbox.present()}
        gone = [shard.owner for shard in self._shards if shard.owner not in here]
        if gone:
            self._shards = [shard for shard in self._shards if shard.owner in here]
            _log.warning("ranks %s have left; each rank trains their shards of the parameters alone from here on", gone)

    # --- the rest ---------------------------------------------------------------------------------------------------

    @override
    def synchronize(self) -> None:
        for shard in self._shards:
            while shard.is_under_way or shard.num_pending:
                if shard.is_under_way:
                    self._wait(shard, "the end of its pushes")
                self._take_over(shard)
                self._push(shard)
        self._attachment.gather(None)  # from here on every push has been applied, on all ranks
        for shard in self._shards:
            shard.pull(self._mailbox.ask)
        for shard in self._shards:
            self._wait(shard, "the final weights")
            shard.overwrite(self._weights)
        self._attachment.gather(None)  # nobody pushes before all have pulled

    def _wait(self, shard: _Shard, what: str) -> None:
        limit_s = self._attachment.timeout_s
        if not shard.has_arrived.wait(limit_s):
            self._mailbox.check()
            words = f"rank {self._attachment.comm.rank}: {what}: rank {shard.owner}"
            if shard.owner not in (self._attachment.comm.rank, *self._mailbox.present()):
                raise PeerFailure(f"{words} has left; every rank must call commlib.synchronize")
            raise PeerTimeout(f"{words} did not answer within {limit_s:g} s")

    @override
    def close(self) -> None:
        self._mailbox.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            server = self._server.state_dict()
        return {"server": server, "versions": {shard.owner: shard.version for shard in self._shards}}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._server.load_state_dict(state["server"])
        for shard in self._shards:
            shard.version = state["versions"].get(shard.owner, shard.version)


def _check_dense(name: str, parameter: torch.Tensor) -> None:
    if torch.empty_like(parameter).stride() != parameter.stride():
        raise ConfigError(
            f"async_sgd cuts parameters into shards by their memory, and {name!r} with strides {parameter.stride()} "
            "does not fill a stretch of it. Make the parameter contiguous"
        )


def _laid_out(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient with the parameter's strides; zeros where there is none."""
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.layout == torch.strided and gradient.stride() == parameter.stride():
        return gradient.detach()
    return torch.empty_like(parameter).copy_(gradient.detach().to_dense())
