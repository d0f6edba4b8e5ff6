"""Channels that act around optimizer steps: rounds over weights or optimizer state, and algorithms without rounds."""
