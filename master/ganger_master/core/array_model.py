"""The values of job arrays: which member of which array a job is, and the rule that stops members early.

A rule judges by the records of the members, in any order of calls. A member's records are the values that it had
reported when it came to rung 0, 1, 2, ... of the rule; None is a value that is no number, and worse than any that is.
A slow member is not stopped for that: only values of the same rung are compared.

HALVING, successive halving: of n members that set out, the best n / factor at the first rung continue, of these the
best 1 / factor at the second, and so on; one at least. Jamieson and Talwalkar, "Non-stochastic best arm identification
and hyperparameter optimization" (AISTATS 2016), Algorithm 1. There all members wait at a rung for the last one. Here no
member waits: it is stopped as soon as enough others did better, so every member that the paper would keep is kept. A
member that runs on before its rung is decided spends only its own devices.

ASHA, asynchronous successive halving: judged when it comes to a rung, a member continues if it is among the best
1 / factor of those that have come to it so far, itself included. Li et al., "A system for massively parallel
hyperparameter tuning" (MLSys 2020), section 3.2, in the form that stops instead of promoting, as Ray Tune has it: the
first `factor` - 1 to come always continue.

MEDIAN: stopped where its best value so far is worse than the median of the others' running means up to the same rung.
Golovin et al., "Google Vizier: a service for black-box optimization" (KDD 2017), section 3.2.2. There the others are
trials that have ended; here all that came as far, since the members of an array start together. With fewer than
`LEAST_OTHERS` of them, no member is stopped.

THRESHOLD: stopped where it is worse than a bound at a rung.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import Final, TypeAlias

from ganger.text import counted
from msgspec import Struct, field

# The members of array n are the jobs n + 1 to n + size, in the order in which they were given.
MEMBERS_LIMIT: Final = 1_000
# Parameters of all members together.
PARAMETERS_LIMIT: Final = 20_000
# Rungs at which a member is judged; behind the last it runs to its end.
RUNGS_LIMIT: Final = 200
STEP: Final = "step"
LOSS: Final = "loss"


class RuleKind(StrEnum):
    """The head of this module has the meaning and the source of each."""

    HALVING = "HALVING"
    ASHA = "ASHA"
    MEDIAN = "MEDIAN"
    THRESHOLD = "THRESHOLD"


class StopRule(Struct, frozen=True, gc=False, omit_defaults=True):
    """When members of an array stop. `first`, `every`: amounts of the resource, in steps or a metric's unit."""

    kind: RuleKind
    metric: str = LOSS
    maximise: bool = False
    resource: str = STEP
    first: float = 0.0
    factor: float = 2.0
    every: float = 0.0
    bound: float = 0.0

    def rung(self, index: int) -> float:
        """Return the amount of the resource at which members are compared for the index-th time, from 0."""
        if self.kind in (RuleKind.HALVING, RuleKind.ASHA):
            try:
                return float(self.first * self.factor**index)
            except OverflowError:
                return math.inf
        return self.first + (self.every or self.first) * index


class Membership(Struct, frozen=True, gc=False, omit_defaults=True):
    """Membership of a job in array `array`; the number of the job is `array` + 1 + `place`."""

    array: int
    place: int
    # What its user calls it; by default its place.
    index: int
    size: int
    parameters: Mapping[str, str] = field(default_factory=dict)
    # At most so many run or wait at once; zero: all.
    at_once: int = 0
    rule: StopRule | None = None

    @property
    def name(self) -> str:
        return f"{self.array}_{self.index}"


Value: TypeAlias = float | None

LEAST_OTHERS: Final = 3


class Contender(Struct, frozen=True, gc=False):
    """A member. `records`: its values by rung; for a stopped member up to the rung at which it was stopped."""

    index: int
    records: tuple[Value, ...] = ()
    # It may come to further rungs: it runs, waits or is held.
    is_live: bool = True
    # It ended early, but not by the rule: members are not compared with it.
    has_failed: bool = False


class EarlyStop(Struct, frozen=True, gc=False):
    """The index of a member to stop, the rung, its value there, and the reason as text."""

    index: int
    rung: int
    value: Value
    why: str


def judge(rule: StopRule, contenders: Sequence[Contender], reporting: int) -> tuple[EarlyStop, ...]:
    """Return the members to stop now that the member of index `reporting` has come to a new rung, by index.

    HALVING may stop others than that one, the other rules only judge it, at its newest rung."""
    if rule.kind is RuleKind.HALVING:
        return _halving(rule, contenders)
    member = next(one for one in contenders if one.index == reporting)
    if not (member.is_live and member.records):
        return ()
    rung = len(member.records) - 1
    others = [
        one.records for one in contenders if one.index != reporting and not one.has_failed and len(one.records) > rung
    ]
    match rule.kind:
        case RuleKind.ASHA:
            why = _asha(rule, member.records[rung], [records[rung] for records in others])
        case RuleKind.MEDIAN:
            why = _below_median(rule, member.records, [records[: rung + 1] for records in others])
        case RuleKind.THRESHOLD:
            is_worse = _key(rule, member.records[rung]) > _key(rule, rule.bound)
            why = f"worse than {rule.bound:g}" if is_worse else ""
    return (EarlyStop(reporting, rung, member.records[rung], why),) if why else ()


def best(rule: StopRule, values: Sequence[tuple[int, Value]]) -> tuple[int, float] | None:
    """Return the best of (index, value) pairs, the first of several; None if no value is a number."""
    found = min(((_key(rule, value), index, value) for index, value in values if value is not None), default=None)
    return None if found is None or found[2] is None else (found[1], found[2])


def _halving(rule: StopRule, contenders: Sequence[Contender]) -> tuple[EarlyStop, ...]:
    stopped: dict[int, EarlyStop] = {}
    there = [one for one in contenders if not one.has_failed]
    # Members that set out: those that ended before the first rung do not count.
    keeps = sum(bool(one.records) or one.is_live for one in there)
    # Members that pass every rung so far, whatever the others report. Only they count against others at the next one: a
    # member that may yet be stopped at a lower rung would not reach it if all members waited for each other.
    sure = {one.index for one in there}
    for rung in range(max((len(one.records) for one in there), default=0)):
        keeps = max(1, int(keeps / rule.factor))
        there = [one for one in there if one.index not in stopped and (one.is_live or len(one.records) > rung)]
        keys = {one.index: _key(rule, one.records[rung]) for one in there if len(one.records) > rung}
        line = sorted(keys[index] for index in sure if index in keys)
        may_come = len(there) - len(keys)
        every = sorted(keys.values())
        for one in there:
            if one.index not in keys:
                continue
            key = keys[one.index]
            ahead = bisect_left(line, key)
            if one.is_live and ahead >= keeps:
                why = f"{counted(ahead, 'other')} did better, and {keeps} {'goes' if keeps == 1 else 'go'} on"
                stopped[one.index] = EarlyStop(one.index, rung, one.records[rung], why)
            if bisect_left(every, key) + may_come >= keeps:
                sure.discard(one.index)
        sure.intersection_update(keys)
    return tuple(stopped[index] for index in sorted(stopped))


def _asha(rule: StopRule, value: Value, others: Sequence[Value]) -> str:
    come = len(others) + 1
    keeps = int(come / rule.factor)
    ahead = sum(_key(rule, other) < _key(rule, value) for other in others)
    if not keeps or ahead < keeps:
        return ""
    return f"{ahead} of the {come} that came so far did better, and {keeps} go on"


def _below_median(rule: StopRule, records: Sequence[Value], others: Sequence[Sequence[Value]]) -> str:
    if len(others) < LEAST_OTHERS:
        return ""
    middle = median(_mean_key(rule, other) for other in others)
    if min(_key(rule, value) for value in records) <= middle:
        return ""
    shown = -middle if rule.maximise else middle
    of = counted(len(others), "other")
    return f"its best value is worse than {shown:.6g}, the median of the running means of {of}"


def _key(rule: StopRule, value: Value) -> float:
    """Return the sort key of a value under a stop rule: smaller is better; infinite for no value or NaN."""
    if value is None or math.isnan(value):
        return math.inf
    return -value if rule.maximise else value


def _mean_key(rule: StopRule, values: Sequence[Value]) -> float:
    return math.fsum(keys) / len(keys) if math.isfinite(sum(keys := [_key(rule, one) for one in values])) else math.inf
