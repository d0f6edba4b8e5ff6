"""Checks of `commlib doctor`: versions, backends, instruction sets, devices, and fixes for missing components."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.distributed as dist

from commlib.errors import CommlibError
from commlib.installation import DISTRIBUTION, reinstall

Status = Literal["ok", "absent", "broken"]
"""`ok`: available; `absent`: not available, but only optional features need it; `broken`: commlib cannot work."""


_STYLES = {"ok": "", "absent": "yellow", "broken": "bold red"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: The group of the finding, such as "versions".
        name: The component that was checked.
        status: Whether it is available.
        value: A description of the result.
        fix: The action to take, or "" if none is needed.
    """

    topic: str
    name: str
    status: Status
    value: str
    fix: str = ""


def examine() -> list[Finding]:
    """Run all checks and return the findings, in display order.

    A check that raises an unexpected exception becomes a finding itself, so that the others are still shown.
    """
    findings: list[Finding] = []
    for check in _CHECKS:
        try:
            findings.extend(check())
        except Exception as error:
            findings.append(Finding("doctor", check.__name__.strip("_"), "absent", f"could not be checked: {error!r}"))
    return findings


def exit_code(findings: list[Finding]) -> int:
    """Return 1 if any finding is `broken`, otherwise 0."""
    return int(any(finding.status == "broken" for finding in findings))


def to_json(findings: list[Finding]) -> str:
    """Return the findings as a JSON object: `{"ok": bool, "findings": [{topic, name, status, value, fix}]}`."""
    rows = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"ok": exit_code(findings) == 0, "findings": rows}, indent=2)


def show(findings: list[Finding]) -> None:
    """Print the findings as a table, followed by the fixes."""
    from commlib.reports import tables

    console = tables.console()
    names = max((len(finding.name) for finding in findings), default=0)
    last_topic = ""
    for finding in findings:
        if finding.topic != last_topic:
            tables.show([finding.topic], console, "bold")
        last_topic = finding.topic
        line = f"  {finding.name:{names}}  {finding.status:6}  {finding.value}"
        column = names + 12
        has_room = all(len(word) <= console.width - column for word in finding.value.split())
        lines = tables.wrapped(line, console.width, " " * column if has_room else "    ")
        tables.show(lines, console, _STYLES[finding.status])
    for finding in findings:
        if finding.fix:
            tables.show(tables.wrapped(f"{finding.name}: {finding.fix}", console.width, "  "), console)


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("versions", "torch", "ok", torch.__version__)  # includes the build
    for name, distribution, source in (("commlib", DISTRIBUTION, "."), ("numpy", "numpy", "numpy")):
        try:
            yield Finding("versions", name, "ok", importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("versions", name, "absent", "not an installed package", f"Install it: pip install {source}")


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        fix = "Install a torch build that has torch.distributed; commlib communicates through it."
        yield Finding("backends", "torch.distributed", "broken", "not in this torch", fix)
        return
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    uses = {"gloo": "CPU tensors", "nccl": "CUDA tensors", "mpi": "not needed"}
    for name, is_there in backends.items():
        value = "available" if is_there else "not in this torch"
        yield Finding("backends", name, "ok" if is_there else "absent", f"{value} ({uses[name]})")


def _extension() -> Iterator[Finding]:
    from commlib.kernels import native

    try:
        supported, chosen = native.supported_isas(), native.isa()
    except CommlibError as error:
        yield Finding("kernels", "C++ extension", "broken", str(error), _extension_fix(str(error)))
        return
    yield Finding("kernels", "C++ extension", "ok", str(native.load().__file__))
    forced = os.environ.get(native.FORCE_ISA_VARIABLE)
    value = f"{chosen} of {', '.join(supported)}" + (f" ({native.FORCE_ISA_VARIABLE}={forced})" if forced else "")
    yield Finding("kernels", "instruction set", "ok", value)


def _extension_fix(message: str) -> str:
    if "COMMLIB_FORCE_ISA" in message:
        return "Unset COMMLIB_FORCE_ISA, or set it to an instruction set of this machine."
    return f"Install a C++17 compiler, then commlib again: {reinstall()}"


def _compiler() -> Iterator[Finding]:
    wanted = os.environ.get("CXX", "").split()[:1]
    for name in wanted or ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path:
            yield Finding("kernels", "C++ compiler", "ok", f"{path}: {_first_line([path, '--version'])}")
            return
    fix = "Needed only to build commlib from source. Debian, Ubuntu: apt-get install g++. Or set CXX."
    yield Finding("kernels", "C++ compiler", "absent", "none found", fix)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("devices", "CUDA", "absent", _why_no_cuda())
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Finding("devices", f"CUDA device {index}", "ok", f"{properties.name}, {capability}, {memory}")


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return f"this torch has CUDA {torch.version.cuda}, but no device or driver was found"


def _cuda_kernels() -> Iterator[Finding]:
    from commlib.kernels import cuda

    try:
        major, minor = cuda.nvrtc_version()
        known = cuda.supported_architectures()
    except CommlibError as error:
        fix = (
            "Codecs on CUDA tensors need it; the message above says what to install."
            if torch.cuda.is_available()
            else ""
        )
        yield Finding("devices", "CUDA kernels", "absent", str(error), fix)
        return
    value = f"NVRTC {major}.{minor}, for sm_{min(known)} to sm_{max(known)} (compiles without a device too)"
    yield Finding("devices", "CUDA kernels", "ok", value)
    cached = list(cuda.cache_dir().glob("*.cubin"))
    yield Finding("devices", "compiled kernels", "ok", f"{len(cached)} in {cuda.cache_dir()} ({cuda.CACHE_VARIABLE})")
    for index in range(torch.cuda.device_count()):
        try:
            architecture = cuda.architecture_for(torch.cuda.get_device_capability(index), known)
        except CommlibError as error:
            yield Finding(
                "devices", f"kernels for device {index}", "absent", str(error), "Codecs do not work on this device."
            )
        else:
            yield Finding("devices", f"kernels for device {index}", "ok", f"compiled for {architecture}")


def _cores() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", "cores", "ok", f"{usable} usable of {os.cpu_count()}, {_processor_name()}")
    wanted = os.environ.get("OMP_NUM_THREADS", "not set")
    yield Finding("machine", "threads", "ok", f"torch uses {torch.get_num_threads()} (OMP_NUM_THREADS is {wanted})")


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _emulated_hosts() -> Iterator[Finding]:
    from commlib.emulation import check_latency, check_requirements

    missing = check_requirements()
    if not missing:
        lacking = check_latency()
        latency = f"; latency cannot be emulated, missing: {', '.join(lacking)}" if lacking else ""
        yield Finding(
            "machine", "emulated hosts", "ok", f"root, iproute2 and the kernel features are available{latency}"
        )
        return
    fix = "Needed only for benchmarks on emulated hosts: run as root; Debian, Ubuntu: apt-get install iproute2."
    yield Finding("machine", "emulated hosts", "absent", f"missing: {', '.join(missing)}", fix)


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return (done.stdout or done.stderr).partition("\n")[0]


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _backends,
    _extension,
    _compiler,
    _gpus,
    _cuda_kernels,
    _cores,
    _emulated_hosts,
)
