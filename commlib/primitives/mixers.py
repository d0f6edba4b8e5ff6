"""Mixers: averaging of a tensor with those of the neighbours in a graph, and the state for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from typing_extensions import override

from commlib.codecs.base import BlockCodec
from commlib.primitives.decentralized import (
    DifferenceWorkspace,
    FullWorkspace,
    QuantizedWorkspace,
    choco,
    dcd,
    decentralized_full_precision,
    decentralized_quantized,
)
from commlib.primitives.topology import Neighbours
from commlib.transport.base import Communication, Communicator

_M = TypeVar("_M")


class Mixer(ABC, Generic[_M]):
    """Replaces a tensor by the weighted mean of this rank's and its neighbours' tensors, in place.

    A mixer holds options only; buffers and state of each bucket are in a workspace.
    """

    #: The kinds of state that workspaces save and load. If empty, workspaces have no `save` and `load`.
    kinds: tuple[str, ...] = ()

    @abstractmethod
    def workspace(self, like: torch.Tensor, begin: int, neighbours: Neighbours) -> _M:
        """Create the workspace of a tensor.

        Args:
            like: [numel] A tensor with the dtype and device of the tensors to average.
            begin: First element in the bucket.
            neighbours: The neighbours of this rank in the first round.
        """

    @abstractmethod
    def mix(self, tensor: torch.Tensor, workspace: _M, neighbours: Neighbours, peers: Communicator) -> Communication:
        """Average `tensor` [numel] with the neighbours among `peers`."""


class FullPrecisionMixer(Mixer[FullWorkspace]):
    """Sends uncompressed values; see `decentralized_full_precision`."""

    @override
    def workspace(self, like: torch.Tensor, begin: int, neighbours: Neighbours) -> FullWorkspace:
        return FullWorkspace(like.numel(), like.dtype, like.device)

    @override
    def mix(
        self, tensor: torch.Tensor, workspace: FullWorkspace, neighbours: Neighbours, peers: Communicator
    ) -> Communication:
        yield from decentralized_full_precision(tensor, workspace, neighbours, peers)


class QuantizedMixer(Mixer[QuantizedWorkspace]):
    """Sends encoded values; see `decentralized_quantized`.

    Args:
        codec: Encodes the values.
    """

    def __init__(self, codec: BlockCodec) -> None:
        self.codec = codec

    @override
    def workspace(self, like: torch.Tensor, begin: int, neighbours: Neighbours) -> QuantizedWorkspace:
        return QuantizedWorkspace(like.numel(), like.dtype, like.device, self.codec)

    @override
    def mix(
        self, tensor: torch.Tensor, workspace: QuantizedWorkspace, neighbours: Neighbours, peers: Communicator
    ) -> Communication:
        yield from decentralized_quantized(tensor, workspace, neighbours, peers)


class DifferenceMixer(Mixer[DifferenceWorkspace]):
    """Sends encoded differences from replicas; see `choco` and `dcd`. The neighbours are the same in every round.

    Args:
        codec: Encodes the differences.
        consensus_step: Step size of `choco`, in (0, 1]; None for `dcd`.
    """

    kinds = ("replica", "pull")

    def __init__(self, codec: BlockCodec, consensus_step: float | None) -> None:
        self.codec = codec
        self.consensus_step = consensus_step

    @override
    def workspace(self, like: torch.Tensor, begin: int, neighbours: Neighbours) -> DifferenceWorkspace:
        return DifferenceWorkspace(like.numel(), like.dtype, like.device, self.codec, neighbours, begin=begin)

    @override
    def mix(
        self, tensor: torch.Tensor, workspace: DifferenceWorkspace, neighbours: Neighbours, peers: Communicator
    ) -> Communication:
        if self.consensus_step is None:
            yield from dcd(tensor, workspace, peers)
        else:
            yield from choco(tensor, workspace, peers, self.consensus_step)
