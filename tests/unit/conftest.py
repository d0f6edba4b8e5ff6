"""Shared fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commlib.kernels import native


@pytest.fixture(params=native.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with each instruction set of this machine."""
    before = native.isa()
    native.load().select_isa(request.param)
    yield request.param
    native.load().select_isa(before)
