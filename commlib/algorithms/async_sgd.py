"""Asynchronous SGD: the ranks themselves are the parameter servers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import torch
from typing_extensions import override

from commlib import locks
from commlib.algorithms.base import Algorithm, Attachment, Runner, Traffic
from commlib.algorithms.channels import SelfRunning
from commlib.algorithms.families.shard_client import (
    PULL,
    PUSH_FOR_CHANGE,
    CodedWire,
    GradientShard,
    Shard,
    UpdateShard,
    WholeWire,
)
from commlib.algorithms.families.shard_server import Rule, ShardServer, check_elementwise, cut, laid_out, shards
from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import block_codec
from commlib.errors import ConfigError, PeerFailure, PeerTimeout
from commlib.primitives.order import Order, is_dense, order_of
from commlib.transport.mailbox import HEADER_BYTES, Message

_log = logging.getLogger("commlib")

#: How often a wait for an answer looks whether the peer is there, in seconds.
_LOOK_S = 0.2

#: What parameters a codec takes; they are accumulated and sent in fp32.
_CODED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class AsyncSGD(Algorithm):
    """Push what a rank has done to the ranks that own its parameters' shards; take over what has come of all pushes.

    The parameters are cut into one shard per rank. Each rank trains with its own optimizer as if it were alone, and
    sends to each shard's owner how far its weights w have gone from an origin o. There a thread adds it to weights W,
    in the order of arrival, and answers with the newest W:

        push:                              W <- W + (w - o) / N,    version <- version + 1,    o <- w
        end of the step when W is there:   w <- W + (w - o),    o <- W

    so that what the rank has done since the push is kept. Nobody waits: at most one push per shard is under way, and
    the next covers all steps since: `period` at least, and those of the time that a shard rests after an answer, `rest`
    times as long as push and answer took (the shorter of the last two), so that a slow network is not busy all the
    time. Staleness is the number of updates of the shard since the W that the rank had taken over at the first step of
    a push; with N ranks of the same speed it is about 2N with a push in every step.

    With `push="gradients"` the push is the mean g of the gradients of the k steps since the last one, and the owner
    applies the user's optimizer: its class, its hyper-parameters, its learning rate as it is then on the owner, a state
    of its own:

        push:                              W <- Optimizer(W, g, s(k) lr / N),    version <- version + 1,    o <- w

    The mean of k gradients counts as a batch k times as large: s(k) is k for SGD, so that they count as their sum, and
    sqrt(k) for Adam, which goes no further with a sum than with one of them. Adam with `fused=True` is fused there too.
    Adding gradients up is a pass over them in every step, and seldom pushes learn less than with updates.

    With a codec C both ways are compressed. The push is C(p + e), where p is what would be pushed and e what the push
    before has lost; the answer is C(W - W_r), where W_r is the sum of the owner's answers to rank r, so what the rank
    has. The first answer is W itself, as are those of `commlib.synchronize`.

    Paper: of gradients, Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012 (Downpour SGD); of updates,
    Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024. Damping: Zhang et al., "Staleness-aware
    Async-SGD", IJCAI 2016. Delay compensation: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
    Compensation", ICML 2017, eq. 10: g + lambda g * g * (w_now - w_old). The square root: Malladi et al., "On the SDEs
    and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS 2022.

    Deviations: both papers overwrite w with W, and so forget for a while what is on its way. Updates are averaged, as
    with an outer optimizer of rate 1 without momentum. The learning rate of W is divided by the number of ranks N, so
    that a step of all ranks goes about as far as one with their mean gradient; Downpour leaves that to the user, and
    sends sums. Only what is older than `max_staleness` is damped, by `max_staleness / staleness`; in the paper all is,
    by 1 / staleness. A parameter without a gradient counts as one with zeros. Shards live in host memory, also where
    the model is on CUDA (which has not been run). A rank that leaves takes its shard along: each of the others trains
    it alone from there on.

    Args:
        push: "updates" of the weights, or "gradients".
        period: Optimizer steps from one push to the next, at least (Downpour's n_push and n_fetch).
        rest: How many times as long as its push and the answer took a shard rests before its next push, at least. With
            0 a slow network is full all the time, which takes processor time from training.
        max_staleness: Versions; None means four times the number of ranks.
        on_stale: What happens to older pushes: "damp" or "drop".
        delay_compensation: The factor lambda, for gradients; 0 for none. It needs a second copy of the shard per rank.
        lr_scale: What updates, or the learning rate, are multiplied by; None means 1 / N.
        codec: Any block codec or its name, for what is pushed and answered; None sends it in the parameters' dtypes.

    Raises:
        ConfigError: An option is out of range; when it is attached: the optimizer is not elementwise (SGD, Adam,
            AdamW) with gradients, a parameter does not fill a stretch of memory, or a codec does not take its dtype.
    """

    made_for = "any"
    channel = SelfRunning()

    def __init__(
        self,
        *,
        push: Literal["updates", "gradients"] = "updates",
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
        if push not in ("updates", "gradients"):
            raise ConfigError(f"AsyncSGD: expected push 'updates' or 'gradients', got {push!r}")
        if delay_compensation and push != "gradients":
            raise ConfigError("AsyncSGD: expected push='gradients' with delay_compensation, which corrects gradients")
        self.push = push
        self.period = period
        self.rest = rest
        self.max_staleness = max_staleness
        self.on_stale = on_stale
        self.delay_compensation = delay_compensation
        self.lr_scale = lr_scale
        self.codec = None if codec is None else block_codec(codec)

    def rule(self, world_size: int) -> Rule:
        """Return how the owners of shards take pushes."""
        return Rule(
            scale=1 / world_size if self.lr_scale is None else self.lr_scale,
            max_staleness=4 * world_size if self.max_staleness is None else self.max_staleness,
            drops=self.on_stale == "drop",
            compensation=self.delay_compensation,
        )

    @override
    def traffic(self, parameters: Sequence[torch.Tensor], world_size: int) -> Traffic:
        """See `Algorithm`: a shard to each owner and back, as each rank is the owner of one."""
        numel = sum(parameter.numel() for parameter in parameters)
        nbytes = sum(parameter.nbytes for parameter in parameters)
        shard = nbytes // world_size if self.codec is None else self.codec.payload_bytes(-(-numel // world_size))
        pushes_gradients = self.push == "gradients"
        is_coded = self.codec is not None
        return Traffic(
            peers=world_size - 1,
            question_bytes=HEADER_BYTES + shard,
            answer_bytes=HEADER_BYTES + shard,
            rest=self.rest,
            step_bytes=3 * nbytes if pushes_gradients else 0,  # gradients are added up
            # The origin; what has been done since, and the origin again. With a codec it is encoded, with feedback.
            ask_bytes=(4 if pushes_gradients else 9) * nbytes + (3 * 4 * numel if is_coded else 0),
            # W is changed, or the optimizer makes a step; W is copied, or its change encoded.
            beside_bytes=(10 if pushes_gradients else 5) * nbytes + (3 * 4 * numel if is_coded else 0),
            # Of the weights the origin is taken off, replaced, and added again.
            take_bytes=8 * nbytes + (2 * 4 * numel if is_coded else 0),
            # Origin, what is pending, sent and received, and the own shard; with a codec its errors, and W_r of all.
            memory_bytes=4 * nbytes + nbytes // world_size + (2 * 4 * numel if is_coded else 0),
        )

    @override
    def attach(self, attachment: Attachment) -> Runner:
        return _Worker(attachment, self)


class _Worker(Runner):
    """The rank's part: its own shard, and its questions to the owners of all."""

    def __init__(self, attachment: Attachment, algorithm: AsyncSGD) -> None:
        self._attachment = attachment
        self._period = algorithm.period
        self._pushes_gradients = self.needs_gradients = algorithm.push == "gradients"
        optimizer, codec = attachment.optimizer, algorithm.codec
        if self._pushes_gradients:
            check_elementwise(optimizer)
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(name, parameter) for name, parameter in attachment.parameters if id(parameter) in in_optimizer]
        self._parameters = [parameter for _, parameter in named]
        self._names = [name for name, _ in named]
        self._strides = [parameter.stride() for parameter in self._parameters]
        for name, parameter in named:
            _check_dense(name, parameter)
            if codec is not None and parameter.dtype not in _CODED:
                known = ", ".join(str(each) for each in _CODED)
                raise ConfigError(f"async_sgd with a codec takes parameters of {known}; {name!r} is {parameter.dtype}")
        self._lock = locks.lock("async_sgd")
        rank, world_size = attachment.comm.rank, attachment.comm.world_size
        of_ranks = shards([parameter.numel() for parameter in self._parameters], world_size)
        make = GradientShard if self._pushes_gradients else UpdateShard
        self._shards: list[Shard] = []
        for owner, pieces in enumerate(of_ranks):
            if pieces:
                own = cut(self._weights, pieces)
                wire = WholeWire(own) if codec is None else CodedWire(own, codec)
                self._shards.append(make(owner, pieces, self._weights, algorithm.rest, wire))
        self._own_pieces = of_ranks[rank]
        self._server = ShardServer(
            self._own_pieces,
            self._parameters,
            optimizer if self._pushes_gradients else None,
            world_size,
            algorithm.rule(world_size),
            codec,
        )
        self._mailbox = attachment.connect(self._answer, self._server.push_bytes)

    @property
    def _weights(self) -> list[torch.Tensor]:
        weights = [parameter.data for parameter in self._parameters]
        if [weight.stride() for weight in weights] != self._strides:
            self._refuse_format(weights)
        return weights

    def _refuse_format(self, weights: list[torch.Tensor]) -> NoReturn:
        changed = zip(self._names, weights, self._strides, strict=True)
        name, now, before = next((n, w.stride(), s) for n, w, s in changed if w.stride() != s)
        raise ConfigError(
            f"rank {self._attachment.comm.rank}: async_sgd cuts parameters into shards by their memory, and {name!r} "
            f"has strides {now}, expected {before} as when it was wrapped. Change the memory format before wrapping"
        )

    @property
    def _orders(self) -> dict[str, Order]:
        """The orders of elements of parameters that do not lie in that of their indices."""
        orders = zip(self._names, map(order_of, self._parameters), strict=True)
        return {name: order for name, order in orders if order}

    @property
    @override
    def bytes_sent(self) -> float:
        return self._mailbox.bytes_sent

    # --- the shard that this rank owns, on the threads of those that ask --------------------------------------------

    @torch.no_grad()
    def _answer(self, peer: int, message: Message, reply: Callable[[Message], None]) -> None:
        with self._lock:
            if message.kind != PULL:
                self._server.push(peer, message.number, self._server.unpack(message.payload), message.num_terms)
            if message.kind == PUSH_FOR_CHANGE:
                payload = self._server.change(peer).numpy().data
            else:
                payload = self._server.reply(peer).payload
            version = self._server.version
        reply(Message(message.kind, version, payload))

    # --- the steps --------------------------------------------------------------------------------------------------

    @override
    def before_step(self) -> None:
        own: list[torch.Tensor] = []
        if self._pushes_gradients:
            gradients = [parameter.grad for parameter in self._parameters]
            if all(gradient is None for gradient in gradients):
                return
            if getattr(self._attachment.optimizer, "grad_scale", None) is not None:
                raise ConfigError(
                    "async_sgd(push='gradients') takes gradients before the optimizer's step, and a fused optimizer "
                    "unscales them within it. Call scaler.unscale_(optimizer) first, or make the optimizer with "
                    "fused=False"
                )
            own = [_dense(g, p) for g, p in zip(gradients, self._parameters, strict=True)]
        weights = self._weights
        for shard in self._shards:
            shard.before_step(weights, own)

    @override
    def after_step(self) -> None:
        self._mailbox.check()
        self._forget_shards_of_ranks_that_left()
        for shard in self._shards:
            self._take_over(shard)
            if shard.num_pending >= self._period and shard.has_rested():
                self._push(shard)

    def _take_over(self, shard: Shard) -> None:
        """Take over the weights that have arrived, if they have."""
        if shard.has_arrived.is_set():
            frozen = {idx for idx, parameter in enumerate(self._parameters) if not parameter.requires_grad}
            shard.take_over(self._weights, frozen)
            self.num_rounds += 1

    def _push(self, shard: Shard) -> None:
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
    def weights_were_loaded(self) -> None:
        own = [piece.detach() for piece in cut(self._weights, self._own_pieces)]
        with self._lock:
            self._server.overwrite(own)
        for shard in self._shards:
            shard.begin_anew(self._weights)

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

    def _wait(self, shard: Shard, what: str) -> None:
        limit_s = self._attachment.timeout_s
        deadline = time.monotonic() + limit_s
        while not shard.has_arrived.wait(_LOOK_S):
            self._mailbox.check()
            owner = self._mailbox.global_rank(shard.owner)
            words = f"rank {self._mailbox.global_rank(self._attachment.comm.rank)}: {what}: rank {owner}"
            has_left = shard.owner not in (self._attachment.comm.rank, *self._mailbox.present())
            if has_left and not shard.has_arrived.wait(_LOOK_S):  # its answer may come after its goodbye
                raise PeerFailure(f"{words} has left; every rank must call commlib.synchronize", [owner])
            if time.monotonic() > deadline:
                raise PeerTimeout(f"{words} did not answer within {limit_s:g} s", [owner])

    @override
    def close(self) -> None:
        self._mailbox.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            server = self._server.state_dict()
        versions = {shard.owner: shard.version for shard in self._shards}
        return {"server": server, "versions": versions, "orders": self._orders}

    @override
    def check_state_dict(self, state: dict[str, Any]) -> None:
        self._server.check_state_dict(state["server"])
        self._check_orders({name: tuple(order) for name, order in state.get("orders", {}).items()})

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._server.load_state_dict(state["server"])
        for shard in self._shards:
            shard.version = state["versions"].get(shard.owner, shard.version)

    def _check_orders(self, saved: dict[str, Order]) -> None:
        own = self._orders
        different = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        if different:
            raise ConfigError(
                f"rank {self._attachment.comm.rank}: async_sgd: the saved shards are of another memory format: "
                f"{len(different)} parameters, the first is {different[0]!r}, whose dimensions lay in the order "
                f"{saved.get(different[0], 'of its indices')}, expected {own.get(different[0], 'of its indices')}. "
                "Bring the model into the memory format of the run that saved them before wrapping"
            )


def _check_dense(name: str, parameter: torch.Tensor) -> None:
    if not parameter.is_contiguous() and not is_dense(parameter):
        raise ConfigError(
            f"async_sgd cuts parameters into shards by their memory, and {name!r} with strides {parameter.stride()} "
            "does not fill a stretch of it. Make the parameter contiguous"
        )


def _dense(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient with the parameter's strides; zeros where there is none."""
    return torch.zeros_like(parameter) if gradient is None else laid_out(gradient, parameter)
