"""The `commlib` command. Each subcommand imports its dependencies when it runs, so that `commlib --help` is fast."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from commlib.reports.comparison import Selection

#: Default networks of a comparison.
_NETWORKS = "10gbps,100gbps"

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
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions, backends, instruction sets and devices, and how to fix missing components.

    The exit code is 1 if the compiled extension cannot be loaded.
    """
    from commlib import doctor as checks

    report = checks.examine()
    if as_json:
        typer.echo(checks.to_json(report))
    else:
        checks.show(report)
    raise typer.Exit(checks.exit_code(report))


# --- validation of options --------------------------------------------------------------------------------------------


def _above_zero(value: float | None) -> float | None:
    """Reject values that are not finite numbers above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"expected a number above 0, got {value:g}")
    return value


def _zero_or_more(value: float | None) -> float | None:
    """Reject values that are not finite numbers of 0 or more."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise typer.BadParameter(f"expected a number of 0 or more, got {value:g}")
    return value


class _Optimizer(str, enum.Enum):
    """Optimizers, distinguished by their state."""

    sgd = "sgd"
    adamw = "adamw"


# --- groups of options as dataclasses ---------------------------------------------------------------------------------


def _takes(*groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Pass a command one object per dataclass of `groups`; each field becomes an option of the command.

    Typer reads the options from a function's signature. The decorated command therefore gets a signature that lists all
    fields, and a call collects the values into the objects.
    """
    fields = {group: [field.name for field in dataclasses.fields(group)] for group in groups}
    options = [option for group in groups for option in _options_of(group)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def call(**values: Any) -> None:
            command(*(group(**{name: values[name] for name in names}) for group, names in fields.items()))

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__annotations__ = {option.name: option.annotation for option in options}
        call.__signature__ = inspect.Signature(options)  # pyright: ignore[reportFunctionMemberAccess]
        return call

    return decorate


def _options_of(group: type[Any]) -> Iterator[inspect.Parameter]:
    """Yield the fields of a dataclass as parameters of a command."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )


@dataclasses.dataclass(frozen=True)
class _Compared:
    """The subjects of `compare`."""

    workload: Annotated[str, typer.Option(help="A name from `--list`, or a file written by `commlib profile`.")] = (
        "vgg16"
    )
    network: Annotated[
        str | None, typer.Option(help="Names from `--list`, separated by commas.", show_default=_NETWORKS)
    ] = None
    algorithms: Annotated[
        str, typer.Option(help="'all', or names separated by commas, with options: 'bytegrad, topk(ratio=0.001)'.")
    ] = "all"
    exactness: Annotated[str, typer.Option(help="Widest class of algorithms: exact, 8bit, compensated or any.")] = "any"
    optimizer: Annotated[_Optimizer | None, typer.Option(help="Overrides the workload's optimizer.")] = None
    device: Annotated[str | None, typer.Option(help="Device of each rank; default: the workload's.")] = None
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="Bucket size in MiB; default: chosen by the planner.", callback=_above_zero)
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            help="Simulated steps (default 4); with --emulate, steps per timed block (3).", callback=_above_zero
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class _Overrides:
    """Overrides of the networks' fields, by field name; None keeps a field."""

    nodes: Annotated[int | None, typer.Option(help="Overrides the number of nodes.", callback=_above_zero)] = None
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Overrides the number of ranks per node.", callback=_above_zero)
    ] = None
    bandwidth_gbps: Annotated[
        float | None, typer.Option(help="Overrides the bandwidth of each node's adapter.", callback=_above_zero)
    ] = None
    latency_us: Annotated[
        float | None,
        typer.Option(
            help="Overrides the latency between nodes; with --emulate, latency added between hosts.",
            callback=_zero_or_more,
        ),
    ] = None
    intra_gbps: Annotated[
        float | None, typer.Option(help="Overrides the bandwidth of each rank within its node.", callback=_above_zero)
    ] = None
    efficiency: Annotated[
        float | None, typer.Option(help="Fraction of the bandwidth that messages achieve.", callback=_above_zero)
    ] = None
    ceiling_gbps: Annotated[
        float | None, typer.Option(help="Maximum throughput of the transport.", callback=_above_zero)
    ] = None
    window_mb: Annotated[
        float | None,
        typer.Option(help="Maximum bytes in flight per TCP connection between nodes, in MiB.", callback=_above_zero),
    ] = None


@dataclasses.dataclass(frozen=True)
class _Sharded:
    """Whether and how `compare` shards the model."""

    shard: Annotated[
        int | None, typer.Option(help="Number of ranks that shard the model with FSDP2.", callback=_above_zero)
    ] = None
    weights: Annotated[
        str | None, typer.Option(help="With --shard: codec of the weights, or several with commas (default int8).")
    ] = None
    gradients: Annotated[
        str | None, typer.Option(help="With --shard: codec of the gradients, or several with commas (default int8).")
    ] = None
    difference: Annotated[bool, typer.Option("--difference", help="With --shard: send differences of weights.")] = False
    reshard_after_forward: Annotated[
        bool, typer.Option(help="With --shard: whether backward gathers the weights again.")
    ] = True
    hierarchical: Annotated[
        bool, typer.Option("--hierarchical", help="With --shard: sum gradients within nodes before encoding them.")
    ] = False
    param_dtype: Annotated[
        str | None, typer.Option(help="With --shard: dtype of gathered weights; default: the workload's.")
    ] = None
    reduce_dtype: Annotated[
        str | None, typer.Option(help="With --shard: dtype of reduced gradients; default: the workload's.")
    ] = None


@dataclasses.dataclass(frozen=True)
class _Shown:
    """The output of `compare`."""

    plot: Annotated[Path | None, typer.Option(help="Folder for plots.")] = None
    trace: Annotated[
        Path | None, typer.Option(help="File for a trace of one step per algorithm, in Perfetto's format.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False
    wide: Annotated[bool, typer.Option("--wide", help="Print all columns, regardless of the terminal's width.")] = False
    list_known: Annotated[bool, typer.Option("--list", help="List workloads and networks with their sources.")] = False


@dataclasses.dataclass(frozen=True)
class _Emulated:
    """Whether and how `compare` emulates."""

    emulate: Annotated[
        bool, typer.Option("--emulate", help="Time shrunk models on emulated hosts instead of simulating.")
    ] = False
    hosts: Annotated[
        int | None, typer.Option(help="With --emulate: number of hosts (default 4).", callback=_above_zero)
    ] = None
    rate: Annotated[
        str | None, typer.Option(help="With --emulate: link rates instead of networks, such as 200mbit,1gbit.")
    ] = None


@app.command()
@_takes(_Compared, _Overrides, _Sharded, _Shown, _Emulated)
def compare(compared: _Compared, overrides: _Overrides, sharded: _Sharded, shown: _Shown, emulated: _Emulated) -> None:
    """Simulate a workload with each algorithm on networks: step time, speed-up over DDP, bytes, memory."""
    from commlib.reports import comparison as report

    with _config_errors():
        if shown.list_known:
            report.show_known()
            return
        selection = _selection(compared, overrides, sharded)
        if emulated.emulate:
            from commlib.emulation import experiment as emulation

            options = {"plot": shown.plot, "trace": shown.trace, "wide": shown.wide or None, "device": compared.device}
            _refuse(
                "--emulate does not support",
                shard=sharded.shard,
                **options,
                intra_gbps=overrides.intra_gbps,
                window_mb=overrides.window_mb,
            )
            if emulated.rate is not None:
                _refuse("--rate replaces", network=compared.network)
            emulation.run(selection, emulated.rate, emulated.hosts or 4, shown.as_json)
            return
        _refuse("without --emulate there is no", rate=emulated.rate, hosts=emulated.hosts)
        report.run(selection, report.Output(shown.plot, shown.trace, shown.as_json, shown.wide))


def _selection(compared: _Compared, overrides: _Overrides, sharded: _Sharded) -> Selection:
    from commlib.reports.comparison import Selection

    how = dataclasses.asdict(sharded)
    if sharded.shard is None:
        defaults = dataclasses.asdict(_Sharded())
        _refuse(
            "without --shard there is no",
            **{name: value if value != defaults[name] else None for name, value in how.items()},
        )
    settings = dataclasses.asdict(compared)
    network = settings.pop("network")
    networks = (_NETWORKS if network is None else network).split(",")
    optimizer = {None: None, _Optimizer.sgd: "sgd", _Optimizer.adamw: "adam"}[settings.pop("optimizer")]
    return Selection(networks=networks, overrides=dataclasses.asdict(overrides), optimizer=optimizer, **how, **settings)


@app.command()
def profile(
    script: Annotated[Path, typer.Argument(help="A Python file that defines `model` and `step(model)`.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments for the file's `sys.argv`, after --.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="File to write the workload to, for `commlib compare --workload`.")
    ] = Path("workload.json"),
    batch_per_rank: Annotated[int, typer.Option(help="Samples per step and rank.", callback=_above_zero)] = 1,
    steps: Annotated[int, typer.Option(help="Steps to measure; the median is used.", callback=_above_zero)] = 5,
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
        profiling.save(measured, output)
    _say(
        f"{output}: {measured.numel / 1e6:.2f} M parameters, {measured.step_s * 1e3:.2f} ms a step; {measured.source}",
        f"next: commlib compare --workload {output}",
    )


@app.command()
def topology(
    name: Annotated[str, typer.Argument(help="ring, exponential, one_peer_exponential, shift_one, grid, ...")],
    ranks: Annotated[int, typer.Option(help="Number of ranks.", callback=_above_zero)] = 8,
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
