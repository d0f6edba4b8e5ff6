"""Rounds over weights or optimizer state: at the end of optimizer steps, waited for at once or taken steps later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from commlib.algorithms.base import Algorithm, Context
from commlib.engine import plan as plans
from commlib.engine.bucket import Bucket, tensors_of
from commlib.engine.plan import Parameter
from commlib.engine.planner import INITIAL_CAP_BYTES
from commlib.engine.policy import Schedule
from commlib.engine.scheduler import Driver, Round, Task
from commlib.engine.votes import Votes
from commlib.errors import CommlibError
from commlib.primitives.replicate import mean_all
from commlib.transport.base import Communication, Communicator, Transport

#: Where steps wait for their round, how far it moved the weights is measured once in this many steps.
_DISTANCE_EVERY = 10


class WeightRounds:
    """The buckets of an algorithm whose `Traits.tensors` are weights or optimizer state, and their rounds.

    A round that is waited for replaces the tensors by its result. One in the background works on a copy taken at its
    start; its effect, `result - copy`, is added to the tensors when it is taken, so that the steps made meanwhile are
    kept (BAGUA's asynchronous model averaging does the same). `Traits.mixing` asks for a weighted mean instead.

    Args:
        parameters: The parameters, in the model's order.
        algorithm: What to do with a bucket.
        schedule: Says when rounds start and are taken; shared with the engine.
        transport: A communicator used by these rounds alone.
        driver: The device's driver.
        optimizer: Whose state may be what is communicated, and whose step ends are reported to `end_step`.
        cap_bytes: Size of a bucket.

    Attributes:
        error: What ended the rounds, if anything did.

    [Note: frozen layers] A parameter that is frozen stays where it is: results are not written to it, and from the next
    round on it is in no bucket, so that no outer momentum reaches it. One that two losses freeze in turns is frozen at
    the end of every other step, perhaps of all steps with a round, and is to be averaged all the same: after it came
    back once, it counts as frozen only after a whole period. When a parameter comes back the ranks may differ in it, if
    they froze it between two rounds, so it becomes their mean first.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        algorithm: Algorithm,
        schedule: Schedule,
        transport: Transport,
        driver: Driver,
        optimizer: Any,
        cap_bytes: int = INITIAL_CAP_BYTES,
    ) -> None:
        self._algorithm = algorithm
        self._traits = algorithm.traits
        self._schedule = schedule
        self._transport = transport
        self._driver = driver
        self._optimizer = optimizer
        self._comm = Communicator(transport.rank, transport.world_size)
        if self._traits.hierarchical and (groups := transport.split_by_node()) is not None:
            self._comm.local, self._comm.across = groups
        self._cap_bytes = cap_bytes
        self._round: Round | None = None
        transport.in_order = not self._traits.asynchronous
        needs_votes = self._traits.asynchronous and not transport.stands_for_all
        self._votes = Votes(transport) if needs_votes else None
        self.num_started = self.num_rounds = 0
        self.error: BaseException | None = None
        self._drops_result = False  # of the round under way: it is of weights that were replaced
        self._has_loaded_state = False  # since the last step
        self.adopt(parameters)

    def adopt(self, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters from now on; the result of a round under way is waited for and dropped.

        Asynchronous rounds are settled before: a rank may be in one to which others have not come.
        """
        self._drop_round()
        self._parameters = [Parameter(p.name, p.param, sparse=False, group=p.group) for p in parameters]
        self._frozen = _Frozen([p.param for p in parameters], self._traits.period)
        self._resting: frozenset[int] = frozenset()
        self._build()

    def _drop_round(self) -> None:
        """Wait for a round under way and drop its result: it works on state that moves into other buckets now."""
        if self._round is not None:
            self._schedule.drain()
            round_, self._round = self._round, None
            self._driver.wait(round_)

    def _build(self) -> None:
        """Make the buckets of all parameters but those that rest."""
        moving = [p for p in self._parameters if id(p.param) not in self._resting]
        num_bytes = sum(p.param.nbytes for p in moving)
        cap_bytes = min(self._cap_bytes, -(-num_bytes // self._traits.fragments) or 1)
        built = plans.build(plans.initial(moving, cap_bytes), moving, plans.make_slots(moving))
        buckets = [bucket for bucket in built if isinstance(bucket, Bucket)]
        copies = [torch.empty_like(b.flat) for b in buckets] if self._traits.in_background else []
        self._algorithm.setup(Context(self._comm, buckets, buckets[0].flat.device, self._optimizer))
        self.buckets, self._copies = buckets, copies
        self._moved: dict[int, torch.Tensor] = {}  # per bucket, the square of how far its last round moved it
        self._carried: list[Bucket] = []  # by the round under way
        self.begins = True  # the algorithm has yet to see the weights

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent for these rounds."""
        return self._transport.bytes_sent

    @property
    def consensus_distance(self) -> float | None:
        """The L2 distance between this rank's weights and what the last round, or mean, made of them; None before."""
        if not self._moved or self._traits.tensors != "weights":
            return None
        return math.sqrt(sum(float(square) for square in self._moved.values()))

    @torch.no_grad()
    def begin_step(self) -> None:
        """Before an optimizer step: show the algorithm the weights, if it has not seen those of these buckets."""
        self._has_loaded_state = False
        if not self.begins or self._schedule.warming_up or self._traits.tensors != "weights":
            return
        self._begin()

    def _begin(self) -> None:
        self.begins = False
        for bucket in self.buckets:
            bucket.load(self._tensors(bucket))
            self._algorithm.begin(bucket)

    @torch.no_grad()
    def end_step(self) -> None:
        """Do what is due at the end of an optimizer step: nothing after an error, which the next forward raises."""
        if self.error is not None:
            return
        try:
            self._end_step()
        except BaseException as error:
            self.error = error
            raise

    def _end_step(self) -> None:
        self._frozen.end_step()
        has_arrived = self._round is not None and self._driver.has_arrived(self._round)
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

    def abandon(self, error: BaseException) -> None:
        """End the rounds for good; peers that wait for this rank are told by the abort."""
        self.error = self.error or error
        self._transport.abort()

    def forget(self) -> None:
        """The weights were loaded: they are what the algorithm begins with, and a round under way comes to nothing.

        State that was loaded since the last step is of these weights, so it stays.
        """
        if self._has_loaded_state or self.error is not None:
            return
        if self._traits.asynchronous:  # peers may come to the round much later
            self._drops_result = self._round is not None
        else:
            self._drop_round()
        self._algorithm.forget()
        self.begins = True

    def loaded_state(self) -> None:
        """Take note that the algorithm's state was loaded: it is of weights that are, or will be, loaded too."""
        self._has_loaded_state = self.begins = True

    @torch.no_grad()
    def drain(self) -> None:
        """Take the result of a round in the background now, if there is one.

        An asynchronous one is left where its result has not arrived, as peers may come to it much later, or where it
        broke, as a peer may have left in the middle of it.
        """
        if self._round is None:
            return
        if self._traits.asynchronous and (not self._driver.has_arrived(self._round) or self._round.error is not None):
            return
        self._schedule.drain()
        self._take()

    @torch.no_grad()
    def complete(self, num_started: int) -> None:
        """Take part in every round up to the given number, which another rank has started, and take the results."""
        while self._round is not None or self.num_started < num_started:
            if self._round is None:
                self._start()
            self._schedule.drain()
            self._take()

    def settle(self, num_started: int) -> None:
        """Take part in every asynchronous round up to the given number, and drop what comes of them."""
        while self._traits.asynchronous and (self._round is not None or self.num_started < num_started):
            if self._round is None:
                self._start()
            assert self._round is not None
            round_, self._round = self._round, None
            self._schedule.drain()
            self._driver.wait(round_)

    def close(self) -> None:
        """Wait for what is in the background, keep the weights as they are, and release the communicator.

        An asynchronous round is not waited for: peers may come to it much later, or not at all.
        """
        if self._votes is not None:
            self._votes.close()
        if self._round is not None:
            if self._traits.asynchronous:
                self._driver.cancel(self._round, CommlibError("the model was unwrapped"))
            else:
                self._driver.wait(self._round)
        self._round = None
        self._transport.close()

    def _start(self) -> None:
        self._follow_freezing()
        self._comm.step = self.num_started
        self._carried = self.buckets[self.num_started % self._traits.fragments :: self._traits.fragments]
        self.num_started += 1
        tasks = []
        for bucket in self._carried:
            bucket.load(self._tensors(bucket))
            if self._copies:
                self._copies[bucket.index].copy_(bucket.flat)
            tasks.append(Task(bucket.describe, lambda bucket=bucket: self._algorithm.communicate(bucket, self._comm)))
        round_ = self._round = Round(self._transport, tasks, self._traits.window)
        if self._votes is None:
            self._launch(round_)
        else:
            device = self.buckets[0].flat.device
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            self._votes.cast(self.num_started, lambda: self._launch(round_, stream))

    def _launch(self, round_: Round, stream: Any = None) -> None:
        """Have the driver run the round, after what is queued on `stream`, if this is another thread than queued it."""
        with torch.cuda.stream(stream):
            self._driver.open(round_)
            for idx in range(len(round_.tasks)):
                self._driver.ready(round_, idx)

    def _take(self) -> None:
        """Wait for the round under way and bring its result into the tensors."""
        round_, self._round = self._round, None
        assert round_ is not None
        self._driver.wait(round_)
        self.num_rounds += 1
        is_dropped, self._drops_result = self._drops_result, False
        if is_dropped:
            return
        resting = self._frozen.resting()
        for bucket in self._carried:
            tensors = self._tensors(bucket)
            self._measure(bucket, tensors)
            if self._traits.mixing is None and self._copies:
                bucket.flat.sub_(self._copies[bucket.index])
            pairs = zip(bucket.slots, tensors, strict=True)
            moving = [(tensor, slot.view) for slot, tensor in pairs if id(slot.param) not in resting]
            if moving:
                self._apply(*zip(*moving, strict=True))

    def _apply(self, tensors: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> None:
        if self._traits.mixing is not None:
            torch._foreach_lerp_(tensors, results, 1.0 - self._traits.mixing)
        elif self._copies:
            torch._foreach_add_(tensors, results)
        else:
            torch._foreach_copy_(tensors, results)

    def _follow_freezing(self) -> None:
        """Leave parameters out that are frozen for good, and take those in that are not any more.

        See [Note: frozen layers]. All ranks alike, so not where they may be a round apart: there buckets stay.
        """
        resting = self._frozen.resting()
        if resting == self._resting or self._traits.asynchronous or len(resting) == len(self._parameters):
            return
        back = [p.param.data for p in self._parameters if id(p.param) in self._resting - resting]
        self._resting = resting
        self._build()
        if back:
            self._run("the mean of parameters that are not frozen any more", mean_all(back, self._comm))
        if self._traits.tensors == "weights":
            self._begin()

    def _run(self, what: str, communication: Communication) -> None:
        round_ = Round(self._transport, [Task(lambda: what, lambda: communication)], window=1)
        self._driver.open(round_)
        self._driver.ready(round_, 0)
        self._driver.wait(round_)

    def _measure(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Note how far the round moved the bucket: on a copy in every round, else now and then, as it costs a pass."""
        if self._copies:
            self._moved[bucket.index] = torch.dist(bucket.flat, self._copies[bucket.index]).float().square()
        elif self._traits.period >= _DISTANCE_EVERY or self.num_rounds % _DISTANCE_EVERY == 1:
            self._moved[bucket.index] = _distance_squared(tensors, bucket)

    def _tensors(self, bucket: Bucket) -> list[torch.Tensor]:
        return tensors_of(bucket, self._traits.tensors, self._optimizer)

    def mean_of_weights(self) -> Communication:
        """Replace every parameter by its mean over the ranks."""
        for bucket in self.buckets:
            weights = tensors_of(bucket, "weights", None)
            bucket.load(weights)
            yield self._comm.all_reduce(bucket.flat)
            bucket.flat.div_(self._comm.world_size)
            self._moved[bucket.index] = _distance_squared(weights, bucket)
            bucket.store(weights)
        resting = [p.param.data for p in self._parameters if id(p.param) in self._resting]
        yield from mean_all(resting, self._comm)


class _Frozen:
    """Which parameters are frozen for good; see [Note: frozen layers] in `WeightRounds`.

    Args:
        parameters: The parameters.
        period: Steps after which one that takes turns counts as frozen.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], period: int) -> None:
        self._parameters = parameters
        self._period = period
        self._steps: dict[int, int] = {}  # at whose ends a parameter was frozen, in a row
        self._takes_turns: set[int] = set()

    def end_step(self) -> None:
        """Look at the parameters at the end of a step."""
        now = [id(parameter) for parameter in self._parameters if not parameter.requires_grad]
        if not now and not self._steps:
            return
        self._takes_turns.update(self._steps.keys() - now)
        self._steps = {key: self._steps.get(key, 0) + 1 for key in now}

    def resting(self) -> frozenset[int]:
        """Return the identities of those that are frozen for good."""
        return frozenset(
            key for key, count in self._steps.items() if key not in self._takes_turns or count > self._period
        )


def _distance_squared(tensors: Sequence[torch.Tensor], bucket: Bucket) -> torch.Tensor:
    squares = [torch.dist(t, slot.view).float().square() for t, slot in zip(tensors, bucket.slots, strict=True)]
    return torch.stack(squares).sum()
