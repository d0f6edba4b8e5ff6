"""Trains on two ranks, which Lightning starts by the method given, and prints a hash of the weights that came back."""

import hashlib
import logging
import sys
import warnings

import torch
from lightning.pytorch import Trainer

from commlib.integrations.lightning import CommlibStrategy
from tests.integrations.lightning_common import Module, loader


def main(start_method: str, algorithm: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    module = Module()
    trainer = Trainer(
        strategy=CommlibStrategy(algorithm, start_method=start_method, timeout=60),
        **{"accelerator": "cpu", "devices": 2, "max_epochs": 2, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer.fit(module, loader())
    values = torch.cat([value.flatten() for value in module.state_dict().values()])
    print("weights", hashlib.sha256(values.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
