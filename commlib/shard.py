"""`shard`: FSDP2 communicates a model's weights and gradients in a codec."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from commlib import locks, verify
from commlib.algorithms.policy import MATRICES, CompressionPolicy
from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import block_codec
from commlib.engine import optimizers
from commlib.errors import ConfigError
from commlib.sharding.collectives import EncodedAllGather, EncodedReduceScatter, GradientFeedback
from commlib.sharding.differences import DifferenceAllGather
from commlib.sharding.fsdp import ParameterGroup, Shard, parameter_groups
from commlib.sharding.layout import FULL_PRECISION, Piece
from commlib.sharding.local import local_of, reshard
from commlib.sharding.stats import Counts, ShardStats
from commlib.transport import closing
from commlib.transport.base import Nodes
from commlib.transport.groups import as_timedelta, resolve_group
from commlib.transport.torch_dist import TorchTransport
from commlib.weak import WeakTable

_log = logging.getLogger("commlib")

#: The class of a user's model.
M = TypeVar("M", bound=nn.Module)

#: The sharded models of this process. A `Sharded` refers to its model, so FSDP2's modules hold it, not this table.
_sharded: WeakTable[nn.Module, weakref.ref[Sharded]] = WeakTable(locks.lock("sharded models", is_of_process=True))


def shard(
    model: M,
    weights: str | BlockCodec = FULL_PRECISION,
    gradients: str | BlockCodec = FULL_PRECISION,
    *,
    feedback: bool = False,
    difference: bool = False,
    hierarchical: bool = False,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    compress: CompressionPolicy = MATRICES,
    scaler: Any = None,
    timeout: float | timedelta | None = None,
) -> M:
    """Encode the weights that FSDP2 gathers and the gradients that it reduces.

    Collective over the ranks of every mesh that shards the model, after `fully_shard` and before the first forward or
    between two steps. Returns the same object. Each parameter's shard is encoded on its own. All ranks, the owner of a
    shard included, compute with the decoded weights, in forward and backward; the optimizer updates the exact ones. A
    gradient is the sum of the ranks' encoded gradients, in fp32 and in rank order.

    On a CPU, prefetched gathers overlap with the computation, and gradients are sent once, not twice as in
    Gloo's reduce-scatter. Both hold without a codec, too. A second call replaces the options of the first, and
    `commlib.unwrap` restores FSDP2's own collectives.

    Args:
        model: A model that FSDP2 shards.
        weights: The codec of the weights, or its name: "int8", "fp8_e4m3", "mxfp8", "int4", "bf16". "fp32" sends them
            in the dtype in which FSDP2 gathers.
        gradients: The codec of the gradients, likewise. "fp32" sends them in the dtype in which FSDP2 reduces.
        feedback: Whether each rank adds the error of its last encoding of a gradient to the next one. Takes memory for
            one unsharded fp32 copy of the encoded parameters per rank (per node with `hierarchical`). Requires
            `model.set_reduce_scatter_unused_params(True)` (torch 2.13).
        difference: Whether weights are sent as differences to a reference that all ranks hold, once per optimizer
            step (SDP4Bit, Jia et al., 2024). Further gathers of the step, such as backward's, communicate nothing.
            Errors do not accumulate. Takes memory for one unsharded copy of the model per rank, in the dtype in which
            FSDP2 gathers. The first gather after `shard`, a load or an edit of the weights is in full precision.
        hierarchical: Whether the ranks of a node sum their gradients in full precision first, and only the sums are
            encoded and sent to other nodes. Each node then sends every gradient once, not once per rank. No effect on
            one node, or with one rank per node.
        optimizer: The optimizer, or all of them in a list; required with `difference=True`.
        compress: Selects the parameters to encode. By default those of two or more dimensions and 1,024 or more
            elements. The others are sent in full precision.
        scaler: The `GradScaler`, with `feedback=True`: residuals do not contain its scale.
        timeout: Seconds (or a timedelta) that a collective waits for its peers. None uses the group's timeout.

    Returns:
        `model` itself.

    Raises:
        ConfigError: FSDP2 shards no module, or one whose collectives it does not let others replace. A codec is
            unknown, `feedback` is not possible, or the ranks differ in model or options.
        PeerTimeout: A rank did not arrive.
        PeerFailure: A rank died during the call.
    """
    closing.drain()
    resolve_group(None)
    groups = parameter_groups(model)
    options, error = None, None
    try:
        codecs = _codec(weights, "weights"), _codec(gradients, "gradients")
        resolved = optimizers.resolve(optimizer)
        everything = optimizers.all_of(resolved)
        options = _Options(*codecs, feedback, difference, hierarchical, everything, compress, scaler)
        _check(groups, options)
    except Exception as caught:  # raised on all ranks together
        error = caught
    with contextlib.ExitStack() as undo:
        transports: dict[tuple[int, ...], TorchTransport] = {}
        for key, process_group, device in _process_groups(groups):
            transports[key] = transport = _connect(process_group, device, timeout)
            undo.callback(transport.close)
            pairs = lambda: _pairs(model, groups, options)  # noqa: E731
            verify.agree(transport, pairs, error, "shard")
        if error is not None:
            raise error
        assert options is not None
        nodes = _nodes(groups, transports) if options.hierarchical else {}
        reshard(model)
        unshard(model)
        _sharded.put(model, weakref.ref(Sharded(groups, options, transports, nodes)))
        undo.pop_all()
    return model


def unshard(model: nn.Module) -> bool:
    """Restore FSDP2's own collectives; return whether `shard` had replaced them."""
    found = sharded_of(model)
    if found is None:
        return False
    _sharded.pop(model)
    found.close()
    return True


def sharded_of(model: nn.Module) -> Sharded | None:
    """Return the state of `shard` of a model, or None."""
    found = _sharded.get(model)
    return None if found is None else found()


@dataclass(frozen=True)
class _Options:
    weights: BlockCodec | None
    gradients: BlockCodec | None
    feedback: bool
    difference: bool
    hierarchical: bool
    optimizers: Sequence[torch.optim.Optimizer]
    compress: CompressionPolicy
    scaler: Any


class Sharded:
    """The state of `shard` of one model.

    Args:
        groups: The modules that FSDP2 shards.
        options: The options of `shard`.
        transports: The communicators, by the global ranks of each process group.
        nodes: The nodes of each of these groups, if gradients are summed within a node first.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        options: _Options,
        transports: dict[tuple[int, ...], TorchTransport],
        nodes: Mapping[tuple[int, ...], Nodes | None],
    ) -> None:
        self.weights, self.gradients = options.weights, options.gradients
        self.transports = transports
        self.gathers: list[EncodedAllGather] = []
        self.scatters: list[EncodedReduceScatter] = []
        self.feedback: dict[str, GradientFeedback] = {}
        self._groups = groups
        self._nodes = nodes
        self._compress = options.compress
        self._scaler = options.scaler
        self._scale, self._has_scale = 1.0, set[str]()
        self._own = [group.collectives() for group in groups]  # to be restored
        self._hooks: list[Any] = []
        for group in groups:
            on_cpu = group.device.type == "cpu"
            if options.weights is not None or on_cpu:
                self._replace_gather(group, options.difference)
            if options.gradients is not None or on_cpu:
                self._replace_scatter(group, options.feedback)
        for optimizer in options.optimizers if options.difference else ():
            self._follow(optimizer)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the gathers when a step begins and ends."""
        begins = [weakref.WeakMethod(each.begin_step) for each in self._differences()]
        ends = [weakref.WeakMethod(each.end_step) for each in self._differences()]

        def call(methods: Sequence[weakref.WeakMethod[Any]]) -> None:  # hooks must not keep the model alive
            for method in methods:
                if (found := method()) is not None:
                    found()

        begin: Any = lambda *_: call(begins)  # noqa: E731
        end: Any = lambda *_: call(ends)  # noqa: E731
        self._hooks += [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]

    def transport_of(self, group: dist.ProcessGroup) -> TorchTransport:
        """Return the communicator over the ranks of a process group."""
        key = _ranks(group)
        if key not in self.transports:
            raise ConfigError(
                f"shard: FSDP2 communicates between the ranks {list(key)}, which no mesh of the model had when "
                "commlib.shard was called. Call it after the last fully_shard"
            )
        return self.transports[key]

    def stats(self) -> ShardStats:
        """Return the statistics of this rank."""
        gathers = sum((each.counts for each in self.gathers), Counts())
        scatters = sum((each.counts for each in self.scatters), Counts())
        return ShardStats(
            weights=FULL_PRECISION if self.weights is None else self.weights.name,
            gradients=FULL_PRECISION if self.gradients is None else self.gradients.name,
            num_gathers=gathers.num_calls,
            num_reductions=scatters.num_calls,
            gathered_bytes=round(gathers.sent_bytes),
            reduced_bytes=round(scatters.sent_bytes),
            plain_gathered_bytes=round(gathers.plain_bytes),
            plain_reduced_bytes=round(scatters.plain_bytes),
            waited_s=gathers.waited_s + scatters.waited_s,
        )

    @property
    def num_ranks(self) -> int:
        """The number of ranks that hold the shards of a parameter; the largest of several."""
        return max(map(len, self.transports))

    @property
    def num_backwards(self) -> int:
        """The number of backwards whose gradients were reduced."""
        return max((each.counts.num_calls for each in self.scatters), default=0)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's residuals by parameter, its rows of references, and the number of ranks."""
        found = {name: value for each in self.feedback.values() for name, value in each.residuals.items()}
        residuals = {name: value.cpu().clone() for name, value in found.items()}
        references = {each.group.name: each.state_dict() for each in self._differences()}
        return {"num_ranks": self.num_ranks, "residuals": residuals, "references": references}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's residuals and references. Those of another number of ranks are dropped and logged."""
        saved = state["residuals"]
        is_same = state["num_ranks"] == self.num_ranks
        for group in self._groups:
            if group.name not in self.feedback:
                continue
            shapes = {each.name: (self.feedback[group.name].num_rows, each.numel) for each in group.shards}
            own = {name: saved[name] for name in shapes if is_same and name in saved}
            fits = all(tuple(value.shape) == shapes[name] for name, value in own.items())
            self.feedback[group.name].residuals = (
                {name: value.to(group.device, copy=True) for name, value in own.items()} if fits else {}
            )
            is_same = is_same and fits
        for each in self._differences():
            each.load_state_dict(state["references"].get(each.group.name) if is_same else None)
        if self.feedback and not is_same:
            _log.warning(
                "shard: the saved residuals are of %s ranks, or of other parameters. Residuals start at zero",
                state["num_ranks"],
            )

    def _differences(self) -> list[DifferenceAllGather]:
        return [each for each in self.gathers if isinstance(each, DifferenceAllGather)]

    def weights_changed(self) -> None:
        """Note that commlib has changed the weights, which their version counters do not show."""
        for each in self._differences():
            each.weights_changed()

    def copy_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of the first rank to all ranks of the root's mesh. Collective."""
        first = self._groups[0]
        for group in filter(None, (first.process_group, first.replicate_group)):
            for buffer in model.buffers():
                dist.broadcast(local_of(buffer), dist.get_global_rank(group, 0), group)

    def close(self) -> None:
        """Restore FSDP2's own collectives, and end the communicators."""
        for group, own in zip(self._groups, self._own, strict=True):
            group.restore(*own)
        for hook in self._hooks:
            hook.remove()
        for transport in self.transports.values():
            transport.close()

    def _replace_gather(self, group: ParameterGroup, has_difference: bool) -> None:
        kind = DifferenceAllGather if has_difference else EncodedAllGather
        gather = kind(group, self.transport_of, lambda: self._gathered(group))
        self.gathers.append(gather)
        group.module.set_custom_all_gather(gather)

    def _replace_scatter(self, group: ParameterGroup, has_feedback: bool) -> None:
        nodes, feedback = self._nodes.get(_ranks(group.process_group)), None
        if has_feedback:
            num_rows = group.process_group.size() if nodes is None else nodes.across.world_size
            feedback = GradientFeedback(num_rows, group.device, lambda: self._scale_of(group.name))
            self.feedback[group.name] = feedback
        reduced = lambda dtype: self._reduced(group, dtype)  # noqa: E731
        scatter = EncodedReduceScatter(group, self.transport_of, reduced, feedback, nodes)
        self.scatters.append(scatter)
        group.module.set_custom_reduce_scatter(scatter)

    def _gathered(self, group: ParameterGroup) -> list[Piece]:
        """Return the pieces of a row of weights."""
        return [Piece(each.name, each.numel, each.dtype, self._codec(self.weights, each)) for each in group.shards]

    def _reduced(self, group: ParameterGroup, dtype: torch.dtype) -> list[Piece]:
        """Return the pieces of a row of gradients."""
        return [
            Piece(each.name, each.numel, dtype, self._codec(self.gradients, each))
            for each in group.shards
            if each.has_gradient
        ]

    def _codec(self, codec: BlockCodec | None, each: Shard) -> BlockCodec | None:
        return codec if codec is not None and self._compress(each.name, each.parameter) else None

    def _scale_of(self, name: str) -> float:
        """Return the loss scale of the gradients; reads it once per backward, as that waits for an accelerator."""
        if name in self._has_scale or not self._has_scale:
            self._has_scale.clear()
            scaler = self._scaler
            self._scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        self._has_scale.add(name)
        return self._scale


# --- set-up -----------------------------------------------------------------------------------------------------------


def _codec(codec: str | BlockCodec, argument: str) -> BlockCodec | None:
    if codec == FULL_PRECISION:
        return None
    try:
        return block_codec(codec)
    except ConfigError as error:
        raise ConfigError(f"shard({argument}=...): {error}; {FULL_PRECISION!r} stands for no codec") from None


def _check(groups: Sequence[ParameterGroup], options: _Options) -> None:
    if options.scaler is not None and not hasattr(options.scaler, "get_scale"):
        raise ConfigError(f"scaler: expected a torch.amp.GradScaler, got {type(options.scaler).__name__}")
    if options.weights is options.gradients is None and groups[0].device.type != "cpu":
        raise ConfigError("shard: expected a codec of the weights or of the gradients; without one, nothing changes")
    if options.difference and (options.weights is None or not options.optimizers):
        raise ConfigError("shard(difference=True): expected a codec of the weights, and optimizer=")
    if options.hierarchical and options.gradients is None and groups[0].device.type != "cpu":
        raise ConfigError("shard(hierarchical=True): expected a codec of the gradients")
    if not options.feedback:
        return
    if options.gradients is None:
        raise ConfigError("shard(feedback=True): expected a codec of the gradients")
    for group in groups:
        if not hasattr(group.source, "reduce_scatter_unused_params"):
            raise ConfigError(f"shard(feedback=True): torch {torch.__version__} is too old; expected 2.13 or newer")
        if not group.source.reduce_scatter_unused_params:
            raise ConfigError(
                "shard(feedback=True): residuals belong to parameters, and FSDP2 does not say which of them have a "
                "gradient. Call model.set_reduce_scatter_unused_params(True) first; parameters without a gradient then "
                "get one of zeros"
            )


def _process_groups(groups: Sequence[ParameterGroup]) -> Iterator[tuple[tuple[int, ...], dist.ProcessGroup, Any]]:
    """Yield the ranks, the process group and the device of each group of ranks that FSDP2 communicates in, once."""
    seen: set[tuple[int, ...]] = set()
    for group in groups:
        for each in (group.process_group, group.second_process_group):
            if each is not None and each.size() > 1 and _ranks(each) not in seen:
                seen.add(_ranks(each))
                yield _ranks(each), each, group.device


def _connect(group: dist.ProcessGroup, device: torch.device, timeout: Any) -> TorchTransport:
    longest = as_timedelta(None, group, device)
    duration = as_timedelta(timeout, group, device)
    return TorchTransport(group, device, duration, max(duration, longest))


def _nodes(
    groups: Sequence[ParameterGroup], transports: Mapping[tuple[int, ...], TorchTransport]
) -> dict[tuple[int, ...], Nodes | None]:
    """Find the nodes of each group of ranks that reduces gradients. Collective."""
    reducing = dict.fromkeys(_ranks(group.process_group) for group in groups)
    return {key: transports[key].split_by_node() for key in reducing if key in transports}


def _pairs(model: nn.Module, groups: Sequence[ParameterGroup], options: _Options | None) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) pairs that must be identical on all ranks."""
    assert options is not None
    for name in ("weights", "gradients", "feedback", "difference", "hierarchical", "compress"):
        yield f"option {name}", repr(getattr(options, name))
    for group in groups:
        for each in group.shards:
            shape = tuple(each.parameter.shape)
            yield f"parameter {each.name!r}", f"{shape} {each.parameter.dtype} in {group.name!r}"


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
