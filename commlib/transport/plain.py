"""Serialization of plain values, which ranks exchange at set-up. Decoding never executes received data.

    value     None, bool, int, float, str, bytes, list, tuple, dict, nested to any depth
    bytes     JSON, with one-key objects for types that JSON lacks: {"f": float.hex}, {"b": base64}, {"t": [...]},
              {"d": [[key, value], ...]}; numbers are exact, including infinities and NaN

A named tuple decodes to a plain tuple, and an instance of a subclass of a number or a string to the base type.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from commlib.errors import ConfigError


class MalformedError(ValueError):
    """Bytes that do not encode a plain value."""


def encode(value: Any) -> bytes:
    """Serialize `value`.

    Raises:
        ConfigError: `value` contains something that is not plain; the message names its position and type.
    """
    try:
        return json.dumps(_packed(value, "value"), allow_nan=False).encode("ascii")
    except (RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot send a value between ranks: it is nested too deeply or too long ({error})") from None


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Deserialize bytes that `encode` returned.

    Raises:
        MalformedError: `encode` cannot have returned them.
    """
    try:
        return _unpacked(json.loads(bytes(data).decode("ascii"), parse_float=_refuse, parse_constant=_refuse))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise MalformedError(f"{len(data)} bytes that are not a plain value: {error}") from None


def _packed(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"b": base64.b64encode(value).decode("ascii")}
    if isinstance(value, list | tuple):
        items = [_packed(item, f"{where}[{idx}]") for idx, item in enumerate(value)]
        return {"t": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {"d": [[_packed(k, f"key {k!r} of {where}"), _packed(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    raise ConfigError(
        f"cannot send {where} between ranks: it is of type {type(value).__qualname__}; expected None, bool, int, "
        "float, str, bytes, or lists, tuples and dicts of them. Send equivalent plain data"
    )


def _unpacked(packed: Any) -> Any:
    if isinstance(packed, list):
        return [_unpacked(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) != 1:
        raise MalformedError(f"an object of {len(packed)} keys")
    ((tag, content),) = packed.items()
    return _UNPACK[tag](content)


def _float(content: Any) -> float:
    return float.fromhex(content)


def _bytes(content: Any) -> bytes:
    return base64.b64decode(content, validate=True)


def _tuple(content: Any) -> tuple[Any, ...]:
    if not isinstance(content, list):
        raise MalformedError("a tuple without a list of items")
    return tuple(map(_unpacked, content))


def _dict(content: Any) -> dict[Any, Any]:
    return {_unpacked(key): _unpacked(value) for key, value in content}


def _refuse(text: str) -> float:
    raise MalformedError(f"a bare number {text!r}")


_UNPACK = {"f": _float, "b": _bytes, "t": _tuple, "d": _dict}
