"""The `commlib` command. A subcommand imports what it needs when it runs, so that `commlib --help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="commlib",
    help="Communication relaxation for data-parallel training in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _keep_subcommands() -> None:
    """Communication relaxation for data-parallel training in PyTorch."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions, backends, instruction sets and devices, and what is missing with its fix.

    Ends with exit code 1 if the compiled extension cannot be loaded.
    """
    from commlib import doctor as checks

    report = checks.examine()
    if as_json:
        typer.echo(checks.to_json(report))
    else:
        checks.show(report)
    raise typer.Exit(checks.exit_code(report))


def main() -> None:
    """Run the `commlib` command."""
    app()
