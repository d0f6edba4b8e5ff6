"""Base class of algorithms, which declare and perform the communication that the engine drives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from commlib.algorithms.channels import Channel, Gradients
from commlib.algorithms.context import BucketView, Context
from commlib.algorithms.state import State
from commlib.arguments import Recorded, call
from commlib.errors import ConfigError
from commlib.transport.base import Communication, Communicator
from commlib.transport.mailbox import Answer, Mailbox

#: The values of `Algorithm.exactness`; each includes the ones before it.
EXACTNESS = ("exact", "8bit", "compensated", "any")

_OPTIMIZERS = ("sgd", "adam", "any")


def keeps_momentum(optimizer: Any) -> bool:
    """Return whether an optimizer has a nonzero `momentum` option, as SGD does; False for None."""
    return optimizer is not None and any(group.get("momentum") for group in optimizer.param_groups)


@dataclass(frozen=True)
class Attachment:
    """Arguments of `Algorithm.attach`, which is called once, when the ranks' parameters are identical.

    Attributes:
        comm: The group.
        parameters: Names and parameters, in the model's order.
        optimizer: The user's optimizer.
        gather: Returns every rank's plain value (`Transport.gather_objects`), in rank order. Collective; blocks.
        run: Runs a communication, which is named for errors, with the group's collectives. Collective; blocks.
        connect: Creates a `Mailbox` from a function that answers and the largest question in bytes. Collective.
        timeout_s: Timeout of a collective, in seconds.
    """

    comm: Communicator
    parameters: Sequence[tuple[str, torch.nn.Parameter]]
    optimizer: torch.optim.Optimizer
    gather: Callable[[Any], list[Any]]
    run: Callable[[str, Communication], None]
    connect: Callable[[Answer, int], Mailbox]
    timeout_s: float


class Runner:
    """The running part of an algorithm without rounds. The engine calls it around optimizer steps, under `no_grad`.

    Methods must not wait for a peer, except `synchronize`, and `close` for a limited time.
    """

    #: Number of exchanges whose result this rank has applied.
    num_rounds: int = 0

    #: Whether `before_step` reads gradients. A closure passed to the optimizer's step would compute them too late.
    needs_gradients: bool = False

    @property
    def bytes_sent(self) -> float:
        """Number of bytes that this rank has sent."""
        return 0.0

    def before_step(self) -> None:
        """Handle the start of an optimizer step with the parameters' gradients."""

    def after_step(self) -> None:
        """Handle the end of an optimizer step; the only place where weights may change."""

    def weights_were_loaded(self) -> None:
        """Continue from other weights, which the user has loaded; discard exchanges in flight of the old weights."""

    def synchronize(self) -> None:
        """Give all ranks the same weights, which include every rank's steps. Collective."""

    def close(self) -> None:
        """Stop all communication; the parameters stay unchanged. Idempotent."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, without communication."""
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check a saved state before it is loaded; changes nothing.

        Raises:
            ConfigError: A run with these options cannot resume from it.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`, after it was checked."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Sizes of an exchange of an algorithm without rounds, for simulations. A rank asks its peers, and they answer.

    Work in memory is given in bytes read plus bytes written.

    Attributes:
        peers: Number of peers that a rank asks at once; as many peers ask it meanwhile.
        question_bytes: Size of a question to a peer.
        answer_bytes: Size of an answer of a peer.
        rest: Minimum rest after an exchange, as a multiple of the exchange's duration.
        step_bytes: Bytes read and written by the training thread in every step.
        ask_bytes: Bytes read and written by the training thread to prepare an exchange.
        take_bytes: Bytes read and written by the training thread to apply its answers.
        beside_bytes: Bytes read and written by other threads for an exchange and for answering as many questions.
        memory_bytes: Memory in addition to parameters, gradients and the optimizer's state.
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
    """Base class of algorithms for data-parallel communication. Subclass it in a file named after the algorithm.

    The engine calls `setup` whenever the buckets are rebuilt, and then runs one `communicate` per bucket and round. An
    algorithm does not handle threads, streams, hooks or the layout of flat buffers.

    Attributes that depend on options are set in `__init__`, the others in the class.

    Attributes:
        channel: The data that it communicates, and when.
        states: The objects that hold its state. The methods below set up, save and load each in order.
        exactness: Its effect on the optimisation: "exact", the full-precision mean of the gradients in every step;
            "8bit", that mean rounded to at least 8 bits per element; "compensated", elements that are not sent are
            accumulated and sent later (error feedback); "any", everything else, such as weights that differ between
            ranks or another optimizer. Each includes the ones before it.
        made_for: The optimizer that its paper uses, "sgd" or "adam"; "any" if it returns a mean of gradients that is
            only rounded.
        portable: Whether its state is the same on all ranks, for any world size. Every rank can then load any rank's
            state, also in a group of another size.
        keeps_mean: For weights: whether rounds preserve the mean of all ranks' weights up to rounding, once all ranks
            have applied their results.
        has_momentum: Whether the gradients that it returns include momentum; its `setup` must then reject an optimizer
            with momentum.
        optimizer_type: Class of the optimizer that it requires; None if it works with any optimizer.
        optimizer_kind: Kind of optimizer that `wrap` requires: "sgd", "adam" or "muon"; None if it works with any kind.
            Set by presets.
        can_repeat: Whether a round can be repeated with other ranks from its inputs and the saved state, and a rank can
            join without state of its own. False if state is a sum over ranks, or if not all ranks exchange.
        preset: Name of the preset that it was created from, or "".
        limits: Contracts (`tests/contract`) that it does not meet: name and reason. Exceptions that follow from the
            channel are not listed. Such a use raises a `ConfigError` on all ranks.
        name: Set by `wrap`: the name under which it is registered (the file name for commlib's own), or else the class
            name.
    """

    channel: Channel = Gradients()
    states: Sequence[State] = ()
    exactness: str = "any"
    made_for: str = "any"
    portable: bool = False
    keeps_mean: bool = False
    has_momentum: ClassVar[bool] = False
    can_repeat: bool = True
    optimizer_type: ClassVar[type[torch.optim.Optimizer] | None] = None
    optimizer_kind: str | None = None
    preset: str = ""
    limits: ClassVar[Mapping[str, str]] = MappingProxyType({})
    name: str = ""

    def __init__(self) -> None:
        """Initialize without options; a subclass with options defines its own `__init__`."""

    def __repr__(self) -> str:
        """Return the call that creates it, with all options."""
        return call(self)

    def group(self, name: str, parameter: torch.Tensor) -> Hashable:
        """Return the group of a parameter; a bucket holds parameters of one group. The same on all ranks."""
        return None

    def setup(self, context: Context) -> None:
        """Create per-bucket state for `context.buckets`. Called again when the buckets change, to carry state over.

        The base class does this for `states`, and likewise in `begin`, `forget`, `state_dict` and the methods that
        load.
        """
        for state in self.states:
            state.setup(context)

    def check_optimizer(self, optimizer: Any, is_warming_up: bool) -> None:
        """Check the optimizer given to `wrap`, or one that replaces it. Called before `setup`.

        Args:
            optimizer: The user's optimizer; None without one; for several, an object that holds them in `optimizers`.
            is_warming_up: Whether gradients are still averaged in full precision.

        Raises:
            ConfigError: The algorithm does not work with it. The previous optimizer stays in use.
        """

    def begin(self, bucket: BucketView) -> None:
        """For weights: read them (in `bucket.flat`) before the first counted step.

        This is the first optimizer step after the warm-up. All ranks then hold the weights that `wrap` broadcast or
        that were loaded since. Called again for all buckets before the next step when the buckets were rebuilt or state
        was loaded.
        """
        for state in self.states:
            state.begin(bucket)

    def forget(self) -> None:
        """Drop the state that belongs to the old weights, after the user has loaded other weights on all ranks.

        For weights: `begin` is called before the next counted step.
        """
        for state in self.states:
            state.forget()

    def representatives(self, comm: Communicator) -> Sequence[int]:
        """Return for each rank a rank with equal work in every round, with few distinct values, for simulations.

        By default, all ranks but the last are equivalent; the last may have less work where data is not evenly
        divisible. If the algorithm uses nodes, this holds for nodes, and ranks with the same place in their nodes are
        equivalent.

        Args:
            comm: The group, as seen by rank 0.
        """
        if comm.nodes is None:
            return _but_for_the_last(comm.world_size)
        return by_place(_but_for_the_last(comm.nodes.across.world_size), comm.nodes.local.world_size)

    def divisor(self, comm: Communicator) -> float:
        """Return the total divisor of a sum of gradients over the ranks: the number of active ranks, for a mean.

        Also applies to sparse gradients, which the engine exchanges itself.
        """
        return comm.num_active

    def predivisor(self, comm: Communicator) -> float:
        """Return the factor of `divisor` by which the engine divides gradients while it copies them into a bucket."""
        return 1.0

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        """Communicate one bucket: alternate local work and `yield` of a request; leave the result in `bucket.flat`.

        Collectives of several buckets are in flight at once; those of one bucket are issued in the order of its yields.
        The number of yields must be the same on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must define communicate()")
        yield

    def attach(self, attachment: Attachment) -> Runner:
        """Start an algorithm whose channel is `SelfRunning`. Collective.

        Raises:
            ConfigError: The algorithm does not work with the model, the optimizer or the group. Raised on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} declares SelfRunning and must define attach()")

    def traffic(self, parameters: Sequence[torch.Tensor], world_size: int) -> Traffic:
        """Return the sizes of an exchange, for simulations of an algorithm whose channel is `SelfRunning`.

        Args:
            parameters: The trained parameters; only their sizes and dtypes are used.
            world_size: The number of ranks, two or more.

        Raises:
            ConfigError: The algorithm does not describe its traffic.
        """
        raise ConfigError(f"{self.name} communicates outside the engine and does not describe its traffic (traffic)")

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's own state, including tensors.

        Raises:
            ConfigError: Two of the `states` save the same key.
        """
        found: dict[str, Any] = {}
        for state in self.states:
            saved = state.save()
            if twice := found.keys() & saved.keys():
                raise ConfigError(f"{type(self).__name__}.states: two of them save {sorted(twice)}; rename one")
            found |= saved
        return found

    def shared_state_dict(self) -> dict[str, Any]:
        """Return the entries of `state_dict` that are the same on all ranks."""
        if self.portable:
            return self.state_dict()
        found: dict[str, Any] = {}
        for state in self.states:
            saved = state.save() if state.same else {}
            found |= {kind: saved[kind] for kind in state.same}
        return found

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check a saved state before it is loaded; changes nothing. Called after `setup`.

        Raises:
            ConfigError: A run with these options cannot resume from it.
        """
        for own in self.states:
            own.check(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. Called after `setup`; the state of a saved run is checked first."""
        for own in self.states:
            own.load(state)

    @property
    def shaped_state(self) -> Sequence[str]:
        """Entries of a portable state with one piece for each whole parameter; sharded if the parameter is sharded."""
        return [kind for state in self.states for kind in state.shaped]


def check_declared(algorithm: Algorithm) -> None:
    """Check the attributes that a subclass declares.

    Raises:
        ConfigError: One of them has another type or value than `Algorithm` describes.
    """
    own = type(algorithm).__name__
    if not isinstance(algorithm.channel, Channel):
        raise ConfigError(f"{own}.channel: expected a channel, such as Gradients(), got {algorithm.channel!r}")
    for name, values in (("exactness", EXACTNESS), ("made_for", _OPTIMIZERS)):
        if (value := getattr(algorithm, name)) not in values:
            raise ConfigError(f"{own}.{name}: expected one of {', '.join(map(repr, values))}, got {value!r}")
    states = algorithm.states
    if not (isinstance(states, (tuple, list)) and all(isinstance(each, State) for each in states)):
        raise ConfigError(f"{own}.states: expected a tuple of State objects, got {states!r}")
    if type(algorithm).setup is Algorithm.setup:
        for name, value in vars(algorithm).items():
            if isinstance(value, State) and not any(value is each for each in states):
                raise ConfigError(f"{own}.{name} is a State that is not in {own}.states; add it, or it is not set up")


def by_place(nodes: Sequence[int], ranks_per_node: int) -> list[int]:
    """Return the representatives of ranks, given those of nodes: the ranks with the same place in their nodes."""
    return [node * ranks_per_node + place for node in nodes for place in range(ranks_per_node)]


def _but_for_the_last(count: int) -> list[int]:
    return [0] * (count - 1) + [count - 1]
