"""Fitting of a network and a transport to measured collectives.

The fastest of the small collectives gives the latency of a message. The line through two large ones gives the rate of
each verb, and the fastest verb gives the bandwidth. If bytes travel while messages wait (on few cores, for the
scheduling of processes), the line starts below the time of a small collective. The difference is hidden latency. The
remaining time of a verb is stored in the profile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from commlib.network.model import Device, Network
from commlib.simulation.collectives import Links, TransportProfile
from commlib.transport.base import Request

#: Range of the search for a rate, in bytes per second, and number of bisections of its logarithm.
_LEAST_RATE, _ENDLESS = 1e3, 1e15
_BISECTIONS = 60
_NO_DEVICE = Device("none", memory_gbytes_s=1.0, tflops={"fp32": 1.0})


@dataclass(frozen=True)
class VerbTimes:
    """Measurements of a verb.

    Attributes:
        small: A request with hardly any bytes.
        small_s: Seconds of the small request.
        whole: A large request.
        whole_s: Seconds of the large request.
        fixed_s: Seconds of the large request that do not grow with its bytes; at most `small_s`.
    """

    small: Request
    small_s: float
    whole: Request
    whole_s: float
    fixed_s: float


def fitted(
    network: Network, profile: TransportProfile, times: Mapping[str, VerbTimes]
) -> tuple[Network, TransportProfile]:
    """Return the network and the profile with which simulated collectives take the measured times.

    Args:
        network: The network; bandwidth and latency between nodes are replaced.
        profile: The communication library.
        times: Measurements of each verb.
    """
    plain = dataclasses.replace(profile, op_us=0.0, efficiency_of={}, hidden_of={}, op_us_of={})

    def seconds(request: Request, latency_s: float, rate: float, profile: TransportProfile = plain) -> float:
        at = dataclasses.replace(network, latency_us=latency_s * 1e6, bandwidth_gbps=rate * 8e-9, efficiency=1.0)
        return Links(at, profile, _NO_DEVICE).cost(request).seconds

    delays = {verb: seconds(of.small, 1.0, _ENDLESS) for verb, of in times.items()}
    latency_s = min(of.small_s / delays[verb] for verb, of in times.items())
    waits_s = {verb: count * latency_s for verb, count in delays.items()}
    # By rounding, 3 * (x / 3) may exceed x.
    own_s = {verb: max(0.0, of.small_s - waits_s[verb]) for verb, of in times.items()}
    hidden = {verb: min(1.0, (of.small_s - of.fixed_s) / waits_s[verb]) for verb, of in times.items()}
    hiding = dataclasses.replace(plain, hidden_of=hidden)
    rates = {
        verb: _where(
            lambda rate, of=of: seconds(of.whole, latency_s, rate, hiding),
            max(of.whole_s - own_s[verb], of.whole_s / 2),
        )
        for verb, of in times.items()
    }
    best = max(rates.values())
    return (
        dataclasses.replace(network, latency_us=latency_s * 1e6, bandwidth_gbps=best * 8e-9),
        dataclasses.replace(
            profile,
            efficiency_of={verb: rate / best for verb, rate in rates.items()},
            hidden_of=hidden,
            op_us_of={verb: 1e6 * own for verb, own in own_s.items()},
        ),
    )


def _where(seconds: Callable[[float], float], target_s: float) -> float:
    """Return the rate in bytes per second at which a falling function is `target_s`, by bisection."""
    low, high = _LEAST_RATE, _ENDLESS
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > target_s else (low, middle)
    return low
