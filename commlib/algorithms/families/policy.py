"""Deprecated alias of `commlib.algorithms.policy`."""

from __future__ import annotations

import warnings
from typing import Any

from commlib.algorithms import policy


def __getattr__(name: str) -> Any:
    found = getattr(policy, name)
    warnings.warn(
        f"commlib.algorithms.families.policy has moved: import {name} from commlib.algorithms.policy",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
