"""Training runs of `transformers.Trainer` and of commlib's, for the tests. Everything here runs on the ranks.

transformers is imported when the first run is made, so that collecting the tests does not pay for it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

#: Arguments of the trainer itself; all others belong to `TrainingArguments`.
_OF_TRAINER = (
    *("train_dataset", "eval_dataset", "data_collator", "processing_class", "model_init", "callbacks"),
    *("compute_loss_func", "compute_metrics", "optimizers", "optimizer_cls_and_kwargs", "wrap_options"),
)

#: Entries in a log of training that depend on the clock, or on commlib only.
_CLOCKS = ("train_runtime", "_per_second", "_preparation_time", "comm/", "eval_runtime", "test_runtime")


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Give this rank the environment that torchrun makes, and reset accelerate, which caches its environment."""
    from accelerate.state import AcceleratorState, GradientState

    own = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "OMP_NUM_THREADS": "1"}
    own |= {"WORLD_SIZE": str(dist.get_world_size()), "LOCAL_WORLD_SIZE": str(dist.get_world_size())}
    # transformers gives DDP the option `broadcast_buffers`, whose name torch is about to change.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    # peft asks a model for an attribute by its old name.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    with mock.patch.dict(os.environ, own):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


class Callback:
    """As `transformers.TrainerCallback`, which a test's module does not import: undefined events do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)


def tiny_model(**changes: Any) -> Any:
    """Make a GPT-2 of two layers over bytes, the same on all ranks; its head is tied to its embedding."""
    import transformers

    own = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    own |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**own, **changes}))


def examples(count: int = 48, length: int = 12, seed: int = 5) -> list[dict[str, Any]]:
    """Make windows of a repeating text, with a random number of ignored labels in each."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 64, (97,), generator=generator).repeat(4)
    found = []
    for _ in range(count):
        start, hidden = (int(torch.randint(0, high, (), generator=generator)) for high in (300, length - 2))
        window = text[start : start + length]
        found.append({"input_ids": window, "labels": torch.cat([torch.full((hidden,), -100), window[hidden:]])})
    return found


def uneven_examples(count: int = 48) -> list[dict[str, Any]]:
    """Make windows of different lengths, with a column that no model uses."""
    lengths = [5 + 3 * (idx % 4) for idx in range(count)]
    windows = [examples(1, length, seed=idx)[0] for idx, length in enumerate(lengths)]
    return [{**window, "source": "made up"} for window in windows]


def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate windows of different lengths."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([each["input_ids"] for each in batch], batch_first=True)
    labels = pad([each["labels"] for each in batch], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def arguments(folder: Path, **changes: Any) -> Any:
    """Make training arguments: six steps of two windows per rank, every loss logged, nothing saved."""
    import transformers

    own = {"max_steps": 6, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "logging_steps": 1}
    own |= {"learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    changes = copy.deepcopy(changes)  # transformers writes to some of them
    return transformers.TrainingArguments(output_dir=str(folder), **{**own, **changes})


@dataclass
class Run:
    """The results of a training run on this rank."""

    trainer: Any
    logs: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def make(folder: Path, algorithm: Any = None, *, base: Any = None, model: Any = None, **changes: Any) -> Any:
    """Make a trainer: commlib's with an algorithm, else transformers' own, which uses DDP.

    Args:
        folder: Where it saves.
        algorithm: As in `commlib.wrap`; None takes DDP.
        base: The class, if not the default.
        model: The model to train.
        changes: Arguments of the trainer, and all others of `TrainingArguments`.
    """
    import transformers

    from commlib.integrations.transformers import Trainer

    own = {"train_dataset": examples(), "eval_dataset": examples(8, seed=9)}
    own |= {name: changes.pop(name) for name in _OF_TRAINER if name in changes}
    own |= {name: value() for name, value in own.items() if name == "train_dataset" and callable(value)}
    own |= {} if algorithm is None else {"algorithm": algorithm}
    own |= {} if "model_init" in own else {"model": tiny_model() if model is None else model}
    base = base or (transformers.Trainer if algorithm is None else Trainer)
    transformers.logging.set_verbosity_error()
    trainer = base(args=arguments(folder, **changes), **own)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(folder: Path, algorithm: Any = None, *, resume: Any = None, **changes: Any) -> Run:
    """Make a trainer and train; see `make`."""
    trainer = make(folder, algorithm, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return result_of(trainer)


def result_of(trainer: Any) -> Run:
    """Return the results of a trainer, without entries that depend on the clock."""
    logs = [{k: v for k, v in log.items() if not any(w in k for w in _CLOCKS)} for log in trainer.state.log_history]
    return Run(trainer, logs, {name: value.detach().clone() for name, value in trainer.model.state_dict().items()})


def assert_same_run(got: Run, expected: Run) -> None:
    """Compare two runs bit for bit: all that was logged, and the weights."""
    assert got.logs == expected.logs
    assert_same_weights(got.weights, expected.weights)


def assert_same_weights(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare weights bit for bit."""
    assert got.keys() == expected.keys()
    different = [name for name in got if not torch.equal(got[name], expected[name])]
    assert not different, f"differ: {different}"


def assert_alike(model: Any) -> None:
    """Check that a model has the same weights on all ranks. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(model.state_dict()))
    for weights in everyone:
        assert_same_weights(weights, everyone[0])
