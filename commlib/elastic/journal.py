"""The views that a service has made, on disk: one line of JSON per view, written before it is sent."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from commlib.elastic.views import BadMessage, View, view_from, view_to
from commlib.errors import ConfigError

#: The newest line is enough to continue; beyond this size the file begins again with it.
_MOST_BYTES = 1 << 20


class Journal:
    """A journal that is open for writing. Only one process can have it open.

    Args:
        path: The file; created if it does not exist.

    Attributes:
        newest: The newest view in it; None if it was empty.

    Raises:
        ConfigError: The file cannot be opened or read, another process has it open, or it is no journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"journal: cannot open {str(path)!r}: {error}") from error
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"journal: another process has {str(self._path)!r} open") from error
        self._file.seek(0)
        # A line without an end was being written when the process ended: nobody has heard of that view.
        lines = self._file.read().split(b"\n")
        self._file.truncate(sum(len(line) + 1 for line in lines[:-1]))
        self.newest = self._read(lines[-2]) if len(lines) > 1 else None

    def _read(self, line: bytes) -> View:
        try:
            return view_from(json.loads(line))
        except (ValueError, BadMessage) as error:
            raise ConfigError(f"journal: {str(self._path)!r} is not a journal of commlib: {error}") from error

    def write(self, view: View) -> None:
        """Append a view; it is on disk when this returns.

        Raises:
            OSError: It could not be written.
        """
        line = json.dumps(view_to(view)).encode() + b"\n"
        if self._file.tell() > _MOST_BYTES:
            self._rewrite(line)
            return
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _rewrite(self, line: bytes) -> None:
        """Replace the file by one with this line only, at once."""
        new = self._path.with_name(f"{self._path.name}.new")
        file = new.open("w+b")
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
        fcntl.flock(file, fcntl.LOCK_EX)
        new.replace(self._path)
        self._file.close()
        self._file = file

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()
