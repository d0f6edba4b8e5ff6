"""A backward on an accelerator, whose gradients may come on several streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.engine.buckets.slot import Segment, Slot
from commlib.engine.channels.backward import Backward, Host


class StreamedBackward(Backward):
    """A backward whose gradients may come on several streams of an accelerator.

    A bucket is gathered on the stream of the gradient that came last, which therefore waits for the streams of those
    that came before: autograd itself makes its caller wait for them at the end of backward only.

    Args:
        host: As in `Backward`.
        current: Returns the current stream.
    """

    def __init__(self, host: Host, current: Callable[[], Any]) -> None:
        super().__init__(host)
        self._current = current
        self._streams: set[Any] = set()

    def on_gradient(self, slot: Slot) -> None:
        """See `Backward`."""
        self._streams.add(self._current())
        super().on_gradient(slot)

    def _segment_complete(self, segment: Segment) -> None:
        current = self._current()
        for stream in self._streams - {current}:
            current.wait_stream(stream)
        super()._segment_complete(segment)

    def _leave(self) -> None:
        super()._leave()
        self._streams.clear()
