"""Generate the page of the command line from the help of the commands: python -m scripts.site.command_line."""

from __future__ import annotations

import re

import typer
from typer.cli import get_docs_for_click
from typer.main import get_group

from commlib.cli import app


def page() -> str:
    """Return the text of docs/reference/command_line.md."""
    group = get_group(app)
    text = get_docs_for_click(obj=group, ctx=typer.Context(group), name="commlib", title="The command line")
    for name, command in group.commands.items():  # typer truncates these at 45 characters
        what = (command.help or "").split("\n\n")[0]
        text = re.sub(rf"^\* `{name}`: .*$", lambda _, new=f"* `{name}`: {what}": new, text, flags=re.MULTILINE)
    return text.strip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
