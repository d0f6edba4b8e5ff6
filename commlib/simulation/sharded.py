"""Models that FSDP2 shards and `commlib.shard` encodes, as workloads.

[Note: modules] `fully_shard` is called on every block and on the model, whose other parameters are the root module's. A
block is a part of the model with a number in its name, such as "layers.3".

[Note: islands] The ranks of an island shard the model. The algorithm communicates between ranks that hold the same
shard. It is simulated on the network of those ranks, with the shards as its parameters.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commlib.algorithms.policy import MATRICES
from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import block_codec
from commlib.errors import ConfigError
from commlib.network.model import DTYPES, Layer, Network, Workload
from commlib.sharding.layout import FULL_PRECISION, Layout, Piece
from commlib.simulation.collectives import Islands

META = torch.device("meta")
_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
#: State tensors of the optimizers, in sizes of the parameters.
_NUM_STATES = {"sgd": 1, "adam": 2}


@dataclass(frozen=True)
class Sharding:
    """FSDP2's sharding, and the arguments of `commlib.shard`.

    Attributes:
        ranks: Number of consecutive ranks that shard the model.
        weights: Name of the codec of the weights; "fp32" gathers in `param_dtype`.
        gradients: Name of the codec of the gradients; "fp32" reduces in `reduce_dtype`.
        difference: Whether weights are sent as differences, once per step.
        reshard_after_forward: Whether blocks are gathered again in backward.
        param_dtype: Dtype in which weights are gathered: a key of `DTYPES`; None: the workload's.
        reduce_dtype: Dtype in which gradients are reduced; None: the workload's.
        hierarchical: Whether the ranks of a node sum their gradients before they are encoded.
    """

    ranks: int
    weights: str = FULL_PRECISION
    gradients: str = FULL_PRECISION
    difference: bool = False
    reshard_after_forward: bool = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"shard: expected 2 or more ranks, got {self.ranks}")
        for name in ("weights", "gradients"):
            self.codec(getattr(self, name))
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, *DTYPES):
                raise ConfigError(f"shard: expected {name} of {sorted(DTYPES)}, got {getattr(self, name)!r}")
        if self.difference and self.weights == FULL_PRECISION:
            raise ConfigError("shard: differences require a codec of the weights, got 'fp32'")

    @staticmethod
    def codec(name: str) -> BlockCodec | None:
        """Return the codec of a name, or None for "fp32"."""
        return None if name == FULL_PRECISION else block_codec(name)

    @property
    def exactness(self) -> str:
        """The class of the codecs (`commlib.algorithms.base.EXACTNESS`)."""
        codecs = [codec for name in (self.weights, self.gradients) if (codec := self.codec(name)) is not None]
        if not codecs:
            return "exact"
        return "8bit" if all(codec.payload_bytes(1 << 20) >= 1 << 20 for codec in codecs) else "any"

    def without_codecs(self) -> Sharding:
        """Return the same sharding by FSDP2 alone."""
        return dataclasses.replace(
            self, weights=FULL_PRECISION, gradients=FULL_PRECISION, difference=False, hierarchical=False
        )


@dataclass(frozen=True)
class Module:
    """A module on which `fully_shard` was called.

    Attributes:
        name: Its name.
        shapes: Full name and shape of each of its parameters, without those of sharded submodules.
    """

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]


class ShardedModel:
    """A workload that islands of ranks shard.

    Args:
        workload: The workload.
        network: The network of all ranks.
        sharding: The sharding.

    Attributes:
        islands: The groups of ranks.
        root: The root module.
        blocks: The blocks, in the order of forward.
        shard: The workload of a rank: its shard of each parameter, ready with the other parameters of its module.

    Raises:
        ConfigError: The ranks do not fit the nodes, or no part of the workload is a block.
    """

    def __init__(self, workload: Workload, network: Network, sharding: Sharding) -> None:
        self.sharding = sharding
        self.islands = Islands.of(network, sharding.ranks)
        by_block: dict[str, list[Layer]] = {}
        weights_of_root = [0.0, 0.0]  # before and after the first block
        rest: list[Layer] = []
        for layer in workload.layers:
            if (name := _block_of(layer.name)) is not None:
                by_block.setdefault(name, []).append(layer)
                continue
            rest.append(layer)
            weights_of_root[bool(by_block)] += layer.weight
        if not by_block:
            raise ConfigError(f"shard: the workload {workload.name!r} has no blocks, such as 'layers.0'")
        self.root = Module("the root module", _shapes(rest))
        self.blocks = [Module(name, _shapes(layers)) for name, layers in by_block.items()]
        self.shard = dataclasses.replace(
            workload,
            layers=(
                *(_cut(layer, sharding.ranks) for layer in rest),
                Layer("the root module, before the blocks", (), weights_of_root[0]),
                *(_merged(name, layers, sharding.ranks) for name, layers in by_block.items()),
                Layer("the root module, after the blocks", (), weights_of_root[1]),
            ),
            optimizer_s=workload.optimizer_s / sharding.ranks,
        )

    def weights_of(self, module: Module) -> Layout:
        """Return the layout of a gathered row."""
        return self._layout(module, self.sharding.param_dtype, self.sharding.weights)

    def gradients_of(self, module: Module) -> Layout:
        """Return the layout of a reduced row."""
        return self._layout(module, self.sharding.reduce_dtype, self.sharding.gradients)

    def _layout(self, module: Module, dtype: str | None, codec: str) -> Layout:
        named, of_dtype = Sharding.codec(codec), DTYPES[dtype or self.shard.dtype]
        pieces = []
        for name, shape in module.shapes:
            is_encoded = named is not None and MATRICES(name, torch.empty(shape, dtype=of_dtype, device=META))
            numel = math.prod(_shard_of(shape, self.sharding.ranks))
            pieces.append(Piece(name, numel, of_dtype, named if is_encoded else None))
        return Layout(pieces)

    @property
    def memory_bytes(self) -> int:
        """Bytes of a rank's buffers: gathered weights, gradients, payloads, and the reference of differences."""
        ranks, modules = self.sharding.ranks, [self.root, *self.blocks]
        gathered = [self.weights_of(module) for module in modules]
        reduced = [self.gradients_of(module) for module in modules]
        blocks = [ranks * layout.row_bytes for layout in gathered[1:]]
        held = sum(sorted(blocks)[-2:]) if self.sharding.reshard_after_forward else sum(blocks)
        held += ranks * gathered[0].row_bytes
        held += 2 * ranks * max(layout.row_bytes for layout in reduced)
        if self.sharding.weights != FULL_PRECISION:
            held += ranks * max(layout.payload_bytes for layout in gathered)
        if self.sharding.gradients != FULL_PRECISION:
            held += 2 * ranks * max(layout.payload_bytes for layout in reduced)
        if self.sharding.difference:
            held += ranks * sum(layout.row_bytes for layout in gathered)
        return held


def training_bytes(workload: Workload) -> int:
    """Return the bytes of parameters, gradients and optimizer state."""
    return workload.nbytes * (2 + _NUM_STATES[workload.optimizer])


def _block_of(name: str) -> str | None:
    """Return the name of the block that a layer belongs to, or None if it belongs to the root module."""
    found = _BLOCK.match(name)
    return None if found is None else found[0]


def _shapes(layers: Sequence[Layer]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((f"{layer.name}.{name}", shape) for layer in layers for name, shape in layer.shapes)


def _shard_of(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shape of the largest shard."""
    return (-(-shape[0] // ranks), *shape[1:])


def _cut(layer: Layer, ranks: int) -> Layer:
    """Return a layer of the root module with shards as its parameters; their gradients are reduced at the end."""
    return Layer(layer.name, tuple((name, _shard_of(shape, ranks)) for name, shape in layer.shapes), 0.0)


def _merged(block: str, layers: Sequence[Layer], ranks: int) -> Layer:
    """Return the layers of a block as one, with shards as its parameters."""
    shapes = tuple((name.removeprefix(f"{block}."), _shard_of(shape, ranks)) for name, shape in _shapes(layers))
    return Layer(block, shapes, sum(layer.weight for layer in layers))
