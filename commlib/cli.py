"""The `commlib` command. Each subcommand imports its dependencies when it runs, so that `commlib --help` is fast."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlib.cli_options import (
    NETWORKS,
    Compared,
    Emulated,
    Optimizer,
    Overrides,
    Priced,
    Sharded,
    Shown,
    above_zero,
    takes,
    zero_or_more,
)

if TYPE_CHECKING:
    from commlib.reports.comparison import Selection

#: Default time to wait for a rank in `doctor --peers`, in seconds.
_PEER_TIMEOUT_S = 60.0

app = typer.Typer(
    name="commlib",
    help="Communication relaxation for data-parallel training in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from commlib.version import __version__

        typer.echo(f"commlib {__version__}")
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Communication relaxation for data-parallel training in PyTorch."""


@app.command()
def rendezvous(
    host: Annotated[str, typer.Option(help="The address to listen on; without a token, a loopback address.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 lets the system choose.")] = 29400,
    token_file: Annotated[Path | None, typer.Option(help="A file with the secret that all members share.")] = None,
    journal: Annotated[Path, typer.Option(help="The file of the views, to continue after a restart.")] = Path(
        "commlib-rendezvous.journal"
    ),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Let new members begin if no member of an earlier job returns.")
    ] = False,
    min_members: Annotated[int, typer.Option(min=1, help="Nobody trains with fewer members.")] = 1,
    target_members: Annotated[
        int, typer.Option(min=0, help="Members on standby enter below this number; 0: never.")
    ] = 0,
    status: Annotated[bool, typer.Option("--status", help="Show the members of the service that listens there.")] = (
        False
    ),
) -> None:
    """Number the views of a job whose members come and go (commlib.elastic). Runs until it is interrupted."""
    from commlib.elastic import command

    with _config_errors():
        token = command.read_token(token_file)
        if status:
            command.show_status(host, port, token)
        else:
            command.serve(host, port, token, journal, command.Rules(fresh, min_members, target_members))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure the connections between the ranks of a job; run it on all ranks.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="With --peers: seconds to wait for a rank (default 60).", callback=above_zero)
    ] = None,
) -> None:
    """Show versions, backends, instruction sets and devices, and how to fix missing components.

    The exit code is 1 if the compiled extension cannot be loaded. With --peers, rank 0 shows the connections between
    the ranks instead, and warns about their network; the exit code is 1 if a rank did not arrive or answer.
    """
    if peers:
        _survey(_PEER_TIMEOUT_S if timeout is None else timeout, as_json)
        return
    with _config_errors():
        _refuse("without --peers there is no", timeout=timeout)
    from commlib import doctor as checks

    report = checks.examine()
    if as_json:
        typer.echo(checks.to_json(report))
    else:
        checks.show(report)
    raise typer.Exit(checks.exit_code(report))


def _survey(timeout_s: float, as_json: bool) -> None:
    from commlib.peers import job, report

    with _config_errors():
        found = job.survey(os.environ, timeout_s)
    if found is not None and as_json:
        typer.echo(report.to_json(*found))
    elif found is not None:
        report.show(*found)


@app.command()
@takes(Compared, Overrides, Sharded, Priced, Shown, Emulated)
def compare(
    compared: Compared,
    overrides: Overrides,
    sharded: Sharded,
    priced: Priced,
    shown: Shown,
    emulated: Emulated,
) -> None:
    """Simulate a workload with each algorithm on networks: step time, speed-up over DDP, bytes, memory."""
    from commlib.reports import comparison as report

    with _config_errors():
        if shown.list_known:
            report.show_known()
            return
        selection = _selection(compared, overrides, sharded, priced)
        if emulated.emulate:
            from commlib.emulation import experiment as emulation

            files = {"plot": shown.plot, "html": shown.html, "csv": shown.csv, "trace": shown.trace}
            _refuse(
                "--emulate does not support",
                shard=sharded.shard,
                **dataclasses.asdict(priced),
                **files,
                wide=shown.wide or None,
                device=compared.device,
                intra_gbps=overrides.intra_gbps,
                window_mb=overrides.window_mb,
            )
            if emulated.rate is not None:
                _refuse("--rate replaces", network=compared.network)
            emulation.run(selection, emulated.rate, emulated.hosts or 4, shown.as_json)
            return
        _refuse("without --emulate there is no", rate=emulated.rate, hosts=emulated.hosts)
        files = {name: getattr(shown, name) for name in ("plot", "html", "csv", "trace")}
        command = shlex.join(["commlib", *sys.argv[1:]])
        report.run(selection, report.Output(**files, as_json=shown.as_json, wide=shown.wide, command=command))


def _selection(compared: Compared, overrides: Overrides, sharded: Sharded, priced: Priced) -> Selection:
    from commlib.reports.comparison import Selection

    how = dataclasses.asdict(sharded)
    if sharded.shard is None:
        defaults = dataclasses.asdict(Sharded())
        _refuse(
            "without --shard there is no",
            **{name: value if value != defaults[name] else None for name, value in how.items()},
        )
    settings = dataclasses.asdict(compared)
    network = settings.pop("network")
    networks = (NETWORKS if network is None else network).split(",")
    optimizer = {None: None, Optimizer.sgd: "sgd", Optimizer.adamw: "adam"}[settings.pop("optimizer")]
    return Selection(
        networks=networks,
        overrides=dataclasses.asdict(overrides),
        optimizer=optimizer,
        **how,
        **settings,
        **dataclasses.asdict(priced),
    )


@app.command()
def profile(
    script: Annotated[Path, typer.Argument(help="A Python file that defines `model` and `step(model)`.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments for the file's `sys.argv`, after --.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="File to write the workload to, for `commlib compare --workload`.")
    ] = Path("workload.json"),
    batch_per_rank: Annotated[int, typer.Option(help="Samples per step and rank.", callback=above_zero)] = 1,
    steps: Annotated[int, typer.Option(help="Steps to measure; the median is used.", callback=above_zero)] = 5,
    tokens_per_sample: Annotated[
        int, typer.Option(help="Tokens in a sample, for costs per token; 0: costs per sample.", callback=zero_or_more)
    ] = 0,
) -> None:
    """Profile a custom model layer by layer, for `commlib compare --workload FILE`.

    The script is imported as a module, without its `if __name__ == "__main__":` block. `step(model)` must run one
    forward and one backward (`loss.backward()`). A global `optimizer`, if defined, is stepped and timed too.
    """
    from commlib.network import profiling
    from commlib.reports import targets

    with _config_errors():
        targets.check_file(output, "--output")
        try:
            measured = profiling.profile_script(script, arguments or (), batch_per_rank=batch_per_rank, steps=steps)
        except Exception as error:
            own = profiling.traceback_in(script, error)
            if own is None:
                raise
            typer.echo(f"{own}commlib profile: {script} raised {type(error).__name__}; nothing was written", err=True)
            raise typer.Exit(1) from None
        profiling.save(dataclasses.replace(measured, tokens_per_sample=tokens_per_sample), output)
    _say(
        f"{output}: {measured.numel / 1e6:.2f} M parameters, {measured.step_s * 1e3:.2f} ms a step; {measured.source}",
        f"next: commlib compare --workload {output}",
    )


@app.command()
def topology(
    name: Annotated[str, typer.Argument(help="ring, exponential, one_peer_exponential, shift_one, grid, ...")],
    ranks: Annotated[int, typer.Option(help="Number of ranks.", callback=above_zero)] = 8,
    plot: Annotated[Path | None, typer.Option(help="File for a plot (.png, .svg, .pdf).")] = None,
) -> None:
    """Show a topology: each rank's peers and weights, the spectral gap, and the steps to reach the mean."""
    from commlib.primitives.topology import create
    from commlib.reports import topology as topology_report

    with _config_errors():
        chosen = create(name)
        if plot is not None:
            topology_report.check_plot(plot)
        _say(*topology_report.describe(chosen, ranks).splitlines())
        if plot is not None:
            topology_report.plot(chosen, ranks, plot)


def _say(*lines: str) -> None:
    """Print lines, wrapped at the terminal's width."""
    from commlib.reports import tables

    for line in lines:
        typer.echo("\n".join(tables.wrapped(line, tables.terminal_width(), "    ")))


def _refuse(why: str, **options: object) -> None:
    """Raise `ConfigError` if any of the options is given."""
    from commlib.errors import ConfigError

    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{why} {', '.join(given)}")


@contextmanager
def _config_errors() -> Iterator[None]:
    """Report `ConfigError` as a usage error with exit code 2, other commlib errors with code 1; no traceback."""
    from commlib.errors import CommlibError, ConfigError

    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except CommlibError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def main() -> None:
    """Run the `commlib` command; an `OSError` is reported in one line, with exit code 1."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # flushing the remaining output at exit would fail again
        sys.exit(f"Error: {error}")
