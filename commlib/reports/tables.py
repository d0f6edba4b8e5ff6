"""Tables and text that fit the terminal: the width determines the columns, and names are never cut."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

#: Default number of terminal columns, without a terminal or COLUMNS.
DEFAULT_WIDTH = 80

_GAP = 2
_LEAST_NAME = 20
#: Placeholder for a space at which no line may break, until the lines are built.
_HARD_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Title above the cells.
        cells: One cell per row. A name may have several lines.
        left: Whether cells are left-aligned rather than right-aligned.
    """

    title: str
    cells: Sequence[str]
    left: bool = False

    @property
    def width(self) -> int:
        """Number of characters of the longest cell or title."""
        return max(len(line) for cell in (self.title, *self.cells) for line in cell.split("\n"))


def console(*, stderr: bool = False) -> Console:
    """Return a console with the width of the terminal, else of COLUMNS, else 80."""
    return Console(width=terminal_width(), stderr=stderr, highlight=False)


def terminal_width() -> int:
    """Return the number of columns: of the terminal on standard output, else of COLUMNS, else 80."""
    if sys.stdout.isatty():
        return Console().width
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isascii() and asked.isdigit() and int(asked) > 0 else DEFAULT_WIDTH


def fitted(columns: Sequence[Column], width: int, required: int, wide: bool = False) -> list[str]:
    """Return the lines of a table: title, rule, rows.

    Args:
        columns: The first column holds names, which continue on another line if they are too long. The other columns
            are never narrowed. Columns that are not required are shown in their order as far as they fit.
        width: Width of the lines, in characters.
        required: Number of columns that are always shown.
        wide: Show all columns, regardless of the width.
    """
    names, others = columns[0], list(columns[1:])
    shown = others if wide else others[: required - 1]
    for column in others[len(shown) :]:
        if names.width + _total(shown) + _GAP + column.width > width:
            break
        shown.append(column)
    limit = names.width if wide else max(_LEAST_NAME, min(names.width, width - _total(shown)))
    lines = [_line(names.title.ljust(limit), [(column, column.title) for column in shown])]
    lines.append("─" * (limit + _total(shown)))
    for idx, name in enumerate(names.cells):
        first, *rest = [line for part in name.split("\n") for line in wrapped(part, limit, "    ")]
        lines.append(_line(first.ljust(limit), [(column, column.cells[idx]) for column in shown]))
        lines += rest
    return lines


def _total(columns: Sequence[Column]) -> int:
    return sum(_GAP + column.width for column in columns)


def _line(name: str, cells: Sequence[tuple[Column, str]]) -> str:
    padded = [cell.ljust(column.width) if column.left else cell.rjust(column.width) for column, cell in cells]
    return (" " * _GAP).join([name, *padded]).rstrip()


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text into lines of at most `width` characters, with `indent` before all but the first.

    Lines break at spaces. A word longer than a line breaks after a slash, a comma, a bracket or an underscore.
    """
    lines, line = [], ""
    for gap, word in re.findall(r"( *)([^ ]+)", text):
        for part in _pieces(word, width - len(indent)):
            if line.strip() and len(line) + len(gap) + len(part) > width:
                lines.append(line)
                line, gap = indent, ""
            line, gap = line + gap + part, ""
    return [each.replace(_HARD_SPACE, " ") for each in (*lines, line)]


def _pieces(word: str, width: int) -> list[str]:
    """Return the word, split into pieces if it is longer than `width`."""
    ends = rf"/,(\[_{_HARD_SPACE}"
    return [word] if len(word) <= width else re.findall(rf"[^{ends}]*[{ends}]|[^{ends}]+", word)


def kept(name: str) -> str:
    """Return a name that `wrapped` does not break."""
    return name.replace(" ", _HARD_SPACE)


def show(lines: Sequence[str], to: Console, style: str = "") -> None:
    """Print lines unchanged."""
    for line in lines:
        to.print(Text(line, style), soft_wrap=True)
