"""One rank of test_wire_bytes.py, on an emulated host: trains with every algorithm and counts the sent bytes.

Rank 0 prints one JSON object: by algorithm the bytes of a step by the interface's counter and by `commlib.stats`, and
by verb the bytes of a collective beyond its formula: handshakes, headers, acknowledgements.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib.optim import FrozenVarianceAdam

WARM_UP, STEPS, CALLS = 3, 3, 40
WIDTH, LAYERS = 1024, 4
PROBE = 2048  # elements per rank of the collectives whose messages are counted
ALGORITHMS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "bytegrad": {},
    "qsgd": {"bits": 4},
    "ef_quantized": {},
    "signsgd": {},
    "topk": {},
    "randomk": {},
    "dgc": {"ratio": 0.01},
    "demo": {},
    "ok_topk": {},
    "powersgd": {},
    "onebit_adam": {"warmup_steps": 1},
    "qadam": {"warmup_steps": 1},
    "sparse_loco": {"period": 1},
}

_kept: list[nn.Module] = []  # Communicators are taken down at exit, when all ranks are done.


def sent_bytes() -> int:
    """Return the bytes that this host's interface has sent, including headers."""
    table = pathlib.Path("/proc/self/net/dev").read_text()
    found = re.search(rf"^\s*{os.environ['GLOO_SOCKET_IFNAME']}:(.*)$", table, re.MULTILINE)
    assert found is not None
    return int(found[1].split()[8])


def sent_by(work: Callable[[], Any], times: int) -> float:
    """Return the bytes sent by one call of `work`."""
    dist.barrier()
    before = sent_bytes()
    for _ in range(times):
        work()
    sent = sent_bytes() - before
    dist.barrier()
    return sent / times


def measure(name: str, options: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    needs_adam = name in ("onebit_adam", "qadam")
    optimizer = (FrozenVarianceAdam if needs_adam else torch.optim.SGD)(model.parameters(), lr=1e-3)
    algorithm = commlib.algorithms.get(name)(**options)
    commlib.wrap(model, algorithm=algorithm, optimizer=optimizer, bucket_cap_mb=100)
    inputs = torch.randn(2, WIDTH)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    before = commlib.stats(model).wire_bytes
    counted = sent_by(step, STEPS)
    reported = (commlib.stats(model).wire_bytes - before) / STEPS
    _kept.append(model)
    return {"counted": counted, "reported": reported}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    few, own, everyone = torch.ones(2 * LAYERS), torch.ones(PROBE), torch.ones(size * PROBE)
    chunk_bytes = (size - 1) * own.nbytes
    probes: dict[str, tuple[Callable[[], Any], float]] = {
        "flags": (lambda: dist.all_reduce(few), 2 * (size - 1) / size * few.nbytes),
        "all_reduce": (lambda: dist.all_reduce(everyone), 2 * chunk_bytes),
        "all_to_all": (lambda: dist.all_to_all_single(torch.empty_like(everyone), everyone), chunk_bytes),
        "all_gather": (lambda: dist.all_gather(list(everyone.view(size, -1).unbind()), own), chunk_bytes),
    }
    result = {
        "algorithms": {name: measure(name, options) for name, options in ALGORITHMS.items()},
        "messages": {name: sent_by(call, CALLS) - payload for name, (call, payload) in probes.items()},
    }
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
