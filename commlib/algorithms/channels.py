"""Channels: the declarations of the data that an algorithm communicates, and of the time at which it does.

    Gradients        every bucket of gradients, during backward
    Weights          the weights, after optimizer steps
    OptimizerState   an entry of the optimizer's state, after optimizer steps
    SelfRunning      no rounds; the algorithm runs its own communication around optimizer steps

During the warm-up of any channel, gradients are averaged in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass

from commlib.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Base class of all channels.

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
        """Whether the communication in a step depends on the number of optimizer steps."""
        return True

    @property
    def has_rounds(self) -> bool:
        """Whether it consists of rounds of requests to a communicator. If not, `Algorithm.traffic` describes it."""
        return True

    @property
    def keeps_step(self) -> bool:
        """Whether all ranks reach the same round at the same step, so that a run does not depend on timing."""
        return True

    @property
    def keeps_replicas_alike(self) -> bool:
        """Whether ranks that start with identical weights have identical weights after every step."""
        return False

    @property
    def wants_nodes(self) -> bool:
        """Whether it uses `Communicator.nodes`."""
        return False

    @property
    def reads_state(self) -> bool:
        """Whether it reads the optimizer's state, which exists after the optimizer's first step."""
        return False

    @property
    def rests_alone(self) -> bool:
        """Whether there is nothing to do in a group of one rank."""
        return False

    @property
    def cycle(self) -> int:
        """Number of steps after which the communication pattern repeats."""
        return 1

    @property
    def steady_step(self) -> int:
        """First step from which the pattern repeats; simulations begin there."""
        return self.warmup_steps

    def syncs_gradients(self, step: int) -> bool:
        """Return whether the backward of a step, counted from 0, synchronises gradients."""
        return step < self.warmup_steps

    @property
    def is_sampled(self) -> bool:
        """Whether a simulation averages over several cycles."""
        return self.cycle > 1


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Steps that each rank makes with its own gradients, between rounds with growing intervals.

    Attributes:
        after: Number of initial steps that all have a round.
        doubling_every: Steps after which the interval doubles: rounds are 2 steps apart for this many steps, then 4,
            and so on.
        longest: Largest number of steps between rounds; a power of two.
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
        """First step from which rounds are `longest` steps apart."""
        return self.after + self.doubling_every * (self.longest.bit_length() - 2)

    def has_round(self, step: int) -> bool:
        """Return whether a step, counted from 0, has a round."""
        since = step - self.after
        if since < 0:
            return True
        return (since + 1) % min(self.longest, 2 << min(since // self.doubling_every, 62)) == 0


@dataclass(frozen=True, kw_only=True)
class Gradients(Channel):
    """Communicates gradients in every synchronised backward, or in the backward of some steps.

    Attributes:
        local: Steps without a round, in which the ranks' weights diverge; None if every step has a round. With local
            steps, the result of `communicate` must enable the optimizer to make the weights of all ranks identical
            again.
        varies_until: Step before which rounds may differ from later ones, even after the warm-up.
        reads_optimizer: Whether it reads the user's optimizer, so that `wrap(..., optimizer=...)` is required.
        reduces_flags: Whether `communicate` sums `bucket.payload` over the ranks in a format that keeps small positive
            numbers positive. If False, the engine sends its flags separately.
        accumulates: Whether a bucket may include gradients that were already communicated, as with two synchronised
            backwards in one step. A gradient that is already a mean over the ranks is then averaged again, which does
            not change it. False if `communicate` returns something other than a mean of gradients, such as a mean of
            momentum; such gradients are then rejected.
        prompt: Whether `communicate` requests its first collective without processing the data. The thread that marks a
            bucket ready then issues this collective itself.
        single: Whether `communicate` requests only one collective, with little work after it. The thread that waits at
            the end of backward then finishes it itself.
        idle_alone: Whether there is nothing to do in a group of one rank.
        hierarchical: Whether it uses the nodes (`Communicator.nodes`).
        window: Depth at which buckets are interleaved: the second collective of a bucket follows the first one of the
            bucket `window - 1` places later, and so on. 1 processes one bucket after the other.
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
        """See `Channel`. True except in local steps."""
        return self.local is None or self.local.has_round(step)


@dataclass(frozen=True, kw_only=True)
class Weights(Channel):
    """Communicates weights at the end of optimizer steps.

    Attributes:
        period: Optimizer steps between rounds.
        delay: Optimizer steps for which a round is in flight in the background before its result is applied, at most
            `period`. With 0 the step waits for the round.
        asynchronous: Whether the result of a background round is applied at the end of the first step at which it is
            available. No step waits, and ranks may be one round apart. The next round starts after that step; `period`
            is the minimum number of steps between starts. Requires `delay=0`.
        mixing: How a result r is applied to tensors x. With None, x becomes r, or x + r - c for a background round,
            where c is the copy that the round started from. With a number a, x becomes a x + (1 - a) r.
        fragments: Number of fragments. Round k communicates the buckets whose index is congruent to k modulo this
            number.
        varies: Whether rounds over the same buckets differ, for example over a graph that changes.
        hierarchical: Whether it uses the nodes (`Communicator.nodes`).
        window: See `Gradients.window`.
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
        self._expect(not (self.asynchronous and self.delay), f"no delay with asynchronous rounds, got {self.delay}")

    @property
    def in_background(self) -> bool:
        """Whether rounds run during the next steps."""
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
        """See `Channel`. A cycle has one round of each fragment."""
        return self.period * self.fragments

    @property
    def is_sampled(self) -> bool:
        """See `Channel`."""
        return self.cycle > 1 or self.varies


@dataclass(frozen=True, kw_only=True)
class OptimizerState(Weights):
    """Communicates an entry of the optimizer's state in place of the weights; see `Weights`.

    Attributes:
        key: Key of the entry, as in `optimizer.state[parameter][key]`.
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
    """Uses neither buckets nor rounds; the algorithm runs its own communication (`Algorithm.attach`).

    Attributes:
        period: Minimum number of optimizer steps between exchanges with a peer.
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
