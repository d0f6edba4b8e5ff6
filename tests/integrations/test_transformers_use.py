"""Use of commlib's `transformers.Trainer`: its classes, its logs, and refused arguments."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.errors import ConfigError
from commlib.replica import Replica, find
from tests.integrations.transformers_runs import (
    arguments,
    assert_same_run,
    assert_same_weights,
    examples,
    launched,
    make,
    tiny_model,
    train,
)
from tests.multi.common import raises_on_every_rank
from tests.multi.pool import on_ranks


@on_ranks(2)
def test_what_a_trainer_cannot_take_is_refused(tmp_path: Path) -> None:
    with launched():
        with raises_on_every_rank(ConfigError, "topkk", "topk"):
            make(tmp_path, "topkk")
        with raises_on_every_rank(ConfigError, "bucket_cap"):
            make(tmp_path, "topk", wrap_options={"bucket_cap": 3})
        with raises_on_every_rank(ConfigError, "optimizer="):
            make(tmp_path, "topk", wrap_options={"optimizer": None})
        with raises_on_every_rank(ConfigError, "wrap_options", "algorithm"):
            make(tmp_path, "topk", wrap_options={"algorithm": "dgc"})
        with raises_on_every_rank(ConfigError, "wrapped by commlib already", "commlib.unwrap"):
            make(tmp_path, "topk", model=commlib.wrap(tiny_model()))
        with raises_on_every_rank(ConfigError, "fsdp", "replaces DDP"):
            make(tmp_path, "topk", fsdp=True, fsdp_config={})


@on_ranks(2)
def test_deepspeed_is_refused(tmp_path: Path) -> None:
    from commlib.integrations.transformers import Trainer

    with launched():
        args = arguments(tmp_path)
        args.deepspeed = {"zero_optimization": {"stage": 2}}  # where it is installed; here it is not
        with raises_on_every_rank(ConfigError, "deepspeed", "replaces DDP"):
            Trainer(tiny_model(), args)


@on_ranks(2)
def test_transformers_own_trainer_refuses_a_wrapped_model(tmp_path: Path) -> None:
    with launched():
        with raises_on_every_rank(ConfigError, "commlib has wrapped", "commlib.integrations.transformers"):
            train(tmp_path, model=commlib.wrap(tiny_model()))
        model = train(tmp_path, "topk").trainer.model
        with raises_on_every_rank(ConfigError, "commlib.unwrap"):
            train(tmp_path, model=model)


@on_ranks(2)
def test_the_mixin_in_a_wrong_place_is_refused(tmp_path: Path) -> None:
    import transformers

    from commlib.integrations.transformers import TrainerMixin

    with raises_on_every_rank(ConfigError, "class Wrong(TrainerMixin, ...)"):
        type("Wrong", (transformers.Seq2SeqTrainer, TrainerMixin), {})
    with raises_on_every_rank(ConfigError, "class Alone(TrainerMixin, transformers.Trainer)"):
        type("Alone", (TrainerMixin,), {})()


@on_ranks(1)
def test_a_release_without_a_method_that_is_overridden_is_refused(tmp_path: Path) -> None:
    import transformers

    from commlib.integrations.transformers import Trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Trainer, "_save_checkpoint", lambda self, trial: None)
        with pytest.raises(ConfigError, match=r"has no Trainer._save_checkpoint\(self, model, trial\).*pip install"):
            Trainer(tiny_model(), arguments(tmp_path))


@on_ranks(1)
def test_one_process_trains_as_without_commlib(tmp_path: Path) -> None:
    dist.destroy_process_group()
    expected = train(tmp_path / "plain", save_strategy="steps", save_steps=3)
    got = train(tmp_path / "commlib", "topk", save_strategy="steps", save_steps=3)
    assert find(got.trainer.model) is None
    figures = commlib.stats(got.trainer.model)
    assert (figures.algorithm, figures.world_size, figures.rounds) == ("topk", 1, 0)
    with pytest.raises(commlib.ConfigError, match="not wrapped"):
        commlib.stats(expected.trainer.model)
    assert_same_run(got, expected)
    again = train(tmp_path / "commlib", "topk", resume=str(tmp_path / "commlib/checkpoint-3"))
    assert_same_weights(again.weights, expected.weights)


@on_ranks(2)
def test_columns_and_labels_are_those_of_the_bare_model(tmp_path: Path) -> None:
    from transformers.utils import can_return_loss, find_labels

    with launched():
        trainers = [make(tmp_path, algorithm, bf16=True) for algorithm in (None, "topk")]
        for trainer in trainers:
            trainer.train()
            trainer._signature_columns = None
            trainer._set_signature_columns_if_needed()
        bare, wrapped = (type(trainer.model) for trainer in trainers)
        assert bare is not wrapped
        assert set(trainers[0]._signature_columns) == set(trainers[1]._signature_columns)
        assert find_labels(wrapped) == find_labels(bare) == ["labels"]
        assert can_return_loss(wrapped) == can_return_loss(bare)


@on_ranks(2)
def test_a_loss_of_the_users_class_is_ddps(tmp_path: Path) -> None:
    import transformers

    from commlib.integrations.transformers import TrainerMixin

    class Users(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = outputs.logits.square().mean() + outputs.logits[:, 0].mean()
            return (loss, outputs) if return_outputs else loss

    class Relaxed(TrainerMixin, Users):
        pass

    with launched():
        options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
        expected = train(tmp_path / "ddp", base=Users, **options)
        got = train(tmp_path / "commlib", base=Relaxed, **options)  # without an algorithm: allreduce
        assert commlib.stats(got.trainer.model).algorithm == "allreduce"
        assert_same_run(got, expected)


@on_ranks(2)
def test_a_loss_of_the_trainers_model_is_synchronised_too(tmp_path: Path) -> None:
    from commlib.integrations.transformers import Trainer

    class Users(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            return super().compute_loss(self.model, inputs, return_outputs, **options)  # under DDP: the bare one

    with launched():
        got = train(tmp_path, "allreduce", base=Users)
        expected = train(tmp_path, "allreduce")
        assert_same_run(got, expected)


@on_ranks(2)
def test_logs_have_the_numbers_of_the_communication(tmp_path: Path) -> None:
    from commlib.integrations.transformers import StatsCallback

    with launched():
        options = {"eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2}
        trainer = train(tmp_path, "topk", **options, report_to="tensorboard").trainer
        logs = trainer.state.log_history
        for log in logs:
            assert ("comm/wire_bytes" in log) == ("loss" in log), log
        assert all(isinstance(value, int | float) for log in logs for value in log.values())
        of_step = {log["step"]: log["comm/wire_bytes"] for log in logs if "loss" in log}
        assert of_step[6] == commlib.stats(trainer.model).wire_bytes > of_step[4] > 0
        if dist.get_rank() == 0:
            assert scalars(tmp_path, "train/comm/wire_bytes") == of_step
        named = make(tmp_path, "topk", callbacks=[StatsCallback("net/")])
        named.train()
        assert "net/wire_bytes" in named.state.log_history[0]
        assert "comm/wire_bytes" not in named.state.log_history[0]


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Read the values of a tag, by step, from the event files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, float] = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file.parent))
        events.Reload()
        if tag in events.Tags()["scalars"]:
            found |= {event.step: event.value for event in events.Scalars(tag)}
    return found


@on_ranks(2)
def test_the_callback_alone_in_a_trainer_of_the_users(tmp_path: Path) -> None:
    import transformers

    from commlib.integrations.accelerate import use
    from commlib.integrations.transformers import StatsCallback

    class Users(transformers.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            use(self.accelerator, "dgc")

    with launched():
        trainer = train(tmp_path, base=Users, callbacks=[StatsCallback()]).trainer
        assert commlib.stats(trainer.model).algorithm == "dgc"
        assert trainer.state.log_history[0]["comm/wire_bytes"] > 0
        state, logs = transformers.TrainerState(), {"loss": 1.0}
        StatsCallback().on_log(None, state, None, logs=logs, model=tiny_model())  # not wrapped: nothing to say
        assert logs == {"loss": 1.0}


def tiny_translator() -> Any:
    """Make a T5 of one layer."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.slow
@on_ranks(2)
def test_a_sequence_trainer_generates_as_with_ddp(tmp_path: Path) -> None:
    import transformers

    from commlib.integrations.transformers import TrainerMixin

    class Relaxed(TrainerMixin, transformers.Seq2SeqTrainer):
        pass

    def run(base: Any, **options: Any) -> Any:
        args = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), predict_with_generate=True, generation_max_length=8, use_cpu=True, max_steps=4,
            report_to="none", disable_tqdm=True, eval_strategy="steps", eval_steps=2, learning_rate=1e-2,
        )  # fmt: skip
        data = [{"input_ids": e["input_ids"], "labels": e["input_ids"].flip(0)} for e in examples(16)]
        trainer = base(tiny_translator(), args, train_dataset=data, eval_dataset=data[:6], **options)
        trainer.train()
        return trainer.predict(data[:6]).predictions, dict(trainer.model.state_dict())

    with launched():
        expected, got = run(transformers.Seq2SeqTrainer), run(Relaxed, algorithm="allreduce")
        assert (got[0] == expected[0]).all()
        assert_same_weights(got[1], expected[1])


@pytest.mark.slow
@pytest.mark.timeout(600)  # inductor compiles a minute and more for each of the two ranks
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2, timeout=500)
def test_a_compiled_model_trains_as_with_ddp(backend: str, tmp_path: Path) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning, message="`torch.jit")  # inductor's own imports
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")  # dynamo's look
    options = {"torch_compile": True, "torch_compile_backend": backend, "save_strategy": "steps", "save_steps": 3}
    with launched():
        expected = train(tmp_path / "ddp", model=tiny_model(n_layer=1), **options)
        got = train(tmp_path / "commlib", "allreduce", model=tiny_model(n_layer=1), **options)
        assert isinstance(find(got.trainer.model), Replica)
        assert type(got.trainer.model_wrapped).__name__ == "OptimizedModule"
        assert_same_run(got, expected)
        resume = str(tmp_path / "commlib/checkpoint-3")
        again = train(tmp_path / "commlib", "allreduce", model=tiny_model(n_layer=1), **options, resume=resume)
        assert_same_weights(again.weights, got.weights)
