"""What an algorithm is: a small class that says what is communicated; the engine does the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from commlib.algorithms.channels import Channel, Gradients
from commlib.algorithms.context import BucketView, Context
from commlib.algorithms.state import State
from commlib.arguments import Recorded
from commlib.errors import ConfigError
from commlib.transport.base import Communication, Communicator
from commlib.transport.mailbox import Answer, Mailbox

#: What an algorithm may do to the optimisation, each class wider than the one before: "exact", the full-precision mean
#: of the gradients in every step; "8bit", that mean rounded to no less than 8 bits per element; "compensated", what is
#: not sent now is remembered and sent later (error feedback); "any", everything else, such as weights that differ
#: between ranks or another optimizer.
EXACTNESS = ("exact", "8bit", "compensated", "any")


def keeps_momentum(optimizer: Any) -> bool:
    """Return whether an optimizer has a momentum of its own, as SGD's option is called; None has none."""
    return optimizer is not None and any(group.get("momentum") for group in optimizer.param_groups)


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

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a state from which a run with these options cannot go on. Nothing changes.

        Raises:
            ConfigError: It is such a one, and why.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, once it has been checked."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What an exchange of an algorithm without rounds is, for those who cannot run it: a rank asks, its peers answer.

    What a rank does in memory is told as the bytes that it reads and writes, each once.

    Attributes:
        peers: How many others a rank asks at once; as many ask it meanwhile.
        question_bytes: To each of them.
        answer_bytes: From each of them.
        rest: How many times as long as an exchange took a rank rests after it, at least.
        step_bytes: Read and written by the thread that trains in every step.
        ask_bytes: The same, to prepare an exchange.
        take_bytes: The same, to take its answers over.
        beside_bytes: Read and written by other threads for an exchange, and for answering as many questions.
        memory_bytes: What is kept beside parameters, gradients and the optimizer's state.
    """

    peers: int
    question_bytes: int
    answer_bytes: int
    rest: float = 0.0
    step_bytes: int = 0
    ask_bytes: int = 0
    take_bytes: int = 0
    beside_bytes: int = 0
    memory_bytes: int = 0


class Algorithm(Recorded):
    """A relaxation of data-parallel communication. Subclass it in a file named as the algorithm.

    The engine calls `setup` whenever the buckets are made anew, then drives one `communicate` per bucket and round.
    An algorithm never touches threads, streams, hooks or flat buffers' layout.
    """

    #: What it communicates, and when; a class attribute, or set in `__init__` where options decide.
    channel: Channel = Gradients()

    #: Whether its state is the same on all ranks, whatever their number: every rank may load any rank's then, also in a
    #: group of another size.
    portable: bool = False

    #: What it may do to the optimisation: one of `EXACTNESS`. A class attribute, or set in `__init__`.
    exactness: str = "any"

    #: The optimizer that its paper has it for, "sgd" or "adam"; "any" where it gives the optimizer a mean of gradients
    #: that is only rounded. A class attribute, or set in `__init__` where options decide.
    made_for: str = "any"

    #: Set by `wrap`: the name under which it is registered (for commlib's own the file's), else the class's.
    name: str = ""

    #: The optimizer that it is one half of and must be given; None where any will do.
    optimizer_type: ClassVar[type[torch.optim.Optimizer] | None] = None

    #: Whether the gradients that it returns have momentum already; its `setup` must refuse an optimizer that has one.
    has_momentum: ClassVar[bool] = False

    #: For weights: whether rounds leave the mean of all ranks' weights as it is, but for rounding, once all have taken
    #: their results. A class attribute, or set in `__init__` where options decide.
    keeps_mean: bool = False

    #: What it cannot do of what every algorithm is held to, and why: the name of a contract (`tests/contract`) and a
    #: reason. What the channel tells is not said again; the use itself is refused with a `ConfigError` on all ranks.
    limits: ClassVar[Mapping[str, str]] = MappingProxyType({})

    #: The state that it is composed of, set in `__init__`; the methods below set up, save and load each in turn.
    states: Sequence[State] = ()

    def __init__(self) -> None:
        """Take no options; a subclass that has some defines its own."""

    def group(self, name: str, parameter: torch.Tensor) -> Hashable:
        """Return the group of a parameter; a bucket holds parameters of one group. The same on all ranks."""
        return None

    def setup(self, context: Context) -> None:
        """Create per-bucket state for `context.buckets`. Called again after the buckets change: carry state over.

        The base class does this for `states`; so do `begin`, `forget`, `state_dict` and the methods that load.
        """
        for state in self.states:
            state.setup(context)

    def check_optimizer(self, optimizer: Any, is_warming_up: bool) -> None:
        """Refuse the optimizer of `wrap`, or one in the place of the one that was followed so far. `setup` comes after.

        Args:
            optimizer: The user's; None if none was given; of several, an object with them in `optimizers`.
            is_warming_up: Whether gradients are still averaged in full precision.

        Raises:
            ConfigError: The algorithm cannot go on with it; the old one is followed then.
        """

    def begin(self, bucket: BucketView) -> None:
        """For weights: look at them (in `bucket.flat`) before the first step that is counted.

        That is the first optimizer step after the warm-up, when all ranks hold what `wrap` broadcast or was loaded
        since. Called again for all buckets, before the next step, after they were made anew or state was loaded.
        """
        for state in self.states:
            state.begin(bucket)

    def forget(self) -> None:
        """The user has loaded other weights, on all ranks; forget what is of the old ones.

        For weights: `begin` follows before the next step that is counted.
        """
        for state in self.states:
            state.forget()

    def representatives(self, comm: Communicator) -> Sequence[int]:
        """Return, for each rank, one that has as much to do in every round; few in all. What is simulated.

        Unless an algorithm says otherwise, ranks with the same place in their nodes are alike where it knows nodes, and
        all ranks where it does not, but for the last: what is cut into equal parts need not divide.

        Args:
            comm: The group, as rank 0 sees it.
        """
        if comm.nodes is None:
            return _but_for_the_last(comm.world_size)
        return by_place(_but_for_the_last(comm.nodes.across.world_size), comm.nodes.local.world_size)

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
        """Begin to run by itself: for algorithms whose channel is `SelfRunning`. Collective.

        Raises:
            ConfigError: The model, the optimizer or the group are not such that it can; alike on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} declares SelfRunning and must define attach()")

    def traffic(self, parameters: Sequence[torch.Tensor], world_size: int) -> Traffic:
        """Return what an exchange is, for simulations: for algorithms whose channel is `SelfRunning`.

        Args:
            parameters: What is trained; only their sizes and types are looked at.
            world_size: The number of ranks, two or more.

        Raises:
            ConfigError: It cannot be said, and why.
        """
        raise ConfigError(f"{self.name} talks to its peers by itself and does not say what it sends (traffic)")

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's own state, tensors included."""
        return {key: value for state in self.states for key, value in state.save().items()}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a state from which a run with these options cannot go on. Nothing changes; called after `setup`.

        Raises:
            ConfigError: It is such a one, and why.
        """
        for own in self.states:
            own.check(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; called after `setup`, and of a saved run, once it has been checked."""
        for own in self.states:
            own.load(state)

    @property
    def shaped_state(self) -> Sequence[str]:
        """The entries of a portable state that hold one piece for each whole parameter: sharded as that, if it is."""
        return [kind for state in self.states for kind in state.shaped]


def by_place(nodes: Sequence[int], ranks_per_node: int) -> list[int]:
    """Return the representatives of ranks, given those of nodes: the ranks with the same place in them."""
    return [node * ranks_per_node + place for node in nodes for place in range(ranks_per_node)]


def _but_for_the_last(count: int) -> list[int]:
    return [0] * (count - 1) + [count - 1]
