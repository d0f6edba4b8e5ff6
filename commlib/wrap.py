"""`wrap`, which makes a model train in parallel in place, and the functions that act on a wrapped model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast, overload

import torch
from torch import nn
from typing_extensions import Unpack

from commlib import ddp_arguments, locks, verify
from commlib.algorithms.auto import Auto
from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Weights
from commlib.algorithms.known import doubt, keeping_up, measured, worst_measured
from commlib.ddp_arguments import DDPArguments
from commlib.engine import optimizers
from commlib.engine import state as checkpoints
from commlib.engine import stats as statistics
from commlib.engine.engine import Engine
from commlib.engine.stats import Stats
from commlib.errors import ConfigError, LossWarning
from commlib.hand_over import HandOver, check_elastic
from commlib.parallel import M, WrappedModel, extend, restore_class
from commlib.replica import Copy, Replica, find, inside_compiled, replica_of, wrapped_of
from commlib.set_up import SetUp, check_optimizer, tuner
from commlib.shard import sharded_of, unshard
from commlib.transport import closing
from commlib.transport.base import Transport
from commlib.transport.groups import as_timedelta, resolve_group
from commlib.transport.torch_dist import TorchTransport
from commlib.weak import WeakTable

_log = logging.getLogger("commlib")

#: Models that an integration leaves unwrapped because there is one process, with the algorithm's name.
alone: WeakTable[nn.Module, str] = WeakTable(locks.lock("wrap.alone", is_of_process=True))

#: `wrap` warns if the algorithm's measured loss with the optimizer's class is worse than this, relative to all-reduce.
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

    Collective: every rank of the group calls it with the same model and options. Returns the same object. The object's
    class gains `no_sync()`, `join()` and `module`. Parameter names and `state_dict` do not change. Gradients are
    communicated while backward runs and are final when `backward()` returns. `param.grad` is then a view of a buffer
    that commlib owns.

    Args:
        model: The model, on its device. Modified in place.
        algorithm: A registered name (`commlib.algorithms.list()`), a preset (`commlib.algorithms.PRESETS`), or an
            `Algorithm` instance with options, which is copied.
        optimizer: Required by algorithms that act on weights or optimizer state. If given, warm-ups, periods and
            schedules count its steps. With a list (Muon and AdamW), a step ends when each optimizer has made one. A
            proxy (such as accelerate's) is resolved to the optimizer that it wraps.
        process_group: A `ProcessGroup`, a 1-D `DeviceMesh`, the result of `commlib.elastic.join`, or None for the
            default group.
        bucket_cap_mb: Bucket size in MiB. None lets commlib measure and plan the buckets.
        broadcast_buffers: Whether to copy rank 0's buffers to all ranks at the end of each synchronised backward, so
            that every rank has the same buffers as with DDP in the next forward. No forward copies buffers.
        init_sync: Whether to copy rank 0's parameters and buffers to all ranks now.
        ignored_parameters: Parameters, or names of parameters and buffers, that commlib does not communicate.
        scaler: The `GradScaler`, for algorithms that keep residuals or act on weights. A step that it skips on one rank
            counts on all ranks.
        timeout: Seconds (or a timedelta) that a collective waits for its peers. None uses the group's timeout. It
            applies once all ranks have arrived. Until then, `wrap` waits for the longer of this timeout and the group's
            own, as DDP's constructor does. It does not wait for a rank that has died.
        unannounced: How to treat a backward that stays local because neither a forward of the wrapped model nor
            `expect_backward` announced it: "warn" logs the first one, "error" raises `ConfigError` in backward.
        **ddp: Further arguments of `DistributedDataParallel`, such as `device_ids` and `find_unused_parameters`.
            Accepted if they request behaviour that commlib has anyway, refused otherwise (see
            docs/how-to/coming-from-ddp.md).

    Returns:
        `model` itself, typed as its own class and as a `WrappedModel`.

    Raises:
        ConfigError: There is no process group. Or, on every rank: the algorithm is unknown, or the model cannot be
            wrapped, is already wrapped, or differs between ranks.
        PeerTimeout: A rank did not arrive within the group's timeout, or did not take part within the timeout.
        PeerFailure: A rank died during the call.
        TransportError: The process group's store does not answer, or the ranks cannot be connected.
    """
    closing.drain()  # free dropped models before new connections are created
    group = ddp_arguments.group(process_group, ddp, algorithm)
    members = group if getattr(group, "is_elastic", False) else None
    group = members or resolve_group(group)
    ranks = [0] if members else torch.distributed.get_process_group_ranks(group)
    setup = SetUp(model, algorithm, optimizer, ignored_parameters, bucket_cap_mb, scaler, ranks, unannounced, ddp)
    copies_at_once = ddp_arguments.copies_buffers_at_once(broadcast_buffers, ddp)
    broadcast_buffers = ddp_arguments.copies_buffers(broadcast_buffers, ddp)
    connect, error = _connector(group, setup, timeout)
    with contextlib.ExitStack() as undo:
        transport = connect()
        undo.callback(transport.close)
        options = {"broadcast_buffers": broadcast_buffers, "init_sync": init_sync, "bucket_cap_mb": bucket_cap_mb}
        options["forward_sync_buffers"] = ddp.get("forward_sync_buffers")
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        chosen = setup.agree(transport, options, error)
        if transport.is_elastic or (transport.rank == 0 and transport.world_size > 1):
            _warn_of_losses(chosen, setup.optimizer, is_copy=isinstance(find(model), Copy))
        cap_bytes = None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
        own = copy.deepcopy(chosen)  # its state belongs to this model
        engine = Engine(setup.parameters, transport, own, cap_bytes, setup.optimizer, scaler)
        undo.callback(engine.close)
        engine.gradients.backward.refuses_unannounced = unannounced == "error"
        again = functools.partial(
            wrap_copy,
            algorithm=chosen,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            ignored_parameters=tuple(sorted(setup.ignored)),
            timeout=timeout,
            unannounced=unannounced,
        )
        _restore_copies(model, undo)
        replica = Replica(engine, model, setup.ignored, broadcast_buffers, group, again)
        replica.tuner = _tuner_of(engine, connect, replica)
        extend(model, replica)
        undo.callback(restore_class, model)
        if init_sync and not members:
            replica.broadcast_model(all_buffers=copies_at_once)
        engine.open(connect)
        if members:
            options["shared"] = [*sorted(members.shared), *(each.settings for each in members.samplers)]
            _enter(members, replica, setup.digest(options))
        undo.pop_all()
    return cast("WrappedModel[M]", model)


def _connector(group: Any, setup: SetUp, timeout: Any) -> tuple[Callable[[], Transport], Exception | None]:
    """Return the function that connects the ranks, and an error if `timeout` is invalid.

    Raises:
        ConfigError: The group is elastic, and the algorithm does not work in such a group.
    """
    if not getattr(group, "is_elastic", False):
        duration, longest, error = _timeouts(timeout, group, setup)
        return functools.partial(TorchTransport, group, setup.device, duration, longest), error
    if setup.error is None and setup.algorithm is not None:
        check_elastic(setup.algorithm, setup.scaler is not None)
    limit = timedelta(seconds=group.timeout_s) if timeout is None else as_timedelta(timeout, group, setup.device)
    return functools.partial(group.open, setup.device, limit.total_seconds()), None


def _enter(members: Any, replica: Replica, digest: str) -> None:
    """Wait for a view with this member, and receive the state of the job."""
    hand_over = HandOver(replica, members)
    hand_over.check()
    members.begin(hand_over, digest)
    replica.engine.session.enter(is_new=True)
    members.entered()


def _tuner_of(engine: Engine, connect: Callable[[], Transport], replica: Replica) -> Any:
    """Return the tuner for `auto`; None on a rank alone, unless it has one candidate, which it then uses."""
    auto = engine.algorithm
    if not isinstance(auto, Auto):
        return None
    if engine.comm.world_size == 1 and len(tuner().candidates_of(auto, engine.optimizer)) > 1:
        return None
    return tuner().Tuner(engine, auto, connect, replica.synchronize)


def _restore_copies(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Restore the class of modules that are copies of wrapped models and have not trained: `model` handles them now."""
    for module in model.modules():
        if isinstance(waiting := find(module), Copy):
            restore_class(module)
            undo.callback(extend, module, waiting)


def _warn_of_losses(algorithm: Algorithm, optimizer: Any, is_copy: bool) -> None:
    """Warn the caller of `wrap` if an algorithm of commlib learns much less with this optimizer, or is not measured.

    Without an optimizer, the worst result with any of them counts. A copy was preceded by its original.
    """
    if not type(algorithm).__module__.startswith("commlib."):
        return  # authors of other algorithms measure those themselves
    advice = "Check the loss"
    if optimizer is None:
        worst = None if is_copy else worst_measured(algorithm)
        if worst is None:
            return
        kind, advice = worst.optimizer, "Pass optimizer= to compare yours, check the loss"
    else:
        kind = optimizers.kind_of(optimizer)
    if (found := measured(algorithm, kind)) is None:
        reason = doubt(algorithm, kind)
    else:
        needs_rounds = isinstance(algorithm.channel, Weights)  # the loss depends on the number of rounds
        reason = f"{found}, measured by `{found.command}`" if found.loss > _WARNED_OF and not needs_rounds else ""
    if reason:
        text = (
            f"{algorithm.name}: {reason}. {advice}, or use an algorithm that matched all-reduce in these runs: "
            f"{', '.join(keeping_up(kind))}. Warnings of the class commlib.LossWarning can be ignored"
        )
        warnings.warn(text, LossWarning, stacklevel=3)


@overload
def unwrap(model: WrappedModel[M]) -> M: ...
@overload
def unwrap(model: M) -> M: ...
def unwrap(model: nn.Module) -> nn.Module:
    """Undo `wrap` and `shard`: remove every hook, end the communication, restore the class. Returns the same object.

    Every rank calls it. Results of pending background rounds are applied first. Gradients and parameters stay as they
    are. A copy of a wrapped model becomes an ordinary model. If `model` is the output of `torch.compile` on a wrapped
    model, the inner model is unwrapped.

    Raises:
        ConfigError: The model is neither wrapped nor sharded by `commlib.shard`.
    """
    if not unshard(inside_compiled(model)) or find(inside_compiled(model)) is not None:
        wrapped = wrapped_of(model)
        if isinstance(wrapped, Replica):
            wrapped.drain()
            wrapped.engine.close()
        restore_class(inside_compiled(model))
    closing.drain()
    return model


def stats(model: nn.Module) -> Stats:
    """Return the communication statistics of a wrapped model. Local. Prints as a table of its buckets.

    If the model is sharded by `commlib.shard` and not wrapped, `algorithm` is "shard", a step is a backward with
    reduced gradients, and bytes are those inside the shard group. Fields that do not apply are 0, None or empty. This
    includes every figure of a model that a trainer has not wrapped because there is one process.

    Raises:
        ConfigError: The model is neither wrapped nor sharded by `commlib.shard`.
    """
    wrapped, sharded = find(model), sharded_of(inside_compiled(model))
    of_shard = None if sharded is None else sharded.stats()
    if wrapped is None and sharded is not None and of_shard is not None:
        return statistics.of_sharded(of_shard, sharded.num_ranks, sharded.num_backwards)
    if isinstance(wrapped, Copy):
        group = torch.distributed.group.WORLD
        algorithm = cast("functools.partial[Any]", wrapped.again).keywords["algorithm"]
        return statistics.before_rounds(algorithm, 1 if group is None else group.size())
    if (name := _algorithm_alone(model)) is not None:
        return statistics.before_rounds(name, 1)
    return dataclasses.replace(statistics.collect(replica_of(model).engine), shard=of_shard)


def _algorithm_alone(model: nn.Module) -> str | None:
    """Return the algorithm of a model in `alone`, or of the output of `torch.compile` on one. None for all others."""
    is_wrapped = find(inside_compiled(model)) is not None
    return None if is_wrapped or not isinstance(model, nn.Module) else alone.get(getattr(model, "_orig_mod", model))


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the communication state of this rank: the algorithm's state, its phase, and the bucket plan.

    Save it with `model.state_dict()`, per rank. A run resumed from both is bit-identical to an uninterrupted one. If
    bucket plans are still being tried, the call ends the trials: from the next round on, all ranks keep that round's
    plan.

    Raises:
        ConfigError: The model is not wrapped.
    """
    replica = replica_of(model)
    replica.drain()
    tuned = {} if replica.tuner is None else {"auto": replica.tuner.state_dict()}
    return {**checkpoints.save(replica.engine), **tuned}


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the state that `state_dict` returned. Every rank loads its own, or any rank's if `Algorithm.portable`.

    May be called in the middle of training to return to an earlier state, on all ranks after the same step. Results of
    pending background rounds are dropped. The call is local, with two exceptions: it waits for background rounds, and
    with `auto` it connects the ranks for the chosen algorithm, so every rank must call it. The next forward in training
    mode checks that all ranks have loaded state of the same step, and raises `ConfigError` on every rank if not.

    Raises:
        ConfigError: The model is not wrapped. Or the state belongs to another algorithm or model, was saved with
            incompatible options, or, unless `Algorithm.portable`, belongs to another rank or world size. Nothing has
            changed in these cases, and training can continue.
    """
    replica = replica_of(model)
    if replica.tuner is not None and "auto" not in state:
        raise ConfigError(f"load_state_dict: the state is of {state.get('algorithm')!r}, not of 'auto'")
    if replica.tuner is not None and state.get("algorithm") not in (None, replica.engine.algorithm.name):
        if not state.get("auto"):
            raise ConfigError(f"load_state_dict: the state is of {state['algorithm']!r}, not of 'auto'")
        replica.tuner.adopt(str(state["algorithm"]), state["auto"])
    checkpoints.load(replica.engine, dict(state))


def synchronize(model: nn.Module, optimizer: bool = False) -> None:
    """Give all ranks the same model: the consensus of the replicas. Collective.

    Results of pending background rounds are applied first. Algorithms on gradients keep replicas identical, so only
    buffers are copied. With all other algorithms, the parameters become their mean over the ranks. Ranks that hold
    shards of one model have no parameters in common. If the model is sharded by `commlib.shard` and not wrapped, only
    buffers are copied, from the first rank of its mesh. If a trainer has not wrapped the model because there is one
    process, nothing happens.

    Args:
        model: A wrapped model, or one sharded by `commlib.shard`.
        optimizer: Whether to synchronise the state of the optimizer given to `wrap` as well: floating-point tensors
            become their mean, and counters (numbers, tensors of one element or of integers) are copied from rank 0.

    Raises:
        ConfigError: The model is not wrapped. Or `optimizer` is True and no optimizer was given to `wrap`, or the
            ranks' states differ in parameters or shapes.
        TransportError: A rank did not take part.
    """
    sharded = sharded_of(inside_compiled(model))
    if sharded is not None and find(model) is None:
        sharded.copy_buffers(model)
        return
    if _algorithm_alone(model) is not None:
        return
    replica_of(model).synchronize(optimizer)
    if sharded is not None:
        sharded.weights_changed()


def set_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
    """Count the steps of another optimizer than the one given to `wrap`, from the next step on. Collective.

    Every rank calls it between two steps, with an optimizer of the same class. Completed steps stay counted, so
    warm-ups and periods continue. State that the algorithm keeps of gradients or weights (residuals, anchors, momentum)
    is kept. The old optimizer's state is not transferred: copy it with `load_state_dict` first if the new optimizer is
    to continue from it. Pending background rounds are waited for, and the results of asynchronous ones are dropped.
    Models of algorithms that run without rounds are synchronised, as by `synchronize`.

    Args:
        model: A wrapped model.
        optimizer: As in `wrap`: an optimizer, a proxy of one, or a sequence of those.

    Raises:
        ConfigError: The model is not wrapped. Or, on every rank: the algorithm cannot continue with the optimizer, or
            its class differs between ranks. The steps of the old one are then still counted.
        CommlibError: The communication has ended.
    """
    replica = replica_of(model)
    engine = replica.engine
    engine.session.refuse_if_elastic("commlib.set_optimizer")
    engine.check()
    found, error = None, None
    try:
        found = optimizers.resolve(optimizer)
        if found is None:
            raise ConfigError("set_optimizer: expected an optimizer, got None")
        check_optimizer(engine.algorithm, found, engine.parameters, engine.counter.is_warming_up)
    except Exception as caught:
        error = caught
    verify.agree(engine.transport, lambda: [("optimizer", optimizers.names_of(found))], error, "set_optimizer")
    replica.drain()
    engine.set_optimizer(found)


@torch._disable_dynamo  # a compiled graph would omit the call
def expect_backward(model: nn.Module) -> None:
    """Mark the next backward as a synchronised one, wherever it starts.

    Needed for a backward that no output of `model(...)` announces: one inside of `forward`, of submodules called
    directly, of `model.module`, or of losses kept elsewhere. Call it on all ranks before that backward. Inside
    `no_sync()`, the backward stays local. The call also does the work of a forward, such as including unfrozen
    parameters.

    Raises:
        ConfigError: The model is not wrapped or has changed since, or gradients are not enabled.
        CommlibError: The communication has ended.
    """
    if not torch.is_grad_enabled():
        raise ConfigError("expect_backward: gradients are not enabled here, so there will be no backward")
    wrapped = wrapped_of(model)
    (wrapped.join_ranks() if isinstance(wrapped, Copy) else wrapped).expect_backward()


def _timeouts(timeout: Any, group: Any, setup: SetUp) -> tuple[timedelta, timedelta, Exception | None]:
    """Return the timeout of collectives, the timeout of the set-up, and an error if `timeout` is invalid.

    All ranks raise the error together, so the group's timeout is used until then.
    """
    longest = as_timedelta(None, group, setup.device)
    try:
        duration = as_timedelta(timeout, group, setup.device)
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        return longest, longest, ConfigError(f"timeout={timeout!r}: {error}")
    return duration, max(duration, longest), None


def wrap_copy(model: nn.Module, algorithm: Algorithm, **options: Any) -> None:
    """Wrap a copy of a wrapped model, with the options of the original. Collective.

    Raises:
        ConfigError: The algorithm needs an optimizer, and copies have none.
    """
    if algorithm.channel.needs_optimizer:
        raise ConfigError(
            f"this {type(model).__name__} is a copy of a model wrapped with {algorithm.name!r}, which needs "
            "the optimizer of the copy. Call commlib.wrap(copy, ..., optimizer=...) to train it on all ranks, or "
            "commlib.unwrap(copy) to train it on this rank alone"
        )
    wrap(model, algorithm, init_sync=False, **options)
