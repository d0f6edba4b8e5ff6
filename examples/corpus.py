"""A text corpus that every Python installation has: the sources of the standard library, as bytes."""

import pathlib
import sysconfig

import numpy as np
import torch
from torch import Tensor

# Skip folders that may be missing or user-installed, so that the corpus is identical for a Python version.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def standard_library(validation_every: int = 10) -> tuple[Tensor, Tensor]:
    """Read the corpus, split by file so that training and validation text do not overlap.

    Args:
        validation_every: Every n-th file, in sorted order, is for validation.

    Returns:
        Training and validation text, each [num_bytes] uint8 (about 11 and 1 MB).
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(root.rglob("*.py")) if not _SKIPPED & set(p.relative_to(root).parts)]
    train = [p for idx, p in enumerate(paths) if idx % validation_every]
    return _read(train), _read(paths[::validation_every])


def _read(paths: list[pathlib.Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def batch(text: Tensor, key: tuple[int, ...], size: int, context: int) -> tuple[Tensor, Tensor]:
    """Draw random windows that depend only on `key`, for example (seed, step, rank).

    Args:
        text: [num_bytes] uint8.
        key: Non-negative integers; the same key always gives the same batch.
        size: Number of windows.
        context: Length of a window in bytes.

    Returns:
        Inputs and the bytes that follow them, each [size, context] int64.
    """
    starts = np.random.default_rng(key).integers(0, len(text) - context, size)
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]
