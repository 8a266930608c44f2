"""What happened to one job, told from its events: what was done, by whom and why, how long it took, what came of it.

Pure: the same events give the same story. A kind of event that is not known here is told as it stands, so that a newer
master's events are not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ganger.units import format_duration


class Happening(NamedTuple):
    """An event of the API as plain values; time is Unix seconds."""

    time: float
    kind: str
    cause: str
    message: str
    figures: Mapping[str, str]


class Chapter(NamedTuple):
    """One sentence of a story, with the figures it rests on."""

    time: float
    kind: str
    text: str
    figures: Mapping[str, str]


@dataclass(slots=True)
class Totals:
    """Sums over a story; seconds. `lost_s`: of attempts that failed, what they had run since their last checkpoint."""

    waited_s: float = 0.0
    ran_s: float = 0.0
    parked_s: float = 0.0
    starting_s: float = 0.0
    lost_s: float = 0.0
    moves: int = 0
    move_pauses_ms: float = 0.0
    suspensions: int = 0
    checkpoints: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Teller:
    """Where the story is; times are zero where it is not so now."""

    totals: Totals = field(default_factory=Totals)
    waiting_since: float = 0.0
    starting_since: float = 0.0
    running_since: float = 0.0
    stopping_since: float = 0.0
    parked_since: float = 0.0
    moving_since: float = 0.0
    # Since when nothing of what it did is on storage.
    unsaved_since: float = 0.0
    # What it had done is in memory somewhere.
    is_resuming: bool = False

    def leave(self, now: float) -> None:
        """Whatever it was in the middle of has come to an end."""
        totals = self.totals
        if self.running_since:
            totals.ran_s += now - self.running_since
        if self.parked_since:
            totals.parked_s += now - self.parked_since
        if self.starting_since:
            totals.starting_s += now - self.starting_since
        if self.waiting_since:
            totals.waited_s += now - self.waiting_since
        self.running_since = self.parked_since = self.starting_since = self.waiting_since = self.stopping_since = 0.0


def tell(events: Iterable[Happening], now: float = 0.0) -> tuple[list[Chapter], Totals]:
    """The story of a job or an array, of its events in their order; checkpoints in a row are one sentence. `now`: until
    when the sums count what has not ended; without it until the last event that changed anything."""
    teller = _Teller()
    chapters: list[Chapter] = []
    for event in events:
        say = _SAYINGS.get(event.kind, _plainly)
        text = say(teller, event)
        if event.kind == "checkpoint_complete" and chapters and chapters[-1].kind == event.kind:
            chapters.pop()
        if text:
            chapters.append(Chapter(event.time, event.kind, text, event.figures))
    if chapters and now > chapters[-1].time:
        teller.leave(now)
    return chapters, teller.totals


def summary(totals: Totals) -> str:
    """One line; parts that are nothing are left out."""
    parts = [
        f"{word} {_seconds(seconds)}"
        for word, seconds in (
            ("waited", totals.waited_s),
            ("starting", totals.starting_s),
            ("ran", totals.ran_s),
            ("parked", totals.parked_s),
            ("lost", totals.lost_s),
        )
        if seconds >= 0.0005
    ]
    if totals.moves:
        word = "move" if totals.moves == 1 else "moves"
        parts.append(f"{totals.moves} {word}, {totals.move_pauses_ms:.0f} ms standing still for them")
    if totals.suspensions:
        parts.append(f"suspended {totals.suspensions} times" if totals.suspensions > 1 else "suspended once")
    if totals.checkpoints:
        parts.append(f"{totals.checkpoints} checkpoint{'s' if totals.checkpoints > 1 else ''}")
    if totals.failures:
        parts.append(f"{totals.failures} failed attempt{'s' if totals.failures > 1 else ''}")
    return "; ".join(parts)


# -- sayings -----------------------------------------------------------------------------------------------------------


def _submitted(teller: _Teller, event: Happening) -> str:
    teller.waiting_since = event.time
    gpus, tasks = event.figures.get("gpus", "0"), event.figures.get("tasks", "1")
    size = f"{gpus} GPU{'' if gpus == '1' else 's'}" + (f" in {tasks} tasks" if tasks not in ("1", gpus) else "")
    return f"submitted{_by(event)}: {size if gpus != '0' else f'{tasks} tasks without GPUs'}"


def _approved(teller: _Teller, event: Happening) -> str:
    waited = float(event.figures.get("waited_s", "0") or 0)
    teller.leave(event.time)
    teller.starting_since = event.time
    if not teller.is_resuming:
        teller.unsaved_since = event.time
    teller.is_resuming = False
    parts = [f"got its gang on {event.figures.get('nodes', '?')}{_by(event)}"]
    if waited >= 0.1:
        parts.append(f"after it had waited {_seconds(waited)}")
        if event.message:
            parts.append(f"for: {event.message}")
        if "after" in event.figures:
            parts.append(f"free since {_and(event.figures['after'].split())} left")
    return ", ".join(parts) + _gain(event)


def _running(teller: _Teller, event: Happening) -> str:
    took = event.time - teller.starting_since if teller.starting_since else 0.0
    teller.leave(event.time)
    teller.running_since = event.time
    return f"stepped after {_seconds(took)}" if took else "stepped"


def _suspend_ordered(teller: _Teller, event: Happening) -> str:
    teller.stopping_since = event.time
    return f"told to rest at {event.figures.get('level', '?').lower()}{_by(event)}{_gain(event)}"


def _parked(teller: _Teller, event: Happening) -> str:
    took = f", {_seconds(event.time - teller.stopping_since)} after the order" if teller.stopping_since else ""
    teller.leave(event.time)
    teller.parked_since = event.time
    teller.totals.suspensions += 1
    return f"rests at {event.figures.get('level', '?').lower()}, step {event.figures.get('step', '?')}{took}"


def _resume_ordered(teller: _Teller, event: Happening) -> str:
    rested = f" after {_seconds(event.time - teller.parked_since)} at rest" if teller.parked_since else ""
    teller.leave(event.time)
    teller.starting_since = event.time
    teller.is_resuming = True
    return f"told to go on{_by(event)}{rested}{_gain(event)}"


def _move_begun(teller: _Teller, event: Happening) -> str:
    teller.moving_since = event.time
    return f"moves to {event.figures.get('nodes', '?')}{_by(event)}{_gain(event)}"


def _move_committed(teller: _Teller, event: Happening) -> str:
    step = event.figures.get("step", "?")
    took = f", {_seconds(event.time - teller.moving_since)} after the order" if teller.moving_since else ""
    # Its next step is told of as that of a start.
    teller.leave(event.time)
    teller.starting_since = event.time
    return f"handed over at step {step}{took}; it ran on until then"


def _move_done(teller: _Teller, event: Happening) -> str:
    pause = float(event.figures.get("pause_ms", "0") or 0)
    teller.totals.moves += 1
    teller.totals.move_pauses_ms += pause
    expected = event.figures.get("expected_pause_ms")
    return f"moved: it stood still for {pause:.0f} ms{f', {expected} expected' if expected else ''}, and lost no step"


def _resize_begun(teller: _Teller, event: Happening) -> str:
    teller.moving_since = event.time
    figures = event.figures
    # What it is for says more than its goal's name alone.
    helped = f" for {figures['for']}" if "for" in figures else ""
    why = f": {event.message}" if event.message else ""
    return f"goes from {figures.get('devices', '?')} GPUs to {figures.get('becomes', '?')}{_by(event)}{helped}{why}"


def _resize_done(teller: _Teller, event: Happening) -> str:
    pause = float(event.figures.get("pause_ms", "0") or 0)
    teller.totals.moves += 1
    teller.totals.move_pauses_ms += pause
    return f"resized: it stood still for {pause:.0f} ms, and lost no step"


def _given_up(teller: _Teller, event: Happening) -> str:
    teller.moving_since = 0.0
    what = "change of size" if event.kind == "resize_aborted" else "move"
    return f"the {what} was called off, nothing is lost: {event.message}"


def _kept(teller: _Teller, event: Happening) -> str:
    what = "was kept" if event.kind == "change_kept" else "did not help"
    return f"the change {what}: {_figures(event) or event.message}{_by(event)}"


def _cores(teller: _Teller, event: Happening) -> str:
    cores = float(event.figures.get("millicores", "0") or 0) / 1_000
    what = f"put on other cores, {cores:g} in all" if event.figures.get("repin") == "1" else f"given {cores:g} cores"
    return f"{what}{_by(event)}{f': {event.message}' if event.message else ''}"


def _takes_turns(teller: _Teller, event: Happening) -> str:
    figures = event.figures
    rows, quantum = figures.get("rows", "?").split(), figures.get("quantum_seconds", "?")
    share = f"{len(rows)} of {figures.get('of_rows', '?')} turns of {quantum} s"
    return f"takes turns on its GPUs with others, {share} in nodeSets/{figures.get('node_set', '?')}{_by(event)}"


def _turns_ended(teller: _Teller, event: Happening) -> str:
    return "has its GPUs to itself again, without turns"


def _turn_refused(teller: _Teller, event: Happening) -> str:
    return f"waits for GPUs of its own: {event.message}"


def _checkpoint(teller: _Teller, event: Happening) -> str:
    teller.totals.checkpoints += 1
    teller.unsaved_since = event.time
    return f"checkpoint {teller.totals.checkpoints} complete, at step {event.figures.get('step', '?')}"


def _attempt_failed(teller: _Teller, event: Happening) -> str:
    teller.totals.failures += 1
    if teller.unsaved_since:
        teller.totals.lost_s += event.time - teller.unsaved_since
    teller.unsaved_since, teller.is_resuming = 0.0, False
    return f"the attempt failed: {event.message or event.figures.get('outcome', '?')}"


def _pending(teller: _Teller, event: Happening) -> str:
    teller.leave(event.time)
    teller.waiting_since = event.time
    return f"waits again: {event.message}"


def _stop_ordered(teller: _Teller, event: Happening) -> str:
    return f"stopped by the rule of {event.cause}: {event.message}"


def _ended(teller: _Teller, event: Happening) -> str:
    teller.leave(event.time)
    word = event.kind.removeprefix("job_")
    return f"{word}{f': {event.message}' if event.message and event.message != word else ''}"


def _cancelled(teller: _Teller, event: Happening) -> str:
    return f"told to end{_by(event)}{f': {event.message}' if event.message else ''}"


def _array_submitted(teller: _Teller, event: Happening) -> str:
    figures = event.figures
    limit = f", {figures['at_once']} at once" if figures.get("at_once") != figures.get("members") else ""
    rule = f", stop rule {figures['rule']}" if figures.get("rule", "none") != "none" else ""
    return f"submitted{_by(event)}: {figures.get('members')} jobs of {figures.get('gpus_each')} GPUs each{limit}{rule}"


def _member_ended(teller: _Teller, event: Happening) -> str:
    figures = dict(event.figures)
    member, state, ran = (figures.pop(name, "") for name in ("member", "state", "run_s"))
    figures.pop("job", None)
    given = {name: figures.pop(name) for name in list(figures) if name.startswith("parameter_")}
    named = " ".join(f"{name.removeprefix('parameter_')}={text}" for name, text in sorted(given.items()))
    told = " ".join(f"{name}={text}" for name, text in sorted(figures.items()))
    teller.totals.ran_s += float(ran or 0)
    parts = [f"{member}{f' ({named})' if named else ''} {state}, ran {_seconds(float(ran or 0))}", told, event.message]
    return "; ".join(part for part in parts if part)


def _array_ended(teller: _Teller, event: Happening) -> str:
    return "ended: " + ", ".join(f"{count} {state}" for state, count in sorted(event.figures.items()))


def _nothing(teller: _Teller, event: Happening) -> str:
    return ""


def _plainly(teller: _Teller, event: Happening) -> str:
    parts = [part for part in (event.message, _figures(event)) if part]
    return event.kind.replace("_", " ") + _by(event) + (f": {'; '.join(parts)}" if parts else "")


_SAYINGS: dict[str, Callable[[_Teller, Happening], str]] = {
    "job_submitted": _submitted,
    "gang_approved": _approved,
    "gang_running": _running,
    "gang_done": _nothing,
    "suspend_ordered": _suspend_ordered,
    "gang_parked": _parked,
    "resume_ordered": _resume_ordered,
    "move_begun": _move_begun,
    "move_committed": _move_committed,
    "move_done": _move_done,
    "move_aborted": _given_up,
    "resize_begun": _resize_begun,
    "resize_committed": _move_committed,
    "resize_done": _resize_done,
    "resize_aborted": _given_up,
    "change_kept": _kept,
    "change_undone": _kept,
    "cores_changed": _cores,
    "rows_changed": _takes_turns,
    "turns_ended": _turns_ended,
    "turn_refused": _turn_refused,
    "checkpoint_complete": _checkpoint,
    "attempt_failed": _attempt_failed,
    "job_pending": _pending,
    "stop_ordered": _stop_ordered,
    "cancel_ordered": _cancelled,
    "job_succeeded": _ended,
    "job_failed": _ended,
    "job_cancelled": _ended,
    "job_stopped": _ended,
    "array_submitted": _array_submitted,
    "member_ended": _member_ended,
    "array_ended": _array_ended,
}


def _by(event: Happening) -> str:
    """Of "scheduler:" without a name the colon goes: it is the default one. A daemon only says what it saw."""
    cause = event.cause.rstrip(":")
    return f" by {cause}" if cause and not cause.startswith(("daemon", "epoch")) else ""


def _gain(event: Happening) -> str:
    """What a plan's change is for, and what it is expected to bring."""
    figures = event.figures
    goal = figures.get("goal")
    if not goal:
        return f": {event.message}" if event.message and event.kind != "gang_approved" else ""
    helped = f" for {figures['for']}" if "for" in figures else ""
    saved = figures.get("saved_gpu_seconds")
    return f", {goal.lower()}{helped}" + (f", to save {saved} GPU-seconds" if saved else "")


def _figures(event: Happening) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(event.figures.items()))


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else format_duration(seconds)
