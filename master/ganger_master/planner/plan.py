"""One pass of the planner: who should run where, and the changes of one plan that lead there.

Jobs are ranked by the policy's order and chosen by counts; who runs and stays chosen keeps its place. The others are
placed in order: into what is free, else into what would be free without those who were not chosen, who are stopped only
where they are in the way. Who finds no place even so has a hole made by stopping those that rank lower, as few GPUs of
them as will do: else a large gang would wait for ever behind fragments. Under an order that regroups others make room
first, whoever they are, if they find places elsewhere, where they start in a later pass. What somebody has to leave
first waits for a later pass, too, and nobody who ranks lower starts there meanwhile. Where somebody who has waited too
long could be, nobody takes what gets free who could not be stopped for it again. The pass remembers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from ganger.cluster.resources import GangShape
from ganger.cluster.room import CapacityIndex

from ganger_master.core.commands import Change
from ganger_master.core.model import Gang, JobRecord
from ganger_master.planner.context import units
from ganger_master.planner.in_place_resize import Resizing
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import Choice, asked, choose
from ganger_master.planner.place_stage import Fitting
from ganger_master.planner.preempt_stage import Staying
from ganger_master.planner.refusal_backoff import NOTHING_KEPT_OUT, KeptOut
from ganger_master.planner.terms import AS_ASKED, PassTerms
from ganger_master.policies.job_facts import Capacity, Floats, Integers
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.placements import PlacementPreference, Want


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """`waits`: somebody chosen has no place yet, so a later pass may find it one though nothing happens.
    `next_change_s`: when the order may change by itself; infinite if it does not in jumps. `line`: numbers of all who
    waited, first job first, the started ones among them. `unplaced`: numbers of chosen ones for whom no place was
    found, whoever were stopped for them; without leave to stop anybody, of those known to be such. `follow`: numbers of
    those who have a place once all that it stops is gone, first job first. `displaced`: under an order of which they
    rest for that, numbers of those it stops who have no other place. `resizing`: what to remember of changes of
    size if it is proposed; None: what was before."""

    changes: tuple[Change, ...] = ()
    waits: bool = False
    next_change_s: float = math.inf
    line: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    unplaced: frozenset[int] = frozenset()
    follow: tuple[int, ...] = ()
    displaced: frozenset[int] = frozenset()
    resizing: Resizing | None = None

    @property
    def leaves_waiting(self) -> bool:
        """Whether anybody waits whom it does not start, chosen or not."""
        return len(self.line) > sum(change.kind == "START" for change in self.changes)


NOTHING_TO_DO = PlanDraft()

_ANYTHING = Want()
# To place so many in vain takes less than to rank all who are live.
_FEW = 8


def plan(
    order: JobOrder,
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    room: CapacityIndex,
    may_stop: bool = True,
    remaining_s: Callable[[Integers], Floats] | None = None,
    kept_out: KeptOut = NOTHING_KEPT_OUT,
    terms: PassTerms = AS_ASKED,
) -> PlanDraft:
    """The changes to propose now. `room` is as it is now and is left so. Without `may_stop` only those start who find
    room as it is. `remaining_s` gives an oracle's seconds by number, for orders that ask for one. `kept_out`: what was
    found not to be possible for some, whatever else is free. `terms`: others than what was asked and is held."""
    if not table.has_waiting:
        return NOTHING_TO_DO
    few = table.waiting_jobs(_FEW) if kept_out is NOTHING_KEPT_OUT else []
    if few and sum([job.gpus for job in few]) <= _free_devices(placement, room):
        # Where there is room for all who wait, it makes no difference who goes first.
        found = started(few, placement, table, now, room, kept_out, terms)
        if found is not None:
            return found
    of = asked(order, table, now, capacity, remaining_s, kept_out, bool(terms.mates))
    if of.nobody_comes:
        # Nobody leaves but for somebody who comes.
        return PlanDraft(next_change_s=of.changes_at, line=of.line)
    return carried_out(choose(of), order, placement, table, now, room, may_stop, kept_out, terms)


def started(
    jobs: Sequence[JobRecord],
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    room: CapacityIndex,
    kept_out: KeptOut = NOTHING_KEPT_OUT,
    terms: PassTerms = AS_ASKED,
) -> PlanDraft | None:
    """The pass that starts these jobs, which wait, in this order, and no others; None if one of them finds no room."""
    fitting = Fitting(placement, room, table, now, kept_out, terms)
    if fitting.starts_all(jobs):
        return PlanDraft(fitting.changes, line=np.array([job.number for job in jobs], np.int64))
    fitting.undo()
    return None


def _free_devices(placement: PlacementPreference, room: CapacityIndex) -> int:
    if placement.counts is not None:
        return placement.counts(room.view).count
    room.refresh()
    return room.free_devices


def may_start(
    placement: PlacementPreference,
    table: LiveTable,
    room: CapacityIndex,
    terms: PassTerms = AS_ASKED,
    resting: Collection[int] = (),
) -> bool:
    """Whether anybody may find room as it is but those who are `resting`, by number. If not, `plan` starts nobody
    without leave to stop others, whoever goes first."""
    room.refresh()
    vain: set[GangShape] = set()
    for job in table.waiting_at_most(room.free_devices):
        if job.number in resting:
            continue
        shape = terms.shape(job)
        if job.epoch or shape.locality.wish:
            # Where it rests, and for how long it has wished, make a difference.
            return True
        if shape not in vain:
            if placement.place(room, shape, _ANYTHING) is not None:
                return True
            vain.add(shape)
    return False


def carried_out(
    choice: Choice,
    order: JobOrder,
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    room: CapacityIndex,
    may_stop: bool,
    kept_out: KeptOut = NOTHING_KEPT_OUT,
    terms: PassTerms = AS_ASKED,
    resized: Sequence[tuple[JobRecord, Gang]] = (),
    placing: Integers | None = None,
    going: Sequence[tuple[JobRecord, Gang]] | None = None,
) -> PlanDraft:
    """The changes that lead to a choice, made by `order`, or as if by it. `resized`: who runs and is stopped to start
    with another size; they count as neither running nor chosen. `placing`: the chosen ones who wait, first one first,
    if not in the order of the line. `going`: who gives back what, if not whoever the table says does all it holds."""
    rows, line, waiting, is_chosen = choice.rows, choice.line, choice.waiting, choice.is_chosen
    first = line[(is_chosen & waiting)[line]] if placing is None else placing
    if not (len(first) or resized):
        return PlanDraft(next_change_s=choice.changes_at, line=choice.told)
    fitting = Fitting(placement, room, table, now, kept_out, terms)
    fitting.stop(resized)
    if np.count_nonzero(choice.overdue):
        numbers = choice.facts.number
        fitting.keep_for(set(numbers[choice.overdue & waiting].tolist()), set(numbers[choice.passing].tolist()))
    if going is None:
        going = table.going
    going = [*going, *resized]
    crowded = fitting.start(table.jobs_at(rows[first]), going=going)
    if not crowded:
        return PlanDraft(fitting.changes, next_change_s=choice.changes_at, line=choice.told)
    unplaced = frozenset(job.number for job in crowded if job.number in kept_out.unplaced)
    follow: tuple[int, ...] = ()
    if may_stop:
        leaving = units(table.gangs_at(rows[line[(choice.facts.is_running & ~is_chosen)[line]]]), terms.mates)
        staying = Staying(order, table, choice, terms, room) if order.preempts else None
        left = fitting.make_way(crowded, leaving, going, staying)
        if left and not order.is_strict:
            # What they cannot use serves those behind them.
            fitting.start(table.jobs_at(rows[line[(waiting & ~is_chosen)[line]]]), beside_others=True)
        unplaced = frozenset(job.number for job in left)
        follow = tuple([job.number for job in crowded if job.number not in unplaced])
    fitting.undo()
    unplaced -= fitting.waited_for
    displaced = frozenset(fitting.displaced) if order.rests else frozenset[int]()
    return PlanDraft(fitting.changes, True, choice.changes_at, choice.told, unplaced, follow, displaced)
