"""Registry of all codecs, of this and other packages, by their number and name on the wire.

Another package lists the class of a codec in the entry point group `commlib.codecs`, or passes it to `register`. Entry
points are loaded when a codec that is not in this package is requested, or when all codecs are listed.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from commlib import locks
from commlib.codecs.base import BlockCodec
from commlib.codecs.floats import BF16, FP16, Fp8E4M3, Fp8E5M2, MxFp4, MxFp8, OneBit
from commlib.codecs.in_torch import TorchBlockCodec
from commlib.codecs.integer import Int2, Int4, Int8, UInt8Bagua, UInt8MinMax
from commlib.codecs.sparse import BlockTopK, RandomK, SparseCodec, Threshold, TopK
from commlib.errors import ConfigError
from commlib.kernels.codec_table import BY_NAME, FOREIGN_IDS

ENTRY_POINT_GROUP = "commlib.codecs"

Kind = type[BlockCodec | SparseCodec]
T = TypeVar("T", bound=Kind)
K = TypeVar("K", int, str)

_OWN: tuple[Kind, ...] = (
    *(Int8, UInt8MinMax, UInt8Bagua, Int4, Int2, OneBit, Fp8E4M3, Fp8E5M2, MxFp8, MxFp4, BF16, FP16),
    *(TopK, RandomK, Threshold, BlockTopK),
)
if {kind.name for kind in _OWN} != set(BY_NAME) or len({kind.id for kind in _OWN}) < len(BY_NAME):
    raise AssertionError("the codec classes do not match kernels/codec_table.py")


class Registry(Mapping[K, Kind], Generic[K]):
    """Codecs by number or by name. Codecs of other packages are loaded when an unknown key is requested."""

    def __init__(self, key: str) -> None:
        self._kinds: dict[K, Kind] = {getattr(kind, key): kind for kind in _OWN}

    def __getitem__(self, key: K) -> Kind:
        if key not in self._kinds:
            _load_entry_points()
        return self._kinds[key]

    def __iter__(self) -> Iterator[K]:
        _load_entry_points()
        return iter(tuple(self._kinds))

    def __len__(self) -> int:
        _load_entry_points()
        return len(self._kinds)


by_id: Registry[int] = Registry("id")
"""Every codec by its number on the wire."""

by_name: Registry[str] = Registry("name")
"""Every codec by its name on the wire."""

_packages: dict[Kind, str] = dict.fromkeys(_OWN, "commlib")
_failures: dict[str, str] = {}
_lock = locks.rlock("codecs", is_of_process=True)
_is_loaded = False


def register(kind: T) -> T:
    """Register another package's codec by its name and number. Usable as a class decorator.

    Args:
        kind: A subclass of `TorchBlockCodec` or `SparseCodec` with `id` (one of `FOREIGN_IDS`) and `name`. Registering
            the same class again has no effect.

    Returns:
        `kind`.

    Raises:
        ConfigError: `kind` is not as described, or another codec has its name or number. The message names both
            packages.
    """
    _add(kind, kind.__module__.partition(".")[0] if isinstance(kind, type) else "?")
    return kind


def block_codec(codec: BlockCodec | str) -> BlockCodec:
    """Return `codec`, or a new codec of that name.

    Raises:
        ConfigError: `codec` is neither a block codec nor the name of one, or its package cannot be loaded.
    """
    if isinstance(codec, BlockCodec):
        return codec
    return _named(codec, lambda kind: issubclass(kind, BlockCodec), "a block codec")


def gathered_codec(codec: BlockCodec | SparseCodec | str) -> BlockCodec | SparseCodec:
    """Return `codec`, or a new codec of that name: a block codec, or a sparse codec that selects elements per rank.

    Raises:
        ConfigError: `codec` is neither such a codec nor the name of one that needs no arguments.
    """
    if isinstance(codec, BlockCodec | SparseCodec) and not isinstance(codec, RandomK):
        return codec
    return _named(codec, lambda kind: kind not in (RandomK, Threshold), "a block codec, TopK, BlockTopK, Threshold")


def _named(codec: Any, fits: Callable[[Kind], bool], what: str) -> Any:
    kind = by_name.get(codec) if isinstance(codec, str) else None
    if kind is not None and fits(kind):
        return kind()
    if isinstance(codec, str) and codec in _failures:
        raise ConfigError(f"codec: {codec!r} cannot be loaded: {_failures[codec]}")
    known = [name for name, each in by_name.items() if fits(each)]
    near = difflib.get_close_matches(codec, known, n=1, cutoff=0.5) if isinstance(codec, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"codec: expected {what} or the name of one ({', '.join(known)}), got {codec!r}{hint}")


# --- other packages ---------------------------------------------------------------------------------------------------


def _load_entry_points() -> None:
    """Register the codecs of installed packages, once. Warn of a package that fails to load and skip its codecs.

    Raises:
        ConfigError: Codecs of two packages have the same name or number.
    """
    global _is_loaded
    with _lock:
        if _is_loaded:
            return
        _is_loaded = True
        try:
            for point in entry_points(group=ENTRY_POINT_GROUP):
                _load(point)
        except ConfigError:
            _is_loaded = False  # so that the next request raises, too
            raise


def _load(point: EntryPoint) -> None:
    package = point.dist.name if point.dist is not None else point.value.partition(":")[0].partition(".")[0]
    try:
        kind = point.load()
        _check(kind, package)
        if kind.name != point.name:
            raise ConfigError(f"it refers to {kind.__qualname__}, whose name is {kind.name!r}")
    except Exception as error:
        _failures[point.name] = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"commlib: the entry point {point.name!r} ({point.value}) of the package {package!r} provides no codec and "
            f"is ignored: {_failures[point.name]}",
            stacklevel=2,
        )
        return
    _add(kind, package)


def _add(kind: Any, package: str) -> None:
    with _lock:
        _check(kind, package)
        if by_name._kinds.get(kind.name) is kind:
            return
        for field, known in (("name", by_name), ("id", by_id)):
            other = known._kinds.get(getattr(kind, field))
            if other is not None:
                raise ConfigError(
                    f"codec: {_shown(kind, package)} and {_shown(other, _packages[other])} have the same {field}, "
                    f"{getattr(kind, field)!r}; uninstall one, or ask its authors for a new name and number"
                )
        by_name._kinds[kind.name] = by_id._kinds[kind.id] = kind
        _packages[kind] = package


def _shown(kind: Kind, package: str) -> str:
    return f"{kind.__module__}.{kind.__qualname__} of the package {package!r}"


def _check(kind: Any, package: str) -> None:
    """Raise `ConfigError` unless `kind` is a valid codec class of another package."""
    if not isinstance(kind, type) or not issubclass(kind, (TorchBlockCodec, SparseCodec)):
        raise ConfigError(
            f"codec of the package {package!r}: expected a subclass of TorchBlockCodec or SparseCodec, got {kind!r}"
        )
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"{_shown(kind, package)}: expected a class without abstract methods; define {missing}")
    name, number = getattr(kind, "name", None), getattr(kind, "id", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"{_shown(kind, package)}: expected an identifier as its name, got {name!r}")
    if number not in FOREIGN_IDS:
        raise ConfigError(
            f"{_shown(kind, package)}: expected an id in {FOREIGN_IDS.start}..{FOREIGN_IDS.stop - 1}, the range for "
            f"other packages' codecs, got {number!r}"
        )
    if issubclass(kind, TorchBlockCodec) and not isinstance(getattr(kind, "block", None), int):
        raise ConfigError(f"{_shown(kind, package)}: expected the number of elements per block as `block` (0: chunk)")
