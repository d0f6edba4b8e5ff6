"""Checks that output files can be written, before a command begins its work."""

from __future__ import annotations

import tempfile
from pathlib import Path

from commlib.errors import ConfigError


def check_file(path: Path | str, option: str) -> None:
    """Check that a file can be written. An existing file keeps its content; a new file is removed again.

    Raises:
        ConfigError: The file cannot be written.
    """
    path = Path(path)
    try:
        was_there = path.exists()
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {str(path)!r}: {error.strerror or error}") from error


def check_folder(path: Path | str, option: str) -> None:
    """Create a folder and check that files can be written in it.

    Raises:
        ConfigError: The folder cannot be created or written to.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: cannot write in the folder {str(path)!r}: {error.strerror or error}") from error
