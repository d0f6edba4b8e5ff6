"""The straggler benchmark: its figures as computed from the counters of the ranks, and its picture."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import straggler  # noqa: E402


def result(fault: str) -> dict:
    rates = {"none": [10.0, 20.0, 10.0], "allreduce": [5.0, 5.0, 5.0], "async_sgd": [9.0, 19.0, 9.5]}
    rows = [
        {"system": system, "repetition": idx, "steps_per_s": rate}
        for system, own in rates.items()
        for idx, rate in enumerate(own)
    ]
    return {"fault": fault, "systems": list(rates), "rows": rows}


def test_ratios_are_taken_repetition_by_repetition() -> None:
    _, allreduce, async_sgd = straggler.summarize(result("slow"))
    assert (allreduce["ratio"], allreduce["ratio_lo"], allreduce["ratio_hi"]) == (0.5, 0.25, 0.5)
    assert async_sgd["ratio"] == pytest.approx(0.95)
    assert async_sgd["steps_per_s"] == 9.5


def test_the_picture_is_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    straggler.plot(str(tmp_path / "out.png"), [json.loads(json.dumps(result(fault))) for fault in ("slow", "stop")])
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_kept_results_are_shown_without_measuring(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(result("slow")))
    monkeypatch.setattr(straggler, "measure", lambda _: pytest.fail("nothing is to be measured"))
    monkeypatch.setattr(sys, "argv", ["straggler.py", str(path)])
    straggler.main()
    shown = capsys.readouterr().out
    assert "3 times slower" in shown
    assert "0.500" in next(line for line in shown.splitlines() if "allreduce" in line)
