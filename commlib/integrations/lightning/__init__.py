"""Integration with PyTorch Lightning: `Trainer(strategy="commlib_topk")`, or with `strategy=CommlibStrategy("topk")`.

Importing this module registers a strategy `commlib_<algorithm>` for every algorithm of `commlib.algorithms.list()`.
"""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from commlib import algorithms
from commlib.integrations.lightning.callback import StatsCallback
from commlib.integrations.lightning.strategy import CommlibStrategy
from commlib.integrations.versions import warn_if_untested

__all__ = ["CommlibStrategy", "StatsCallback"]

warn_if_untested("lightning")

for _name in algorithms.list():
    StrategyRegistry.register(
        f"commlib_{_name}",
        CommlibStrategy,
        description=f"commlib's algorithm {_name!r}",
        override=True,
        algorithm=_name,
    )
