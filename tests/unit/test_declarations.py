"""The declarations of an algorithm class are checked before use: authors of algorithms make mistakes here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from commlib import algorithms
from commlib.algorithms import Algorithm, Context, Gradients, PerElement, Units
from commlib.errors import ConfigError


class Mine(Algorithm):
    """An algorithm with the declarations of a test."""

    def __init__(self, states: Any = (), **declared: Any) -> None:
        self.states = states
        for name, value in declared.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"channel": Gradients}, "Mine.channel: expected a channel, such as Gradients(), got <class"),
        ({"exactness": "1"}, "Mine.exactness: expected one of 'exact', '8bit', 'compensated', 'any', got '1'"),
        ({"made_for": "adamw"}, "Mine.made_for: expected one of 'sgd', 'adam', 'any', got 'adamw'"),
        ({"states": PerElement("residual")}, "Mine.states: expected a tuple of State objects, got"),
        ({"units": Units()}, "Mine.units is a State that is not in Mine.states; add it, or it is not set up"),
    ],
)
def test_a_wrong_declaration_is_named(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        algorithms.create(Mine(**declared))


def test_a_class_with_its_own_set_up_may_hold_states_of_its_own() -> None:
    class Own(Mine):
        def setup(self, context: Context) -> None:
            self.units.follow(context.optimizer, context.scaler)

    algorithms.create(Own(units=Units()))


def test_states_with_the_same_key_are_refused() -> None:
    first, second = PerElement("residual"), PerElement("residual", torch.float64)
    with pytest.raises(ConfigError, match=re.escape("Mine.states: two of them save ['residual']; rename one")):
        algorithms.create(Mine((first, second))).state_dict()
    assert algorithms.create(Mine((first, PerElement("other")))).state_dict().keys() == {"residual", "other"}
