"""The keys of one view: a store for the set-up of its communicators, over the members' connections to the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from commlib import locks


class ViewStore(dist.Store):
    """Keys and values of one view, which the service relays to all of its members.

    A key is set once, by one member. The service sends it to the others, so reads are local.

    Args:
        put: Sends a key and a value to the service.
        timeout_s: How long a read waits for a key, in seconds. A newer view ends the wait.
    """

    def __init__(self, put: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._put, self._limit = put, timedelta(seconds=timeout_s)
        self._values: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._changed = locks.condition("view store")
        self._has_ended = False

    def receive(self, key: str, value: bytes) -> None:
        """Take a value that another member has set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def put_again(self) -> None:
        """Send the own values once more, to a service that was started again."""
        for key, value in list(self._own.items()):
            self._put(key, value)

    def end(self) -> None:
        """Let all waits fail, since the view is over."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    @override
    def set(self, key: str, value: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.receive(key, data)
        self._own[key] = data
        self._put(key, data)

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    @override
    def check(self, keys: Sequence[str]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._has_ended:
            raise dist.DistStoreError("the view is over")
        return all(key in self._values for key in keys)

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        limit_s = (timeout or self._limit).total_seconds()
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._has_ended or all(key in self._values for key in keys), limit_s
            )
        if self._has_ended:
            raise dist.DistStoreError("the view is over")
        if not is_there:
            missing = [key for key in keys if key not in self._values]
            raise dist.DistStoreError(f"no member set {missing} within {limit_s:g} s")
