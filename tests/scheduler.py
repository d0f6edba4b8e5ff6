"""Which tests one of pytest-xdist's processes runs together, one after the other: those of a file that is named here.

All others go one by one to whichever process is free.
"""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling

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
    "tests/unit/test_gossip_learning.py": "gossip learning",
}


class Scheduler(LoadScopeScheduling):
    """Hands out groups first, those of most tests before others, then single tests in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(nodeid.partition("::")[0], nodeid)
