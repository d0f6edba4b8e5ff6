"""The versions of other libraries that the integrations were tested with."""

from __future__ import annotations

import importlib.metadata
import warnings

from packaging.version import Version

#: By distribution, the version of the last test run; `constraints.txt` pins the same.
TESTED = {
    "accelerate": "1.15.0",
    "transformers": "5.24.0",
    "peft": "0.21.2",
    "lightning": "2.6.6",
    "ray": "2.60.0",
}


def warn_if_untested(name: str) -> None:
    """Warn if the installed version of a library differs from the tested one in its minor release."""
    tested, found = Version(TESTED[name]), Version(importlib.metadata.version(name))
    if found.release[:2] != tested.release[:2]:
        warnings.warn(
            f"commlib.integrations was tested with {name} {tested}, and this is {found}. It may work; if it does not, "
            f"pip install '{name}=={tested}'",
            stacklevel=3,
        )
