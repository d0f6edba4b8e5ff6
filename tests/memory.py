"""Formulas of memory on pages of the documentation, and the memory of all tensors of this process."""

from __future__ import annotations

import gc
import math
import re
from pathlib import Path
from typing import Any

import torch

from commlib import algorithms
from commlib.codecs.base import BlockCodec
from commlib.codecs.sparse import BlockTopK
from commlib.primitives.components import chunk_shape


def rows(page: Path, column: str) -> list[tuple[str, str]]:
    """Return each algorithm of the tables of a page that have a column, as it is written there, and its formula."""
    found, columns = [], []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = cells
        elif column in columns and not line.startswith("|---"):
            found.append((re.fullmatch(r"`(.*)`", cells[0])[1], cells[columns.index(column)]))  # type: ignore[index]
    return found


def value(formula: str, **names: float) -> float:
    """Return the bytes that a formula of the page stands for: factors side by side, as 2bn or 8(N - 1) · ratio · n."""
    text = "0" if formula == "none" else formula.replace("Σ(rows + columns)", "s").replace("Σ(columns)", "c")
    text = text.replace("·", " ")
    factors = re.findall(r"ratio|[a-zA-Z]|[\d.]+|[()+/-]", text)
    assert "".join(factors) == text.replace(" ", ""), f"{formula!r} is not a formula"
    joined = ""
    for before, factor in zip(["+", *factors], factors, strict=False):
        joined += ("" if before in "(+-/" or factor in ")+-/" else "*") + factor
    return float(eval(joined, {}, names))  # the page is ours


def make(call: str) -> Any:
    name, _, options = call.partition("(")
    return algorithms.get(name)(**eval(f"dict({options or ')'}"))


def names_of(algorithm: Any, parameters: list[torch.nn.Parameter], size: int, per_node: int = 1) -> dict[str, float]:
    """Return the values of the page's variables for a model of matrices."""
    numel = sum(p.numel() for p in parameters)
    names = {"n": numel, "N": size, "L": per_node, "s": sum(sum(p.shape) for p in parameters)}
    names["c"] = sum(p.shape[1] for p in parameters)
    names |= {"r": getattr(algorithm, "rank", 0), "ratio": getattr(algorithm, "ratio", 0)}
    if isinstance(algorithm, algorithms.DeMo):
        names["m"] = components(parameters, algorithm)
    if isinstance(codec := getattr(algorithm, "codec", None), BlockCodec | BlockTopK):
        names["b"] = codec.payload_bytes(numel) / numel
    if (topology := getattr(algorithm, "topology", None)) is not None:
        names["d"] = len(topology.neighbours(0, size, 0).sources)
    return names


def components(parameters: list[torch.nn.Parameter], algorithm: algorithms.DeMo) -> int:
    """Return how many components DeMo sends of these parameters."""
    sizes = [(p.numel(), math.prod(chunk_shape(p.shape, algorithm.chunk))) for p in parameters]
    return sum(numel // size * min(size, algorithm.kept) for numel, size in sizes)


def storages() -> dict[int, int]:
    """Return the bytes of all memory that new tensors refer to, by address."""
    gc.collect()
    found = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.device.type == "cpu"}
