"""Training with identical numbers on every device, so that a GPU's steps can be compared with the CPU's, bit by bit.

A gradient is a tensor of the data, and the optimizer multiplies by powers of two only: products are exact, so that a
fused multiply-add gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import commlib
from commlib.algorithms import Algorithm

#: Matrices of a multiple of 64 elements, so that 4 ranks have chunks of the same size; some too small to compress.
SHAPES = ((64, 64), (2, 32), (160, 128), (4, 32), (256, 256), (32, 32))
STEPS = 50


class Given(nn.Module):
    """Parameters whose gradients are the inputs of the forward."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        values = (torch.randn(shape, generator=generator) for shape in SHAPES)
        self.values = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the sum of the products, a scalar."""
        return sum(
            ((own * given).sum() for own, given in zip(self.values, gradients, strict=True)),
            torch.zeros((), device=self.values[0].device),
        )


def gradients_of(step: int, device: torch.device) -> list[Tensor]:
    """Return a step's gradients: values of several magnitudes, and now and then zeros."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    found[step % len(found)][::3] *= 2.0**-9
    found[(step + 1) % len(found)][: 1 + step].zero_()
    return [gradient.to(device) for gradient in found]


class Steps:
    """A wrapped model and its data, ready to make steps without a copy from the host.

    Args:
        algorithm: How it communicates.
        cap_mb: Size of its buckets.
        device: Where it is.
        steps: How many steps there are data for.
    """

    def __init__(self, algorithm: Algorithm, cap_mb: float, device: torch.device, steps: int = STEPS) -> None:
        self.model: Any = Given().to(device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=2.0**-6, momentum=0.0 if algorithm.has_momentum else 0.5
        )
        self._data = [gradients_of(step, device) for step in range(steps)]
        self.num_steps = 0
        self.model = commlib.wrap(
            self.model, algorithm, optimizer=self.optimizer, bucket_cap_mb=cap_mb, timeout=60, init_sync=False
        )

    def step(self) -> None:
        """Make one training step."""
        self.optimizer.zero_grad()
        self.model(self._data[self.num_steps]).backward()
        self.optimizer.step()
        self.num_steps += 1

    def states(self) -> list[Tensor]:
        """Return copies of the gradients and the parameters."""
        parameters = list(self.model.parameters())
        tensors = [parameter.grad for parameter in parameters] + [parameter.detach() for parameter in parameters]
        return [tensor.clone() for tensor in tensors if tensor is not None]


def trained(
    make: Callable[[], Algorithm], cap_mb: float, device: torch.device, steps: int = STEPS
) -> Iterator[list[Tensor]]:
    """Train, then unwrap at once; afterwards yield the states after each step, on the CPU."""
    training = Steps(make(), cap_mb, device, steps)
    found = []
    for _ in range(steps):
        training.step()
        found.append(training.states())
    commlib.unwrap(training.model)
    for states in found:
        yield [tensor.cpu() for tensor in states]


def assert_same_steps(
    make: Callable[[], Algorithm], cap_mb: float, device: torch.device, reference: torch.device, steps: int = STEPS
) -> None:
    """Check that training on `device` gives the same bits in every step as on `reference`."""
    pairs = zip(trained(make, cap_mb, device, steps), trained(make, cap_mb, reference, steps), strict=True)
    for step, (got, expected) in enumerate(pairs):
        assert len(got) == len(expected), f"step {step}: {len(got)} tensors, expected {len(expected)}"
        for idx, (one, other) in enumerate(zip(got, expected, strict=True)):
            one, other = one.flatten(), other.flatten()
            wrong = (one.view(torch.int32) != other.view(torch.int32)).nonzero().flatten().tolist()
            kind = "gradient" if idx < len(SHAPES) else "parameter"
            assert not wrong, (
                f"step {step}: {len(wrong)} of {one.numel()} elements of {kind} {idx % len(SHAPES)} differ, the first "
                f"at {wrong[0]}: {float(one[wrong[0]])}, expected {float(other[wrong[0]])}"
            )
