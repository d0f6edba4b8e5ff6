"""What `wrap` and `auto` say of an algorithm that is known to learn less with the user's optimizer."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.algorithms import Auto, TopK
from tests.multi.common import Mlp, mlp_loss, seeded, sgd, train, wrap
from tests.multi.pool import on_ranks
from tests.multi.test_auto import logged


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def muon(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


class OfAnotherPackage(TopK):
    """Measured by its author, not by commlib."""


def said(action: str = "always", *, algorithm: str | TopK = "topk", make=adamw) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings(action, category=commlib.LossWarning)  # pyright: ignore[reportArgumentType]
        model = seeded(Mlp)
        commlib.unwrap(wrap(model, algorithm=algorithm, optimizer=make(model)))
    return [each for each in found if issubclass(each.category, commlib.LossWarning)]


@on_ranks(2)
def test_rank_0_is_warned_with_the_figure_the_command_and_a_way_out() -> None:
    found = said()
    assert len(found) == (1 if dist.get_rank() == 0 else 0)
    for each in found:
        text = str(each.message)
        assert text.startswith("topk: 32% more loss than all-reduce with AdamW")
        assert "--model bytes-1m --optimizer adamw --steps 200" in text
        assert "bytegrad" in text
    for each in said(make=lambda model: None) if dist.get_rank() == 0 else said(make=lambda model: None)[:0]:
        assert str(each.message).startswith("topk: 32% more loss than all-reduce with AdamW")
        assert "Pass optimizer= to compare yours, check the loss, or use" in str(each.message)


@on_ranks(2)
def test_nothing_is_said_of_what_keeps_up_or_loses_little_or_where_the_class_is_ignored() -> None:
    assert not said(make=sgd)
    assert not said(algorithm="bytegrad")
    assert not said(algorithm="local_sgd")  # 7 %
    assert not said(algorithm="diloco")  # 16 % after 8 rounds
    assert not said(algorithm=OfAnotherPackage(ratio=0.5))
    assert not said("ignore")
    assert not said(algorithm=TopK(ratio=0.5))  # sends far more than the measured settings
    found = said(algorithm=TopK(ef21=0.1))
    expected = ["topk: made for SGD, not measured with AdamW"] if dist.get_rank() == 0 else []
    assert [str(each.message).partition(".")[0] for each in found] == expected, found
    assert not said(algorithm="diloco_muon", make=muon)
    assert not said(algorithm="demo", make=lambda model: None)
    for make, got in ((adamw, "got AdamW"), (lambda model: None, "got no optimizer")):
        with pytest.raises(commlib.ConfigError, match=f"this preset of 'diloco' was measured with Muon; .* {got}"):
            said(algorithm="diloco_muon", make=make)


@on_ranks(2)
def test_auto_says_what_it_left_out_and_what_is_known_of_candidates_that_are_named() -> None:
    for candidates, words in (
        (None, "; left out: signsgd: 23% more"),
        (["allreduce", "topk"], "named in `candidates`"),
    ):
        with logged() as lines:
            model = seeded(Mlp)
            optimizer = adamw(model)
            wrap(model, algorithm=Auto(allow="compensated", candidates=candidates), optimizer=optimizer)
            train(model, mlp_loss, 12, optimizer)
        text = "\n".join(lines)
        if dist.get_rank() == 0:
            assert words in text
            assert "topk: 32% more loss than all-reduce with AdamW" in text
        if candidates is None:
            assert commlib.stats(model).algorithm in ("allreduce", "bytegrad", "ef_quantized")
