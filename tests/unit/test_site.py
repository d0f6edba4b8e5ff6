"""The documentation as a site: it builds without a warning, loads nothing from elsewhere, and leaves nothing out."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import commlib
from scripts.site import command_line
from scripts.site.hooks import PAGES as PAGES_OUTSIDE
from scripts.site.loads import from_elsewhere
from tests.pages import ROOT

pytestmark = pytest.mark.timeout(240)

DOCS = ROOT / "docs"
#: Each page as it is written, by its path on the site without the suffix.
SOURCES = {name.removesuffix(".md"): path for name, path in PAGES_OUTSIDE.items()} | {
    re.sub(r"README$", "index", path.relative_to(DOCS).with_suffix("").as_posix()): path for path in DOCS.rglob("*.md")
}


def build(out: Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Build the site as scripts/docs does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=folder, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site")
    done = build(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def ids(site: Path, page: str) -> set[str]:
    """What links to places of a page end with."""
    return set(re.findall(r'\bid="([^"]+)"', (site / f"{page}.html").read_text(encoding="utf-8")))


def test_every_page_is_built_and_none_loads_from_elsewhere(site: Path) -> None:
    assert [name for name in SOURCES if not (site / f"{name}.html").is_file()] == []
    assert from_elsewhere(site) == []


def test_every_page_shows_the_version(site: Path) -> None:
    words = f"commlib {commlib.__version__}"
    assert [name for name in SOURCES if words not in (site / f"{name}.html").read_text(encoding="utf-8")] == []


def test_files_outside_the_docs_are_in_the_site_as_text(site: Path) -> None:
    assert 'href="files/examples/tutorial.py.txt"' in (site / "tutorial.html").read_text(encoding="utf-8")
    copy, source = site / "files" / "examples" / "tutorial.py.txt", ROOT / "examples" / "tutorial.py"
    assert copy.read_text(encoding="utf-8") == source.read_text(encoding="utf-8")


def test_what_is_loaded_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<a href="https://a.org">no</a><script src="//b.org/x.js"></script><link href="https://c.org/x.css">'
        '<img src="x.png" srcset="y.png 1x, https://d.org/y.png 2x"><p style="background: url(http://e.org/z)">'
    )
    (tmp_path / "style.css").write_text("@import 'https://f.org/x.css'; p { background: url('z.png') }")
    found = [line.split(": ")[1] for line in from_elsewhere(tmp_path)]
    assert sorted(re.findall(r"//(\w)", " ".join(found))) == ["b", "c", "d", "e", "f"]


def test_pages_have_the_same_lists_tables_and_code_for_every_reader(site: Path) -> None:
    """GitHub and the site read Markdown differently: a list below a paragraph needs an empty line between them."""
    kinds = {"list_item_open": "<li", "table_open": "<table", "fence": "<pre", "code_block": "<pre"}
    differ = []
    for name, source in SOURCES.items():
        tokens = MarkdownIt("commonmark").enable("table").parse(source.read_text(encoding="utf-8"))
        html = (site / f"{name}.html").read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        meant = [kinds[token.type] for token in tokens if token.type in kinds]
        counts = {tag: (meant.count(tag), len(re.findall(rf"{tag}\b", html))) for tag in sorted(set(kinds.values()))}
        if not name.startswith("reference/api/") and any(here != there for here, there in counts.values()):
            differ.append(f"{source.relative_to(ROOT)}: on GitHub and on the site: {counts}")
    assert differ == []


def left_out(site: Path, page: str, module: str, names: Iterable[str]) -> list[str]:
    """Return which of a module's names a page of the reference leaves out."""
    found = ids(site, f"reference/api/{page}")
    missing = []
    for name in names:
        value = getattr(importlib.import_module(module), name)
        places = {f"{module}.{name}", f"{getattr(value, '__module__', '')}.{name}"}
        if getattr(commlib, name, None) is value:
            places.add(f"commlib.{name}")
        if not places & found and not inspect.ismodule(value):
            missing.append(name)
    return missing


MODULES = {
    "commlib": "commlib",
    "commlib.checkpoint": "commlib",
    "commlib.algorithms": "algorithms",
    "commlib.codecs": "codecs",
    "commlib.optim": "optim",
    "commlib.simulation": "simulation",
    "commlib.network": "simulation",
    "commlib.emulation": "emulation",
}
#: The names on the page for authors.
FOR_AUTHORS = {
    "commlib.algorithms": {
        *("Algorithm", "BucketView", "Context", "Channel"),
        *("Gradients", "LocalSteps", "OptimizerState", "SelfRunning", "Weights"),
        *("State", "PerElement", "Units"),
        *("Compressed", "NeighbourAveraging", "OuterAveraging", "OuterStep"),
    },
}


@pytest.mark.parametrize(("module", "page"), MODULES.items())
def test_every_public_name_is_in_the_reference(module: str, page: str, site: Path) -> None:
    names = set(importlib.import_module(module).__all__) - {"__version__"}
    assert left_out(site, page, module, sorted(names - FOR_AUTHORS.get(module, set()))) == []


def test_the_page_for_authors_has_what_algorithms_are_made_of(site: Path) -> None:
    assert left_out(site, "primitives", "commlib.algorithms", FOR_AUTHORS["commlib.algorithms"]) == []
    primitives = importlib.import_module("commlib.primitives")
    for _, module, _ in pkgutil.walk_packages(primitives.__path__, "commlib.primitives."):
        own = {
            name
            for name, value in vars(importlib.import_module(module)).items()
            if getattr(value, "__module__", "") == module and inspect.getdoc(value) and not name.startswith("_")
        }
        assert left_out(site, "primitives", module, own) == [], module


def test_every_algorithm_is_in_the_reference_under_its_name(site: Path) -> None:
    places = ids(site, "reference/api/algorithms")
    classes = {
        name: f"commlib.algorithms.{commlib.algorithms.get(name).__name__}" for name in commlib.algorithms.list()
    }
    assert [name for name, place in classes.items() if name not in places or place not in places] == []


def test_the_page_of_the_command_line_says_what_the_commands_say() -> None:
    page = (DOCS / "reference" / "command_line.md").read_text(encoding="utf-8")
    assert page == command_line.page(), "scripts/docs writes it again"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](gone.md)", "gone.md"),
        ("[a](index.md#gone)", "#gone"),
        ("::: commlib.gone", "commlib.gone"),
        ("[a](../scripts)", "scripts"),
        ('<img src="https://example.org/a.png">', "https://example.org/a.png"),
    ],
)
def test_a_fault_of_a_page_ends_the_build(text: str, complaint: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "docs" / "assets").mkdir(parents=True)
    shutil.copytree(ROOT / "scripts" / "site", tree / "scripts" / "site")
    (tree / "commlib").mkdir()
    (tree / "commlib" / "__init__.py").touch()
    shutil.copy(ROOT / "commlib" / "version.py", tree / "commlib")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        (tree / name).write_text("# Page\n")
    (tree / "docs" / "assets" / "site.css").touch()
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    (tree / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md, contributing.md, changelog.md]\n")
    (tree / "docs" / "index.md").write_text(f"# Page\n\n{text}\n")
    done = build(tmp_path / "out", tree)
    assert done.returncode != 0
    assert complaint in done.stdout + done.stderr
