"""Find the external resources of a built site. There must be none, so that it can be read without a network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

_ELSEWHERE = re.compile(r"\s*(https?:)?//", re.IGNORECASE)
_IN_STYLES = re.compile(r"(?:url\(|@import)\s*['\"]?\s*((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)


class _Loads(HTMLParser):
    """Collect the external URLs that a browser fetches to show a page, which excludes links to other pages."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            loads = name in ("src", "data", "poster") or (name == "href" and tag != "a")
            if loads and value and _ELSEWHERE.match(value):
                self.found.append(value)
            if name == "srcset" and value:
                self.found += [part.split()[0] for part in value.split(",") if _ELSEWHERE.match(part)]


def from_elsewhere(site: Path) -> list[str]:
    """Return the external URLs that pages and style sheets of a built site load, each with the name of the file."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix not in (".html", ".css", ".svg"):
            continue
        text = path.read_text(encoding="utf-8")
        parser = _Loads()
        if path.suffix != ".css":
            parser.feed(text)
        found += [f"{path.relative_to(site)}: {url}" for url in _IN_STYLES.findall(text) + parser.found]
    return found
