"""Common code of the benchmark drivers: running workers with live progress, and the header of a result file."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import launch
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_WORKER = pathlib.Path(__file__).resolve().parent / "worker.py"
_REFRESH_S = 0.25
_FILE_WIDTH = 120
console = Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the ranks run.

    Attributes:
        ranks: How many.
        emulated: Whether each has a host of its own in a network namespace; otherwise all share loopback.
        rate: Rate of the emulated links, for example "200mbit"; None for unshaped ones.
        latency_us: One-way latency that is added between emulated hosts, in microseconds.
    """

    ranks: int
    emulated: bool = False
    rate: str | None = None
    latency_us: float = 0.0

    def __str__(self) -> str:
        if not self.emulated:
            return f"{self.ranks} ranks on loopback"
        latency = f", {self.latency_us:g} us added one way" if self.latency_us else ", no latency added"
        return f"{self.ranks} hosts at {self.rate or 'full rate'}{latency}"

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """Make a temporary folder; leftovers of a killed emulation are removed by the next one."""
        if not self.emulated:
            return tempfile.TemporaryDirectory()
        from commlib.emulation.netns import temporary_folder  # lazily: loopback does without commlib

        return temporary_folder()


def add_worker_options(parser: argparse.ArgumentParser, timeout_s: float, what: str) -> None:
    """Add how workers run; the timeout is that of `what`."""
    parser.add_argument("--threads", type=int, default=1, help="compute threads per rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout", type=float, default=timeout_s, help=f"seconds for {what}")


@contextlib.contextmanager
def ending_on_errors() -> Iterator[None]:
    """End the program with the end of a rank's output, where one fails."""
    try:
        yield
    except launch.WorkerError as error:
        sys.exit(f"error: {error}")


def run_workers(
    place: Place, spec: dict[str, Any], num_steps: int, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run one worker per rank and return the results of rank 0.

    Args:
        place: Where.
        spec: Input of the workers: the mode and its settings.
        num_steps: Steps they will report, for the progress bar.
        env: Extra environment variables.

    Raises:
        WorkerError: A rank failed.
    """
    with place.folder() as folder:
        paths = {key: str(pathlib.Path(folder) / f"{key}.json") for key in ("spec", "result", "progress")}
        spec = {**spec, **paths}
        pathlib.Path(paths["spec"]).write_text(json.dumps(spec))
        env = {"OMP_NUM_THREADS": str(spec["threads"]), **(env or {})}
        with _follow(pathlib.Path(paths["progress"]), num_steps):
            if place.emulated:
                links = launch.run_emulated(
                    place.ranks, place.rate, _WORKER, [paths["spec"]], env, spec["timeout"], place.latency_us
                )
            else:
                links = "loopback"
                launch.run_local(place.ranks, _WORKER, [paths["spec"]], env, spec["timeout"])
        return {"links": links, **json.loads(pathlib.Path(paths["result"]).read_text())}


@contextlib.contextmanager
def _follow(path: pathlib.Path, num_steps: int) -> Iterator[None]:
    """Show a progress bar fed by the file that rank 0 writes; nothing moves where there is no terminal."""
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stop = threading.Event()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=num_steps)

        def refresh() -> None:
            while not stop.wait(_REFRESH_S):
                with contextlib.suppress(OSError, ValueError):  # not there yet, or half written
                    state = json.loads(path.read_text())
                    progress.update(task, completed=state["done"], description=state["label"])

        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def header() -> dict[str, Any]:
    """Describe the machine, the versions and the command, so that a result can be judged and reproduced."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    """Return the processor's name, family and model: virtual machines use one name for several kinds."""
    with contextlib.suppress(OSError, KeyError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"
    return platform.machine()


def note(name: str, has_failed: bool = False, **facts: Any) -> None:
    """Add a figure to the results of a check on a GPU (scripts/gpu_check), where this runs as a part of one."""
    if os.environ.get("COMMLIB_GPU_RESULTS"):
        from tests.gpu import results

        results.add(name, results.FAILED if has_failed else results.PASSED, **facts)


def table_of(title: str, columns: Sequence[str], texts: Sequence[str] = ("system",)) -> Table:
    """Return a table without rows: texts left-aligned, numbers right-aligned; wide cells are folded.

    Args:
        title: The title.
        columns: The column headers.
        texts: The columns that hold texts.
    """
    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, justify="left" if column in texts else "right", overflow="fold")
    return shown


def print_table(table: Table) -> None:
    """Print a table, at its full width where the output is a file or a pipe."""
    out = Console()
    if not out.is_terminal:
        out = Console(width=max(out.width, _FILE_WIDTH))
    out.print(table)


def write_json(path: str, result: dict[str, Any]) -> None:
    """Write a result file: the header in lines, then each row in one, so that differences between runs read well."""
    head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_text(f'{head.removesuffix("}").rstrip()},\n "rows": [\n{rows}\n ]\n}}\n')
    console.print(f"written to {path}")
