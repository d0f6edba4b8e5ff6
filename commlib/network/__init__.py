"""Networks: emulated hosts that run real processes over shaped links, and simulated ones."""

from commlib.network.emulation.cluster import (
    EmulatedCluster,
    HostResult,
    InterfaceCounters,
    check_requirements,
    parse_rate,
)
from commlib.network.profiling import profile_model

__all__ = [
    "EmulatedCluster",
    "HostResult",
    "InterfaceCounters",
    "check_requirements",
    "parse_rate",
    "profile_model",
]
