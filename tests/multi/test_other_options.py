"""A state that was saved with other options is loaded, with identical ranks, or refused without changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.algorithms import (
    DGC,
    QSGD,
    Algorithm,
    AsyncSGD,
    CompressionPolicy,
    DeMo,
    DiLoCo,
    EFQuantized,
    LocalSGD,
    LowPrecisionDecentralized,
    PostLocalSGD,
    PowerSGD,
    SparseLoCo,
    TopK,
)
from commlib.errors import ConfigError
from tests.contract.subjects import Subject, gathered, of_each_kind, settings_of, spread
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Mlp,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    train,
    wrap,
)
from tests.multi.pool import on_ranks, run_ranks

Make = Callable[[], Algorithm]

MATRICES = CompressionPolicy(min_dims=2)
FIRST = CompressionPolicy(skip=("second*", "third*"))
EVERYTHING = CompressionPolicy()

#: By difference: two sets of options, each of which continues from the other's state.
TAKEN: dict[str, tuple[Make, Make]] = {
    "what dgc makes sparse": (lambda: DGC(0.25, compress=MATRICES), lambda: DGC(0.25, compress=FIRST)),
    "what topk with ef21 makes sparse": (
        lambda: TopK(0.25, compress=MATRICES, ef21=0.5),
        lambda: TopK(0.25, compress=FIRST, ef21=0.5),
    ),
    "what ef_quantized with ef21 quantizes": (
        lambda: EFQuantized(compress=EVERYTHING, ef21=0.5),
        lambda: EFQuantized(compress=MATRICES, ef21=0.5),
    ),
    "what powersgd compresses": (lambda: PowerSGD(compress=MATRICES), lambda: PowerSGD(compress=FIRST)),
    "the rank of powersgd": (lambda: PowerSGD(rank=1), lambda: PowerSGD(rank=3)),
    "what demo compresses": (lambda: DeMo(kept=4, compress=MATRICES), lambda: DeMo(kept=4, compress=FIRST)),
    "how much topk sends": (lambda: TopK(0.25, exchange="balanced"), lambda: TopK(0.01)),
    "the bits of qsgd": (lambda: QSGD(bits=8), lambda: QSGD(bits=4)),
    "the codec of diloco": (lambda: DiLoCo(period=4), lambda: DiLoCo(period=4, codec="int4")),
    "the momentum of diloco": (lambda: DiLoCo(period=4, outer_momentum=0.0, nesterov=False), lambda: DiLoCo(period=4)),
    "the codec of local_sgd": (lambda: LocalSGD(4, codec="int8"), lambda: LocalSGD(4, codec="int4")),
}

SGD = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)

#: By difference: the options of the saved run, those of the one that refuses its state, and words of the error.
REFUSED: dict[str, tuple[Make, Make, str]] = {
    "the chunks of demo": (DeMo, lambda: DeMo(chunk=8), "DeMo.chunk: expected 64"),
    "no ef21": (TopK, lambda: TopK(ef21=0.5), "without EF21"),
    "ef21": (lambda: TopK(ef21=0.5), TopK, "with EF21"),
    "no outer optimizer": (lambda: DiLoCo(4), lambda: DiLoCo(4, outer=SGD), "expected None"),
    "an outer optimizer": (lambda: DiLoCo(4, outer=SGD), lambda: DiLoCo(4), "expected SGD"),
    "another outer optimizer": (lambda: DiLoCo(4, outer=SGD), lambda: DiLoCo(4, outer=ADAMW), "got AdamW"),
    "no common weights": (lambda: LocalSGD(4), lambda: LocalSGD(4, codec="int8"), "6 of 6 parameters are missing"),
    "common weights of others": (
        lambda: SparseLoCo(4, compress=FIRST),
        lambda: SparseLoCo(4, compress=MATRICES),
        "2 of 3 parameters are missing",
    ),
    "updates": (AsyncSGD, lambda: AsyncSGD(push="gradients"), "push='updates'"),
    "the graph": (
        lambda: LowPrecisionDecentralized(topology="ring"),
        lambda: LowPrecisionDecentralized(topology="fully_connected"),
        "expected the graph of the saved state",
    ),
}

#: By option: other values than the defaults and the small settings of `tests.contract`. None: it is not varied here, as
#: it needs several nodes, or does not affect the state.
ALTERNATIVES: dict[str, list[Any] | None] = {
    "averaging": [0.5],
    "bits": [4],
    "chunk": [16],
    "clip": [1.0],
    "codec": ["onebit", "int4", "topk"],
    "compress": [FIRST],
    "consensus_step": [0.5],
    "decay": [0.9],
    "delay": [0, 1],
    "delay_compensation": [0.1],
    "ef21": [0.5],
    "error_decay": [0.5],
    "exchange": ["balanced"],
    "feedback": [True, False],
    "fragments": [1],
    "global_every": [3],
    "interval_doubling": [4],
    "kept": [8],
    "local_after": [2],
    "longest_interval": [4],
    "lr_scale": [0.1],
    "max_staleness": [2],
    "method": ["dcd"],
    "min_compression": [1.0],
    "mixing": [0.3],
    "momentum": [0.5],
    "nesterov": [False],
    "on_stale": ["drop"],
    "op": ["sum"],
    "outer": [SGD],
    "outer_lr": [0.4],
    "outer_momentum": [0.2],
    "overlap": [True, False],
    "period": [3, 4],
    "predivide": [2.0],
    "push": ["gradients"],
    "rank": [1],
    "ratio": [0.5],
    "ratio_warmup_steps": [4],
    "rescale_residuals": [True],
    "reset_every": [3],
    "rest": [1.0],
    "seed": [3],
    "sign": [True],
    "topology": ["ring", "fully_connected"],
    "warmup_steps": [0, 6],
    "wire_dtype": ["bf16"],
    "hierarchical": None,
    "limit_s": None,
}

NAMES = [name for name in commlib.algorithms.list() if name != "auto"]  # which chooses one of the others


class Optioned(Subject):
    """An algorithm with one option changed."""

    def __init__(self, name: str, changed: dict[str, Any]) -> None:
        self.changed = changed
        super().__init__(name)

    def algorithm(self) -> Algorithm:
        return self.cls(**{**settings_of(self.cls), **self.changed})


def variants_of(name: str) -> list[Optioned]:
    """Return the algorithm with each alternative that it takes."""
    found = []
    for option, values in ALTERNATIVES.items():
        for value in values or () if option in inspect.signature(Subject(name).cls).parameters else ():
            with contextlib.suppress(ConfigError):  # not valid with its other options
                found.append(Optioned(name, {option: value}))
    return found


#: A number of steps after which every algorithm here has made rounds, and all replicas differ.
STEPS = 6


def trained(make: Make, steps: int = STEPS) -> tuple[Any, torch.optim.Optimizer]:
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrap(model, algorithm=make(), optimizer=optimizer, bucket_cap_mb=SMALL_BUCKET_MB)
    train(model, mlp_loss, steps, optimizer)
    return model, optimizer


def saved_with(make: Make) -> tuple[Any, Any]:
    model, _ = trained(make)
    state = commlib.state_dict(model)
    return state, {name: value.clone() for name, value in model.state_dict().items()}


def train_on(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train from the step of the saved run to one that ends a period of four."""
    for step in range(STEPS, 8):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()


def test_all_options_are_varied() -> None:
    options = {option for name in NAMES for option in inspect.signature(Subject(name).cls).parameters}
    assert options == set(ALTERNATIVES), "say what else an option may be, so that its state is loaded and saved"


def takes_or_refuses(name: str) -> None:
    """Whatever option differs: the run goes on soundly from the state, or from where it was."""
    usual = Optioned(name, {})
    for other in variants_of(name):
        for before, after in ((usual, other), (other, usual)):
            state = copy.deepcopy(commlib.state_dict(before.start().steps(5).model))
            training = after.start().steps(2)
            gathered(None)
            error = None
            try:
                commlib.load_state_dict(training.model, state)
            except ConfigError as refusal:
                error = str(refusal)
            assert len(set(map(bool, gathered(error)))) == 1, f"{other.changed}: only some ranks refuse: {error}"
            training.assert_trains_on()
            gathered(None)
            before.release()
            after.release()


@pytest.mark.parametrize("name", of_each_kind(NAMES))
def test_every_option_may_differ_from_the_saved_run(name: str) -> None:
    run_ranks(takes_or_refuses, 2, name)


@pytest.mark.thin
@on_ranks(2, slow=(3,))
@pytest.mark.parametrize("other_way", [False, True])
@pytest.mark.parametrize("case", TAKEN)
def test_ranks_are_alike_with_a_state_of_other_options(case: str, other_way: bool) -> None:
    before, after = reversed(TAKEN[case]) if other_way else TAKEN[case]
    state, weights = saved_with(before)
    model, optimizer = trained(after, 1)
    commlib.load_state_dict(model, state)
    model.load_state_dict(weights)
    train_on(model, optimizer)
    assert spread(model) == 0


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("other_way", [False, True])
def test_an_estimate_of_gradients_is_right_after_what_is_sent_has_changed(other_way: bool) -> None:
    options = TAKEN["what topk with ef21 makes sparse"]
    before, after = reversed(options) if other_way else options
    state, weights = saved_with(before)
    model, _ = trained(after, 1)
    commlib.load_state_dict(model, state)
    model.load_state_dict(weights)
    alone = seeded(Mlp)
    alone.load_state_dict(weights)
    mlp_loss(alone, 0).backward()
    for _ in range(40):  # of the same gradient
        model.zero_grad()
        mlp_loss(model, 0).backward()
    for ours, own in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(own.grad)
        torch.testing.assert_close(ours.grad, own.grad / dist.get_world_size(), rtol=1e-3, atol=1e-4)


@on_ranks(4, slow=(5,))
@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_cannot_be_gone_on_from_is_refused(case: str) -> None:
    before, after, words = REFUSED[case]
    state, _ = saved_with(before)
    model, optimizer = trained(after)
    with raises_on_every_rank(ConfigError, words):
        commlib.load_state_dict(model, state)
    train_on(model, optimizer)
    gathered(None)  # nobody leaves before all have trained on


@on_ranks(2)
def test_a_state_from_before_the_first_round_goes_with_any_outer_options() -> None:
    """Then the weights are the same on all ranks, and there is nothing else."""
    state = commlib.state_dict(trained(lambda: PostLocalSGD(100, 4), 2)[0])
    model, _ = trained(lambda: PostLocalSGD(100, 4, codec="int8"), 1)
    commlib.load_state_dict(model, state)
    assert not state["state"]["begun"]
