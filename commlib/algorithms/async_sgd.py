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

#: Interval at which a wait for an answer checks that the peer is still present, in seconds.
_LOOK_S = 0.2

#: Parameter dtypes that work with a codec; they are accumulated and sent in fp32.
_CODED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class AsyncSGD(Algorithm):
    """Pushes weight updates to the ranks that own the parameters' shards, and pulls the resulting weights.

    The parameters are split into one shard per rank. Each rank trains with its own optimizer, without waiting for its
    peers. It sends each shard's owner the difference of its weights w from an origin o. A thread of the owner adds the
    difference to its weights W, in the order of arrival, and answers with the newest W:

        push:                              W <- W + (w - o) / N,    version <- version + 1,    o <- w
        end of the step when W arrives:    w <- W + (w - o),    o <- W

    The second line keeps the rank's steps since the push. At most one push per shard is in flight. The next push covers
    all steps since the previous one: at least `period`, and at least those made while the shard rests. After an answer,
    a shard rests `rest` times as long as a push with its answer took (the shorter of the last two), which leaves a slow
    network idle part of the time. Staleness is the number of updates of the shard since the W that the rank had at the
    first step of a push. With N ranks of equal speed and a push in every step it is about 2N.

    With `push="gradients"`, a push is the mean g of the gradients of the k steps since the previous push. The owner
    applies the user's optimizer, with the same class and hyperparameters, the owner's current learning rate, and a
    separate state:

        push:                              W <- Optimizer(W, g, s(k) lr / N),    version <- version + 1,    o <- w

    The mean of k gradients counts as a batch k times as large. s(k) is k for SGD, which applies their sum, and sqrt(k)
    for Adam, whose step does not grow with the gradient. Adam with `fused=True` is fused on the owner too. Accumulating
    gradients adds a pass over them to every step, and with infrequent pushes training converges more slowly than with
    `push="updates"`.

    With a codec C, both directions are compressed. A push is C(p + e), where p is the uncompressed push and e the error
    of the previous push. An answer is C(W - W_r), where W_r is the sum of the owner's answers to rank r, that is, the
    rank's copy of W. The first answer, and those of `commlib.synchronize`, are W itself.

    Paper: of gradients, Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012 (Downpour SGD); of updates,
    Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024. Damping: Zhang et al., "Staleness-aware
    Async-SGD", IJCAI 2016. Delay compensation: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
    Compensation", ICML 2017, eq. 10: g + lambda g * g * (w_now - w_old). The square root: Malladi et al., "On the SDEs
    and Scaling Rules for Adaptive Gradient Algorithms", NeurIPS 2022.

    Deviations: both papers overwrite w with W, and so temporarily lose the update in flight. Updates are averaged, as
    with an outer optimizer of learning rate 1 without momentum. The learning rate of W is divided by the number of
    ranks N, so that one step on all ranks moves W about as far as one step with their mean gradient; Downpour sends
    sums and leaves the scaling to the user. Only pushes with a staleness above `max_staleness` are damped, by
    `max_staleness / staleness`; the paper damps every push, by 1 / staleness. A missing gradient counts as zeros.
    Shards reside in host memory, also for a model on CUDA (not tested). When a rank leaves, its shard is no longer
    shared: every remaining rank trains it alone.

    Args:
        push: "updates" of the weights, or "gradients".
        period: Minimum number of optimizer steps between pushes (Downpour's n_push and n_fetch).
        rest: Minimum rest of a shard before its next push, as a multiple of the duration of its push and the answer.
            With 0, a slow network is always busy, which takes processor time from training.
        max_staleness: Maximum staleness, in versions. None means four times the number of ranks.
        on_stale: How older pushes are handled: "damp" or "drop".
        delay_compensation: The factor lambda, for gradients; 0 disables it. It needs a second copy of the shard per
            rank.
        lr_scale: Factor of the updates, or of the learning rate; None means 1 / N.
        codec: Block codec for pushes and answers, or its name. None sends both in the parameters' dtypes.

    Raises:
        ConfigError: An option is out of range. When the algorithm is attached: the optimizer is not elementwise (SGD,
            Adam, AdamW) with `push="gradients"`, a parameter does not occupy contiguous memory, or the codec does not
            support its dtype.
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
        """Return the rule by which the owners of shards apply pushes."""
        return Rule(
            scale=1 / world_size if self.lr_scale is None else self.lr_scale,
            max_staleness=4 * world_size if self.max_staleness is None else self.max_staleness,
            drops=self.on_stale == "drop",
            compensation=self.delay_compensation,
        )

    @override
    def traffic(self, parameters: Sequence[torch.Tensor], world_size: int) -> Traffic:
        """See `Algorithm`. An exchange sends a shard to each owner and receives it back; every rank owns one shard."""
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
            step_bytes=3 * nbytes if pushes_gradients else 0,  # accumulate the gradients
            # Read the origin, write the update, rewrite the origin. With a codec, encode with error feedback.
            ask_bytes=(4 if pushes_gradients else 9) * nbytes + (3 * 4 * numel if is_coded else 0),
            # Update W, or make an optimizer step; then copy W, or encode its change.
            beside_bytes=(10 if pushes_gradients else 5) * nbytes + (3 * 4 * numel if is_coded else 0),
            # Subtract the origin from the weights, replace it, and add it again.
            take_bytes=8 * nbytes + (2 * 4 * numel if is_coded else 0),
            # Origin, pending, sent and received buffers, and the own shard; with a codec, residuals and every W_r.
            memory_bytes=4 * nbytes + nbytes // world_size + (2 * 4 * numel if is_coded else 0),
        )

    @override
    def attach(self, attachment: Attachment) -> Runner:
        return _Worker(attachment, self)


class _Worker(Runner):
    """The runner of one rank: serves its own shard, and pushes to the owners of all shards."""

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
            f"rank {self._attachment.comm.rank}: async_sgd splits parameters into shards by their memory, and {name!r} "
            f"has strides {now}, expected {before} as at wrap time. Change the memory format before wrapping"
        )

    @property
    def _orders(self) -> dict[str, Order]:
        """The memory orders of the parameters whose elements are not in the order of their indices."""
        orders = zip(self._names, map(order_of, self._parameters), strict=True)
        return {name: order for name, order in orders if order}

    @property
    @override
    def bytes_sent(self) -> float:
        return self._mailbox.bytes_sent

    # --- the shard that this rank owns, on the mailbox threads ------------------------------------------------------

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
                    "async_sgd(push='gradients') reads gradients before the optimizer's step, and a fused optimizer "
                    "unscales them inside the step. Call scaler.unscale_(optimizer) first, or create the optimizer "
                    "with fused=False"
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
        """Apply the shard's new weights if they have arrived."""
        if shard.has_arrived.is_set():
            frozen = {idx for idx, parameter in enumerate(self._parameters) if not parameter.requires_grad}
            shard.take_over(self._weights, frozen)
            self.num_rounds += 1

    def _push(self, shard: Shard) -> None:
        """Push the pending steps, unless a push is in flight."""
        if shard.num_pending and not shard.is_under_way:
            shard.push(self._weights, self._mailbox.ask)

    def _forget_shards_of_ranks_that_left(self) -> None:
        here = {self._attachment.comm.rank, *self._mailbox.present()}
        gone = [shard.owner for shard in self._shards if shard.owner not in here]
        if gone:
            self._shards = [shard for shard in self._shards if shard.owner in here]
            _log.warning("ranks %s have left; from now on each rank trains their parameter shards alone", gone)

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
        self._attachment.gather(None)  # every push of every rank has been applied
        for shard in self._shards:
            shard.pull(self._mailbox.ask)
        for shard in self._shards:
            self._wait(shard, "the final weights")
            shard.overwrite(self._weights)
        self._attachment.gather(None)  # no rank pushes before all ranks have pulled

    def _wait(self, shard: Shard, what: str) -> None:
        limit_s = self._attachment.timeout_s
        deadline = time.monotonic() + limit_s
        while not shard.has_arrived.wait(_LOOK_S):
            self._mailbox.check()
            owner = self._mailbox.global_rank(shard.owner)
            words = f"rank {self._mailbox.global_rank(self._attachment.comm.rank)}: {what}: rank {owner}"
            has_left = shard.owner not in (self._attachment.comm.rank, *self._mailbox.present())
            if has_left and not shard.has_arrived.wait(_LOOK_S):  # its answer may arrive after its goodbye
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
                f"rank {self._attachment.comm.rank}: async_sgd: the saved shards have another memory format: "
                f"{len(different)} parameters differ, the first is {different[0]!r}, saved with its dimensions in the "
                f"order {saved.get(different[0], 'of its indices')}, expected "
                f"{own.get(different[0], 'of its indices')}. Convert the model to the memory format of the run that "
                "saved them before wrapping"
            )


def _check_dense(name: str, parameter: torch.Tensor) -> None:
    if not parameter.is_contiguous() and not is_dense(parameter):
        raise ConfigError(
            f"async_sgd splits parameters into shards by their memory, and {name!r} with strides {parameter.stride()} "
            "does not occupy contiguous memory. Make the parameter contiguous"
        )


def _dense(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient with the parameter's strides; zeros if there is no gradient."""
    return torch.zeros_like(parameter) if gradient is None else laid_out(gradient, parameter)
