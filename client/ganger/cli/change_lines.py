"""A change of a running job in one line: a move under way, a pack that was kept, a size that was given back."""

from __future__ import annotations

from collections.abc import Mapping

from ganger.v1.job_pb2 import Event
from ganger.wire import times

_WORDS = {
    "move_begun": "moves",
    "move_done": "moved",
    "move_aborted": "move called off",
    "resize_begun": "resizes",
    "resize_done": "resized",
    "resize_aborted": "resize called off",
    "gang_joined": "packed",
    "rows_changed": "takes turns",
    "turns_ended": "alone again",
    "turn_refused": "turn refused",
    "change_kept": "kept",
    "change_undone": "undone",
    "stop_ordered": "stopped by rule",
    "mode_changed": "by load",
}


def row(event: Event) -> tuple[str, ...] | None:
    """When, whom, what, and the figures of it; None for what is no change of running jobs."""
    word = _WORDS.get(event.kind)
    if word is None or not event.subject.startswith(("jobs/", "cluster")):
        return None
    when = times.local_datetime(event.time).strftime("%H:%M:%S")
    cause = event.cause.rstrip(":")
    by = f"by {cause}" if cause and not cause.startswith("daemon") else ""
    told = ", ".join(part for part in (event.message, figures(event.figures), by) if part)
    return when, event.subject.removeprefix("jobs/"), word, told


def figures(given: Mapping[str, str]) -> str:
    """Without what only programs need."""
    shown = {name: text for name, text in given.items() if name not in ("epoch", "source", "set_epoch")}
    return " ".join(f"{name}={text}" for name, text in sorted(shown.items()))
