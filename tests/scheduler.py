"""Which tests one of pytest-xdist's processes runs together, one after the other: those of a file that is named here.

All others go one by one to whichever process is free; tests marked `timing` come last, in one process, when the other
processes have ended.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: By file. "hosts": one of these tests looks at all networks of this machine. The others share a costly fixture.
TOGETHER = {
    "tests/unit/test_emulated.py": "hosts",
    "tests/unit/test_emulate.py": "hosts",
    "tests/unit/test_emulated_latency.py": "hosts",
    "tests/multi/test_wire_bytes.py": "hosts",
    "tests/unit/test_aarch64.py": "aarch64",
    "tests/unit/test_release.py": "releases",
    "tests/multi/test_examples.py": "examples",
    "tests/unit/test_document_code.py": "documents",
    "tests/unit/test_site.py": "documents",
    **dict.fromkeys(
        (f"tests/integrations/test_lightning{end}.py" for end in ("", "_checkpoints", "_launchers", "_stages")),
        "lightning",  # which takes seconds to import, in each rank
    ),
    **dict.fromkeys(
        (f"tests/integrations/test_transformers{end}.py" for end in ("", "_checkpoints", "_use")),
        "transformers",  # as well
    ),
    "tests/unit/test_gossip_learning.py": "gossip learning",
    "tests/unit/test_times.py": "times",
}


@functools.cache
def timing_tests() -> frozenset[str]:
    """Return the tests marked `timing`, as node ids without parameters.

    Read from the sources: xdist's controller, which schedules, collects no tests.
    """
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.timing" in text:
            name = path.relative_to(ROOT).as_posix()
            functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            found += [f"{name}::{function.name}" for function in functions if _is_marked(function)]
    return frozenset(found)


def _is_marked(function: ast.FunctionDef) -> bool:
    return any("mark.timing" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_timing(nodeid: str) -> bool:
    """Return whether a test is marked `timing`."""
    return nodeid.partition("[")[0] in timing_tests()


def scope_of(nodeid: str) -> str:
    """Return the name of the tests that run together with this one; tests marked `timing` run alone."""
    return nodeid if is_timing(nodeid) else TOGETHER.get(nodeid.partition("::")[0], nodeid)
