"""Other people's packages: installed for a test, as pip would, in a folder of their own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from commlib.codecs import registry

#: The package of `relaxed.py`.
RELAXED = {
    "commlib.codecs": {"byte64": "relaxed:Byte64", "top16": "relaxed:Top16"},
    "commlib.algorithms": {"relaxed_mean": "relaxed:RelaxedMean"},
}


def install(folder: Path, package: str, source: str, points: Mapping[str, Mapping[str, str]]) -> Path:
    """Write a package of one module and its metadata into a folder.

    Args:
        folder: Where; to be put on `sys.path`.
        package: The name of the package; its module has that name too.
        source: The module.
        points: Entry points: group, name, "module:Class".
    """
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{package}.py").write_text(source, encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    sections = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
        for group, named in points.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")
    return folder


def install_relaxed(folder: Path) -> Path:
    """Install the package of `relaxed.py`."""
    return install(folder, "relaxed", Path(__file__).with_name("relaxed.py").read_text(encoding="utf-8"), RELAXED)


@contextlib.contextmanager
def on_path(*folders: Path | str) -> Iterator[None]:
    """Let this process find the packages in these folders; afterwards it knows nothing of them."""
    known = registry.by_id._kinds, registry.by_name._kinds, registry._packages, registry._failures
    before = [dict(each) for each in known], registry._is_loaded, set(sys.modules)
    sys.path[:0] = map(str, folders)
    registry._is_loaded = False
    try:
        yield
    finally:
        del sys.path[: len(folders)]
        for each, copy in zip(known, before[0], strict=True):
            each.clear()
            each.update(copy)  # type: ignore[arg-type]
        registry._is_loaded = before[1]
        for name in set(sys.modules) - before[2]:
            if any(str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)) for folder in folders):
                del sys.modules[name]
