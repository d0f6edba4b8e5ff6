"""Models, data and comparisons shared by the multi-rank tests. Everything here runs on the ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LossOf = Callable[[nn.Module, int], Tensor]
SMALL_BUCKET_MB = 0.0001


class Mlp(nn.Module):
    """Three linear layers: dense gradients, enough parameters for several small buckets."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class Cnn(nn.Module):
    """Convolutions and batch norm: buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)  # a bias before batch norm has a gradient of pure rounding
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3)))


class Branches(nn.Module):
    """Uses of its branches only those that a call names."""

    def __init__(self, num_branches: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 4) for _ in range(num_branches)])

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        hidden = torch.tanh(self.stem(inputs.to(self.stem.weight.dtype)))
        return sum((self.branches[i](hidden) for i in used), hidden.sum(dim=1, keepdim=True))


class OneParameter(nn.Module):
    """Multiplies its inputs with one parameter, given as it is to be stored (strides, dtype, complex)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.weight * inputs.to(self.weight.dtype)).abs().pow(2).sum() * self.scale.sum()


class Averaging:
    """An optimizer wrapper that is not a torch optimizer: it averages the weights after each step of the inner one."""

    def __init__(self, base: torch.optim.Optimizer, *, changes: bool = True) -> None:
        self.base = base
        self.changes = changes
        self._means: dict[Tensor, Tensor] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    def zero_grad(self) -> None:
        self.base.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.base.step()
        for group in self.param_groups if self.changes else ():
            for parameter in group["params"]:
                parameter.lerp_(self._means.setdefault(parameter, parameter.clone()), 0.1)


def seeded(build: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    """Build a model that is the same on all ranks."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes three stacks for a GPU that is not there
    return build()


def snapshot(model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a bare model with the values and the frozen parameters of `model`."""
    bare = build()
    bare.load_state_dict(model.state_dict())
    for own, other in zip(bare.parameters(), model.parameters(), strict=True):
        own.requires_grad_(other.requires_grad)
    return bare


def data(step: int, *shape: int, rank: int | None = None) -> Tensor:
    """Return inputs `[*shape] float32` that depend on the step and on the rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator)


def mlp_loss(model: nn.Module, step: int) -> Tensor:
    return model(data(step, 5, 8)).square().mean()


def cnn_loss(model: nn.Module, step: int) -> Tensor:
    return model(data(step, 4, 2, 6, 6)).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copy the gradients of `model` by name (the DDP prefix is dropped)."""
    named = model.named_parameters()
    return {plain(name): None if p.grad is None else p.grad.detach().clone() for name, p in named}


def plain(name: str) -> str:
    """Return a parameter's name without the prefixes that DDP and torch.compile put before it."""
    return name.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copy parameters and buffers of `model` by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {plain(name): tensor.detach().clone() for name, tensor in named}


def assert_close(got: Tensor, expected: Tensor, what: str, *, exact: bool) -> None:
    """Compare two tensors: bit for bit, or within 1e-6 of the largest expected magnitude."""
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.layout == expected.layout, f"{what}: layout {got.layout}, expected {expected.layout}"
    got, expected = got.detach().to_dense(), expected.detach().to_dense()
    finite = expected[torch.isfinite(expected)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = 0.0 if exact else 1e-6
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def assert_same_tensors(got: dict[str, Any], expected: dict[str, Any], what: str, *, exact: bool) -> None:
    """Compare two dicts of tensors (or None) by name."""
    assert got.keys() == expected.keys(), f"{what}: names {sorted(got)}, expected {sorted(expected)}"
    for name, tensor in expected.items():
        assert (got[name] is None) == (tensor is None), f"{what} of {name}: got {got[name]}, expected {tensor}"
        if tensor is not None:
            assert_close(got[name], tensor, f"{what} of {name}", exact=exact)


def digest(tensor: Tensor) -> str:
    """Hash a tensor's bytes, shape and dtype."""
    dense = tensor.detach().to_dense().contiguous()
    raw = bytes(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""
    return hashlib.sha256(repr((dense.shape, dense.dtype)).encode() + raw).hexdigest()


def assert_replicas_identical(
    model: nn.Module, group: Any = None, *, buffers: bool = True, ignored: tuple[str, ...] = ()
) -> None:
    """Check that parameters, gradients and buffers have the same bits on all ranks of `group`."""
    own = {name: digest(p) for name, p in model.named_parameters()}
    own |= {f"{name}.grad": "none" if p.grad is None else digest(p.grad) for name, p in model.named_parameters()}
    own |= {name: digest(buffer) for name, buffer in model.named_buffers()} if buffers else {}
    own = {name: value for name, value in own.items() if name.removesuffix(".grad") not in ignored}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    different = [name for name in own if any(other.get(name) != own[name] for other in everyone)]
    assert not different, f"replicas differ in {different}"


@dataclass
class Trace:
    """The record of a training run on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    loss_of: LossOf,
    steps: int = 4,
    optimizer: torch.optim.Optimizer | None = None,
    set_to_none: bool = True,
) -> Trace:
    """Train and record loss and gradients of every step."""
    optimizer = optimizer or sgd(model)
    trace = Trace()
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, step)
        loss.backward()
        trace.losses.append(loss.detach().clone())
        trace.gradients.append(gradients(model))
        optimizer.step()
    trace.final = tensors(model)
    return trace


def assert_same_trace(got: Trace, expected: Trace, *, exact: bool, without: Collection[str] = ()) -> None:
    """Compare two training runs step by step, then their final parameters and buffers but for those in `without`."""
    for step, (loss, other) in enumerate(zip(got.losses, expected.losses, strict=True)):
        assert_close(loss, other, f"loss of step {step}", exact=exact)
        assert_same_tensors(got.gradients[step], expected.gradients[step], f"step {step}: gradient", exact=exact)
    finals = ({name: t for name, t in trace.final.items() if name not in without} for trace in (got, expected))
    assert_same_tensors(*finals, "final value", exact=exact)


def is_exact() -> bool:
    """Say whether sums over the ranks are the same bits in every order: with one or two ranks."""
    return dist.get_world_size() <= 2


def wrap(model: nn.Module, **options: Any) -> Any:
    """Call `commlib.wrap`; imported late, so that the pool can be tested without the package."""
    import commlib

    return commlib.wrap(model, **options)


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


def take_buffers_of_rank_0(oracle: DistributedDataParallel, trace: Trace) -> None:
    """Do to a trace what DDP would do at its next forward; commlib has done so at the end of the last backward."""
    if oracle.broadcast_buffers:
        for name, _ in oracle.module.named_buffers():
            dist.broadcast(trace.final[name], dist.get_global_rank(oracle.process_group, 0), oracle.process_group)


def check_like_ddp(
    build: Callable[[], nn.Module],
    loss_of: LossOf,
    *,
    steps: int = 4,
    ddp_options: dict[str, Any] | None = None,
    wrap_options: dict[str, Any] | None = None,
    trainer: Callable[..., Trace] = train,
    exact: bool | None = None,
) -> Any:
    """Train the same model in DDP and through `wrap` on the same data; both must give the same results.

    Bit-equal (`exact`; by default with at most two ranks) or within 1e-6; the same parameters have no gradient;
    replicas are bit-identical on all ranks. Returns the wrapped model.
    """
    original = seeded(build)
    oracle = ddp(copy.deepcopy(original), **(ddp_options or {}))
    expected = trainer(oracle, loss_of, steps)
    take_buffers_of_rank_0(oracle, expected)
    model = wrap(original, **(wrap_options or {}))
    got = trainer(model, loss_of, steps)
    assert_same_trace(got, expected, exact=is_exact() if exact is None else exact)
    assert_replicas_identical(model, buffers=False)  # after a step each rank has the buffers of its own batch
    return model


def mean_gradients(build: Callable[[], nn.Module], loss_of_rank: Callable[[nn.Module, int], Tensor]) -> dict[str, Any]:
    """Average the gradients of all ranks in this one process: an oracle that communicates nothing.

    Args:
        build: makes the model with the values at which to differentiate.
        loss_of_rank: the loss of `(model, rank)`.

    Returns:
        The mean by parameter name; None where no rank has a gradient.
    """
    world_size = dist.get_world_size()
    total: dict[str, Any] = {}
    for rank in range(world_size):
        model = build()
        loss_of_rank(model, rank).backward()
        for name, gradient in gradients(model).items():
            parts = [part for part in (total.get(name), gradient) if part is not None]
            total[name] = functools.reduce(torch.add, parts) if parts else None
    return {name: None if gradient is None else gradient / world_size for name, gradient in total.items()}


@contextlib.contextmanager
def raises_on_every_rank(kind: type[BaseException], *words: str, group: Any = None) -> Iterator[None]:
    """Check that the block raises `kind` on every rank, each with all `words` (case ignored) in its message."""
    dist.barrier(group=group)  # earlier work has ended on all ranks: an error below may abort it where it has not
    caught: BaseException | None = None
    try:
        yield
    except BaseException as error:
        caught = error
    texts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, None if caught is None else f"{type(caught).__name__}: {caught}", group=group)
    assert all(texts), f"no error on ranks {[rank for rank, text in enumerate(texts) if not text]}; others: {texts}"
    if not isinstance(caught, kind):
        raise AssertionError(f"expected {kind.__name__}, got {texts[dist.get_rank()]}") from caught
    for word in words:
        assert word.lower() in str(caught).lower(), f"{word!r} is not in the message: {caught}"
