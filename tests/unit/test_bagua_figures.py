"""The simulator against BAGUA's published figures, and the fitted model between and beyond them."""

import functools
import itertools

import pytest

from commlib.errors import ConfigError
from commlib.simulation import bagua
from tests.thin import fast

IMPOSSIBLE = bagua.impossible()
CELLS = [cell for cell in bagua.PUBLISHED if cell not in IMPOSSIBLE]
WITH_LATENCY = bagua.PUBLISHED_WITH_LATENCY
#: Cells for the fast part: all systems at one bandwidth.
CHOSEN = [cell for cell in CELLS if (cell.workload, cell.bandwidth_gbps) == ("vgg16", 100.0)]


def name_of(cell):
    return f"{cell.workload}-{cell.bandwidth_gbps:g}-{cell.system}"


@functools.cache
def step_s(system, workload, bandwidth_gbps, latency_us=None):
    return bagua.predict(system, workload, bandwidth_gbps, latency_us).step_s


def test_what_moves_more_bytes_than_the_link_carries():
    left_out = {(cell.workload, cell.bandwidth_gbps, cell.system) for cell in IMPOSSIBLE}
    assert left_out == {("bert-large", 8.0, "low_precision_decentralized")}


@pytest.mark.parametrize("cell", fast(CELLS, *CHOSEN), ids=name_of)
def test_within_15_percent_of_the_published_step(cell):
    assert step_s(cell.system, cell.workload, cell.bandwidth_gbps) == pytest.approx(cell.step_s, rel=0.15)


@pytest.mark.slow  # the steps are compared, too
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.system != "ddp"], ids=name_of)
def test_within_15_percent_of_the_published_ratio_to_ddp(cell):
    [ddp] = [
        other
        for other in CELLS
        if (other.workload, other.bandwidth_gbps, other.system) == (cell.workload, cell.bandwidth_gbps, "ddp")
    ]
    published = cell.step_s / ddp.step_s
    ratio = step_s(cell.system, cell.workload, cell.bandwidth_gbps) / step_s("ddp", cell.workload, cell.bandwidth_gbps)
    assert ratio == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize("cell", fast(WITH_LATENCY, WITH_LATENCY[-1]), ids=lambda cell: cell.system)
def test_within_20_percent_and_the_reading_error_of_the_published_ratio_to_ddp_at_5_ms(cell):
    ddp = WITH_LATENCY[0]
    published = cell.step_s / ddp.step_s
    ratio = bagua.predict_figure(cell).step_s / bagua.predict_figure(ddp).step_s
    # Both figures were read off a plot.
    assert ratio == pytest.approx(published, rel=0.20 + bagua.READING_ERROR)


@pytest.mark.slow
def test_latency_changes_the_order_of_systems_as_it_was_measured():
    published = sorted(WITH_LATENCY, key=lambda cell: cell.step_s)
    simulated = sorted(WITH_LATENCY, key=lambda cell: bagua.predict_figure(cell).step_s)
    # Decentralized and ByteGrad are 12 % apart as published, and 2 % as simulated, the other way.
    assert {cell.system for cell in simulated[3:5]} == {"decentralized", "bytegrad"}
    alike = [cell for cell in simulated if cell.system != "decentralized"]
    assert alike == [cell for cell in published if cell.system != "decentralized"]


@pytest.mark.parametrize("added_us", fast([1000.0, 2000.0, 5000.0], 1000.0))
def test_bytegrad_is_twice_as_fast_as_ddp_with_latency(added_us):
    """Measured about 2 times, with 1, 2 and 5 ms."""
    at = 25.0 + added_us
    speedup = step_s("ddp", "bert-large", 100.0, at) / step_s("bytegrad", "bert-large", 100.0, at)
    assert 1.8 < speedup < 2.7


def test_a_millisecond_costs_decentralized_training_half_a_second():
    steps = [step_s("decentralized", "bert-large", 100.0, 25.0 + added) for added in (1000.0, 5000.0)]
    assert (steps[1] - steps[0]) / 4 == pytest.approx(0.5, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "bandwidth_gbps", "misplaced"),
    # ByteGrad at 100 Gbit/s on BERT-large is published as slower than decentralized, though it moves a quarter of the
    # bytes and the model knows no reason for it (docs/results.md).
    [("vgg16", 100.0, set()), ("bert-large", 8.0, set()), ("bert-large", 100.0, {"bytegrad"})],
)
def test_order_of_the_systems(workload, bandwidth_gbps, misplaced):
    cells = [
        cell
        for cell in CELLS
        if (cell.workload, cell.bandwidth_gbps) == (workload, bandwidth_gbps) and cell.system not in misplaced
    ]
    published = [cell.system for cell in sorted(cells, key=lambda cell: cell.step_s)]
    simulated = [cell.system for cell in sorted(cells, key=lambda cell: step_s(cell.system, workload, bandwidth_gbps))]
    assert simulated == published


@pytest.mark.parametrize("system", fast(bagua.SYSTEMS, "ddp"))
def test_more_bandwidth_never_hurts_and_more_latency_never_helps(system):
    workload = "vgg16"
    by_bandwidth = [step_s(system, workload, bandwidth) for bandwidth in (1.0, 8.0, 30.0, 100.0)]
    by_latency = [step_s(system, workload, 25.0, latency) for latency in (10.0, 200.0, 2000.0)]
    # Asynchronous rounds become more frequent on a faster network, and each takes its copies' time.
    slack = 1.01 if system == "async" else 1.0 + 1e-9
    assert all(after <= slack * before for before, after in itertools.pairwise(by_bandwidth))
    assert all(before <= slack * after for before, after in itertools.pairwise(by_latency))


def test_far_below_the_ceiling_bytes_decide():
    trained = bagua.workload("bert-large")
    sent = bagua.SYSTEMS["ddp"].passes * trained.nbytes
    expected = trained.forward_s + trained.optimizer_s + sent / (1e9 / 8 * 1448 / 1538)
    assert step_s("ddp", "bert-large", 1.0) == pytest.approx(expected, rel=0.01)


def test_bert_large_is_counted_as_in_the_paper():
    assert bagua.workload("bert-large").numel / 1e6 == pytest.approx(302.2, abs=0.2)


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="bytegrad"):
        bagua.predict("bytegrd", "vgg16", 10.0)
    with pytest.raises(ConfigError, match="bert-large"):
        bagua.predict("bytegrad", "bert", 10.0)
