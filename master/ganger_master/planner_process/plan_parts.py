"""Parts of long plans: a plan is split so that the master judges each part quickly.

Changes that belong together stay in one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

from ganger_master.core.plan_changes import PlanChange, StartChange, claims_in

# The master judges such a part in 8 ms, and serves other calls between two parts.
_CHANGES_MOST: Final = 200
_CLAIMS_MOST: Final = 1_000
# Parts that are with the master at once.
_PARTS_AHEAD: Final = 4

_M = TypeVar("_M")


def parts_of(
    changes: Sequence[PlanChange], most: int = _CHANGES_MOST, most_claims: int = _CLAIMS_MOST
) -> Iterator[tuple[PlanChange, ...]]:
    """Yield the changes in their order, at most `most` with `most_claims` claims in a part. A group, whose changes
    follow each other, is never split; a group larger than that is a part by itself."""
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


def batches_of(
    messages: Iterable[tuple[_M, Sequence[PlanChange]]], most: int = _PARTS_AHEAD
) -> Iterator[list[tuple[_M, Sequence[PlanChange]]]]:
    """Yield the messages, each with its changes, in batches whose messages may be judged in any order: a plan never
    starts two jobs on the same devices. Any other change may need an earlier one, so its message is alone."""
    batch: list[tuple[_M, Sequence[PlanChange]]] = []
    for message, changes in messages:
        only_starts = all(isinstance(change, StartChange) for change in changes)
        if batch and (not only_starts or len(batch) == most):
            yield batch
            batch = []
        batch.append((message, changes))
        if not only_starts:
            yield batch
            batch = []
    if batch:
        yield batch


def _groups(changes: Sequence[PlanChange]) -> Iterator[list[PlanChange]]:
    group: list[PlanChange] = []
    for change in changes:
        if group and (not change.together or change.together != group[-1].together):
            yield group
            group = []
        group.append(change)
    if group:
        yield group
