"""Automatic choice of an algorithm by measurement and simulation."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import EXACTNESS, Algorithm
from commlib.errors import ConfigError


class Auto(AllReduce):
    """Averages gradients in full precision, then measures and selects the algorithm predicted to be the fastest.

    After the first synchronised steps it measures the network (about two seconds), simulates one training step of each
    candidate with the measurements, and selects the fastest. Among candidates within 3 % of the fastest it selects the
    most exact one, and among equally exact ones the first listed. It excludes algorithms that are known to reach a
    higher loss with the optimizer given to `wrap` (Adam if none is given), and algorithms that are made for another
    optimizer and were not measured with this one. One log line reports the choice and its reason. If steps later take
    20 % more or less time than expected, it measures and selects again. Rank 0 decides for all ranks.

    Args:
        allow: Largest permitted effect on the optimisation: "exact", "8bit" (8 bits on the wire), "compensated"
            (elements that are not sent are kept as residuals) or "any" (including weights that differ between ranks).
        candidates: Names or instances to choose from, in order of preference, in place of commlib's own list for
            `allow`. Candidates outside that class, or which need an optimizer that was not given to `wrap`, are
            excluded. Candidates known to reach a higher loss are not excluded; the log reports them.

    Paper: none; Gan et al., "BAGUA" (VLDB 2021), mention automatic selection as missing.
    """

    made_for = "any"
    limits = MappingProxyType({"two_runs_are_alike": "the chosen algorithm depends on measurements"})

    def __init__(self, allow: str = "8bit", candidates: Sequence[str | Algorithm] | None = None) -> None:
        super().__init__()
        if allow not in EXACTNESS:
            raise ConfigError(f"Auto.allow: expected one of {', '.join(EXACTNESS)}, got {allow!r}")
        self.allow = allow
        self.candidates = None if candidates is None else tuple(candidates)
