"""What an algorithm is: a small class that says what is communicated; the engine does the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch

from commlib.errors import ConfigError
from commlib.primitives.parts import Part
from commlib.transport.base import Communication, Communicator
from commlib.transport.mailbox import Answer, Mailbox


class BucketView(Protocol):
    """A bucket as an algorithm sees it.

    Attributes:
        index: The bucket's place in the plan; the same on all ranks.
        group: What `Algorithm.group` returned for the parameters in it.
        parts: The parameters' places, in the order in which they lie in `flat`; computed when asked for.
        parameters: The parameters themselves, in that order; none for the scratch buckets of measurements.
        flat: [numel] The bucket's values, one after the other; of the parameters' dtype (complex ones as pairs).
        payload: [numel + num_flags] `flat` and, in the plan's last bucket, the engine's flags behind it; what an
            algorithm sums that reduces in full precision (`Traits.reduces_flags`).
    """

    index: int
    group: Hashable
    flat: torch.Tensor
    payload: torch.Tensor

    @property
    def parts(self) -> Sequence[Part]:
        """See above."""
        ...

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """See above."""
        ...


#: What an algorithm may do to the optimisation, each class wider than the one before: "exact", the full-precision mean
#: of the gradients in every step; "8bit", that mean rounded to no less than 8 bits per element; "compensated", what is
#: not sent now is remembered and sent later (error feedback); "any", everything else, such as weights that differ
#: between ranks or another optimizer.
EXACTNESS = ("exact", "8bit", "compensated", "any")


@dataclass(frozen=True)
class Traits:
    """What the engine must know of an algorithm.

    Attributes:
        tensors: What a bucket holds: "gradients" (communicated during backward), "weights" (after optimizer steps),
            "state:<key>" (that entry of the optimizer's state, after optimizer steps), or "none": there are no buckets
            and no rounds; the algorithm runs itself (`Algorithm.attach`).
        period: For weights and state: optimizer steps from one round to the next.
        delay: For weights and state: optimizer steps that a round stays in flight in the background before its
            result is taken; 0 means that the step waits for it. At most `period`.
        asynchronous: For weights and state: a round in the background is taken at the first step end at which its
            result is there, however many steps that takes, and the next one starts no sooner. No step ever waits; ranks
            may be a round apart. `period` is the least distance of two starts; `delay` is not given then.
        mixing: For weights and state: how a result r enters tensors x. None: x becomes r, and in the background
            x + r - c, with c the copy that the round worked on; a number a: x becomes a x + (1 - a) r.
        fragments: For weights and state: round k carries the buckets whose index is k modulo this number.
        varies: Whether rounds over the same buckets differ, as those over a graph that changes do; a simulation then
            takes the mean of several.
        warmup_steps: Optimizer steps of plain full-precision gradient all-reduce before the algorithm starts.
        needs_optimizer: Whether `wrap(..., optimizer=...)` is required.
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
        hierarchical: Whether it wants to know the nodes (`Communicator.local`, `Communicator.across`).
        portable: Whether the algorithm's state is the same on all ranks, whatever their number: every rank may load any
            rank's then, also in a group of another size.
        window: How deep buckets are interleaved: the second collective of a bucket follows the first of the bucket
            `window - 1` places later, and so on; 1 is one bucket after the other.
    """

    tensors: str = "gradients"
    period: int = 1
    delay: int = 0
    asynchronous: bool = False
    mixing: float | None = None
    fragments: int = 1
    varies: bool = False
    warmup_steps: int = 0
    needs_optimizer: bool = False
    reduces_flags: bool = False
    accumulates: bool = True
    prompt: bool = False
    single: bool = False
    idle_alone: bool = False
    hierarchical: bool = False
    portable: bool = False
    window: int = 2

    def __post_init__(self) -> None:
        kind, _, key = self.tensors.partition(":")
        if not (self.tensors in ("gradients", "weights", "none") or (kind == "state" and key)):
            raise ConfigError(
                f"Traits.tensors: expected 'gradients', 'weights', 'state:<key>' or 'none', got {self.tensors!r}"
            )
        if self.period < 1 or self.warmup_steps < 0 or self.window < 1 or not 0 <= self.delay <= self.period:
            raise ConfigError(
                "Traits: expected period >= 1, 0 <= delay <= period, warmup_steps >= 0 and window >= 1, got "
                f"period={self.period}, delay={self.delay}, warmup_steps={self.warmup_steps}, window={self.window}"
            )
        if self.fragments < 1 or not 0 <= (self.mixing or 0) <= 1 or (self.asynchronous and self.delay):
            raise ConfigError(
                "Traits: expected fragments >= 1, mixing None or from 0 to 1, no delay where rounds are asynchronous, "
                f"got fragments={self.fragments}, mixing={self.mixing}, delay={self.delay}, {self.asynchronous=}"
            )
        if self.on_gradients and (self.period, self.in_background, self.mixing, self.fragments) != (1, False, None, 1):
            raise ConfigError(
                "Traits: gradients are communicated in every synchronised backward; period, delay, asynchronous, "
                f"mixing and fragments are for weights and optimizer state, got {self}"
            )

    @property
    def on_gradients(self) -> bool:
        """Whether the buckets hold gradients."""
        return self.tensors == "gradients"

    @property
    def runs_itself(self) -> bool:
        """Whether the algorithm has no rounds, but a `Runner`."""
        return self.tensors == "none"

    @property
    def in_background(self) -> bool:
        """Whether rounds go on while the next steps are made."""
        return self.asynchronous or self.delay > 0

    @property
    def cycle(self) -> int:
        """Steps until all fragments have had their round; where rounds are alike, each cycle is like the one before."""
        return self.period * self.fragments


@dataclass(frozen=True)
class Context:
    """What an algorithm is told when its buckets exist.

    Attributes:
        comm: The group, as `communicate` will see it.
        buckets: The buckets, in plan order.
        device: The device of the buckets.
        optimizer: The user's optimizer, or None.
        scaler: The user's GradScaler, or None.
    """

    comm: Communicator
    buckets: Sequence[BucketView]
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    scaler: Any = None

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.comm.world_size


@dataclass(frozen=True)
class Attachment:
    """What an algorithm that runs itself is told once, when the ranks' parameters are alike.

    Attributes:
        comm: The group.
        parameters: Names and parameters, in the model's order.
        optimizer: The user's optimizer.
        gather: Returns every rank's plain value (`Transport.gather_objects`), in rank order. Collective; blocks.
        run: Runs a communication (named for errors) with the group's collectives. Collective; blocks.
        connect: Makes a `Mailbox` of a function that answers and the largest question in bytes. Collective.
        timeout_s: How long a collective may wait for its peers.
    """

    comm: Communicator
    parameters: Sequence[tuple[str, torch.nn.Parameter]]
    optimizer: torch.optim.Optimizer
    gather: Callable[[Any], list[Any]]
    run: Callable[[str, Communication], None]
    connect: Callable[[Answer, int], Mailbox]
    timeout_s: float


class Runner:
    """An algorithm at work that has no rounds; the engine calls it around the optimizer's steps, without gradients.

    Nothing here may wait for a peer, except `synchronize`, and `close` within a limit.
    """

    #: Exchanges so far whose result this rank has taken.
    num_rounds: int = 0

    #: Whether `before_step` looks at gradients, so that a closure of the optimizer's step would make them too late.
    needs_gradients: bool = False

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent."""
        return 0.0

    def before_step(self) -> None:
        """The optimizer is about to make a step with the parameters' gradients."""

    def after_step(self) -> None:
        """The optimizer has made its step; the only place where weights may change."""

    def weights_were_loaded(self) -> None:
        """The user has loaded other weights: go on from these; what is under way of the old ones comes to nothing."""

    def synchronize(self) -> None:
        """Give all ranks the same weights, in which what every rank has done is contained. Collective."""

    def close(self) -> None:
        """End all that is under way; the parameters stay as they are. Harmless when called twice."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; asks no other rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""


class Algorithm:
    """A relaxation of data-parallel communication. Subclass it in a file named as the algorithm.

    The engine calls `setup` whenever the buckets are made anew, then drives one `communicate` per bucket and round.
    An algorithm never touches threads, streams, hooks or flat buffers' layout.
    """

    #: What the engine must know; a class attribute, or set in `__init__` where options decide.
    traits: Traits = Traits()

    #: What it may do to the optimisation: one of `EXACTNESS`. A class attribute, or set in `__init__`.
    exactness: str = "any"

    #: Set by `wrap`: the name under which it is registered (for commlib's own the file's), else the class's.
    name: str = ""

    #: The optimizer that it is one half of and must be given; None where any will do.
    optimizer_type: ClassVar[type[torch.optim.Optimizer] | None] = None

    #: What it cannot do of what every algorithm is held to, and why: the name of a contract (`tests/contract`) and a
    #: reason. What the traits tell is not said again; the use itself is refused with a `ConfigError` on all ranks.
    limits: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def group(self, name: str, parameter: torch.Tensor) -> Hashable:
        """Return the group of a parameter; a bucket holds parameters of one group. The same on all ranks."""
        return None

    def setup(self, context: Context) -> None:
        """Make per-bucket state for `context.buckets`. Called again after the buckets change: carry state over."""

    def begin(self, bucket: BucketView) -> None:
        """For weights: look at them (in `bucket.flat`) before the first step that is counted.

        That is the first optimizer step after the warm-up, when all ranks hold what `wrap` broadcast or was loaded
        since. Called again for all buckets, before the next step, after they were made anew or state was loaded.
        """

    def forget(self) -> None:
        """For weights: the user has loaded others, on all ranks; forget what is of the old ones.

        `begin` follows before the next step that is counted.
        """

    def divisor(self, comm: Communicator) -> float:
        """Return what a sum of gradients over the ranks is divided by in all: their number, for a mean.

        Sparse gradients, which the engine exchanges itself, are divided by it.
        """
        return comm.num_active

    def predivisor(self, comm: Communicator) -> float:
        """Return the part of `divisor` by which the engine divides gradients while it gathers them into a bucket."""
        return 1.0

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        """Communicate one bucket: local work, then `yield` one request, and so on; the result is left in `bucket.flat`.

        Collectives of several buckets are in flight at once; each bucket's own are in the order of its yields. The
        number of yields must be the same on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must define communicate()")
        yield

    def attach(self, attachment: Attachment) -> Runner:
        """Begin to run by itself: for algorithms whose `Traits.tensors` is "none". Collective.

        Raises:
            ConfigError: The model, the optimizer or the group are not such that it can; alike on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} has Traits(tensors='none') and must define attach()")

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's own state, tensors included."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; called after `setup`."""
