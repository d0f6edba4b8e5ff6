"""The systems under test: how a name on the command line becomes a model that communicates.

none                                no communication
ddp                                 DistributedDataParallel, at the best of its configurations (found by a race)
ddp@25, ddp(gradient_as_bucket_view=True)@25, ddp@default      one configuration; @ is bucket_cap_mb
ddp:fp16, ddp:bf16, ddp:powersgd    DDP's communication hooks (PowerSGD of rank 2 in a single bucket)
ddp:own_group                       DDP with the resources of a bucket planner, for its memory (see _install_parts)
torchft                             torchft's DistributedDataParallel, where it is installed (torchft_system.py)
torchft:local_sgd(sync_every=8), torchft:diloco(sync_every=50)     its LocalSGD and DiLoCo
commlib:allreduce                   commlib.wrap with planned buckets
bound:bytegrad                      the collectives of an algorithm with the same bytes, without its work (bounds.py)
bound:async_sgd                     its messages, without its work
commlib:allreduce(wire_dtype=bf16)@4                           options of the algorithm, and bucket_cap_mb
hsdp                                FSDP2 in two islands of the ranks, torch's own all-reduce between them
islands:diloco(period=50)           FSDP2 in two islands, an algorithm of commlib between them
fsdp, fsdp(reshard_after_forward=False)      FSDP2 over all ranks
shard(weights=int8,gradients=int8)  FSDP2 over all ranks, and commlib.shard
shardbound(weights=int8,gradients=int8)        its bytes, without its work
commlib:signsgd(feedback=False,lr=1e-4)                        lr is the optimizer's learning rate, for any system
commlib:diloco(period=10,optimizer=muon)                       another optimizer than the command's, for any system
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import threading
from typing import Any

import sharded_system
import torch
from models import OPTIMIZERS, Together
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

_SINGLE_BUCKET_MB = 100_000
_NAME = re.compile(r"(?P<kind>[a-z]+)(:(?P<variant>\w+))?(\((?P<options>[^)]*)\))?(@(?P<cap>[\d.]+|default))?")
_HOOKS = ("fp16", "bf16", "powersgd")
_OWN_GROUP = "own_group"
#: Bytes and number of the scratch buckets whose all-reduces show the cost of communication, as in commlib.
#: (`commlib.engine.planning.cost.SCRATCH_SIZES`; not imported, as commlib's code would count in the memory measured.)
_SCRATCH = ((32 << 10, 8), (256 << 10, 6), (1 << 20, 4), (4 << 20, 2))
_TORCHFT = ("local_sgd", "diloco")
_WRAPPED = ("commlib", "bound", "islands")
_SHARDED = ("fsdp", "shard", "shardbound")
_DDP_CAPS = ("default", "1", "5", "25", "100")

#: By algorithm: the optimizer (of `models.OPTIMIZERS`) that it demands.
OPTIMIZER_OF = {
    **dict.fromkeys(("onebit_adam", "qadam", "zero_one_adam"), "frozen-variance-adam"),
    "dgc": "plain-sgd",
    "demo": "demo",
}


@dataclasses.dataclass(frozen=True)
class System:
    """One way to train.

    Attributes:
        name: As given on the command line.
        kind: "none", "ddp", "torchft", "commlib", "bound", "hsdp", "islands", "fsdp", "shard" or "shardbound".
        variant: DDP's hook, torchft's class or commlib's algorithm; otherwise empty.
        options: Keyword arguments of DistributedDataParallel or of the algorithm.
        cap: bucket_cap_mb as text, "default" for the library's own, empty where none was given.
        lr: The optimizer's learning rate; None is the workload's.
        optimizer: Of `models.OPTIMIZERS`; None is the command's, or the one that the algorithm requires.
    """

    name: str
    kind: str
    variant: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    cap: str = ""
    lr: float | None = None
    optimizer: str | None = None

    @property
    def cap_mb(self) -> float | None:
        """Bucket size in MiB, None for the library's own."""
        return None if self.cap in ("", "default") else float(self.cap)

    @property
    def is_wrapped(self) -> bool:
        """Whether it runs in commlib's engine."""
        return self.kind in _WRAPPED

    @property
    def is_open(self) -> bool:
        """Whether it is DDP with its configuration left to be found."""
        return self == System(self.name, "ddp")


def parse(name: str) -> System:
    """Return the system of that name.

    Raises:
        ValueError: Not a name of the form above.
    """
    match = _NAME.fullmatch(name.strip())
    if not match or match["kind"] not in ("none", "ddp", "torchft", "hsdp", *_WRAPPED, *_SHARDED):
        forms = (
            "none, ddp[:hook], torchft[:variant], hsdp, fsdp, shard or shardbound[(key=value,...)], or commlib, bound "
            "or islands:algorithm[(key=value,...)][@MiB]"
        )
        raise ValueError(f"system {name!r}: expected {forms}")
    kind, variant = match["kind"], match["variant"] or ""
    if kind == "ddp" and variant and variant not in (*_HOOKS, _OWN_GROUP):
        raise ValueError(f"system {name!r}: DDP's {variant!r}, expected one of {', '.join((*_HOOKS, _OWN_GROUP))}")
    if kind == "torchft" and variant and variant not in _TORCHFT:
        raise ValueError(f"system {name!r}: torchft's {variant!r}, expected one of {', '.join(_TORCHFT)}")
    if kind not in ("ddp", "torchft") and (kind in _WRAPPED) != bool(variant):
        raise ValueError(f"system {name!r}: {f'{kind} has no variant' if variant else 'an algorithm is missing'}")
    options = _options(match["options"] or "")
    lr = options.pop("lr", None)
    if not isinstance(lr, float | None):
        raise ValueError(f"system {name!r}: lr is {lr!r}, expected a number such as 1e-3")
    optimizer = options.pop("optimizer", None)
    if optimizer not in (None, *OPTIMIZERS):
        raise ValueError(f"system {name!r}: optimizer is {optimizer!r}, expected one of {', '.join(OPTIMIZERS)}")
    return System(name.strip(), kind, variant, tuple(options.items()), match["cap"] or "", lr, optimizer)


def parse_list(names: str) -> list[System]:
    """Return the systems of a comma-separated list; commas inside parentheses belong to the options."""
    systems = [parse(name) for name in re.split(r",(?![^(]*\))", names)]
    if len({system.name for system in systems}) < len(systems):
        raise ValueError(f"systems {names!r}: a system is named twice")
    return systems


def _options(text: str) -> dict[str, Any]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    return {key.strip(): _value(value.strip()) for key, _, value in pairs}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def ddp_configurations() -> list[System]:
    """Return DDP at every bucket size and with gradients copied or as views of the buckets."""
    return [
        parse(f"ddp(gradient_as_bucket_view={view})@{cap}") for cap in _DDP_CAPS for view in (False, True)
    ]  # fmt: skip


def block_of(system: System, least: int) -> int:
    """Return how many steps a timed block of a system has: at least so many, and whole periods of the system.

    Raises:
        ValueError: There is no such algorithm, or its options are not possible.
    """
    cycle = 1
    if system.kind == "torchft":
        cycle = dict(system.options).get("sync_every", 1)
        if not isinstance(cycle, int) or cycle < 1:
            raise ValueError(f"system {system.name!r}: sync_every is {cycle!r}, expected a number of steps")
    elif system.is_wrapped:
        cycle = _algorithm(system).channel.cycle
    return -(-least // cycle) * cycle


def shard(system: System, model: nn.Module) -> nn.Module:
    """Return the model, sharded as the system says; before its optimizer is made."""
    if system.kind in _SHARDED:
        return sharded_system.shard(model, **dict(system.options))
    if system.kind in ("hsdp", "islands"):
        mesh = _islands()
        of_one = mesh if system.kind == "hsdp" else mesh["shard"]
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=of_one)
        fully_shard(model, mesh=of_one)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that may be sharded. Collective there."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@functools.cache
def _islands() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def install(system: System, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Return `model` made to communicate as `system` says, and the optimizer to step."""
    if system.kind in ("none", "hsdp", "fsdp"):
        return model, optimizer
    inner = optimizer.optimizers if isinstance(optimizer, Together) else optimizer
    if system.kind in _SHARDED:
        sharded_system.encode(model, inner, system.kind, dict(system.options))
        return model, optimizer
    if system.kind == "ddp":
        return _install_ddp(system, model), optimizer
    if system.kind == "torchft":
        import torchft_system

        return torchft_system.install(model, optimizer, system.variant, dict(system.options), system.cap_mb)
    import commlib

    algorithm = _algorithm(system)
    if system.kind == "bound":
        from bounds import bound_of

        algorithm = bound_of(algorithm)
    group = _islands()["replicate"] if system.kind == "islands" else None
    options = {"bucket_cap_mb": system.cap_mb, "process_group": group}
    return commlib.wrap(model, algorithm=algorithm, optimizer=inner, **options), optimizer


def _algorithm(system: System) -> Any:
    import commlib  # lazily: the other systems are measured without it

    try:
        return commlib.algorithms.get(system.variant)(**dict(system.options))
    except TypeError as error:  # an option that it does not have
        raise ValueError(f"system {system.name!r}: {error}") from error


def _install_ddp(system: System, model: nn.Module) -> nn.Module:
    cap = _SINGLE_BUCKET_MB if system.variant == "powersgd" else system.cap_mb
    if system.variant == _OWN_GROUP:
        _install_parts(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap, **dict(system.options))
    if system.variant in ("fp16", "bf16"):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(None, getattr(default_hooks, f"{system.variant}_compress_hook"))
    if system.variant == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def _install_parts(model: nn.Module) -> None:
    """Start, with torch alone, the resources of a library with its own collectives that plans by measured costs.

    A separate process group; an idle thread; and all-reduces of scratch buckets of zeros, together at most an eighth of
    the model if that is not below 64 KiB each.
    """
    group = dist.new_group()
    threading.Thread(target=threading.Event().wait, name="idle", daemon=True).start()
    max_bytes = sum(param.nbytes for param in model.parameters()) // 8
    for nbytes, count in _SCRATCH:
        numel = min(nbytes, max(max_bytes // count, 64 << 10)) // 4
        scratch = torch.zeros(count * numel)
        for _ in range(6):
            for work in [dist.all_reduce(part, group=group, async_op=True) for part in scratch.split(numel)]:
                work.wait()
