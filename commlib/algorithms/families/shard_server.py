"""The owner side of a shard of the parameters, and the rule that updates it, without threads or network."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commlib.algorithms.families.published import Packing, TensorBuffer
from commlib.codecs.base import BlockCodec
from commlib.errors import ConfigError

#: Optimizers that update every element independently, so that a shard can be updated separately.
_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `end` of parameter `index`, which belong to one shard."""

    index: int
    start: int
    end: int


@dataclass(frozen=True)
class Rule:
    """The rule by which a server applies pushes.

    Attributes:
        scale: Factor of an update, or of the learning rate of the user's optimizer.
        max_staleness: Largest staleness in versions at which a push is applied in full.
        drops: Whether older pushes are dropped; otherwise they are scaled by `max_staleness / staleness`.
        compensation: The factor lambda of delay compensation; 0 disables it.
    """

    scale: float
    max_staleness: int
    drops: bool
    compensation: float = 0.0


def shards(numels: Sequence[int], num_shards: int) -> list[list[Piece]]:
    """Split parameters of these sizes into shards whose sizes differ by at most one element."""
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
    """Return the tensor with the strides of a dense parameter of its shape; the tensor itself if it has them."""
    if tensor.layout == torch.strided and tensor.stride() == parameter.stride():
        return tensor.detach()
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach().to_dense())


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer is elementwise, so that it can update shards.

    Raises:
        ConfigError: It is not known to be elementwise.
    """
    if type(optimizer) not in _ELEMENTWISE:
        known = ", ".join(cls.__name__ for cls in _ELEMENTWISE)
        raise ConfigError(
            f"optimizer: async_sgd(push='gradients') updates shards of parameters and needs an elementwise optimizer, "
            f"one of {known}, got {type(optimizer).__name__}. push='updates' works with any"
        )


class _ShardOptimizer:
    """A copy of the user's optimizer for a shard, with its class, hyperparameters and current state.

    The user's `param_groups` are read at every step, so learning rates follow a schedule.
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
        """Return the hyperparameters of a group of the user's optimizer, adapted to tensors on the CPU."""
        options = {key: value for key, value in user.items() if key != "params"}
        if options.get("capturable"):
            options["capturable"] = False
        if isinstance(self._user, torch.optim.SGD) and options.get("fused"):
            options["fused"] = False  # torch's fused SGD fails if only some tensors have a momentum buffer
        return {**options, "lr": float(user["lr"]) * self._lr_scale}

    def step(self, gradient: Sequence[torch.Tensor], num_steps: int) -> None:
        """Make a step with the mean gradient of `num_steps` steps.

        The learning rate is scaled as for a larger batch: by `num_steps` for SGD, which applies the sum of the
        gradients, and by its square root for Adam, whose step does not grow with the gradient.
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
        pieces: The shard's pieces of the parameters.
        parameters: All parameters. The pieces are copied, half precision in fp32.
        optimizer: The user's optimizer, which the shard copies, if gradients are pushed; None if updates are pushed.
        num_workers: Number of ranks that push.
        rule: How pushes are applied.
        codec: Codec of pushes and of the changes of the weights; None sends both in the parameters' dtypes.

    Attributes:
        weights: The pieces' newest values.
        packing: The packing of an answer.
        push_bytes: The size of a push in bytes.
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
        self.packing = Packing(own, None if codec is None else torch.float32)
        self._codec = codec
        self.push_bytes = self.packing.nbytes
        if codec is not None:
            self.push_bytes = codec.payload_bytes(self.packing.nbytes // 4)
            self._scratch = TensorBuffer(self.packing)
            sizes = [self.push_bytes] * num_workers
            self._changes = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in sizes]
        self._optimizer = None
        if optimizer is not None and pieces:
            self._optimizer = _ShardOptimizer(optimizer, rule.scale, pieces, parameters, self.weights)
        depth = 2 if rule.compensation else 1  # a gradient is computed with the reply before the last one
        self._replies = [deque((self._copy() for _ in range(depth)), depth) for _ in range(num_workers)]

    def _copy(self) -> TensorBuffer:
        copy = TensorBuffer(self.packing)
        torch._foreach_copy_(copy.tensors, [weight.detach() for weight in self.weights])
        copy.number = self.version
        return copy

    def unpack(self, payload: Any) -> list[torch.Tensor]:
        """Return the tensors in a push of `push_bytes` bytes; valid until the next call."""
        received = torch.frombuffer(payload, dtype=torch.uint8)
        if self._codec is None:
            return self.packing.views(received)
        self._codec.decode(received, self._scratch.flat)
        return self._scratch.tensors

    @torch.no_grad()
    def push(self, worker: int, version: int, pushed: Sequence[torch.Tensor], num_steps: int = 1) -> None:
        """Apply an update of the weights, or a mean gradient, of `num_steps` steps of `worker`.

        The staleness s is the number of updates since `version`, with which the first of the steps was made. A push
        with s > max_staleness is dropped, or scaled by max_staleness / s. Compensation adds lambda g * g * (w -
        w_version) to a gradient g, elementwise.
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
        """Replace the weights of the shard, which counts as an update."""
        torch._foreach_copy_(self.weights, list(weights))
        self.version += 1

    @torch.no_grad()
    def reply(self, worker: int) -> TensorBuffer:
        """Return a copy of the newest weights for `worker`, valid until the worker's next reply."""
        copy = self._next_reply(worker)
        torch._foreach_copy_(copy.tensors, [weight.detach() for weight in self.weights])
        return copy

    @torch.no_grad()
    def change(self, worker: int) -> torch.Tensor:
        """Return the encoded change of the weights since the last reply to `worker`, [push_bytes] uint8.

        The copy of the worker's weights is updated by the decoded change, like the worker's own copy, so the next
        change includes the codec's error. The result is valid until the worker's next reply.
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

    def _next_reply(self, worker: int) -> TensorBuffer:
        """Return the buffer of the worker's oldest reply, reused as its latest with the current version."""
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
        """Check a saved state before it is loaded; changes nothing.

        Raises:
            ConfigError: It was saved with another option `push`.
        """
        if (state["optimizer"] is None) != (self._optimizer is None):
            saved = ("updates", "gradients") if self._optimizer is None else ("gradients", "updates")
            raise ConfigError(f"async_sgd: the state was saved with push={saved[1]!r}; this model has {saved[0]!r}")

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.version = state["version"]
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.copy_(saved)
        if self._optimizer is not None:
            self._optimizer.own.load_state_dict(state["optimizer"])
        if self._codec is not None:
            return  # the next change is relative to the last replies, which the workers still have
        for worker, replies in enumerate(self._replies):
            for _ in range(len(replies)):
                self.reply(worker)


def _precise(dtype: torch.dtype, optimizer: torch.optim.Optimizer | None) -> torch.dtype:
    """Return the dtype of a shard's weights; half precision would lose small updates of many ranks."""
    return torch.float32 if optimizer is None and dtype in (torch.bfloat16, torch.float16) else dtype


def _of_piece(value: Any, parameter: torch.Tensor, piece: Piece) -> Any:
    """Copy the piece of an entry of the optimizer's state, or the whole entry if its shape differs."""
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
