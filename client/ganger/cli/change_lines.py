"""The last changes of running jobs, a line each: a move under way, a pack that was kept, a size that was given back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ganger.history import Happening, sentence
from ganger.v1.job_pb2 import Event
from ganger.wire import times

_KINDS: Final = frozenset(
    {
        "move_begun",
        "move_done",
        "move_aborted",
        "move_back",
        "resize_begun",
        "resize_done",
        "resize_aborted",
        "gang_joined",
        "rows_changed",
        "turns_ended",
        "turn_refused",
        "change_kept",
        "change_undone",
        "stop_ordered",
        "mode_changed",
    }
)


def change_rows(events: Iterable[Event], before: Iterable[tuple[str, ...]] = ()) -> list[tuple[str, ...]]:
    """When, whom, and what in a sentence, after the rows `before`; of whom the same is told at the same time, in one
    row. Nothing of what is no change of running jobs."""
    shown = list(before)
    for event in events:
        if event.kind not in _KINDS or not event.subject.startswith(("jobs/", "cluster")):
            continue
        when = times.local_datetime(event.time).strftime("%H:%M:%S")
        subject, told = event.subject.removeprefix("jobs/"), sentence(happening(event))
        last = shown[-1] if shown else ()
        if last and (last[0], last[2]) == (when, told):
            shown[-1] = (when, f"{last[1]} {subject}", told)
        else:
            shown.append((when, subject, told))
    return shown


def happening(event: Event) -> Happening:
    """The event as plain values."""
    return Happening(times.unix_seconds(event.time), event.kind, event.cause, event.message, dict(event.figures))
