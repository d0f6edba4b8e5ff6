"""What a model communicates, at work: the verbs that every kind of channel has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from commlib.engine.line import Line
from commlib.engine.planning.plan import Parameter


@dataclass(frozen=True)
class Settings:
    """What the user gave `wrap` beside the model and the algorithm.

    Attributes:
        cap_bytes: A fixed bucket size; None plans it.
        optimizer: What `optimizers.resolve` returned; None if it is not known.
        scaler: The GradScaler; None if there is none.
    """

    cap_bytes: int | None = None
    optimizer: Any = None
    scaler: Any = None


class Keeper(Protocol):
    """Who has the algorithm's state: the algorithm, or its runner."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a state from which this run cannot go on; nothing changes."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        ...


class OpenChannel(ABC):
    """A channel at work. Nobody who has one asks of which kind it is.

    Attributes:
        line: What carries it.
        keeper: Who has the algorithm's state.
        num_rounds: Rounds so far whose result this rank has taken; of an algorithm that runs itself, exchanges.
        waited_s: Seconds so far in which the thread that trains has waited for rounds (on CUDA: the host).
    """

    line: Line
    keeper: Keeper
    num_rounds: int
    waited_s: float = 0.0

    @property
    @abstractmethod
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent."""

    @property
    def buckets(self) -> Sequence[Any]:
        """Its buckets, in plan order; none where it has no rounds."""
        return ()

    @property
    def consensus_distance(self) -> float | None:
        """The L2 distance between this rank's weights and what the last round made of them, if there was one."""
        return None

    @property
    def is_settled(self) -> bool:
        """Whether its rounds are what they will be: no plan is tried any more."""
        return True

    @property
    def allows_join(self) -> bool:
        """Whether a rank that has no data left may stay away from its rounds, or stand in for itself."""
        return True

    def has_moved(self) -> bool:
        """Return whether parameters were cast or moved to another device since the buckets were made."""
        return False

    def allow_change(self) -> None:  # noqa: B027 (most can follow any change)
        """Refuse other parameters, if that is not possible.

        Raises:
            ConfigError: It is not; alike on all ranks, and nothing has changed.
        """

    @abstractmethod
    def adopt(self, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters from now on. Collective, and not within a backward."""

    @abstractmethod
    def set_up(self, settings: Settings) -> None:
        """Go on with other settings: another optimizer. Collective, and not within a backward."""

    def begin_step(self, has_closure: bool = False) -> None:  # noqa: B027
        """The optimizer is about to make a step; `has_closure`: which computes gradients inside of it."""

    def end_step(self) -> None:  # noqa: B027
        """The optimizer has made its step, which is counted already."""

    def drain(self) -> None:  # noqa: B027
        """Take the result of what is in the background, if that waits for nobody: the model is saved or unwrapped."""

    def settle(self) -> None:  # noqa: B027
        """End what depends on clocks and can end: a checkpoint is made."""

    def synchronize(self) -> None:  # noqa: B027 (gradients keep replicas alike)
        """Give all ranks the same weights. Collective."""

    def weights_were_loaded(self) -> None:  # noqa: B027
        """The user has loaded other weights: what is kept of earlier ones begins anew from those."""

    def state_dict(self) -> dict[str, Any]:
        """Return its own state, by names that no other channel has; `keeper` has the algorithm's."""
        return {}

    def drop_background(self) -> None:  # noqa: B027
        """Let what is in the background come to nothing: what it works on is replaced. Alike on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take over what `state_dict` returned; the keeper has its state already."""

    @abstractmethod
    def close(self) -> None:
        """End it; parameters and gradients stay as they are. Harmless when called twice."""
