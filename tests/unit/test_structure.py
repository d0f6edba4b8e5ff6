"""The structure of a wrapped model gives the current buffers before each forward."""

from __future__ import annotations

import torch
from torch import nn

from commlib.verify import Structure


def model_of(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), *modules)


def are(found: list[torch.Tensor], *expected: torch.Tensor | None) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


def test_buffers_are_those_of_now() -> None:
    norm = nn.BatchNorm1d(2)
    model = model_of(norm)
    structure = Structure(model)
    assert are(structure.buffers(model, set()), norm.running_mean, norm.running_var, norm.num_batches_tracked)
    norm.running_mean = torch.ones(2)  # replaced
    assert are(structure.buffers(model, set()), norm.running_mean, norm.running_var, norm.num_batches_tracked)
    model[0].register_buffer("extra", torch.zeros(1))  # added, to a module that had none
    assert structure.buffers(model, set())[0] is model[0].extra
    del model[0].extra
    norm.num_batches_tracked = None  # removed
    assert are(structure.buffers(model, set()), norm.running_mean, norm.running_var)


def test_ignored_and_tied_buffers() -> None:
    shared = torch.zeros(3)
    one, other = nn.Identity(), nn.Identity()
    one.register_buffer("first", shared)
    other.register_buffer("second", shared)
    other.register_buffer("own", torch.ones(1))
    model = model_of(one, other)
    structure = Structure(model)
    assert are(structure.buffers(model, set()), shared, other.own)
    assert are(Structure(model).buffers(model, {"2.own"}), shared)


def test_buffers_of_a_module_that_took_anothers_place() -> None:
    model = model_of(nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False))
    structure = Structure(model)
    before = structure.buffers(model, set())
    model[2] = nn.BatchNorm1d(2, affine=False)
    now = structure.buffers(model, set())
    assert are(now[:3], *before[:3])
    assert are(now[3:], model[2].running_mean, model[2].running_var, model[2].num_batches_tracked)


def test_a_model_without_buffers() -> None:
    model = model_of()
    assert Structure(model).buffers(model, set()) == []
