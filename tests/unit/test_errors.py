"""The tree of exceptions: what code that was written for DDP catches, and what travels with them."""

from __future__ import annotations

import copy
import pickle

import pytest

from commlib import CodecError, CommlibError, ConfigError, PeerFailure, PeerTimeout, TransportError


@pytest.mark.parametrize("kind", [CommlibError, ConfigError, CodecError, TransportError, PeerTimeout, PeerFailure])
def test_every_error_is_one_that_ddp_could_raise(kind: type[Exception]) -> None:
    assert issubclass(kind, CommlibError)
    assert issubclass(kind, RuntimeError)
    assert issubclass(kind, ValueError) == (kind is ConfigError)


@pytest.mark.parametrize("kind", [PeerTimeout, PeerFailure])
def test_accused_ranks_are_a_frozen_set_that_travels_with_the_error(kind: type[PeerFailure]) -> None:
    assert kind("words").ranks == frozenset()
    error = kind("words", [3, 1])
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(each.ranks, frozenset)
        assert (str(each), each.ranks) == ("words", {1, 3})
