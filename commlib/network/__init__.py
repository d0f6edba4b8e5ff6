"""Networks: emulated hosts that run real processes over shaped links."""

from commlib.network.emulated import (
    EmulatedCluster,
    HostResult,
    InterfaceCounters,
    check_requirements,
    parse_rate,
)

__all__ = ["EmulatedCluster", "HostResult", "InterfaceCounters", "check_requirements", "parse_rate"]
