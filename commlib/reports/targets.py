"""Output files: checks that they can be written, before a command begins its work, and writing them as a whole."""

from __future__ import annotations

import os
import shutil
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


def write_text(path: Path | str, text: str, option: str) -> None:
    """Write a file as a whole: if that fails, an existing file keeps its content, and a new file is not created.

    A target that is not a regular file, such as a pipe, is written to directly.

    Raises:
        ConfigError: The file cannot be written.
    """
    path = Path(path).resolve()
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path, text)
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {str(path)!r}: {error.strerror or error}") from error


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
