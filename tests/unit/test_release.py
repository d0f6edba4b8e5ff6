"""Releases: one version, a source archive that is the repository, a wheel for every Linux, and who may install them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import tomllib
from packaging.utils import parse_wheel_filename
from typer.testing import CliRunner

import commlib
from commlib import cli
from tests import release

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
WHERE = """
from pathlib import Path
import commlib.kernels.native
print(Path(commlib.__file__).parent, Path(commlib.kernels.native.load().__file__).parent)
"""
is_checkout = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="a release needs a checkout; this is not one (an unpacked source archive?)"
)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of the checkout as it is."""
    tree = tmp_path_factory.mktemp("release") / "tree"
    release.copy_known_to_git(tree)
    release.run([sys.executable, "setup.py", "-q", "sdist"], cwd=tree)
    (found,) = (tree / "dist").glob("*.tar.gz")
    return found


# --- the version ------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_version() -> None:
    done = CliRunner().invoke(cli.app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"commlib {commlib.__version__}\n")


def test_the_version_has_one_source() -> None:
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "commlib.version.__version__"}
    assert release.version_of(ROOT) == commlib.__version__


@is_checkout
def test_the_build_reads_that_version(sdist: Path) -> None:
    assert sdist.name == f"{release.STEM}-{commlib.__version__}.tar.gz"
    release.check_metadata(
        release.text_in(sdist, f"{release.STEM}-{commlib.__version__}/PKG-INFO"), version=commlib.__version__
    )


# --- the source archive -----------------------------------------------------------------------------------------------


@is_checkout
def test_the_source_archive_is_the_repository(sdist: Path) -> None:
    names = release.names_in(sdist)
    release.check_names(names)
    for folder in ("tests", "docs", "examples", "scripts", "csrc", "benchmarks"):
        assert any(name.startswith(f"{folder}/") for name in names), folder
    with pytest.raises(release.ReleaseError, match=r"leaves out \['csrc/pack.h'\]"):
        release.check_names(names - {"csrc/pack.h"})
    with pytest.raises(release.ReleaseError, match=r"git does not know: \['tests/leftover.bin'\]"):
        release.check_names(names | {"tests/leftover.bin"})


@is_checkout
def test_the_source_archive_is_small_and_keeps_what_may_be_run(sdist: Path) -> None:
    assert sdist.stat().st_size < 6e6
    with tarfile.open(sdist) as archive:
        modes = {member.name.split("/", 1)[-1]: member.mode for member in archive.getmembers()}
    for name in release.known_to_git():
        assert bool(modes[name] & 0o100) == bool((ROOT / name).stat().st_mode & 0o100), name


# --- the checks of a release ------------------------------------------------------------------------------------------


def metadata(**changes: str) -> str:
    lines = {
        "Metadata-Version": "2.4",
        "Name": release.DISTRIBUTION,
        "Version": "1.0",
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Description-Content-Type": "text/markdown",
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    return "\n".join([*(f"{name}: {value}" for name, value in lines.items()), "", "A description."])


def test_wrong_metadata_is_named() -> None:
    release.check_metadata(metadata(), "1.0")
    with pytest.raises(release.ReleaseError, match="version: '1.0', not '1.1'"):
        release.check_metadata(metadata(), "1.1")
    with pytest.raises(release.ReleaseError, match="license: 'MIT', not 'Apache-2.0'"):
        release.check_metadata(metadata(License_Expression="MIT"), "1.0")
    with pytest.raises(release.ReleaseError, match="urls: "):
        release.check_metadata(metadata(Project_URL="Source, https://example.org"), "1.0")
    with pytest.raises(release.ReleaseError, match="'free for all' is invalid for 'license-expression'"):
        release.check_metadata(metadata(License_Expression="free for all"), "1.0")


def wheel_with(
    folder: Path, *names: str, tag: str = "cp311-cp311-manylinux_2_28_x86_64", stripped: bool = True
) -> Path:
    path = folder / f"{release.STEM}-{commlib.__version__}-{tag}.whl"
    extension = folder / "_native.so"
    (folder / "empty.cpp").write_text("void nothing() {}\n")
    command = ["g++", "-shared", "-fPIC", *(["-s"] if stripped else []), folder / "empty.cpp", "-o", extension]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(extension, "commlib/_native.so")
        info = f"{release.STEM}-{commlib.__version__}.dist-info/licenses/LICENSE"
        for name in ("commlib/_native.pyi", "commlib/algorithms/known.json", info, *names):
            wheel.writestr(name, "")
    return path


def test_a_wheel_that_is_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    release.check_wheel(wheel_with(tmp_path, "commlib/py.typed"))
    with pytest.raises(release.ReleaseError, match=r"lacks commlib/py.typed"):
        release.check_wheel(wheel_with(tmp_path))
    with pytest.raises(release.ReleaseError, match="not stripped"):
        release.check_wheel(wheel_with(tmp_path, "commlib/py.typed", stripped=False))
    with pytest.raises(release.ReleaseError, match=r"more than the package: .*'tests'"):
        release.check_wheel(wheel_with(tmp_path, "commlib/py.typed", "tests/__init__.py"))
    with pytest.raises(release.ReleaseError, match=r"not for every Linux: \['linux_x86_64'\]"):
        release.check_wheel(wheel_with(tmp_path, "commlib/py.typed", tag="cp311-cp311-linux_x86_64"))


def test_without_the_tools_the_script_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release", tmp_path / "scripts")
    done = subprocess.run([tmp_path / "scripts" / "release"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Run scripts/setup first" in done.stderr


# --- who may install it -----------------------------------------------------------------------------------------------


def test_wheels_are_made_for_every_python_that_is_promised() -> None:
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--print-build-identifiers", ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = {f"cp{each.replace('.', '')}-manylinux_{arch}" for each in PYTHONS for arch in ("x86_64", "aarch64")}
    assert sorted(done.stdout.split()) == sorted(expected)


def test_cibuildwheel_takes_its_settings() -> None:
    schema = json.loads((files("cibuildwheel") / "resources" / "cibuildwheel.schema.json").read_text())
    jsonschema.validate(PYPROJECT["tool"]["cibuildwheel"], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(PYPROJECT["tool"]["cibuildwheel"] | {"test-commands": []}, schema)


def test_the_classifiers_are_the_pythons_that_wheels_are_made_for() -> None:
    prefix = "Programming Language :: Python :: 3."
    classifiers = PYPROJECT["project"]["classifiers"]
    assert [each.removeprefix(prefix) for each in classifiers if each.startswith(prefix)] == [
        each.removeprefix("3.") for each in PYTHONS
    ]
    assert PYPROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"


def test_what_a_wheel_is_tested_with_is_there() -> None:
    settings = release.cibuildwheel(ROOT)
    assert all((ROOT / name).exists() for name in settings["test-sources"])
    named = [word for command in settings["test-command"] for word in command.split() if word.endswith(".py")]
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_the_tests_of_a_wheel_need_no_xdist() -> None:
    assert not any("xdist" in each for each in release.cibuildwheel(ROOT)["test-requires"])
    code = "import sys; sys.modules['xdist'] = None; import tests.conftest"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- all of it --------------------------------------------------------------------------------------------------------


@is_checkout
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_release_is_built_and_both_files_train_in_a_clean_environment(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "release", "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert (tmp_path / f"{release.STEM}-{commlib.__version__}.tar.gz").is_file()
    assert all(tag.platform.startswith("manylinux_2_") for tag in parse_wheel_filename(wheel.name)[3])
    # Once of the wheel, once of the source archive: the command, the checks of the machine, the tests, the training.
    assert done.stdout.count(f"\ncommlib {commlib.__version__}\n") == 2
    assert done.stdout.count(" passed") == 2
    assert done.stdout.count("validation") >= 2


@is_checkout
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tests_run_from_the_source_archive(sdist: Path, tmp_path: Path) -> None:
    tree = release.unpack(sdist, tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tree)}
    release.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, is_silent=True)
    where = subprocess.run([sys.executable, "-c", WHERE], cwd="/", env=env, capture_output=True, text=True, check=True)
    assert where.stdout.split() == [str(tree / "commlib")] * 2
    chosen = ["layers", "documents", "packaging", "release", "wire_files", "native", "types"]
    tests = [*(f"tests/unit/test_{name}.py" for name in chosen), "tests/multi/test_parameters.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *tests]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
