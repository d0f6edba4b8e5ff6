"""Emulated hosts: real processes over shaped links on one machine (docs/explanation/emulation.md)."""

from commlib.emulation.cluster import (
    EmulatedCluster,
    HostResult,
    InterfaceCounters,
    check_requirements,
    parse_rate,
)
from commlib.emulation.latency import check_latency

__all__ = ["EmulatedCluster", "HostResult", "InterfaceCounters", "check_latency", "check_requirements", "parse_rate"]
