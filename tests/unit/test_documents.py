"""The documents: links lead somewhere, and every kept result belongs to a page."""

from __future__ import annotations

import fnmatch
import re
from itertools import chain, count
from pathlib import Path

import pytest

import commlib
from scripts.site.hooks import slug

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(
    [path for folder in (ROOT, ROOT / "benchmarks", ROOT / "examples") for path in folder.glob("*.md")]
    + [path for folder in (DOCS, RESULTS, ROOT / "tests") for path in folder.rglob("*.md")]
)


#: Links and pictures, also as HTML and where a link's address stands apart: [name]: address.
LINK = re.compile(r"""\]\(([^)\s]+)(?:\s"[^"]*")?\)|\b(?:href|src)="([^"]+)"|^\[[^\]]+\]:\s*(\S+)""", re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its code, whose brackets are no links, and without comments."""
    code = re.compile(r"^```.*?^```$|<!--.*?-->|`(?:[^`\n]|\n(?!\n))+`", re.MULTILINE | re.DOTALL)
    return code.sub("code", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them, and of the objects included from docstrings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        numbered = (f"{slug(heading)}-{idx}" for idx in count(1))
        found.add(next(name for name in chain([slug(heading)], numbered) if name not in found))
    return found


def dangling(page: Path) -> list[str]:
    """The links of a page to files or headings that are not there."""
    found = []
    for link in map("".join, LINK.findall(prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_link_dangles(page: Path) -> None:
    assert dangling(page) == []


def test_links_to_what_is_not_there_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n[1](gone.md) [2](page.md#a-b-c) [3](#a-b-d) [4](https://example.org)\n```\n[5](code)\n```\n"
        '`[6](code)` ![7](gone.png "Title") <img src="gone.svg"> [8](page.md#same-1) [9](page.md#same-2)\n'
        "# Same\n# Same\n::: commlib.wrap\n[10](page.md#commlib.wrap) [`code`](gone.py)\n[11]: gone/\n"
    )
    assert dangling(page) == ["gone.md", "#a-b-d", "gone.png", "gone.svg", "page.md#same-2", "gone.py", "gone/"]


def test_every_result_is_in_the_index_of_results_and_every_line_of_it_has_some() -> None:
    patterns = re.findall(r"`([\w*-]+\.(?:json|png))`", (RESULTS / "README.md").read_text(encoding="utf-8"))
    names = sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file())
    names.remove("README.md")
    assert [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not fnmatch.filter(names, pattern)] == []


def test_results_that_pages_name_are_there() -> None:
    for page in PAGES:
        for name in re.findall(r"\bresults/([\w*./-]+\.(?:json|png))", page.read_text(encoding="utf-8")):
            assert list(RESULTS.glob(name)), f"{page.name}: no result is called {name}"


def test_algorithms_that_resume_in_another_world_size_are_those_that_the_page_names() -> None:
    page = (DOCS / "how-to" / "resume.md").read_text(encoding="utf-8")
    bullet = page.split("- **Another number of ranks**")[1].split("\n- ")[0].split("The others keep")[0]
    named = set(re.findall(r"`(\w+)`", bullet))
    portable = {name for name in commlib.algorithms.list() if commlib.algorithms.create(name).portable}
    assert named == portable - {"auto"} | {"signsgd"}, "signsgd is, without feedback; auto is the algorithm it chose"
    assert commlib.algorithms.SignSGD(feedback=False).portable


def test_tests_that_pages_of_integrations_name_are_there() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", sources))
    for page in (*(DOCS / "how-to" / "integrations").glob("*.md"), DOCS / "reference" / "trainers.md"):
        named = set(re.findall(r"`(test_\w+)", page.read_text(encoding="utf-8")))
        named = {name for name in named if f"{name}*" not in page.read_text(encoding="utf-8")}
        assert named <= defined, f"{page.name}: no such test: {named - defined}"


def test_versions_that_pages_name_are_those_that_were_tested() -> None:
    from commlib.integrations.versions import TESTED

    page = (DOCS / "how-to" / "integrations" / "README.md").read_text(encoding="utf-8").lower()
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for name, version in TESTED.items():
        assert f"{name} {version}" in " ".join(page.split()), name
        assert f"{name}=={version}" in pins, name


def test_the_page_on_networks_shows_the_example_that_it_profiles() -> None:
    _, _, code = (ROOT / "examples" / "my_model.py").read_text(encoding="utf-8").rpartition('"""\n\nimport')
    assert f"import{code}" in (DOCS / "how-to" / "choose-a-network.md").read_text(encoding="utf-8")
