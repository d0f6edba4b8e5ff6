"""Every error of the library that advises something has a test that does so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import commlib
from tests.multi.advice import FOLLOWED

PACKAGE = Path(commlib.__file__).parent
TESTS = Path(__file__).parents[1]

#: First words of a sentence or clause that gives advice.
_VERBS = (
    "call choose freeze give leave load make materialise move name pass rename resume run slice train turn unwrap use "
    "wrap"
)
_ADVICE = re.compile(
    rf"(?:^|[.;:,] (?:or |and )?)({'|'.join(_VERBS.split())}|{'|'.join(_VERBS.title().split())}|Do not)\b"
)
_SPEAKERS = ("ConfigError", "CommlibError", "_log.warning", "_log.error")
#: Errors that users of `wrap` can get. Those of trainers, kernels and the simulator have their own tests.
_ROOMS = ("algorithms", "checkpoint", "engine", "sharding", "transport")
_FILES = (
    "ddp_arguments.py",
    "join.py",
    "parallel.py",
    "replica.py",
    "set_up.py",
    "tuner.py",
    "verify.py",
    "wrap.py",
    "shard.py",
)

_SHARDED, _CHECKPOINT = "multi/test_sharded.py::test_", "multi/test_checkpoint.py::test_"
_SINGLE, _SHARD = "unit/test_wrap_single.py::test_", "multi/test_shard.py::test_"
#: Advice that is followed in another test, by a part of the message.
ELSEWHERE = {
    "process_group=mesh['replicate'])": _SHARDED + "what_cannot_be_wrapped_is_refused",
    "runs without rounds, on whole": _SHARDED + "what_cannot_be_wrapped_is_refused",
    "on the whole model last": _SHARDED + "what_would_go_wrong_unseen_is_refused",
    "Name one algorithm": _SHARDED + "what_would_go_wrong_unseen_is_refused",
    "Use an algorithm whose rounds keep step": _SHARDED + "what_would_go_wrong_unseen_is_refused",
    "on every module that fully_shard was given": _SHARDED + "a_divide_factor_of_gradients_is_for_sums_over_all_ranks",
    "Do not set the factor": _SHARDED + "a_divide_factor_of_gradients_is_for_sums_over_all_ranks",
    "two of them save": "unit/test_declarations.py::test_states_with_the_same_key_are_refused",
    "Call torch.distributed.fsdp.fully_shard": _SHARD + "what_cannot_be_sharded_is_refused_on_all_ranks",
    "Do not call set_allocate_memory": _SHARD + "what_cannot_be_sharded_is_refused_on_all_ranks",
    "Call it after the last fully_shard": _SHARD + "what_cannot_be_sharded_is_refused_on_all_ranks",
    "feedback=True needs them": _SHARD + "feedback_follows_parameters_that_have_a_gradient",
    "gradient. Call model.set_reduce_scatter": _SHARD + "what_cannot_be_sharded_is_refused_on_all_ranks",
    "are then reduced in full precision": _SHARD
    + "parameters_without_a_gradient_are_reduced_in_full_precision_and_logged",
    "Make one step before it is saved": _CHECKPOINT + "optimizers_whose_state_no_stand_in_can_make_say_so",
    "outside of dist_autograd.context()": "multi/test_differences.py::test_distributed_autograd_is_refused",
    "Call torch.distributed.init_process_group": _SINGLE + "without_a_process_group_the_error_says_what_to_call",
}
#: Advice that nothing here can follow, with the reason.
NOT_HERE = {
    "devices, expected one": "it takes a second device",
    "the process group has no backend for": "it takes a CUDA device",
}


def test_every_advice_is_followed_in_a_test() -> None:
    known = {**FOLLOWED, **ELSEWHERE, **NOT_HERE}
    missing, met = [], set()
    for where, message in messages():
        found = [words for words in known if words in message]
        met.update(found)
        if not found and _ADVICE.search(message):
            missing.append(f"{where}: {message}")
    assert not missing, "\n".join(missing)
    assert not set(known) - met, f"no message has these words: {sorted(set(known) - met)}"


def messages() -> Iterator[tuple[str, str]]:
    """Every message of a `ConfigError`, a `CommlibError` or a warning, expressions in it as "…"."""
    files = [PACKAGE / name for name in _FILES]
    for room in _ROOMS:
        files += sorted((PACKAGE / room).rglob("*.py"))
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in _SPEAKERS:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", _text(node.args[0])


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else _text(v) for v in node.values)
    return "…"


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_what_follows_an_advice_elsewhere_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8")
