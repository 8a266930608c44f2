"""Parts of long plans, as both the live and the simulated planner propose them: the master judges each part quickly.

Changes that belong together stay in one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ganger_master.core.plan_changes import PlanChange, StartChange, claims_in
from ganger_master.planner.context import Plan

# The master judges such a part in 8 ms, and serves other calls between two parts.
_CHANGES_MOST: Final = 200
_CLAIMS_MOST: Final = 1_000
# Parts that are with the master at once.
_PARTS_AHEAD: Final = 4


def parts_of(plan: Plan, most: int = _CHANGES_MOST, most_claims: int = _CLAIMS_MOST) -> Iterator[Plan]:
    """Yield the parts of a plan in the order in which they are proposed; none of an empty plan.

    A part has at most `most` changes with `most_claims` claims. A group, whose changes follow each other, is never
    split; a group larger than that is a part by itself. Findings and reservations are in the first part, the line of
    pending jobs in the last one.
    """
    parts = list(_split(plan.changes, most, most_claims)) or ([] if plan.is_empty else [()])
    for number, changes in enumerate(parts, 1):
        is_first, is_last = number == 1, number == len(parts)
        yield Plan(
            changes,
            plan.findings if is_first else (),
            plan.line if is_last else None,
            plan.reservations if is_first else None,
        )


def batches_of(parts: Iterable[Plan], most: int = _PARTS_AHEAD) -> Iterator[list[Plan]]:
    """Yield the parts in batches whose parts may be judged in any order: a plan never starts two jobs on the same
    devices. Any other change may need an earlier one, so its part is alone."""
    batch: list[Plan] = []
    for part in parts:
        only_starts = all(isinstance(change, StartChange) for change in part.changes)
        if batch and (not only_starts or len(batch) == most):
            yield batch
            batch = []
        batch.append(part)
        if not only_starts:
            yield batch
            batch = []
    if batch:
        yield batch


def _split(changes: Sequence[PlanChange], most: int, most_claims: int) -> Iterator[tuple[PlanChange, ...]]:
    part: list[PlanChange] = []
    claims = 0
    for group in _groups(changes):
        own = sum([len(claims_in(change)) for change in group])
        if part and (len(part) + len(group) > most or claims + own > most_claims):
            yield tuple(part)
            part, claims = [], 0
        part.extend(group)
        claims += own
    if part:
        yield tuple(part)


def _groups(changes: Sequence[PlanChange]) -> Iterator[list[PlanChange]]:
    group: list[PlanChange] = []
    for change in changes:
        if group and (not change.together or change.together != group[-1].together):
            yield group
            group = []
        group.append(change)
    if group:
        yield group
