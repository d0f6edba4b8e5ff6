"""Imports point downward only, and the public names are exactly those that `commlib/__init__.py` lists."""

import ast
import importlib
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.structure import (
    BELOW,
    PACKAGE,
    circles,
    imported_modules,
    late_attributes,
    loaded_by_import,
    module_name,
    part_of,
    sources,
    upward_imports,
)

SOURCES = sources()


def test_every_part_has_its_place():
    assert {part_of(module_name(path)) for path in SOURCES} <= set(BELOW), "give the new part its layer in BELOW"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_downward(path):
    assert upward_imports(path) == []


def test_no_modules_import_one_another_in_a_circle():
    assert circles() == []


def test_an_upward_import_and_a_circle_are_found(tmp_path):
    package = tmp_path / "commlib"
    (package / "codecs").mkdir(parents=True)
    path = package / "codecs" / "bad.py"
    path.write_text(
        "def f():\n    from commlib import engine\n    from ..wrap import wrap\n    import commlib.kernels.native\n"
        "    from commlib.codecs import worse\n"
    )
    (package / "codecs" / "worse.py").write_text("from commlib.codecs.bad import f\n")
    assert upward_imports(path, package) == ["commlib.engine", "commlib.wrap"]
    assert circles(package) == [["commlib.codecs.bad", "commlib.codecs.worse"]]


def test_the_layers_have_no_circle():
    def below(part: str) -> set[str]:
        return BELOW[part].union(*(below(lower) for lower in BELOW[part]))

    assert all(part not in below(part) for part in BELOW)


@pytest.mark.parametrize(("half", "other"), [("gradients", "weights"), ("weights", "gradients")])
def test_the_halves_of_the_engine_do_not_import_each_other(half, other):
    imported = [name for path in (PACKAGE / "engine" / half).glob("*.py") for name in imported_modules(path)]
    assert imported
    assert [name for name in imported if name.startswith(f"commlib.engine.{other}")] == []


def test_importing_loads_what_training_needs():
    """Neither the simulator, nor hosts, nor the command line."""
    rooms = {part_of(name) for name in loaded_by_import() if "." in name}
    assert not rooms & {
        "network",
        "simulation",
        "emulation",
        "reports",
        "predictions",
        "integrations",
        "cli",
        "doctor",
        "__main__",
    }
    assert "commlib.tuner" not in loaded_by_import()


def test_all_is_exact():
    """`__all__` lists every public name that the package makes, each once, and none that is not there."""
    commlib = importlib.import_module("commlib")
    listed = list(commlib.__all__)
    assert len(listed) == len(set(listed))
    assert [name for name in listed if not hasattr(commlib, name)] == []
    assert public_names(PACKAGE / "__init__.py") <= set(listed) | {"annotations"}


def public_names(path: Path) -> set[str]:
    """The names without a leading underscore that a file's top level imports or defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_importing_does_no_work():
    """Importing a part neither starts threads nor joins a process group."""
    before = threading.active_count()
    for part in ("errors", "kernels", "codecs", "transport", "primitives", "algorithms", "engine"):
        if (PACKAGE / part).exists() or (PACKAGE / f"{part}.py").exists():
            importlib.import_module(f"commlib.{part}")
    assert threading.active_count() == before
    assert not dist.is_initialized()


def test_all_attributes_are_set_at_construction():
    assert late_attributes() == []


def test_an_attribute_that_is_set_later_is_found(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text(
        "class Base:\n"
        "    declared: int\n"
        "    def __init__(self):\n        self.own, self.other = 1, 2\n        self.helper()\n"
        "    def helper(self):\n        self.helped = 1\n"
        "class Derived(Base):\n"
        "    def later(self):\n        self.own = self.helped = self.declared = self.late = 3\n"
    )
    assert late_attributes(package) == ["Derived.late"]
