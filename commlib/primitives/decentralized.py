"""Decentralized communication: each rank communicates with its neighbours in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlib.codecs.base import BlockCodec
from commlib.primitives.parts import Part, Pieces, cut, pasted, with_values
from commlib.primitives.topology import Neighbours
from commlib.transport.base import Communication, Communicator, Exchange


class FullWorkspace:
    """Buffers of one bucket for `decentralized_full_precision`: one for each source of this rank.

    Args:
        numel: Number of elements of the tensor: a bucket, or a stretch of one.
        dtype: Type of the tensor.
        device: Device of the tensor.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._received: list[torch.Tensor] = []
        self._numel = numel
        self._total = None if wide == dtype else torch.zeros(numel, dtype=wide, device=device)

    def received(self, num: int) -> list[torch.Tensor]:
        """Return `num` buffers [numel]. They are allocated on first use."""
        while len(self._received) < num:
            self._received.append(self._like.new_zeros(self._numel))
        return self._received[:num]

    def total(self, first: torch.Tensor) -> torch.Tensor:
        """Return the accumulator of a sum, initialised with `first`: `first` itself, or an fp32 buffer if narrower."""
        return first if self._total is None else self._total.copy_(first)


def decentralized_full_precision(
    tensor: torch.Tensor, workspace: FullWorkspace, neighbours: Neighbours, comm: Communicator
) -> Communication:
    """Replace `tensor` by the weighted mean of this rank's and its neighbours' tensors (BAGUA's D_FP_S).

        x_i <- sum_j W_ij x_j

    The sum is computed in rank order, in fp32 or wider. A rank without neighbours in this step yields an empty request.

    Args:
        tensor: [numel] of any floating dtype; changed in place.
        workspace: The bucket's buffers.
        neighbours: This rank's neighbours and weights in this step.
        comm: The group.
    """
    received = workspace.received(len(neighbours.sources))
    yield _exchange(tensor, received, neighbours, comm)
    terms = [(comm.rank, neighbours.own, tensor)]
    terms += [(rank, weight, x) for (rank, weight), x in zip(neighbours.sources.items(), received, strict=True)]
    (_, weight, first), *others = sorted(terms, key=lambda term: term[0])
    total = workspace.total(first).mul_(weight)
    for _, weight, value in others:
        total.add_(value, alpha=weight)
    if total is not tensor:
        tensor.copy_(total)


class QuantizedWorkspace:
    """Payload buffers of one bucket for `decentralized_quantized`.

    Args:
        numel: Number of elements of the tensor.
        dtype: Type of the tensor.
        device: Device of the tensor.
        codec: Codec of the payloads.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, codec: BlockCodec) -> None:
        self.codec = codec
        self.decoded = torch.zeros(numel if dtype == torch.float64 else 0, dtype=dtype, device=device)
        self.own = torch.zeros(codec.payload_bytes(numel), dtype=torch.uint8, device=device)
        self._received: list[torch.Tensor] = []

    def received(self, num: int) -> list[torch.Tensor]:
        """Return `num` payload buffers. They are allocated on first use."""
        while len(self._received) < num:
            self._received.append(torch.zeros_like(self.own))
        return self._received[:num]


def decentralized_quantized(
    tensor: torch.Tensor, workspace: QuantizedWorkspace, neighbours: Neighbours, comm: Communicator
) -> Communication:
    """Average `tensor` with the neighbours' tensors, all of them compressed. There is no state, so any graph is valid.

        x_i <- x_i + sum_j W_ij (C(x_j) - C(x_i))

    W is doubly stochastic, so the mean over the ranks is preserved. The remaining distance of the ranks to the mean
    depends on the error of C. Carli et al., "Gossip consensus algorithms via quantized communication" (Automatica,
    2010), the compensating rule. A block with NaN or Inf becomes NaN on this rank and its neighbours.

    Args:
        tensor: [numel] fp32, bf16, fp16 or fp64; changed in place.
        workspace: The bucket's buffers.
        neighbours: This rank's neighbours and weights in this step.
        comm: The group.
    """
    codec = workspace.codec
    if neighbours.sources or neighbours.targets:
        codec.encode(tensor, workspace.own)
    payloads = workspace.received(len(neighbours.sources))
    yield comm.exchange(
        [(rank, workspace.own) for rank in neighbours.targets], list(zip(neighbours.sources, payloads, strict=True))
    )
    for weight, payload in zip(neighbours.sources.values(), payloads, strict=True):
        _decode_add(codec, payload, tensor, weight, workspace.decoded)
    if payloads:
        _decode_add(codec, workspace.own, tensor, neighbours.own - 1.0, workspace.decoded)


def _decode_add(
    codec: BlockCodec, payload: torch.Tensor, target: torch.Tensor, weight: float, decoded: torch.Tensor
) -> None:
    """Add the decoded payload times `weight` to `target`. fp64 uses the buffer `decoded`, as codecs add in fp32."""
    if target.dtype == torch.float64:
        codec.decode(payload, decoded)
        target.add_(decoded, alpha=weight)
    else:
        codec.decode_add(payload, target, weight=weight)


class DifferenceWorkspace:
    """State of one bucket for `choco` and `dcd`: replicas, and buffers.

    [Note: the pull] One sum replaces the replicas of all neighbours. In the papers it is the sum of the replicas; here
    it is the sum of their differences from this rank's replica. The pulls of all ranks add up to zero except rounding,
    and that rounding error moves the mean in every round. Differences are small, and so is their rounding error. On a
    ring of 6 ranks with values of about 1 and steps of 0.001 in fp32, 2,000 rounds moved the mean by 6e-4 with the sum
    of the replicas, and by 2e-6 with the sum of the differences.

    Attributes:
        replica: [numel] fp32 (fp64 for fp64), x^_i: the copy of this rank's tensor that its neighbours have.
        pull: [numel] sum_j W_ij (x^_j - x^_i).
        is_known: Whether the neighbours have replicas. If not, the next difference is sent uncompressed.

    Args:
        numel: Number of elements of the tensor: a bucket, or a stretch of one.
        dtype: Type of the tensor.
        device: Device of the tensor.
        codec: Codec of the differences.
        neighbours: Neighbours of this rank; the same in every step.
        begin: First element of the stretch in its bucket.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        codec: BlockCodec,
        neighbours: Neighbours,
        *,
        begin: int = 0,
    ) -> None:
        self.codec = codec
        self.neighbours = neighbours
        self.begin = begin
        self.is_known = False
        self.replica = torch.zeros(numel, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.pull = torch.zeros_like(self.replica)
        self.difference = torch.zeros_like(self.replica)  # tensor - replica, before encoding
        rows = 1 + len(neighbours.sources)
        # Rows begin at multiples of 16 bytes, as codecs require.
        self._payloads = torch.zeros(rows, -(-codec.payload_bytes(numel) // 16) * 16, dtype=torch.uint8, device=device)

    def encoded(self) -> list[torch.Tensor]:
        """Return the payload of `difference` to send, then receive buffers in the order of the sources."""
        if not self.is_known:
            return [self.difference, *(torch.empty_like(self.difference) for _ in self.neighbours.sources)]
        own, *others = self._payloads[:, : self.codec.payload_bytes(self.replica.numel())]
        self.codec.encode(self.difference, own)
        return [own, *others]

    def apply(self, encoded: Sequence[torch.Tensor]) -> None:
        """Update the replica and the pull with the sent and the received payloads."""
        own, *others = encoded
        weights = self.neighbours.sources.values()
        if not self.is_known:
            self.replica.copy_(own)
            for values, weight in zip(others, weights, strict=True):
                self.pull.add_(values.sub_(own), alpha=weight)
            self.is_known = True
            return
        self._add(own, self.replica, 1.0)
        self._add(own, self.pull, self.neighbours.own - 1.0)
        for payload, weight in zip(others, weights, strict=True):
            self._add(payload, self.pull, weight)

    def _add(self, payload: torch.Tensor, target: torch.Tensor, weight: float) -> None:
        _decode_add(self.codec, payload, target, weight, self.difference)

    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        """Return copies of replica and pull by parameter; empty before the first round."""
        if not self.is_known:
            return {"replica": {}, "pull": {}}
        return {
            "replica": cut(self.replica, self.begin, parts),
            "pull": cut(self.pull, self.begin, parts),
        }

    def load(self, saved: dict[str, Pieces], parts: Sequence[Part]) -> None:
        """Load replicas, also of another bucket plan. If they do not cover this stretch, start without replicas."""
        self.is_known = False
        if not saved["replica"]:  # reads no values, so that this works on meta tensors
            self.replica.zero_()
            self.pull.zero_()
            return
        end = self.begin + self.replica.numel()
        for name in ("replica", "pull"):
            getattr(self, name).copy_(pasted(saved[name], parts, self.replica)[self.begin : end])
        ones = {name: with_values(piece, torch.ones_like(piece[1])) for name, piece in saved["replica"].items()}
        self.is_known = bool(pasted(ones, parts, self.replica)[self.begin : end].all())
        if not self.is_known:
            self.replica.zero_()
            self.pull.zero_()


def choco(tensor: torch.Tensor, workspace: DifferenceWorkspace, comm: Communicator, step_size: float) -> Communication:
    """Average `tensor` with the neighbours' tensors by compressed differences: CHOCO-Gossip.

        q_i  = C(x_i - x^_i),   x^_j <- x^_j + q_j for all j,   x_i <- x_i + step_size sum_j W_ij (x^_j - x^_i)

    Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed communication"
    (ICML 2019), CHOCO-Gossip. The first differences, from x^ = 0, are sent uncompressed. A block with NaN or Inf
    permanently becomes NaN in the replica and in the neighbours' tensors. It is therefore visible, as in an
    uncompressed mean.

    Args:
        tensor: [numel] fp32, bf16, fp16 or fp64; changed in place.
        workspace: The bucket's replicas and buffers.
        comm: The group.
        step_size: The consensus step size, gamma of the paper.
    """
    torch.sub(tensor, workspace.replica, out=workspace.difference)
    yield from _exchange_difference(workspace, comm)
    tensor.add_(workspace.pull, alpha=step_size)


def dcd(tensor: torch.Tensor, workspace: DifferenceWorkspace, comm: Communicator) -> Communication:
    """Average `tensor` with the neighbours' tensors and compress the change: one round of DCD-PSGD.

        z_i = sum_j W_ij (x^_j - x^_i) + x_i - x^_i,   x^_j <- x^_j + C(z_j) for all j,   x_i <- x^_i

    x_i - x^_i is the optimizer's update since the last round. After a round the tensor of each rank is exactly its
    replica. Tang et al., "Communication compression for decentralized training" (NeurIPS 2018), algorithm 1; BAGUA's
    D_LP_S. The first round only exchanges the tensors, uncompressed. NaN and Inf: see `choco`.

    Args:
        tensor: [numel] fp32, bf16, fp16 or fp64; changed in place.
        workspace: The bucket's replicas and buffers.
        comm: The group.
    """
    torch.sub(tensor, workspace.replica, out=workspace.difference)
    workspace.difference.add_(workspace.pull)
    yield from _exchange_difference(workspace, comm)
    tensor.copy_(workspace.replica)


def _exchange_difference(workspace: DifferenceWorkspace, comm: Communicator) -> Communication:
    own, *others = encoded = workspace.encoded()
    yield _exchange(own, others, workspace.neighbours, comm)
    workspace.apply(encoded)


def _exchange(
    own: torch.Tensor, received: Sequence[torch.Tensor], neighbours: Neighbours, comm: Communicator
) -> Exchange:
    """Create the request that sends `own` to the neighbours and receives theirs, in the order of the sources."""
    return comm.exchange(
        [(rank, own) for rank in neighbours.targets], list(zip(neighbours.sources, received, strict=True))
    )
