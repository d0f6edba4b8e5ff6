"""Changes by libraries and methods to a model's class, copies and forward have the same effect as without commlib."""

from __future__ import annotations

import abc
import contextlib
import copy
import inspect
import pickle
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.errors import ConfigError, TransportError
from tests.multi.common import (
    Mlp,
    assert_replicas_identical,
    assert_same_tensors,
    data,
    gradients,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    tensors,
    train,
    wrap,
)
from tests.multi.pool import on_ranks

HEARD: list[str] = []


class Registered(nn.Module):
    """Has a registry of subclasses, which need a key."""

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        HEARD.append(key)


class Agent(Registered, key="agent"):
    """Makes others of its class, and copies itself by doing so."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.first, self.third = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        return self.third(torch.tanh(self.first(inputs))) * scale

    def twin(self) -> Agent:
        other = type(self)(self.width)
        other.load_state_dict(self.state_dict())
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Agent:
        other = self.twin()
        other.note = "copied by the user's own method"
        return other

    def __reduce__(self) -> Any:
        return unpickled, (self.width, self.state_dict())


def unpickled(width: int, state: dict[str, Tensor]) -> Agent:
    agent = Agent(width)
    agent.load_state_dict(state)
    return agent


class Hearing(abc.ABCMeta):
    def __init__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> None:
        HEARD.append(name)
        super().__init__(name, bases, members)


class Abstract(nn.Module, metaclass=Hearing):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    @abc.abstractmethod
    def forward(self, inputs: Tensor) -> Tensor: ...


class Concrete(Abstract):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def assert_trains_alike(model: nn.Module) -> None:
    train(model, mlp_loss, 3)
    assert_replicas_identical(model)


@on_ranks(2)
def test_no_registry_of_classes_hears_of_the_wrapping() -> None:
    for build in (Agent, Concrete):
        before = list(HEARD)
        model = wrap(seeded(build))
        assert before == HEARD
        assert isinstance(model, build)
        assert not isinstance(build(), type(model))
        assert_trains_alike(model)


@on_ranks(2)
def test_what_a_method_makes_of_its_own_class_is_an_ordinary_model() -> None:
    model = wrap(seeded(Agent))
    train(model, mlp_loss, 2)
    twin = model.twin()
    with raises_on_every_rank(ConfigError, "not wrapped"):
        commlib.stats(twin)
    assert not hasattr(twin, "module")
    if dist.get_rank() == 0:
        train(twin, mlp_loss, 2)
        assert isinstance(copy.deepcopy(twin), Agent)
        assert type(pickle.loads(pickle.dumps(twin))) is Agent
    assert_trains_alike(model)
    assert_trains_alike(wrap(model.twin()))


@on_ranks(2)
def test_a_copy_is_made_by_the_users_own_methods_and_joins() -> None:
    model = wrap(seeded(Agent))
    train(model, mlp_loss, 2)
    copied = copy.deepcopy(model)
    assert copied.note == "copied by the user's own method"
    for each in (copied, pickle.loads(pickle.dumps(model))):
        assert_same_tensors(tensors(each), tensors(model), "value", exact=True)
        assert_trains_alike(each)
    assert_trains_alike(model)


@on_ranks(2)
def test_a_copy_that_cannot_join_stays_one() -> None:
    """It raises again, rather than to train on its rank alone."""
    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 2)
    c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)  # how long a set-up waits
    if dist.get_rank() == 0:
        copied = copy.deepcopy(model)
        for _ in range(2):
            with pytest.raises(TransportError, match="rank 1"):
                mlp_loss(copied, 0)
    c10d._set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
    dist.barrier()
    assert_trains_alike(model)


@on_ranks(2)
def test_a_shallow_copy_is_no_second_wrapping() -> None:
    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 2)
    shallow = copy.copy(model)
    with torch.no_grad():
        assert torch.equal(shallow(data(0, 5, 8)), model(data(0, 5, 8)))
    rounds = commlib.stats(model).rounds
    assert_trains_alike(model)
    assert commlib.stats(model).rounds == rounds + 3
    with raises_on_every_rank(ConfigError, "first.weight", "another wrapped model"):
        shallow(data(0, 5, 8))


@on_ranks(2)
def test_a_graph_module_is_copied_recompiled_and_trained() -> None:
    model = torch.fx.symbolic_trace(seeded(Mlp))
    wrap(model)
    train(model, mlp_loss, 2)
    copied, inputs = copy.deepcopy(model), data(0, 5, 8)
    assert torch.equal(copied.module(inputs), model.module(inputs))
    for _ in range(2):
        model.recompile()
        assert_trains_alike(model)
    assert_trains_alike(copied)
    commlib.unwrap(model)
    assert torch.equal(model(inputs), model.forward(inputs))


@on_ranks(2)
def test_forward_keeps_its_signature() -> None:
    model = wrap(seeded(Agent))
    for forward in (model.forward, type(model).forward):
        assert [name for name in inspect.signature(forward).parameters if name != "self"] == ["inputs", "scale"]


@on_ranks(2)
def test_functional_call_with_other_tensors_trains_as_in_ddp() -> None:
    def inner_and_outer(model: Any) -> list[dict[str, Any]]:
        optimizer, found = sgd(model), []
        for step in range(4):
            optimizer.zero_grad()
            names, parameters = zip(*model.named_parameters(), strict=True)
            inner = torch.autograd.grad(mlp_loss(model.module, step), parameters, create_graph=True)
            fast = {n: p - 0.1 * g for n, p, g in zip(names, parameters, inner, strict=True)}
            torch.func.functional_call(model, fast, (data(step, 5, 8),)).square().mean().backward()
            found.append(gradients(model))
            optimizer.step()
        return found

    expected = inner_and_outer(DistributedDataParallel(seeded(Mlp)))
    for got, wanted in zip(inner_and_outer(wrap(seeded(Mlp))), expected, strict=True):
        assert_same_tensors(got, wanted, "gradient", exact=True)


@on_ranks(2)
def test_transforms_and_traces_on_one_rank_are_local() -> None:
    """At every stage of planning: none of them installs a plan, waits, or leaves a trace."""
    model = wrap(seeded(Mlp))
    for step in range(8):
        if dist.get_rank() == 0:
            inputs = data(step, 5, 8)
            weights = {name: value.detach() for name, value in model.named_parameters()}
            expected = torch.autograd.grad(mlp_loss(model.module, step), list(model.parameters()))

            def loss(values: dict[str, Tensor], inputs: Tensor) -> Tensor:
                return torch.func.functional_call(model, values, (inputs,)).square().mean()

            got = torch.func.grad(loss)(weights, inputs)
            for one, other in zip(got.values(), expected, strict=True):
                torch.testing.assert_close(one, other)
            torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, inputs[:, None])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of tracing, which TensorBoard does still
                traced = torch.jit.trace(model, inputs)
            assert torch.equal(traced(inputs), model.module(inputs))
            assert torch.equal(torch.fx.symbolic_trace(model)(inputs), model.module(inputs))
        train(model, mlp_loss, 1)
        assert_replicas_identical(model)


@on_ranks(2)
def test_the_bare_module_is_what_is_exported() -> None:
    model = wrap(seeded(Mlp))
    for _ in range(4):
        if dist.get_rank() == 0:
            inputs = data(0, 5, 8)
            exported = torch.export.export(model.module, (inputs,))
            assert torch.equal(exported.module()(inputs), model.module(inputs))
            with contextlib.suppress(RuntimeError):  # torch refuses what keeps torch.compile out
                torch.export.export(model, (inputs,))
        train(model, mlp_loss, 1)
        assert_replicas_identical(model)
