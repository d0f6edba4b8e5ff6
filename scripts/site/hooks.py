"""MkDocs hooks that make links of the repository work on the site too.

A file outside docs/ that a page links to is copied into the site: a picture, or text that a browser shows.
CONTRIBUTING.md and CHANGELOG.md become pages. Headings have GitHub's anchors. The site shows the version. A site that
loads external resources is an error.
"""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.site.loads import from_elsewhere

ROOT = Path(__file__).parents[2]
#: Files outside docs/ that are pages, by their paths on the site.
PAGES = {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
PICTURES = {".png", ".svg"}

_LINK_OR_CODE = re.compile(r"^```.*?^```$|`(?:[^`\n]|\n(?!\n))+`|\]\((?P<link>[^)\s]+)\)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings GitHub's anchors, and show the version."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    version = runpy.run_path(str(ROOT / "commlib" / "version.py"))["__version__"]  # without importing torch
    config.site_name = f"{config.site_name} {version}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside docs/."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the links of a page to files outside docs/."""
    source = Path(page.file.abs_src_path or "")
    return replace_links(markdown, lambda link: _on_the_site(link, source, page.file.src_uri, config, files))


def on_post_build(config: MkDocsConfig) -> None:
    """Raise an error if the site loads external resources."""
    if found := from_elsewhere(Path(config.site_dir)):
        raise PluginError("The pages load external resources:\n" + "\n".join(found))


def slug(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", separator)


def replace_links(markdown: str, replace: Callable[[str], str]) -> str:
    """Replace the relative links of a page, except in code."""

    def replaced(match: re.Match[str]) -> str:
        link = match["link"]
        if link is None or link.startswith("#") or re.match(r"[a-z]+:", link):
            return match[0]
        return f"]({replace(link)})"

    return _LINK_OR_CODE.sub(replaced, markdown)


def _on_the_site(link: str, source: Path, page: str, config: MkDocsConfig, files: Files) -> str:
    """Return the target of a link of the file `source`, relative to its page on the site."""
    name, hash_sign, anchor = link.partition("#")
    target = (source.parent / name).resolve()
    docs = Path(config.docs_dir).resolve()
    pages = {path: name for name, path in PAGES.items()}
    if target.is_relative_to(docs):
        place = target.relative_to(docs).as_posix()
    elif target in pages:
        place = pages[target]
    elif target.is_dir():
        raise PluginError(f"{page}: a link to the folder {name}; the site has only files")
    else:
        suffix = "" if target.suffix in PICTURES else ".txt"  # a browser would download a .py or .json
        place = f"files/{target.relative_to(ROOT).as_posix()}{suffix}"
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(target)))
    return f"{os.path.relpath(place, os.path.dirname(page) or '.')}{hash_sign}{anchor}"
