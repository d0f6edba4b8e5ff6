"""`wrap`: makes a model train in parallel, in place; and what the wrapped model offers."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast, overload

import torch
from torch import nn
from typing_extensions import Unpack

from commlib import ddp_arguments, verify
from commlib.algorithms.auto import Auto
from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Weights
from commlib.algorithms.known import keeping_up, loses_with
from commlib.ddp_arguments import DDPArguments
from commlib.engine import optimizers
from commlib.engine import state as checkpoints
from commlib.engine import stats as statistics
from commlib.engine.engine import Engine
from commlib.engine.stats import Stats
from commlib.errors import ConfigError, LossWarning
from commlib.parallel import M, WrappedModel, extend, restore_class
from commlib.replica import Copy, Replica, find, inside_compiled, replica_of, wrapped_of
from commlib.set_up import SetUp, check_optimizer, tuner
from commlib.transport import closing
from commlib.transport.groups import as_timedelta, resolve_group
from commlib.transport.torch_dist import TorchTransport

_log = logging.getLogger("commlib")

#: `wrap` warns of an algorithm that is known to lose more than this with the optimizer.
_WARNED_OF = 0.1


def wrap(
    model: M,
    algorithm: str | Algorithm = "allreduce",
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    process_group: Any = None,
    bucket_cap_mb: float | None = None,
    broadcast_buffers: bool | None = True,
    init_sync: bool = True,
    ignored_parameters: Sequence[str | nn.Parameter] = (),
    scaler: Any = None,
    timeout: float | timedelta | None = None,
    unannounced: str = "warn",
    **ddp: Unpack[DDPArguments],
) -> WrappedModel[M]:
    """Make `model` train in parallel over the ranks of a process group, in place.

    Collective: every rank of the group calls it with the same model and options. The same object comes back; its
    class gains `no_sync()`, `join()` and `module`, and its parameters' names and `state_dict` stay as they are.
    Gradients are communicated while backward runs, and are final when `backward()` returns. `param.grad` is then a view
    of a buffer that commlib owns.

    Args:
        model: The model, on its device; changed in place.
        algorithm: A registered name (`commlib.algorithms.list()`) or an `Algorithm` instance with options, which is
            copied.
        optimizer: Required by algorithms that act on weights or optimizer state. Where it is given, its steps are what
            warm-ups, periods and schedules count. Of a list (Muon beside AdamW) a step ends when each has made one.
            What a proxy such as accelerate's passes its steps to is found.
        process_group: A `ProcessGroup`, a 1-D `DeviceMesh`, or None for the default group.
        bucket_cap_mb: Size of a bucket in MiB. None lets commlib measure and plan the buckets.
        broadcast_buffers: Whether rank 0's buffers are copied to all ranks at the end of each synchronised backward, so
            that all have DDP's in the next forward. No forward copies any.
        init_sync: Whether rank 0's parameters and buffers are copied to all ranks now.
        ignored_parameters: Parameters, or names of parameters and buffers, that commlib leaves alone.
        scaler: The `GradScaler`, for algorithms that keep residuals and for those that act on weights: a step that it
            skips on one rank counts on all.
        timeout: Seconds (or a timedelta) that a collective waits for its peers; None takes the group's. It holds once
            all ranks are here. Until then `wrap` waits as long as the group's own timeout, as DDP's constructor does,
            or as long as this one, if that is longer; for a rank that dies it waits no longer.
        unannounced: What becomes of a backward that stays local because neither a forward of the wrapped model nor
            `expect_backward` announced it: "warn" logs the first one, "error" raises `ConfigError` in backward.
        **ddp: Further arguments of `DistributedDataParallel`, such as `device_ids` and `find_unused_parameters`, where
            they ask for what commlib does anyway; the others are refused (docs/reference/ddp_arguments.md has all).

    Returns:
        `model` itself, typed as what it was and as a `WrappedModel`.

    Raises:
        ConfigError: No process group; or, alike on every rank: an unknown algorithm, a model that cannot be wrapped, is
            wrapped already, or differs between ranks.
        PeerTimeout: A rank did not come within the group's timeout, or did not take part within the timeout.
        PeerFailure: A rank died meanwhile.
        TransportError: The process group's store does not answer, or the ranks cannot be connected.
    """
    closing.drain()  # what was dropped is gone before connections are made anew
    group = resolve_group(ddp_arguments.group(process_group, ddp))
    ranks = torch.distributed.get_process_group_ranks(group)
    setup = SetUp(model, algorithm, optimizer, ignored_parameters, bucket_cap_mb, scaler, ranks, unannounced, ddp)
    broadcast_buffers = ddp_arguments.copies_buffers(broadcast_buffers, ddp)
    duration, longest, error = _timeouts(timeout, group, setup)
    with contextlib.ExitStack() as undo:
        transport = TorchTransport(group, setup.device, duration, longest)
        undo.callback(transport.close)
        options = {"broadcast_buffers": broadcast_buffers, "init_sync": init_sync, "bucket_cap_mb": bucket_cap_mb}
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        setup.agree(transport, options, error)
        assert setup.algorithm is not None
        if transport.rank == 0 and transport.world_size > 1:
            _warn_of_losses(setup.algorithm, setup.optimizer)
        cap_bytes = None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
        own = copy.deepcopy(setup.algorithm)  # what it remembers is this model's
        engine = Engine(setup.parameters, transport, own, cap_bytes, setup.optimizer, scaler)
        undo.callback(engine.close)
        engine.gradients.backward.refuses_unannounced = unannounced == "error"
        connect = lambda: TorchTransport(group, setup.device, duration, longest)  # noqa: E731
        again = functools.partial(
            wrap_copy,
            algorithm=setup.algorithm,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            ignored_parameters=tuple(sorted(setup.ignored)),
            timeout=timeout,
            unannounced=unannounced,
        )
        for module in model.modules():
            if isinstance(waiting := find(module), Copy):  # for its first training: this model takes care of it now
                restore_class(module)
                undo.callback(extend, module, waiting)
        replica = Replica(engine, model, setup.ignored, broadcast_buffers, group, again)
        if isinstance(own, Auto) and (
            transport.world_size > 1 or len(tuner().candidates_of(own, setup.optimizer)) == 1
        ):
            replica.tuner = tuner().Tuner(engine, own, connect, replica.synchronize)
        extend(model, replica)
        undo.callback(restore_class, model)
        if init_sync:
            replica.broadcast_model()
        engine.open(connect)
        undo.pop_all()
    return cast("WrappedModel[M]", model)


def _warn_of_losses(algorithm: Algorithm, optimizer: Any) -> None:
    """Warn the caller of `wrap` where the algorithm is known to learn far less with the optimizer."""
    kind = optimizers.kind_of(optimizer)
    found = None if optimizer is None else loses_with(algorithm, kind)
    catches_up = isinstance(algorithm.channel, Weights)  # a loss after few steps says little of rare averages
    if found is not None and found.loss > _WARNED_OF and not catches_up:
        text = (
            f"{algorithm.name}: {found}, measured by `{found.command}`. Look at the loss, or take what kept up there: "
            f"{', '.join(keeping_up(kind))}. Warnings of the class commlib.LossWarning can be ignored"
        )
        warnings.warn(text, LossWarning, stacklevel=3)


@overload
def unwrap(model: WrappedModel[M]) -> M: ...
@overload
def unwrap(model: M) -> M: ...
def unwrap(model: nn.Module) -> nn.Module:
    """Undo `wrap`: remove every hook, end the communication, restore the class. Returns the same object.

    Every rank calls it. Background rounds are taken first; gradients and parameters stay. A copy of a wrapped model
    becomes an ordinary model. Of what `torch.compile` made of a wrapped model, the model inside is unwrapped.

    Raises:
        ConfigError: The model is not wrapped.
    """
    wrapped = wrapped_of(model)
    if isinstance(wrapped, Replica):
        wrapped.drain()
        wrapped.engine.close()
    restore_class(inside_compiled(model))
    closing.drain()
    return model


def stats(model: nn.Module) -> Stats:
    """Return what the wrapped model has communicated. Local; prints as a table of its buckets.

    Raises:
        ConfigError: The model is not wrapped.
    """
    wrapped = find(model)
    if isinstance(wrapped, Copy):
        group = torch.distributed.group.WORLD
        algorithm = cast("functools.partial[Any]", wrapped.again).keywords["algorithm"]
        return statistics.of_copy(algorithm.name, 1 if group is None else group.size())
    return statistics.collect(replica_of(model).engine)


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the communication's state on this rank: the algorithm's own, its phase, and the bucket plan.

    Save it beside `model.state_dict()`, per rank; with it a resumed run is bit-identical to one that never stopped.
    While bucket plans are still tried, this ends it: from the next round on all ranks stay with that round's plan.

    Raises:
        ConfigError: The model is not wrapped.
    """
    replica = replica_of(model)
    replica.drain()
    tuned = {} if replica.tuner is None else {"auto": replica.tuner.state_dict()}
    return {**checkpoints.save(replica.engine), **tuned}


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Take over what `state_dict` returned. Every rank loads its own (`Algorithm.portable`: or any rank's).

    Rounds in the background come to nothing, so it may be called in the middle of a training too, to go back to an
    earlier state: on all ranks after the same step. Local, but for such rounds, which are waited for, and for `auto`,
    which makes connections for the algorithm that was chosen: every rank calls it then. The next forward in training
    mode checks that all ranks have loaded state of the same step, and raises `ConfigError` on all of them if not.

    Raises:
        ConfigError: The model is not wrapped, or the state is of another algorithm or model, or of options with which
            this run cannot go on from it, or, where it is not the same on all ranks (`Algorithm.portable`), of another
            rank or world size. Nothing was changed then, and the training can go on.
    """
    replica = replica_of(model)
    if replica.tuner is not None and state.get("algorithm") not in (None, replica.engine.algorithm.name):
        if not state.get("auto"):
            raise ConfigError(f"load_state_dict: the state is of {state['algorithm']!r}, not of 'auto'")
        replica.tuner.adopt(str(state["algorithm"]), state["auto"])
    checkpoints.load(replica.engine, dict(state))


def synchronize(model: nn.Module, optimizer: bool = False) -> None:
    """Make the model the same on all ranks: the consensus of the replicas. Collective.

    Background rounds are taken first. Algorithms on gradients keep replicas alike, so only buffers are copied then;
    for the others the parameters become their mean over the ranks.

    Args:
        model: A wrapped model.
        optimizer: Whether the state of the optimizer given to `wrap` becomes the same, too: the mean of floating-point
            tensors, and rank 0's counters (numbers, tensors of one element or of integers).

    Raises:
        ConfigError: The model is not wrapped; or `optimizer` is asked for and none was given, or the ranks' states are
            of different parameters or shapes.
        TransportError: A rank did not take part.
    """
    replica_of(model).synchronize(optimizer)


def set_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
    """Follow the steps of another optimizer than the one given to `wrap`, from the next step on. Collective.

    Every rank calls it between two steps, with an optimizer of the same class. Steps that were made stay counted, so
    that warm-ups and periods go on. What an algorithm keeps of gradients or weights (residuals, anchors, momentum)
    stays. What the old optimizer kept stays with it: copy it with `load_state_dict` first if the new one is to go on
    from there. Rounds in the background are waited for; of asynchronous ones the result is dropped. Algorithms that run
    by themselves are synchronised, as by `synchronize`.

    Args:
        model: A wrapped model.
        optimizer: As in `wrap`: an optimizer, a proxy of one, or a sequence of those.

    Raises:
        ConfigError: The model is not wrapped; or, on every rank: the algorithm cannot go on with the optimizer, or its
            class differs between ranks. The old one is followed then.
        CommlibError: The communication has ended.
    """
    replica = replica_of(model)
    engine = replica.engine
    engine.check()
    found, error = None, None
    try:
        found = optimizers.resolve(optimizer)
        if found is None:
            raise ConfigError("set_optimizer: expected an optimizer, got None")
        check_optimizer(engine.algorithm, found, engine.parameters, engine.progress.is_warming_up)
    except Exception as caught:
        error = caught
    verify.agree(engine.transport, lambda: [("optimizer", optimizers.names_of(found))], error, "set_optimizer")
    replica.drain()
    engine.set_optimizer(found)


@torch._disable_dynamo  # a graph would leave it out
def expect_backward(model: nn.Module) -> None:
    """Let the next backward be a synchronised one, whatever begins it.

    For backwards that no output of `model(...)` announces: one made inside of `forward`, of submodules called by
    themselves, of `model.module`, of losses kept elsewhere. Call it on all ranks before that backward; inside
    `no_sync()` that stays local. What a forward does, as taking in unfrozen parameters, happens here too.

    Raises:
        ConfigError: The model is not wrapped, or differs from what was wrapped; or gradients are not enabled.
        CommlibError: The communication has ended.
    """
    if not torch.is_grad_enabled():
        raise ConfigError("expect_backward: gradients are not enabled here, so there will be no backward")
    wrapped = wrapped_of(model)
    (wrapped.join_ranks() if isinstance(wrapped, Copy) else wrapped).expect_backward()


def _timeouts(timeout: Any, group: Any, setup: SetUp) -> tuple[timedelta, timedelta, Exception | None]:
    """Return the timeout of collectives and that of the set-up, and what was wrong with `timeout`.

    All ranks are told of that together, so the group's serves until then.
    """
    longest = as_timedelta(None, group, setup.device)
    try:
        duration = as_timedelta(timeout, group, setup.device)
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        return longest, longest, ConfigError(f"timeout={timeout!r}: {error}")
    return duration, max(duration, longest), None


def wrap_copy(model: nn.Module, algorithm: Algorithm, **options: Any) -> None:
    """Wrap a copy of a wrapped model, with the options of that one. Collective.

    Raises:
        ConfigError: Its algorithm needs an optimizer, which no copy has.
    """
    if algorithm.channel.needs_optimizer:
        raise ConfigError(
            f"this {type(model).__name__} is a copy of a model wrapped with {algorithm.name!r}, which needs "
            "the optimizer of the copy. Call commlib.wrap(copy, ..., optimizer=...) to train it on all ranks, or "
            "commlib.unwrap(copy) to train it on this rank alone"
        )
    wrap(model, algorithm, init_sync=False, **options)
