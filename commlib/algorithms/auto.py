"""The algorithm that measurement and simulation choose."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import EXACTNESS, Algorithm
from commlib.errors import ConfigError


class Auto(AllReduce):
    """Averages gradients in full precision, measures, and goes on as the algorithm that will be the fastest here.

    After the first synchronised steps it measures the network (about two seconds), simulates one training step of each
    candidate with what was measured, and takes the fastest; of those within 3 % of it the most exact, and of equally
    exact ones the first listed. Left out is what is known to learn less with the optimizer given to `wrap` (Adam, where
    none is), or is made for another one and not measured with it. One line of the log says which and why. Where steps
    later take 20 % more or less than expected, it measures and chooses anew.
    Rank 0 decides for all.

    Args:
        allow: How far it may go: "exact", "8bit" (8 bits on the wire), "compensated" (what is not sent is remembered)
            or "any" (weights that differ between ranks, too).
        candidates: Names or instances to choose from, in order of preference, instead of commlib's own choice of that
            class; those outside the class, or which need an optimizer that `wrap` was not given, are left out. What is
            known against one is logged, and the choice is yours.

    Paper: none; Gan et al., "BAGUA" (VLDB 2021), name an automatic choice as what they lack.
    """

    made_for = "any"
    limits = MappingProxyType({"two_runs_are_alike": "what is chosen depends on what was measured"})

    def __init__(self, allow: str = "8bit", candidates: Sequence[str | Algorithm] | None = None) -> None:
        super().__init__()
        if allow not in EXACTNESS:
            raise ConfigError(f"Auto.allow: expected one of {', '.join(EXACTNESS)}, got {allow!r}")
        self.allow = allow
        self.candidates = None if candidates is None else tuple(candidates)
