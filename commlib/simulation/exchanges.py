"""Simulation of algorithms without rounds, from the requests, answers and costs that they declare.

[Note: exchanges] These algorithms communicate with peers from their own threads, on the machine's clock, so their code
cannot run on virtual time. The simulation uses their declaration instead (`Algorithm.traffic`). At the end of a step in
which an exchange is due, a rank prepares its requests, which travel during the following steps. The peers process them
and answer. The rank applies the answers at the first step end after their arrival. All ranks behave identically: each
answers as many requests as it sends, and all share the adapters. No rank waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlib.algorithms.base import Algorithm, Traffic
from commlib.algorithms.channels import SelfRunning
from commlib.engine.rounds.schedule import StepCounter
from commlib.engine.rounds.task import Round, Task
from commlib.simulation.clock import VirtualDriver
from commlib.simulation.meter import Meter
from commlib.transport.base import Communication, Communicator, Exchange
from commlib.transport.simulated import SimulatedTransport


class Exchanges:
    """The exchanges of a rank, in place of a channel with rounds.

    Args:
        algorithm: An algorithm with a `SelfRunning` channel.
        parameters: The trained parameters.
        transport: The process group.
        driver: The virtual clocks.
        meter: Counts local work; must be active.
        counter: Counts the steps.

    Attributes:
        num_taken: Number of exchanges whose answers were applied.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        parameters: Sequence[torch.Tensor],
        transport: SimulatedTransport,
        driver: VirtualDriver,
        meter: Meter,
        counter: StepCounter,
    ) -> None:
        assert isinstance(algorithm.channel, SelfRunning)
        self._name = algorithm.name
        self._traffic = algorithm.traffic(parameters, transport.world_size)
        self._period = algorithm.channel.period
        self._transport = transport
        self._driver = driver
        self._meter = meter
        self._counter = counter
        self._comm = Communicator(transport.rank, transport.world_size)
        self._kept = torch.empty(self._traffic.memory_bytes, dtype=torch.uint8)
        self.num_taken = 0
        self._num_pending = 0  # steps since the last exchange began
        self._round: Round | None = None  # the current exchange
        self._asked_s = self._rests_until_s = 0.0

    @property
    def bytes_sent(self) -> float:
        """Bytes sent by the rank so far."""
        return self._transport.bytes_sent

    def begin_step(self) -> None:
        """Do nothing before the optimizer's step."""

    def end_step(self) -> None:
        """Apply answers that have arrived after the optimizer's step, and start an exchange if one is due."""
        if self._counter.is_warming_up or self._transport.world_size == 1:
            return
        self._num_pending += 1
        self._meter.count(self._traffic.step_bytes)
        if self._round is not None and self._driver.has_arrived(self._round):
            self._take(self._round)
        has_rested = float(self._driver.now_s.max()) >= self._rests_until_s
        if self._round is None and self._num_pending >= self._period and has_rested:
            self._ask()

    def _take(self, round_: Round) -> None:
        ended_s = float(self._driver.end_of(round_).max())
        self._rests_until_s = ended_s + self._traffic.rest * (ended_s - self._asked_s)
        self._driver.wait(round_)
        self._meter.count(self._traffic.take_bytes)
        self._round = None
        self.num_taken += 1

    def _ask(self) -> None:
        self._meter.count(self._traffic.ask_bytes)
        self._driver.flush("rounds at the step's end")
        self._asked_s = float(self._driver.now_s.max())
        self._num_pending = 0
        self._round = Round(self._transport, [Task(lambda: f"an exchange of {self._name}", self._exchange)], window=1)
        self._driver.launch(self._round)

    def _exchange(self) -> Communication:
        traffic = self._traffic
        yield self._messages(traffic, traffic.question_bytes)
        self._meter.count(traffic.beside_bytes)
        yield self._messages(traffic, traffic.answer_bytes)

    def _messages(self, traffic: Traffic, nbytes: int) -> Exchange:
        """Return one message to and one from each peer. The peers are spread over the group."""
        size = self._comm.world_size
        peers = [(idx + 1) * size // (traffic.peers + 1) for idx in range(traffic.peers)]
        payload = torch.empty(nbytes, dtype=torch.uint8)
        messages = [(peer, payload) for peer in peers]
        return self._comm.exchange(messages, messages)
