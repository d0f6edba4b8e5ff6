"""Members, numbered views of them, and the messages between members and the service that numbers views."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar

#: The largest length of a name, an address or a member's data, in characters.
_MOST_CHARACTERS = 4096


class BadMessage(Exception):
    """A message that the other side of a connection does not send."""


@dataclass(frozen=True, order=True)
class Member:
    """A process that trains.

    Attributes:
        id: Assigned by the service at the first join under a name; higher ids are younger.
        generation: Counts the joins under the name, from 0.
        name: The name under which it joined.
        address: The address by which peers reach its host.
        data: Text for its peers: the port on which it listens for joining members; "" without one.
    """

    id: int
    generation: int
    name: str
    address: str
    data: str = ""


@dataclass(frozen=True)
class View:
    """The members that train together, in rank order.

    Attributes:
        job: The epoch of the job's first view.
        epoch: Random text of the service's run that made this view.
        number: Larger than that of every earlier view of the job, across runs of the service.
        began: The number of the view in which the job began, or began again: its members have the state that they
            loaded.
        members: In order of their ids.
    """

    job: str
    epoch: str
    number: int
    began: int
    members: tuple[Member, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the members, in rank order."""
        return tuple(member.id for member in self.members)

    @property
    def key(self) -> str:
        """The prefix of all keys, groups and messages of this view."""
        return f"{self.epoch}/{self.number}"


@dataclass(frozen=True)
class Claim:
    """The view in which a member trains, for a service that has been started again.

    Attributes:
        id: The member's id.
        generation: Its generation.
        view: The newest view it has received.
    """

    id: int
    generation: int
    view: View


class Message:
    """A message between a member and the service. Its class and the types of its fields are checked on arrival."""

    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        Message.kinds[cls.__name__] = cls


# --- from a member ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Join(Message):
    """The first message of a member.

    Attributes:
        name: Its name; "" lets the service choose one.
        address: As in `Member`.
        data: As in `Member`.
        min_members: The number of members below which it does not train.
        heartbeat_s: The service excludes it after this time without a heartbeat or a message.
        standby: Whether it enters only if the view has fewer members than the target.
        claim: The view in which it trains already; None for a new member.
    """

    name: str
    address: str
    data: str
    min_members: int
    heartbeat_s: float
    standby: bool = False
    claim: Claim | None = None


@dataclass(frozen=True)
class Ready(Message):
    """A joining member has the state of the view `number`, and is in step with it."""

    number: int


@dataclass(frozen=True)
class Settled(Message):
    """A member has connected to all others of the view `number`."""

    number: int


@dataclass(frozen=True)
class Suspect(Message):
    """A member could not exchange data with others of the view `number`. Empty `ids`: they are not known."""

    number: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Put(Message):
    """A key of the view `number` and its value. The service relays it to the other members of the view."""

    number: int
    key: str
    value: bytes


@dataclass(frozen=True)
class Leave(Message):
    """A member has finished its round and leaves."""


@dataclass(frozen=True)
class Status(Message):
    """The request of `commlib rendezvous --status`, which does not join."""


# --- from the service -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome(Message):
    """The reply to `Join`: the member's id and generation, and the name that it has from now on."""

    id: int
    generation: int
    name: str


@dataclass(frozen=True)
class NewView(Message):
    """The newest view. One that the receiver is not in tells it that it was excluded.

    Attributes:
        view: The view.
        min_members: The number of members below which the members do not train.
        reason: The cause of the change, for the log.
    """

    view: View
    min_members: int
    reason: str


@dataclass(frozen=True)
class Joining(Message):
    """The members that are joining the view `number`, each with its donor, whose state it receives."""

    number: int
    joining: tuple[tuple[Member, Member], ...]


@dataclass(frozen=True)
class Refused(Message):
    """The service does not accept the member; the connection ends."""

    reason: str


@dataclass(frozen=True)
class StatusReply(Message):
    """The reply to `Status`.

    Attributes:
        view: The newest view; None before the first one.
        rows: For each connection: the member, its stage, the newest view in which it has connected to all others, and
            the seconds since it was heard.
    """

    view: View | None
    rows: tuple[tuple[Member, str, int, float], ...]


def packed(message: Message) -> dict[str, Any]:
    """Return a message as a plain value."""
    return {"kind": type(message).__name__, **{f.name: _packed(getattr(message, f.name)) for f in _fields(message)}}


def unpacked(value: Any, expected: tuple[type[Message], ...]) -> Message:
    """Return the message that `packed` turned into `value`.

    Raises:
        BadMessage: It is no message of an `expected` class, a field is missing or unknown, or a value has another type.
    """
    cls = Message.kinds.get(value.get("kind", "")) if isinstance(value, dict) else None
    if cls not in expected:
        raise BadMessage(f"expected one of {[each.__name__ for each in expected]}, got {str(value)[:200]}")
    return _unpacked({name: each for name, each in value.items() if name != "kind"}, cls, cls.__name__)


def view_to(view: View) -> Any:
    """Return a view as JSON data."""
    return {**_packed(view), "members": [_packed(member) for member in view.members]}


def view_from(data: Any) -> View:
    """Return the view that `view_to` turned into `data`.

    Raises:
        BadMessage: `data` is something else.
    """
    if not isinstance(data, dict) or not isinstance(data.get("members"), list):
        raise BadMessage(f"expected a view, got {str(data)[:200]}")
    return _unpacked({**data, "members": tuple(data["members"])}, View, "View")


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _packed(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _packed(getattr(value, f.name)) for f in _fields(value)}
    return tuple(map(_packed, value)) if isinstance(value, tuple) else value


def _unpacked(value: Any, kind: Any, where: str) -> Any:
    """Return `value` as an object of the annotated type `kind`, checked at every depth."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = {f.name for f in dataclasses.fields(kind)}
        if not isinstance(value, dict) or value.keys() != names:
            raise BadMessage(f"{where}: expected the fields {sorted(names)}, got {str(value)[:200]}")
        return kind(**{name: _unpacked(value[name], hints[name], f"{where}.{name}") for name in names})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(each for each in arguments if each is not type(None))
        return None if value is None else _unpacked(value, inner, where)
    if origin is tuple:
        if not isinstance(value, tuple) or (arguments[-1] is not ... and len(value) != len(arguments)):
            raise BadMessage(f"{where}: expected {kind}, got {str(value)[:200]}")
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(
            _unpacked(each, of, f"{where}[{idx}]") for idx, (each, of) in enumerate(zip(value, kinds, strict=True))
        )
    if type(value) is not kind or (kind is str and len(value) > _MOST_CHARACTERS):
        raise BadMessage(f"{where}: expected {kind.__name__}, got {str(value)[:200]}")
    return value
