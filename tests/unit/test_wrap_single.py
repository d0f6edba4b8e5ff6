"""`wrap` in one process: its errors, its options and the interface of the wrapped model, over a group of one rank."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

import commlib
from commlib import verify
from commlib.checkpoint import blobs
from commlib.errors import ConfigError, TransportError
from commlib.replica import replica_of
from commlib.transport.base import Communication, Communicator
from commlib.transport.groups import as_timedelta
from commlib.transport.simulated import SimulatedTransport
from tests.waiting import eventually


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def step(model: nn.Module) -> None:
    model(torch.ones(3, 4)).square().sum().backward()


# --- Errors ----------------------------------------------------------------------------------------------------------


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        commlib.wrap(net())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        step(commlib.wrap(net()))
    finally:
        dist.destroy_process_group()


class Around(torch.Tensor):
    """Has another tensor in its place, and tells nobody how to reach it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        own = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        own.inner = inner
        return own

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*tree_map(lambda x: x.inner if isinstance(x, Around) else x, args), **(kwargs or {}))
        return cls(out) if isinstance(out, torch.Tensor) else out


class Flattened(Around):
    """Tells."""

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return Flattened(inner["inner"])


class Named(torch.Tensor):
    """Is an ordinary tensor, but for its class."""


@pytest.mark.usefixtures("group")
def test_an_error_of_commlib_is_printed_once() -> None:
    with pytest.raises(ConfigError, match="rank 0: algorithm: 'allredcue' is not registered") as caught:
        commlib.wrap(net(), "allredcue")
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("not registered") == 1


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", [Around, Flattened])
def test_wrappers_of_tensors_are_refused(kind: Any) -> None:
    for trains in (True, False):
        model = net()
        model[0].weight = nn.Parameter(kind(torch.ones(8, 4)), requires_grad=trains)
        with pytest.raises(ConfigError, match=r"wrappers of tensors: '0.weight'"):
            commlib.wrap(model)
    model = net()
    model.register_buffer("table", kind(torch.ones(3)))
    with pytest.raises(ConfigError, match="wrappers of tensors: 'table'"):
        commlib.wrap(model)


@pytest.mark.usefixtures("group")
def test_a_class_of_ordinary_tensors_is_taken() -> None:
    model = net()
    model[0].weight = nn.Parameter(torch.ones(8, 4).as_subclass(Named))
    step(commlib.wrap(model))
    assert model[0].weight.grad is not None


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "allredcue"}, "allredcue.*allreduce"),
        ({"algorithm": "AllReduce"}, "allreduce"),
        ({"algorithm": 7}, "algorithm"),
        ({"ignored_parameters": ["0.wieght"]}, r"0\.wieght"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
        ({"bucket_cap_mb": "big"}, "bucket_cap_mb"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": timedelta(0)}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"process_group": "everyone"}, "process_group"),
        ({"optimizer": "sgd"}, "optimizer"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        commlib.wrap(net(), **options)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrong", ["model", None, nn.Linear])
def test_what_is_no_module_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="Module"):
        commlib.wrap(wrong)


@pytest.mark.usefixtures("group")
def test_a_model_that_ddp_has_wrapped_is_refused() -> None:
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        commlib.wrap(nn.parallel.DistributedDataParallel(net()))


@pytest.mark.usefixtures("group")
def test_parameters_off_the_device_are_named() -> None:
    model = net()
    model[2].to("meta")
    with pytest.raises(ConfigError, match=r"2\.weight"):
        commlib.wrap(model)


@pytest.mark.usefixtures("group")
def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="[Ll]azy|[Uu]ninitialized|uninitialised"):
        commlib.wrap(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.usefixtures("group")
def test_wrapping_twice_leaves_the_first_wrapping_alone() -> None:
    model = commlib.wrap(net())
    with pytest.raises(ConfigError, match="unwrap"):
        commlib.wrap(model)
    step(model)
    assert commlib.stats(model).world_size == 1


@pytest.mark.usefixtures("group")
def test_a_shared_parameter_cannot_be_wrapped_in_two_models() -> None:
    first, second = net(), net()
    second[0] = first[0]
    commlib.wrap(first)
    with pytest.raises(ConfigError, match=r"0\.weight"):
        commlib.wrap(second)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("function", ["unwrap", "stats", "state_dict", "synchronize"])
def test_functions_refuse_a_bare_model(function: str) -> None:
    with pytest.raises(ConfigError, match="wrap"):
        getattr(commlib, function)(net())


@pytest.mark.usefixtures("group")
def test_a_parameter_added_after_wrapping_is_named() -> None:
    model = commlib.wrap(net())
    step(model)
    model.append(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"3\.weight"):
        step(model)


@pytest.mark.usefixtures("group")
def test_a_refused_model_is_left_as_it_was() -> None:
    model = net()
    attributes, kind = set(vars(model)), type(model)
    with pytest.raises(ConfigError):
        commlib.wrap(model, algorithm="nothing-like-this")
    assert (set(vars(model)), type(model)) == (attributes, kind)
    commlib.wrap(model)


# --- The wrapped model -----------------------------------------------------------------------------------------------


def test_the_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(commlib.wrap).parameters
    assert list(parameters) == [
        "model",
        "algorithm",
        "optimizer",
        "process_group",
        "bucket_cap_mb",
        "broadcast_buffers",
        "init_sync",
        "ignored_parameters",
        "scaler",
        "timeout",
        "unannounced",
        "ddp",
    ]
    *others, ddp = list(parameters.values())[2:]
    assert all(p.kind is p.KEYWORD_ONLY for p in others)
    assert ddp.kind is ddp.VAR_KEYWORD


def test_the_registry_lists_what_wrap_takes() -> None:
    assert "allreduce" in commlib.algorithms.list()
    assert commlib.algorithms.list() == sorted(commlib.algorithms.list())


@pytest.mark.parametrize(
    "name", ["ByteGrad", "EFQuantized", "QAdam", "DiLoCo", "LocalSGD", "Gossip", "LowPrecisionDecentralized"]
)
def test_a_codec_may_be_given_by_name(name: str) -> None:
    make = getattr(commlib.algorithms, name)
    assert isinstance(make(codec="int4").codec, commlib.codecs.Int4)
    own = commlib.codecs.BF16()
    assert make(codec=own).codec is own
    for wrong, words in (
        ("int9", r"'int9'; did you mean 'int"),
        ("randomk", "got 'randomk'"),
        (8, "got 8"),
        (commlib.codecs.Int8, "got <class"),
    ):
        with pytest.raises(ConfigError, match=words):
            make(codec=wrong)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("timeout", [None, 5, 2.5, timedelta(seconds=3)])
def test_one_rank_computes_the_bare_models_gradients(timeout: Any) -> None:
    bare, model = net(), commlib.wrap(net(), timeout=timeout)
    for _ in range(3):
        for candidate in (bare, model):
            candidate.zero_grad()
            step(candidate)
        for own, other in zip(model.parameters(), bare.parameters(), strict=True):
            assert own.grad is not None
            assert torch.equal(own.grad, other.grad)


@pytest.mark.usefixtures("group")
def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter"):
        commlib.wrap(net().requires_grad_(False))


@pytest.mark.usefixtures("group")
def test_module_is_bare_and_shares_the_state() -> None:
    model = commlib.wrap(net())
    assert type(model.module) is nn.Sequential
    assert model.module[0] is model[0]
    assert isinstance(model, nn.Sequential)


@pytest.mark.usefixtures("group")
def test_statistics_print() -> None:
    model = commlib.wrap(net())
    step(model)
    stats = commlib.stats(model)
    assert (stats.algorithm, stats.world_size, stats.rounds) == ("allreduce", 1, 0)
    assert stats.wire_bytes == 0, "there is nobody to communicate with"
    assert "allreduce" in str(stats)


@pytest.mark.usefixtures("group")
def test_copies_are_wrapped_where_there_is_a_group_and_train_alone_where_there_is_none() -> None:
    model = commlib.wrap(net())
    step(model)
    assert commlib.stats(copy.deepcopy(model)).world_size == 1
    content = pickle.dumps(model)
    assert commlib.stats(pickle.loads(content)).world_size == 1
    dist.destroy_process_group()
    for twin in (pickle.loads(content), copy.deepcopy(model)):
        assert isinstance(twin, nn.Sequential)
        step(twin)
        assert type(commlib.unwrap(twin)) is nn.Sequential


@pytest.mark.usefixtures("group")
def test_the_state_of_the_communication_can_be_saved_and_loaded() -> None:
    model = commlib.wrap(net())
    step(model)
    state = pickle.loads(pickle.dumps(commlib.state_dict(model)))
    other = commlib.wrap(net())
    commlib.load_state_dict(other, state)
    step(other)
    with pytest.raises(ConfigError):
        commlib.load_state_dict(other, {"nothing": "like this"})


@pytest.mark.usefixtures("group")
def test_state_of_another_format_is_refused_with_both_versions_and_nothing_is_loaded() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = commlib.wrap(model, optimizer=optimizer)
    before = model.state_dict()["0.weight"].clone()
    app, other = commlib.Checkpoint(model, optimizer), {"format": 99, "commlib": "9.9"}
    saved, own = app.state_dict(), commlib.checkpoint.rank_state(model)
    shared = blobs.unpacked(saved["communication"]["shared"])
    saved["communication"]["shared"] = blobs.packed({**shared, **other})
    saved["model"] = {name: torch.zeros_like(value) for name, value in saved["model"].items()}
    loads = [
        lambda: app.load_state_dict(saved),
        lambda: commlib.load_state_dict(model, {**own["communication"], **other}),
        lambda: commlib.checkpoint.load_rank_state(model, {**own, **other}),
    ]
    words = rf"format 99, saved by commlib 9\.9; commlib {commlib.__version__} reads format"
    for load in loads:
        with pytest.raises(ConfigError, match=words):
            load()
    assert torch.equal(model.state_dict()["0.weight"], before)
    commlib.load_state_dict(model, {**own["communication"], "commlib": "9.9"})  # the format decides, not the version


@pytest.mark.usefixtures("group")
def test_dropping_the_model_frees_it_and_its_thread() -> None:
    before = threading.active_count()
    model = commlib.wrap(net())
    step(model)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    dist.destroy_process_group()
    assert eventually(lambda: threading.active_count() <= before + 1)  # one idle thread per device may stay


@pytest.mark.usefixtures("group")
def test_unwrap_ends_the_thread_and_removes_every_trace() -> None:
    threads, original = set(threading.enumerate()), net()
    attributes = set(vars(original))
    model = commlib.wrap(original)
    step(model)
    assert commlib.unwrap(model) is original
    assert type(original) is nn.Sequential
    assert set(vars(original)) == attributes
    assert all(not p._post_accumulate_grad_hooks for p in original.parameters())
    assert eventually(lambda: set(threading.enumerate()) <= threads), threading.enumerate()
    step(original)


@pytest.mark.usefixtures("group")
def test_a_model_can_be_used_and_unwrapped_after_the_group_is_destroyed() -> None:
    model = commlib.wrap(net())
    step(model)
    dist.destroy_process_group()
    step(model)
    step(commlib.unwrap(model))


@pytest.mark.usefixtures("group")
def test_buffers_are_copied_by_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = commlib.wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), commlib.algorithms.DGC())
    engine, threads = replica_of(model).engine, []
    engine.gradients.buffers.tensors = lambda: list(model.buffers())  # alone it copies none

    def copying(tensors: list[torch.Tensor], comm: Communicator, source: int) -> Communication:
        threads.append((threading.current_thread(), len(tensors), source))
        yield comm.broadcast(torch.ones(4), source)
        threads.append((threading.current_thread(), len(tensors), source))

    monkeypatch.setattr("commlib.engine.gradients.reducer.broadcast_all", copying)
    step(model)
    assert threads == [(threading.current_thread(), 3, 0)] * 2
    commlib.unwrap(model)


class Own(nn.Sequential):
    """Its attributes lead back to it, as those of a model that a trainer or FSDP2 has taken do."""

    def __init__(self) -> None:
        super().__init__(*net())
        self.owners = [self]


def islands() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(net(), mesh=mesh["shard"])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("build", [Own, islands])
def test_a_model_whose_attributes_lead_back_to_it_is_collected_with_its_threads(build: Any) -> None:
    gc.collect()
    before = threading.active_count()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    commlib.wrap(model, "topk", optimizer=optimizer)
    step(model)
    engine, gone = weakref.ref(replica_of(model).engine), weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert engine() is None
    assert eventually(lambda: threading.active_count() <= before), threading.enumerate()


class Departing(SimulatedTransport):
    """Of the first of two ranks: the other one reports an error, and is gone when it is asked again."""

    num_gathered = 0

    def gather_objects(self, value: Any) -> list[Any]:
        self.num_gathered += 1
        if self.num_gathered == 1:
            return [value, ("ValueError: theirs", "")]
        raise TransportError("rank 1 ended")


def test_an_error_of_all_ranks_is_raised_once_all_have_heard_of_it() -> None:
    """The first to raise ends the communicator; that end must not take the place of the error on a slower rank."""
    transport = Departing(0, 2)
    with pytest.raises(ConfigError, match="on rank 1: ValueError: theirs"):
        verify.agree(transport, lambda: [], None)
    assert transport.num_gathered == 2


class OtherVersion(SimulatedTransport):
    """Of the first of two ranks, the other of which runs another version."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.theirs = iter([(None, "another digest"), [("commlib", "9.9")], None])

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, next(self.theirs)]


def test_ranks_of_different_versions_are_refused() -> None:
    with pytest.raises(ConfigError, match=rf"ranks \[0\]: commlib {commlib.__version__}; ranks \[1\]: commlib 9\.9"):
        verify.agree(OtherVersion(), lambda: [], None)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", [n for n in commlib.algorithms.list() if commlib.algorithms.get(n).has_momentum])
def test_an_algorithm_with_momentum_refuses_an_optimizer_with_it(name: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match="momentum"):
        commlib.wrap(model, name, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    commlib.wrap(model, name, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def group_whose_backend_has(**fields: Any) -> Any:
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(**fields))


@pytest.mark.parametrize(("timeout", "longest"), [(None, 60), (5, 60), (timedelta(seconds=90), 90)])
def test_set_up_waits_as_long_as_the_group_or_longer(timeout: Any, longest: int) -> None:
    group = group_whose_backend_has(options=SimpleNamespace(_timeout=timedelta(seconds=60)))
    setup: Any = SimpleNamespace(device=torch.device("cpu"))
    expected = timedelta(seconds=60) if timeout is None else as_timedelta(timeout, group, setup.device)
    module = sys.modules["commlib.wrap"]
    assert module._timeouts(timeout, group, setup) == (expected, timedelta(seconds=longest), None)
    duration, waits, error = module._timeouts(-1, group, setup)
    assert duration == waits == timedelta(seconds=60)
    assert isinstance(error, ConfigError)


@pytest.mark.parametrize("fields", [{}, {"options": SimpleNamespace()}, {"options": None}], ids=str)
def test_a_backend_that_does_not_say_its_timeout_has_torchs_default(fields: dict[str, Any]) -> None:
    found = as_timedelta(None, group_whose_backend_has(**fields), torch.device("cpu"))
    assert found == dist.default_pg_timeout
