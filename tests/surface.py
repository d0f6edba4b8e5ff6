"""The public surface: every name that a user may write, with the arguments that it takes.

Public names are those in `__all__` of the packages, in the API reference, in imports of the pages, examples and
plugins, the commands (`commlib compare`), whose options count as arguments, and the names of algorithms and codecs
(`algorithm bytegrad`). `golden/surface.json` records them; `python -m tests.surface --write` renews it. A name that
moved stays importable from its old place, and recorded until its line is deleted.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typer.main import get_group

from commlib import algorithms, codecs
from commlib.algorithms import Algorithm
from commlib.cli import app
from tests.pages import PAGES, ROOT, blocks

GOLDEN = ROOT / "tests" / "golden" / "surface.json"

_PACKAGES = (
    "commlib",
    "commlib.algorithms",
    "commlib.checkpoint",
    "commlib.codecs",
    "commlib.emulation",
    "commlib.integrations.lightning",
    "commlib.network",
    "commlib.optim",
    "commlib.simulation",
)
_REFERENCE = re.compile(r"^::: (commlib[\w.]+)", re.MULTILINE)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def names() -> list[str]:
    """Return the dotted names of the surface, sorted."""
    found: set[str] = {*_PACKAGES, *commands(), *registered()}
    for package in _PACKAGES:
        found.update(f"{package}.{name}" for name in importlib.import_module(package).__all__)
    for page in (ROOT / "docs" / "reference" / "api").glob("*.md"):
        found.update(_REFERENCE.findall(page.read_text(encoding="utf-8")))
    for code in _code():
        found.update(_imported(code))
    for module in [name for name in found if name not in _PACKAGES and inspect.ismodule(resolve(name))]:
        members = vars(resolve(module)).items()
        found.update(f"{module}.{n}" for n, v in members if n[0] != "_" and getattr(v, "__module__", None) == module)
    return sorted(found)


def _code() -> Iterator[str]:
    """Yield the Python code that users are shown."""
    for page in PAGES:
        yield from (block.text for block in blocks(page) if block.language == "python")
    for folder in ("examples", "tests/plugins"):
        yield from (path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py")))


def _imported(code: str) -> Iterator[str]:
    """Yield the imports from commlib, by dotted name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "commlib":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def commands() -> dict[str, Callable[[], None]]:
    """Return a function per command, by `commlib <command>`, whose keyword arguments are the command's options."""
    return {f"commlib {name}": as_function(command) for name, command in get_group(app).commands.items()}


def registered() -> dict[str, type]:
    """Return the classes of commlib's own algorithms and codecs, by `algorithm <name>` and `codec <name>`."""
    classes = {f"algorithm {name}": algorithms.get(name) for name in algorithms.list()}
    classes |= {f"codec {name}": codec for name, codec in codecs.by_name.items()}
    return {name: found for name, found in classes.items() if found.__module__.startswith("commlib.")}


def as_function(command: Any) -> Callable[[], None]:
    """Return a function with the arguments of a command of click."""

    def function() -> None: ...

    found = []
    for param in command.params:
        is_option = param.param_type_name == "option"
        kind = inspect.Parameter.KEYWORD_ONLY if is_option else inspect.Parameter.POSITIONAL_ONLY
        for name in (*param.opts, *param.secondary_opts):
            default = inspect.Parameter.empty if param.required else None
            found.append(inspect.Parameter(name.lstrip("-").replace("-", "_"), kind, default=default))
    vars(function)["__signature__"] = inspect.Signature(sorted(found, key=lambda parameter: parameter.kind))
    return function


def resolve(name: str) -> Any:
    """Return the object of a dotted name, or of a name of `commands` or `registered`.

    Raises:
        AttributeError: There is none.
        ImportError: A module cannot be imported.
    """
    if " " in name:
        found = {**commands(), **registered()}
        if name not in found:
            raise AttributeError("there is none")
        return found[name]
    parts, found = name.split("."), None
    for num_modules in range(1, len(parts) + 1):  # `commlib.wrap` is a function, and a module that has others
        module = ".".join(parts[:num_modules])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            break
        with contextlib.suppress(AttributeError):
            return functools.reduce(getattr, parts[num_modules:], found)
    raise AttributeError(f"nothing has this name in {found.__name__ if found else 'any module'}")


def describe(value: Any) -> dict[str, Any]:
    """Return the uses of a public object: its arguments, and for a class its public attributes.

    Of the algorithms, only the base class of all has its attributes here.
    """
    if inspect.ismodule(value) or not callable(value):
        return {"kind": "module" if inspect.ismodule(value) else type(value).__name__}
    found: dict[str, Any] = {"kind": "class" if inspect.isclass(value) else "function", "arguments": arguments(value)}
    if inspect.isclass(value) and (not issubclass(value, Algorithm) or value is Algorithm):
        own = [cls for cls in value.__mro__ if cls.__module__.partition(".")[0] == "commlib"]
        members = sorted({name for cls in own for name in vars(cls) if not name.startswith("_")})
        found["attributes"] = {name: arguments(getattr(value, name)) for name in members}
    return found


def arguments(value: Any) -> dict[str, list[str]] | None:
    """Return the names of the arguments of a callable; None for anything else."""
    if not callable(value):
        return None
    try:
        signature = inspect.signature(value)
    except ValueError:  # of a built-in
        return None
    by_position = [p.name for p in signature.parameters.values() if p.kind in _BY_POSITION]
    by_name = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    required = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return {"by position": by_position, "by name": by_name, "required": required}


def missing(before: dict[str, Any], name: str) -> list[str]:
    """Return the uses of a recorded name that no longer work."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            value = resolve(name)
            now = describe(value)
    except (ImportError, AttributeError) as error:
        return [f"{name}: {error}"]
    found = _less(before.get("arguments"), value, name)
    for attribute, taken in before.get("attributes", {}).items():
        if not hasattr(value, attribute):
            found.append(f"{name}.{attribute} is gone")
        else:
            found += _less(taken, getattr(value, attribute), f"{name}.{attribute}")
    if before["kind"] != now["kind"]:
        found.append(f"{name}: {before['kind']} became {now['kind']}")
    return found


def _less(before: dict[str, list[str]] | None, value: Any, name: str) -> list[str]:
    """Return which calls that were possible are no longer."""
    if before is None:
        return []
    now = arguments(value)
    if now is None:
        return [f"{name} cannot be called any more"]
    kinds = {p.kind for p in inspect.signature(value).parameters.values()}
    taken = {*now["by position"], *now["by name"]}
    lost = [each for each in (*before["by position"], *before["by name"]) if each not in taken]
    found = []
    if lost and inspect.Parameter.VAR_KEYWORD not in kinds:
        found.append(f"{name} does not take {lost}")
    if (
        now["by position"][: len(before["by position"])] != before["by position"]
        and inspect.Parameter.VAR_POSITIONAL not in kinds
    ):
        found.append(f"{name} takes {now['by position']} by position, before {before['by position']}")
    known = {*before["by position"], *before["by name"]}
    required = [each for each in now["required"] if each not in before["required"] or each not in known]
    if required:
        found.append(f"{name} needs {required}")
    return found


def main() -> None:
    """Print the surface, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.relative_to(ROOT)}")
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    warnings.simplefilter("ignore", DeprecationWarning)  # of names that moved
    found = {name: describe(resolve(name)) for name in sorted({*recorded, *names()})}
    text = "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items()) + "\n}\n"
    if parser.parse_args().write:
        Path(GOLDEN).write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
