"""The code in the pages of documentation: runnable blocks, and blocks marked as not run, with the reason.

A comment above a block of code holds instructions that a reader need not see:

    <!-- not run: needs two hosts -->                  the block is read, not run; the reason is for maintainers
    <!-- given: model = commlib.wrap(model) -->        runs before the block
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
#: All pages with code except that of the command line, which is generated from the commands' help.
PAGES = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")}
    - {ROOT / "docs" / "reference" / "command_line.md"}
)

_PARSER = MarkdownIt("commonmark").enable("table")
_PARSER.core.ruler.enableOnly(["normalize", "block"])  # inline markup is not parsed

_NOTE = re.compile(r"<!--\s*(?P<kind>not run|given):(?P<text>.*?)-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        page: The file.
        line: The line of the file before its first one, from 0.
        language: The text after the fence; "" for an indented block.
        text: The code.
        reason: Why it is not run; None if it is run.
        given: Code that runs before it.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str | None = None
    given: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of code of a page in their order, each with the instructions of the comment above it."""
    found = []
    notes: dict[str, str] = {}
    for token in _PARSER.parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            fenced = token.type == "fence"
            line = (token.map or [0])[0] + fenced
            language = token.info.split()[0] if token.info else ""
            found.append(Block(page, line, language, token.content, notes.get("not run"), notes.get("given", "")))
            notes = {}
        elif token.type == "html_block":
            notes |= {match["kind"]: match["text"].strip() for match in _NOTE.finditer(token.content)}
        elif token.content:
            notes = {}
    return found


def commands(block: Block) -> list[str]:
    """Return the command lines of a block: those after a `$ `, else all; continued ones are joined."""
    lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in prompted or lines if line.strip() and not line.lstrip().startswith("#")]
