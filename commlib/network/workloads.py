"""Workloads: models in training with published step times, and workloads stored in files.

A step time is divided between forward and backward as 1 : 2, the ratio of their arithmetic. The optimizer takes the
time of its memory traffic. Without a published time, the time is the arithmetic divided by a published rate, and the
source says so.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commlib.errors import ConfigError
from commlib.network import architectures, presets
from commlib.network.model import DTYPES, Layer, Workload

_GAN = "Gan et al., BAGUA (VLDB 2021; tutorials.baguasys.com/benchmark), 128 V100s"
_TITAN = "torchtitan, benchmarks/llama3_h100_202412: 6,514 tokens/s on each of 128 H100s"

#: Name of the file format of a workload, stored in the file.
_FORMAT = "commlib-workload-1"

#: Memory passes of an optimizer step, in parameter sizes: read p, g and state, write p and state.
_OPTIMIZER_PASSES = {"sgd": 5, "adam": 7}


def _vgg16() -> Workload:
    return _workload(
        "vgg16", architectures.vgg16(), 32, step_s=32 / (29_300 / 128), samples_per_epoch=1_281_167,
        source=f"shapes: torchvision; time: linear scaling, about 29,300 images/s, in {_GAN}",
    )  # fmt: skip


def _resnet50() -> Workload:
    return _workload(
        "resnet50", architectures.resnet50(), 128, step_s=128 / 356, samples_per_epoch=1_281_167,
        source="shapes: torchvision; time: 356 images/s in fp32 on a V100, NVIDIA DeepLearningExamples, ResNet50 v1.5",
    )  # fmt: skip


def _bert_large() -> Workload:
    return _workload(
        "bert-large", architectures.bert(1024, 24, 384), 6, step_s=_BERT_LARGE_S, optimizer="adam",
        samples_per_epoch=88_000,
        source=f"shapes: transformers; time: 61 s an epoch with asynchronous averaging, about linear scaling, {_GAN}",
    )  # fmt: skip


def _bert_base() -> Workload:
    return _by_arithmetic(
        "bert-base", architectures.bert(768, 12, 128), 32, "v100", optimizer="adam", samples_per_epoch=88_000,
        source="shapes: transformers, sequences of 128",
    )  # fmt: skip


def _transformer() -> Workload:
    return _by_arithmetic(
        "transformer", architectures.transformer(), 160, "v100", optimizer="adam", samples_per_epoch=4_500_000,
        source="shapes: Vaswani et al. (2017), the base model, 160 pairs of 32 tokens",
    )  # fmt: skip


def _lstm_alexnet() -> Workload:
    return _by_arithmetic(
        "lstm-alexnet", architectures.lstm_alexnet(), 128, "v100",
        source="shapes: torchvision's AlexNet and two LSTM layers, 126.8 million parameters in total as in Gan et al., "
        "whose data are not public",
    )  # fmt: skip


def _gpt2() -> Workload:
    return _by_arithmetic(
        "gpt2", architectures.gpt2(), 32, "h100", optimizer="adam", dtype="bf16", tokens_per_sample=1024,
        source="shapes: transformers, sequences of 1,024",
    )  # fmt: skip


def _llama3_8b() -> Workload:
    return _workload(
        "llama3-8b", architectures.llama3_8b(), 2, step_s=2 * 8192 / 6514, optimizer="adam", dtype="bf16",
        device="h100", tokens_per_sample=8192, source=f"shapes: Meta's release, sequences of 8,192; time: {_TITAN}",
    )  # fmt: skip


def _llama3_70b() -> Workload:
    return _by_arithmetic(
        "llama3-70b", architectures.llama3_70b(), 1, "h100", optimizer="adam", dtype="bf16", tokens_per_sample=8192,
        source="shapes: Meta's release, sequences of 8,192; a rank alone has no memory for it",
    )  # fmt: skip


_BERT_LARGE_S = 61 / (88_000 / (128 * 6))

_KNOWN: dict[str, Callable[[], Workload]] = {
    "vgg16": _vgg16,
    "resnet50": _resnet50,
    "bert-base": _bert_base,
    "bert-large": _bert_large,
    "transformer": _transformer,
    "lstm-alexnet": _lstm_alexnet,
    "gpt2": _gpt2,
    "llama3-8b": _llama3_8b,
    "llama3-70b": _llama3_70b,
}

#: Published number of parameters, and the tolerated relative deviation: 0 if the published figure is exact.
PUBLISHED_NUMEL: dict[str, tuple[float, float]] = {
    "vgg16": (138_357_544, 0),
    "resnet50": (25_557_032, 0),
    "bert-base": (109_482_240, 0),
    "bert-large": (335_141_888, 0),
    "transformer": (65e6, 0.03),
    "lstm-alexnet": (126.8e6, 0.001),
    "gpt2": (124_439_808, 0),
    "llama3-8b": (8_030_261_248, 0),
    "llama3-70b": (70_553_706_496, 0),
}


def names() -> list[str]:
    """Return the names of the known workloads."""
    return list(_KNOWN)


def get(name: str) -> Workload:
    """Return the workload with a known name, or load it from the JSON file at that path.

    Raises:
        ConfigError: The name is neither known nor a file. The message suggests a similar name.
    """
    if name in _KNOWN:
        return _KNOWN[name]()
    if name.endswith(".json") or Path(name).is_file():
        return load(Path(name))
    near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"workload: {name!r} is neither known nor a file. {hint}Known: {', '.join(_KNOWN)}, or a file that `commlib "
        "profile` wrote"
    )


def with_optimizer(workload: Workload, optimizer: str) -> Workload:
    """Return a workload on a preset device with another optimizer, "sgd" or "adam", and that optimizer's time."""
    optimizer_s = _optimizer_s(optimizer, workload.nbytes, workload.device)
    return dataclasses.replace(workload, optimizer=optimizer, optimizer_s=optimizer_s)


def save(workload: Workload, path: Path | str) -> None:
    """Write a workload as JSON, for `commlib compare --workload <path>`."""
    content = {"format": _FORMAT, **dataclasses.asdict(workload)}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def load(path: Path | str) -> Workload:
    """Read a workload that `save` wrote.

    Raises:
        ConfigError: The file does not exist or has another format, a field is missing or unknown, or a value is
            invalid.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"workload: cannot read {str(path)!r}: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ConfigError(f"workload: {str(path)!r} is not a {_FORMAT} file; `commlib profile` writes one")
    try:
        layers = tuple(_layer(layer) for layer in content.pop("layers"))
        return Workload(layers=layers, **content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"workload: {str(path)!r} has a field that is missing, unknown or of a wrong type: {error!r}"
        ) from error


def _layer(fields: dict[str, Any]) -> Layer:
    shapes = tuple((name, tuple(shape)) for name, shape in fields.pop("shapes"))
    return Layer(shapes=shapes, tied=tuple(fields.pop("tied", ())), **fields)


def _workload(
    name: str,
    layers: tuple[Layer, ...],
    batch: int,
    *,
    step_s: float,
    optimizer: str = "sgd",
    dtype: str = "fp32",
    device: str = "v100",
    source: str,
    **counts: int,
) -> Workload:
    """Return a workload; `counts` are its counts of samples and tokens."""
    nbytes = sum(layer.numel for layer in layers) * DTYPES[dtype].itemsize
    optimizer_s = _optimizer_s(optimizer, nbytes, device)
    compute_s = step_s - optimizer_s
    return Workload(
        name=name,
        layers=layers,
        batch_per_rank=batch,
        forward_s=compute_s / 3,
        backward_s=compute_s * 2 / 3,
        optimizer_s=optimizer_s,
        device=device,
        dtype=dtype,
        optimizer=optimizer,
        source=source,
        **counts,
    )


def _optimizer_s(optimizer: str, nbytes: int, device: str) -> float:
    return _OPTIMIZER_PASSES[optimizer] * nbytes / (presets.device(device).memory_gbytes_s * 1e9)


def _by_arithmetic(
    name: str, layers: tuple[Layer, ...], batch: int, device: str, *, source: str, **more: Any
) -> Workload:
    """Return a workload whose step time is its arithmetic at the rate of a workload with a published time."""
    measured = {"v100": _bert_large, "h100": _llama3_8b}[device]()
    step_s = _flops(layers, batch) / (_flops(measured.layers, measured.batch_per_rank) / measured.step_s)
    source = f"{source}; time: not published, computed from the arithmetic at the rate of {measured.name}"
    return _workload(name, layers, batch, step_s=step_s, device=device, source=source, **more)


def _flops(layers: tuple[Layer, ...], batch: int) -> float:
    return 3 * batch * sum(layer.weight for layer in layers)
