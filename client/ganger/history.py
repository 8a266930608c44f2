"""What happened to one job, from its events: each action with its cause, reason, duration and outcome.

Pure: the same events give the same history. An event of an unknown kind is printed as it is, so that events of a newer
master are not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from ganger.job_state import JobTimes, Span, Totals
from ganger.text import counted, format_duration


class HistoryEvent(NamedTuple):
    """An event of the API as plain values; time is Unix seconds."""

    time: float
    kind: str
    cause: str
    message: str
    figures: Mapping[str, str]


class HistorySection(NamedTuple):
    """One sentence of a history, with the figures of its event."""

    time: float
    kind: str
    text: str
    figures: Mapping[str, str]


def spans_of(events: Iterable[HistoryEvent], now: float) -> list[Span]:
    """Return the states of a job in order, from its events. `now`: end of the present one, in Unix seconds."""
    times = JobTimes()
    last = 0.0
    for event in events:
        _sentence_of(times, event)
        last = event.time
    if now > last:
        times.enter(now)
    return times.spans


def history_of(events: Iterable[HistoryEvent], now: float = 0.0) -> tuple[list[HistorySection], Totals]:
    """Return the history and the totals of a job or an array, from its events in order. Successive checkpoints are one
    sentence. `now`: end of the states that still last, in Unix seconds; 0 leaves them out of the totals."""
    times = JobTimes()
    sections: list[HistorySection] = []
    for event in events:
        text = _sentence_of(times, event)
        if event.kind == "checkpoint_complete" and sections and sections[-1].kind == event.kind:
            sections.pop()
        if text:
            sections.append(HistorySection(event.time, event.kind, text, event.figures))
    if sections and now > sections[-1].time:
        times.enter(now)
    return sections, times.totals


def sentence(event: HistoryEvent) -> str:
    """Return the sentence of one event alone; "" for events without one."""
    return _sentence_of(JobTimes(), event)


def summary(totals: Totals) -> str:
    """Return the totals as one line, without those that are zero."""
    parts = [
        f"{word} {_duration(seconds)}"
        for word, seconds in (
            ("waited", totals.waited_s),
            ("starting", totals.starting_s),
            ("ran", totals.ran_s),
            ("time-sliced", totals.turns_s),
            ("parked", totals.parked_s),
            ("lost", totals.lost_s),
        )
        if seconds >= 0.0005
    ]
    changes = ((totals.moves, "move", totals.move_pauses_ms), (totals.resizes, "resize", totals.resize_pauses_ms))
    for number, noun, pauses_ms in changes:
        if number:
            them = "it" if number == 1 else "them"
            parts.append(f"{counted(number, noun)}, {_brief(pauses_ms)} standing still for {them}")
    if totals.suspensions:
        parts.append(f"suspended {counted(totals.suspensions, 'time')}" if totals.suspensions > 1 else "suspended once")
    if totals.checkpoints:
        parts.append(counted(totals.checkpoints, "checkpoint"))
    if totals.failures:
        parts.append(counted(totals.failures, "failed attempt"))
    return "; ".join(parts)


def _sentence_of(times: JobTimes, event: HistoryEvent) -> str:
    return _SENTENCES.get(event.kind, _plainly)(times, event)


# -- sentences ---------------------------------------------------------------------------------------------------------


def _submitted(times: JobTimes, event: HistoryEvent) -> str:
    times.enter(event.time, "waited")
    times.gpus = _whole(event.figures.get("gpus"))
    gpus, tasks = event.figures.get("gpus", "0"), event.figures.get("tasks", "1")
    size = counted(gpus, "GPU") + (f" in {tasks} tasks" if tasks not in ("1", gpus) else "")
    return f"submitted{_by(event)}: {size if gpus != '0' else counted(tasks, 'task') + ' without GPUs'}"


def _approved(times: JobTimes, event: HistoryEvent) -> str:
    waited = float(event.figures.get("waited_s", "0") or 0)
    times.enter(event.time, "starting")
    if not times.is_resuming:
        times.unsaved_since = event.time
    times.is_resuming = False
    parts = [f"got its gang on {event.figures.get('nodes', '?')}{_by(event)}"]
    if waited >= 0.1:
        parts.append(f"after it had waited {_duration(waited)}")
        if event.message:
            parts.append(f"for: {event.message}")
        if "after" in event.figures:
            parts.append(f"free since {_and(event.figures['after'].split())} left")
    return ", ".join(parts) + _for(event)


def _running(times: JobTimes, event: HistoryEvent) -> str:
    took = times.lasted(event.time, "starting")
    times.enter(event.time, "ran")
    # It has stepped; or, where its steps are not visible, its processes are there.
    return f"runs, after {_duration(took)}" if took else "runs"


def _suspend_ordered(times: JobTimes, event: HistoryEvent) -> str:
    times.stopping_since = event.time
    return f"ordered to stop at {event.figures.get('level', '?').lower()}{_by(event)}{_for(event)}"


def _parked(times: JobTimes, event: HistoryEvent) -> str:
    took = f", {_duration(event.time - times.stopping_since)} after the order" if times.stopping_since else ""
    times.enter(event.time, "parked")
    times.slice_share, times.level = "", event.figures.get("level", "")
    if times.moving_since:
        # It gives up devices that others wait for.
        return f"rests at {event.figures.get('level', '?').lower()} for its move, step {event.figures.get('step', '?')}"
    times.totals.suspensions += 1
    if event.message:
        return f"has left{took}: {event.message}"
    return f"rests at {event.figures.get('level', '?').lower()}, step {event.figures.get('step', '?')}{took}"


def _resume_ordered(times: JobTimes, event: HistoryEvent) -> str:
    rested = f" after {_duration(times.lasted(event.time, 'parked'))} at rest" if times.state == "parked" else ""
    times.enter(event.time, "starting")
    times.is_resuming = True
    return f"ordered to go on{_by(event)}{rested}{_for(event)}"


def _move_begun(times: JobTimes, event: HistoryEvent) -> str:
    times.moving_since, times.next_slice_share = event.time, ""
    return f"moves to {event.figures.get('nodes', '?')}{_by(event)}{_for(event)}"


def _move_committed(times: JobTimes, event: HistoryEvent) -> str:
    step = event.figures.get("step", "?")
    took = f", {_duration(event.time - times.moving_since)} after the order" if times.moving_since else ""
    # A time-sliced job may have run or rested meanwhile: only its nodes have that figure.
    ran_on = "; it ran on until then" if times.state == "ran" and not times.slice_share else ""
    # Its next step is reported as the first step of a start.
    times.enter(event.time, "starting")
    if event.kind == "resize_committed":
        times.gpus = times.becomes or times.gpus
    times.moving_since = 0.0
    times.slice_share, times.next_slice_share = times.next_slice_share, ""
    return f"handed over at step {step}{took}{ran_on}"


def _resize_begun(times: JobTimes, event: HistoryEvent) -> str:
    times.moving_since = event.time
    figures = event.figures
    times.becomes = _whole(figures.get("becomes"))
    why = f": {event.message}" if event.message else ""
    before = counted(figures.get("devices", "?"), "GPU")
    return f"goes from {before} to {figures.get('becomes', '?')}{_by(event)}{_for(event)}{why}"


def _size_chosen(times: JobTimes, event: HistoryEvent) -> str:
    if "tasks" in event.figures:
        return f"is to start with {event.figures.get('becomes', '?')}, not {event.figures['tasks']}{_by(event)}"
    times.gpus = _whole(event.figures.get("becomes")) or times.gpus
    return f"is to start with {counted(event.figures.get('becomes', '?'), 'GPU')}{_by(event)}"


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _given_up(times: JobTimes, event: HistoryEvent) -> str:
    times.moving_since, times.next_slice_share = 0.0, ""
    what = "change of size" if event.kind == "resize_aborted" else "move"
    return f"the {what} was called off, nothing is lost: {event.message}"


def _judged(times: JobTimes, event: HistoryEvent) -> str:
    what = "was kept" if event.kind == "change_kept" else "was not seen to pay"
    found = gain(event.figures) or event.message
    return f"{aim(event.figures)} {what}{f': {found}' if found else ''}"


def _suspend_refused(times: JobTimes, event: HistoryEvent) -> str:
    times.stopping_since = 0.0
    return f"could not rest at {event.figures.get('level', '?').lower()}, and loses nothing by it: {event.message}"


def _gpus_idle(times: JobTimes, event: HistoryEvent) -> str:
    figures = event.figures
    text = f"has not used its {_gpus(event)} for {_duration(float(figures.get('idle_s', '0') or 0))}, and makes no step"
    if "parked_in_s" in figures:
        return f"{text}: it will be suspended in {_duration(float(figures['parked_in_s'] or 0))} unless it does"
    return f"{text}; it is not suspended for that: {event.message}" if event.message else text


def _gpus_used(times: JobTimes, event: HistoryEvent) -> str:
    return f"uses its {_gpus(event)} again, after {_duration(float(event.figures.get('idle_s', '0') or 0))}"


def _gpus(event: HistoryEvent) -> str:
    return "GPU" if event.figures.get("gpus") == "1" else "GPUs"


def _updated(times: JobTimes, event: HistoryEvent) -> str:
    members = event.figures.get("members", "")
    return f"updated{_by(event)}{f', {members} of its jobs' if members else ''}: {event.message}"


def _cores(times: JobTimes, event: HistoryEvent) -> str:
    cores = float(event.figures.get("millicores", "0") or 0) / 1_000
    what = (
        f"pinned anew, to {counted(cores, 'core', 'g')}"
        if event.figures.get("repin") == "1"
        else f"given {counted(cores, 'core', 'g')}"
    )
    return f"{what}{_by(event)}{f': {event.message}' if event.message else ''}"


def _time_sliced(times: JobTimes, event: HistoryEvent) -> str:
    figures = event.figures
    rows, quantum = figures.get("rows", "?").split(), figures.get("quantum_seconds", "?")
    share = (
        f"{len(rows)} of {figures.get('of_rows', '?')} time slices of {quantum} s"
        f" in nodeSets/{figures.get('node_set', '?')}"
    )
    if times.moving_since:
        times.next_slice_share = share
        return f"will be time-sliced there with other jobs, {share}"
    is_as_before = share == times.slice_share
    times.set_slice_share(event.time, share)
    if is_as_before:
        return f"other jobs joined or left its time-slice group; it keeps {share}"
    return f"time-sliced with other jobs on its GPUs, {share}{_by(event)}"


def _no_longer_time_sliced(times: JobTimes, event: HistoryEvent) -> str:
    times.set_slice_share(event.time, "")
    return "has its GPUs to itself again, without time slices"


def _checkpoint(times: JobTimes, event: HistoryEvent) -> str:
    times.totals.checkpoints += 1
    times.unsaved_since = event.time
    return f"checkpoint {times.totals.checkpoints} complete, at step {event.figures.get('step', '?')}"


def _attempt_failed(times: JobTimes, event: HistoryEvent) -> str:
    times.totals.failures += 1
    if times.unsaved_since:
        times.totals.lost_s += event.time - times.unsaved_since
    times.unsaved_since, times.is_resuming = 0.0, False
    return f"the attempt failed: {event.message or event.figures.get('outcome', '?')}"


def _pending(times: JobTimes, event: HistoryEvent) -> str:
    times.enter(event.time, "waited")
    times.slice_share, times.moving_since = "", 0.0
    return f"waits again: {event.message}"


def _ended(times: JobTimes, event: HistoryEvent) -> str:
    times.enter(event.time)
    times.slice_share, times.moving_since = "", 0.0
    word = event.kind.removeprefix("job_")
    return f"{word}{f': {event.message}' if event.message and event.message != word else ''}"


def _array_submitted(times: JobTimes, event: HistoryEvent) -> str:
    figures = event.figures
    limit = f", {figures['at_once']} at once" if figures.get("at_once") != figures.get("members") else ""
    rule = f", stop rule {figures['rule']}" if figures.get("rule", "none") != "none" else ""
    jobs, gpus = counted(figures.get("members", "?"), "job"), counted(figures.get("gpus_each", "?"), "GPU")
    return f"submitted{_by(event)}: {jobs} of {gpus} each{limit}{rule}"


def _member_ended(times: JobTimes, event: HistoryEvent) -> str:
    figures = dict(event.figures)
    member, state, ran = (figures.pop(name, "") for name in ("member", "state", "run_s"))
    figures.pop("job", None)
    given = {name: figures.pop(name) for name in list(figures) if name.startswith("parameter_")}
    named = " ".join(f"{name.removeprefix('parameter_')}={text}" for name, text in sorted(given.items()))
    rest = " ".join(f"{name}={text}" for name, text in sorted(figures.items()))
    times.totals.ran_s += float(ran or 0)
    # Earlier masters sent 0.0 for members that never ran.
    lasted = f", ran {_duration(float(ran))}" if float(ran or 0) else " before its first step"
    parts = [f"{member}{f' ({named})' if named else ''} {state}{lasted}", rest, event.message]
    return "; ".join(part for part in parts if part)


def _mode_changed(times: JobTimes, event: HistoryEvent) -> str:
    if event.figures.get("of") == "0":
        return f"{event.message}: there is no GPU now"
    return (
        f"{event.message}: {event.figures.get('held', '?')} of {counted(event.figures.get('of', '?'), 'GPU')} are held"
    )


def _plainly(times: JobTimes, event: HistoryEvent) -> str:
    parts = [part for part in (event.message, _figures(event)) if part]
    return event.kind.replace("_", " ") + _by(event) + (f": {'; '.join(parts)}" if parts else "")


_SENTENCES: dict[str, Callable[[JobTimes, HistoryEvent], str]] = {
    "job_submitted": _submitted,
    "gpus_idle": _gpus_idle,
    "gpus_used": _gpus_used,
    "gang_approved": _approved,
    "gang_running": _running,
    "gang_done": lambda *_: "",
    "suspend_ordered": _suspend_ordered,
    "gang_parked": _parked,
    "epoch_wait_over": lambda _, event: event.message,
    "resume_ordered": _resume_ordered,
    "move_begun": _move_begun,
    "move_committed": _move_committed,
    "move_done": lambda times, event: f"moved: it stood still for {_pause(times, event)}, and lost no step",
    "move_aborted": _given_up,
    "size_chosen": _size_chosen,
    "resize_begun": _resize_begun,
    "resize_committed": _move_committed,
    "resize_done": lambda times, event: f"resized: it stood still for {_pause(times, event)}, and lost no step",
    "resize_aborted": _given_up,
    "move_back": lambda *_: "goes on where it came from, from the state that was kept there: its new place failed",
    "change_kept": _judged,
    "change_undone": _judged,
    "gang_joined": lambda _, event: (
        f"another gang comes to its GPUs on {event.figures.get('node', '?')}, to share them at once{_by(event)}"
    ),
    "suspend_refused": _suspend_refused,
    "trouble": lambda _, event: f"its node {event.figures.get('node', '?')} reports {event.message}",
    "job_updated": _updated,
    "array_updated": _updated,
    "cores_changed": _cores,
    "rows_changed": _time_sliced,
    "turns_ended": _no_longer_time_sliced,
    "turn_refused": lambda _, event: f"waits for GPUs of its own: {event.message}",
    "checkpoint_complete": _checkpoint,
    "attempt_failed": _attempt_failed,
    "job_pending": _pending,
    "rule_unused": lambda _, event: f"the stop rule of its array has judged nothing: {event.message}",
    "stop_ordered": lambda _, event: f"stopped by the rule of {event.cause}: {event.message}",
    "cancel_ordered": lambda _, event: f"ordered to end{_by(event)}{f': {event.message}' if event.message else ''}",
    "job_succeeded": _ended,
    "job_failed": _ended,
    "job_cancelled": _ended,
    "job_stopped": _ended,
    "array_submitted": _array_submitted,
    "member_ended": _member_ended,
    "array_ended": lambda _, event: (
        "ended: " + ", ".join(f"{count} {state}" for state, count in sorted(event.figures.items()))
    ),
    "mode_changed": _mode_changed,
}


def _by(event: HistoryEvent) -> str:
    """Return " by CAUSE"; "" for reports of daemons, which cause nothing, and where the figures name the cause: the
    emptying of a node, GPUs that are not used. "scheduler:" without a name is the default scheduler, written without
    the colon."""
    cause = event.cause.rstrip(":")
    return f" by {cause}" if cause and not cause.startswith(("daemon", "epoch", "drain:", "idle")) else ""


def _for(event: HistoryEvent) -> str:
    text = purpose(event.figures)
    return f", {text}" if text else ""


def _pause(times: JobTimes, event: HistoryEvent) -> str:
    pause = float(event.figures.get("pause_ms", "0") or 0)
    totals = times.totals
    if event.kind == "resize_done":
        totals.resizes, totals.resize_pauses_ms = totals.resizes + 1, totals.resize_pauses_ms + pause
    else:
        totals.moves, totals.move_pauses_ms = totals.moves + 1, totals.move_pauses_ms + pause
    expected = float(event.figures.get("expected_pause_ms", "0") or 0)
    # Of a change that had to be nothing was forecast.
    return f"{_brief(pause)}{f', {_brief(expected)} expected' if expected else ''}"


def _brief(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1_000 else _duration(milliseconds / 1_000)


def _figures(event: HistoryEvent) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(event.figures.items()))


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else format_duration(seconds)


# By goal: what a change with it is for, without and with the job that it is for.
_PURPOSES: Final[dict[str, tuple[str, str]]] = {
    "LOCALITY": ("to have its GPUs closer together", ""),
    "HOLE": ("to make room for a pending gang", "to make room for {job}"),
    "UNPACK": ("to have its GPUs to itself", ""),
    "DRAIN": ("because its node is emptied", ""),
    "DEFRAGMENT": ("so that fewer nodes are half full", ""),
    "RETURN": ("to resume after it was parked for others", ""),
    "GROW": ("onto idle GPUs", ""),
    "GIVE_BACK": ("to give GPUs back", "to give GPUs to {job}"),
    "PACK": ("to try whether sharing GPUs at once pays", ""),
    "UNDO": ("back to where it was faster", ""),
    "EXCHANGE": ("to exchange places with a job that gains more", "to change places with {job}, which gains more"),
    "BALANCE": ("to suffer less interference", ""),
    "RESIZE": ("to start with other numbers of tasks", ""),
    "IDLE": ("because it did not use its GPUs", ""),
    "FAIRNESS": ("so that all time-sliced jobs get the same time", "so that {job} gets as much time as others"),
}  # fmt: skip


def purpose(figures: Mapping[str, str]) -> str:
    """Return what a change is for, and its expected gain: "to make room for jobs/9, to save 120 GPU-seconds".

    Empty for a change outside a plan. An unknown goal is named as it is."""
    goal = figures.get("goal", "")
    if not goal:
        return ""
    alone, helping = _PURPOSES.get(goal, (f"goal {goal}", f"goal {goal} for {{job}}"))
    job = figures.get("for", "")
    text = helping.format(job=job) if job and helping else alone
    if figures.get("why"):
        return f"because {figures['why']}"
    if figures.get("detail"):
        return f"{text} ({figures['detail']})"
    saved, pause = _number(figures, "saved_gpu_seconds"), _number(figures, "expected_pause_ms")
    if saved and saved > 0.0:
        text += f", to save {saved:.0f} GPU-seconds"
        if pause:
            text += f" for a pause of {pause / 1_000.0:.2g} s"
    return text


def gain(figures: Mapping[str, str]) -> str:
    """Return the measured gain of a change: "its rate was 1.31 (± 0.02) times that of before"; "" if nothing was."""
    value, deviation = _number(figures, "gain"), _number(figures, "gain_deviation")
    if value is None:
        return ""
    measured = f"{value:.2f}" + (f" (± {deviation:.2f})" if deviation else "")
    if figures.get("goal") == "PACK":
        text = f"together they made {measured} of what one does alone"
    else:
        text = f"its rate was {measured} times that of before"
    return f"{text}: {figures['detail']}" if figures.get("detail") else text


def aim(figures: Mapping[str, str]) -> str:
    """Return what a judged change had been for: "the change to have its GPUs closer together"."""
    goal = figures.get("goal", "")
    if goal == "PACK":
        return "sharing its GPUs at once"
    if goal == "GROW":
        return "its growth onto idle GPUs"
    text = purpose({name: text for name, text in figures.items() if name in ("goal", "for")})
    return f"the move {text}" if text else "the change"


def _number(figures: Mapping[str, str], name: str) -> float | None:
    try:
        return float(figures.get(name, ""))
    except ValueError:
        return None
