"""The files for clusters: manifests for Kubernetes, Dockerfiles."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda")


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTER / name).read_text(encoding="utf-8")))


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return the values of a container's variables, or the paths that they are read from."""
    return {each["name"]: each.get("value") or each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}


def check_container(container: dict[str, Any]) -> None:
    interpreter, script, *_ = container["command"]
    assert interpreter == "python"
    assert (ROOT / script).is_file()
    assert all(isinstance(value, str) for value in variables(container).values())
    assert container["image"].endswith("commlib:cpu")
    assert variables(container)["LOCAL_RANK"] == "0"
    assert int(variables(container)["OMP_NUM_THREADS"]) == int(container["resources"]["requests"]["cpu"])


def test_the_indexed_job_numbers_its_ranks_and_names_the_first_one():
    service, job = manifests("kubernetes_job.yaml")
    name, spec = job["metadata"]["name"], job["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert (service["spec"]["clusterIP"], service["spec"]["selector"]) == ("None", {"job-name": name})
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    check_container(container)
    found = variables(container)
    assert int(found["WORLD_SIZE"]) == spec["completions"] == spec["parallelism"]
    assert found["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert found["RANK"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert 1024 < int(found["MASTER_PORT"]) < 32768  # below the ports that the kernel picks


def test_the_job_of_the_training_operator_leaves_the_ranks_to_it():
    (job,) = manifests("kubernetes_pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    assert replicas["Worker"]["replicas"] >= 1
    for each in replicas.values():
        assert each["restartPolicy"] == "Never"
        (container,) = each["template"]["spec"]["containers"]
        check_container(container)
        assert container["name"] == "pytorch"
        assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 23456}]
        assert not variables(container).keys() & {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}


def instructions(name: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile, each with its arguments."""
    text = re.sub(r"^#.*\n", "", (CLUSTER / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, arguments = line.partition(" ")
            yield word, arguments


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_pins_its_packages_and_does_not_run_as_root(name: str) -> None:
    found = list(instructions(name))
    runs = [arguments for word, arguments in found if word == "RUN"]
    assert any(word == "ENV" and "PIP_BUILD_CONSTRAINT=constraints.txt" in arguments for word, arguments in found)
    assert all("--constraint constraints.txt" in each for each in runs if "pip install" in each)
    assert [word for word, _ in found][-3:] == ["USER", "RUN", "CMD"]
    sources = [shlex.split(each)[:-1] for word, each in found if word == "COPY" and "--from" not in each]
    assert all((ROOT / path).exists() for paths in sources for path in paths)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed afterwards: the environments take a gigabyte."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_image_work_in_new_environments(folder: Path) -> None:
    """Run the Dockerfile's instructions, except those that change the machine: apt-get and useradd."""
    stage, environment, workdir = folder, dict(os.environ), folder
    number = 0
    for word, arguments in instructions("Dockerfile.cpu"):
        if word == "FROM":
            stage, number = folder / f"stage{number}", number + 1
            venv.create(stage / "venv", with_pip=True)
            environment = {**os.environ, "PATH": f"{stage / 'venv' / 'bin'}:{os.environ['PATH']}"}
            for name in ("PYTHONPATH", "RES_OPTIONS"):  # RES_OPTIONS: pip needs the name server
                environment.pop(name, None)
        elif word == "WORKDIR":
            workdir = stage / arguments.strip("/")
            workdir.mkdir()
        elif word == "ENV":  # the machine's own index of packages applies
            environment |= {k: v for k, v in (each.split("=", 1) for each in arguments.split()) if "INDEX" not in k}
        elif word == "COPY":
            copy(arguments, folder / "stage0", workdir)
        elif word == "RUN" and not arguments.startswith(("apt-get", "useradd")):
            done = subprocess.run(
                ["sh", "-ec", arguments], cwd=workdir, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    ranks = "torchrun --standalone --nproc_per_node 2 examples/train_digits.py --epochs 1 --algorithm bytegrad"
    trained = subprocess.run(
        shlex.split(ranks), cwd=workdir, env=environment, capture_output=True, text=True, check=False
    )
    assert "epoch   1" in trained.stdout, trained.stderr
    assert trained.returncode == 0


def copy(arguments: str, build: Path, workdir: Path) -> None:
    """Copy files as COPY does, from the checkout or from the first stage."""
    *paths, target = shlex.split(arguments)
    source = ROOT
    if paths[0] == "--from=build":
        source, paths = build, [path.strip("/") for path in paths[1:]]
    for path in paths:
        if (source / path).is_dir():
            skipped = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(source / path, workdir / target, ignore=skipped)
        else:
            shutil.copy(source / path, workdir / target)
