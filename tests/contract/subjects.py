"""The subjects of the contracts: an algorithm with settings small enough for a test, and models to train.

Nothing here depends on an algorithm's name. Settings are derived from the constructor's signature, the optimizer from
`Algorithm.optimizer_type`, and the expectations from `Algorithm.channel` and `Algorithm.limits`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib.algorithms import Algorithm, Channel, Gradients
from commlib.engine.weights.channel import WeightChannel
from commlib.replica import replica_of
from commlib.sharding.local import local_of
from tests.thin import fast

#: KiB-sized buckets, so that even these models have several.
SMALL_BUCKET_MB = 0.002
#: Timeout passed to `wrap`: only reached if a rank hangs.
TIMEOUT_S = 40.0

#: One algorithm of each kind of channel. What holds for all algorithms is tested with these in the fast part.
REPRESENTATIVES = {"Gradients": "topk", "Weights": "diloco", "SelfRunning": "async_sgd"}

_SEED = 7


class Mlp(nn.Module):
    """Matrices on both sides of the 1,024 elements from which the default policies compress, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 48)
        self.third = nn.Linear(48, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs.to(self.first.weight.dtype)))
        return self.last(torch.tanh(self.third(torch.tanh(self.second(hidden)))))

    @staticmethod
    def inputs(step: int, rank: int) -> tuple[Any, ...]:
        """Return the inputs of the forward of a step on a rank."""
        return (data(step, rank, 5, 8),)


class ConvNet(nn.Module):
    """A convolution and batch norm: buffers of two dtypes, and a weight of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 16, 3)
        self.head = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(images)))
        return self.head(torch.tanh(self.wide(hidden)).mean(dim=(2, 3)))

    @staticmethod
    def inputs(step: int, rank: int) -> tuple[Any, ...]:
        """Return the inputs of the forward of a step on a rank."""
        return (data(step, rank, 4, 3, 7, 7),)


class Branches(nn.Module):
    """Branches of which a forward uses those that it is told; the default data never use the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.branches = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, inputs: Tensor, used: tuple[int, ...]) -> Tensor:
        hidden = torch.tanh(self.stem(inputs))
        return sum((self.branches[idx](hidden) for idx in used), hidden)

    @staticmethod
    def inputs(step: int, rank: int) -> tuple[Any, ...]:
        """Use the first branch everywhere and the second on odd ranks, from the second step on in turns."""
        return data(step, rank, 5, 8), (0, 1) if (step + rank) % 2 else (0,)


class Frozen(Mlp):
    """An `Mlp` whose second layer is frozen when it is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.second.requires_grad_(False)


def data(step: int, rank: int, *shape: int) -> Tensor:
    """Return values `[*shape] float32` that depend on the step and the rank alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(_device)


def loss_of(model: Any, step: int, rank: int | None = None) -> Tensor:
    """Return the loss of a forward on the data of a step and a rank (this one by default)."""
    rank = dist.get_rank() if rank is None else rank
    output = model(*model.inputs(step, rank))
    target = data(step + 500, rank, *output.shape).to(output.dtype)
    return (output - target).abs().square().mean()


def of_each_kind(names: Iterable[str]) -> list[Any]:
    """Return algorithms as the parameters of a test that is slow but for one of each kind of channel."""
    return fast(names, *REPRESENTATIVES.values())


def build(kind: Callable[[], nn.Module] = Mlp, seed: int = _SEED) -> Any:
    """Build a model that is the same on all ranks; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = kind().to(_device)
    return model if _shard is None else _shard(model)


def flat(model: nn.Module) -> Tensor:
    """Return a copy of all parameters, one after the other, `[numel] float64` (complex ones as pairs)."""
    return joined([parameter.detach() for parameter in model.parameters()])


def joined(tensors: Any) -> Tensor:
    """Return a copy of all tensors, one after the other, `[numel] float64` (complex ones as pairs), on the CPU."""
    whole = [torch.view_as_real(t) if t.is_complex() else t for t in map(local_of, tensors)]
    return torch.cat([t.detach().reshape(-1).double() for t in whole]).cpu() if whole else torch.zeros(0)


_group: Any = None
_device = torch.device("cpu")


_shard: Callable[[Any], Any] | None = None


def set_sharding(shard: Callable[[Any], Any] | None) -> None:
    """Let models that are built be sharded by this function."""
    global _shard
    _shard = shard


def set_device(device: torch.device) -> None:
    """Let models and data be made on this device."""
    global _device
    _device = device


def set_group(group: Any) -> None:
    """Let models be wrapped, and contracts talk, on this group: one that a contract leaves broken ends with it."""
    global _group
    _group = group


def gathered(value: Any) -> list[Any]:
    """Return every rank's picklable value. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(_group)
    dist.all_gather_object(everyone, value, group=_group)
    return everyone


def everyones(values: Tensor) -> Tensor:
    """Return `values` [numel] of all ranks, `[ranks, numel]`."""
    values = local_of(values)
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size(_group))]
    dist.all_gather(rows, values.contiguous(), group=_group)
    return torch.stack(rows)


def spread(model: nn.Module) -> float:
    """Return the largest difference between two ranks in an element of a parameter. Collective."""
    rows = everyones(flat(model))
    return float((rows.amax(dim=0) - rows.amin(dim=0)).max())


class Subject:
    """One algorithm under test.

    Args:
        name: A registered name, or "module:Class" of any algorithm.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._started: list[Training] = []  # kept, so that a finished rank does not end one that its peers use
        self.cls: type[Algorithm] = _class_of(name)
        self.channel: Any = self.algorithm().channel
        self.limits: dict[str, str] = {**_limits_of(self.channel), **self.cls.limits}

    def algorithm(self) -> Algorithm:
        """Make the algorithm with small settings."""
        return self.cls(**settings_of(self.cls))

    @property
    def on_gradients(self) -> bool:
        """Whether gradients are communicated, so that replicas stay identical."""
        return isinstance(self.channel, Gradients)

    @property
    def period(self) -> int:
        """Steps from one round to the next, or one exchange to the next."""
        return getattr(self.channel, "period", 1)

    @property
    def runs_by_clocks(self) -> bool:
        """Whether the result of a step depends on the arrival times of messages, or on measurements."""
        return "two_runs_are_alike" in self.limits

    @property
    def measures_first(self) -> bool:
        """Whether the first steps measure the network, which takes seconds."""
        return self.on_gradients and self.runs_by_clocks

    @property
    def exactness(self) -> str:
        """Its effect on the optimisation, now and later: an algorithm that chooses others declares its limit."""
        algorithm = self.algorithm()
        return getattr(algorithm, "allow", algorithm.exactness)

    @property
    def is_exact(self) -> bool:
        """Whether gradients are the full-precision mean from first to last."""
        return self.algorithm().exactness == "exact" and not self.runs_by_clocks

    def optimizer(self, parameters: Any, lr: float | None = None) -> torch.optim.Optimizer:
        """Make the optimizer that the algorithm needs, or SGD with momentum."""
        if self.cls.optimizer_type is not None:
            return self.cls.optimizer_type(parameters, lr=0.01 if lr is None else lr)  # type: ignore[call-arg]
        momentum = 0.0 if self.cls.has_momentum else 0.9
        return torch.optim.SGD(parameters, lr=0.05 if lr is None else lr, momentum=momentum)

    def start(self, model: Any = None, *, lr: float | None = None, **options: Any) -> Training:
        """Wrap a model (an `Mlp` by default) with its optimizer."""
        model = build() if model is None else model
        training = Training(self, model, self.optimizer(list(model.parameters()), lr), **options)
        self._started.append(training)
        return training

    def release(self) -> None:
        """Let go of all that was started."""
        self._started.clear()

    def forget_last(self) -> list[Training]:
        """Return the training that was started last, in a list that alone holds it."""
        return [self._started.pop()]


class Training:
    """A wrapped model that is trained.

    Args:
        subject: The algorithm.
        model: The model to wrap.
        optimizer: The optimizer that makes the steps.
        options: For `commlib.wrap`. Also `given`, the value passed as `optimizer`.
    """

    def __init__(self, subject: Subject, model: Any, optimizer: Any, **options: Any) -> None:
        self.subject, self.optimizer = subject, optimizer
        self.num_steps = 0
        given = options.pop("given", optimizer)
        options = {"bucket_cap_mb": SMALL_BUCKET_MB, "timeout": TIMEOUT_S, "process_group": _group, **options}
        self.model: Any = commlib.wrap(model, subject.algorithm(), optimizer=given, **options)

    @property
    def engine(self) -> Any:
        """The engine of the wrapped model."""
        return replica_of(self.model).engine

    def rebuild_weights(self) -> None:
        """Rebuild the buckets of rounds over weights, as the engine does if parameters change. Collective."""
        engine = self.engine
        for channel in engine.channels:
            if isinstance(channel, WeightChannel):
                with engine.session.wholly():
                    channel.adopt(engine.parameters)

    def backward(self) -> None:
        """Make one forward and backward from gradients of None."""
        self.optimizer.zero_grad()
        loss_of(self.model, self.num_steps).backward()

    def step(self) -> None:
        """Make one training step."""
        self.backward()
        self.optimizer.step()
        self.num_steps += 1

    def steps(self, count: int) -> Training:
        """Make several training steps."""
        for _ in range(count):
            self.step()
        return self

    def flat(self) -> Tensor:
        """Return a copy of the parameters; see `flat`."""
        return flat(self.model)

    def assert_sound(self) -> None:
        """Check that weights are finite, and identical on all ranks if required. Collective."""
        assert torch.isfinite(self.flat()).all(), "weights are not finite"
        if self.subject.on_gradients:
            assert spread(self.model) == 0, "replicas differ"

    def assert_trains_on(self, steps: int = 2) -> None:
        """Check that training continues, and that the ranks can be synchronized. Collective."""
        before = self.flat()
        self.steps(steps).assert_sound()
        assert not torch.equal(before, self.flat()), "nothing was learned"
        commlib.synchronize(self.model)
        assert spread(self.model) == 0, "replicas differ after commlib.synchronize"


def _limits_of(channel: Channel) -> dict[str, str]:
    """Return the contracts that the channel says cannot be kept; the use is refused."""
    if not channel.keeps_step:
        return {"two_runs_are_alike": "the result of a step depends on the arrival times of messages"}
    return {}


def settings_of(cls: type[Algorithm]) -> dict[str, Any]:
    """Return settings small enough for a few steps, for the options that the class has."""
    options = inspect.signature(cls).parameters
    found: dict[str, Any] = {}
    if "period" in options:
        found["period"] = 2
    if "fragments" in options:
        found |= {"period": 4, "fragments": 2, "delay": 1}
    if "global_every" in options:
        found["global_every"] = 2
    if "rest" in options:
        found["rest"] = 0.0
    if "ratio" in options:
        found["ratio"] = 0.25
    if "warmup_steps" in options and options["warmup_steps"].default:
        found["warmup_steps"] = 3
    return found


def _class_of(name: str) -> type[Algorithm]:
    module, _, qualname = name.partition(":")
    return getattr(importlib.import_module(module), qualname) if qualname else commlib.algorithms.get(name)
