"""Summary of a replayed recording, as text and as plain values for --json."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from ganger.units import format_cores, format_memory

from ganger_master.core import commands
from ganger_master.decision_log.counterfactual import CounterfactualPlan, Difference, Otherwise
from ganger_master.decision_log.job_history import Free, Moment, RequestedPlace, Story, VerdictReason, verdict_of
from ganger_master.decision_log.recording import Header
from ganger_master.decision_log.rerun import Decided, Differs, Drawn, Happening


@dataclass(slots=True)
class Asking:
    """Requests and planned changes of one job."""

    requests: int = 0
    approved: int = 0
    # Reason of the last refusal.
    reason: str = ""


@dataclass(slots=True)
class LogSummary:
    commands: Counter[str] = field(default_factory=Counter)
    # Counts by reason of refusal; "": approved.
    verdicts: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    jobs: dict[int, Asking] = field(default_factory=dict)

    def record(self, happening: Happening) -> None:
        match happening:
            case Drawn():
                self.batches += 1
            case Decided(_, _, command, answer, _):
                self.commands[type(command).__name__] += 1
                match command:
                    case commands.RequestGang(number=number):
                        numbers = [number]
                    case commands.ProposePlan(changes=changes):
                        numbers = [change.number for change in changes]
                    case _:
                        return
                for number in numbers:
                    self._count(number, *verdict_of(answer, number))
            case _:
                return

    def _count(self, number: int, verdict: str, whys: tuple[VerdictReason, ...]) -> None:
        asking = self.jobs.setdefault(number, Asking())
        asking.requests += 1
        if verdict == "approved":
            asking.approved += 1
            self.verdicts[""] += 1
            return
        asking.reason = whys[0].reason if whys else "nothing said"
        self.verdicts[asking.reason] += 1


# Maximum number of characters shown of a difference.
_LONGEST_VALUE = 2_000
_MOST_CANDIDATES = 4


def headline(header: Header, seconds: float, tally: LogSummary, reason: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.began))
    commands = sum(tally.commands.values())
    done = f"{seconds:.1f} s, {commands:,} commands, {tally.batches:,} batches"
    return f"recorded {when} by ganger {header.ganger}, policy {header.policy}: {done} ({reason})"


def agreement(differences: Sequence[Differs], began: float) -> Iterator[str]:
    if not differences:
        yield "every decision is as recorded"
        return
    first = differences[0]
    yield f"decided otherwise at {_at(first.time, began)}, line {first.number}: {first.what}"
    yield f"  recorded: {_cut(first.recorded)}"
    yield f"  now:      {_cut(first.now)}"
    if len(differences) > 1:
        yield f"  {len(differences) - 1:,} more differ; they may follow from this one"


def story_lines(story: Story, began: float) -> Iterator[str]:
    yield f"job {story.number}"
    if not story.moments:
        yield "  nothing is recorded of it"
    for moment in story.moments:
        yield f"  {_at(moment.time, began):>10}  {_sentence(moment)}"
        for detail in _details(moment):
            yield f"  {'':10}    {detail}"


def otherwise_lines(other: Otherwise, began: float, only: int | None = None) -> Iterator[str]:
    name = other.policy.name
    differences = [one for one in other.differences if only is None or one.job == only]
    if other.passes:
        yield f"{name} plans for all jobs at once: {other.passes:,} plans on the recorded states, where they change:"
        for planned in other.planned:
            if only is None or only in planned.starts or only in planned.stops:
                yield f"  {_at(planned.time, began):>10}  {_planned(planned)}"
    else:
        yield f"{name}: {len(differences):,} of {other.verdicts:,} verdicts would have been others"
        for one in differences:
            yield f"  {_at(one.time, began):>10}  job {one.job}: {_difference(one)}"
    yield "each decided on the state as it was: what would have followed is not in a recording"


def plain(
    header: Header,
    seconds: float,
    reason: str,
    tally: LogSummary,
    differences: Sequence[Differs],
    story: Story | None,
    other: Otherwise | None,
) -> dict[str, Any]:
    """Times are Unix seconds of the master's clock."""
    builtin: dict[str, Any] = {
        "recording": {
            "began": header.began,
            "seconds": seconds,
            "ganger": header.ganger,
            "policy": header.policy,
            "with_environment": header.with_environment,
            "end_reason": reason,
        },
        "commands": dict(sorted(tally.commands.items())),
        "batches": tally.batches,
        "verdicts": {name or "approved": count for name, count in sorted(tally.verdicts.items())},
        "jobs": {
            str(number): {"requests": job.requests, "approved": job.approved, "last_reason": job.reason or None}
            for number, job in sorted(tally.jobs.items())
        },
        "differences": len(differences),
        "first_difference": None if not differences else msgspec.to_builtins(differences[0]),
    }
    if story is not None:
        builtin["job"] = {"number": story.number, "moments": msgspec.to_builtins(story.moments)}
    if other is not None:
        builtin["otherwise"] = {
            "policy": other.policy.name,
            "verdicts": other.verdicts,
            "differences": msgspec.to_builtins(other.differences),
            "plans": other.passes,
            "planned": msgspec.to_builtins(other.planned, str_keys=True),
        }
    return builtin


def _sentence(moment: Moment) -> str:
    rank = f" (place {moment.rank} in the queue)" if moment.rank else ""
    turn = f" {moment.turn}" if moment.what == "turn" else ""
    verdict = f": {moment.verdict.upper()}" if moment.verdict else ""
    text = f", {moment.text}" if moment.text else ""
    return f"{moment.what.replace('_', ' ')}{turn}{rank}{text}{verdict}"


def _details(moment: Moment) -> Iterator[str]:
    for why in moment.why:
        yield f"{why.reason}: {why.message}"
    for position, candidate in enumerate(moment.candidates[:_MOST_CANDIDATES]):
        which = f"candidate {position + 1}: " if len(moment.candidates) > 1 else "for " if moment.verdict else "has "
        yield which + "; ".join(map(_place, candidate))
    if len(moment.candidates) > _MOST_CANDIDATES:
        yield f"and {len(moment.candidates) - _MOST_CANDIDATES} candidates more"
    for free in moment.free:
        yield _free(free)


def _place(place: RequestedPlace) -> str:
    gpus = f"GPUs {_numbers(place.gpus)}" if place.gpus else "no GPU"
    return f"{place.node} {gpus}, {format_cores(place.millicores)} cores, {format_memory(place.memory_bytes)}"


def _free(free: Free) -> str:
    gpus = f"GPUs {_numbers(free.gpus_free)} of {free.gpus}" if free.gpus_free else f"none of {free.gpus} GPUs"
    held = ", ".join(f"{one.job} has {one.gpus}" for one in free.held)
    closed = "" if free.takes_gangs else " (takes no gangs)"
    room = f"{format_cores(free.free_millicores)} cores, {format_memory(free.free_memory_bytes)}"
    return f"free on {free.node}{closed}: {gpus}, {room}" + (f"; {held}" if held else "")


def _difference(one: Difference) -> str:
    recorded, otherwise = _verdict(one.recorded, one.recorded_why), _verdict(one.otherwise, one.otherwise_why)
    return f"{recorded} as recorded, {otherwise} otherwise"


def _verdict(verdict: str, whys: Sequence[VerdictReason]) -> str:
    return f"{verdict} ({whys[0].reason}: {whys[0].message})" if whys else verdict


def _planned(planned: CounterfactualPlan) -> str:
    starts = [f"start job {number} on {','.join(nodes)}" for number, nodes in planned.starts.items()]
    stops = [f"stop job {number}" for number in planned.stops]
    return "; ".join([*stops, *starts]) or "nothing to start or to stop"


def _numbers(bits: Sequence[int]) -> str:
    """ "0-3,6"."""
    parts: list[list[int]] = []
    for bit in bits:
        if parts and parts[-1][-1] == bit - 1:
            parts[-1] = [parts[-1][0], bit]
        else:
            parts.append([bit])
    return ",".join("-".join(map(str, part)) for part in parts)


def _at(at: float, began: float) -> str:
    return f"{at - began:+.3f} s"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}… ({len(text):,} characters)"
