"""One model in training on virtual clocks: the engine's own rounds, driven by a computation that only takes time."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import Algorithm, BucketView, Context
from commlib.engine import plan as plans
from commlib.engine.bucket import Bucket
from commlib.engine.gradient_round import GradientRound
from commlib.engine.plan import Parameter, Plan
from commlib.engine.planner import INITIAL_CAP_BYTES
from commlib.engine.policy import Schedule
from commlib.engine.scheduler import Round, Task
from commlib.engine.weights import WeightRounds
from commlib.network.model import DTYPES, Device, Network, Workload
from commlib.simulation.clock import VirtualDriver
from commlib.simulation.collectives import NCCL, Links, TransportProfile
from commlib.simulation.meter import Meter
from commlib.transport.base import Communicator
from commlib.transport.simulated import SimulatedTransport

META = torch.device("meta")

_OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW}


@dataclass(frozen=True)
class Options:
    """How a simulation is made.

    Attributes:
        steps: Steps after the warm-up; 16 whole periods or more where those have several steps, or rounds vary.
        bucket_cap_mb: Size of a bucket in MiB. None takes the transport's, or else plans as the engine does.
        stragglers: How many times longer ranks compute than the others, by rank.
        jitter: Standard deviation of the logarithm of each rank's and step's compute time.
        seed: Of the jitter.
        transport: How collectives are carried out.
        traced: Ranks whose spans are kept.
    """

    steps: int = 20
    bucket_cap_mb: float | None = None
    stragglers: Mapping[int, float] | None = None
    jitter: float = 0.0
    seed: int = 0
    transport: TransportProfile = NCCL
    traced: tuple[int, ...] = (0,)

    @property
    def cap_bytes(self) -> int | None:
        """The size of a bucket in bytes, if it is given."""
        cap_mb = self.bucket_cap_mb or self.transport.bucket_cap_mb
        return None if cap_mb is None else int(cap_mb * 2**20)

    def pace(self, world_size: int) -> np.ndarray:
        """Return how many times longer each rank computes; one number where all are alike at all times."""
        if not self.stragglers and not self.jitter:
            return np.ones(1)
        pace = np.ones(world_size)
        for rank, factor in (self.stragglers or {}).items():
            pace[rank] = factor
        return pace


class Training:
    """A wrapped model, without the model. One algorithm object stands for those of all ranks.

    Args:
        workload: What is trained.
        network: What connects the ranks.
        device: What each rank computes with.
        prototype: The algorithm; copied.
        options: How the simulation is made.
        plan: The buckets of gradients; None where there are none, or none is chosen.

    Attributes:
        driver: The clocks.
        schedule: Which step it is.
        computed_s: [num_clocks] What the computation has taken by itself.
        num_buckets: Of a round.
    """

    def __init__(
        self,
        workload: Workload,
        network: Network,
        device: Device,
        prototype: Algorithm,
        options: Options,
        plan: Plan | None = None,
    ) -> None:
        self._workload = workload
        self._algorithm = copy.deepcopy(prototype)
        self._warm_up = AllReduce()
        self._jitter = options.jitter
        self._rng = np.random.default_rng(options.seed)
        self._pace = options.pace(network.world_size)
        self.schedule = Schedule(prototype.traits)
        self.computed_s = np.zeros_like(self._pace)
        self.meter = Meter(device)
        links = Links(network, options.transport, device)
        self.driver = VirtualDriver(links, self.meter, device, self._pace, options.traced)
        self.comm, self.transport = connect(network, prototype)
        self._num_rounds = 0
        self._parameters = parameters_of(workload, prototype)
        self._gradients = [torch.empty_like(parameter.param) for parameter in self._parameters]
        self._ready_s = workload.ready_s()
        self._buckets: list[Bucket] = []
        self._weights: WeightRounds | None = None
        is_alone = network.world_size == 1 and prototype.traits.idle_alone
        self._optimizer = self._make_optimizer(device)
        if self.schedule.ever_gradients and not is_alone:
            plan = plan or plans.fixed(self._parameters, options.cap_bytes or INITIAL_CAP_BYTES, self._ready_s)
            self._make_buckets(plan)
        if not prototype.traits.on_gradients:
            self._follow_optimizer(network, prototype, options.cap_bytes or INITIAL_CAP_BYTES)
        self.meter.take()

    def _make_optimizer(self, device: Device) -> torch.optim.Optimizer:
        """Make the optimizer, with its state where the algorithm uses that: it is not the algorithm's memory."""
        kind: Any = self._algorithm.optimizer_type or _OPTIMIZERS[self._workload.optimizer]
        optimizer = kind([parameter.param for parameter in self._parameters], lr=1e-3)
        if self._algorithm.traits.needs_optimizer or self._algorithm.traits.tensors.startswith("state:"):
            self._receive_gradients()
            with Meter(device).active():  # of whose count nothing is used; it knows operations faster than torch
                optimizer.step()
        return optimizer

    def _make_buckets(self, plan: Plan) -> None:
        buckets = plans.build(plan, self._parameters, plans.make_slots(self._parameters))
        self._buckets = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        self._bucket_ready_s = [max(self._ready_s[idx] for idx in members) for members in plan.buckets]
        context = Context(self.comm, self._buckets, META, self._optimizer)
        with self.meter.active():
            self._warm_up.setup(context)
            if self._algorithm.traits.on_gradients:
                self._algorithm.setup(context)

    def _follow_optimizer(self, network: Network, prototype: Algorithm, cap_bytes: int) -> None:
        _, transport = connect(network, prototype)
        with self.meter.active():
            self._weights = WeightRounds(
                self._parameters, self._algorithm, self.schedule, transport, self.driver, self._optimizer, cap_bytes
            )

    @property
    def num_buckets(self) -> int:
        """How many buckets there are."""
        return len(self._weights.buckets if self._weights else self._buckets)

    @property
    def weight_buckets(self) -> Sequence[Bucket]:
        """The buckets of rounds over weights or state."""
        return self._weights.buckets if self._weights else ()

    @property
    def bytes_sent(self) -> float:
        """Bytes that a rank has sent so far."""
        return self.transport.bytes_sent + (self._weights.bytes_sent if self._weights else 0.0)

    def step(self) -> None:
        """Make one training step."""
        pace = self._pace
        if self._jitter:
            pace = pace * self._rng.lognormal(0.0, self._jitter, len(pace))
        workload, driver = self._workload, self.driver
        self.computed_s = self.computed_s + workload.step_s * pace
        driver.compute(workload.forward_s * pace, "forward")
        if self._buckets and self.schedule.gradients:
            with self.meter.active():
                self._backward(pace)
        else:
            driver.compute(workload.backward_s * pace, "backward")
        if self._weights is not None:
            with self.meter.active():
                self._weights.begin_step()
                driver.compute(workload.optimizer_s * pace, "optimizer")
                self._weights.end_step()
                driver.flush("rounds at the step's end")
        else:
            driver.compute(workload.optimizer_s * pace, "optimizer")
            self.schedule.end_step()

    def _backward(self, pace: np.ndarray) -> None:
        """Compute backward, and communicate each bucket when its last gradient is ready."""
        algorithm = self._warm_up if self.schedule.warming_up else self._algorithm
        self._receive_gradients()
        for bucket in self._buckets:
            bucket.start_backward(algorithm.predivisor(self.comm))
        self.comm.step = self._num_rounds
        round_ = GradientRound(self._buckets, algorithm, self.comm, self.transport, self.driver)
        at_s = 0.0
        for ready_s, bucket in sorted(zip(self._bucket_ready_s, self._buckets, strict=True), key=lambda pair: pair[0]):
            self.driver.compute((ready_s - at_s) * pace, "backward")
            at_s = ready_s
            bucket.pending = 0
            round_.launch(bucket)
        self.driver.compute((self._workload.backward_s - at_s) * pace, "backward")
        round_.flush()
        round_.wait()
        round_.publish()
        self._num_rounds += 1

    def _receive_gradients(self) -> None:
        """Give every parameter a gradient, as backward does after `zero_grad`."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.param.grad = gradient


def time_round(
    network: Network, device: Device, prototype: Algorithm, options: Options, buckets: Sequence[BucketView]
) -> tuple[float, float]:
    """Return the seconds of one round over buckets that are ready at once, on idle links, and the bytes of a rank."""
    algorithm = copy.deepcopy(prototype)
    comm, transport = connect(network, prototype)
    meter = Meter(device)
    driver = VirtualDriver(Links(network, options.transport, device), meter, device, np.ones(1), ())
    with meter.active():
        algorithm.setup(Context(comm, buckets, META))
        meter.take()
        tasks = [Task(str, lambda bucket=bucket: algorithm.communicate(bucket, comm)) for bucket in buckets]
        round_ = Round(transport, tasks, prototype.traits.window)
        driver.open(round_)
        for idx in range(len(tasks)):
            driver.ready(round_, idx)
        driver.wait(round_)
    return float(driver.now_s[0]), transport.bytes_sent


def connect(network: Network, algorithm: Algorithm) -> tuple[Communicator, SimulatedTransport]:
    """Return rank 0's view of the group, as the engine gives it to an algorithm, and its transport."""
    transport = SimulatedTransport(0, network.world_size, network.gpus_per_node)
    comm = Communicator(0, network.world_size)
    if algorithm.traits.hierarchical and (groups := transport.split_by_node()) is not None:
        comm.local, comm.across = groups
    return comm, transport


def parameters_of(workload: Workload, algorithm: Algorithm) -> list[Parameter]:
    """Return the workload's parameters on the meta device, grouped by the algorithm."""
    dtype = DTYPES[workload.dtype]
    found = []
    for name, shape in workload.parameters():
        param = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=META))
        found.append(Parameter(name, param, sparse=False, group=algorithm.group(name, param)))
    return found
