"""The tests of commlib."""

from __future__ import annotations

from typing import Any

#: Whether this process collects and judges tests, and leaves what they do to ranks. Set by `conftest.py`.
IS_COLLECTING = False


class Placeholder(type):
    """A class that stands for a library, where its classes are only derived from; every attribute is one more."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(name, (), {})
