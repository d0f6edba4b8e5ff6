"""Files that a command will write, tried before its work begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from commlib.errors import ConfigError


def check_file(path: Path | str, option: str) -> None:
    """Try to write a file; one that is there keeps its content, one that is not is not left behind.

    Raises:
        ConfigError: It cannot be written.
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
    """Make a folder, and try to write in it.

    Raises:
        ConfigError: That cannot be done.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: cannot write in the folder {str(path)!r}: {error.strerror or error}") from error
