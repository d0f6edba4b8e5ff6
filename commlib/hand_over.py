"""The state that new members of an elastic group receive from one of the others, and that its checkpoints contain."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import queue
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from commlib import formats
from commlib.algorithms.auto import Auto
from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients, OptimizerState, Weights
from commlib.engine import optimizers
from commlib.errors import ConfigError
from commlib.state_copies import Copy, path_of, with_tensors, without_tensors
from commlib.transport import plain
from commlib.transport.base import Communication, Communicator

if TYPE_CHECKING:
    from commlib.elastic.members import Members
    from commlib.elastic.positions import Positions
    from commlib.elastic.progress import NewMember
    from commlib.elastic.sessions import Settled
    from commlib.elastic.views import View
    from commlib.replica import Replica

_log = logging.getLogger("commlib")

_FORMAT = 1
#: How long to wait for the next step of the training thread, in seconds and in steps. It may evaluate, or be paused.
_PATIENCE_S, _PATIENCE_STEPS = 2.0, 4


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


class _Request:
    """A request to the training thread for a copy of the tensors that `before` lacks.

    Attributes:
        before: The tensors that are not needed.
        reply: Receives the copy, or an error.
        is_over: Whether nobody waits for the reply any more.
    """

    def __init__(self, before: Copy) -> None:
        self.before = before
        self.reply: queue.SimpleQueue[Copy | Exception] = queue.SimpleQueue()
        self.is_over = False


class HandOver:
    """The state of an elastic job: of the model, its optimizers, the algorithm, and objects of the user.

    Args:
        replica: The wrapped model.
        members: The members, with the objects that new members receive in addition.
    """

    def __init__(self, replica: Replica, members: Members) -> None:
        self._replica, self._members = replica, members
        self._shared, self._samplers = members.shared, members.samplers
        self._copies: dict[tuple[int, int], Copy] = {}  # that joining members have received, by id and generation
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._stepped_s: float | None = None  # when the last step ended
        self._step_s = 0.0  # the duration of the last step
        own = weakref.ref(self)
        replica.engine.when_stepped = lambda: (state := own()) and state._stepped()

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
        receivers = [each for each in agreement.new if each.donor == comm.rank]
        own, tensors, missing = None, {}, {}
        if receivers:
            own = without_tensors(self._state(), tensors)
            missing = {each.rank: self._missing(each, settled.view, tensors) for each in receivers}
        described = [(path, list(each.shape), str(each.dtype).removeprefix("torch.")) for path, each in tensors.items()]
        positions = [each.positions for each in self._samplers]
        drawn = [(each.end, each.last_epoch) for each in positions]
        of_all = transport.gather_objects((own, described, missing, drawn))
        _agree_on_positions(positions, [each for *_, each in of_all], comm, [each.rank for each in agreement.new])
        if not agreement.new:
            return
        received: dict[str, torch.Tensor] = {}
        donor = next((each.donor for each in agreement.new if each.rank == comm.rank), None)
        if donor is not None:
            _, layout, missing_of, _ = of_all[donor]
            lacks = set(missing_of[comm.rank])
            found = [each for each in layout if each[0] in lacks]
            received = {path: torch.empty(shape, dtype=getattr(torch, dtype)) for path, shape, dtype in found}

        def send() -> Communication:
            sends = [(rank, tensors[path]) for rank, paths in missing.items() for path in paths]
            receives = [] if donor is None else [(donor, each) for each in received.values()]
            yield comm.exchange(sends, receives)

        engine.session.attempt("handing over the state to new members", send())
        if donor is not None:
            in_background = self._members.received
            self._load(with_tensors(of_all[donor][0], {**in_background, **received}))
            _log.info(
                "elastic: received %d bytes of state in the background, and %d while the others waited",
                sum(each.nbytes for path, each in in_background.items() if path not in received),
                sum(each.nbytes for each in received.values()),
            )

    # --- copies for joining members, see [Note: pre-copy] in `elastic/precopy.py` -----------------------------------

    def copy_for(self, joiner: tuple[int, int], limit_s: float) -> Mapping[str, torch.Tensor]:
        """Return copies of the tensors that a joining member lacks, and remember them. On a thread of its own.

        In a period of local steps, it is all of the state: until the next round, it stays as useful as it is. An
        algorithm on gradients changes its state with each step, so it is only the frozen parameters.

        Raises:
            TimeoutError: The training thread makes no step.
        """
        before = self._copies.get(joiner, Copy({}, 0, False))
        now = self._requested(before, limit_s) if self._is_local else before.missing_of(self._frozen())
        self._copies[joiner] = dataclasses.replace(now, tensors={**before.tensors, **now.tensors})
        return now.tensors

    def forget(self, joiner: tuple[int, int]) -> None:
        """Forget the tensors that a member has received."""
        self._copies.pop(joiner, None)

    def _missing(self, new: NewMember, view: View, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the paths of the tensors that a new member lacks."""
        member = view.members[new.rank]
        copy = self._copies.get((member.id, member.generation)) if new.has_copy else None
        return list(tensors) if copy is None else copy.missing(Copy(tensors, self.num_rounds, self._is_local))

    @property
    def _is_local(self) -> bool:
        engine = self._replica.engine
        return isinstance(engine.algorithm.channel, Weights) and not engine.counter.is_warming_up

    def _requested(self, before: Copy, limit_s: float) -> Copy:
        """Return a copy of the missing tensors, which the training thread makes after its next step."""
        request = _Request(before)
        self._requests.put(request)
        limit_s = min(limit_s, _PATIENCE_S + _PATIENCE_STEPS * self._step_s) if self._stepped_s else 0.0
        try:
            found = request.reply.get(timeout=limit_s)
        except queue.Empty:
            request.is_over = True
            raise TimeoutError(f"the training thread made no step within {limit_s:.1f} s") from None
        if isinstance(found, Exception):
            raise found
        return found

    def _stepped(self) -> None:
        """Answer the requests for copies. After each step of the training thread."""
        now_s = time.monotonic()
        self._step_s, self._stepped_s = now_s - (self._stepped_s or now_s), now_s
        while not self._requests.empty():
            request = self._requests.get()
            if request.is_over:
                continue
            try:
                tensors: dict[str, torch.Tensor] = {}
                without_tensors(self._state(), tensors)
                request.reply.put(request.before.missing_of(Copy(tensors, self.num_rounds, self._is_local)))
            except Exception as error:  # it must not end the training
                request.reply.put(error)

    def _frozen(self) -> Copy:
        """Return the frozen parameters. If one of them changes while it is copied, its bits differ later."""
        bare = self._replica.bare
        names = {name for name, each in bare.named_parameters() if not each.requires_grad}
        found = {path_of("", "model", name): each for name, each in self._tensors().items() if name in names}
        return Copy(found, self.num_rounds, False)

    # --- the state --------------------------------------------------------------------------------------------------

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
        plain.encode(without_tensors(self._state(), {}))

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
