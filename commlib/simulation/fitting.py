"""A network and a transport such that the simulator's collectives take what was measured of real ones.

The quickest of the small ones gives the latency of a message, the line through two large ones the rate of each verb,
and the fastest of them the bandwidth. That line begins below what a small one takes where bytes travel while messages
wait (on few cores, for the processes' turns): that part of the latency is hidden. What verbs take beside it is the
profile's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from commlib.network.model import Device, Network
from commlib.simulation.collectives import Links, TransportProfile
from commlib.transport.base import Request

#: Bytes a second between which a rate is looked for, and in how many halvings of their ratio.
_LEAST_RATE, _ENDLESS = 1e3, 1e15
_BISECTIONS = 60
_NO_DEVICE = Device("none", memory_gbytes_s=1.0, tflops={"fp32": 1.0})


@dataclass(frozen=True)
class VerbTimes:
    """What was measured of a verb.

    Attributes:
        small: A request with hardly any bytes.
        small_s: Seconds of it.
        whole: A large one.
        whole_s: Seconds of it.
        fixed_s: Of those, what does not grow with the bytes; at most `small_s`.
    """

    small: Request
    small_s: float
    whole: Request
    whole_s: float
    fixed_s: float


def fitted(
    network: Network, profile: TransportProfile, times: Mapping[str, VerbTimes]
) -> tuple[Network, TransportProfile]:
    """Return network and profile with what makes the simulator's collectives take what was measured.

    Args:
        network: All but bandwidth and latency between nodes.
        profile: How the library carries collectives out.
        times: Of each verb.
    """
    plain = dataclasses.replace(profile, op_us=0.0, efficiency_of={}, hidden_of={}, op_us_of={})

    def seconds(request: Request, latency_s: float, rate: float, profile: TransportProfile = plain) -> float:
        at = dataclasses.replace(network, latency_us=latency_s * 1e6, bandwidth_gbps=rate * 8e-9, efficiency=1.0)
        return Links(at, profile, _NO_DEVICE).cost(request).seconds

    delays = {verb: seconds(of.small, 1.0, _ENDLESS) for verb, of in times.items()}
    latency_s = min(of.small_s / delays[verb] for verb, of in times.items())
    waits_s = {verb: count * latency_s for verb, count in delays.items()}
    # Rounding makes 3 * (x / 3) more than x at times.
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
    """Return the rate in bytes a second at which a falling function of it is `target_s`, by bisection."""
    low, high = _LEAST_RATE, _ENDLESS
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > target_s else (low, middle)
    return low
