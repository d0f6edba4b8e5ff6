"""The search for a plan: records the first backwards, tries candidate plans, and keeps the fastest.

[Note: settling] While plans are tried, the plan of a step depends on clocks. A checkpoint ends the trials: from the
next round on, all ranks keep the plan of that round. The checkpoint contains that plan, so a run that loads it behaves
the same. Not all ranks need to save, so each round carries the request to settle while plans are being tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from commlib.engine.planning import plan as plans
from commlib.engine.planning.plan import Parameter, Plan
from commlib.engine.planning.readiness import DeviceTimer, Readiness
from commlib.engine.planning.sizes import INITIAL_CAP_BYTES, BucketTimes
from commlib.engine.planning.trials import Trials, steps_per_visit
from commlib.engine.rounds.task import Task
from commlib.sharding.local import copied
from commlib.transport.base import Communication, Communicator, Transport

#: Synchronised backwards without overlap before planning. The first is cold. The best of the others is used.
_RECORDED_BACKWARDS = 3

#: Bucket size in those backwards if the sizes are to be planned. Nothing overlaps, so more buckets would only add
#: latency, and DDP's first step is one bucket as well. Adam magnifies rounding differences of the first gradient more
#: than of any other, so loss curves differ less from DDP's if the first sum has the same order.
_RECORDED_CAP_BYTES = 1 << 30


class PlanSearch:
    """Finds the plan of one model, identically on all ranks in each round.

    Args:
        transport: Exchanges times between ranks.
        device: The device of the parameters.
        cap_bytes: A fixed bucket size in bytes. None plans the size.

    Attributes:
        plan: The plan of the current buckets.
        pending: The plan to install before the next backward, or None.
        cap_bytes: The fixed bucket size, if any.
        num_recorded: Number of backwards to record before planning.
        may_settle: Whether a checkpoint may end the search.
        readiness: When gradients became ready in the recorded backwards.
        is_recording: Whether the current backward is recorded, without overlap.
    """

    plan: Plan

    def __init__(self, transport: Transport, device: torch.device, cap_bytes: int | None) -> None:
        if cap_bytes is None and (torch.are_deterministic_algorithms_enabled() or transport.is_elastic):
            cap_bytes = INITIAL_CAP_BYTES  # a plan that does not depend on clocks
        self._transport = transport
        self._device = device
        self.cap_bytes = cap_bytes
        self.num_recorded = _RECORDED_BACKWARDS if cap_bytes is None else 1
        self.may_settle = True
        self.is_recording = False
        self._timer = DeviceTimer(device)
        self.pending: Plan | None = None
        self._parameters: Sequence[Parameter] = ()
        self._has_copies = False
        self.readiness = Readiness(0, device)
        self._trials: Trials | None = None
        self._wants_to_settle = False
        self._wish: torch.Tensor | None = None  # of the current round: whether any rank requests to settle

    def restart(self, parameters: Sequence[Parameter]) -> Plan:
        """Restart the search with these parameters. Returns the first plan."""
        self._parameters = parameters
        self._trials = None
        self._has_copies = bool(copied({parameter.name: parameter.param for parameter in parameters}))
        if self._has_copies and self.cap_bytes is None:
            self.cap_bytes, self.num_recorded = INITIAL_CAP_BYTES, 1
        self.readiness = Readiness(len(parameters), self._device)
        if self._transport.is_elastic:  # a new member has recorded no backwards, and needs the same plan
            return plans.by_sizes(parameters, self.cap_bytes or INITIAL_CAP_BYTES)
        return plans.initial(parameters, self.cap_bytes or _RECORDED_CAP_BYTES)

    def restore(self, plan: Plan | None) -> Plan:
        """Take the plan of a checkpoint. None restarts the search. Returns the plan to install."""
        if plan is None:
            return self.restart(self._parameters)
        self._trials = None
        return plan

    def installed(self, plan: Plan) -> None:
        """Record that the buckets of a plan were built."""
        self.plan, self.pending = plan, None

    @property
    def next(self) -> Plan:
        """The plan of the next backward."""
        return self.pending or self.plan

    @property
    def is_undecided(self) -> bool:
        """Whether the plan still depends on measurements."""
        return self.cap_bytes is None and self.next.kind in ("initial", "trial")

    def begins(self) -> bool:
        """Begin a synchronised backward. Returns whether it is recorded, without overlap."""
        self.is_recording = self.plan.kind == "initial"
        if self.is_recording:
            self.readiness.start()
        return self.is_recording

    def backward_ends(self) -> None:
        """End the computation of a backward."""
        if self.is_recording:
            self.readiness.end()

    # --- settling -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Request that all ranks keep the plan of the next round, if plans are being tried. See [Note: settling]."""
        self._wants_to_settle = self.may_settle and self.is_undecided

    def tasks(self, comm: Communicator) -> list[Task]:
        """Return the tasks of a round in addition to its buckets: the request to settle, while it matters."""
        self._wish = None
        if not (self.is_undecided and self.may_settle):
            return []
        wish = torch.full((1,), float(self._wants_to_settle), dtype=torch.float32, device=self._device)
        self._wish = wish

        def agree() -> Communication:
            yield comm.all_reduce(wish, op="max")

        return [Task(lambda: "the request to settle the plan", agree, is_prompt=True, is_single=True)]

    def _end(self) -> None:
        """End the search at the request of a rank."""
        self._wants_to_settle, self._trials = False, None
        self.readiness = Readiness(0, self._device)
        if self.plan.kind == "initial":
            self.pending = plans.by_sizes(self._parameters, INITIAL_CAP_BYTES)
        else:
            self.plan = dataclasses.replace(self.plan, kind="settled")

    # --- after a round ------------------------------------------------------------------------------------------------

    def ended(self, measure_cost: Callable[[], BucketTimes]) -> None:
        """Process the end of a round. Sets `pending` if the plan is to change. Collective."""
        is_recorded, self.is_recording = self.is_recording, False
        if self._wish is not None and bool(self._wish.item()):
            self._end()
        elif is_recorded and self.readiness.num_backwards >= self.num_recorded:
            self._plan_from_record(measure_cost)
        else:
            self._continue_trials()

    def _plan_from_record(self, measure_cost: Callable[[], BucketTimes]) -> None:
        """Choose the plan, or the candidates to try, from rank 0's record, and so identically on all ranks."""
        recorded = self.readiness.result() if self._transport.rank == 0 else None
        ready_s, backward_s = self._transport.gather_objects(recorded)[0]
        self.readiness = Readiness(0, self._device)
        if self._has_copies:  # [Note: copies of parts] in `sharding/local.py`
            found = [plans.by_sizes(self._parameters, self.cap_bytes or INITIAL_CAP_BYTES)]
        elif self.cap_bytes is None:
            found = plans.candidates(self._parameters, ready_s, backward_s, measure_cost())
        else:
            found = [plans.fixed(self._parameters, self.cap_bytes, ready_s)]
        if len(found) == 1:
            only = found[0]
            self.pending = only if only.kind != "trial" else dataclasses.replace(only, kind="planned")
        else:
            self._trials = Trials(found, steps_per_visit(backward_s), self._timer)
            self.pending = self._trials.current

    def _continue_trials(self) -> None:
        """Time this step, and choose the next candidate or finally the plan that is fastest on its slowest rank."""
        if self._trials is None or not self._trials.step_ended(self._timer.now()):
            return
        if self._trials.current is None:
            of_ranks = self._transport.gather_objects(self._trials.figures)
            self._trials.end_pass([max(column) for column in zip(*of_ranks, strict=True)])
        self.pending = self._trials.current
        if self.pending is None:
            self.pending = dataclasses.replace(self._trials.plans[0], kind="planned")
            self._trials = None
