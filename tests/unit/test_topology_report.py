"""`commlib topology`: its figures against plain iteration, and its drawings."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from commlib.cli import app
from commlib.primitives.topology import TOPOLOGIES, Graph, Ring, create
from commlib.reports.topology import decay, steps_to


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
@pytest.mark.parametrize("world_size", [1, 2, 5, 16])
def test_the_decay_is_that_of_random_starts_and_the_steps_are_counted_on_it(name: str, world_size: int) -> None:
    topology = create(name)
    starts = np.random.default_rng(3).standard_normal((world_size, 5_000))
    values = starts - starts.mean(axis=0)
    first = max(np.linalg.norm(values), 1e-300)
    for step, expected in enumerate(itertools.islice(decay(topology, world_size), 6)):
        assert np.linalg.norm(values) / first == pytest.approx(expected if world_size > 1 else 0.0, rel=0.05, abs=1e-6)
        values = topology.matrix(world_size, step) @ values
    for fraction in (0.5, 0.01, 1e-6):
        counted = next(step for step, left in enumerate(decay(topology, world_size)) if left <= fraction)
        assert steps_to(topology, world_size, fraction) == counted


def test_many_steps_are_found_without_taking_them() -> None:
    """A ring of 200 ranks: the slowest mode alone is left in the end, so the count follows from the gap."""
    ring = Ring()
    rho = 1 - ring.spectral_gap(200)
    needed = steps_to(ring, 200, 1e-9)
    assert needed is not None
    alone = np.sqrt(2 / 199)  # two of 199 directions shrink by rho
    assert alone * rho**needed <= 1e-9 < alone * rho ** (needed - 1)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["topology", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["ring", "one_peer_exponential", "random_matching"])
def test_the_command_prints_and_draws(name: str, tmp_path: Path) -> None:
    path = tmp_path / "drawn.png"
    code, output = run(name, "--ranks", "6", "--plot", str(path))
    assert code == 0, output
    assert f"{create(name).spectral_gap(6):.4g}" in output
    assert f"{steps_to(create(name), 6, 0.01)} steps" in output
    assert "0.333  0.333" in output or name != "ring"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_is_said() -> None:
    for arguments, words in [
        (("rings",), "got 'rings'"),
        (("ring", "--ranks", "0"), "expected a number above 0, got 0"),
        (("ring", "--plot", "/nowhere/at/all.png"), "all.png"),
        (("ring", "--plot", "a.unknown"), "unknown"),
    ]:
        code, output = run(*arguments)
        assert code == 2
        assert words in " ".join(output.replace("│", " ").split())


def test_a_large_graph_has_no_matrix_and_no_end() -> None:
    _, output = run("ring", "--ranks", "100")
    assert len(output.splitlines()) == 4
    assert steps_to(Graph(tuple((k, k + 1) for k in range(19))), 20, 1e-3) is not None
