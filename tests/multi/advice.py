"""The advice of error messages, followed: for each message a function that triggers the error, then follows the advice.

`tests/unit/test_advice.py` checks that every message of the library that gives advice has one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import commlib
from commlib import algorithms
from commlib.optim import FrozenVarianceAdam
from tests.multi.common import Averaging, Mlp, OneParameter, assert_replicas_identical, data, mlp_loss, seeded

#: By a part of the message, the function that follows it on two ranks.
FOLLOWED: dict[str, Callable[[], None]] = {}


def follows(words: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the function that follows the advice of the message with these words."""

    def mark(function: Callable[[], None]) -> Callable[[], None]:
        assert words not in FOLLOWED
        FOLLOWED[words] = function
        return function

    return mark


@contextlib.contextmanager
def refused(words: str) -> Iterator[None]:
    """Expect an error with these words, on every rank that is in the block."""
    with pytest.raises(commlib.CommlibError) as caught:
        yield
    assert words in str(caught.value)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def frozen_variance(model: nn.Module) -> FrozenVarianceAdam:
    return FrozenVarianceAdam(model.parameters(), lr=0.01)


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def made(**given: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a wrapped MLP and its optimizer."""
    model: Any = seeded(Mlp)
    optimizer = given.pop("make", sgd)(model)
    return commlib.wrap(model, given.pop("algorithm", "allreduce"), optimizer=optimizer, **given), optimizer


def trains(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2, loss: Any = mlp_loss) -> None:
    """Train; the weights change, and replicas are identical after `synchronize`."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(steps):
        model.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    model.zero_grad()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "nothing was learned"
    commlib.synchronize(model)
    assert_replicas_identical(model)


# --- the call of wrap ------------------------------------------------------------------------------------------------


@follows("Make the parameter contiguous")
def contiguous() -> None:
    model = OneParameter(torch.randn(4, 6)[:, ::2])
    model.weight.data = torch.ones(4, 6)[:, ::2]
    with refused("does not occupy contiguous memory"):
        commlib.wrap(model, "async_sgd", optimizer=sgd(model))
    model.weight.data = model.weight.data.contiguous()
    optimizer = sgd(model)
    trains(commlib.wrap(model, "async_sgd", optimizer=optimizer), optimizer, 8, lambda m, s: m(torch.ones(4, 3)))


@follows("use SGD(momentum=0)")
def no_momentum() -> None:
    model = seeded(Mlp)
    with refused("the optimizer applies momentum"):
        commlib.wrap(model, "dgc", optimizer=sgd(model, 0.9))
    trains(*made(algorithm="dgc"))


@follows("leave the option out with other optimizers")
def no_rescaling() -> None:
    model = seeded(Mlp)
    with refused("rescale_residuals"):
        commlib.wrap(model, algorithms.TopK(rescale_residuals=True), optimizer=adam(model))
    trains(*made(algorithm=algorithms.TopK(), make=adam))


@follows("expected optimizer=commlib.optim.FrozenVarianceAdam(...)")
def own_adam() -> None:
    model = seeded(Mlp)
    with refused("cannot freeze its variance"):
        commlib.wrap(model, "onebit_adam", optimizer=adam(model))
    trains(*made(algorithm="onebit_adam", make=frozen_variance))


@follows("Train in bf16, or with local_after=None")
def no_scaler() -> None:
    model, scaler = seeded(Mlp), torch.amp.GradScaler("cpu")
    local = {"warmup_steps": 2, "local_after": 3}
    with refused("expected no enabled GradScaler"):
        given = {"optimizer": frozen_variance(model), "scaler": scaler}
        commlib.wrap(model, algorithms.ZeroOneAdam(**local), **given)
    trains(*made(algorithm=algorithms.ZeroOneAdam(warmup_steps=2), make=frozen_variance, scaler=scaler))
    model = seeded(Mlp).bfloat16()
    optimizer = frozen_variance(model)
    commlib.wrap(model, algorithms.ZeroOneAdam(**local), optimizer=optimizer)
    trains(model, optimizer, 2, lambda m, s: m(data(s, 5, 8).bfloat16()).square().mean())


@follows("are both given. Leave one of them out")
def one_group() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    with refused("are both given"):
        made(process_group=dist.group.WORLD, device_mesh=mesh)
    trains(*made(process_group=dist.group.WORLD))
    trains(*made(device_mesh=mesh))


@follows("wrap the Python module, then torch.compile it")
def no_script() -> None:
    script = torch.jit.script(seeded(Mlp))
    with refused("a ScriptModule cannot be wrapped"):
        commlib.wrap(script, optimizer=sgd(script))
    model, optimizer = made()
    trains(torch.compile(model, backend="eager"), optimizer)


class Joins(Mlp):
    """Has a method of the name that a wrapped model's class needs."""

    def join(self) -> str:
        return "the model's own"


@follows("Rename them, or wrap a module around the model")
def other_name() -> None:
    inner = seeded(Joins)
    with refused("of its own. A wrapped model's class defines"):
        commlib.wrap(inner, optimizer=sgd(inner))
    model = nn.Sequential(inner)
    optimizer = sgd(model)
    trains(commlib.wrap(model, optimizer=optimizer), optimizer)
    assert inner.join() == "the model's own"


@follows("wrap one module that holds both")
def shared_encoder() -> None:
    encoder = seeded(Mlp)
    one, other = nn.Sequential(encoder, nn.Linear(4, 3)), nn.Sequential(encoder, nn.Linear(4, 2))
    for head in (one[1], other[1]):
        nn.init.constant_(head.weight, 0.1)
    commlib.wrap(one, optimizer=sgd(one))
    with refused("another wrapped model already communicates these parameters"):
        commlib.wrap(other, optimizer=sgd(other))
    commlib.unwrap(one)
    both = nn.ModuleList([one, other])
    optimizers = [sgd(one), sgd(other[1])]
    commlib.wrap(both, optimizer=optimizers)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = data(step, 5, 8)
        losses = [model(inputs).square().mean() for model in (one, other)]
        commlib.expect_backward(both)
        sum(losses).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_replicas_identical(both)


class TwoPoints(torch.optim.SGD):
    """An optimizer that evaluates at another point, as schedule-free ones do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@follows("average only one of them over the ranks. Use an algorithm on gradients")
def on_gradients() -> None:
    model = seeded(Mlp)
    optimizer = TwoPoints(model.parameters(), lr=0.05)
    with refused("trains at another point"):
        commlib.wrap(model, "local_sgd", optimizer=optimizer)
    trains(commlib.wrap(model, "allreduce", optimizer=optimizer), optimizer)


@follows("Pass all optimizers, as a list, or freeze the parameters")
def all_optimizers() -> None:
    model: Any = seeded(Mlp)
    first = sgd(model.first)
    rest = torch.optim.SGD([*model.second.parameters(), *model.third.parameters()], lr=0.05)
    with refused("would not see their steps"):
        commlib.wrap(model, "local_sgd", optimizer=first)
    commlib.wrap(model, algorithms.LocalSGD(period=2), optimizer=[first, rest])
    for step in range(4):
        mlp_loss(model, step).backward()
        for optimizer in (first, rest):
            optimizer.step()
        model.zero_grad()
    assert_replicas_identical(model)
    commlib.unwrap(model)
    for layer in (model.second, model.third):
        layer.requires_grad_(False)
    trains(commlib.wrap(model, "local_sgd", optimizer=first), first)


@follows("torch.use_deterministic_algorithms is on. Choose another algorithm")
def repeatable() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with refused("runs are not reproducible"):
            made(algorithm="async_sgd")
        trains(*made(algorithm="diloco"), 60)
    finally:
        torch.use_deterministic_algorithms(False)


@follows("is wrapped already. Call commlib.unwrap first, or wrap only the outer module")
def outer_module() -> None:
    inner, optimizer = made()
    with refused("is wrapped already"):
        commlib.wrap(inner, optimizer=optimizer)
    with refused("its submodule '0' is wrapped already"):
        commlib.wrap(nn.Sequential(inner), optimizer=optimizer)
    outer = nn.Sequential(commlib.unwrap(inner))
    trains(commlib.wrap(outer, optimizer=optimizer), optimizer)


@follows("Wrap the bare module (its .module) instead")
def bare_module() -> None:
    replicated = nn.parallel.DistributedDataParallel(seeded(Mlp))
    with refused("is a DistributedDataParallel"):
        commlib.wrap(replicated, optimizer=sgd(replicated))
    model = replicated.module
    del replicated
    optimizer = sgd(model)
    trains(commlib.wrap(model, optimizer=optimizer), optimizer)


@follows("acts on weights or optimizer state. Create the optimizer first")
def with_optimizer() -> None:
    model = seeded(Mlp)
    with refused("acts on weights"):
        commlib.wrap(model, "local_sgd")
    trains(*made(algorithm="local_sgd"))


@follows("is a name with options. Pass them to the class")
def options_of_the_class() -> None:
    with refused("algorithm=commlib.algorithms.LocalSGD(period=2)"):
        made(algorithm="local_sgd(period=2)")
    trains(*made(algorithm=algorithms.LocalSGD(period=2)))


@follows("If new_group() gave it, this process is not a member")
def members_only() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with refused("this process is not a member"):
            made(process_group=group)
        return
    model, optimizer = made(process_group=group)
    mlp_loss(model, 0).backward()
    optimizer.step()


@follows("commlib.wrap takes one dimension. Slice it")
def sliced() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with refused("mesh['replicate']"):
        made(process_group=mesh)
    trains(*made(process_group=mesh["replicate"]))


@follows("Nodes are told apart by")
def equal_nodes() -> None:
    """On two ranks nodes cannot be unequal: see `test_nodes_of_different_sizes_are_refused` for the error."""
    os.environ["COMMLIB_NODE"] = str(dist.get_rank())
    try:
        trains(*made(algorithm=algorithms.TopK(hierarchical=True)))
    finally:
        del os.environ["COMMLIB_NODE"]


@follows("uninitialised lazy parameters")
def after_a_forward() -> None:
    torch.default_generator.manual_seed(3)
    model = nn.LazyLinear(4)
    with refused("Run a forward pass before wrapping"):
        commlib.wrap(model)
    model(data(0, 5, 8, rank=0))
    optimizer = sgd(model)
    trains(commlib.wrap(model, optimizer=optimizer), optimizer)


@follows("Materialise the model (to_empty) before wrapping")
def materialised() -> None:
    model: Any = seeded(Mlp)
    model.third.to("meta")
    with refused("parameters on the meta device"):
        commlib.wrap(model)
    model.third.to_empty(device="cpu")
    model.third.reset_parameters()
    optimizer = sgd(model)
    trains(commlib.wrap(model, optimizer=optimizer), optimizer)


@follows("torch.distributed.optim._apply_optimizer_in_backward")
def step_after_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = seeded(Mlp)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    with refused("Make the optimizer's step after backward"):
        commlib.wrap(model)
    trains(*made())


class Wrapper(torch.Tensor):
    """A tensor that has another one in its place."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = torch.utils._pytree.tree_map_only(Wrapper, lambda each: each.inner, (args, kwargs or {}))
        out = func(*unwrapped[0], **unwrapped[1])
        return Wrapper(out) if func is torch.ops.aten.detach.default else out


@follows("parameters or buffers that are wrappers of tensors")
def no_wrappers() -> None:
    def build() -> Any:
        model: Any = seeded(Mlp)
        model.register_parameter("foreign", nn.Parameter(Wrapper(torch.ones(3))))
        return model

    model = build()
    with refused("freeze them, or name them in ignored_parameters"):
        commlib.wrap(model)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name != "foreign"], lr=0.05)
    commlib.wrap(model, optimizer=optimizer, ignored_parameters=["foreign"])
    for step in range(2):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()


# --- training --------------------------------------------------------------------------------------------------------


@follows("Call scaler.unscale_(optimizer) first, or create the optimizer with fused=False")
def unscaled() -> None:
    def step(is_fused: bool, is_unscaled: bool) -> None:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=is_fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        commlib.wrap(model, algorithms.AsyncSGD(push="gradients"), optimizer=optimizer, scaler=scaler)
        scaler.scale(mlp_loss(model, 0)).backward()
        if is_unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        model.zero_grad()
        commlib.synchronize(model)
        assert_replicas_identical(model)

    with refused("a fused optimizer unscales them inside the step"):
        step(is_fused=True, is_unscaled=False)
    step(is_fused=True, is_unscaled=True)
    step(is_fused=False, is_unscaled=False)


@follows("Load the same state into the scaler on all ranks")
def scaled_alike() -> None:
    def train(scaler: Any, of_local: Any) -> None:
        model, local = seeded(Mlp), torch.nn.Linear(1, 1)
        optimizer, of_rank = sgd(model), sgd(local)
        commlib.wrap(model, "allreduce", optimizer=optimizer, scaler=scaler)
        for step in range(3):
            scaler.scale(mlp_loss(model, step)).backward()
            overflows = dist.get_rank() == 0 and step == 1
            of_local.scale(local(torch.full((1, 1), float("inf") if overflows else 1.0)).sum()).backward()
            for each, owner in ((optimizer, scaler), (of_rank, of_local)):
                owner.step(each)
                each.zero_grad()
            for each in {scaler, of_local}:
                each.update()
        assert_replicas_identical(model)

    both = torch.amp.GradScaler("cpu", init_scale=64.0)
    with refused("the loss scale differs between ranks"):
        train(both, both)
    both.load_state_dict(torch.amp.GradScaler("cpu", init_scale=64.0).state_dict())
    train(both, torch.amp.GradScaler("cpu", init_scale=64.0))


@follows("Load the old optimizer's state into it")
def state_of_the_old() -> None:
    model, optimizer = made(algorithm=algorithms.OneBitAdam(warmup_steps=2), make=frozen_variance)
    trains(model, optimizer, 3)
    new = frozen_variance(model)
    with refused("the variance of the new optimizer is not frozen"):
        commlib.set_optimizer(model, new)
    new.load_state_dict(optimizer.state_dict())
    commlib.set_optimizer(model, new)
    trains(model, new)


@follows("Unwrap the model, change the optimizer, and wrap it again on all ranks")
def other_groups() -> None:
    model, optimizer = made(algorithm=algorithms.OneBitAdam(warmup_steps=1), make=frozen_variance)
    trains(model, optimizer)
    whole = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = whole[:-1]
    with refused("is no longer in a group of the optimizer"):
        trains(model, optimizer)
    commlib.unwrap(model)
    list(model.parameters())[-1].requires_grad_(False)
    trains(commlib.wrap(model, algorithms.OneBitAdam(warmup_steps=1), optimizer=optimizer), optimizer)


@follows("It would step with this rank's gradient, before anything is communicated. Make the step after backward")
def gradient_that_was_taken() -> None:
    model, optimizer = made()
    parameter = next(model.parameters())
    hook = parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with refused("was set, but is now None"):
        mlp_loss(model, 0).backward()
    hook.remove()
    commlib.unwrap(model)
    trains(commlib.wrap(model, optimizer=optimizer), optimizer)


@follows("makes a step inside of backward")
def step_in_backward() -> None:
    model, optimizer = made()
    last = list(model.parameters())[-1]
    inner = torch.optim.SGD([last], lr=0.05)
    hook = last.register_post_accumulate_grad_hook(lambda p: inner.step())
    with refused("Make the step after backward"):
        mlp_loss(model, 0).backward()
    hook.remove()
    commlib.unwrap(model)
    trains(commlib.wrap(model, optimizer=optimizer), optimizer)


@follows("parameters were resized or cast after wrapping")
def cast_and_wrapped_again() -> None:
    model, optimizer = made()
    trains(model, optimizer)
    model.third.weight.data, model.third.bias.data = torch.ones(2, 16), torch.ones(2)
    with refused("Call commlib.unwrap(model) first, and wrap the changed model again on all ranks"):
        mlp_loss(model, 0).backward()
    commlib.unwrap(model)
    trains(commlib.wrap(model, optimizer=optimizer), optimizer)


@follows("Turn it off, or compile the model instead of the function that calls backward")
def no_compiled_autograd() -> None:
    """`test_compiled_steps` meets the error; here it is off, and the model is compiled."""
    model, optimizer = made()
    with torch._dynamo.config.patch(compiled_autograd=False):
        trains(torch.compile(model, backend="eager"), optimizer)


@follows("Call commlib.expect_backward(model) before such a backward")
def expected() -> None:
    model, optimizer = made(unannounced="error")
    with refused("would stay local"):
        mlp_loss(model.module, 0).backward()
    commlib.unwrap(model)
    commlib.wrap(model, optimizer=optimizer, unannounced="error")

    def announced(wrapped: Any, step: int) -> Tensor:
        commlib.expect_backward(wrapped)
        return mlp_loss(wrapped.module, step)

    trains(model, optimizer, 2, announced)
    with model.no_sync():
        mlp_loss(model.module, 0).backward()


class Rerun(Mlp):
    """Runs a layer in a checkpoint, as often as it is told."""

    times = 1
    use_reentrant = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(self.times):
            hidden = checkpoint(self.second, hidden, use_reentrant=self.use_reentrant)
        return self.third(hidden)


@follows("Run the model the same way in every step, or use checkpoint(..., use_reentrant=False)")
def without_reentrance() -> None:
    model: Any = seeded(Rerun)
    optimizer = sgd(model)
    commlib.wrap(model, optimizer=optimizer, bucket_cap_mb=0.0001)
    trains(model, optimizer, 1)
    model.times = 2
    with refused("accumulated again after it had been gathered"):
        trains(model, optimizer, 1)
    commlib.unwrap(model)
    model.use_reentrant = False
    commlib.wrap(model, optimizer=optimizer)
    for times in (1, 2, 1):
        model.times = times
        trains(model, optimizer, 1)


@follows("and run all backwards of a step except the last one inside model.no_sync()")
def zeroed() -> None:
    model, optimizer = made(algorithm="dgc")
    mlp_loss(model, 0).backward()
    with refused("Call zero_grad() after each step"):
        mlp_loss(model, 1).backward()
    commlib.unwrap(model)
    commlib.wrap(model, "dgc", optimizer=optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            mlp_loss(model, step).backward()
        mlp_loss(model, step + 10).backward()
        optimizer.step()
    assert_replicas_identical(model)


@follows("Unwrap the model and wrap it again on all ranks")
def unfrozen() -> None:
    model: Any = seeded(Mlp)
    model.first.requires_grad_(False)
    optimizer = sgd(model)
    commlib.wrap(model, "async_sgd", optimizer=optimizer)
    model.first.requires_grad_(True)
    with refused("parameters were unfrozen, moved or cast"):
        mlp_loss(model, 0).backward()
    commlib.unwrap(model)
    trains(commlib.wrap(model, "async_sgd", optimizer=optimizer), optimizer, 8)


@follows("Call backward(), then optimizer.step()")
def no_closure() -> None:
    model, optimizer = made(algorithm=algorithms.AsyncSGD(push="gradients"))

    def closure() -> float:
        optimizer.zero_grad()
        loss = mlp_loss(model, 0)
        loss.backward()
        return float(loss)

    with refused("computes gradients inside the step"):
        optimizer.step(closure)
    trains(model, optimizer, 8)


@follows("but commlib.wrap was given")
def told_of_the_other() -> None:
    model, optimizer = made(algorithm=algorithms.LocalSGD(period=2))
    trains(model, optimizer)
    other = adam(model)
    with refused("commlib.set_optimizer"):
        trains(model, other)
    other.zero_grad()
    commlib.unwrap(model)
    commlib.wrap(model, algorithms.LocalSGD(period=2), optimizer=optimizer)
    commlib.set_optimizer(model, other)
    trains(model, other, 4)


class AveragingInOne(torch.optim.SGD):
    """Makes the step of `Averaging` in one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.lerp_(self.state[parameter].setdefault("mean", parameter.clone()), 0.1)


@follows("Use an optimizer that makes its whole step in a torch.optim.Optimizer, or an algorithm on gradients")
def one_whole_step() -> None:
    model, optimizer = made(algorithm=algorithms.LocalSGD(period=2))
    outer: Any = Averaging(optimizer)
    with refused("changes the weights after it"):
        trains(model, outer, 20)
    commlib.unwrap(model)
    whole = AveragingInOne(model.parameters(), lr=0.05)
    trains(commlib.wrap(model, algorithms.LocalSGD(period=2), optimizer=whole), whole, 20)
    commlib.unwrap(model)
    commlib.wrap(model, "allreduce", optimizer=optimizer)
    trains(model, Averaging(optimizer), 20)  # whose means begin at weights that all ranks have


@follows("commlib.wrap was given no optimizer")
def optimizer_to_synchronize() -> None:
    model = seeded(Mlp)
    commlib.wrap(model)
    with refused("commlib.wrap was given no optimizer"):
        commlib.synchronize(model, optimizer=True)
    commlib.unwrap(model)
    optimizer = adam(model)
    commlib.wrap(model, optimizer=optimizer)
    trains(model, optimizer)
    commlib.synchronize(model, optimizer=True)


@follows("Make as many steps on all ranks first")
def as_many_steps() -> None:
    model, optimizer = made(algorithm=algorithms.LocalSGD(period=4), make=adam)
    if dist.get_rank() == 0:
        with model.no_sync():
            mlp_loss(model.module, 0).backward()
        adam(model)
        optimizer.state[next(model.parameters())] = {"another": torch.zeros(3)}
    with refused("which has no mean"):
        commlib.synchronize(model, optimizer=True)
    optimizer.state.clear()
    commlib.unwrap(model)
    commlib.wrap(model, algorithms.LocalSGD(period=4), optimizer=optimizer)
    trains(model, optimizer, 2)
    commlib.synchronize(model, optimizer=True)


@follows("commlib.synchronize(model, optimizer=True) on all ranks before commlib.unwrap(model)")
def synchronized_state() -> None:
    for follow in (False, True):
        model, optimizer = made(algorithm=algorithms.LocalSGD(period=4), make=adam)
        trains(model, optimizer, 2)
        if follow:
            commlib.synchronize(model, optimizer=True)
        commlib.unwrap(model)
        if follow:
            trains(commlib.wrap(model, "allreduce", optimizer=optimizer), optimizer)
            continue
        with refused("the ranks' optimizers have different state"):
            commlib.wrap(model, "allreduce", optimizer=optimizer)
        fresh = [copy.deepcopy(optimizer.state_dict())]
        dist.broadcast_object_list(fresh)
        optimizer.load_state_dict(fresh[0])
        trains(commlib.wrap(model, "allreduce", optimizer=optimizer), optimizer)


@follows("Load the file of this rank, written by a run of the same algorithm and world size")
def own_file() -> None:
    model, optimizer = made(algorithm="topk")
    trains(model, optimizer)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, commlib.state_dict(model))
    with refused("the saved communication state has rank"):
        commlib.load_state_dict(model, states[1 - dist.get_rank()])
    commlib.load_state_dict(model, states[dist.get_rank()])
    trains(model, optimizer)


@follows("Load the state that was saved after the same step on every rank")
def same_step() -> None:
    model, optimizer = made(algorithm="topk")
    saved = []
    for _ in range(2):
        trains(model, optimizer, 1)
        saved.append(copy.deepcopy(commlib.state_dict(model)))
    commlib.load_state_dict(model, saved[dist.get_rank()])
    with refused("the loaded states differ"):
        mlp_loss(model, 0).backward()
    commlib.load_state_dict(model, saved[0])
    optimizer.zero_grad()
    trains(model, optimizer)


@follows("the names begin with 'module.'")
def without_prefix() -> None:
    replicated = nn.parallel.DistributedDataParallel(seeded(Mlp, 3))
    state_dict = replicated.state_dict()
    model, optimizer = made()
    with refused("as DistributedDataParallel saves them"):
        model.load_state_dict(state_dict)
    model.load_state_dict({name.removeprefix("module."): value for name, value in state_dict.items()})
    assert torch.equal(model.first.weight, replicated.module.first.weight)
    trains(model, optimizer)


@follows("Give all ranks as many optimizer steps, or use an algorithm on gradients")
def joined() -> None:
    model, optimizer = made(algorithm=algorithms.LocalSGD(period=2))
    with refused("run out of data cannot take part"), model.join():
        pass
    trains(model, optimizer, 4)
    model, optimizer = made()
    with model.join():
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            mlp_loss(model, step).backward()
            optimizer.step()
    model.zero_grad()
    assert_replicas_identical(model)


@follows("call commlib.wrap(model, ...) to wrap it now")
def copied() -> None:
    model, _ = made()
    twin = copy.deepcopy(model)
    with refused("is a copy of a wrapped model"):
        commlib.state_dict(twin)
    optimizer = sgd(twin)
    trains(commlib.wrap(twin, optimizer=optimizer), optimizer)


@follows("is not wrapped; call commlib.wrap(model, ...) first")
def not_wrapped() -> None:
    with refused("is not wrapped"):
        commlib.stats(seeded(Mlp))
    model, optimizer = made()
    trains(model, optimizer)
    assert commlib.stats(model).wire_bytes > 0


@follows("or commlib.unwrap(copy) to train it on this rank alone")
def copied_with_optimizer() -> None:
    for alone in (True, False):
        model, _ = made(algorithm="local_sgd")
        twin = copy.deepcopy(model)
        optimizer = sgd(twin)
        with refused("which needs the optimizer of the copy"):
            mlp_loss(twin, 0)
        if alone:
            commlib.unwrap(twin)
            mlp_loss(twin, 0).backward()
            optimizer.step()
        else:
            trains(commlib.wrap(twin, "local_sgd", optimizer=optimizer), optimizer)


@follows("Call commlib.unwrap(model), change the model (fully_shard does, too), and wrap it again on all ranks")
def changed_model() -> None:
    model, _ = made()
    model.third = nn.Linear(16, 4)
    with refused("the model's parameters changed after wrapping"):
        mlp_loss(model, 0)
    commlib.unwrap(model)
    optimizer = sgd(model)
    trains(commlib.wrap(model, optimizer=optimizer), optimizer)


@follows("Resume with the same ranks and mesh, or load only 'model' and 'optimizer' of the checkpoint")
def another_size() -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = made(algorithm="topk")
    trains(model, optimizer)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    groups = [dist.new_group([rank]) for rank in range(2)]
    own = groups[dist.get_rank()]
    dcp.save({"training": commlib.Checkpoint(model, optimizer)}, checkpoint_id=folder[0])
    other: Any = seeded(Mlp, 5)
    its = sgd(other)
    commlib.wrap(other, "topk", optimizer=its, process_group=own)
    with refused("differs between ranks"):
        dcp.load({"training": commlib.Checkpoint(other, its)}, checkpoint_id=folder[0], process_group=own)
    commlib.unwrap(other)
    dcp.load({"training": {"model": other.state_dict()}}, checkpoint_id=folder[0], process_group=own)
    assert torch.equal(other.first.weight, model.first.weight)
    commlib.wrap(other, "topk", optimizer=its, process_group=own)
    mlp_loss(other, 0).backward()


@follows("Pass the optimizers that were saved")
def optimizers_of_the_rank() -> None:
    model, optimizer = made(algorithm=algorithms.LocalSGD(period=3))
    trains(model, optimizer, 2)
    state = commlib.checkpoint.rank_state(model, optimizer)
    with refused("optimizers of its own"):
        commlib.checkpoint.load_rank_state(model, state, [optimizer, adam(model)])
    commlib.checkpoint.load_rank_state(model, state, optimizer)
    trains(model, optimizer, 3)


@follows("Call commlib.set_optimizer(model, optimizers) with those that step")
def those_that_step() -> None:
    """Of a warning, not an error."""
    model: Any = seeded(Mlp)
    first, rest = sgd(model.first), torch.optim.SGD([*model.second.parameters(), *model.third.parameters()], lr=0.05)
    commlib.wrap(model, "allreduce", optimizer=[first, rest])
    commlib.set_optimizer(model, rest)
    trains(model, rest)


def run(words: str) -> None:
    """Follow one advice. On every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FOLLOWED[words]()
