"""Presets: settings that were measured together with an optimizer."""

import dataclasses

import pytest
import torch
from torch import nn

from commlib import algorithms
from commlib.algorithms import PRESETS, DiLoCo
from commlib.algorithms.auto import Auto
from commlib.algorithms.known import LOSES, known_losses, measured
from commlib.arguments import described
from commlib.engine import optimizers
from commlib.errors import ConfigError
from commlib.network import presets
from commlib.reports.advice import network_advice
from commlib.simulation import compare
from commlib.tuner import candidates_of
from tests.unit.test_compare_screens import NETWORK, OPTIONS, SMALL, shown


def both():
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    return optimizers.resolve([torch.optim.Muon([matrix]), torch.optim.AdamW([vector])])


def test_a_preset_is_recorded_as_its_algorithm_and_options():
    created = algorithms.create("diloco_muon")
    same = algorithms.create(DiLoCo(period=30, outer_lr=1.0, outer_momentum=0.5, codec="int4"))
    assert (created.name, created.arguments) == ("diloco", same.arguments)
    assert described(created) == described(same)
    assert (created.optimizer_kind, same.optimizer_kind) == ("muon", None)
    assert (created.preset, same.preset) == ("diloco_muon", "")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_was_measured_with_its_optimizer_and_keeps_up(name):
    created = algorithms.create(name)
    known = measured(created, "adam")
    assert known is not None
    assert (known.optimizer, known.baseline) == ("muon", "allreduce(optimizer=muon)")
    assert known.loss <= LOSES


def test_a_preset_takes_no_options_and_its_name_is_suggested():
    with pytest.raises(ConfigError, match=r"'diloco_muon' is a preset, which takes no options: DiLoCo\(period=30, "):
        compare.candidates("diloco_muon(period=10)")
    with pytest.raises(ConfigError, match=r"'diloco_muon' is a preset, which takes no options: DiLoCo\(period=30, "):
        algorithms.create("diloco_muon(period=10)")
    with pytest.raises(ConfigError, match="Did you mean 'diloco_muon'") as caught:
        algorithms.create("diloco_moun")
    assert "bytegrad" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"'xyz' is not registered. Registered: allreduce, .*; presets: diloco_muon"):
        algorithms.create("xyz")


@pytest.mark.parametrize("name", ["diloco(period=10)", "diloco( period=10 )", "diloco (period=10)"])
def test_options_in_a_name_belong_to_the_class(name):
    with pytest.raises(ConfigError, match=r"Pass them to the class: algorithm=commlib.algorithms.DiLoCo\(period=10\)"):
        algorithms.create(name)


def test_auto_considers_presets_with_their_optimizer_only():
    names = [algorithms.create(name).name for name in PRESETS]
    assert [each.name for each in candidates_of(Auto(allow="any"), both()) if each.optimizer_kind] == names
    adamw = torch.optim.AdamW([torch.zeros(1)])
    assert not [each for each in candidates_of(Auto(allow="any"), adamw) if each.optimizer_kind]


def test_compare_shows_presets_for_workloads_with_adamw():
    adam = dataclasses.replace(SMALL, optimizer="adam")
    chosen = compare.candidates("all", optimizer="adam")
    assert not PRESETS.keys() & compare.candidates("all", optimizer="sgd").keys()
    comparison = compare.compare(adam, NETWORK, presets.device("v100"), chosen, OPTIONS)
    rows = {row.algorithm: row for row in comparison.rows}
    for name in PRESETS:
        assert rows[name].as_dict()["optimizer"] == "muon"
        assert (rows[name].mark, rows[name].loss) == ("", measured(chosen[name], "adam").loss)
    assert rows["diloco"].as_dict()["optimizer"] == "adam"
    text = " ".join(line.strip() for line in shown(comparison, 80))
    assert "diloco_muon: DiLoCo(period=30, outer_lr=1.0, outer_momentum=0.5, codec='int4')" in text
    assert "Muon for the hidden matrices, whose own computation is not simulated." in text
    (only,) = [row for row in comparison.rows if row.algorithm == "diloco_muon"]
    advised = network_advice([dataclasses.replace(comparison, rows=(only,))])
    assert "diloco_muon (any, with Muon, whose own time is not included, loss +3%)" in advised


def test_results_with_muon_take_precedence_over_those_with_adamw():
    """With AdamW the same outer settings lose."""
    of_muon = {known.algorithm for known in known_losses() if known.optimizer == "muon"}
    assert of_muon >= {"diloco", "streaming_diloco", "sparse_loco"}
    assert measured(algorithms.create("bytegrad"), "muon").optimizer == "adam"
    plain = algorithms.create(DiLoCo(period=30, outer_lr=1.0, outer_momentum=0.5))
    assert measured(plain, "muon").optimizer == "muon"  # without the codec it sends more
    coarse = algorithms.create(DiLoCo(period=30, outer_lr=1.0, outer_momentum=0.5, codec="onebit"))
    found = measured(coarse, "muon")
    assert found is None or found.optimizer == "adam"
