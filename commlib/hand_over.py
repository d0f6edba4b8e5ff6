"""The state that new members of an elastic group receive from one of the others, and that its checkpoints contain."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from commlib import formats
from commlib.algorithms.auto import Auto
from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients, OptimizerState, Weights
from commlib.engine import optimizers
from commlib.errors import ConfigError
from commlib.transport import plain
from commlib.transport.base import Communication, Communicator

if TYPE_CHECKING:
    from commlib.elastic.members import Members
    from commlib.elastic.positions import Positions
    from commlib.elastic.sessions import Settled
    from commlib.replica import Replica

_FORMAT = 1


def check_elastic(algorithm: Algorithm, is_scaled: bool) -> None:
    """Check that an algorithm and its options work in an elastic group.

    Raises:
        ConfigError: The algorithm has no rounds of all ranks that can be repeated, or a GradScaler is used.
    """
    declared, name = algorithm.channel, algorithm.name
    if not (isinstance(declared, Gradients | Weights) and declared.keeps_step) or isinstance(declared, OptimizerState):
        raise ConfigError(f"{name} is not supported in an elastic group: it has no rounds of all ranks")
    if isinstance(algorithm, Auto):
        raise ConfigError(f"{name} is not supported in an elastic group; choose the algorithm")
    if declared.wants_nodes:
        raise ConfigError(f"{name}: nodes (hierarchical=True) are not supported in an elastic group")
    if not algorithm.can_repeat:
        raise ConfigError(
            f"{name} is not supported in an elastic group with these options: its state depends on other members"
        )
    if is_scaled:
        raise ConfigError("scaler: a GradScaler is not supported in an elastic group")


class HandOver:
    """The state of an elastic job: of the model, its optimizers, the algorithm, and objects of the user.

    Args:
        replica: The wrapped model.
        members: The members, with the objects that new members receive in addition.
    """

    def __init__(self, replica: Replica, members: Members) -> None:
        self._replica, self._shared, self._samplers = replica, members.shared, members.samplers

    def __call__(self, settled: Settled) -> None:
        """Send or receive the state, if the view has new members, and agree on the positions of samplers.

        Collective. Called on the training thread of every member of a view.

        Raises:
            TransportError: A member was lost. The state of new members is undefined until the next call.
        """
        agreement, engine = settled.agreement, self._replica.engine
        if not (agreement.new or self._samplers):
            return
        transport = engine.session.transport
        comm = Communicator(transport.rank, transport.world_size)
        is_donor, is_new = bool(agreement.new) and comm.rank == agreement.donor, comm.rank in agreement.new
        tensors: list[torch.Tensor] = []
        own = _without_tensors(self._state(), tensors) if is_donor else None
        described = [(list(each.shape), str(each.dtype).removeprefix("torch.")) for each in tensors]
        positions = [each.positions for each in self._samplers]
        drawn = [(each.end, each.last_epoch) for each in positions]
        of_all = transport.gather_objects((own, described, drawn))
        _agree_on_positions(positions, [each for _, _, each in of_all], comm, agreement.new)
        if not agreement.new:
            return
        skeleton, layout, _ = of_all[agreement.donor]
        if is_new:
            tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in layout]

        def send() -> Communication:
            sends = [(rank, each) for rank in agreement.new for each in tensors] if is_donor else []
            receives = [(agreement.donor, each) for each in tensors] if is_new else []
            yield comm.exchange(sends, receives)

        engine.session.attempt("handing over the state to new members", send())
        if is_new:
            self._load(_with_tensors(skeleton, tensors))

    @property
    def num_rounds(self) -> int:
        """The number of rounds that this member has completed."""
        return self._replica.engine.session.num_rounds

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with references to tensors. Local."""
        return {
            **formats.stamp(_FORMAT),
            "algorithm_name": self._replica.engine.algorithm.name,
            **self._state(),
            "samplers": [each.state_dict() for each in self._samplers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint, before this member has entered a view.

        Raises:
            ConfigError: It has another format, or is of another algorithm or model, or of other objects.
        """
        formats.check(state, _FORMAT, "the checkpoint of an elastic job")
        engine = self._replica.engine
        own = {name: list(each.shape) for name, each in self._tensors().items()}
        theirs = {name: list(each.shape) for name, each in state["model"].items()}
        for what, expected, found in (
            ("algorithm", engine.algorithm.name, state["algorithm_name"]),
            ("tensors", own, theirs),
            ("optimizers", len(optimizers.all_of(engine.optimizer)), len(state["optimizers"])),
            ("shared objects", sorted(self._shared), sorted(state["shared"])),
            ("samplers", len(self._samplers), len(state["samplers"])),
        ):
            if found != expected:
                raise ConfigError(f"the checkpoint of an elastic job has the {what} {found!r}, expected {expected!r}")
        self._load(state)
        for each, its in zip(self._samplers, state["samplers"], strict=True):
            each.load_state_dict(its)

    def check(self) -> None:
        """Check that the state can be sent.

        Raises:
            ConfigError: An optimizer, or an object passed to `Members.share`, has state that is neither tensors nor
                plain values.
        """
        plain.encode(_without_tensors(self._state(), []))

    def _state(self) -> dict[str, Any]:
        engine = self._replica.engine
        return {
            "model": self._tensors(),
            "optimizers": [each.state_dict() for each in optimizers.all_of(engine.optimizer)],
            "algorithm": engine.algorithm.shared_state_dict(),
            "step": engine.counter.step - any(channel.repeats_step for channel in engine.channels),
            "num_rounds": engine.session.num_rounds,
            "channels": [channel.state_for_new_member() for channel in engine.channels],
            "shared": {name: each.state_dict() for name, each in self._shared.items()},
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers that are communicated, as they are."""
        named = itertools.chain(self._replica.bare.named_parameters(), self._replica.bare.named_buffers())
        return {name: each.data for name, each in named if name not in self._replica.ignored}

    @torch.no_grad()
    def _load(self, state: Mapping[str, Any]) -> None:
        engine = self._replica.engine
        for name, each in self._tensors().items():
            each.copy_(state["model"][name])
        for optimizer, its in zip(optimizers.all_of(engine.optimizer), state["optimizers"], strict=True):
            optimizer.load_state_dict(its)
        engine.algorithm.load_state_dict({**engine.algorithm.state_dict(), **state["algorithm"]})
        engine.counter.step = state["step"]
        engine.session.num_rounds = state["num_rounds"]
        for channel, its in zip(engine.channels, state["channels"], strict=True):
            channel.load_as_new_member(its)
        engine.forget_loads()
        for name, each in self._shared.items():
            each.load_state_dict(state["shared"][name])


def _agree_on_positions(
    positions: Sequence[Positions], drawn: Sequence[Sequence[tuple[int, int]]], comm: Communicator, new: Sequence[int]
) -> None:
    """Continue samplers in a view. `drawn`: for each rank and sampler, the end and the epoch of its draws."""
    for number, each in enumerate(positions):
        of_old = [ends[number] for rank, ends in enumerate(drawn) if rank not in new]
        base, epoch = max(end for end, _ in of_old), max(epoch for _, epoch in of_old)
        each.admit(base, epoch, comm.rank, comm.world_size, new)


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return nested data with each tensor replaced by its place in `tensors`, where it is appended."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().contiguous())
        return ("tensor", len(tensors) - 1)
    if isinstance(value, Mapping):
        return ("dict", [(key, _without_tensors(each, tensors)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return ("list" if isinstance(value, list) else "tuple", [_without_tensors(each, tensors) for each in value])
    return ("plain", value)


def _with_tensors(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the data that `_without_tensors` turned into `skeleton` and `tensors`."""
    kind, value = skeleton
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _with_tensors(each, tensors) for key, each in value}
    if kind == "plain":
        return value
    return (list if kind == "list" else tuple)(_with_tensors(each, tensors) for each in value)
