"""What pyright and mypy know of a wrapped model: users_script.py, checked as a user's own file would be."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import commlib
from tests.multi.common import Mlp, seeded
from tests.multi.pool import on_ranks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)  # the checkers read all of torch
SCRIPT = Path(__file__).with_name("users_script.py")
LINES = SCRIPT.read_text().splitlines()
PUBLIC = [f"commlib.{name}" for name in commlib.__all__] + [
    f"commlib.checkpoint.{name}" for name in commlib.checkpoint.__all__
]
WRONG = [number for number, line in enumerate(LINES, start=1) if line.endswith("# wrong")]


def run_checker(folder: Path, command: list[str]) -> str:
    """Check the script in a folder of its own, where nothing of the repository's configuration is found."""
    shutil.copy(SCRIPT, folder / "script.py")
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr  # errors were found, and nothing else went wrong
    return done.stdout


def lines_with_errors_by_mypy(folder: Path) -> list[int]:
    settings = f"[mypy]\nstrict = True\nmypy_path = {ROOT}\n[mypy-commlib.*]\nfollow_imports = silent\n"
    (folder / "mypy.ini").write_text(settings)
    printed = run_checker(folder, ["mypy", "--config-file", "mypy.ini", "script.py"])
    return [int(number) for number in re.findall(r"^script\.py:(\d+): error:", printed, re.MULTILINE)]


def lines_with_errors_by_pyright(folder: Path) -> list[int]:
    settings = {"include": ["script.py"], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    printed = run_checker(folder, ["pyright", "--outputjson", "--pythonpath", sys.executable])
    found = json.loads(printed)["generalDiagnostics"]
    # Strict: an unknown type is also an error. Further errors in the wrong lines do not matter.
    return sorted({each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"})


@pytest.mark.slow
@pytest.mark.parametrize("lines_with_errors", [lines_with_errors_by_mypy, lines_with_errors_by_pyright])
def test_a_checker_finds_what_is_wrong_and_nothing_else(
    lines_with_errors: Callable[[Path], list[int]], tmp_path: Path
) -> None:
    assert len(WRONG) > 10
    assert lines_with_errors(tmp_path) == WRONG


def test_the_script_uses_every_public_name() -> None:
    right = "\n".join(line for line in LINES if not line.endswith("# wrong"))
    assert [name for name in PUBLIC if not re.search(rf"\b{re.escape(name)}\b", right)] == []


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An environment that has commlib installed, which is what pyright asks for; returns its folder of commands."""
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "commlib").symlink_to(ROOT / "commlib")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tmp_path / "env" / "bin"


@pytest.mark.slow
def test_the_types_of_all_public_functions_are_complete(installed: Path, tmp_path: Path) -> None:
    """A part that is not known is an error; that a `WrappedModel` derives from `Any` is meant."""
    env = {**os.environ, "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "pyright", "--verifytypes", "commlib", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    symbols = {each["name"]: each for each in json.loads(done.stdout)["typeCompleteness"]["symbols"]}
    functions = [name for name in PUBLIC if symbols.get(name, {}).get("category") == "function"]
    assert {"commlib.wrap", "commlib.stats", "commlib.checkpoint.rank_state"} <= set(functions)
    unknown = {name: [each["message"] for each in symbols[name]["diagnostics"]] for name in functions}
    assert {name: found for name, found in unknown.items() if any("WrappedModel[" not in each for each in found)} == {}


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(commlib.__file__).with_name("py.typed").is_file()


@on_ranks(1)
def test_the_type_tells_a_wrapped_model_from_another() -> None:
    model = seeded(Mlp)
    assert not isinstance(model, commlib.WrappedModel)
    commlib.wrap(model)
    assert isinstance(model, commlib.WrappedModel)
    assert not isinstance(model.module, commlib.WrappedModel)
    assert not isinstance(3, commlib.WrappedModel)
    commlib.unwrap(model)
    assert not isinstance(model, commlib.WrappedModel)
    assert commlib.WrappedModel[nn.Linear].__args__ == (nn.Linear,)  # an annotation that is evaluated
