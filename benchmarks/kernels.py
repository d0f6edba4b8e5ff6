"""Time the codec kernels against memcpy and against what else there is, all in the same run.

python benchmarks/kernels.py --sizes 4KiB,1MiB,64MiB,1GiB --threads 1,2 --json out.json --plot out.png

Each kernel's time is compared with the time that memcpy needs for as many bytes as the kernel must move (`limit`):
reads and writes counted once each, as if every tensor passed through the core exactly once. All kernels of a size take
turns, in rotating order, on preallocated buffers; a figure is the median. The crossover of a codec is the bandwidth
below which encoding, sending and decoding take less time than sending fp32.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np
import torch
from intervals import rotation
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from commlib import codecs
from commlib.codecs import Feedback, Random
from commlib.kernels import native

_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_LEAST_S = 2e-4  # a shorter call is repeated until it takes that long
_INPUTS = 8  # of decode-sum-encode
_SUM_BYTES = 256 << 20  # decode-sum-encode is measured up to this size of one input


@dataclass(frozen=True)
class Kernel:
    """One measured function.

    Attributes:
        name: What it does.
        codec: The codec, or the name of the other library.
        bytes_moved: What it must read and write.
        run: Calls it once.
        peer_of: For functions of other libraries, the kernel (name, codec) that they are compared with.
    """

    name: str
    codec: str
    bytes_moved: int
    run: Callable[[], object]
    peer_of: tuple[str, str] | None = None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4KiB,64KiB,1MiB,16MiB,64MiB", help="bytes of the fp32 tensor")
    parser.add_argument("--threads", default="1", help="numbers of threads, comma-separated")
    parser.add_argument("--codecs", help="names, comma-separated; all by default")
    parser.add_argument("--reps", type=int, default=15, help="timed calls of each kernel")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--plot", help="file for the plot of the fraction of the limit by size (PNG)")
    args = parser.parse_args(argv)
    try:
        args.sizes = [_bytes(size) for size in args.sizes.split(",")]
        args.threads = [int(threads) for threads in args.threads.split(",")]
        args.codecs = args.codecs.split(",") if args.codecs else list(codecs.by_name)
        unknown = sorted(set(args.codecs) - set(codecs.by_name))
        if unknown:
            raise ValueError(f"--codecs: expected some of {', '.join(codecs.by_name)}, got {', '.join(unknown)}")
    except ValueError as error:
        parser.error(str(error))
    return args


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([\d.]+)\s*([KMG]i?B|B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"size {text!r}: expected for example 64KiB, 1MiB, 1GiB")
    unit = (match[2] or "B").upper()
    return int(float(match[1]) * _UNITS[unit if "I" in unit or unit == "B" else unit[0] + "IB"])


def kernels(numel: int, names: list[str], with_peers: bool) -> list[Kernel]:
    """Return everything to measure for tensors of `numel` fp32 elements, on buffers that are shared where possible."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator)
    out, residual = torch.zeros(numel), torch.zeros(numel)
    made = [_memcpy(out, x)]
    for name in names:
        codec = codecs.by_name[name]
        made += (
            _sparse(codec, x, out, residual)
            if issubclass(codec, codecs.SparseCodec)
            else _block(codec(), x, out, residual)
        )
    return made + (_peers(x, out) if with_peers else [])


def _memcpy(out: torch.Tensor, x: torch.Tensor) -> Kernel:
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    libc.memcpy.restype = None
    arguments = out.data_ptr(), x.data_ptr(), x.nbytes
    return Kernel("memcpy", "-", 2 * x.nbytes, lambda: (libc.memcpy(*arguments), out, x)[0])


def _block(codec: codecs.BlockCodec, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor) -> list[Kernel]:
    numel, full = x.numel(), x.nbytes
    size = codec.payload_bytes(numel)
    payload = torch.empty(size, dtype=torch.uint8)
    codec.encode(x, payload)
    feedback = Feedback(residual)
    made = [
        Kernel("encode", codec.name, full + size, lambda: codec.encode(x, payload)),
        Kernel("encode + feedback", codec.name, 3 * full + size, lambda: codec.encode(x, payload, feedback=feedback)),
        Kernel("decode", codec.name, full + size, lambda: codec.decode(payload, out)),
        Kernel("decode-add", codec.name, 2 * full + size, lambda: codec.decode_add(payload, out, weight=0.5)),
    ]
    if codec.rounds_stochastically:
        random = Random(seed=1)
        made.append(
            Kernel("encode, stochastic", codec.name, full + size, lambda: codec.encode(x, payload, random=random))
        )
    if full <= _SUM_BYTES:
        chunk = max(numel // _INPUTS, 1)
        small = codec.payload_bytes(chunk)
        rows, again = torch.empty(_INPUTS, small, dtype=torch.uint8), torch.empty(small, dtype=torch.uint8)
        for row in rows:
            codec.encode(x[:chunk], row)
        moved = (_INPUTS + 1) * small
        made.append(
            Kernel(
                "decode-sum-encode",
                codec.name,
                moved,
                lambda: codec.encode_sum(rows, chunk, again, divisor=float(_INPUTS)),
            )
        )
    return made


def _sparse(kind: type, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor) -> list[Kernel]:
    codec = kind(2.5) if kind is codecs.Threshold else kind(0.01)
    size, full, random = codec.payload_bytes(x.numel()), x.nbytes, Random(seed=1)
    payload = torch.empty(size, dtype=torch.uint8)
    codec.encode(x, payload, random=random)
    feedback = Feedback(residual)
    read = 64 * codec.places(x.numel()) if kind is codecs.RandomK else full  # a cache line for each random element
    return [
        Kernel("encode", codec.name, read + size, lambda: codec.encode(x, payload, random=random)),
        Kernel(
            "encode + feedback",
            codec.name,
            3 * full + size,
            lambda: codec.encode(x, payload, feedback=feedback, random=random),
        ),
        Kernel("decode", codec.name, full + size, lambda: codec.decode(payload, out)),
    ]


def _peers(x: torch.Tensor, out: torch.Tensor) -> list[Kernel]:
    """Return what other libraries offer for the same tasks; allocation is avoided where they let one avoid it."""
    numel, full = x.numel(), x.nbytes
    half, places = torch.empty(numel, dtype=torch.bfloat16), max(1, numel // 100)
    made = [
        Kernel("torch copy_ to bf16", "torch", full + full // 2, lambda: half.copy_(x), ("encode", "bf16")),
        Kernel("torch copy_ from bf16", "torch", full + full // 2, lambda: out.copy_(half), ("decode", "bf16")),
        Kernel("torch min, max, round", "torch", full * 5 // 4, lambda: _torch_uint8(x), ("encode", "uint8_minmax")),
        Kernel("torch.topk", "torch", full, lambda: torch.topk(x.abs(), places), ("encode", "topk")),
        Kernel(
            "numpy argpartition", "numpy", full, lambda: np.argpartition(np.abs(x.numpy()), -places), ("encode", "topk")
        ),
    ]
    if importlib.util.find_spec("fbgemm_gpu") is not None and numel % 256 == 0:
        made += _fbgemm(x, out)
    return made


def _torch_uint8(x: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1, 256) if x.numel() % 256 == 0 else x.view(1, -1)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    return ((rows - low) * (255 / (high - low).clamp_min(1e-30))).round_().to(torch.uint8)


def _fbgemm(x: torch.Tensor, out: torch.Tensor) -> list[Kernel]:
    import fbgemm_gpu  # noqa: F401  (registers the operators)

    ops, rows = torch.ops.fbgemm, x.view(-1, 256)
    packed = ops.FloatToFused8BitRowwiseQuantized(rows)
    moved = x.nbytes + packed.nbytes
    into = getattr(ops, "FloatToFused8BitRowwiseQuantizedOut", None)
    encode = (lambda: into(packed, rows)) if into else (lambda: ops.FloatToFused8BitRowwiseQuantized(rows))
    back = getattr(ops, "Fused8BitRowwiseQuantizedToFloatOut", None)
    view = out.view(-1, 256)
    decode = (lambda: back(view, packed)) if back else (lambda: ops.Fused8BitRowwiseQuantizedToFloat(packed))
    return [
        Kernel("FBGEMM 8-bit quantize", "fbgemm", moved, encode, ("encode", "uint8_minmax")),
        Kernel("FBGEMM 8-bit dequantize", "fbgemm", moved, decode, ("decode", "uint8_minmax")),
    ]


def measure(made: list[Kernel], reps: int, tick: Callable[[], None]) -> list[float]:
    """Return the median seconds of each kernel; they take turns."""
    calls = []
    for kernel in made:
        kernel.run()
        start = time.perf_counter()
        kernel.run()
        calls.append(max(1, int(_LEAST_S / max(time.perf_counter() - start, 1e-9))))
    seconds: list[list[float]] = [[] for _ in made]
    for repetition in range(reps):
        for place in rotation(len(made), repetition):
            start = time.perf_counter()
            for _ in range(calls[place]):
                made[place].run()
            seconds[place].append((time.perf_counter() - start) / calls[place])
        tick()
    return [float(np.median(values)) for values in seconds]


def rows_of(made: list[Kernel], medians: list[float], nbytes: int, threads: int) -> list[dict[str, Any]]:
    """Return one row per kernel of this library, its peers in it."""
    copy_s = medians[0]
    result = []
    for kernel, median_s in zip(made, medians, strict=True):
        if kernel.peer_of is not None:
            continue
        peers = {
            other.name: other_s
            for other, other_s in zip(made, medians, strict=True)
            if other.peer_of == (kernel.name, kernel.codec)
        }
        limit_s = copy_s * kernel.bytes_moved / (2 * nbytes)
        row = {"kernel": kernel.name, "codec": kernel.codec, "device": "cpu", "isa": native.isa(), "threads": threads}
        row |= {"dtype": "float32", "numel": nbytes // 4, "bytes_moved": kernel.bytes_moved, "median_s": median_s}
        row |= {
            "memcpy_median_s": copy_s,
            "to_memcpy": median_s / copy_s,
            "gb_per_s": kernel.bytes_moved / median_s / 1e9,
        }
        result.append({**row, "limit_s": limit_s, "fraction_of_limit": limit_s / median_s, "peers_s": peers})
    return result


def crossovers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return, per codec, the Gbit/s below which it pays: at the largest size and most threads that were measured."""
    most = max((row["numel"], row["threads"]) for row in rows)
    at = {(row["kernel"], row["codec"]): row for row in rows if (row["numel"], row["threads"]) == most}
    found = {}
    for name, codec in {row["codec"]: codecs.by_name[row["codec"]] for row in rows if row["codec"] != "-"}.items():
        size = (codec(2.5) if codec is codecs.Threshold else codec()).payload_bytes(most[0])
        spent_s = at["encode", name]["median_s"] + at["decode", name]["median_s"]
        found[name] = (4 * most[0] - size) * 8 / spent_s / 1e9
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"codec kernels, {rows[0]['isa']}", title_justify="left")
    for column in ("codec", "kernel", "MiB", "threads", "ms", "GB/s", "to memcpy", "of limit", "peers, ms"):
        shown.add_column(
            column, justify="left" if column in ("codec", "kernel", "peers, ms") else "right", no_wrap=True
        )
    for row in rows:
        peers = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in row["peers_s"].items())
        mib, ms = f"{row['numel'] * 4 / 2**20:g}", f"{row['median_s'] * 1e3:.3g}"
        ratios = f"{row['to_memcpy']:.2f}", f"{row['fraction_of_limit']:.2f}"
        shown.add_row(
            row["codec"], row["kernel"], mib, str(row["threads"]), ms, f"{row['gb_per_s']:.1f}", *ratios, peers
        )
    return shown


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the fraction of the limit by size, one panel per kernel, for the fewest threads."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    threads = min(row["threads"] for row in rows)
    names = [name for name in dict.fromkeys(row["kernel"] for row in rows) if name != "memcpy"]
    figure, axes = plt.subplots(2, (len(names) + 1) // 2, figsize=(15, 8), sharex=True, sharey=True, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for codec in dict.fromkeys(row["codec"] for row in rows):
            line = [row for row in rows if (row["kernel"], row["codec"], row["threads"]) == (name, codec, threads)]
            if line:
                axis.plot(
                    [row["numel"] * 4 for row in line], [row["fraction_of_limit"] for row in line], "o-", label=codec
                )
        axis.set(title=name, xscale="log", ylim=(0, 1.5))
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.legend(fontsize=7)
    figure.supxlabel("bytes of the fp32 tensor")
    figure.supylabel(f"fraction of the limit at memcpy's rate, {threads} thread(s)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    harness.console.print(f"written to {path}")


def main() -> None:
    args = parse_args()
    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[dict[str, Any]] = []
    with Progress(
        *columns, console=harness.console, transient=True, disable=not harness.console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(args.sizes) * len(args.threads) * args.reps)
        for nbytes in args.sizes:
            made = kernels(nbytes // 4, args.codecs, not args.no_peers)
            for threads in args.threads:
                torch.set_num_threads(threads)
                progress.update(task, description=f"{nbytes / 2**20:g} MiB, {threads} threads")
                medians = measure(made, args.reps, lambda: progress.advance(task))
                rows += rows_of(made, medians, nbytes, threads)
    harness.print_table(table(rows))
    found = crossovers(rows)
    print("pays for itself below, Gbit/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in found.items()))
    if args.json:
        harness.write_json(args.json, {"header": harness.header(), "crossover_gbit_s": found, "rows": rows})
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
