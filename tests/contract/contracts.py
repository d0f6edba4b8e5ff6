"""All contracts by name, and the code that runs one on the ranks.

A contract is a function `contract_<name>(subject)` that every rank runs, in a group of any size, and that raises if
the promise in the first line of its docstring is not kept. Uses that an algorithm declares in `Algorithm.limits` must
be refused on every rank with a `ConfigError`.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist

from commlib.errors import ConfigError
from tests.contract import (
    contracts_faults,
    contracts_groups,
    contracts_model,
    contracts_state,
    contracts_steps,
    contracts_unseen,
    contracts_values,
)
from tests.contract.subjects import Subject, gathered, set_group

#: Seconds after which a rank gives up on one that has left the contract with an error, or does not come to `wrap`.
_PATIENCE_S = 60.0

Contract = Callable[[Subject], None]

_MODULES: tuple[ModuleType, ...] = (
    contracts_faults,
    contracts_groups,
    contracts_model,
    contracts_state,
    contracts_steps,
    contracts_unseen,
    contracts_values,
)


def _found() -> dict[str, Contract]:
    found: dict[str, Contract] = {}
    for module in _MODULES:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("contract_") and function.__module__ == module.__name__:
                found[name.removeprefix("contract_")] = function
    return found


CONTRACTS: dict[str, Contract] = _found()


def hold(algorithm: str, *names: str) -> None:
    """Hold an algorithm to contracts, one after the other. Runs on every rank; a failure names the contract.

    Raises:
        AssertionError: A promise was not kept, on this rank or another.
    """
    for name in names:
        subject = Subject(algorithm)
        group = dist.new_group(timeout=datetime.timedelta(seconds=_PATIENCE_S))
        error = _outcome(subject, name, group)
        if error is not None:  # ranks that wait for this one in the contract get an error
            dist.destroy_process_group(group)
        words = None if error is None else f"{type(error).__name__}: {error}"
        try:  # so that no rank goes on, or leaves its peers, alone
            everyone = gathered(words)
        except RuntimeError as gone:
            lost = f"{algorithm} breaks the contract {name!r}: a rank is gone ({gone}); here: {words}"
            raise AssertionError(lost) from (error or gone)
        if error is None:  # not before: a peer may still be connecting to it
            dist.destroy_process_group(group)
        subject.release()
        if any(each is not None for each in everyone):
            where = [rank for rank, each in enumerate(everyone) if each is not None]
            promise = (CONTRACTS[name].__doc__ or "").partition("\n")[0]
            lost = f"{algorithm} breaks the contract {name!r} on ranks {where}: {everyone}. The contract: {promise}"
            raise AssertionError(lost) from error


def hold_each(algorithms: Sequence[str], *names: str) -> None:
    """Hold several algorithms to contracts; see `hold`."""
    for algorithm in algorithms:
        hold(algorithm, *names)


def _outcome(subject: Subject, name: str, group: Any) -> Exception | None:
    """Return the error that a contract raised, or None if it is kept."""
    limit = subject.limits.get(name)
    set_group(group)
    try:
        CONTRACTS[name](subject)
    except Exception as error:
        return None if limit is not None and isinstance(error, ConfigError) else error
    finally:
        set_group(None)
    return None if limit is None else AssertionError(f"no ConfigError, though the algorithm declares: {limit}")
