"""A user's script, for `test_types.py`: never run. Both checkers find an error in each line marked `# wrong`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import commlib


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * self.scale

    def own_method(self, times: int) -> str:
        return "a" * times


def evaluate(net: Net) -> str:
    return net.own_method(1)


def accumulate(model: commlib.WrappedModel[Net]) -> None:
    with model.no_sync():
        model(torch.ones(2, 2)).sum().backward()


net = Net()
optimizer = commlib.optim.FrozenVarianceAdam(net.parameters())
model = commlib.wrap(net, "topk", optimizer=[optimizer], bucket_cap_mb=25, timeout=60)

# The model keeps its type.
assert_type(model, commlib.WrappedModel[Net])
assert_type(model.module, Net)
assert_type(model.module.own_method(2), str)
model.own_method(2)
evaluate(model)
evaluate(model.module)
model.scale = 2.0
assert_type(model.state_dict(), dict[str, Any])
torch.optim.SGD(model.parameters(), 0.1)
assert_type(model.train(), commlib.WrappedModel[Net])

# Its new attributes.
accumulate(model)
assert_type(model.require_backward_grad_sync, bool)
model.require_backward_grad_sync = False
with model.no_sync():
    model(torch.ones(2, 2)).sum().backward()
with model.join(throw_on_early_termination=True):
    loss: Tensor = model(torch.ones(2, 2)).sum()

# A missing attribute: no checker can tell it from a method of the model. With `model.module` they can.
assert_type(model.nope, Any)

# A variable may keep its name, and a type may be found out.
same = Net()
same = commlib.wrap(same)
with same.no_sync():
    same.own_method(3)


def find_out(some: nn.Module) -> None:
    if isinstance(some, commlib.WrappedModel):
        with some.no_sync():
            pass


# Every public name.
assert_type(commlib.__version__, str)
assert_type(commlib.stats(model).compression_ratio, float | None)
assert_type(commlib.stats(model).as_dict("comm/"), dict[str, int | float])
assert_type(commlib.state_dict(model), dict[str, Any])
commlib.load_state_dict(model, commlib.state_dict(model))
commlib.synchronize(model)
commlib.expect_backward(model)
assert_type(commlib.shard(Net(), "int8", commlib.codecs.block_codec("int4")), Net)
commlib.set_optimizer(model, optimizer)
state = {"train": commlib.Checkpoint(model, optimizer), "again": commlib.checkpoint.Checkpoint(model, optimizer)}
assert_type(commlib.checkpoint.rank_state(model, optimizer), dict[str, Any])
commlib.checkpoint.load_rank_state(model, {}, optimizer)
assert_type(commlib.checkpoint.write_rank_file("folder", model, [optimizer]), Path)
commlib.checkpoint.read_rank_file(Path("folder"), model)
assert_type(commlib.checkpoint.consensus_state_dict(model), dict[str, Any])
assert_type(commlib.checkpoint.replicas_differ(model), bool)
assert_type(commlib.algorithms.list(), list[str])
commlib.wrap(Net(), commlib.algorithms.TopK(ratio=0.01))
commlib.wrap(Net(), commlib.algorithms.AllReduce(wire_dtype="bf16"))
assert_type(commlib.codecs.block_codec("int8").name, str)
members = commlib.elastic.join("127.0.0.1:29400", min_members=2)
sampler = commlib.elastic.Sampler(range(10), 2, members)
batches: commlib.elastic.Loader = members.loader(DataLoader(TensorDataset(torch.ones(10)), batch_sampler=sampler))
members.load_state_dict(members.state_dict())
assert_type(sampler.epoch, int)
commlib.wrap(Net(), "topk", process_group=members)
assert_type(members.num_rounds, int)
try:
    assert_type(commlib.unwrap(model), Net)
    assert_type(commlib.unwrap(net), Net)
except (commlib.PeerFailure, commlib.PeerTimeout) as error:
    assert_type(error.ranks, frozenset[int])
except (commlib.CodecError, commlib.ConfigError, commlib.TransportError, commlib.CommlibError):
    pass
warnings.simplefilter("ignore", commlib.LossWarning)

# Errors.
commlib.wrap(3)  # wrong
commlib.wrap(net, timeot=3)  # wrong
commlib.wrap(net, algorithm=3)  # wrong
commlib.wrap()  # wrong
commlib.stats(3)  # wrong
commlib.load_state_dict(model)  # wrong
commlib.nope(model)  # wrong
model.no_sync(3)  # wrong
model.join(enabled=True)  # wrong
model.module.own_method("two")  # wrong
model.module.nope()  # wrong
net.no_sync()  # wrong
commlib.unwrap(model).no_sync()  # wrong
Path(commlib.stats(model))  # wrong
