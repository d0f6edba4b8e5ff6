"""The algorithms, one file each, registered by file name or through the entry point group `commlib.algorithms`.

A file `my_algorithm.py` in this folder, or an entry point `my_algorithm = "package.module:MyAlgorithm"` of an installed
package, makes `commlib.wrap(model, algorithm="my_algorithm")` work.
"""

from __future__ import annotations

import builtins
import difflib
import functools
import importlib
import pkgutil
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.async_averaging import AsyncAveraging
from commlib.algorithms.async_sgd import AsyncSGD
from commlib.algorithms.auto import Auto
from commlib.algorithms.base import Algorithm, check_declared
from commlib.algorithms.bytegrad import ByteGrad
from commlib.algorithms.channels import Channel, Gradients, LocalSteps, OptimizerState, SelfRunning, Weights
from commlib.algorithms.compressed import Compressed
from commlib.algorithms.context import BucketView, Context
from commlib.algorithms.decentralized import Decentralized
from commlib.algorithms.demo import DeMo
from commlib.algorithms.dgc import DGC
from commlib.algorithms.diloco import DiLoCo
from commlib.algorithms.ef_quantized import EFQuantized
from commlib.algorithms.gossip import Gossip
from commlib.algorithms.hierarchical_local_sgd import HierarchicalLocalSGD
from commlib.algorithms.hogwild import Hogwild
from commlib.algorithms.known import Known, loses_with
from commlib.algorithms.local_sgd import LocalSGD
from commlib.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from commlib.algorithms.neighbours import NeighbourAveraging
from commlib.algorithms.noloco import NoLoCo
from commlib.algorithms.ok_topk import OkTopK
from commlib.algorithms.onebit_adam import OneBitAdam
from commlib.algorithms.outer import OuterAveraging, OuterStep
from commlib.algorithms.passive_gossip import PassiveGossip
from commlib.algorithms.policy import CompressionPolicy, Units
from commlib.algorithms.post_local_sgd import PostLocalSGD
from commlib.algorithms.powersgd import PowerSGD
from commlib.algorithms.presets import PRESETS, Preset
from commlib.algorithms.qadam import QAdam
from commlib.algorithms.qsgd import QSGD
from commlib.algorithms.randomk import RandomK
from commlib.algorithms.signsgd import SignSGD
from commlib.algorithms.sparse_loco import SparseLoCo
from commlib.algorithms.state import PerElement, State
from commlib.algorithms.streaming_diloco import StreamingDiLoCo
from commlib.algorithms.topk import TopK
from commlib.algorithms.zero_one_adam import ZeroOneAdam
from commlib.errors import ConfigError

__all__ = [
    "DGC",
    "PRESETS",
    "QSGD",
    "Algorithm",
    "AllReduce",
    "AsyncAveraging",
    "AsyncSGD",
    "Auto",
    "BucketView",
    "ByteGrad",
    "Channel",
    "Compressed",
    "CompressionPolicy",
    "Context",
    "DeMo",
    "Decentralized",
    "DiLoCo",
    "EFQuantized",
    "Gossip",
    "Gradients",
    "HierarchicalLocalSGD",
    "Hogwild",
    "Known",
    "LocalSGD",
    "LocalSteps",
    "LowPrecisionDecentralized",
    "NeighbourAveraging",
    "NoLoCo",
    "OkTopK",
    "OneBitAdam",
    "OptimizerState",
    "OuterAveraging",
    "OuterStep",
    "PassiveGossip",
    "PerElement",
    "PostLocalSGD",
    "PowerSGD",
    "Preset",
    "QAdam",
    "RandomK",
    "SelfRunning",
    "SignSGD",
    "SparseLoCo",
    "State",
    "StreamingDiLoCo",
    "TopK",
    "Units",
    "Weights",
    "ZeroOneAdam",
    "create",
    "get",
    "list",
    "loses_with",
]

ENTRY_POINT_GROUP = "commlib.algorithms"

#: Files of this folder that are not algorithms.
_SHARED = frozenset(
    (
        "base",
        "channels",
        "compressed",
        "context",
        "known",
        "momentum",
        "neighbours",
        "outer",
        "policy",
        "presets",
        "state",
    )
)


def list() -> builtins.list[str]:
    """Return the sorted names of the registered algorithms. `wrap(..., algorithm=name)` accepts them and `PRESETS`."""
    return sorted({*_own_names(), *_entry_points()})


def get(name: str) -> type[Algorithm]:
    """Return the algorithm class with this name.

    Raises:
        ConfigError: There is no such algorithm (the message suggests similar names), or its module does not define one.
    """
    if name in _own_names():
        return _class_in(importlib.import_module(f"{__name__}.{name}"), name)
    if name in _entry_points():
        return _checked(_load(_entry_points()[name]), name)
    called, options = (part.strip() for part in str(name).rstrip(") ").partition("(")[::2])
    if called in PRESETS:
        raise ConfigError(f"algorithm: {called!r} is a preset, which takes no options: {PRESETS[called]}")
    if options and called in list():
        raise ConfigError(
            f"algorithm: {name!r} is a name with options. Pass them to the class: "
            f"algorithm={shown_name(get(called))}({options})"
        )
    near = difflib.get_close_matches(str(name), [*list(), *PRESETS], n=3, cutoff=0.5)
    if near:
        hint = f"Did you mean {' or '.join(map(repr, near))}? commlib.algorithms.list() returns all names"
    else:
        hint = f"Registered: {', '.join(list())}; presets: {', '.join(PRESETS)}"
    raise ConfigError(f"algorithm: {name!r} is not registered. {hint}")


def create(algorithm: str | Algorithm) -> Algorithm:
    """Return `algorithm` itself, or the preset or, with default options, the algorithm with this name.

    Raises:
        ConfigError: The name is unknown, the argument is neither a name nor an `Algorithm`, or the class declares
            something that `Algorithm` does not allow.
    """
    if isinstance(algorithm, Algorithm):
        check_declared(algorithm)
        algorithm.name = algorithm.name or _name_of(type(algorithm))
        return algorithm
    if not isinstance(algorithm, str):
        shown = f"the class {algorithm.__name__}; pass an instance" if isinstance(algorithm, type) else repr(algorithm)
        raise ConfigError(f"algorithm: expected a name or an Algorithm instance, got {shown}")
    if algorithm in PRESETS:
        created = create(PRESETS[algorithm].create())
        created.preset = algorithm
        return created
    instance = get(algorithm)()
    check_declared(instance)
    instance.name = algorithm
    return instance


@functools.cache
def _own_names() -> frozenset[str]:
    files = [module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg]
    return frozenset(name for name in files if name not in _SHARED and not name.startswith("_"))


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        package = f" of the package {point.dist.name!r}" if point.dist is not None else ""
        raise ConfigError(
            f"algorithm: {point.name!r} ({point.value}{package}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _class_in(module: Any, name: str) -> type[Algorithm]:
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise ConfigError(f"{module.__name__} must define exactly one Algorithm, found {[c.__name__ for c in own]}")
    return _checked(own[0], name)


def _checked(cls: Any, name: str) -> type[Algorithm]:
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise ConfigError(f"the algorithm {name!r} is {cls!r}; expected a subclass of commlib.algorithms.Algorithm")
    return cls


def shown_name(cls: type[Algorithm]) -> str:
    """Return the name of a class in messages: of commlib's own, as it is imported."""
    return f"commlib.algorithms.{cls.__name__}" if cls.__module__.startswith("commlib.") else cls.__name__


def _name_of(cls: type[Algorithm]) -> str:
    """Return the name under which a class is registered, or else the class name; the same in every process."""
    if cls.__module__.rpartition(".")[0] == __name__:
        return cls.__module__.rpartition(".")[2]
    path = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, point in _entry_points().items() if point.value == path), cls.__name__)
