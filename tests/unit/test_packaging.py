"""The package: its requirements, its files, and its build without a compiler."""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from commlib import installation
from commlib.installation import DISTRIBUTION
from commlib.kernels import cuda, native

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"cuda12", "cuda13", "plot", "accelerate", "transformers", "lightning", "test", "dev", "release", "docs"}
BUILD_FILES = ["pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "csrc"]


@pytest.fixture
def source_tree(tmp_path):
    """A copy of the files that the build needs, at a path with a space."""
    tree = tmp_path / "a copy"
    for name in BUILD_FILES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name)
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    (tree / "commlib").mkdir()
    (tree / "README.md").touch()
    shutil.copy(ROOT / "commlib" / "version.py", tree / "commlib")
    (tree / "commlib" / "algorithms").mkdir()
    for name in ("__init__.py", "py.typed", "_native.pyi", "algorithms/__init__.py", "algorithms/known.json"):
        (tree / "commlib" / name).touch()
    return tree


def run_setup(tree: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", *arguments]
    # Compiling without optimisation shows the same and takes a third of the time.
    environment = {**os.environ, "CXXFLAGS": "-O0", **env}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    exact = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in exact}


def requirements_of(name: str, extras: set[str]) -> list[Requirement]:
    """The requirements of an installed package on this machine, with these extras."""
    found = map(Requirement, importlib.metadata.requires(name) or [])
    environments = [{"extra": extra} for extra in ["", *sorted(extras)]]
    return [item for item in found if not item.marker or any(item.marker.evaluate(env) for env in environments)]


def all_packages() -> set[str]:
    """Every package that `pip install .[plot,test,dev,release,docs]` and its isolated build bring, direct or not."""
    waiting = [
        Requirement(f"{DISTRIBUTION}[plot,test,dev,release,docs]"),
        *map(Requirement, PYPROJECT["build-system"]["requires"]),
    ]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        item = waiting.pop()
        key = canonicalize_name(item.name), frozenset(item.extras)
        if key not in seen:
            seen.add(key)
            waiting += requirements_of(item.name, item.extras)
    return {name for name, _ in seen} - {DISTRIBUTION}


def test_the_build_never_sees_torch():
    names = {Requirement(line).name for line in PYPROJECT["build-system"]["requires"]}
    assert names == {"setuptools", "pybind11", "ninja"}
    assert "torch" not in (ROOT / "setup.py").read_text()


def test_every_package_of_the_set_up_is_pinned():
    assert all_packages() - set(pins()) == set()


def test_the_pins_satisfy_what_the_package_demands():
    wanted = [
        *map(Requirement, PYPROJECT["build-system"]["requires"]),
        *map(Requirement, PYPROJECT["project"]["dependencies"]),
    ]
    for extra in EXTRAS - {"cuda12", "cuda13"}:
        wanted += map(Requirement, PYPROJECT["project"]["optional-dependencies"][extra])
    wrong = [str(item) for item in wanted if pins()[canonicalize_name(item.name)] not in item.specifier]
    assert wrong == []


def test_the_extras_are_those_promised():
    assert set(PYPROJECT["project"]["optional-dependencies"]) == EXTRAS


def test_hints_name_the_distribution_and_the_packages_of_its_extras():
    assert PYPROJECT["project"]["name"] == DISTRIBUTION
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert {name: extras[name] for name in installation.EXTRAS} == installation.EXTRAS
    assert installation.install("plot") == "pip install 'matplotlib>=3.8'"


def test_the_hint_to_install_again_names_this_checkout_or_the_wheel(monkeypatch, tmp_path):
    assert installation.reinstall().split()[-1] == shlex.quote(str(ROOT))
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "site-packages" / "commlib" / "installation.py"))
    assert re.fullmatch(r"commlib_torch-[\d.]+-\*\.whl", installation.reinstall().split()[-1])


#: What must not be written: the name of another project's distribution, and addresses of this project, which has none.
OF_OTHERS = re.compile(r"pip install (?:-\S+ )*['\"]?commlib(?![\w-])|'commlib\[|https?://\S*commlib", re.IGNORECASE)


def test_nothing_leads_to_another_project_or_to_an_address_that_does_not_exist():
    assert all(map(OF_OTHERS.search, ["pip install commlib", "pip install 'commlib[plot]'", "https://commlib.org"]))
    assert not OF_OTHERS.search("pip install commlib_torch-0.1.0.tar.gz")
    assert "urls" not in PYPROJECT["project"]
    folders = ("benchmarks", "commlib", "docs", "examples", "scripts", "tests", ".ci")
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    kinds = {"", ".md", ".py", ".pyi", ".toml", ".txt", ".yml", ".sh"}
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.is_file() and path.suffix in kinds}
    del texts[Path(__file__)]
    assert [str(path.relative_to(ROOT)) for path, text in texts.items() if OF_OTHERS.search(text)] == []


def test_the_extension_loads_without_torch_and_links_none_of_it():
    path = native.load().__file__
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('commlib._native', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(module.isa(), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [native.supported_isas()[0], "False"]
    assert not re.search(rb"libtorch|libc10|_ZN2at6Tensor", Path(path).read_bytes())


def test_without_a_compiler_the_build_says_what_to_do(source_tree):
    done = run_setup(source_tree, "-q", "build_ext", CXX="/nonexistent/c++")
    assert done.returncode != 0
    assert "CXX=/nonexistent/c++ was not found" in done.stderr
    assert "apt-get install g++" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_compiler_that_does_not_work_is_named_with_its_message(source_tree):
    compiler = source_tree / "c++"
    compiler.write_text("#!/bin/sh\necho 'no standard library here' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run_setup(source_tree, "-q", "build_ext", CXX=f"'{compiler}'")
    assert done.returncode != 0
    assert "cannot compile a C++17 file" in done.stderr
    assert "no standard library here" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_extension_builds_without_a_warning_at_a_path_with_a_space(source_tree):
    done = run_setup(source_tree, "-q", "build_ext", "--inplace")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((source_tree / "commlib").glob("_native*.so"))
    assert "warning:" not in done.stdout + done.stderr
    header = source_tree / "csrc" / "pack.h"
    assert "ninja: no work to do" in run_setup(source_tree, "-q", "build_ext", "--inplace").stdout
    os.utime(header)
    assert "pack.o" in run_setup(source_tree, "-q", "build_ext", "--inplace").stdout


def test_the_source_archive_has_what_the_build_needs(source_tree):
    done = run_setup(source_tree, "-q", "sdist")
    assert done.returncode == 0, done.stderr
    (archive,) = (source_tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[1] for name in files.getnames() if "/" in name}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert "csrc/cuda/device.h" in sources
    data = {"commlib/py.typed", "commlib/_native.pyi", "commlib/algorithms/known.json"}
    assert sources | {"setup.py", "pyproject.toml", "LICENSE"} | data <= names


def test_the_wheel_has_the_data_and_the_cuda_sources_where_they_are_looked_for(source_tree):
    """They are compiled at run time; an editable install reads those of the checkout instead."""
    done = run_setup(source_tree, "-q", "build_py")
    assert done.returncode == 0, done.stderr
    assert list(source_tree.glob("build/lib*/commlib/algorithms/known.json"))
    (installed,) = source_tree.glob("build/lib*/commlib/kernels/cuda_sources")
    names = {path.relative_to(installed).as_posix() for path in installed.rglob("*.h")}
    assert names == {"codec_math.h"} | {f"cuda/{path.name}" for path in (ROOT / "csrc" / "cuda").glob("*.h")}
    shutil.copy(ROOT / "commlib" / "kernels" / "cuda.py", installed.parent)
    assert cuda.headers(installed.parent / "cuda.py") == cuda.headers()


SCRIPTS = [
    "scripts/setup",
    "scripts/demo",
    "scripts/test",
    "scripts/lint",
    "scripts/release",
    "scripts/docs",
    ".ci/run",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_and_parse(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def set_up(tree: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (tree / "scripts").mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts" / "setup", tree / "scripts" / "setup")
    shutil.copy(ROOT / "constraints.txt", tree)
    command = [tree / "scripts" / "setup"]
    return subprocess.run(command, cwd="/", env={**os.environ, **env}, capture_output=True, text=True, check=False)


def test_set_up_says_when_there_is_no_python(source_tree):
    done = set_up(source_tree, PYTHON="/nonexistent/python")
    assert done.returncode == 1
    assert "Install Python 3.11 or later, or set PYTHON" in done.stderr


def fake_python(folder: Path, line: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_set_up_says_when_python_is_too_old(source_tree):
    old = fake_python(source_tree, '[ "$1" = -V ] && echo Python 3.9.1 && exit 0\nexit 1')
    done = set_up(source_tree, PYTHON=old)
    assert done.returncode == 1
    assert "Python 3.9.1" in done.stderr


def test_set_up_says_what_to_install_where_venv_is_missing(source_tree):
    without_venv = fake_python(source_tree, 'case "$2" in *ensurepip*) exit 1 ;; esac')
    done = set_up(source_tree, PYTHON=without_venv)
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
