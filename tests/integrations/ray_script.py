"""Run the Ray examples one after the other in one small local cluster; started by `test_ray.py`.

python -m tests.integrations.ray_script FOLDER      leaves FOLDER/<run>.losses and FOLDER/<run>/digits/checkpoint_*
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch

#: Name, example, algorithm and epochs of each run; one with the name of an earlier run goes on from its checkpoint.
RUNS = (
    ("ddp", "ray_digits_ddp", "allreduce", 2),
    ("allreduce", "ray_digits", "allreduce", 2),
    ("whole", "ray_digits", "topk", 2),
    ("resumed", "ray_digits", "topk", 1),
    ("resumed", "ray_digits", "topk", 2),
)


class Deterministic:
    """An example's training function, with buckets of which no clock decides."""

    def __init__(self, example: str) -> None:
        self.example = example

    def __call__(self, args: Any) -> None:
        torch.use_deterministic_algorithms(True)
        importlib.import_module(self.example).train(args)


def run(folder: Path, name: str, example: str, algorithm: str, epochs: int) -> None:
    """Run an example as from the command line."""
    module = importlib.import_module(example)
    module.train = Deterministic(example)
    options = ["--storage", str(folder / name), "--losses", str(folder / f"{name}.losses")]
    sys.argv = [example, "--algorithm", algorithm, "--epochs", str(epochs), *options]
    module.main()


def main() -> None:
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as own:  # Ray's sockets need a short path
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=own)
        try:
            for each in RUNS:
                run(folder, *each)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    importlib.import_module("tests.integrations.ray_script").main()
