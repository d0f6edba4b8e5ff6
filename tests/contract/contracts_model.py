"""Contracts about the model: frozen and unused parameters, memory, types, buffers, copies, evaluation, unwrapping."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib.errors import ConfigError
from tests.contract.probes import counted, is_victim, raises_alike
from tests.contract.subjects import (
    TIMEOUT_S,
    Branches,
    ConvNet,
    Frozen,
    Mlp,
    Subject,
    build,
    data,
    everyones,
    flat,
    gathered,
    joined,
    loss_of,
    spread,
)


def contract_frozen_layer_stays(subject: Subject) -> None:
    """Parameters frozen at `wrap` or later stay bit for bit unchanged on every rank, and have no gradient."""
    training = subject.start(build(Frozen)).steps(3)
    before = build(Frozen)
    assert torch.equal(training.model.second.weight, before.second.weight)
    training.model.third.requires_grad_(False)
    training.steps(1)  # with the last results that hold the layer
    gathered(None)
    frozen = joined(training.model.third.parameters())
    training.steps(7).assert_sound()
    assert torch.equal(joined(training.model.third.parameters()), frozen), "the frozen layer moved"
    assert torch.equal(training.model.second.weight, before.second.weight), "the layer frozen at wrap moved"
    assert all(p.grad is None for p in training.model.third.parameters()), "the frozen layer has a gradient"


def contract_unfreezing(subject: Subject) -> None:
    """A layer that is unfrozen trains from then on, in step on all ranks; else all are told what to do."""
    training = subject.start(build(Frozen)).steps(4)
    before = joined(training.model.second.parameters())
    training.model.second.requires_grad_(True)
    if not subject.channel.has_rounds:
        with raises_alike(ConfigError, "wrap"):
            training.steps(1)
        return
    training.steps(5).assert_sound()
    assert not torch.equal(joined(training.model.second.parameters()), before), "the unfrozen layer did not train"
    training.assert_trains_on()


def contract_frozen_in_turns(subject: Subject) -> None:
    """Two halves of a model that are trained in turns cost no collectives in forwards once both had theirs."""
    training = subject.start()
    halves = [training.model.first, training.model.second], [training.model.third, training.model.last]
    for turn in range(12):
        for idx, half in enumerate(halves):
            for module in half:
                module.requires_grad_(turn % 2 == idx)
        training.optimizer.zero_grad()
        with counted(training) as sent:
            loss = loss_of(training.model, turn)
        assert turn < 6 or sent() == 0, f"{sent()} collectives in the forward of turn {turn}"
        loss.backward()
        training.optimizer.step()
    training.assert_sound()
    training.model.requires_grad_(True)
    training.assert_trains_on()


def contract_unused_parameters(subject: Subject) -> None:
    """Parameters that no rank uses stay, without gradients; those used on one rank have equal gradients on all."""
    training = subject.start(build(Branches))
    before = joined(training.model.branches[2].parameters())
    one_rank = list(training.model.branches[1].parameters())
    for _ in range(7):
        training.backward()
        assert all(p.grad is None for p in training.model.branches[2].parameters()), "unused parameters have gradients"
        if subject.on_gradients:
            missing = gathered([p.grad is None for p in one_rank])
            assert all(each == missing[0] for each in missing), f"ranks differ in missing gradients: {missing}"
            assert dist.get_world_size() == 1 or not any(missing[0]), "a parameter that one rank uses has no gradient"
        training.optimizer.step()
        training.num_steps += 1
    training.assert_sound()
    after = joined(training.model.branches[2].parameters())
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
    training.assert_trains_on()


class _Mixed(Mlp):
    """Parameters of several dtypes, complex ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(40, 32, dtype=torch.complex64) / 8)
        self.exact = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, inputs: Tensor) -> Tensor:
        real = super().forward(inputs) * self.exact * self.narrow
        return real + (self.wave @ self.first(inputs).t().to(torch.complex64)).abs().mean()


def contract_memory_formats(subject: Subject) -> None:
    """Parameters may lie in memory as they like: channels last, transposed; they train, and keep their strides."""
    for model in (build(ConvNet).to(memory_format=torch.channels_last), build(Mlp)):
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()
        strides = [p.stride() for p in model.parameters()]
        training = subject.start(model).steps(5)
        training.assert_sound()
        training.assert_trains_on()
        assert [p.stride() for p in model.parameters()] == strides, "strides changed"


def contract_memory_format_is_no_matter_of_values(subject: Subject) -> None:
    """Where gradients are exact, a transposed weight takes the same steps as one that is not."""
    model, plain = build(), subject.start()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    training = subject.start(model).steps(5)
    plain.steps(5)
    if subject.is_exact:
        torch.testing.assert_close(training.flat(), plain.flat(), rtol=1e-5, atol=1e-6)
    training.assert_sound()


def _trains_in(subject: Subject, model: nn.Module) -> None:
    dtypes = [p.dtype for p in model.parameters()]
    training = subject.start(model)
    for group in training.optimizer.param_groups:
        if "eps" in group:
            group["eps"] = 1e-3  # which a narrow type has
    training.steps(6).assert_sound()
    training.assert_trains_on()
    assert [p.dtype for p in model.parameters()] == dtypes, "dtypes changed"


def contract_dtype_float64(subject: Subject) -> None:
    """A model of float64 trains."""
    _trains_in(subject, build().double())


def contract_dtype_bfloat16(subject: Subject) -> None:
    """A model of bfloat16 trains."""
    _trains_in(subject, build().bfloat16())


def contract_dtype_float16(subject: Subject) -> None:
    """A model of float16 trains."""
    _trains_in(subject, build().half())


def contract_dtypes_mixed(subject: Subject) -> None:
    """A model of several dtypes, with complex and real parameters, trains."""
    _trains_in(subject, build(_Mixed))


def contract_default_dtype(subject: Subject) -> None:
    """torch's default dtype is the user's: it changes nothing of a model that has dtypes of its own."""
    plain, model = subject.start().steps(6), build()
    torch.set_default_dtype(torch.float64)
    try:
        training = subject.start(model).steps(6)
    finally:
        torch.set_default_dtype(torch.float32)
    training.assert_sound()
    if not subject.runs_by_clocks:
        assert torch.equal(training.flat(), plain.flat()), "the default dtype changed the run"


def contract_random_state(subject: Subject) -> None:
    """The states of the global generators, torch's, NumPy's and Python's, stay as they are."""
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # type: ignore[index]
    training = subject.start(bucket_cap_mb=None).steps(6)
    commlib.synchronize(training.model)
    commlib.state_dict(training.model)
    commlib.unwrap(training.model)
    assert torch.equal(torch.get_rng_state(), before[0]), "torch's generator was used"
    assert (np.random.get_state()[1] == before[1]).all(), "NumPy's generator was used"  # type: ignore[index]
    assert random.getstate() == before[2], "Python's generator was used"


def _buffers(model: nn.Module) -> Tensor:
    return joined(list(model.buffers()))


def contract_buffers(subject: Subject) -> None:
    """Where gradients are shared, buffers are rank 0's after each step; else the rank's own until `synchronize`."""
    training = subject.start(build(ConvNet))
    for step in range(5):
        is_shared = subject.on_gradients or step < subject.channel.warmup_steps
        with counted(training) as sent:
            training.backward()
        assert is_shared or sent() == 0, "buffers were sent where no gradient is"
        rows = everyones(_buffers(training.model))
        assert not is_shared or (rows == rows[0]).all(), f"buffers differ after the backward of step {step + 1}"
        training.optimizer.step()
        training.num_steps += 1
    commlib.synchronize(training.model)
    rows = everyones(_buffers(training.model))
    assert (rows == rows[0]).all(), "buffers differ after commlib.synchronize"


def contract_own_buffers(subject: Subject) -> None:
    """With `broadcast_buffers=False` the buffers are the rank's own, at `wrap`, in steps and in `synchronize`."""
    model, bare = build(ConvNet), build(ConvNet)
    for each in (model, bare):
        each.norm.running_mean.fill_(float(dist.get_rank()))
    training = subject.start(model, broadcast_buffers=False)
    assert torch.equal(_buffers(model), _buffers(bare)), "wrap changed the buffers"
    for step in range(5):
        bare.load_state_dict(dict(model.named_parameters()), strict=False)
        bare(*bare.inputs(step, dist.get_rank()))
        training.step()
        if not subject.runs_by_clocks:  # weights may change within a forward
            torch.testing.assert_close(_buffers(model), _buffers(bare), rtol=1e-6, atol=1e-6)
    before = _buffers(model)
    commlib.synchronize(model)
    assert torch.equal(_buffers(model), before), "commlib.synchronize changed the buffers"
    rows = everyones(before)
    assert dist.get_world_size() == 1 or not torch.equal(rows[0], rows[1]), "the ranks have the same buffers"


def contract_local_evaluation(subject: Subject) -> None:
    """One rank alone may evaluate, copy, pickle and trace the model: nothing is sent, nobody waits."""
    training = subject.start(build(ConvNet)).steps(4)
    if is_victim():
        own = training.engine.transport
        before = own.bytes_sent
        _evaluate(training.model, is_still=not subject.runs_by_clocks)
        assert own.bytes_sent == before, "an evaluation sent something"
    gathered(None)  # the others wait here for the end of the evaluation: one that waited for them would never end
    training.model.train()
    training.steps(3).assert_sound()
    training.assert_trains_on()


def _evaluate(model: Any, is_still: bool) -> None:
    """Evaluate in all ways; the results are equal if the weights do not change meanwhile."""
    (inputs,) = model.inputs(77, 0)
    outputs = []
    with torch.no_grad():
        outputs.append(model.eval()(inputs))
        outputs.append(torch.func.functional_call(model, dict(model.named_parameters()), (inputs,)))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.module):
            outputs.append(other(inputs))
        outputs.append(torch.fx.symbolic_trace(model.module)(inputs))
        torch.export.export(copy.deepcopy(model.module), (inputs,))
    with torch.inference_mode():
        outputs.append(model(inputs))
    assert not is_still or all(torch.equal(output, outputs[0]) for output in outputs), "evaluations differ"


def contract_inference_mode(subject: Subject) -> None:
    """Within `torch.inference_mode()` the model is made the same on all ranks, saved and loaded, and trains on then."""
    training = subject.start().steps(3)
    weights = {name: value.clone() for name, value in training.model.state_dict().items()}
    for act in (commlib.synchronize, _save_and_load, lambda model: model.load_state_dict(weights)):
        with torch.inference_mode():
            act(training.model)
        gathered(None)
        assert act is not commlib.synchronize or spread(training.model) == 0
        training.steps(2).assert_sound()
        gathered(None)
    training.assert_trains_on()


def _save_and_load(model: Any) -> None:
    commlib.load_state_dict(model, copy.deepcopy(commlib.state_dict(model)))


def contract_copies(subject: Subject) -> None:
    """A deepcopy trains on all ranks, as DDP's does, or asks for its optimizer; the original stays as it is."""
    training = subject.start().steps(4)
    commlib.synchronize(training.model)
    copied, before = copy.deepcopy(training.model), training.flat()
    assert torch.equal(flat(copied), before)
    optimizer = subject.optimizer(list(copied.parameters()))
    if subject.channel.needs_optimizer:
        with raises_alike(ConfigError, "optimizer="):
            loss_of(copied, 0)
    else:
        _train_copy(copied, optimizer)
        assert spread(copied) == 0, "the copy's replicas differ"
    commlib.unwrap(copied)
    assert type(copied) is Mlp
    after_copy = training.flat() if not subject.runs_by_clocks else before
    assert torch.equal(after_copy, before), "training a copy changed the original"
    _train_copy(copied, optimizer)
    training.assert_trains_on()


def _train_copy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    before = flat(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert torch.isfinite(flat(model)).all()
    assert not torch.equal(flat(model), before), "the copy did not train"


def contract_unwrap_restores(subject: Subject) -> None:
    """`unwrap` leaves an ordinary model that trains on locally, and can be wrapped with another algorithm."""
    training = subject.start().steps(4)
    model, optimizer = training.model, training.optimizer
    attributes = set(vars(build()))
    assert commlib.unwrap(model) is model
    assert type(model) is type(build())
    assert set(vars(model)) == attributes, "attributes were left behind"
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks), "hooks were left at parameters"
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks
    expected = build()
    expected.load_state_dict(model.state_dict())
    optimizer.zero_grad()
    loss_of(model, 9).backward()
    loss_of(expected, 9).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    again = commlib.wrap(model, "allreduce", timeout=TIMEOUT_S)
    own = torch.optim.SGD(again.parameters(), lr=0.01)
    for step in range(3):
        own.zero_grad()
        loss_of(again, step).backward()
        own.step()
    assert spread(again) == 0, "replicas differ after another wrap"


def contract_inputs_stay(subject: Subject) -> None:
    """Inputs of the user, and gradients that the user took out of `.grad`, are not written by later rounds."""
    training = subject.start()
    for step in range(5):
        training.backward()
        taken = {name: p.grad.clone() for name, p in training.model.named_parameters()}
        inputs = data(step, 0, 5, 8)
        before = inputs.clone()
        with torch.no_grad():
            training.model(inputs)
        assert torch.equal(inputs, before)
        now = {name: p.grad for name, p in training.model.named_parameters()}
        assert all(torch.equal(now[name], taken[name]) for name in taken), "a forward changed gradients"
        training.optimizer.step()
        training.num_steps += 1
    training.assert_sound()
