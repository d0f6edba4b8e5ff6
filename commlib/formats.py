"""Formats of saved state: each is a number, stored with the version of commlib that saved it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commlib.errors import ConfigError
from commlib.version import __version__


def stamp(number: int) -> dict[str, Any]:
    """Return the entries that state of this format begins with."""
    return {"format": number, "commlib": __version__}


def check(state: Mapping[str, Any], number: int, what: str, alternative: str = "") -> None:
    """Check that state has a format.

    Args:
        state: Contains the entries of `stamp`.
        number: The format that is expected.
        what: The state, for the error message.
        alternative: Further advice, which begins with "or".

    Raises:
        ConfigError: It has another format. The message names both formats and both versions of commlib.
    """
    found = state.get("format")
    if found != number:
        version = state.get("commlib", "of an unknown version")
        raise ConfigError(
            f"{what} has format {found!r}, saved by commlib {version}; commlib {__version__} reads format {number}. "
            f"Resume with the version that saved it{alternative and f', {alternative}'}"
        )
