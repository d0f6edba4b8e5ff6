"""`Checkpoint`: a wrapped model for torch.distributed.checkpoint.

[Note: the tree] torch.distributed.checkpoint reads what the tree of the run that loads asks for, by name, so the names
must not depend on what a run has done so far, nor on the algorithm, nor on how many ranks it has:

    model.<name>                      the model's state; where replicas differ the consensus
    optimizer.state.<name>.<entry>    the optimizers' state (`optimizer_tree`); where replicas differ its mean
    optimizer.rest                    bytes: the groups of parameters
    communication.shared              bytes: who saved this, and where it is the same on all ranks the algorithm's state
    communication.shaped.<kind>.<name>  of sharded models: what the algorithm has in the shape of parameters
    communication.rank<r>             bytes: what else is of rank r (`rank_state`), written and read by that rank alone

A run with more ranks than the one that saved asks for ranks that were not there, and is to be told so instead of
failing on a missing name. So there are 1,024 of the last: of N ranks, rank r also writes empty bytes for r + N, r + 2 N
and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from commlib.checkpoint import blobs, optimizer_tree, shaped
from commlib.checkpoint.consensus import average, consensus_state_dict, may_differ
from commlib.checkpoint.rank_state import Optimizers, layout_of_all, load_rank_state, place_of, rank_state
from commlib.engine import optimizers as proxies
from commlib.errors import ConfigError
from commlib.replica import Replica, replica_of
from commlib.sharding.local import local_of, places_of

#: How many ranks a checkpoint has a place for; a run with more resumes with as many only.
_NUM_PLACES = 1024


class Checkpoint:
    """A wrapped model, its optimizer and its communication, as a `Stateful` of torch.distributed.checkpoint.

        torch.distributed.checkpoint.save({"app": commlib.Checkpoint(model, optimizer)}, checkpoint_id=path)
        torch.distributed.checkpoint.load({"app": commlib.Checkpoint(model, optimizer)}, checkpoint_id=path)

    `async_save` works too. A run that loads goes on bit for bit as the one that saved would have: each rank gets back
    its own weights and optimizer state where replicas differ, its residuals, its random state of codecs; not torch's
    own random state, nor the data's. What is called `model` in the checkpoint any other program can load: it is the
    consensus.

    In a group of another size, up to 1,024 ranks, a run goes on from the consensus of model and optimizer, if the
    algorithm's state is the same on all ranks (`Algorithm.portable`); else loading raises.

    Saving, and loading, are collective, as torch.distributed.checkpoint's are; all ranks of the wrapped model's group
    take part.

    Args:
        model: The wrapped model.
        optimizer: The optimizer, or all of them, if their state is to be saved.

    Raises:
        ConfigError: The model is not wrapped, or `optimizer` is no optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers = None) -> None:
        replica_of(model)
        self._model = model
        self._optimizers = proxies.all_of(proxies.resolve(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """Return the tree; see [Note: the tree]. Collective where replicas differ.

        Raises:
            ConfigError: The model is not wrapped any more, or as `optimizer_tree.tree_of` says.
            TransportError: A rank did not take part.
        """
        own = rank_state(self._model, self._optimizers)  # first: it takes results that are under way
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
        """Take over a tree that was loaded.

        Raises:
            ConfigError: It is of another algorithm or model, or of a run of another size where that matters.
        """
        replica = replica_of(self._model)
        communication = state_dict["communication"]
        shared = blobs.unpacked(communication["shared"])
        number, count = place_of(replica)
        own: Any = blobs.unpacked(communication[f"rank{number}"]) if shared["count"] == count else None
        is_same = own is not None and own["place"]["layout"] == layout_of_all(replica)
        if not is_same and shared["state"] is None:
            raise ConfigError(
                f"rank {number}: the checkpoint was saved by {shared['count']} ranks, this run has {count}, or another "
                f"mesh, and the state of {shared['algorithm']!r} is each rank's own. Resume as it was saved, or load "
                "'model' and 'optimizer' of the checkpoint only, before commlib.wrap"
            )
        self._model.load_state_dict(state_dict["model"])
        if self._optimizers:
            optimizer_tree.restore(self._named(), state_dict["optimizer"])
        if shared["state"] is not None:
            state = shared["state"]["communication"]["state"]
            shaped.put_back(state, replica, communication.get("shaped", {}), shared["absent"])
            own = own if is_same else {**shared["state"], "model": {}, "optimizers": []}
            own["communication"] |= {"state": state, "shard": _shards(replica)}
        assert own is not None
        load_rank_state(self._model, own, self._optimizers)

    def _named(self) -> list[optimizer_tree.Named]:
        return optimizer_tree.named(self._optimizers, self._model)

    def _communication(self, own: dict[str, Any]) -> dict[str, Any]:
        replica = replica_of(self._model)
        algorithm = replica.engine.algorithm
        number, count = place_of(replica)
        shared: dict[str, Any] = {"algorithm": algorithm.name, "count": count, "state": None, "absent": {}}
        tree: dict[str, Any] = {}
        if algorithm.portable:  # then its state is here, once
            communication = own["communication"]
            state = communication["state"]
            if communication["shard"]:
                state, tree["shaped"], shared["absent"] = shaped.taken_out(state, replica)
            shared["state"] = {"format": own["format"], "communication": {**communication, "state": state}}
            own = {**own, "communication": {**communication, "state": None}}
        nobody = {f"rank{other}": b"" for other in range(number + count, _NUM_PLACES, count)}
        return {"shared": blobs.packed(shared), f"rank{number}": blobs.packed(own), **tree, **nobody}


def _shards(replica: Replica) -> list[Any]:
    return places_of([parameter.param for parameter in replica.engine.parameters])


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    clone = lambda value: value.clone() if isinstance(value, torch.Tensor) else value  # noqa: E731
    return {name: {key: clone(value) for key, value in entries.items()} for name, entries in state.items()}


def _tensors(entries: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for _, value in sorted(entries.items()) if isinstance(value, torch.Tensor)]
