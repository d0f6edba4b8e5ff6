"""Rounds over weights or optimizer state. They start after optimizer steps, blocking or in the background."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Weights
from commlib.algorithms.context import Context
from commlib.engine.buckets.bucket import Bucket
from commlib.engine.channel import OpenChannel, Settings
from commlib.engine.frozen import FrozenParameters
from commlib.engine.planning.plan import Parameter
from commlib.engine.planning.sizes import INITIAL_CAP_BYTES
from commlib.engine.rounds import marks
from commlib.engine.rounds.schedule import Schedule, StepCounter
from commlib.engine.rounds.task import Round, Task
from commlib.engine.session import Session
from commlib.engine.weights.buckets import WeightBuckets
from commlib.engine.weights.votes import Votes
from commlib.errors import CommlibError
from commlib.primitives.replicate import mean_all


class WeightChannel(OpenChannel):
    """The rounds of an algorithm that declares `Weights` or `OptimizerState`.

    Args:
        parameters: The parameters, in the model's order.
        algorithm: Communicates each bucket.
        counter: Counts the steps.
        session: Carries only these rounds.
        main: The session of the gradient channel, for collectives that do not depend on the round that a rank is in.
        settings: Arguments of `wrap`: the optimizer, whose state may be communicated, and the bucket size.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        algorithm: Algorithm,
        counter: StepCounter,
        session: Session,
        main: Session,
        settings: Settings,
    ) -> None:
        declared = algorithm.channel
        assert isinstance(declared, Weights)
        self.session = session
        self._main = main
        self.keeper = self._algorithm = algorithm
        self._declared = declared
        self._counter = counter
        self._schedule = Schedule(declared, counter)
        self._settings = settings
        self._parameters: Sequence[Parameter] = ()
        self._frozen = FrozenParameters(declared.period)
        self._round: Round | None = None
        session.transport.in_order = not declared.asynchronous
        needs_votes = declared.asynchronous and not session.transport.stands_for_all
        self._votes = Votes(session.transport) if needs_votes else None
        self.num_started = self.num_rounds = 0
        self._drops_result = False  # whether the round under way is over weights that were replaced
        self._has_loaded_state = False  # since the last step
        self._num_loads = 0  # how often the user has loaded weights
        self._snapshot: dict[str, Any] = {}  # the algorithm's state before the round, in an elastic group
        self._entering: int | None = None  # the round, while this rank enters a view
        self._follow(parameters)
        own = weakref.WeakMethod(self._set_up)
        session.when_entered.append(lambda: (follow := own()) and follow())

    @override
    def adopt(self, parameters: Sequence[Parameter]) -> None:
        self._settle(self._started_by_any())
        self._follow(parameters)

    @override
    def set_up(self, settings: Settings) -> None:
        self._settings = settings
        self.adopt(self._parameters)

    def _started_by_any(self) -> int:
        """Return the maximum over the ranks of the number of rounds started. Collective."""
        return max(self._main.transport.gather_objects(self.num_started))

    def _follow(self, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters from now on. Wait for a round under way, and drop its result.

        Asynchronous rounds must be settled first, because a rank may be in a round that its peers have not reached.
        """
        self._drop_round()
        self._parameters = parameters
        cap_bytes = self._settings.cap_bytes or INITIAL_CAP_BYTES
        self._set = WeightBuckets(parameters, self._declared, self._settings.optimizer, cap_bytes)
        self._set_up()

    def _drop_round(self) -> None:
        """Wait for a round under way, and drop its result, because its tensors or buckets are replaced."""
        if self._round is not None:
            self._schedule.drain()
            round_, self._round = self._round, None
            self.session.driver.wait(round_)

    def _set_up(self) -> None:
        """Set up the algorithm with the new buckets."""
        device = self.buckets[0].flat.device
        self._algorithm.setup(Context(self.session.comm, self.buckets, device, self._settings.optimizer))
        self.begins = True  # whether the algorithm has yet to see the weights

    @property
    @override
    def buckets(self) -> list[Bucket]:
        """The buckets, in plan order."""
        return self._set.buckets

    @property
    @override
    def bytes_sent(self) -> float:
        return self.session.transport.bytes_sent

    @property
    @override
    def consensus_distance(self) -> float | None:
        return self._set.consensus_distance

    @override
    @torch.no_grad()
    def begin_step(self, has_closure: bool = False) -> None:
        """Show the algorithm the weights, if it has not seen them in the current buckets."""
        self._has_loaded_state = False
        is_in_use = self._declared.asynchronous and self._round is not None  # then shown before the next round
        if self.begins and not (self._counter.is_warming_up or is_in_use):
            self._begin()

    def _begin(self) -> None:
        self.begins = False
        for bucket in self.buckets if self._set.holds_weights else ():
            self._set.load(bucket)
            self._algorithm.begin(bucket)

    @override
    @torch.no_grad()
    def end_step(self) -> None:
        """Take and start the rounds that are due. After an error, do nothing: the next forward raises it."""
        if self.session.error is not None:
            return
        try:
            self._end_step()
        except BaseException as error:
            self.session.keep(error)  # no abort: the driver or a peer has already ended the round
            raise

    def _end_step(self) -> None:
        self._frozen.note([p.name for p in self._parameters if not p.param.requires_grad])
        has_arrived = self._round is not None and self.session.driver.has_arrived(self._round)
        is_over = self._votes is not None and self._is_over(self._votes, has_arrived)
        due = self._schedule.end_step(has_arrived and not is_over)
        if is_over:
            return
        if due.take_background:
            if self._round is None:  # on a new member, which joins a background round when its result is due
                self._start()
            self._take()
        if due.start:
            self._start()
            if not due.in_background:
                self._take()

    def _is_over(self, votes: Votes, has_arrived: bool) -> bool:
        """Return whether rounds have ended because a rank has left, or whether peers may still report that.

        Raises:
            TransportError: A rank died; or a collective failed, and no rank has left cleanly.
        """
        has_failed = has_arrived and self._round is not None and self._round.error is not None
        return votes.have_ended() or (has_failed and votes.explains_soon())

    @override
    def weights_were_loaded(self) -> None:
        """Restart the algorithm from the loaded weights, and drop the result of a round under way.

        Do nothing if state was loaded since the last step: it belongs to these weights.
        """
        if self._has_loaded_state or self.session.error is not None:
            return
        self.drop_background()
        self._algorithm.forget()
        self.begins = True

    @override
    def drop_background(self) -> None:
        """Drop the result of a round under way on all ranks; see [Note: loaded weights] in `votes.py`."""
        self._num_loads += 1
        if self._declared.asynchronous:  # peers may reach the round much later
            self._drops_result = self._round is not None
        else:
            self._drop_round()

    @property
    @override
    def allows_join(self) -> bool:
        return not self._declared.keeps_step

    @override
    def has_moved(self) -> bool:
        return self._set.has_moved()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_weight_rounds": self.num_started}

    @property
    @override
    def repeats_step(self) -> bool:
        return self._entering is not None

    @override
    def state_for_new_member(self) -> dict[str, Any]:
        if self._entering is None:
            return {**self.state_dict(), "take_at": None}
        is_due = self._entering < self.num_started and self._declared.in_background
        return {"num_weight_rounds": self._entering, "take_at": self._counter.step if is_due else None}

    @override
    def load_as_new_member(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state)
        self._schedule.take_at = state["take_at"]

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state. The weights that it belongs to are loaded before or after this call."""
        self._has_loaded_state = self.begins = True
        if self._declared.keeps_step:
            self.num_started = self.num_rounds = int(state["num_weight_rounds"])

    @override
    @torch.no_grad()
    def drain(self) -> None:
        """Take the result of a background round now, if there is one.

        Skip an asynchronous round if its result has not arrived, because peers may reach it much later, or if it
        failed, because a peer may have left during it.
        """
        if self._round is None or self.session.error is not None:
            return
        is_there = self.session.driver.has_arrived(self._round) and self._round.error is None
        if self._declared.asynchronous and not is_there:
            return
        self._schedule.drain()
        self._take()

    @override
    def synchronize(self) -> None:
        """Complete every round that any rank has started, then replace the weights by their mean over the ranks."""
        self._complete(self._started_by_any())
        with torch.no_grad():
            self._main.run("the mean of the weights", self._set.mean(self.session.comm))

    @torch.no_grad()
    def _complete(self, num_started: int) -> None:
        while self._round is not None or self.num_started < num_started:
            if self._round is None:
                self._start()
            self._schedule.drain()
            self._take()

    def _settle(self, num_started: int) -> None:
        """Take part in every asynchronous round up to the given number, and drop the results."""
        while self._declared.asynchronous and (self._round is not None or self.num_started < num_started):
            if self._round is None:
                self._start()
            self._drop_round()

    @override
    def close(self) -> None:
        """Wait for a background round, drop its result, and release the communicator.

        Cancel an asynchronous round without waiting: peers may reach it much later, or never.
        """
        if self._votes is not None:
            self._votes.close()
        if self._round is not None:
            if self._declared.asynchronous:
                self.session.driver.cancel(self._round, CommlibError("the model was unwrapped"))
            else:
                self.session.driver.wait(self._round)
        self._round = None
        self.session.close()

    def _start(self) -> None:
        self._follow_freezing()
        if self.session.is_elastic:
            self._enter(self.num_started)
        if self.begins:
            self._begin()
        self.session.comm.step = self.num_started
        self._set.begin_round(self.num_started)
        if self.session.is_elastic:
            self._snapshot = self._algorithm.state_dict()
        self.num_started += 1
        self._launch()

    def _enter(self, number: int) -> None:
        """Let the ranks of an elastic group's newest view take part in the round of this number, counted from 0."""
        self._entering = number
        self.session.enter()
        self._entering = None

    def _repeat(self) -> None:
        """Start the round once more, from its inputs, with the ranks of an elastic group's newest view."""
        self._algorithm.load_state_dict(self._snapshot)
        self._enter(self.num_started - 1)
        self._begin()
        self._set.reload()
        self._launch()

    def _launch(self) -> None:
        begin = lambda bucket: lambda: self._algorithm.communicate(bucket, self.session.comm)  # noqa: E731
        tasks = [Task(bucket.describe, begin(bucket)) for bucket in self._set.carried]
        driver = self.session.driver
        round_ = self._round = Round(self.session.transport, tasks, self._declared.window)
        driver.note_inputs(round_)
        if self._votes is None:
            driver.launch(round_)
        else:
            self._votes.cast(self.num_started, self._num_loads, lambda: driver.launch(round_))

    def _take(self) -> None:
        """Wait for the round under way, and write its result to the tensors."""
        assert self._round is not None
        start_s = time.perf_counter()
        try:
            with marks.phase("wait", self._round.describe):
                self.session.complete(self._wait, self._repeat)
        finally:
            self._round = None
        self.waited_s += time.perf_counter() - start_s
        self.num_rounds += 1
        is_dropped, self._drops_result = self._drops_result, False
        is_mixed = self._votes is not None and self._votes.are_mixed  # [Note: loaded weights] in `votes.py`
        if not (is_dropped or is_mixed):
            self._set.take_results(self.num_rounds, self._frozen.permanent)

    def _wait(self) -> None:
        assert self._round is not None
        self.session.driver.wait(self._round)

    def _follow_freezing(self) -> None:
        """Leave out permanently frozen parameters; see [Note: frozen parameters]."""
        back = self._set.leave_out(self._frozen.permanent)
        if back is None:
            return
        self._set_up()
        if back:
            self.session.run("the mean of parameters that are no longer frozen", mean_all(back, self.session.comm))
