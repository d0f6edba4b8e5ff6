"""The version: its one source, which the build reads without importing anything."""

__version__ = "0.1.0"
