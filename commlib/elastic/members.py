"""The group of an elastic job: `join`, and the object that `commlib.wrap` takes instead of a process group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.utils.data

from commlib.elastic.membership import Membership, parsed
from commlib.elastic.precopy import Donor, PreCopy, Source
from commlib.elastic.sampler import Loader, Sampler
from commlib.elastic.sessions import Sessions, Settled
from commlib.elastic.transport import ElasticTransport
from commlib.elastic.views import Join, Joining, View
from commlib.errors import ConfigError
from commlib.transport.closing import Finalizer


class Stateful(Protocol):
    """An object with state, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load the state."""
        ...


class JobState(Stateful, Source, Protocol):
    """The state of a wrapped model and of everything that belongs to it. See `commlib.hand_over`."""

    @property
    def num_rounds(self) -> int:
        """The number of completed rounds."""
        ...

    def __call__(self, settled: Settled) -> None:
        """Hand the state over to the new members of a view."""


class Members:
    """The members of an elastic job, as seen by one of them. Made by `join`.

    Attributes:
        timeout_s: How long a collective, and a change of the view, may take, in seconds.
        shared: What new members receive in addition to the model and the optimizer, by name.
        samplers: The samplers of the job.
    """

    is_elastic = True  # tells `commlib.wrap` that this is no process group

    def __init__(self, address: str, token: bytes, join: Join, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.shared: dict[str, Stateful] = {}
        self.samplers: list[Sampler] = []
        self._sessions: Sessions | None = None
        self._state: JobState | None = None
        self._loaded: dict[str, Any] | None = None
        self._transport: ElasticTransport | None = None
        self._is_ready = False
        self._is_standby = join.standby
        self._donor = Donor(parsed(address)[0], token, timeout_s)
        self._pre_copy = PreCopy(token, timeout_s, self._ready)
        self._parts: list[Any] = [self._donor, self._pre_copy]  # to be closed, the last one first
        request = replace(join, data=self._donor.port)
        try:
            self._membership = Membership(address, token, request, timeout_s, self._on_view, self._on_joining)
        except BaseException:
            self._donor.close()
            raise
        self._parts.append(self._membership)
        self._finalizer = Finalizer(self, partial(_end_all, self._parts), "the members of an elastic job")

    # --- for users --------------------------------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """This member's id. It keeps it when it joins again under its name."""
        return self._membership.me.id

    @property
    def name(self) -> str:
        """This member's name."""
        return self._membership.me.name

    @property
    def view(self) -> View | None:
        """The newest view; None before the first one. Does not block."""
        return self._membership.view

    @property
    def rank(self) -> int:
        """This member's rank in the view of the current round: 0 to `world_size` - 1. 0 before the first view."""
        return 0 if self._transport is None else self._transport.rank

    @property
    def world_size(self) -> int:
        """The number of members in the view of the current round. 1 before the first view."""
        return 1 if self._transport is None else self._transport.world_size

    @property
    def num_rounds(self) -> int:
        """The number of rounds that the job has completed; a new member does not begin at 0.

        With an algorithm on gradients, it is the number of synchronised backwards.
        """
        return 0 if self._sessions is None else self._sessions.num_agreed

    def share(self, name: str, stateful: Stateful) -> None:
        """Let new members receive the state of another object, such as a scheduler. Call it before `commlib.wrap`.

        Every member calls it with the same names. The state may contain tensors, plain values, and lists, tuples and
        dicts of them.

        Raises:
            ConfigError: The name is taken, or a model was wrapped before.
        """
        if name in self.shared:
            raise ConfigError(f"share: {name!r} is taken")
        self.refuse_if_ready("share")
        self.shared[name] = stateful

    def loader(self, loader: torch.utils.data.DataLoader[Any]) -> Loader:
        """Return an iterable over the batches of a `DataLoader`, in which members may come and go.

        Args:
            loader: A `DataLoader(dataset, batch_sampler=sampler)`, where `sampler` is a `commlib.elastic.Sampler`. Its
                workers may draw batches in advance; if the members change, those are dropped and drawn again.

        Raises:
            ConfigError: Its `batch_sampler` is another one, or it does not keep the order of batches.
        """
        return Loader(loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the job for a checkpoint: the state sent to new members, and the positions of samplers.

        Local, with references to tensors, for `torch.save`. Call it between rounds, on one member: after a round of an
        algorithm on gradients, it is the same on all members. With an algorithm on weights, it has this member's
        weights. Residuals, ignored parameters and ignored buffers are left out.

        Raises:
            ConfigError: No model is wrapped.
        """
        if self._state is None:
            raise ConfigError("Members.state_dict: call it after commlib.wrap")
        return self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of `state_dict` into the model that will be wrapped. Before `commlib.wrap`.

        For the start of a job, with any number of members; residuals begin at zero. If members load different
        checkpoints, or some of them none, all continue with the one that has most rounds. In a job that is running, a
        member receives the state of the others instead.

        Raises:
            ConfigError: A model was wrapped before. `commlib.wrap` raises one if the checkpoint does not fit.
        """
        self.refuse_if_ready("load_state_dict")
        self._loaded = state_dict

    def leave(self) -> None:
        """Leave the job at once. The others repeat the current round without this member. Safe in a signal handler."""
        self._membership.leave()

    def close(self) -> None:
        """Leave the job, and end all connections and threads. Idempotent. Otherwise, the exit does this."""
        self._finalizer.detach()
        self._membership.leave()
        _end_all(self._parts)

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for `Sampler` and `commlib.wrap` ---------------------------------------------------------------------------

    def add_sampler(self, sampler: Sampler) -> None:
        """Let the members agree on the positions of a sampler.

        Raises:
            ConfigError: A model was wrapped before.
        """
        self.refuse_if_ready("Sampler")
        self.samplers.append(sampler)

    def refuse_if_ready(self, what: str) -> None:
        """Raise in a method that must be called before `commlib.wrap`.

        Raises:
            ConfigError: A model was wrapped before.
        """
        if self._is_ready:
            raise ConfigError(f"{what}: call it before commlib.wrap")

    def open(self, device: torch.device, timeout_s: float) -> ElasticTransport:
        """Return the communicator of the job's model. It has one rank until it enters a view.

        Raises:
            ConfigError: Another model was wrapped before, or the model is not on the CPU.
        """
        if self._is_ready:
            raise ConfigError("elastic: these members have trained a model already; join again for another one")
        if device.type != "cpu":
            raise ConfigError(f"elastic groups take models on the CPU; this one is on {device}")
        self._sessions = Sessions(self._membership, timeout_s, self._is_outside)
        self._parts.insert(-1, self._sessions)  # after the connection to the service, whose end ends waits for keys
        self._transport = ElasticTransport(self._sessions, [each.positions for each in self.samplers])
        return self._transport

    def begin(self, state: JobState, model: str) -> None:
        """Take part in views from now on.

        Args:
            state: The state of the job.
            model: A digest of the model and the options, which must be the same on all members.

        Raises:
            ConfigError: The loaded checkpoint does not fit.
        """
        assert self._sessions is not None
        assert self._transport is not None
        if self._loaded is not None:
            state.load_state_dict(self._loaded)
            self._loaded = None
        self._state = self._transport.hand_over = state
        self._sessions.begin(state.num_rounds, model)
        self._donor.begin(state)
        self._is_ready = True
        if (view := self._membership.view) is not None:
            self._sessions.follow(view)
        elif (joining := self._membership.joining) is not None:
            self._on_joining(joining)

    def entered(self) -> None:
        """Drop the tensors that were received in the background, after this member has entered a view."""
        self._pre_copy.close()

    @property
    def received(self) -> Mapping[str, torch.Tensor]:
        """The tensors that were received in the background, by path."""
        return self._pre_copy.tensors

    def _on_view(self, view: View) -> None:
        if self._is_ready and self._sessions is not None:
            self._sessions.follow(view)

    def _on_joining(self, joining: Joining) -> None:
        if not self._is_ready:
            return
        me = self._membership.me
        if (donor := next((donor for member, donor in joining.joining if member.id == me.id), None)) is not None:
            self._pre_copy.follow(joining.number, (me.id, me.generation), donor)

    def _is_outside(self) -> bool:
        """Whether this member is on standby, or receives the state in the background."""
        is_on_standby = self._is_standby and self._membership.view is None and self._membership.joining is None
        return is_on_standby or self._pre_copy.is_under_way

    def _ready(self, number: int) -> None:
        """Ask the service to enter the next view. Called on a thread of the pre-copy or of the membership."""
        assert self._sessions is not None
        donor = self._pre_copy.donor
        self._sessions.copied_from(-1 if donor is None else donor.id)
        self._membership.ready(number)


def _end_all(parts: list[Any]) -> None:
    for each in reversed(parts):
        each.close()


def join(
    address: str,
    name: str | None = None,
    *,
    min_members: int = 1,
    heartbeat_s: float = 5.0,
    timeout: float | timedelta = 300.0,
    token: str | bytes = b"",
    standby: bool = False,
) -> Members:
    """Join an elastic job. Replaces `torch.distributed.init_process_group` and the launcher.

    Pass the result to `commlib.wrap(model, ..., process_group=members)`. The job's service must run:
    `commlib rendezvous`.

    Args:
        address: The service's "host:port".
        name: This member's name, unique in the job; a process that is started again under its name keeps its id. None
            lets the service choose one.
        min_members: The number of members below which training pauses. The largest value of all members counts.
        heartbeat_s: The service excludes this member after this time without a sign of life, in seconds.
        timeout: How long a collective, and a change of the view, may take, in seconds or as a timedelta.
        token: The secret that all members share with the service.
        standby: Whether to enter only while the job has fewer members than its target.

    Returns:
        The members of the job.

    Raises:
        ConfigError: An argument has the wrong value, the token is wrong, or the service refuses the member.
        StoreLost: The service did not answer in time.
    """
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    for what, value in (("heartbeat_s", heartbeat_s), ("timeout", timeout_s)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"join: {what}: expected a positive number of seconds, got {value!r}")
    if not (isinstance(min_members, int) and min_members > 0):
        raise ConfigError(f"join: min_members: expected a positive integer, got {min_members!r}")
    secret = token.encode() if isinstance(token, str) else token
    request = Join(name or "", "", "", int(min_members), float(heartbeat_s), bool(standby))
    return Members(address, secret, request, timeout_s)
