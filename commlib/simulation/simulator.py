"""Simulation of training steps on a network with the algorithms used in training (docs/explanation/simulator.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from commlib import algorithms
from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Channel
from commlib.engine.planning import plan as plans
from commlib.engine.planning.cost import SCRATCH_SIZES, as_square, scratch_buckets
from commlib.engine.planning.plan import Plan
from commlib.engine.planning.sizes import BucketTimes
from commlib.errors import CommlibError, ConfigError
from commlib.network.model import Device, Network, Workload
from commlib.simulation import asynchronous
from commlib.simulation.clock import Span
from commlib.simulation.roles import Roles
from commlib.simulation.sharded import ShardedModel, training_bytes
from commlib.simulation.training import META, Options, Training, parameters_of, roles_in, time_round

#: Number of simulated steps of a warm-up, whose steps are identical.
_WARM_UP_STEPS = 2
#: Minimum number of simulated periods if periods can differ: those of several steps, and rounds that vary.
_LEAST_PERIODS = 16
#: Number of steps within which an algorithm without rounds must reach its third exchange.
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class Result:
    """The result of a simulation. Times and bytes are means per step and rank after the warm-up.

    Attributes:
        algorithm: Name of the algorithm.
        network: Name of the network.
        workload: Name of the workload.
        world_size: Number of ranks.
        step_s: Seconds of a step.
        compute_s: Seconds of a step without communication, including stragglers and jitter.
        exposed_s: `step_s - compute_s`: waiting, and the slowdown of the computation by communication.
        waited_s: Seconds in which the computation waited for communication.
        wire_bytes: Bytes that a rank sends, by the verbs' optimal formulas (as in `commlib.stats`).
        adapter_bytes: Bytes that leave a node through its adapter.
        memory_bytes: Memory of the algorithm on a rank, in addition to parameters, gradients and optimizer state.
        samples_per_s: Samples per second over all ranks.
        num_buckets: Number of buckets of the plan.
        steps_s: Seconds of the simulated steps after the warm-up, mean over the ranks.
        phases: Seconds of a step, by phase: "warm-up" (if there is one) and "steady".
        spans: Spans of the traced ranks from the first step on. For asynchronous algorithms on ranks that differ, the
            spans and the seconds of the warm-up are those on identical ranks.
        total_bytes: Memory of parameters, gradients, optimizer state, sharding and algorithm on a rank, without
            activations.
    """

    algorithm: str
    network: str
    workload: str
    world_size: int
    step_s: float
    compute_s: float
    exposed_s: float
    waited_s: float
    wire_bytes: float
    adapter_bytes: float
    memory_bytes: int
    samples_per_s: float
    num_buckets: int
    steps_s: tuple[float, ...]
    phases: Mapping[str, float]
    spans: Sequence[Span]
    total_bytes: int = 0


def simulate(
    workload: Workload,
    network: Network,
    device: Device,
    algorithm: str | Algorithm = "allreduce",
    options: Options | None = None,
) -> Result:
    """Simulate training steps.

    The algorithm's `setup` and `communicate` run on meta tensors, with one object for all ranks that do the same; see
    docs/explanation/simulator.md.

    Args:
        workload: The trained workload.
        network: The network of the ranks.
        device: The device of each rank.
        algorithm: A registered name or an instance, which is copied.
        options: Options of the simulation.

    Raises:
        ConfigError: An option is invalid, or the algorithm cannot be simulated.
    """
    options = options or Options()
    _check(options, network)
    prototype = algorithms.create(algorithm)
    try:
        if options.sharding is not None:
            sharded = ShardedModel(workload, network, options.sharding)
            return _simulate(sharded.shard, sharded.islands.replicas, device, prototype, options, sharded)
        if not prototype.channel.keeps_step and options.has_clocks_of_ranks:
            return _apart(workload, network, device, prototype, options)
        return _simulate(workload, network, device, prototype, options)
    except CommlibError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"simulate: {prototype.name} failed on meta tensors, whose values cannot be read: {error}"
        ) from error


def _simulate(
    workload: Workload,
    network: Network,
    device: Device,
    prototype: Algorithm,
    options: Options,
    sharded: ShardedModel | None = None,
) -> Result:
    """Simulate ranks in step; for a sharded model, those that hold the same shard."""
    roles = _roles(workload, network, device, prototype, options)
    plan = _plan(workload, network, device, prototype, options, roles, sharded)
    training = Training(workload, network, device, prototype, options, plan, roles, sharded)
    result = _measure(training, workload, network, prototype, options)
    if sharded is None:
        return result
    num_shards = sharded.sharding.ranks
    return replace(
        result,
        world_size=result.world_size * num_shards,
        samples_per_s=result.samples_per_s * num_shards,
        total_bytes=result.total_bytes + sharded.memory_bytes,
    )


def _roles(workload: Workload, network: Network, device: Device, prototype: Algorithm, options: Options) -> Roles:
    if not prototype.channel.has_rounds or network.world_size == 1:
        return Roles.one(network.world_size)
    training = Training(workload, network, device, prototype, replace(options, traced=()))
    return roles_in(training, network, device, prototype, options)


def _check(options: Options, network: Network) -> None:
    if options.steps < 1 or options.jitter < 0 or (options.bucket_cap_mb is not None and not options.bucket_cap_mb > 0):
        raise ConfigError(
            "simulate: expected steps of 1 or more, jitter of 0 or more and bucket_cap_mb above 0 or None, got "
            f"steps={options.steps}, jitter={options.jitter}, bucket_cap_mb={options.bucket_cap_mb}"
        )
    ranks = {*(options.stragglers or {}), *options.traced}
    if any(not 0 <= rank < network.world_size for rank in ranks):
        raise ConfigError(f"simulate: expected ranks 0..{network.world_size - 1}, got {sorted(ranks)}")
    if options.sharding is not None and options.has_clocks_of_ranks:
        raise ConfigError("simulate: stragglers and jitter are not simulated for sharded models")
    if any(not factor > 0 for factor in (options.stragglers or {}).values()):
        raise ConfigError(f"simulate: expected factors above 0, got stragglers={dict(options.stragglers or {})}")


# --- steps ------------------------------------------------------------------------------------------------------------


def _measure(
    training: Training, workload: Workload, network: Network, prototype: Algorithm, options: Options
) -> Result:
    """Simulate a few steps of the warm-up, two transient periods, and the measured steps.

    A round of the first period, which may differ from the others, may last into the second.
    """
    channel, driver = prototype.channel, training.driver
    num_warm_up = min(channel.warmup_steps, _WARM_UP_STEPS)
    training.counter.step = channel.warmup_steps - num_warm_up
    phases = {}
    if num_warm_up:
        for _ in range(num_warm_up):
            training.step()
        phases["warm-up"] = training.time_s(driver.now_s) / num_warm_up
    training.skip_to(channel.steady_step)
    cycle = _get_going(training, channel)
    begin = _Totals.of(training)
    ends_s = [training.time_s(begin.now_s)]
    count = cycle * max(math.ceil(options.steps / cycle), _LEAST_PERIODS if channel.is_sampled or cycle > 1 else 1)
    for _ in range(count):
        training.step()
        ends_s.append(training.time_s(driver.now_s))
    end = _Totals.of(training)
    clocks_s = (end.now_s - begin.now_s) / count
    step_s = training.time_s(clocks_s)
    compute_s = float((end.computed_s - begin.computed_s).mean()) / count
    phases["steady"] = step_s
    per_rank_s = clocks_s if options.has_clocks_of_ranks else np.full(network.world_size, step_s)
    return Result(
        algorithm=prototype.name,
        network=network.name,
        workload=workload.name,
        world_size=network.world_size,
        step_s=step_s,
        compute_s=compute_s,
        exposed_s=step_s - compute_s,
        waited_s=float((end.waited_s - begin.waited_s).mean()) / count,
        wire_bytes=(end.bytes_sent - begin.bytes_sent) / count,
        adapter_bytes=(end.adapter_bytes - begin.adapter_bytes) / count,
        memory_bytes=training.meter.allocated_bytes,
        total_bytes=training.meter.allocated_bytes + training_bytes(workload),
        samples_per_s=float((workload.batch_per_rank / per_rank_s).sum()),
        num_buckets=training.num_buckets,
        steps_s=tuple(b - a for a, b in itertools.pairwise(ends_s)),
        phases=phases,
        spans=driver.spans,
    )


def _get_going(training: Training, channel: Channel) -> int:
    """Run steps until all periods are identical. Return the number of steps in a period."""
    if channel.has_rounds or training.is_alone:
        for _ in range(2 * channel.cycle):
            training.step()
        return channel.cycle
    taken_at: list[int] = []  # step numbers at which exchanges were taken; exchanges have no fixed duration
    for number in range(_MOST_STEPS):
        before = training.num_taken
        training.step()
        if training.num_taken > before:
            taken_at.append(number)
        if len(taken_at) == 3:
            return taken_at[2] - taken_at[1]
    raise ConfigError(f"simulate: three exchanges take more than {_MOST_STEPS} steps")


def _apart(workload: Workload, network: Network, device: Device, prototype: Algorithm, options: Options) -> Result:
    """Simulate an asynchronous algorithm on ranks that differ, each with its own clock (asynchronous.py)."""
    pace = options.pace(network.world_size)
    steady = replace(options, stragglers=None, jitter=0.0)
    training = Training(workload, network, device, prototype, steady)
    base = _measure(training, workload, network, prototype, steady)
    rng = np.random.default_rng(options.seed)
    steps_s = workload.step_s * pace[:, None] * rng.lognormal(0.0, options.jitter, (len(pace), options.steps))
    if not prototype.channel.has_rounds:  # no rank waits for another; each pays for its exchanges at its own pace
        ends_s = np.cumsum(steps_s + base.exposed_s * pace[:, None], axis=1)
        return _mean_of(base, workload, steps_s, ends_s, base.wire_bytes)
    round_s, round_bytes = time_round(network, device, prototype, steady, training.weight_buckets)
    overhead_s = base.exposed_s * round_bytes / base.wire_bytes if base.wire_bytes else 0.0
    outcome = asynchronous.run(prototype.channel, steps_s, round_s, overhead_s * pace)
    return _mean_of(base, workload, steps_s, outcome.ends_s, outcome.rounds_per_step * round_bytes)


def _mean_of(base: Result, workload: Workload, steps_s: np.ndarray, ends_s: np.ndarray, wire_bytes: float) -> Result:
    """Return the result of ranks with the given compute times and ends of steps, both [world_size, num_steps]."""
    step_s = ends_s[:, -1] / steps_s.shape[1]
    steady_s = float(step_s.mean())
    mean_ends_s = [0.0, *ends_s.mean(axis=0)]
    return replace(
        base,
        step_s=steady_s,
        compute_s=float(steps_s.mean()),
        exposed_s=steady_s - float(steps_s.mean()),
        waited_s=0.0,
        wire_bytes=wire_bytes,
        adapter_bytes=base.adapter_bytes * wire_bytes / base.wire_bytes if base.wire_bytes else 0.0,
        samples_per_s=float((workload.batch_per_rank / step_s).sum()),
        steps_s=tuple(float(b - a) for a, b in itertools.pairwise(mean_ends_s)),
        phases={**base.phases, "steady": steady_s},
    )


@dataclass(frozen=True)
class _Totals:
    """Totals up to a moment."""

    now_s: np.ndarray
    computed_s: np.ndarray
    waited_s: np.ndarray
    bytes_sent: float
    adapter_bytes: float

    @classmethod
    def of(cls, training: Training) -> _Totals:
        driver = training.driver
        return cls(driver.now_s, training.computed_s, driver.waited_s, training.bytes_sent, driver.adapter_bytes)


# --- plans ------------------------------------------------------------------------------------------------------------


def _plan(
    workload: Workload,
    network: Network,
    device: Device,
    prototype: Algorithm,
    options: Options,
    roles: Roles,
    sharded: ShardedModel | None,
) -> Plan | None:
    """Choose buckets like the engine: by size if one is given, otherwise the fastest of its candidates.

    None if gradients are synchronised in the warm-up only.
    """
    if not prototype.channel.syncs_gradients(prototype.channel.warmup_steps):
        return None
    parameters, ready_s = parameters_of(workload, prototype), workload.ready_s()
    if options.cap_bytes is not None:
        return plans.fixed(parameters, options.cap_bytes, ready_s)
    steady = replace(options, stragglers=None, jitter=0.0, traced=())
    cost = _cost(network, device, prototype, steady, plans.main_group(parameters))
    found = plans.candidates(parameters, ready_s, workload.backward_s, cost)

    def seconds(plan: Plan) -> float:
        training = Training(workload, network, device, prototype, steady, plan, roles, sharded)
        training.counter.step = prototype.channel.warmup_steps
        training.skip_to(prototype.channel.steady_step)
        for _ in range(prototype.channel.cycle):
            training.step()
        return training.time_s(training.driver.now_s)

    return min(found, key=seconds)


def _cost(network: Network, device: Device, prototype: Algorithm, options: Options, group: Hashable) -> BucketTimes:
    """Return the cost of a bucket from scratch buckets, as in `engine.planning.cost.measure_cost`."""
    samples = []
    for nbytes, count in SCRATCH_SIZES:
        buckets = scratch_buckets(count, as_square(nbytes), META, group)
        seconds, _ = time_round(network, device, prototype, options, buckets)
        samples.append((nbytes, seconds / count))
    return BucketTimes(tuple(samples))
