"""Whatever the forward returns, and whatever happens to it before the loss, gradients are synchronised."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commlib
from commlib.errors import ConfigError
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Mlp,
    assert_same_tensors,
    check_like_ddp,
    data,
    ddp,
    gradients,
    mean_gradients,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    wrap,
)
from tests.multi.pool import on_ranks


@dataclass
class Plain:
    loss: Tensor
    note: str = "text"


@dataclass(frozen=True)
class Frozen:
    loss: Tensor
    more: tuple[Tensor, ...] = ()


class ModelOutput(OrderedDict):
    """A dict whose items are attributes too, in the manner of Hugging Face's outputs."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@dataclass
class DataclassModelOutput(OrderedDict):
    """Both a dataclass and a dict; the fields fill the dict afterwards."""

    loss: Tensor

    def __post_init__(self) -> None:
        for item in fields(self):
            OrderedDict.__setitem__(self, item.name, getattr(self, item.name))


Pair = namedtuple("Pair", ["loss", "note"])


class Opaque:
    """An object of the user's own, of which no library can know that it holds tensors."""

    __slots__ = ("_hidden",)

    def __init__(self, loss: Tensor) -> None:
        self._hidden = loss

    def value(self) -> Tensor:
        return self._hidden


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda loss: loss, lambda output: output),
    "tuple": (lambda loss: (loss, loss.detach()), lambda output: output[0]),
    "list": (lambda loss: [None, [loss]], lambda output: output[1][0]),
    "dict": (lambda loss: {"loss": loss, "n": 3}, lambda output: output["loss"]),
    "nested": (lambda loss: {"a": [({"b": loss},)]}, lambda output: output["a"][0][0]["b"]),
    "namedtuple": (lambda loss: Pair(loss, "text"), lambda output: output.loss),
    "dataclass": (Plain, lambda output: output.loss),
    "frozen-dataclass": (lambda loss: Frozen(loss.detach(), (loss,)), lambda output: output.more[0]),
    "model-output": (lambda loss: ModelOutput(loss=loss), lambda output: output.loss),
    "dataclass-model-output": (DataclassModelOutput, lambda output: output["loss"]),
    "opaque": (Opaque, lambda output: output.value()),
    "function": (lambda loss: lambda: loss, lambda output: output()),
    "generator": (lambda loss: iter([loss]), next),
}


class Packing(Mlp):
    """Computes its loss inside the forward and returns it packed as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, inputs: Tensor) -> Any:
        return OUTPUTS[self.kind][0](super().forward(inputs).square().mean())


@on_ranks(2)
@pytest.mark.parametrize("kind", list(OUTPUTS))
def test_the_loss_is_found_in_any_output(kind: str) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        return OUTPUTS[kind][1](model(data(step, 5, 8)))

    model = check_like_ddp(lambda: Packing(kind), loss, wrap_options={"bucket_cap_mb": SMALL_BUCKET_MB})
    assert type(model(data(0, 5, 8))) is type(OUTPUTS[kind][0](torch.ones(())))


class Storing(Mlp):
    """Returns nothing and leaves the loss on itself."""

    def forward(self, inputs: Tensor) -> None:  # type: ignore[override]
        self.loss = super().forward(inputs).square().mean()


@on_ranks(2)
def test_a_loss_that_the_model_keeps_to_itself() -> None:
    def loss(model: Any, step: int) -> Tensor:
        model(data(step, 5, 8))
        return getattr(model, "module", model).loss

    check_like_ddp(Storing, loss)


class Returning(nn.Module):
    """Returns a parameter as it is: a leaf, which lives on into the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias


@on_ranks(2)
def test_parameters_returned_as_outputs() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        weight, bias = model()
        return (data(step, 5, 4) @ weight + bias).square().mean()

    model = check_like_ddp(Returning, loss, steps=6)
    assert [len(p._backward_hooks) for p in model.parameters()] == [1, 1], "one hook each, whatever the steps"
    commlib.unwrap(model)
    assert [len(p._backward_hooks) for p in model.parameters()] == [0, 0]


@on_ranks(2)
def test_parameters_returned_as_outputs_of_forwards_that_are_not_synchronised() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        weight, bias = model()
        return (data(step, 5, 4) @ weight + bias).square().mean()

    original = seeded(Returning)
    results = []
    for model in (ddp(copy.deepcopy(original)), wrap(original)):
        loss(model, 0).backward()
        with model.no_sync():
            loss(model, 1).backward()
        own = gradients(model)
        loss(model, 2).backward()
        results.append((own, gradients(model)))
    for got, expected in zip(results[1], results[0], strict=True):
        assert_same_tensors(got, expected, "gradient", exact=True)


@on_ranks(2)
def test_an_output_that_is_an_input() -> None:
    class PassingOn(Mlp):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return inputs, super().forward(inputs)

    def loss(model: nn.Module, step: int) -> Tensor:
        same, output = model(data(step, 5, 8).requires_grad_())
        return output.square().mean() + same.square().sum()

    check_like_ddp(PassingOn, loss)


@on_ranks(2)
@pytest.mark.parametrize("view", [False, True], ids=["own", "view"])
def test_an_output_changed_in_place(view: bool) -> None:
    class Viewing(Mlp):
        def forward(self, inputs: Tensor) -> Tensor:
            output = super().forward(inputs)
            return output[:, :2] if view else output

    def loss(model: nn.Module, step: int) -> Tensor:
        output = model(data(step, 5, 8))
        output += 1
        output.mul_(2)
        return output.square().mean()

    check_like_ddp(Viewing, loss)


@on_ranks(2)
def test_the_output_keeps_its_identity_and_gradient() -> None:
    """Code that asks for an output's own gradient gets it."""

    def loss(model: nn.Module, step: int) -> Tensor:
        output = model(data(step, 5, 8))
        output.retain_grad()
        total = output.square().mean()
        (slope,) = torch.autograd.grad(total, output, retain_graph=True)
        assert slope.shape == output.shape
        return total

    model = check_like_ddp(Mlp, loss)
    output = model(data(0, 5, 8))
    output.retain_grad()
    output.sum().backward()
    assert output.grad is not None
    assert seeded(Mlp).first.weight.shape == model.first.weight.shape


@on_ranks(2)
def test_keyword_arguments_and_other_inputs_pass_through() -> None:
    class Keyword(Mlp):
        def forward(self, scale: float, *, inputs: dict[str, Tensor], flag: bool = False) -> Tensor:  # type: ignore[override]
            assert flag
            return super().forward(inputs["x"]) * scale

    check_like_ddp(Keyword, lambda model, step: model(2.0, inputs={"x": data(step, 5, 8)}, flag=True).square().mean())


@on_ranks(2)
def test_an_expected_backward_of_a_forward_in_no_sync_is_synchronised() -> None:
    model, accumulated = wrap(seeded(Mlp)), []
    for expected in (True, False):
        model.zero_grad()
        with model.no_sync():
            loss = mlp_loss(model, 1)
        if expected:
            commlib.expect_backward(model)
        loss.backward()
        accumulated.append(gradients(model))
    local = seeded(Mlp)
    mlp_loss(local, 1).backward()
    assert_same_tensors(accumulated[1], gradients(local), "local gradient", exact=True)
    mean = mean_gradients(lambda: seeded(Mlp), lambda one, rank: one(data(1, 5, 8, rank=rank)).square().mean())
    assert_same_tensors(accumulated[0], mean, "synchronised gradient", exact=True)


class Manual(Mlp):
    """Runs its backward in its forward, as a trainer's training step may."""

    def forward(self, step: int) -> None:  # type: ignore[override]
        commlib.expect_backward(self)
        super().forward(data(step, 5, 8)).square().mean().backward()


@on_ranks(2)
def test_an_expected_backward_inside_of_forward_is_synchronised() -> None:
    model = wrap(seeded(Manual), unannounced="error")
    for step in range(3):
        model.zero_grad()
        model(step)
        mean = mean_gradients(
            lambda: seeded(Mlp), lambda one, rank, step=step: one(data(step, 5, 8, rank=rank)).square().mean()
        )
        assert_same_tensors(gradients(model), mean, f"gradient of step {step}", exact=True)


@on_ranks(2)
def test_an_unannounced_backward_is_an_error_if_asked() -> None:
    model = wrap(seeded(Mlp), unannounced="error")
    with raises_on_every_rank(ConfigError, "expect_backward", "no_sync", "stay local"):
        mlp_loss(model.module, 0).backward()
    model.zero_grad()
    with model.no_sync():
        mlp_loss(model.module, 0).backward()
    mlp_loss(model, 1).backward()
    model.eval()
    with torch.no_grad():
        model.module(data(0, 5, 8))


@on_ranks(2)
def test_what_expect_backward_refuses() -> None:
    with raises_on_every_rank(ConfigError, "unannounced", "'warn' or 'error'"):
        wrap(seeded(Mlp), unannounced="never")
    model = wrap(seeded(Mlp))
    with torch.no_grad(), raises_on_every_rank(ConfigError, "gradients are not enabled"):
        commlib.expect_backward(model)
    with raises_on_every_rank(ConfigError, "not wrapped"):
        commlib.expect_backward(seeded(Mlp))


@on_ranks(2)
def test_a_copy_of_a_wrapped_model_joins_at_an_expected_backward() -> None:
    model = copy.deepcopy(wrap(seeded(Mlp)))
    commlib.expect_backward(model)
    mlp_loss(model.module, 1).backward()
    mean = mean_gradients(lambda: seeded(Mlp), lambda one, rank: one(data(1, 5, 8, rank=rank)).square().mean())
    assert_same_tensors(gradients(model), mean, "gradient", exact=True)
