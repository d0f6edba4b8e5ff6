"""Rounds over weights or optimizer state: at the end of optimizer steps, waited for at once or taken steps later."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm, Context
from commlib.algorithms.channels import OptimizerState, Weights
from commlib.engine.buckets.bucket import Bucket, tensors_of
from commlib.engine.channels.base import OpenChannel, Settings
from commlib.engine.channels.bucket_set import have_moved
from commlib.engine.channels.frozen import Frozen
from commlib.engine.channels.votes import Votes
from commlib.engine.line import Line
from commlib.engine.planning import plan as plans
from commlib.engine.planning.plan import Parameter
from commlib.engine.planning.sizes import INITIAL_CAP_BYTES
from commlib.engine.rounds import marks
from commlib.engine.rounds.schedule import Progress, Schedule
from commlib.engine.rounds.task import Round, Task
from commlib.errors import CommlibError
from commlib.primitives.replicate import mean_all
from commlib.transport.base import Communication

#: Where steps wait for their round, how far it moved the weights is measured once in this many steps.
_DISTANCE_EVERY = 10


class WeightChannel(OpenChannel):
    """The buckets of an algorithm that declares `Weights` or `OptimizerState`, and their rounds.

    A round that is waited for replaces the tensors by its result. One in the background works on a copy taken at its
    start; its effect, `result - copy`, is added to the tensors when it is taken, so that the steps made meanwhile are
    kept (BAGUA's asynchronous model averaging does the same). `Weights.mixing` asks for a weighted mean instead.

    Args:
        parameters: The parameters, in the model's order.
        algorithm: What to do with a bucket.
        progress: Counts the steps.
        line: Carries these rounds alone.
        main: That of gradients, where ranks meet whatever rounds they are in.
        settings: What the user gave: the optimizer, whose state may be what is communicated, and the size of buckets.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        algorithm: Algorithm,
        progress: Progress,
        line: Line,
        main: Line,
        settings: Settings,
    ) -> None:
        declared = algorithm.channel
        assert isinstance(declared, Weights)
        self.line = line
        self._main = main
        self.keeper = self._algorithm = algorithm
        self._declared = declared
        self._state_key = declared.key if isinstance(declared, OptimizerState) else None
        self._progress = progress
        self._schedule = Schedule(declared, progress)
        self._optimizer = settings.optimizer
        self._cap_bytes = settings.cap_bytes or INITIAL_CAP_BYTES
        self._round: Round | None = None
        needs_votes = declared.asynchronous and not line.transport.stands_for_all
        self._votes = Votes(line.transport) if needs_votes else None
        self.num_started = self.num_rounds = 0
        self._drops_result = False  # of the round under way: it is of weights that were replaced
        self._has_loaded_state = False  # since the last step
        self._follow(parameters)

    @override
    def adopt(self, parameters: Sequence[Parameter]) -> None:
        self._settle(self._started_by_any())
        self._follow(parameters)

    def _started_by_any(self) -> int:
        """Return the number of rounds that the foremost rank has started. Collective."""
        return max(self._main.transport.gather_objects(self.num_started))

    def _follow(self, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters from now on; the result of a round under way is waited for and dropped.

        Asynchronous rounds are settled before: a rank may be in one to which others have not come.
        """
        self._drop_round()
        self._parameters = [Parameter(p.name, p.param, sparse=False, group=p.group) for p in parameters]
        self._frozen = Frozen([p.param for p in parameters], self._declared.period)
        self._resting: frozenset[int] = frozenset()
        self._build()

    def _drop_round(self) -> None:
        """Wait for a round under way and drop its result: it works on state that moves into other buckets now."""
        if self._round is not None:
            self._schedule.drain()
            round_, self._round = self._round, None
            self.line.driver.wait(round_)

    def _build(self) -> None:
        """Make the buckets of all parameters but those that rest."""
        moving = [p for p in self._parameters if id(p.param) not in self._resting]
        num_bytes = sum(p.param.nbytes for p in moving)
        cap_bytes = min(self._cap_bytes, -(-num_bytes // self._declared.fragments) or 1)
        built = plans.build(plans.initial(moving, cap_bytes), moving, plans.make_slots(moving))
        buckets = [bucket for bucket in built if isinstance(bucket, Bucket)]
        copies = [torch.empty_like(b.flat) for b in buckets] if self._declared.in_background else []
        self._algorithm.setup(Context(self.line.comm, buckets, buckets[0].flat.device, self._optimizer))
        self.buckets, self._copies = buckets, copies
        self._moved: dict[int, torch.Tensor] = {}  # per bucket, the square of how far its last round moved it
        self._carried: list[Bucket] = []  # by the round under way
        self.begins = True  # the algorithm has yet to see the weights

    @property
    @override
    def bytes_sent(self) -> float:
        return self.line.transport.bytes_sent

    @property
    @override
    def consensus_distance(self) -> float | None:
        if not self._moved or self._state_key is not None:
            return None
        return math.sqrt(sum(float(square) for square in self._moved.values()))

    @override
    @torch.no_grad()
    def begin_step(self, has_closure: bool = False) -> None:
        """Show the algorithm the weights, if it has not seen those of these buckets."""
        self._has_loaded_state = False
        if self.begins and not self._progress.is_warming_up and self._state_key is None:
            self._begin()

    def _begin(self) -> None:
        self.begins = False
        for bucket in self.buckets:
            bucket.load(self._tensors(bucket))
            self._algorithm.begin(bucket)

    @override
    @torch.no_grad()
    def end_step(self) -> None:
        """Do what is due: nothing after an error, which the next forward raises."""
        if self.line.error is not None:
            return
        try:
            self._end_step()
        except BaseException as error:
            self.line.error = error  # which the driver has ended already, or a peer
            raise

    def _end_step(self) -> None:
        self._frozen.end_step()
        has_arrived = self._round is not None and self.line.driver.has_arrived(self._round)
        is_over = self._votes is not None and self._is_over(self._votes, has_arrived)
        due = self._schedule.end_step(has_arrived and not is_over)
        if is_over:
            return
        if due.take_background:
            self._take()
        if due.start:
            self._start()
            if not due.in_background:
                self._take()

    def _is_over(self, votes: Votes, has_arrived: bool) -> bool:
        """Return whether there are no rounds any more, as a rank has left or may be found to have.

        Raises:
            TransportError: A rank died; or a collective failed, and no rank has left in good order.
        """
        has_failed = has_arrived and self._round is not None and self._round.error is not None
        return votes.have_ended() or (has_failed and votes.explains_soon())

    @override
    def weights_were_loaded(self) -> None:
        """They are what the algorithm begins with, and a round under way comes to nothing.

        State that was loaded since the last step is of these weights, so it stays.
        """
        if self._has_loaded_state or self.line.error is not None:
            return
        if self._declared.asynchronous:  # peers may come to the round much later
            self._drops_result = self._round is not None
        else:
            self._drop_round()
        self._algorithm.forget()
        self.begins = True

    @property
    @override
    def allows_join(self) -> bool:
        return not self._declared.keeps_step

    @override
    def has_moved(self) -> bool:
        return have_moved(self.buckets)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_weight_rounds": self.num_started}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The algorithm's state is of weights that are, or will be, loaded too."""
        self._has_loaded_state = self.begins = True
        if self._declared.keeps_step:
            self.num_started = self.num_rounds = int(state["num_weight_rounds"])

    @override
    @torch.no_grad()
    def drain(self) -> None:
        """Take the result of a round in the background now, if there is one.

        An asynchronous one is left where its result has not arrived, as peers may come to it much later, or where it
        broke, as a peer may have left in the middle of it.
        """
        if self._round is None or self.line.error is not None:
            return
        is_there = self.line.driver.has_arrived(self._round) and self._round.error is None
        if self._declared.asynchronous and not is_there:
            return
        self._schedule.drain()
        self._take()

    @override
    def synchronize(self) -> None:
        """Take part in every round that any rank has started, take the results, and then the mean of the weights."""
        self._complete(self._started_by_any())
        with torch.no_grad():
            self._main.run("the mean of the weights", self._mean_of_weights())

    @torch.no_grad()
    def _complete(self, num_started: int) -> None:
        while self._round is not None or self.num_started < num_started:
            if self._round is None:
                self._start()
            self._schedule.drain()
            self._take()

    def _settle(self, num_started: int) -> None:
        """Take part in every asynchronous round up to the given number, and drop what comes of them."""
        while self._declared.asynchronous and (self._round is not None or self.num_started < num_started):
            if self._round is None:
                self._start()
            assert self._round is not None
            round_, self._round = self._round, None
            self._schedule.drain()
            self.line.driver.wait(round_)

    @override
    def close(self) -> None:
        """Wait for what is in the background, keep the weights as they are, and release the communicator.

        An asynchronous round is not waited for: peers may come to it much later, or not at all.
        """
        if self._votes is not None:
            self._votes.close()
        if self._round is not None:
            if self._declared.asynchronous:
                self.line.driver.cancel(self._round, CommlibError("the model was unwrapped"))
            else:
                self.line.driver.wait(self._round)
        self._round = None
        self.line.close()

    def _start(self) -> None:
        self._follow_freezing()
        self.line.comm.step = self.num_started
        self._carried = self.buckets[self.num_started % self._declared.fragments :: self._declared.fragments]
        self.num_started += 1
        tasks = []
        for bucket in self._carried:
            with marks.phase("gather", bucket.describe):
                bucket.load(self._tensors(bucket))
            if self._copies:
                self._copies[bucket.index].copy_(bucket.flat)
            begin = lambda bucket=bucket: self._algorithm.communicate(bucket, self.line.comm)  # noqa: E731
            tasks.append(Task(bucket.describe, begin))
        driver = self.line.driver
        round_ = self._round = Round(self.line.transport, tasks, self._declared.window)
        driver.note_inputs(round_)
        if self._votes is None:
            driver.launch(round_)
        else:
            self._votes.cast(self.num_started, lambda: driver.launch(round_))

    def _take(self) -> None:
        """Wait for the round under way and bring its result into the tensors."""
        round_, self._round = self._round, None
        assert round_ is not None
        with marks.phase("wait", round_.describe):
            self.line.driver.wait(round_)
        self.num_rounds += 1
        is_dropped, self._drops_result = self._drops_result, False
        if is_dropped:
            return
        resting = self._frozen.resting()
        for bucket in self._carried:
            tensors = self._tensors(bucket)
            self._measure(bucket, tensors)
            if self._declared.mixing is None and self._copies:
                bucket.flat.sub_(self._copies[bucket.index])
            pairs = zip(bucket.slots, tensors, strict=True)
            moving = [(tensor, slot.view) for slot, tensor in pairs if id(slot.param) not in resting]
            if moving:
                self._apply(*zip(*moving, strict=True))

    def _apply(self, tensors: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> None:
        if self._declared.mixing is not None:
            torch._foreach_lerp_(tensors, results, 1.0 - self._declared.mixing)
        elif self._copies:
            torch._foreach_add_(tensors, results)
        else:
            torch._foreach_copy_(tensors, results)

    def _follow_freezing(self) -> None:
        """Leave parameters out that are frozen for good, and take those in that are not any more.

        See [Note: frozen layers] in `frozen.py`. All ranks alike, so not where they may be a round apart: there buckets
        stay.
        """
        resting = self._frozen.resting()
        if resting == self._resting or self._declared.asynchronous or len(resting) == len(self._parameters):
            return
        back = [p.param.data for p in self._parameters if id(p.param) in self._resting - resting]
        self._resting = resting
        self._build()
        if back:
            self.line.run("the mean of parameters that are not frozen any more", mean_all(back, self.line.comm))
        if self._state_key is None:
            self._begin()

    def _measure(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Note how far the round moved the bucket: on a copy in every round, else now and then, as it costs a pass."""
        if self._copies:
            self._moved[bucket.index] = torch.dist(bucket.flat, self._copies[bucket.index]).float().square()
        elif self._declared.period >= _DISTANCE_EVERY or self.num_rounds % _DISTANCE_EVERY == 1:
            self._moved[bucket.index] = _distance_squared(tensors, bucket)

    def _tensors(self, bucket: Bucket) -> list[torch.Tensor]:
        return tensors_of(bucket, self._state_key, self._optimizer)

    def _mean_of_weights(self) -> Communication:
        """Replace every parameter by its mean over the ranks."""
        for bucket in self.buckets:
            weights = tensors_of(bucket)
            bucket.load(weights)
            yield self.line.comm.all_reduce(bucket.flat)
            bucket.flat.div_(self.line.comm.world_size)
            self._moved[bucket.index] = _distance_squared(weights, bucket)
            bucket.store(weights)
        resting = [p.param.data for p in self._parameters if id(p.param) in self._resting]
        yield from mean_all(resting, self.line.comm)


def _distance_squared(tensors: Sequence[torch.Tensor], bucket: Bucket) -> torch.Tensor:
    squares = [torch.dist(t, slot.view).float().square() for t, slot in zip(tensors, bucket.slots, strict=True)]
    return torch.stack(squares).sum()
