"""`commlib doctor`: its output, and when it exits with an error."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from commlib import cli, doctor
from commlib.errors import CommlibError
from commlib.kernels import native


def run(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})


def by_name(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def broken_extension(monkeypatch):
    def load():
        raise CommlibError("The compiled extension commlib._native cannot be loaded: no such file.")

    monkeypatch.setattr(native, "load", load)


def test_every_topic_is_there():
    findings = by_name(doctor.examine())
    assert {"python", "torch", "gloo", "nccl", "C++ extension", "C++ compiler", "cores", "emulated hosts"} <= set(
        findings
    )
    assert findings["torch"].value == torch.__version__
    assert findings["instruction set"].value.startswith(native.isa())
    assert not any("could not be checked" in finding.value for finding in findings.values())


def test_table_and_exit_code():
    result = run("doctor")
    assert result.exit_code == 0
    assert torch.__version__ in result.output
    assert native.isa() in result.output


def test_json_holds_the_same_findings():
    result = run("doctor", "--json")
    report = json.loads(result.output)
    assert report["ok"] is True
    assert {row["name"] for row in report["findings"]} == set(by_name(doctor.examine()))
    assert all(row.keys() >= {"topic", "name", "status", "value", "fix"} for row in report["findings"])
    assert {row["status"] for row in report["findings"]} <= {"ok", "absent", "broken"}


def test_a_broken_extension_is_an_error_with_its_fix(broken_extension):
    result = run("doctor")
    assert result.exit_code == 1
    assert "broken" in result.output
    assert "Install a C++17 compiler" in result.output
    assert json.loads(run("doctor", "--json").output)["ok"] is False


def test_a_bad_instruction_set_is_an_error_with_its_fix(monkeypatch):
    monkeypatch.setenv(native.FORCE_ISA_VARIABLE, "sse9")
    native.load.cache_clear()
    extension = by_name(doctor.examine())["C++ extension"]
    monkeypatch.undo()
    native.load.cache_clear()
    assert extension.status == "broken"
    assert "Unset COMMLIB_FORCE_ISA" in extension.fix


def test_a_missing_compiler_is_no_error(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    findings = doctor.examine()
    assert by_name(findings)["C++ compiler"].status == "absent"
    assert by_name(findings)["C++ compiler"].fix
    assert doctor.exit_code(findings) == 0


def test_a_check_that_fails_is_shown_and_the_others_too(monkeypatch):
    def _strange():
        raise OSError("out of luck")
        yield

    monkeypatch.setattr(doctor, "_CHECKS", (_strange, *doctor._CHECKS))
    findings = by_name(doctor.examine())
    assert "out of luck" in findings["strange"].value
    assert "torch" in findings


def test_square_brackets_are_shown_as_they_are():
    doctor.show([doctor.Finding("versions", "x[0]", "absent", "[red]?", "pip install '.[cuda13]'")])


def test_help_does_not_import_torch():
    code = "import sys; from commlib import cli; from typer.main import get_command; get_command(cli.app); "
    code += "sys.exit('torch.distributed.run' in sys.modules or 'commlib.doctor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_can_be_run_as_the_command():
    done = subprocess.run([sys.executable, "-m", "commlib", "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["compare", "--list"]])
def test_output_that_cannot_be_written_is_an_error_of_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "commlib", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "Error: [Errno 28] No space left on device\n"
