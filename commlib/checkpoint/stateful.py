"""`Checkpoint`: a wrapped model for torch.distributed.checkpoint.

[Note: the tree] torch.distributed.checkpoint reads the names in the tree of the loading run, so the names must not
depend on the progress of a run, on the algorithm, or on the world size:

    model.<name>                      the model's state; the consensus if replicas differ
    optimizer.state.<name>.<entry>    the optimizers' state (`optimizer_tree`); its mean if replicas differ
    optimizer.rest                    bytes: the groups of parameters
    communication.shared              bytes: the format, the algorithm and world size of the saving run, and the
                                      algorithm's state if it is the same on all ranks; otherwise only its entries
                                      that are the same
    communication.shaped.<kind>.<name>  of sharded models: the algorithm's state in the shape of parameters
    communication.rank<r>             bytes: the rest of rank r's state (`rank_state`), used by that rank alone

A run with more ranks than the saving run asks for ranks that did not exist. It should get a clear error, not a missing
name. So there are always 1,024 rank entries: of N ranks, rank r also writes empty bytes for r + N, r + 2 N and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from commlib import formats
from commlib.checkpoint import blobs, optimizer_tree, shaped
from commlib.checkpoint.consensus import average, consensus_state_dict, may_differ
from commlib.checkpoint.rank_state import (
    Optimizers,
    layout_of_all,
    load_rank_state,
    load_shard_state,
    place_of,
    rank_state,
)
from commlib.engine import optimizers as proxies
from commlib.errors import ConfigError
from commlib.replica import Replica, find, replica_of
from commlib.shard import sharded_of
from commlib.sharding.local import local_of, places_of

_FORMAT = 1
#: Maximum number of ranks in a checkpoint. A larger run can resume only with the same number of ranks.
_NUM_PLACES = 1024
#: The state of `commlib.shard` for a rank that the saving run did not have.
_NO_RESIDUALS = {"num_ranks": 0, "residuals": {}, "references": {}}


class Checkpoint:
    """A wrapped or sharded model, its optimizer and its communication, as a `Stateful` of torch.distributed.checkpoint.

        torch.distributed.checkpoint.save({"app": commlib.Checkpoint(model, optimizer)}, checkpoint_id=path)
        torch.distributed.checkpoint.load({"app": commlib.Checkpoint(model, optimizer)}, checkpoint_id=path)

    `async_save` works too. A run that loads continues bit for bit as the saving run would have: each rank gets back its
    residuals, the random state of its codecs and, if replicas differ, its own weights and optimizer state. torch's
    random state and the data loader's are not saved. The entry `model` is the consensus, and any program can load it.

    In a group of another size, up to 1,024 ranks, a run continues from the consensus of model and optimizer if the
    algorithm's state is the same on all ranks (`Algorithm.portable`); otherwise loading raises, unless `resize` is
    "reset".

    Saving and loading are collective, as with torch.distributed.checkpoint; all ranks of the wrapped model's group must
    participate.

    Args:
        model: The wrapped model, or one that `commlib.shard` was called for. The latter resumes with any number of
            ranks; residuals of gradients then start at zero, and a warning says so.
        optimizer: The optimizer, or a list of all optimizers, whose state is saved.
        resize: Whether a group of another size may load the state of an algorithm that differs between ranks. "raise"
            raises. With "reset", state that is the same on all ranks is loaded (anchors and momenta of outer
            optimizers, factors, schedules, counters), and the rest begins as after `wrap`: residuals at zero. All of
            it does if it depends on sums over the ranks (`ef21`). Load directly after `wrap`. Not for sharded models.

    Raises:
        ConfigError: The model is neither, or is in an elastic group, or `optimizer` is not an optimizer, or `resize` is
            another word.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizers = None, resize: Literal["raise", "reset"] = "raise"
    ) -> None:
        if resize not in ("raise", "reset"):
            raise ConfigError(f"Checkpoint: resize: expected 'raise' or 'reset', got {resize!r}")
        self._resets = resize == "reset"
        self._is_wrapped = sharded_of(model) is None or find(model) is not None
        if self._is_wrapped and replica_of(model).engine.session.is_elastic:
            raise ConfigError("Checkpoint: save the state of an elastic job with Members.state_dict")
        self._model = model
        self._optimizers = proxies.all_of(proxies.resolve(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """Return the tree; see [Note: the tree]. Collective where replicas differ.

        Raises:
            ConfigError: The model is not wrapped any more, or an error of `optimizer_tree.tree_of`.
            TransportError: A rank did not participate.
        """
        if not self._is_wrapped:
            return self._state_of_sharded()
        own = rank_state(self._model, self._optimizers)  # first, because it applies pending results
        replica = replica_of(self._model)
        tree: dict[str, Any] = {"model": consensus_state_dict(self._model)}
        if self._optimizers:
            tree["optimizer"] = optimizer_tree.tree_of(self._named())
            if may_differ(replica):
                state = tree["optimizer"]["state"] = _cloned(tree["optimizer"]["state"])
                average(replica, [local_of(value) for entries in state.values() for value in _tensors(entries)])
        tree["communication"] = self._communication(own)
        return tree

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a tree that torch.distributed.checkpoint has filled.

        Raises:
            ConfigError: The tree has another format, or is of another algorithm or model, or of another world size or
                mesh and the algorithm's state is not portable.
        """
        communication = state_dict["communication"]
        shared = blobs.unpacked(communication["shared"])
        formats.check(shared, _FORMAT, "the checkpoint", "or load only its 'model', before commlib.wrap")
        if not self._is_wrapped:
            self._load_sharded(state_dict)
            return
        replica = replica_of(self._model)
        number, count = place_of(replica)
        own: Any = blobs.unpacked(communication[f"rank{number}"]) if shared["count"] == count else None
        is_same = own is not None and own["place"]["layout"] == layout_of_all(replica)
        common = shared.get("common")
        if not is_same and shared["state"] is None and not (common and self._resets):
            reset = "; or use Checkpoint(..., resize='reset')" if common else ""
            raise ConfigError(
                f"rank {number}: the checkpoint was saved by {shared['count']} ranks, this run has {count}, or another "
                f"mesh, and the state of {shared['algorithm']!r} differs between ranks. Resume with the same ranks and "
                f"mesh, or load only 'model' and 'optimizer' of the checkpoint, before commlib.wrap{reset}"
            )
        self._model.load_state_dict(state_dict["model"])
        if self._optimizers:
            optimizer_tree.restore(self._named(), state_dict["optimizer"])
        if shared["state"] is not None:
            state = shared["state"]["communication"]["state"]
            shaped.put_back(state, replica, communication.get("shaped", {}), shared["absent"])
            own = own if is_same else {**shared["state"], "model": {}, "optimizers": []}
            own["communication"] |= {"state": state, "shard": _shards(replica)}
        elif not is_same:
            own = _reset(replica, common)
        assert own is not None
        load_rank_state(self._model, own, self._optimizers)

    def _state_of_sharded(self) -> dict[str, Any]:
        """Return the tree of a model that is sharded and not wrapped."""
        sharded = sharded_of(self._model)
        if sharded is None:
            raise ConfigError("Checkpoint: the model is no longer sharded by commlib.shard")
        tree: dict[str, Any] = {"model": self._model.state_dict()}
        if self._optimizers:
            tree["optimizer"] = optimizer_tree.tree_of(self._named())
        number, count = dist.get_rank(), dist.get_world_size()
        shared = blobs.packed({**formats.stamp(_FORMAT), "algorithm": "shard", "count": count})
        own = blobs.packed({"shard": sharded.state_dict()})
        tree["communication"] = {"shared": shared, f"rank{number}": own, **_nobody(number, count)}
        return tree

    def _load_sharded(self, state_dict: Mapping[str, Any]) -> None:
        communication = state_dict["communication"]
        self._model.load_state_dict(state_dict["model"])
        if self._optimizers:
            optimizer_tree.restore(self._named(), state_dict["optimizer"])
        own = communication[f"rank{dist.get_rank()}"]
        load_shard_state(self._model, {"shard": _NO_RESIDUALS} if not own else blobs.unpacked(own))

    def _named(self) -> list[optimizer_tree.Named]:
        return optimizer_tree.named(self._optimizers, self._model)

    def _communication(self, own: dict[str, Any]) -> dict[str, Any]:
        replica = replica_of(self._model)
        algorithm = replica.engine.algorithm
        number, count = place_of(replica)
        shared = {**formats.stamp(_FORMAT), "algorithm": algorithm.name, "count": count, "state": None, "absent": {}}
        shared["common"] = None
        tree: dict[str, Any] = {}
        if algorithm.portable:  # its state is saved once, here
            communication = own["communication"]
            state = communication["state"]
            if communication["shard"]:
                state, tree["shaped"], shared["absent"] = shaped.taken_out(state, replica)
            shared["state"] = {"format": own["format"], "communication": {**communication, "state": state}}
            own = {**own, "communication": {**communication, "state": None}}
        elif not own["communication"]["shard"]:
            same = algorithm.shared_state_dict() if algorithm.can_repeat else {}
            shared["common"] = {"format": own["format"], "communication": {**own["communication"], "state": same}}
        return {"shared": blobs.packed(shared), f"rank{number}": blobs.packed(own), **tree, **_nobody(number, count)}


def _nobody(number: int, count: int) -> dict[str, bytes]:
    """Return the entries of ranks that do not exist; see [Note: the tree]."""
    return {f"rank{other}": b"" for other in range(number + count, _NUM_PLACES, count)}


def _reset(replica: Replica, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a rank that begins with the entries that were the same on all ranks of the saving run."""
    engine = replica.engine
    engine.settle_weights()  # state that belongs to earlier weights
    communication = common["communication"]
    state = {**engine.channels[-1].keeper.state_dict(), **communication["state"]}
    place = {"rank": engine.comm.rank, "world_size": engine.comm.world_size, "state": state}
    return {**common, "communication": {**communication, **place}, "model": {}, "optimizers": []}


def _shards(replica: Replica) -> list[Any]:
    return places_of([parameter.param for parameter in replica.engine.parameters])


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    clone = lambda value: value.clone() if isinstance(value, torch.Tensor) else value  # noqa: E731
    return {name: {key: clone(value) for key, value in entries.items()} for name, entries in state.items()}


def _tensors(entries: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for _, value in sorted(entries.items()) if isinstance(value, torch.Tensor)]
