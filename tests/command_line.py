"""Checks commands in documents: their programs exist and accept the options."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.abc
import importlib.util
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
#: Programs of others, whose options are not checked here.
_OTHERS = {"apt-get", "cat", "cd", "cibuildwheel", "export", "git", "ls", "mkdir", "pip", "pre-commit", "ssh", "watch"}
_OURS = {"commlib", "python", "torchrun"}


class _Parsed(BaseException):
    """Arguments were understood."""


def is_known(line: str) -> bool:
    """Return whether a line begins like a command, though nothing says that it is one."""
    words = _words(line)
    return bool(words) and (words[0] in _OURS or words[0].startswith(("scripts/", ".ci/")))


def problems(lines: Iterable[str]) -> dict[str, str]:
    """Return the problem of each command line, by the line; "" if there is no problem."""
    found: dict[str, str] = {}
    scripts: dict[str, tuple[str, list[str]]] = {}
    for line in lines:
        try:
            found[line] = ""
            for script in _check(_words(line)):
                scripts[line] = script
        except ValueError as error:
            found[line] = str(error)
    return found | dict(zip(scripts, _parse_all(list(scripts.values())), strict=True))


def _words(line: str) -> list[str]:
    """Return a command's words, up to a pipe or another command, without what only says how it is started."""
    try:
        words = shlex.split(re.sub(r"\$\(which (\w+)\)", r"\1", line), comments=True)
    except ValueError:  # a sentence with an apostrophe
        return []
    end = next((idx for idx, word in enumerate(words) if word in ("|", "&&", ";", ">", "&")), len(words))
    words = words[:end]
    while words and (words[0] == "sudo" or re.fullmatch(r"\w+=\S*", words[0])):
        words = words[1:]
    if words:
        words[0] = re.sub(r"^(.*/)?(python|torchrun|commlib|pip)[\d.]*$", r"\2", words[0])
    return words


def _check(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Check a command; yield a script that it starts, and the script's arguments.

    Raises:
        ValueError: The command is wrong; the message says why.
    """
    if not words:
        return
    program, *arguments = words
    if program == "commlib":
        _check_commlib(arguments)
    elif program == "torchrun":
        yield from _launched(arguments)
    elif program == "python" and arguments[:1] == ["-m"]:
        yield from _check_module(arguments[1], arguments[2:])
    elif program == "python" and arguments[:1] != ["-c"]:
        yield _script(arguments[0]), arguments[1:]
    elif "/" in program:
        if not (ROOT / program).is_file():
            raise ValueError(f"there is no {program}")
    elif program not in _OTHERS | {"python"}:
        raise ValueError(f"{program} is not known; see tests/command_line.py")


def _check_module(name: str, arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    if name == "torch.distributed.run":
        yield from _launched(arguments)
    elif name == "pytest":
        for argument in arguments:
            if argument.startswith("tests/") and not (ROOT / argument.split("::")[0]).exists():
                raise ValueError(f"there is no {argument}")
    elif name == "commlib":
        _check_commlib(arguments)
    elif importlib.util.find_spec(name.split(".")[0]) is None or importlib.util.find_spec(name) is None:
        raise ValueError(f"there is no module {name}")


def _script(name: str) -> str:
    for folder in (ROOT, ROOT / "benchmarks", ROOT / "examples"):
        if (folder / name).is_file():
            return str(folder / name)
    raise ValueError(f"there is no {name}")


def _launched(arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Check the module that torchrun starts, or yield the script, and its arguments."""
    from torch.distributed.run import get_args_parser

    parsed = _understood(functools.partial(get_args_parser().parse_args, arguments))
    if parsed.module:
        yield from _check_module(parsed.training_script, parsed.training_script_args)
    else:
        yield _script(parsed.training_script), parsed.training_script_args


def _understood(parse: functools.partial[argparse.Namespace]) -> argparse.Namespace:
    """Parse with argparse, whose complaint becomes a ValueError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse()
    except SystemExit as end:
        raise ValueError(said.getvalue().strip().splitlines()[-1]) from end


def _check_commlib(arguments: list[str]) -> None:
    """Parse a command of commlib, and look up the names that it is given."""
    from typer.main import get_group

    from commlib.cli import app
    from commlib.network import presets, workloads
    from commlib.simulation.compare import candidates

    group = get_group(app)
    if not arguments or arguments[0] in ("--help", "--version"):
        return
    if arguments[0] not in group.commands:
        raise ValueError(f"commlib has no command {arguments[0]}")
    try:
        values = group.commands[arguments[0]].make_context(arguments[0], arguments[1:]).params
        if arguments[0] == "compare":
            candidates(values["algorithms"], values["exactness"])
            for name in filter(None, (values["network"] or "").split(",")):
                presets.network(name)
            if not values["workload"].endswith(".json"):
                workloads.get(values["workload"])
    except Exception as error:  # the parser's own classes are private to typer
        raise ValueError(getattr(error, "message", None) or str(error)) from error


def _parse_all(scripts: list[tuple[str, list[str]]]) -> list[str]:
    """Return, for each script with its arguments, its parser's complaint; in one process of its own."""
    if not scripts:
        return []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.command_line"],
        input=json.dumps(scripts), cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def _parse(script: str, arguments: list[str]) -> str:
    """Run a script as far as it has parsed its arguments; return the message of its parser."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        _understood(functools.partial(runpy.run_path, script, run_name="__main__"))  # pyright: ignore
    except _Parsed:
        return ""
    except ValueError as error:
        return str(error)
    return "it ended without parsing its arguments" if arguments else ""


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for libraries that scripts import before they parse, and that take seconds to import."""

    names = frozenset({"accelerate", "lightning", "ray", "sklearn", "transformers"})

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_ours = name.startswith("commlib.integrations.")
        return ModuleSpec(name, self, is_package=True) if is_ours or name.split(".")[0] in self.names else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _any_class  # type: ignore[method-assign]


def _any_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


if __name__ == "__main__":
    sys.meta_path.insert(0, _Stubs())
    parse_args = argparse.ArgumentParser.parse_args

    def stop_after(*args: object, **kwargs: object) -> None:
        """Parse, and go no further."""
        parse_args(*args, **kwargs)  # type: ignore[arg-type]
        raise _Parsed

    argparse.ArgumentParser.parse_args = stop_after  # type: ignore[assignment,method-assign]
    print(json.dumps([_parse(script, arguments) for script, arguments in json.load(sys.stdin)]))
