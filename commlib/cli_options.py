"""Options of the commands: groups of them as dataclasses, and checks of their values."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

#: Default networks of a comparison.
NETWORKS = "10gbps,100gbps"


def above_zero(value: float | None) -> float | None:
    """Reject values that are not finite numbers above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"expected a number above 0, got {value:g}")
    return value


def zero_or_more(value: float | None) -> float | None:
    """Reject values that are not finite numbers of 0 or more."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise typer.BadParameter(f"expected a number of 0 or more, got {value:g}")
    return value


class Optimizer(str, enum.Enum):
    """Optimizers, distinguished by their state."""

    sgd = "sgd"
    adamw = "adamw"


# --- groups of options as dataclasses ---------------------------------------------------------------------------------


def takes(*groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
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
class Compared:
    """The subjects of `compare`."""

    workload: Annotated[str, typer.Option(help="A name from `--list`, or a file written by `commlib profile`.")] = (
        "vgg16"
    )
    network: Annotated[
        str | None, typer.Option(help="Names from `--list`, separated by commas.", show_default=NETWORKS)
    ] = None
    algorithms: Annotated[
        str, typer.Option(help="'all', or names separated by commas, with options: 'bytegrad, topk(ratio=0.001)'.")
    ] = "all"
    exactness: Annotated[str, typer.Option(help="Widest class of algorithms: exact, 8bit, compensated or any.")] = "any"
    optimizer: Annotated[Optimizer | None, typer.Option(help="Overrides the workload's optimizer.")] = None
    device: Annotated[
        str | None, typer.Option(help="Device of each rank; the workload keeps its times. Default: the workload's.")
    ] = None
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="Bucket size in MiB; default: chosen by the planner.", callback=above_zero)
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            help="Simulated steps (default 4); with --emulate, steps per timed block (3).", callback=above_zero
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Overrides of the networks' fields, by field name; None keeps a field."""

    nodes: Annotated[int | None, typer.Option(help="Overrides the number of nodes.", callback=above_zero)] = None
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Overrides the number of ranks per node.", callback=above_zero)
    ] = None
    bandwidth_gbps: Annotated[
        float | None, typer.Option(help="Overrides the bandwidth of each node's adapter.", callback=above_zero)
    ] = None
    latency_us: Annotated[
        float | None,
        typer.Option(
            help="Overrides the latency between nodes; with --emulate, latency added between hosts.",
            callback=zero_or_more,
        ),
    ] = None
    intra_gbps: Annotated[
        float | None, typer.Option(help="Overrides the bandwidth of each rank within its node.", callback=above_zero)
    ] = None
    efficiency: Annotated[
        float | None, typer.Option(help="Fraction of the bandwidth that messages achieve.", callback=above_zero)
    ] = None
    ceiling_gbps: Annotated[
        float | None, typer.Option(help="Maximum throughput of the transport.", callback=above_zero)
    ] = None
    window_mb: Annotated[
        float | None,
        typer.Option(help="Maximum bytes in flight per TCP connection between nodes, in MiB.", callback=above_zero),
    ] = None


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Whether and how `compare` shards the model."""

    shard: Annotated[
        int | None, typer.Option(help="Number of ranks that shard the model with FSDP2.", callback=above_zero)
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
class Priced:
    """The prices of the networks, and the budget. Both are in the same currency, which is never printed."""

    price_per_hour: Annotated[
        str | None,
        typer.Option(
            help="Price of one node for one hour, in any currency; or one for each network: 10gbps=2.5,100gbps=4.1."
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(help="With --price-per-hour: amount to spend, in the same currency.", callback=above_zero),
    ] = None


@dataclasses.dataclass(frozen=True)
class Shown:
    """The output of `compare`."""

    plot: Annotated[
        Path | None,
        typer.Option(help="Folder for plots. Takes 24 simulations per algorithm and network: minutes with 'all'."),
    ] = None
    html: Annotated[
        Path | None, typer.Option(help="File for a report: one page with figures, sortable tables and assumptions.")
    ] = None
    csv: Annotated[Path | None, typer.Option(help="File for all rows as CSV; -: print CSV instead of tables.")] = None
    trace: Annotated[
        Path | None, typer.Option(help="File for a trace of one step per algorithm, in Perfetto's format.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False
    wide: Annotated[bool, typer.Option("--wide", help="Print all columns, regardless of the terminal's width.")] = False
    list_known: Annotated[bool, typer.Option("--list", help="List workloads and networks with their sources.")] = False


@dataclasses.dataclass(frozen=True)
class Emulated:
    """Whether and how `compare` emulates."""

    emulate: Annotated[
        bool, typer.Option("--emulate", help="Time shrunk models on emulated hosts instead of simulating.")
    ] = False
    hosts: Annotated[
        int | None, typer.Option(help="With --emulate: number of hosts (default 4).", callback=above_zero)
    ] = None
    rate: Annotated[
        str | None, typer.Option(help="With --emulate: link rates instead of networks, such as 200mbit,1gbit.")
    ] = None
