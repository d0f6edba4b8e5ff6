"""What an algorithm communicates, and when: one declared object of the kind that fits, which the engine carries out.

    Gradients        every bucket of gradients, during backward
    Weights          the weights, after optimizer steps
    OptimizerState   an entry of the optimizer's state, after optimizer steps
    SelfRunning      nothing that has rounds: the algorithm runs itself, around optimizer steps

During the warm-up of any kind, gradients are averaged in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass

from commlib.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Channel:
    """What all kinds have in common.

    Attributes:
        warmup_steps: Optimizer steps of plain full-precision gradient all-reduce before the algorithm starts.
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        self._expect(self.warmup_steps >= 0, f"warmup_steps of 0 or more, got {self.warmup_steps}")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise ConfigError(f"{type(self).__name__}: expected {what}")

    @property
    def needs_optimizer(self) -> bool:
        """Whether `wrap(..., optimizer=...)` is required."""
        return True

    @property
    def follows_steps(self) -> bool:
        """Whether what it does in a step depends on how many the optimizer has made."""
        return True

    @property
    def has_rounds(self) -> bool:
        """Whether it is made of rounds of requests to a communicator; else `Algorithm.traffic` says what is sent."""
        return True

    @property
    def keeps_step(self) -> bool:
        """Whether all ranks come to the same round at the same step; a run then depends on no clock."""
        return True

    @property
    def keeps_replicas_alike(self) -> bool:
        """Whether ranks that begin with the same weights have the same weights after every step."""
        return False

    @property
    def wants_nodes(self) -> bool:
        """Whether `Communicator.nodes` is to be there."""
        return False

    @property
    def reads_state(self) -> bool:
        """Whether it reads the optimizer's state, which an optimizer has after its first step."""
        return False

    @property
    def rests_alone(self) -> bool:
        """Whether there is nothing to do in a group of one rank."""
        return False

    @property
    def cycle(self) -> int:
        """Steps after which everything begins anew: each cycle is like the one before."""
        return 1

    @property
    def steady_step(self) -> int:
        """The step from which on that holds; what is simulated begins there."""
        return self.warmup_steps

    def syncs_gradients(self, step: int) -> bool:
        """Return whether the backward of a step, from 0 on, synchronises gradients."""
        return step < self.warmup_steps

    @property
    def is_sampled(self) -> bool:
        """Whether a simulation takes the mean of several cycles."""
        return self.cycle > 1


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Steps that each rank makes with its own gradients, between rounds that come ever more rarely.

    Attributes:
        after: The first steps, all of which have a round.
        doubling_every: Rounds are 2 steps apart for as many steps, then 4, and so on.
        longest: Steps from one round to the next in the end; a power of two.
    """

    after: int
    doubling_every: int
    longest: int

    def __post_init__(self) -> None:
        if self.after < 1 or self.doubling_every < 1 or self.longest < 2 or self.longest & (self.longest - 1):
            raise ConfigError(
                f"LocalSteps: expected after and doubling_every of 1 or more, and longest a power of two, got "
                f"{self.after}, {self.doubling_every}, {self.longest}"
            )

    @property
    def settled_at(self) -> int:
        """The step from which on rounds are `longest` apart."""
        return self.after + self.doubling_every * (self.longest.bit_length() - 2)

    def has_round(self, step: int) -> bool:
        """Return whether there is a round in a step, from 0 on."""
        since = step - self.after
        if since < 0:
            return True
        return (since + 1) % min(self.longest, 2 << min(since // self.doubling_every, 62)) == 0


@dataclass(frozen=True, kw_only=True)
class Gradients(Channel):
    """Gradients are communicated in every synchronised backward, or in those of some steps.

    Attributes:
        local: Steps without a round, in which weights come to differ; None: there are none. Whatever `communicate`
            leaves in a round must then let the optimizer make all ranks' weights alike.
        varies_until: Before this step, rounds may be unlike those that follow, also after the warm-up.
        reads_optimizer: Whether it reads the user's optimizer, so that `wrap(..., optimizer=...)` is required.
        reduces_flags: Whether `communicate` sums `bucket.payload` over the ranks in a format that keeps small positive
            numbers positive. Where False, the engine sends its flags by themselves.
        accumulates: Whether gradients that were communicated before may be in what is communicated, as when a step has
            two synchronised backwards: their mean over the ranks then counts once more as itself. Not where what
            `communicate` leaves is no mean of gradients but, say, of momentum; such gradients are refused then.
        prompt: Whether `communicate` asks for its first collective without working on the data; the thread that makes a
            bucket ready then issues it itself.
        single: Whether `communicate` asks for one collective only and has next to nothing to do after it; the thread
            that waits at the end of backward then finishes it itself.
        idle_alone: Whether there is nothing to do in a group of one rank.
        hierarchical: Whether it wants to know the nodes (`Communicator.nodes`).
        window: How deep buckets are interleaved: the second collective of a bucket follows the first of the bucket
            `window - 1` places later, and so on; 1 is one bucket after the other.
    """

    local: LocalSteps | None = None
    varies_until: int = 0
    reads_optimizer: bool = False
    reduces_flags: bool = False
    accumulates: bool = True
    prompt: bool = False
    single: bool = False
    idle_alone: bool = False
    hierarchical: bool = False
    window: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect(self.window >= 1, f"window of 1 or more, got {self.window}")

    @property
    def keeps_replicas_alike(self) -> bool:
        """See `Channel`."""
        return self.local is None

    @property
    def follows_steps(self) -> bool:
        """See `Channel`."""
        return self.needs_optimizer or max(self.warmup_steps, self.varies_until) > 0

    @property
    def needs_optimizer(self) -> bool:
        """See `Channel`."""
        return self.reads_optimizer or self.local is not None

    @property
    def cycle(self) -> int:
        """See `Channel`."""
        return 1 if self.local is None else self.local.longest

    @property
    def steady_step(self) -> int:
        """See `Channel`."""
        return max(self.warmup_steps, self.varies_until, 0 if self.local is None else self.local.settled_at)

    @property
    def reads_state(self) -> bool:
        """See `Channel`."""
        return self.reads_optimizer

    @property
    def rests_alone(self) -> bool:
        """See `Channel`."""
        return self.idle_alone

    @property
    def wants_nodes(self) -> bool:
        """See `Channel`."""
        return self.hierarchical

    def syncs_gradients(self, step: int) -> bool:
        """See `Channel`: always, but for local steps."""
        return self.local is None or self.local.has_round(step)


@dataclass(frozen=True, kw_only=True)
class Weights(Channel):
    """Weights are communicated at the end of optimizer steps.

    Attributes:
        period: Optimizer steps from one round to the next.
        delay: Optimizer steps that a round stays in flight in the background before its result is taken; 0 means that
            the step waits for it. At most `period`.
        asynchronous: A round in the background is taken at the first step end at which its result is there, however
            many steps that takes, and the next one starts no sooner. No step ever waits; ranks may be a round apart.
            `period` is the least distance of two starts; `delay` is not given then.
        mixing: How a result r enters tensors x. None: x becomes r, and in the background x + r - c, with c the copy
            that the round worked on; a number a: x becomes a x + (1 - a) r.
        fragments: Round k carries the buckets whose index is k modulo this number.
        varies: Whether rounds over the same buckets differ, as those over a graph that changes do.
        hierarchical: Whether it wants to know the nodes (`Communicator.nodes`).
        window: As `Gradients.window`.
    """

    period: int = 1
    delay: int = 0
    asynchronous: bool = False
    mixing: float | None = None
    fragments: int = 1
    varies: bool = False
    hierarchical: bool = False
    window: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect(self.window >= 1, f"window of 1 or more, got {self.window}")
        self._expect(
            self.period >= 1 and 0 <= self.delay <= self.period,
            f"period >= 1 and 0 <= delay <= period, got period={self.period}, delay={self.delay}",
        )
        self._expect(
            self.fragments >= 1 and 0 <= (self.mixing or 0) <= 1,
            f"fragments >= 1 and mixing None or from 0 to 1, got fragments={self.fragments}, mixing={self.mixing}",
        )
        self._expect(
            not (self.asynchronous and self.delay), f"no delay where rounds are asynchronous, got {self.delay}"
        )

    @property
    def in_background(self) -> bool:
        """Whether rounds go on while the next steps are made."""
        return self.asynchronous or self.delay > 0

    @property
    def wants_nodes(self) -> bool:
        """See `Channel`."""
        return self.hierarchical

    @property
    def keeps_step(self) -> bool:
        """See `Channel`."""
        return not self.asynchronous

    @property
    def cycle(self) -> int:
        """See `Channel`: until all fragments have had their round."""
        return self.period * self.fragments

    @property
    def is_sampled(self) -> bool:
        """See `Channel`."""
        return self.cycle > 1 or self.varies


@dataclass(frozen=True, kw_only=True)
class OptimizerState(Weights):
    """As `Weights`, but buckets hold an entry of the optimizer's state.

    Attributes:
        key: The entry's, as in `optimizer.state[parameter][key]`.
    """

    key: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect(bool(self.key), "the key of an entry of the optimizer's state, got none")

    @property
    def reads_state(self) -> bool:
        """See `Channel`."""
        return True


@dataclass(frozen=True, kw_only=True)
class SelfRunning(Channel):
    """There are no buckets and no rounds: the algorithm runs itself (`Algorithm.attach`).

    Attributes:
        period: Optimizer steps from one exchange with a peer to the next, at least.
    """

    period: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect(self.period >= 1, f"period of 1 or more, got {self.period}")

    @property
    def has_rounds(self) -> bool:
        """See `Channel`."""
        return False

    @property
    def keeps_step(self) -> bool:
        """See `Channel`."""
        return False
