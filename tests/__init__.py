"""The tests of commlib."""

from __future__ import annotations

from typing import Any

#: Whether this process collects and reports tests, and leaves their execution to ranks. Set by `conftest.py`.
IS_COLLECTING = False


class Placeholder(type):
    """A placeholder for a library whose classes are only derived from; every attribute is another placeholder."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(name, (), {})
