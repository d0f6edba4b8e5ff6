"""The structure of the package: its imports, circles among them, its largest class, the modules that it loads.

python -m tests.structure [folder of a checkout]
"""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

PACKAGE = Path(__file__).parents[1] / "commlib"

# The parts that each part may import. A part is the first name below `commlib`, unless PLACED has the module.
_PIECES = {"locks", "weak", "errors", "arguments", "sharding", "kernels", "codecs", "transport", "primitives"}
_TRAINING = {*_PIECES, "algorithms", "engine"}
BELOW = {
    "errors": set(),
    "arguments": set(),
    "pipelining": set(),
    "locks": set(),
    "weak": set(),
    "version": set(),
    "formats": {"errors", "version"},
    "installation": {"version"},
    "_native": set(),
    "sharding": {"errors", "codecs", "transport"},
    "optim": {"errors"},
    "network": {"errors"},
    "kernels": {"locks", "errors", "installation", "_native"},
    "codecs": {"locks", "errors", "arguments", "kernels"},
    "transport": {"locks", "weak", "errors", "kernels"},
    "elastic": {"transport", "locks", "errors", "kernels"},
    "primitives": {"errors", "kernels", "codecs", "transport"},
    "algorithms": {*_PIECES, "optim"},
    "engine": {*_PIECES, "formats", "algorithms"},
    "simulation": {*_TRAINING, "network"},
    "wrap": {*_TRAINING, "elastic", "formats", "version", "network", "simulation", "pipelining"},
    "reports": {"errors", "installation", "version", "primitives", "algorithms", "network", "simulation", "wrap"},
    "emulation": {"errors", "transport", "algorithms", "engine", "network", "simulation", "wrap", "reports"},
    "integrations": {"locks", "weak", "errors", "formats", "algorithms", "engine", "transport", "wrap"},
    "doctor": {"errors", "installation", "kernels", "reports", "emulation"},
    "peers": {"errors", "version", "transport", "reports"},
    "cli": {
        "errors",
        "version",
        "primitives",
        "algorithms",
        "network",
        "simulation",
        "reports",
        "wrap",
        "emulation",
        "doctor",
        "elastic",
        "peers",
    },
    "__main__": {"cli"},
}
# Files of the top layer that implement `wrap`, and the command line.
PLACED = {
    **dict.fromkeys(
        [
            "checkpoint",
            "ddp_arguments",
            "hand_over",
            "join",
            "outputs",
            "parallel",
            "replica",
            "set_up",
            "shard",
            "state_copies",
            "tuner",
            "verify",
        ],
        "wrap",
    ),
    "cli_options": "cli",
}


def sources(package: Path = PACKAGE) -> list[Path]:
    """Every file of the package but its front."""
    return sorted(path for path in package.rglob("*.py") if path != package / "__init__.py")


def part_of(module: str) -> str:
    """The part that a module, `commlib.part.…`, belongs to."""
    inner = module.split(".", 1)[1] if "." in module else module
    return PLACED.get(inner) or PLACED.get(inner.split(".")[0]) or inner.split(".")[0]


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """The name by which a file is imported."""
    relative = path.relative_to(package.parent).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


def imported_modules(path: Path, package: Path = PACKAGE) -> set[str]:
    """Every module of commlib that a file imports, also inside functions and for type checking only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_base(path, node, package)
            of_names = {f"{base}.{alias.name}" for alias in node.names}
            modules = {name for name in of_names if _file_of(name, package) is not None}
            found |= of_names if base == "commlib" else modules or {base}
    return {name for name in found if name.split(".")[0] == "commlib"}


def _absolute_base(path: Path, node: ast.ImportFrom, package: Path) -> str:
    if node.level == 0:
        return node.module or ""
    above = path.relative_to(package.parent).parts[: -node.level]
    return ".".join([*above, *([node.module] if node.module else [])])


def _file_of(module: str, package: Path) -> Path | None:
    stem = package.parent.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)


def upward_imports(path: Path, package: Path = PACKAGE) -> list[str]:
    """The imports of a file from parts that are not below its own."""
    part = part_of(module_name(path, package))
    allowed = BELOW.get(part, set()) | {part}
    imported = sorted(imported_modules(path, package))
    return [name for name in imported if name == "commlib" or part_of(name) not in allowed]


def circles(package: Path = PACKAGE) -> list[list[str]]:
    """The modules that import one another in a circle: each group that is strongly connected.

    The imports of a folder's `__init__` are its front; imports of its files from their own front count too.
    """
    graph = {module_name(path, package): imported_modules(path, package) for path in sources(package)}
    return [sorted(group) for group in _strongly_connected(graph) if len(group) > 1]


def _strongly_connected(graph: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other in graph and other not in index:
                yield from visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            yield stack[at:]
            del stack[at:]

    for node in graph:
        if node not in index:
            yield from visit(node)


def late_attributes(package: Path = PACKAGE) -> list[str]:
    """The attributes that a method sets and the construction does not: neither `__init__`, nor a method that it calls.

    Declarations in the body of a class count as set, and so do attributes that a base of the package sets.
    """
    nodes: dict[str, list[ast.ClassDef]] = {}  # several files may have a class of one name
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                nodes.setdefault(node.name, []).append(node)
    return sorted(
        f"{node.name}.{attribute}"
        for node in itertools.chain(*nodes.values())
        for attribute in {a for m in _methods(node).values() for a in _set_in(m)} - _set_at_construction(node, nodes)
    )


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def _set_in(method: ast.FunctionDef) -> set[str]:
    targets: list[ast.expr] = []
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets.append(node.target)
    flat = [part for each in targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
    return {each.attr for each in flat if _is_of_self(each)}


def _is_of_self(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _set_at_construction(node: ast.ClassDef, nodes: Mapping[str, Sequence[ast.ClassDef]]) -> set[str]:
    found = set(_methods(node))
    for each in node.body:
        if isinstance(each, ast.Assign | ast.AnnAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            found |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    for base in node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        name = inner.id if isinstance(inner, ast.Name) else getattr(inner, "attr", "")
        for found_base in nodes.get(name, ()):
            if found_base is not node:
                found |= _set_at_construction(found_base, nodes)
    methods, todo = _methods(node), ["__init__", "__new__", "__post_init__"]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in methods and name not in seen:
            seen.add(name)
            found |= _set_in(methods[name])
            calls = [each.func for each in ast.walk(methods[name]) if isinstance(each, ast.Call)]
            todo += [each.attr for each in calls if _is_of_self(each)]
    return found


def classes(package: Path = PACKAGE) -> list[tuple[str, int, int]]:
    """Every class with the numbers of its methods and of the attributes that it sets on itself."""
    found = []
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                name = f"{module_name(path, package)}.{node.name}"
                found.append((name, len(methods), len(_attributes(methods))))
    return found


def _attributes(methods: Iterable[ast.FunctionDef]) -> set[str]:
    return {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def names_of_locks(package: Path = PACKAGE) -> list[str]:
    """The names of all locks that the package makes, once for each place where one is made."""
    found = []
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _MAKE_LOCKS:
                found.append(ast.literal_eval(node.args[0]))
    return found


_MAKE_LOCKS = ("locks.lock", "locks.rlock", "locks.condition")


def loaded_by_import(root: Path = PACKAGE.parent) -> list[str]:
    """The modules of commlib that `import commlib` loads."""
    code = "import sys, commlib; print(*sorted(name for name in sys.modules if name.split('.')[0] == 'commlib'))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True
    ).stdout.split()


def main() -> None:
    """Print it."""
    package = Path(sys.argv[1]).resolve() / "commlib" if len(sys.argv) > 1 else PACKAGE
    largest = sorted(classes(package), key=lambda each: -(each[1] + each[2]))[:3]
    print(f"modules that `import commlib` loads: {len(loaded_by_import(package.parent))}")
    print(f"imports upward: {sum(len(upward_imports(path, package)) for path in sources(package))}")
    for name, num_methods, num_attributes in largest:
        print(f"{name}: {num_methods} methods, {num_attributes} attributes")
    for circle in circles(package):
        print(f"circle of {len(circle)}: {' '.join(circle)}")


if __name__ == "__main__":
    main()
