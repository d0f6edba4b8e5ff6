"""The `commlib` command. A subcommand imports what it needs when it runs, so that `commlib --help` is quick."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

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


# --- options that a command takes as objects --------------------------------------------------------------------------


def _takes(*groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take one object per dataclass of `groups`; each of their fields is an option of the command.

    Typer reads options off a function's signature, so the command gets one that lists all fields, and the call puts
    them into the objects.
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
    """What `compare` compares."""

    workload: Annotated[str, typer.Option(help="A name of `--list`, or a file that `commlib profile` wrote.")] = "vgg16"
    network: Annotated[str, typer.Option(help="Names of `--list`, with commas between them.")] = "10gbps,100gbps"
    algorithms: Annotated[
        str, typer.Option(help="'all', or names with commas between them, with options: 'bytegrad, topk(ratio=0.001)'.")
    ] = "all"
    exactness: Annotated[str, typer.Option(help="The widest class: exact, 8bit, compensated or any.")] = "any"
    device: Annotated[str | None, typer.Option(help="What ranks compute with; the workload's by default.")] = None
    bucket_cap_mb: Annotated[float | None, typer.Option(help="Size of a bucket; by default they are planned.")] = None
    steps: Annotated[int, typer.Option(help="Simulated steps.")] = 4


@dataclasses.dataclass(frozen=True)
class _Overrides:
    """What replaces fields of the networks, by the fields' names; None leaves one as it is."""

    nodes: Annotated[int | None, typer.Option(help="Instead of the network's.")] = None
    gpus_per_node: Annotated[int | None, typer.Option(help="Instead of the network's.")] = None
    bandwidth_gbps: Annotated[float | None, typer.Option(help="Of a node's adapter, instead of the network's.")] = None
    latency_us: Annotated[
        float | None, typer.Option(help="Between nodes, instead of the network's. With --emulate: added between hosts.")
    ] = None
    intra_gbps: Annotated[float | None, typer.Option(help="Of a rank inside its node, instead of the network's.")] = (
        None
    )
    efficiency: Annotated[float | None, typer.Option(help="The part of the bandwidth that messages reach.")] = None
    ceiling_gbps: Annotated[float | None, typer.Option(help="The most that the transport carries.")] = None


@dataclasses.dataclass(frozen=True)
class _Shown:
    """What `compare` prints, draws and writes."""

    plot: Annotated[Path | None, typer.Option(help="A folder to draw pictures in.")] = None
    trace: Annotated[Path | None, typer.Option(help="A file for a step of each algorithm; Perfetto opens it.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False
    list_known: Annotated[bool, typer.Option("--list", help="List workloads and networks with their sources.")] = False


@dataclasses.dataclass(frozen=True)
class _Emulated:
    """Whether and how `compare` emulates."""

    emulate: Annotated[
        bool, typer.Option("--emulate", help="Time shrunk models on emulated hosts instead, where layers wait.")
    ] = False
    hosts: Annotated[int, typer.Option(help="With --emulate: hosts.")] = 4
    rate: Annotated[str | None, typer.Option(help="With --emulate: link rates instead of networks: 200mbit,1gbit.")] = (
        None
    )


@app.command()
@_takes(_Compared, _Overrides, _Shown, _Emulated)
def compare(compared: _Compared, overrides: _Overrides, shown: _Shown, emulated: _Emulated) -> None:
    """Simulate what each algorithm makes of a workload on networks: step time, speed-up over DDP, bytes, memory."""
    from commlib.reports import comparison as report

    with _config_errors():
        if shown.list_known:
            report.show_known()
            return
        settings = dataclasses.asdict(compared)
        networks = settings.pop("network").split(",")
        selection = report.Selection(networks=networks, overrides=dataclasses.asdict(overrides), **settings)
        if emulated.emulate:
            from commlib.emulation import experiment as emulation

            options = {"plot": shown.plot, "trace": shown.trace, "device": compared.device}
            _refuse("--emulate draws and simulates nothing of", **options)
            emulation.run(selection, emulated.rate, emulated.hosts, shown.as_json)
            return
        _refuse("only --emulate takes", rate=emulated.rate)
        report.run(selection, plot=shown.plot, trace=shown.trace, as_json=shown.as_json)


@app.command()
def profile(
    script: Annotated[Path, typer.Argument(help="A Python file that defines `model` and `step(model)`.")],
    output: Annotated[Path, typer.Option(help="The workload to write, for `commlib compare --workload`.")] = Path(
        "workload.json"
    ),
    batch_per_rank: Annotated[int, typer.Option(help="Samples in a step.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps to measure; the median counts.")] = 5,
) -> None:
    """Measure a model of your own, layer by layer, for `commlib compare --workload FILE`.

    The script is run; `step(model)` must make one forward and backward (`loss.backward()`); a global `optimizer`, if
    there is one, is stepped and timed too.
    """
    from commlib.network import profiling

    with _config_errors():
        measured = profiling.profile_script(script, batch_per_rank=batch_per_rank, steps=steps)
        profiling.save(measured, output)
    typer.echo(
        f"{output}: {measured.numel / 1e6:.2f} M parameters, {measured.step_s * 1e3:.2f} ms a step; "
        f"now: commlib compare --workload {output}"
    )


@app.command()
def topology(
    name: Annotated[str, typer.Argument(help="ring, exponential, one_peer_exponential, shift_one, grid, ...")],
    ranks: Annotated[int, typer.Option(help="The number of ranks.")] = 8,
    plot: Annotated[str | None, typer.Option(help="Draw it into this file (.png, .svg, .pdf).")] = None,
) -> None:
    """Show whom ranks average with: weights, spectral gap, and how many steps lead to the mean."""
    from commlib.primitives.topology import create
    from commlib.reports import topology as topology_report

    with _config_errors():
        chosen = create(name)
        typer.echo(topology_report.describe(chosen, ranks))
        if plot is not None:
            topology_report.plot(chosen, ranks, plot)


def _refuse(why: str, **options: object) -> None:
    """Raise ConfigError if one of the options was given."""
    from commlib.errors import ConfigError

    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{why} {', '.join(given)}")


@contextmanager
def _config_errors() -> Iterator[None]:
    """Turn wrong input into an error of the command line: its message, no traceback, exit code 2."""
    from commlib.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def main() -> None:
    """Run the `commlib` command."""
    app()
