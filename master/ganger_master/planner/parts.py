"""How a long plan is told: in parts, so that none of them takes the master long; what belongs together in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ganger_master.core.commands import Change


def parts_of(changes: Sequence[Change], most: int) -> Iterator[tuple[Change, ...]]:
    """In this order, at most so many at once; a group, whose changes follow each other, is never cut, and one that is
    longer than that is a part by itself."""
    part: list[Change] = []
    for group in _groups(changes):
        if part and len(part) + len(group) > most:
            yield tuple(part)
            part = []
        part.extend(group)
    if part:
        yield tuple(part)


def _groups(changes: Sequence[Change]) -> Iterator[list[Change]]:
    group: list[Change] = []
    for change in changes:
        if group and (not change.together or change.together != group[-1].together):
            yield group
            group = []
        group.append(change)
    if group:
        yield group
