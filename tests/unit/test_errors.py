"""The tree of exceptions: what code that was written for DDP catches, and what travels with them."""

from __future__ import annotations

import copy
import gc
import pickle
import traceback
import weakref
from collections.abc import Callable

import pytest

from commlib import CodecError, CommlibError, ConfigError, PeerFailure, PeerTimeout, TransportError
from commlib.errors import EarlierTraceback, Excluded, StoreLost, kept, without_frames


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


class Loss:
    """Something that a user's step holds."""


def step(left: list[weakref.ref[Loss]]) -> None:
    loss = Loss()
    left.append(weakref.ref(loss))
    try:
        raise OSError("no route, says the test")
    except OSError as error:
        raise PeerFailure("rank 3 is gone", [3]) from error


def caught(left: list[weakref.ref[Loss]]) -> PeerFailure:
    with pytest.raises(PeerFailure) as found:
        step(left)
    return found.value


@pytest.mark.parametrize("keep", [kept, without_frames])
def test_what_is_kept_of_an_error_holds_nothing_of_the_step_it_came_from(keep: Callable[..., PeerFailure]) -> None:
    left: list[weakref.ref[Loss]] = []
    error = keep(caught(left))
    gc.collect()
    assert left[0]() is None
    assert (type(error), str(error), error.ranks) == (PeerFailure, "rank 3 is gone", {3})
    printed = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    for words in ("in step", 'raise PeerFailure("rank 3 is gone", [3]) from error', "OSError: no route, says the test"):
        assert words in printed


def test_what_is_raised_of_a_kept_error_leaves_that_as_it_is() -> None:
    first = kept(caught([]))
    again = kept(first)
    with pytest.raises(PeerFailure):
        raise again
    assert again is not first
    assert first.__traceback__ is None
    assert isinstance(first.__cause__, EarlierTraceback)
    assert again.__cause__ is first.__cause__


def test_an_error_that_was_never_raised_has_no_earlier_traceback() -> None:
    assert kept(PeerTimeout("too late", [1])).__cause__ is None


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (KeyError(), CommlibError, "KeyError"),
        (ZeroDivisionError("by zero"), CommlibError, "by zero"),
        (ConfigError("got 3"), CommlibError, "got 3"),
        (TransportError("it broke"), TransportError, "it broke"),
    ],
)
def test_what_is_kept_of_other_errors_is_commlibs(error: Exception, kind: type[Exception], words: str) -> None:
    found = kept(error)
    assert (type(found), str(found)) == (kind, words)


@pytest.mark.parametrize("error", [Excluded("out"), StoreLost("away"), TransportError("lost")])
def test_a_kept_error_of_the_transport_has_its_class(error: TransportError) -> None:
    assert type(kept(error)) is type(error)
