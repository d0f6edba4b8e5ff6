"""Families of algorithms and their plot style: a colour and a marker each, distinguishable without colour."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The families of docs/reference/algorithms.md with their algorithms. `_LOOKS` assigns each a marker and a colour (of
#: Okabe and Ito, and a dark red for the eighth).
FAMILIES: dict[str, tuple[str, ...]] = {
    "full precision": ("allreduce",),
    "quantized": ("bytegrad", "qsgd", "ef_quantized", "qadam"),
    "sign": ("signsgd", "onebit_adam", "zero_one_adam"),
    "sparsified": ("topk", "randomk", "dgc", "demo", "ok_topk"),
    "low rank": ("powersgd",),
    "local steps": (
        *("local_sgd", "post_local_sgd", "hierarchical_local_sgd", "diloco", "streaming_diloco"),
        "sparse_loco",
    ),
    "decentralized": ("decentralized", "low_precision_decentralized", "gossip", "noloco"),
    "in the background": ("async_averaging", "passive_gossip", "async_sgd", "hogwild"),
}
#: Names of baselines (`Comparison.baseline`), which look like all-reduce.
BASELINES = ("DDP-style all-reduce", "FSDP2", "FSDP2 and all-reduce")
#: The family of algorithms unknown to commlib, such as a user's own.
OTHER = "other"

_LOOKS = {
    "full precision": ("#000000", "o"),
    "quantized": ("#0072b2", "s"),
    "sign": ("#56b4e9", "D"),
    "sparsified": ("#009e73", "^"),
    "low rank": ("#d55e00", "v"),
    "local steps": ("#e69f00", "P"),
    "decentralized": ("#cc79a7", "X"),
    "in the background": ("#882255", "*"),
    OTHER: ("#777777", "h"),
}
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
_AUTO = re.compile(r"^auto(\(.*\))?: ")


@dataclass(frozen=True)
class Look:
    """Plot style of an algorithm.

    Attributes:
        family: Name of the family.
        colour: Colour of the family.
        marker: Marker of the family.
        dashes: Line style of the algorithm within its family.
        is_hollow: Whether markers are hollow, which marks hierarchical forms.
    """

    family: str
    colour: str
    marker: str
    dashes: object
    is_hollow: bool


def without_auto(label: str) -> str:
    """Return the name in a label "auto: <name>"; any other label is returned unchanged."""
    return _AUTO.sub("", label)


def base_name(label: str) -> str:
    """Return the registered name in a label such as "auto: topk(ratio=0.1)"."""
    return without_auto(label).partition("(")[0]


def look(label: str) -> Look:
    """Return the plot style of an algorithm by its label in tables."""
    name = base_name(label)
    if name in BASELINES:
        name = "allreduce"
    family = next((family for family, members in FAMILIES.items() if name in members), OTHER)
    colour, marker = _LOOKS[family]
    place = FAMILIES[family].index(name) if family in FAMILIES else 0
    return Look(family, colour, marker, _DASHES[place], "hierarchical=True" in label)
