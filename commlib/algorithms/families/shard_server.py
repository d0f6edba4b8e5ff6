"""A shard of the parameters and the rule that updates it: no threads, no network."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commlib.algorithms.families.published import Copy, Layout
from commlib.codecs.base import BlockCodec
from commlib.errors import ConfigError

#: Optimizers that treat every element by itself, so that a shard's update is the shard of the update.
_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `end` of parameter `index`, which belong to one shard."""

    index: int
    start: int
    end: int


@dataclass(frozen=True)
class Rule:
    """How a server takes pushes.

    Attributes:
        scale: What an update, or the learning rate of the user's optimizer, is multiplied by.
        max_staleness: The largest distance in versions at which a push counts in full.
        drops: Whether older ones are dropped; else they are scaled by `max_staleness / staleness`.
        compensation: The factor lambda of delay compensation; 0 for none.
    """

    scale: float
    max_staleness: int
    drops: bool
    compensation: float = 0.0


def shards(numels: Sequence[int], num_shards: int) -> list[list[Piece]]:
    """Cut parameters of these sizes into shards of sizes that differ by at most one element."""
    ends = list(itertools.accumulate(numels))
    total = ends[-1] if ends else 0
    cuts = [total * idx // num_shards for idx in range(num_shards + 1)]
    found = []
    for first, last in itertools.pairwise(cuts):
        pieces = []
        for index, (end, numel) in enumerate(zip(ends, numels, strict=True)):
            low, high = max(first, end - numel), min(last, end)
            if low < high:
                pieces.append(Piece(index, low - end + numel, high - end + numel))
        found.append(pieces)
    return found


def cut(tensors: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Return views of the pieces of dense tensors, in the order of their memory."""
    return [_in_memory_order(tensors[piece.index])[piece.start : piece.end] for piece in pieces]


def laid_out(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the strides of a dense parameter of its shape: itself, if it has them."""
    if tensor.layout == torch.strided and tensor.stride() == parameter.stride():
        return tensor.detach()
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach().to_dense())


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer can be cut into shards.

    Raises:
        ConfigError: It is not one of those that are known to be.
    """
    if type(optimizer) not in _ELEMENTWISE:
        known = ", ".join(cls.__name__ for cls in _ELEMENTWISE)
        raise ConfigError(
            f"optimizer: async_sgd(push='gradients') updates shards of parameters: it needs an elementwise optimizer: "
            f"one of {known}, got {type(optimizer).__name__}. push='updates' takes any"
        )


class _ShardOptimizer:
    """The user's optimizer for a shard: its class, its hyper-parameters and its state so far.

    Its `param_groups` are read again at every step, so that learning rates follow a schedule.
    """

    def __init__(
        self,
        user: torch.optim.Optimizer,
        lr_scale: float,
        pieces: Sequence[Piece],
        parameters: Sequence[torch.nn.Parameter],
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._user = user
        self._lr_scale = lr_scale
        self._weights = weights
        self._growth = 1.0 if isinstance(user, torch.optim.SGD) else 0.5
        group_of = {id(p): idx for idx, group in enumerate(user.param_groups) for p in group["params"]}
        members: dict[int, list[torch.Tensor]] = {}
        for piece, weight in zip(pieces, weights, strict=True):
            members.setdefault(group_of[id(parameters[piece.index])], []).append(weight.requires_grad_())
        self._group_indices = list(members)
        groups = [{"params": own, **self._options(user.param_groups[idx])} for idx, own in members.items()]
        self.own: torch.optim.Optimizer = type(user)(groups)  # pyright: ignore[reportCallIssue]
        for piece, weight in zip(pieces, weights, strict=True):
            parameter = parameters[piece.index]
            state = user.state.get(parameter, {})
            self.own.state[weight] = {key: _of_piece(value, parameter, piece) for key, value in state.items()}

    def _options(self, user: dict[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters of a group of the user's optimizer, as they are for tensors on the CPU."""
        options = {key: value for key, value in user.items() if key != "params"}
        if options.get("capturable"):
            options["capturable"] = False
        if isinstance(self._user, torch.optim.SGD) and options.get("fused"):
            options["fused"] = False  # torch's fused SGD fails where only some tensors have a momentum yet
        return {**options, "lr": float(user["lr"]) * self._lr_scale}

    def step(self, gradient: Sequence[torch.Tensor], num_steps: int) -> None:
        """Make a step with the mean gradient of `num_steps` steps.

        The learning rate grows with them as for a larger batch: in proportion for SGD, which makes it their sum; for
        Adam, to which a sum is no more than one gradient, by the square root.
        """
        for own, idx in zip(self.own.param_groups, self._group_indices, strict=True):
            own.update(self._options(self._user.param_groups[idx]))
            own["lr"] *= num_steps**self._growth
        for weight, each in zip(self._weights, gradient, strict=True):
            weight.grad = each.to(weight.dtype)
        self.own.step()
        self.own.zero_grad()


class ShardServer:
    """One rank's shard: its weights, and its version, which counts the updates. Not thread-safe.

    Args:
        pieces: Which elements of the parameters.
        parameters: All parameters; the pieces are copied, those of half precision in fp32.
        optimizer: The user's, of which the shard gets one of its own, where gradients are pushed; None where updates
            are.
        num_workers: How many ranks push.
        rule: How pushes are taken.
        codec: Of what is pushed and of the changes of the weights; None sends both in the parameters' dtypes.

    Attributes:
        weights: The pieces' newest values.
        layout: Of an answer.
        push_bytes: The size of a push.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        num_workers: int,
        rule: Rule,
        codec: BlockCodec | None = None,
    ) -> None:
        self._rule = rule
        self.version = 0
        own = cut([parameter.data for parameter in parameters], pieces)
        self.weights = [piece.detach().to("cpu", _precise(piece.dtype, optimizer), copy=True) for piece in own]
        self.layout = Layout(own, None if codec is None else torch.float32)
        self._codec = codec
        self.push_bytes = self.layout.nbytes
        if codec is not None:
            self.push_bytes = codec.payload_bytes(self.layout.nbytes // 4)
            self._scratch = Copy(self.layout)
            sizes = [self.push_bytes] * num_workers
            self._changes = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in sizes]
        self._optimizer = None
        if optimizer is not None and pieces:
            self._optimizer = _ShardOptimizer(optimizer, rule.scale, pieces, parameters, self.weights)
        depth = 2 if rule.compensation else 1  # a gradient was computed on the reply before the last one
        self._replies = [deque((self._copy() for _ in range(depth)), depth) for _ in range(num_workers)]

    def _copy(self) -> Copy:
        copy = Copy(self.layout)
        torch._foreach_copy_(copy.tensors, [weight.detach() for weight in self.weights])
        copy.number = self.version
        return copy

    def unpack(self, payload: Any) -> list[torch.Tensor]:
        """Return what a push of `push_bytes` bytes carries; good until the next is unpacked."""
        received = torch.frombuffer(payload, dtype=torch.uint8)
        if self._codec is None:
            return self.layout.views(received)
        self._codec.decode(received, self._scratch.flat)
        return self._scratch.tensors

    @torch.no_grad()
    def push(self, worker: int, version: int, pushed: Sequence[torch.Tensor], num_steps: int = 1) -> None:
        """Take an update of the weights, or a mean gradient, of `num_steps` steps of `worker`.

        With staleness s, the number of updates since `version`, on which the first of the steps was made: what has
        s > max_staleness is dropped, or scaled by max_staleness / s. Compensation adds lambda g * g * (w - w_version)
        to a gradient g, element by element.
        """
        staleness = max(0, self.version - version)
        if not self.weights or (staleness > self._rule.max_staleness and self._rule.drops):
            return
        factor = min(1.0, self._rule.max_staleness / max(1, staleness))
        if self._optimizer is None:
            torch._foreach_add_(self.weights, list(pushed), alpha=self._rule.scale * factor)
        else:
            gradient = self._compensated(worker, version, pushed) if self._rule.compensation else list(pushed)
            if factor < 1:
                torch._foreach_mul_(gradient, factor)
            self._optimizer.step(gradient, num_steps)
        self.version += 1

    def _compensated(self, worker: int, version: int, gradient: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        replies = self._replies[worker]
        then = next((copy for copy in replies if copy.number == version), replies[0])
        return [
            g + self._rule.compensation * (g * g.conj() if g.is_complex() else g * g) * (now - old)
            for g, now, old in zip(gradient, self.weights, then.tensors, strict=True)
        ]

    @torch.no_grad()
    def overwrite(self, weights: Sequence[torch.Tensor]) -> None:
        """Go on from other weights of the shard, which count as an update."""
        torch._foreach_copy_(self.weights, list(weights))
        self.version += 1

    @torch.no_grad()
    def reply(self, worker: int) -> Copy:
        """Return a copy of the newest weights for `worker`; it stays as it is until the worker's next reply."""
        copy = self._next_reply(worker)
        torch._foreach_copy_(copy.tensors, [weight.detach() for weight in self.weights])
        return copy

    @torch.no_grad()
    def change(self, worker: int) -> torch.Tensor:
        """Return what the weights have changed by since the last reply to `worker`, encoded.

        The copy of what the worker has is changed by what that decodes to, as the worker's own is. So what the codec
        loses is part of the next change. [push_bytes] uint8; it stays as it is until the worker's next reply.
        """
        assert self._codec is not None
        last, payload = self._replies[worker][-1], self._changes[worker]
        copy = self._next_reply(worker)
        copy.buffer.copy_(last.buffer)
        torch._foreach_copy_(self._scratch.tensors, [weight.detach() for weight in self.weights])
        torch.sub(self._scratch.flat, copy.flat, out=self._scratch.flat)
        self._codec.encode(self._scratch.flat, payload)
        self._codec.decode_add(payload, copy.flat)
        return payload

    def _next_reply(self, worker: int) -> Copy:
        """Return the copy of the worker's oldest reply, as its latest, with the version of now."""
        replies = self._replies[worker]
        replies.rotate(-1)
        replies[-1].number = self.version
        return replies[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the weights, the optimizer's state and the version."""
        optimizer = None if self._optimizer is None else self._optimizer.own.state_dict()
        weights = [weight.detach().clone() for weight in self.weights]
        return {"version": self.version, "weights": weights, "optimizer": _cloned(optimizer)}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a state of other options; nothing changes.

        Raises:
            ConfigError: It was saved where updates were pushed and gradients are now, or the other way round.
        """
        if (state["optimizer"] is None) != (self._optimizer is None):
            saved = ("updates", "gradients") if self._optimizer is None else ("gradients", "updates")
            raise ConfigError(f"async_sgd: the state was saved with push={saved[1]!r}; this model has {saved[0]!r}")

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.version = state["version"]
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.copy_(saved)
        if self._optimizer is not None:
            self._optimizer.own.load_state_dict(state["optimizer"])
        if self._codec is not None:
            return  # the workers still have what they were answered, to which the next change is relative
        for worker, replies in enumerate(self._replies):
            for _ in range(len(replies)):
                self.reply(worker)


def _precise(dtype: torch.dtype, optimizer: torch.optim.Optimizer | None) -> torch.dtype:
    """Return in which dtype a shard keeps weights: small updates of many ranks would be lost in half precision."""
    return torch.float32 if optimizer is None and dtype in (torch.bfloat16, torch.float16) else dtype


def _of_piece(value: Any, parameter: torch.Tensor, piece: Piece) -> Any:
    """Copy the piece's part of an entry of the optimizer's state; what has not the parameter's shape, as a whole."""
    if not torch.is_tensor(value):
        return value
    if value.shape == parameter.shape:
        value = cut([laid_out(value, parameter)], [Piece(0, piece.start, piece.end)])[0]
    return value.to("cpu", copy=True)


def _cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cloned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cloned(each) for each in value)
    return value.clone() if torch.is_tensor(value) else value
