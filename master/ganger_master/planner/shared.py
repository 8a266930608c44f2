"""The whole pass of `gandiva`: trials of co-locations at the end of a quantum, and time slicing.

Nodes rotate slices by themselves, and a plan only changes the slice matrices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.refusals import Reason

from ganger_master.core.plan_changes import Goal, PlanChange, ResumeChange, TrialFinding
from ganger_master.planner.context import PlanContext, PlanOutcome
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.leaving import follow, places_of
from ganger_master.planner.matrices import plan_matrices
from ganger_master.planner.migration_plans import LONGEST_S, MigrationPlan, hold, is_free
from ganger_master.planner.packs import Colocations, JobRates, plan_packs, with_refusals
from ganger_master.planner.plan import PlanDraft
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner.timeslice_stage import NOTHING as NOTHING_OWED
from ganger_master.planner.timeslice_stage import Fairness, credited, moved, stayed
from ganger_master.policies.fairness import QUANTUM_S
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.stages import Tune

if TYPE_CHECKING:
    from ganger_master.planner.migrate_stage import MigrationStage


@dataclass(frozen=True, slots=True)
class Shared:
    """The state between two passes. `looked_s`: when trials of co-locations were last judged."""

    looked_s: float = -math.inf
    packs: Colocations = field(default_factory=Colocations)
    fairness: Fairness = NOTHING_OWED

    def without(self, before: Shared, refused: Set[int]) -> Shared:
        """Return the state after changes of these jobs were refused. `before`: the state before they were planned."""
        packs = with_refusals(before.packs, self.packs, refused)
        return replace(self, packs=packs, fairness=stayed(self.fairness, before.fairness, refused))


NOTHING: Final = Shared()
_GOING: Final = (Goal.FAIRNESS, Goal.DRAIN)
# Margin over the measured minimum quantum, and how long that measurement counts.
_QUANTUM_MARGIN: Final = 1.5
_QUANTUM_BELIEVED_S: Final = 60.0


class SharingStage:
    """The stage, with its state. `migrations`: the stage whose migration plans keep their places and jobs."""

    def __init__(self, migrations: MigrationStage | None, shared: Shared | None = None) -> None:
        self._migrations = migrations
        self.shared = self._before = shared or NOTHING
        # The least quantum where slice switches take long, and until when that counts.
        self._least_quantum_s, self._believed_until_s = 0.0, -math.inf

    def plan(self, context: PlanContext) -> None:
        self._before = self.shared
        if context.is_giving:
            # Shrinking jobs are about to free devices for pending jobs.
            context.add(PlanDraft(line=np.array(context.last_line, np.int64)))
            return
        cluster = context.cluster
        found, self.shared, findings = plan_shared(
            context.policy.placement,
            context.jobs,
            context.now,
            context.room,
            self.shared,
            context.measured.together,
            context.capacity.gpus,
            context.settings.look_s or min(QUANTUM_S, context.settings.pace.every_s),
            context.excluded,
            turn_s=self._quantum_s(cluster.quantum_s, context.now),
            received_s=context.measured.received_s,
            draining=cluster.draining,
            changing=cluster.changing,
            errands=self._migrations.moving.errands if self._migrations is not None else (),
            restores_cores=not context.policy.has(Tune),
        )
        context.add(found)
        context.come_back(found.next_change_s)
        context.findings.extend(findings)

    def _quantum_s(self, wanted_s: float | None, now: float) -> float | None:
        """Return the seconds of a time slice: the cluster's quantum, or more where slice switches need it."""
        if wanted_s is None or now >= self._believed_until_s:
            return wanted_s
        return max(wanted_s, self._least_quantum_s)

    def is_idle(self, context: PlanContext) -> bool:
        return False

    def settle(self, outcome: PlanOutcome) -> None:
        self.shared = self.shared.without(self._before, outcome.refused)
        for _, refusals in outcome.refusals:
            if refusals and refusals[0].reason is Reason.QUANTUM:
                least_s = refusals[0].figures.get("least_milliseconds", 0) / 1000
                self._least_quantum_s = _QUANTUM_MARGIN * least_s
                self._believed_until_s = outcome.now + _QUANTUM_BELIEVED_S

    @property
    def on_trial(self) -> frozenset[int]:
        return self.shared.packs.on_trial

    @property
    def memory(self) -> Mapping[str, Any]:
        return {"shared": self.shared}


def plan_shared(
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    room: CapacityIndex,
    remembered: Shared,
    seen: JobRates,
    gpus: int,
    quantum_s: float,
    kept_out: ExcludedJobs = NONE_EXCLUDED,
    turn_s: float | None = None,
    received_s: Mapping[int, float] = MappingProxyType({}),
    draining: Collection[str] = (),
    changing: Collection[int] = (),
    errands: Sequence[MigrationPlan] = (),
    restores_cores: bool = True,
) -> tuple[PlanDraft, Shared, tuple[TrialFinding, ...]]:
    """Return the changes to propose now, the state if they are proposed, and the findings of trials.

    gpus: number of GPUs of the cluster. kept_out: jobs and nodes that recent refusals exclude.
    turn_s: seconds of a time slice; None: no time slicing.
    received_s: seconds that each job has run on its devices, by number.
    draining: names of nodes to be emptied. restores_cores: as in `plan_packs`.
    changing: numbers of time-slice groups whose last change some of their nodes have not acknowledged.
    errands: migration plans under way: their places are kept, and their jobs left as they are.
    """
    if table.quotas is not None and table.quotas.are_contested:
        kept_out = kept_out.resting(table.quotas.beyond(table.waiting_jobs(len(table))))
    is_due = now >= remembered.looked_s + quantum_s
    looked_s, packs, fairness = now if is_due else remembered.looked_s, remembered.packs, remembered.fairness
    tried: tuple[PlanChange, ...] = ()
    findings: tuple[TrialFinding, ...] = ()
    if is_due:
        crowded = table.has_waiting or _take_turns(table)
        tried, packs, findings = plan_packs(
            packs, table, room.view, now, seen, gpus, crowded, restores_cores=restores_cores
        )
    followed, packs = follow(packs, table, room.view, now, seen, changing)
    # A plan that has timed out keeps no places.
    errands = [errand for errand in errands if now < errand.began_s + LONGEST_S]
    busy = packs.on_trial.union([change.number for change in (*tried, *followed)], *packs.together)
    busy = busy.union(*[errand.numbers for errand in errands])
    room.follow()
    trying = Trial(room)
    try:
        hold(errands, table, trying)
        if turn_s is not None:
            fairness = credited(fairness, table.running, _weights(table, now), received_s, room.view, now, turn_s)
        for change in followed:
            if isinstance(change, ResumeChange) and is_free(room.view, places := places_of(table, change)):
                trying.take(places)
        found = plan_matrices(placement, table, now, room, turn_s, kept_out, busy, fairness, draining, changing)
        fairness = moved(fairness, [change for change in found.changes if change.purpose.goal in _GOING], now)
    finally:
        trying.undo()
    # Co-locations are watched as long as they last, and time-sliced jobs are measured meanwhile.
    is_watching = bool(packs.packs) or _take_turns(table)
    next_s = min(found.next_change_s, looked_s + quantum_s) if is_watching else found.next_change_s
    draft = replace(found, changes=(*tried, *followed, *found.changes), next_change_s=max(next_s, now + 1.0))
    return draft, Shared(looked_s, packs, fairness), findings


def _weights(table: LiveTable, now: float) -> dict[int, float]:
    _, facts = table.facts(now)
    return dict(zip(facts.number.tolist(), facts.weight.tolist(), strict=True))


def _take_turns(table: LiveTable) -> bool:
    return any(gang is not None and gang.node_set for gang in table.gangs)
