"""The code in the documents: Python blocks run, and commands have the options that they are shown with."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import symtable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from tests import command_line
from tests.pages import PAGES, ROOT, Block, blocks, commands

BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def given() -> dict[str, Any]:
    """Return new values of the names that the Python in the documents assumes, for one block."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"commlib": commlib, "torch": torch, "model": model, "optimizer": optimizer}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One rank, in a folder of its own, and in the environment that torchrun makes."""
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run(page: list[Block]) -> None:
    """Run the blocks of a page in order; the names that one defines are visible to the next ones."""
    if not any("init_process_group" in block.given + block.text for block in page):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    defined: dict[str, Any] = {}
    for block in page:
        namespace = {"__name__": "__main__", **given(), **defined}
        exec(block.given, namespace)
        exec(compile("\n" * block.line + block.text, block.page, "exec"), namespace)
        symbols = symtable.symtable(f"{block.given}\n{block.text}", str(block), "exec").get_symbols()
        bound = (symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported())
        defined |= {name: namespace[name] for name in bound if name in namespace}


@pytest.mark.parametrize(
    "page", sorted({block.page for block in PYTHON}), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_python_of_a_page_runs(page: Path, alone: None) -> None:
    run([block for block in PYTHON if block.page == page and block.reason is None])


def test_a_block_that_fails_is_found_at_its_line(alone: None) -> None:
    page = ROOT / "docs" / "page.md"
    with pytest.raises(ZeroDivisionError) as caught:
        run([Block(page, 4, "python", "ratio = 1\n"), Block(page, 9, "python", "x = ratio\nx / 0\n", given="x = 2")])
    assert caught.traceback[-1].lineno == 10
    assert str(caught.traceback[-1].path) == str(page)


def test_what_is_not_run_says_why() -> None:
    silent = [str(block) for block in BLOCKS if block.reason is not None and len(block.reason.split()) < 3]
    assert silent == []


def wrong_uses(code: str) -> list[str]:
    """Return what code asks of `commlib` that is not there: names, and arguments of calls."""
    tree = ast.parse(code)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if not re.fullmatch(r"commlib(\.\w+)+", name) or name.startswith("commlib.integrations"):
            continue
        try:
            value = functools.reduce(getattr, name.split(".")[1:], commlib)
            if call := calls.get(id(node)):
                keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
                inspect.signature(value).bind_partial(*call.args, **keywords)
        except (AttributeError, TypeError) as error:
            found.append(f"{ast.unparse(node)}: {error}")
    return found


#: Indented blocks that show how something of commlib is called.
CALLS = [block for block in BLOCKS if not block.language and block.text.startswith("commlib.")]


@pytest.mark.parametrize("block", PYTHON + CALLS, ids=str)
def test_python_uses_what_commlib_has(block: Block) -> None:
    assert wrong_uses(block.text) == []


def test_a_wrong_name_and_a_wrong_argument_are_found() -> None:
    code = "commlib.synchronise(m)\ncommlib.algorithms.TopK(rate=0.1)\ncommlib.wrap(m, 'topk', timeout=3)\n"
    assert [line.split(":")[0] for line in wrong_uses(code)] == ["commlib.synchronise", "commlib.algorithms.TopK"]


WRONG = {
    "commlib compare --netwrok 10gbps": "--netwrok",
    "commlib compare --network 10gpbs": "10gpbs",
    "sudo $(which commlib) compare --algorithms 'topk(rate=1)'": "rate",
    "torchrun --nprocs 2 examples/train_bytes.py": "--nprocs",
    "torchrun --nproc_per_node 2 examples/train_byte.py": "train_byte.py",
    "torchrun --nproc_per_node 2 -m commlib doctor --pears": "--pears",
    "OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 examples/train_bytes.py --sizes tiny": "--sizes",
    "python benchmarks/step.py --sistems ddp": "--sistems",
    "python -m tests.gpu.chek": "tests.gpu.chek",
    "python -m pytest tests/unt": "tests/unt",
    "scripts/tets": "scripts/tets",
    "train --fast": "train",
}


def shown() -> list[tuple[Block, str]]:
    """Every command that the documents show: the lines of a console, and indented ones that begin with one we know."""
    found = []
    for block in BLOCKS:
        if block.reason is None and block.language in ("console", "bash", "sh"):
            found += [(block, line) for line in commands(block)]
        elif not block.language:
            found += [(block, line) for line in commands(block) if command_line.is_known(line)]
    return found


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    """The error of each command line, for those in the documents and for those that are wrong on purpose."""
    return command_line.problems([*(line for _, line in shown()), *WRONG])


def test_commands_have_the_options_that_they_are_shown_with(problems: dict[str, str]) -> None:
    assert [f"{block}: {line}: {problems[line]}" for block, line in shown() if problems[line]] == []


def test_wrong_commands_are_found(problems: dict[str, str]) -> None:
    assert [line for line, problem in WRONG.items() if problem not in problems[line]] == []
