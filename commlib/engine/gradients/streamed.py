"""A backward on an accelerator, whose gradients may be produced on several streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.engine.buckets.slot import Segment, Slot
from commlib.engine.gradients.backward import Backward, Host


class StreamedBackward(Backward):
    """A backward whose gradients may be produced on several streams of an accelerator.

    Gradients are gathered on the stream of the last one. That stream first waits for the streams of earlier gradients,
    because autograd synchronises streams with its caller only at the end of backward.

    Args:
        host: See `Backward`.
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
