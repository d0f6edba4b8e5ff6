"""Which of the candidates `auto` takes."""

import pytest
import torch

from commlib import algorithms
from commlib.algorithms.auto import Auto
from commlib.tuner import CANDIDATES, TOLERANCE, candidates_of, preferred

OWN = [algorithms.create(name) for name in CANDIDATES]
SLOW = dict.fromkeys(CANDIDATES, 1.0)


@pytest.mark.parametrize(
    ("predicted_s", "chosen"),
    [
        ({"powersgd": 0.320, "signsgd": 0.320 * (1 + TOLERANCE) + 1e-6}, "powersgd"),  # faster than the others
        ({"powersgd": 0.320, "signsgd": 0.322}, "signsgd"),  # of equals the first listed
        ({"topk": 0.320, "powersgd": 0.321, "bytegrad": 0.325}, "bytegrad"),  # the most exact
        ({"decentralized": 0.320, "local_sgd": 0.318, "topk": 0.321}, "topk"),
        ({"async_averaging": 0.320}, "async_averaging"),
        ({}, "allreduce"),
    ],
)
def test_of_candidates_that_are_equally_fast_the_most_exact_and_then_the_first_is_taken(predicted_s, chosen):
    assert preferred(OWN, {**SLOW, **predicted_s}) == chosen


def test_the_order_of_candidates_is_the_users():
    first, second = algorithms.create("topk"), algorithms.create("signsgd")
    assert preferred([first, second], {"topk": 0.321, "signsgd": 0.320}) == "topk"
    assert preferred([second, first], {"topk": 0.320, "signsgd": 0.321}) == "signsgd"


@pytest.mark.parametrize(("momentum", "found"), [(0.9, ["allreduce"]), (0.0, ["allreduce", "dgc"])])
def test_an_algorithm_with_momentum_is_no_candidate_beside_an_optimizer_with_it(momentum, found):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=momentum)
    auto = Auto(candidates=["allreduce", "dgc"], allow="compensated")
    assert [each.name for each in candidates_of(auto, optimizer)] == found
