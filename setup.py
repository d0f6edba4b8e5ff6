"""Builds the C++ extension with ninja; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import PlatformError

CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    # A fused multiply-add rounds once where two operations round twice: bytes on the wire must not depend on that.
    "-ffp-contract=off",
    # The exception flags are never read; results are the same, and conditional float operations vectorise.
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
]
NO_COMPILER = """
commlib needs a C++17 compiler to build its extension, and {problem}.
Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install),
or set the environment variable CXX to the path of yours, and run the command again.
"""


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler that can compile C++17, or raise with what to do."""
    asked = shlex.split(os.environ.get("CXX", ""))
    candidates = [asked] if asked else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if shutil.which(command[0]):
            check_compiler(command)
            return command
    problem = f"CXX={shlex.join(asked)} was not found" if asked else "none of c++, g++ and clang++ was found"
    raise PlatformError(NO_COMPILER.format(problem=problem))


def check_compiler(command: list[str]) -> None:
    """Raise unless `command` compiles a file that needs the C++17 standard library and Python's headers."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <string_view>\n#include <Python.h>\nint main() { return 0; }\n")
        include = sysconfig.get_path("include")
        probe = [*command, "-std=c++17", f"-I{include}", "-c", str(source), "-o", str(source.with_suffix(".o"))]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = f"{shlex.join(command)} cannot compile a C++17 file with Python's headers:\n{done.stderr}"
        if "Python.h" in done.stderr:
            problem += "(Debian, Ubuntu: apt-get install python3-dev brings the headers.)\n"
        raise PlatformError(NO_COMPILER.format(problem=problem))


class NinjaBuildExt(build_ext):
    """Compiles the sources of an extension in parallel with ninja."""

    def build_extension(self, ext: Extension) -> None:
        compiler = find_compiler()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp, ext.name).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        build_dir.mkdir(parents=True, exist_ok=True)
        write_ninja_file(build_dir / "build.ninja", compiler, ext, target)
        run_ninja(build_dir)


class BuildPyWithCudaSources(build_py):
    """Puts the CUDA sources beside the module that compiles them at run time; a checkout is read where it is."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "commlib", "kernels", "cuda_sources")
        (target / "cuda").mkdir(parents=True, exist_ok=True)
        self.copy_file("csrc/codec_math.h", str(target / "codec_math.h"))
        for header in sorted(Path("csrc/cuda").glob("*.h")):
            self.copy_file(str(header), str(target / "cuda" / header.name))


def write_ninja_file(path: Path, compiler: list[str], ext: Extension, target: Path) -> None:
    """Write the build graph: one object per source, one shared library."""
    import pybind11
    from ninja import ninja_syntax

    includes = [f"-I{sysconfig.get_path('include')}", f"-isystem{pybind11.get_include()}"]
    flags = [*CXX_FLAGS, *includes, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    link_flags = [*shared, *shlex.split(os.environ.get("LDFLAGS", ""))]
    with path.open("w") as file:
        ninja = ninja_syntax.Writer(file, width=120)
        ninja.variable("cxx", shlex.join(compiler))
        ninja.variable("flags", shlex.join(flags).replace("$", "$$"))
        ninja.variable("link_flags", shlex.join(link_flags).replace("$", "$$"))
        ninja.rule("compile", "$cxx -MMD -MF $out.d $flags -c $in -o $out", depfile="$out.d", deps="gcc")
        ninja.rule("link", "$cxx $in $link_flags -o $out")
        objects = []
        for source in map(Path, ext.sources):
            objects.append(str(path.parent / f"{source.stem}.o"))
            ninja.build(objects[-1], "compile", str(source.resolve()))
        ninja.build(str(target), "link", objects)


def run_ninja(build_dir: Path) -> None:
    """Run ninja in `build_dir`, and say which file failed if one does."""
    import ninja

    jobs = [f"-j{os.environ['MAX_JOBS']}"] if os.environ.get("MAX_JOBS") else []
    done = subprocess.run([str(Path(ninja.BIN_DIR, "ninja")), *jobs], cwd=build_dir, check=False)
    if done.returncode:
        raise PlatformError(
            f"the C++ extension of commlib did not compile; the compiler's message is above ({build_dir})"
        )


sources = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
headers = sorted(str(path) for path in Path("csrc").glob("*.h"))
setup(
    ext_modules=[Extension("commlib._native", sources, depends=headers)],
    cmdclass={"build_ext": NinjaBuildExt, "build_py": BuildPyWithCudaSources},
)
