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


@app.command()
def topology(
    name: Annotated[str, typer.Argument(help="ring, exponential, one_peer_exponential, shift_one, grid, ...")],
    ranks: Annotated[int, typer.Option(help="The number of ranks.")] = 8,
    plot: Annotated[str | None, typer.Option(help="Draw it into this file (.png, .svg, .pdf).")] = None,
) -> None:
    """Show whom ranks average with: weights, spectral gap, and how many steps lead to the mean."""
    from commlib.errors import ConfigError
    from commlib.network import topology_report
    from commlib.primitives.topology import create

    try:
        chosen = create(name)
        typer.echo(topology_report.describe(chosen, ranks))
        if plot is not None:
            topology_report.plot(chosen, ranks, plot)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def main() -> None:
    """Run the `commlib` command."""
    app()
