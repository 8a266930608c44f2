"""Stall detection from counters, as a report for users: hanging gangs, idle gangs, and ranks that hold back the others.
The counters are steps and time spent waiting for data; for jobs without boundaries, the CPU time of their processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ganger.injob.page_layout import PagePhase
from ganger.units import format_duration

# A gang hangs without a step for so long, and for so many times its longest pause between two steps so far.
HANG_S = 60.0
_HANG_PAUSES = 10.0
# Evaluation and compilation have no boundaries.
_LONG_PHASES = {PagePhase.EVALUATION, PagePhase.COMPILATION}
_LONG_PHASE = 10.0
# Without a first step, or without use of a processor.
IDLE_S = 600.0
_IDLE_SHARE = 0.01
# Least steps and seconds of a window in which ranks are compared.
_WINDOW_S = 30.0
_WINDOW_STEPS = 20
# A rank holds back the others if it waits for data by so much more of the time, or makes so few of their steps.
_MORE_WAITING = 0.25
_FEWER_STEPS = 0.7


@dataclass(frozen=True, slots=True)
class RankCounters:
    """Counters of one rank at one time."""

    step: int
    phase: int = PagePhase.TRAINING
    data_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Watched:
    """Observations of the ranks since the gang was last started or resumed. Times are seconds of one monotonic clock.
    `window`: counters at the begin of the window; `held_back`: result of the last complete window."""

    since: float
    ranks: Mapping[int, RankCounters] = field(default_factory=dict)
    stepped_at: float | None = None
    longest_pause: float = 0.0
    window: Mapping[int, RankCounters] = field(default_factory=dict)
    window_since: float = 0.0
    held_back: str = ""
    busy_at: float | None = None
    busy_s: float = 0.0


def with_counters(watched: Watched, ranks: Mapping[int, RankCounters], now: float) -> Watched:
    """Return the observations with the counters of all local ranks added."""
    if _slowest(ranks) > _slowest(watched.ranks):
        longest = watched.longest_pause
        if watched.stepped_at is not None:
            longest = max(longest, now - watched.stepped_at)
        watched = replace(watched, stepped_at=now, longest_pause=longest)
    watched = replace(watched, ranks=dict(ranks))
    if not watched.window:
        return replace(watched, window=dict(ranks), window_since=now)
    seconds = now - watched.window_since
    steps = {rank: ranks[rank].step - begin.step for rank, begin in watched.window.items() if rank in ranks}
    if seconds < _WINDOW_S or not steps or median(steps.values()) < _WINDOW_STEPS:
        return watched
    waits = {rank: (ranks[rank].data_wait_s - watched.window[rank].data_wait_s) / seconds for rank in steps}
    return replace(watched, window=dict(ranks), window_since=now, held_back=_held_back(steps, waits))


def with_processor_time(watched: Watched, processor_s: float, now: float) -> Watched:
    """Return the observations with the CPU time of all processes of a job without boundaries added."""
    if watched.busy_at is None:
        return replace(watched, busy_at=now, busy_s=processor_s)
    if abs(processor_s - watched.busy_s) > _IDLE_SHARE * (now - watched.busy_at):
        return replace(watched, busy_at=now, busy_s=processor_s)
    return watched


def stall_reason(watched: Watched, now: float) -> str:
    """Return why the gang makes no progress, as a text for users; empty while all is well."""
    if watched.stepped_at is not None:
        return _hang(watched, watched.stepped_at, now) or watched.held_back
    if watched.busy_at is not None:
        idle = now - watched.busy_at
        return (
            f"its processes have used less than 1 % of a processor for {format_duration(idle)}"
            if idle >= IDLE_S
            else ""
        )
    waited = now - watched.since
    if watched.ranks and waited >= IDLE_S:
        return f"no step in the {format_duration(waited)} that it has been running"
    return ""


def _hang(watched: Watched, stepped_at: float, now: float) -> str:
    seconds = now - stepped_at
    limit = max(HANG_S, _HANG_PAUSES * watched.longest_pause)
    if any(counters.phase in _LONG_PHASES for counters in watched.ranks.values()):
        limit *= _LONG_PHASE
    if seconds < limit or all(counters.phase == PagePhase.DONE for counters in watched.ranks.values()):
        return ""
    slowest = _slowest(watched.ranks)
    behind = [rank for rank, counters in sorted(watched.ranks.items()) if counters.step == slowest]
    text = f"no step for {format_duration(seconds)}, step {slowest} is the last"
    if len(behind) == len(watched.ranks):
        return text
    return f"{text}; {_ranks(behind)} behind the others"


def _held_back(steps: Mapping[int, int], waits: Mapping[int, float]) -> str:
    if len(steps) < 2:
        return ""
    rank = min(steps, key=lambda one: (steps[one], one))
    usual = median([count for other, count in steps.items() if other != rank])
    if steps[rank] < _FEWER_STEPS * usual:
        return f"rank {rank} makes {steps[rank]} steps while the others make {usual:g}"
    rank = max(waits, key=lambda one: (waits[one], -one))
    others = median([share for other, share in waits.items() if other != rank])
    if waits[rank] - others > _MORE_WAITING:
        return f"rank {rank} waits for data {waits[rank]:.0%} of the time, the others {others:.0%}: it holds them back"
    return ""


def _slowest(ranks: Mapping[int, RankCounters]) -> int:
    return min([counters.step for counters in ranks.values()], default=0)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''} are"
