"""Imports point downward only, and the public names are exactly those that `commlib/__init__.py` lists."""

import ast
import importlib
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

PACKAGE = Path(__file__).parents[2] / "commlib"

# What each part may import of the others. A part is the first name below `commlib`, unless PARTS_OF_WRAP has it.
BELOW = {
    "errors": set(),
    "_native": set(),
    "kernels": {"errors", "_native"},
    "codecs": {"errors", "kernels"},
    "transport": {"errors", "kernels"},
    "primitives": {"errors", "kernels", "codecs", "transport"},
    "algorithms": {"errors", "kernels", "codecs", "transport", "primitives", "optim"},
    "engine": {"errors", "kernels", "codecs", "transport", "primitives", "algorithms"},
    "network": {"errors", "kernels", "codecs", "transport", "primitives", "algorithms", "engine"},
    "wrap": {"errors", "kernels", "codecs", "transport", "primitives", "algorithms", "engine", "network"},
    "emulate": {"errors", "algorithms", "engine", "network", "transport", "wrap"},
    "optim": {"errors"},
    "doctor": {"errors", "kernels", "network"},
    "cli": {"errors", "kernels", "primitives", "algorithms", "network", "doctor", "wrap", "emulate"},
    "__main__": {"cli"},
}
# Files of the top layer that `wrap` is made of.
PARTS_OF_WRAP = {"join", "parallel", "replica", "tuner", "verify"}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(module: str) -> str:
    part = module.split(".")[1]
    return "wrap" if part in PARTS_OF_WRAP else part


def module_name(path: Path) -> str:
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


def imported_modules(path: Path) -> set[str]:
    """Every module of commlib that a file imports, also inside functions and for type checking only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(path, node)
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "commlib" else {base}
    return {name for name in found if name.split(".")[0] == "commlib"}


def absolute_base(path: Path, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = path.relative_to(PACKAGE.parent).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def upward_imports(path: Path) -> list[str]:
    part = part_of(module_name(path))
    allowed = BELOW[part] | {part}
    return [name for name in sorted(imported_modules(path)) if name == "commlib" or part_of(name) not in allowed]


def test_every_part_has_its_place():
    assert {part_of(module_name(path)) for path in SOURCES} <= set(BELOW), "give the new part its layer in BELOW"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_downward(path):
    assert upward_imports(path) == []


def test_an_upward_import_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path / "commlib")
    path = tmp_path / "commlib" / "codecs" / "bad.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "def f():\n    from commlib import engine\n    from ..wrap import wrap\n    import commlib.kernels.native\n"
    )
    assert upward_imports(path) == ["commlib.engine", "commlib.wrap"]


def test_the_layers_have_no_circle():
    def below(part: str) -> set[str]:
        return BELOW[part].union(*(below(lower) for lower in BELOW[part]))

    assert all(part not in below(part) for part in BELOW)


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
