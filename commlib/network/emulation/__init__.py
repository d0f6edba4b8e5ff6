"""Emulated hosts: real processes over shaped links on one machine (docs/emulation.md)."""
