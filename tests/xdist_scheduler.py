"""The order in which pytest-xdist hands out tests; apart, as tests run without pytest-xdist too."""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.scheduler import is_timing, scope_of


class Scheduler(LoadScopeScheduling):
    """Hands out groups first, those of most tests before others, then single tests in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = [scope for scope in self.workqueue if not is_timing(scope)]
        if others:
            self.workqueue.move_to_end(others[0], last=False)
        if others or self.nodes == [node]:
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if not self.workqueue or not all(map(is_timing, self.workqueue)):
            super()._reschedule(node)
        elif node is not self.nodes[0]:
            node.shutdown()
        elif self.nodes == [node]:
            self._begin_timing(node)

    def _begin_timing(self, node: WorkerController) -> None:
        """Give the last process enough work to continue: it begins a test once it knows the next, or that it ends."""
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
            super()._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a process that has ended; the last one then begins with the tests that run alone."""
        crashed = super().remove_node(node)
        if self.collection is not None and self.workqueue and len(self.nodes) == 1:
            self._reschedule(self.nodes[0])
        return crashed
