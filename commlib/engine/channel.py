"""The interface that every kind of communication channel implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from commlib.engine.planning.plan import Parameter
from commlib.engine.session import Session


@dataclass(frozen=True)
class Settings:
    """Arguments of `wrap` other than the model and the algorithm.

    Attributes:
        cap_bytes: A fixed bucket size in bytes; None lets the engine plan the sizes.
        optimizer: The return value of `optimizers.resolve`; None if the optimizer is not known.
        scaler: The GradScaler; None if not used.
    """

    cap_bytes: int | None = None
    optimizer: Any = None
    scaler: Any = None


class Keeper(Protocol):
    """Holds the algorithm's state: the algorithm, or its runner."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise if this run cannot resume from the state; changes nothing."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state."""
        ...


class OpenChannel(ABC):
    """An open channel. Callers use every kind through this interface only.

    Attributes:
        session: Carries the channel's communication.
        keeper: Holds the algorithm's state.
        num_rounds: Number of rounds (exchanges, if the algorithm runs itself) whose result this rank has taken.
        waited_s: Seconds that the training thread has waited for rounds so far (on CUDA: host time).
    """

    session: Session
    keeper: Keeper
    num_rounds: int
    waited_s: float = 0.0

    @property
    @abstractmethod
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent."""

    @property
    def buckets(self) -> Sequence[Any]:
        """The buckets, in plan order; empty if the channel has no rounds."""
        return ()

    @property
    def consensus_distance(self) -> float | None:
        """The L2 distance between this rank's weights and the result of the last round; None if not available."""
        return None

    @property
    def is_settled(self) -> bool:
        """Whether the bucket plan is final, so that no further plans are tried."""
        return True

    @property
    def allows_join(self) -> bool:
        """Whether a rank without data left may skip the channel's rounds or take part in them without data."""
        return True

    def has_moved(self) -> bool:
        """Return whether parameters were cast or moved to another device since the buckets were made."""
        return False

    def allow_change(self) -> None:  # noqa: B027 (most channels accept any change)
        """Raise if the channel cannot change its parameters.

        Raises:
            ConfigError: The channel keeps its parameters. Raised on all ranks, before anything has changed.
        """

    @abstractmethod
    def adopt(self, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters from now on. Collective; must not be called during backward."""

    @abstractmethod
    def set_up(self, settings: Settings) -> None:
        """Use other settings, such as another optimizer. Collective; must not be called during backward."""

    def begin_step(self, has_closure: bool = False) -> None:  # noqa: B027
        """Run before an optimizer step. `has_closure`: whether the step computes gradients in a closure."""

    def end_step(self) -> None:  # noqa: B027
        """Run after an optimizer step, which has already been counted."""

    def drain(self) -> None:  # noqa: B027
        """Take the result of a background round, unless that may block on a peer. Runs before saving or unwrapping."""

    def settle(self) -> None:  # noqa: B027
        """End the search for a plan, which depends on measured times. Runs when a checkpoint is made."""

    def synchronize(self) -> None:  # noqa: B027 (averaged gradients keep replicas identical)
        """Give all ranks the same weights. Collective."""

    def weights_were_loaded(self) -> None:  # noqa: B027
        """Discard state that depends on earlier weights. Runs after the user has loaded other weights."""

    def state_dict(self) -> dict[str, Any]:
        """Return the channel's own state; no two channels share a key. `keeper` holds the algorithm's state."""
        return {}

    def drop_background(self) -> None:  # noqa: B027
        """Drop the result of a background round, because its tensors are replaced. Must be called on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load the return value of `state_dict`. The keeper's state has already been loaded."""

    @property
    def repeats_step(self) -> bool:
        """Whether new members of an elastic group must make the last counted step, because they join its round."""
        return False

    def state_for_new_member(self) -> dict[str, Any]:
        """Return the channel's own state for new members of an elastic group, while this rank enters their view."""
        return self.state_dict()

    def load_as_new_member(self, state: Mapping[str, Any]) -> None:
        """Load the return value of `state_for_new_member`. The keeper's state has already been loaded."""
        self.load_state_dict(state)

    @abstractmethod
    def close(self) -> None:
        """Close the channel; parameters and gradients do not change. Idempotent."""
