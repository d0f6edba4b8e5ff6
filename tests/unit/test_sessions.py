"""How long a member waits for a view."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commlib.elastic import sessions
from commlib.elastic.sessions import Sessions
from commlib.errors import StoreLost


@pytest.mark.parametrize("num_outside", [0, 4])
def test_a_member_outside_waits_for_any_time(num_outside: int) -> None:
    """On standby, or while it receives the state in the background. The limit begins when this ends."""
    answers = iter([True] * num_outside)
    num_asked = 0

    def is_outside() -> bool:
        nonlocal num_asked
        num_asked += 1
        return next(answers, False)

    service: Any = SimpleNamespace(check=lambda: None, min_members=1, address="a:1", connection="is connected")
    with pytest.raises(StoreLost, match="no view after number 0 was settled within 0.1 s"):
        Sessions(service, 0.1, is_outside).newest()
    assert num_asked == num_outside + 1


def test_a_long_wait_for_the_first_view_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "SILENT_S", 0.0)
    service: Any = SimpleNamespace(check=lambda: None, min_members=1, address="a:1", connection="is connected")
    with pytest.raises(StoreLost):
        Sessions(service, 0.6).newest()
    (line,) = caplog.messages
    assert line.startswith(
        "elastic: waiting for a view, at most 0.6 s. The service at a:1 is connected. Without --fresh"
    )
