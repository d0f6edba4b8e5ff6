"""A model in training on virtual clocks: the engine's own rounds, driven by a computation that only takes time."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients, Weights
from commlib.algorithms.context import BucketView, Context
from commlib.engine.buckets.bucket import Bucket
from commlib.engine.channel import OpenChannel, Settings
from commlib.engine.gradients.round import GradientRound
from commlib.engine.opening import open_second_channel
from commlib.engine.planning import plan as plans
from commlib.engine.planning.plan import Parameter, Plan
from commlib.engine.planning.sizes import INITIAL_CAP_BYTES
from commlib.engine.rounds.schedule import StepCounter
from commlib.engine.rounds.task import Task
from commlib.engine.session import Session
from commlib.network.model import DTYPES, Device, Network, Workload
from commlib.simulation.clock import VirtualDriver
from commlib.simulation.collectives import NCCL, Links, TransportProfile
from commlib.simulation.computation import Computation
from commlib.simulation.exchanges import Exchanges
from commlib.simulation.meter import Meter
from commlib.simulation.roles import Chorus, RoleLinks, Roles, find_roles
from commlib.simulation.sharded import META, ShardedModel, Sharding
from commlib.simulation.sharded_computation import ShardedComputation
from commlib.transport.simulated import SimulatedTransport

_OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW}


@dataclass(frozen=True)
class Options:
    """Options of a simulation.

    Attributes:
        steps: Number of steps after the warm-up. At least 16 whole periods run if periods have several steps or rounds
            vary.
        bucket_cap_mb: Size of a bucket, MiB. None uses the transport's, or else plans as the engine does.
        stragglers: Factor on the compute time of individual ranks, by rank.
        jitter: Standard deviation of the logarithm of each rank's and step's compute time.
        seed: Seed of the jitter.
        transport: The communication library.
        traced: Ranks whose spans are recorded.
        sharding: How FSDP2 and `commlib.shard` shard the model; None: every rank has all of it.
    """

    steps: int = 20
    bucket_cap_mb: float | None = None
    stragglers: Mapping[int, float] | None = None
    jitter: float = 0.0
    seed: int = 0
    transport: TransportProfile = NCCL
    traced: tuple[int, ...] = (0,)
    sharding: Sharding | None = None

    @property
    def cap_bytes(self) -> int | None:
        """Size of a bucket in bytes, or None if not given."""
        cap_mb = self.bucket_cap_mb or self.transport.bucket_cap_mb
        return None if cap_mb is None else int(cap_mb * 2**20)

    @property
    def has_clocks_of_ranks(self) -> bool:
        """Whether each rank has its own clock, because compute times differ between ranks."""
        return bool(self.stragglers or self.jitter)

    def pace(self, world_size: int, num_roles: int = 1) -> np.ndarray:
        """Return the factor on the compute time of each rank, or of each role if ranks have no clocks of their own."""
        if not self.has_clocks_of_ranks:
            return np.ones(num_roles)
        pace = np.ones(world_size)
        for rank, factor in (self.stragglers or {}).items():
            pace[rank] = factor
        return pace


class Training:
    """A wrapped model without the model. The algorithm has one object per role ([Note: roles] in `roles.py`).

    Args:
        workload: The trained workload.
        network: The network of the ranks.
        device: The device of each rank.
        prototype: The algorithm; copied.
        options: Options of the simulation.
        plan: The buckets of gradients; None uses buckets of a fixed size, if gradients are synchronised.
        roles: The ranks with algorithm objects; None for rank 0 only.
        sharded: The sharded model, if the workload and the network are those of its shards.

    Attributes:
        driver: The virtual clocks.
        counter: Counts the steps.
        computed_s: [num_clocks] Total time of the computation without communication.
        num_buckets: Number of buckets of a round.
        is_alone: Whether the world size is 1.
    """

    def __init__(
        self,
        workload: Workload,
        network: Network,
        device: Device,
        prototype: Algorithm,
        options: Options,
        plan: Plan | None = None,
        roles: Roles | None = None,
        sharded: ShardedModel | None = None,
    ) -> None:
        self._workload = workload
        roles = roles or Roles.one(network.world_size)
        self._warm_up = AllReduce()
        self._jitter = options.jitter
        self._rng = np.random.default_rng(options.seed)
        self._pace = options.pace(network.world_size, len(roles.ranks))
        self._has_clock_of_rank = options.has_clocks_of_ranks
        self.counter = StepCounter(prototype.channel)
        self.computed_s = np.zeros_like(self._pace)
        self.meter = Meter(device, len(roles.ranks))
        self._algorithm = _object_of(prototype, network, roles, self.meter)
        islands = None if sharded is None else sharded.islands
        links = RoleLinks(network, options.transport, device, roles, islands, each_rank=options.has_clocks_of_ranks)
        self.driver = VirtualDriver(links, self.meter, device, self._pace, options.traced, roles)
        self._computation = (
            Computation(workload, self.driver)
            if sharded is None
            else ShardedComputation(sharded, self.driver, device, self.meter)
        )
        self.session = session_on(network, self.driver, prototype)
        self._num_rounds = 0
        self._parameters = parameters_of(workload, prototype)
        self._gradients = [torch.empty_like(parameter.param) for parameter in self._parameters]
        self._ready_s = workload.ready_s()
        self._buckets: list[Bucket] = []
        self.is_alone = network.world_size == 1
        is_alone = self.is_alone and prototype.channel.rests_alone
        self._optimizer = self._make_optimizer(prototype, device)
        if self.counter.ever_syncs_gradients and not is_alone:
            plan = plan or plans.fixed(self._parameters, options.cap_bytes or INITIAL_CAP_BYTES, self._ready_s)
            self._make_buckets(plan)
        settings = Settings(options.cap_bytes, self._optimizer)
        self._second_channel = self._open_second_channel(network, settings)
        self.meter.take()

    def _make_optimizer(self, prototype: Algorithm, device: Device) -> torch.optim.Optimizer:
        """Create the optimizer, with state if the algorithm reads it. The state is not the algorithm's memory."""
        kind: Any = prototype.optimizer_type or _OPTIMIZERS[self._workload.optimizer]
        optimizer = kind([parameter.param for parameter in self._parameters], lr=1e-3)
        if prototype.channel.reads_state:
            self._receive_gradients()
            with Meter(device).active():  # its count is discarded; it handles operations faster than torch
                optimizer.step()
        return optimizer

    def _make_buckets(self, plan: Plan) -> None:
        buckets = plans.build(plan, self._parameters, plans.make_slots(self._parameters))
        self._buckets = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        self._bucket_ready_s = [max(self._ready_s[idx] for idx in members) for members in plan.buckets]
        context = Context(self.session.comm, self._buckets, META, self._optimizer)
        with self.meter.active():
            self._warm_up.setup(context)
            if isinstance(self._algorithm.channel, Gradients):
                self._algorithm.setup(context)

    def _open_second_channel(self, network: Network, settings: Settings) -> OpenChannel | Exchanges | None:
        connect = lambda: transport_on(network)  # noqa: E731
        with self.meter.active():
            if not self._algorithm.channel.has_rounds:
                parameters = [parameter.param for parameter in self._parameters]
                return Exchanges(self._algorithm, parameters, connect(), self.driver, self.meter, self.counter)
            return open_second_channel(self._algorithm, self._parameters, self.counter, self.session, settings, connect)

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self.weight_buckets or self._buckets)

    @property
    def weight_buckets(self) -> Sequence[Bucket]:
        """Buckets of rounds over weights or state."""
        return self._second_channel.buckets if isinstance(self._second_channel, OpenChannel) else ()

    @property
    def num_taken(self) -> int:
        """Number of completed exchanges of an algorithm without rounds."""
        return self._second_channel.num_taken if isinstance(self._second_channel, Exchanges) else 0

    @property
    def context(self) -> Context:
        """Context of the algorithm, with its buckets."""
        return Context(self.session.comm, self.weight_buckets or self._buckets, META, self._optimizer)

    def time_s(self, clocks_s: np.ndarray) -> float:
        """Return a single time for a vector of clocks: the maximum over roles, or the mean over ranks."""
        return float(clocks_s.mean() if self._has_clock_of_rank else clocks_s.max())

    @property
    def bytes_sent(self) -> float:
        """Bytes sent by a rank so far."""
        of_rounds = self.session.transport.bytes_sent + self._computation.bytes_sent
        return of_rounds + (self._second_channel.bytes_sent if self._second_channel else 0.0)

    def skip_to(self, step: int) -> None:
        """Continue at a later step, as if each skipped step had had a round. No effect if it is the next step."""
        if step > self.counter.step:
            self.counter.step = self._num_rounds = step

    def step(self) -> None:
        """Run one training step."""
        pace = self._pace
        if self._jitter:
            pace = pace * self._rng.lognormal(0.0, self._jitter, len(pace))
        workload, driver = self._workload, self.driver
        self.computed_s = self.computed_s + workload.step_s * pace
        with self.meter.active():  # also in forward, because background rounds run concurrently
            self._computation.forward(pace)
            if self._buckets and self.counter.syncs_gradients:
                self._backward(pace)
            else:
                self._computation.end_backward(pace)
            if self._second_channel is not None:
                self._second_channel.begin_step()
            driver.compute(workload.optimizer_s * pace, "optimizer")
            self.counter.end_step()
            if self._second_channel is not None:
                self._second_channel.end_step()
                driver.flush("rounds at the step's end")

    def _backward(self, pace: np.ndarray) -> None:
        """Compute backward, and communicate each bucket when its last gradient is ready."""
        algorithm = self._warm_up if self.counter.is_warming_up else self._algorithm
        comm = self.session.comm
        self._receive_gradients()
        for bucket in self._buckets:
            bucket.start_backward(algorithm.predivisor(comm))
        comm.step, comm.optimizer_step = self._num_rounds, self.counter.step
        round_ = GradientRound(self._buckets, algorithm, self.session)
        for ready_s, bucket in sorted(zip(self._bucket_ready_s, self._buckets, strict=True), key=lambda pair: pair[0]):
            self._computation.backward(pace, ready_s)
            bucket.num_pending = 0
            round_.launch(bucket)
        self._computation.end_backward(pace)
        round_.flush()
        round_.wait()
        round_.publish()
        self._num_rounds += 1

    def _receive_gradients(self) -> None:
        """Set the gradient of every parameter, as backward does after `zero_grad`."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.param.grad = gradient


def time_round(
    network: Network, device: Device, prototype: Algorithm, options: Options, buckets: Sequence[BucketView]
) -> tuple[float, float]:
    """Return the seconds of one round on idle links over buckets that are ready at once, and a rank's bytes sent."""
    algorithm = copy.deepcopy(prototype)
    channel = algorithm.channel
    assert isinstance(channel, Gradients | Weights)
    meter = Meter(device)
    links, roles = Links(network, options.transport, device), Roles.one(network.world_size)
    driver = VirtualDriver(links, meter, device, np.ones(1), (), roles)
    session = session_on(network, driver, prototype)
    with meter.active():
        algorithm.setup(Context(session.comm, buckets, META))
        meter.take()
        tasks = [Task(str, lambda bucket=bucket: algorithm.communicate(bucket, session.comm)) for bucket in buckets]
        driver.run(session.transport, tasks, channel.window)
    return float(driver.now_s[0]), session.transport.bytes_sent


def roles_in(training: Training, network: Network, device: Device, prototype: Algorithm, options: Options) -> Roles:
    """Return the ranks with distinct roles for the buckets of a training."""
    return find_roles(network, Links(network, options.transport, device), device, prototype, training.context)


def _object_of(prototype: Algorithm, network: Network, roles: Roles, meter: Meter) -> Algorithm:
    """Return the algorithm object: rank 0's own, or the combination of several roles."""
    return copy.deepcopy(prototype) if roles.ranks == (0,) else Chorus(prototype, network, roles, meter)


def session_on(network: Network, driver: VirtualDriver, algorithm: Algorithm) -> Session:
    """Return the session for rank 0's rounds on a simulated network, as the engine creates it for an algorithm."""
    return Session(transport_on(network), driver, wants_nodes=algorithm.channel.wants_nodes)


def transport_on(network: Network) -> SimulatedTransport:
    """Return rank 0's view of the group."""
    return SimulatedTransport(0, network.world_size, network.gpus_per_node)


def parameters_of(workload: Workload, algorithm: Algorithm) -> list[Parameter]:
    """Return the workload's parameters on the meta device, grouped by the algorithm."""
    dtype = DTYPES[workload.dtype]
    found = []
    for name, shape in workload.parameters():
        param = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=META))
        found.append(Parameter(name, param, sparse=False, group=algorithm.group(name, param)))
    return found
