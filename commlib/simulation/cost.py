"""The cost of training on rented nodes: prices, and amounts per step, per million samples and for a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commlib.errors import ConfigError
from commlib.network.model import Network, Workload
from commlib.simulation.simulator import Result

#: The smallest and the largest price or budget.
_AMOUNTS = (1e-9, 1e12)


@dataclass(frozen=True)
class Price:
    """The price of a network's nodes. Amounts are in the currency of the price, whichever it is.

    Attributes:
        per_hour: Price of one node for one hour, with its devices and its share of the network.
        budget: The amount to spend; None without a budget.
    """

    per_hour: float
    budget: float | None = None


@dataclass(frozen=True)
class Cost:
    """The cost of training with one algorithm.

    Attributes:
        per_step: Cost of a step on all nodes.
        per_million: Cost of a million tokens, or of a million samples if the workload does not count tokens.
        steps: Number of whole steps that the budget pays; None without a budget.
        units: Number of tokens or samples in these steps; None without a budget.
    """

    per_step: float
    per_million: float
    steps: int | None = None
    units: float | None = None


def unit(workload: Workload) -> str:
    """Return the unit in which a workload counts its data: "tokens" or "samples"."""
    return "tokens" if workload.tokens_per_sample else "samples"


def cost(workload: Workload, network: Network, result: Result, price: Price) -> Cost:
    """Return the cost of training as in a result of `simulate`. Every node of the network is paid for all the time."""
    per_step = price.per_hour * network.nodes / 3600 * result.step_s
    units_per_step = result.samples_per_s * result.step_s * (workload.tokens_per_sample or 1)
    per_million = per_step / units_per_step * 1e6
    if price.budget is None:
        return Cost(per_step, per_million)
    steps = math.floor(price.budget / per_step)
    return Cost(per_step, per_million, steps, steps * units_per_step)


def prices(text: str | None, networks: Sequence[str], budget: float | None = None) -> dict[str, Price]:
    """Return the prices of networks by name; none without a text.

    Args:
        text: The price of a node per hour on every network, as in "2.5", or one for each, as in
            "10gbps=2.5,100gbps=4.1".
        networks: Names of the networks.
        budget: The amount to spend.

    Raises:
        ConfigError: An amount is not a number from 1e-9 to 1e12, a network does not have one price, or there is a
            budget but no price.
    """
    if text is None:
        if budget is not None:
            raise ConfigError("--budget: expected --price-per-hour with it")
        return {}
    if budget is not None:
        _check(budget, "--budget", f"{budget:g}")
    if "=" not in text:
        return dict.fromkeys(networks, Price(_number(text), budget))
    found: dict[str, Price] = {}
    for entry in text.split(","):
        name, equals, number = (part.strip() for part in entry.partition("="))
        if not equals:
            raise ConfigError(f"--price-per-hour: expected NETWORK=PRICE for each network, got {entry.strip()!r}")
        if name not in networks:
            raise ConfigError(f"--price-per-hour: {name!r} is not compared; expected {', '.join(networks)}")
        if name in found:
            raise ConfigError(f"--price-per-hour: {name} has two prices; expected one")
        found[name] = Price(_number(number), budget)
    if missing := [name for name in networks if name not in found]:
        raise ConfigError(f"--price-per-hour: {', '.join(missing)} has no price in {text!r}; add NETWORK=PRICE")
    return found


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    _check(value, "--price-per-hour", repr(text))
    return value


def _check(value: float, option: str, got: str) -> None:
    least, most = _AMOUNTS
    if not value > 0:
        raise ConfigError(f"{option}: expected an amount above 0, such as 2.5, got {got}")
    if not least <= value <= most:
        raise ConfigError(f"{option}: expected an amount from {least:g} to {most:g}, got {got}")
