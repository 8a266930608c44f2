"""Job arrays: submission as one, the limit on members that run at once, and the rule that stops the worse members.

A member is a job like any other. Members beyond the array's limit are held until others end. The values that members
report at the rungs of the stop rule decide which members are stopped (`core.array_model`). All state of an array is
in its members.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ganger.job_state import JobState
from ganger.text import counted
from msgspec.structs import replace

from ganger_master.core import answers, commands, dependencies, ending, events
from ganger_master.core.answers import RefusedError
from ganger_master.core.array_model import (
    LOSS,
    MEMBERS_LIMIT,
    RUNGS_LIMIT,
    STEP,
    Contender,
    EarlyStop,
    Membership,
    RuleKind,
    StopRule,
    judge,
)
from ganger_master.core.events import Decision
from ganger_master.core.job_model import JobMetric, JobProgress, JobRecord, members_of
from ganger_master.core.job_spec import JobSpec, Template, bytes_of
from ganger_master.core.preconditions import array_members, find_job, has_ended
from ganger_master.core.state import State
from ganger_master.core.state_indexes import bytes_of_all, spec_bytes
from ganger_master.core.submission import (
    COMMAND_BYTES_LIMIT,
    SEVERAL,
    check_room,
    check_share,
    repeated_request,
    violations_of,
)

_INDEX_LIMIT: Final = (1 << 31) - 1
_PARAMETERS_LIMIT: Final = 50
_VALUE_LIMIT: Final = 4_096
# Bytes of all parameters of a member.
_VALUES_LIMIT: Final = 16 * 1024
# Places such as {NAME} in a command.
_PLACES_LIMIT: Final = 1_000
# Bytes of the commands and environments of all members: each member is stored with its own.
_BYTES_LIMIT: Final = 16 * 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
# What is wrong with a member is wrong with most of them.
_SHOWN: Final = 3


def submit(state: State, command: commands.SubmitArray, now: float) -> Decision:
    """Accept all members of an array or none. The same request again gives the same array."""
    known = repeated_request(state, command.user, command.request_id, now)
    if known is not None:
        return (), _repeated(state, command, known)
    _check(state, command)
    number = state.counters.next_job
    event = events.ArraySubmitted(
        now, f"user:{command.user}", number, command.uids, command.user, command.request_id, _specs(command, number)
    )
    return (event,), answers.ArrayAnswer(number)


def cancel(state: State, command: commands.CancelArray, now: float) -> Decision:
    """Every member that has not ended; one that ends already in another way ends cancelled."""
    answer = answers.ArrayAnswer(command.number)
    if not any(not has_ended(job) for job in array_members(state.jobs, command.number)):
        return (), answer
    return (events.ArrayCancelled(now, f"user:{command.user}", command.number, command.reason),), answer


def record(state: State, command: commands.RecordMetric, now: float) -> Decision:
    """Record the value of a running member at a new rung; other reports change nothing."""
    job = find_job(state, command.number)
    rule = rule_of(job)
    if rule is None or has_ended(job) or job.epoch != command.epoch or not has_climbed(rule, job, command.at):
        return (), answers.Done()
    cause = f"epoch:{command.epoch}"
    return (events.RungReached(now, cause, job.number, command.value, command.at),), answers.Done()


def rule_of(job: JobRecord) -> StopRule | None:
    return None if job.spec.array is None else job.spec.array.rule


def has_climbed(rule: StopRule, job: JobRecord, at: float) -> bool:
    """Return whether it has come to the next rung."""
    return len(job.rungs) < RUNGS_LIMIT and at >= rule.rung(len(job.rungs))


def members_submitted(event: events.ArraySubmitted) -> Iterator[JobRecord]:
    for place, (uid, spec) in enumerate(zip(event.uids, event.specs, strict=True)):
        assert spec.array is not None
        is_held = 0 < spec.array.at_once <= place
        yield JobRecord(
            number=event.number + 1 + place,
            uid=uid,
            user=event.user,
            spec=spec,
            create_time=event.time,
            request_id="" if place else event.request_id,
            pending_since=0.0 if is_held else event.time,
            held=is_held,
        )


def note_submitted(state: State, event: events.ArraySubmitted) -> None:
    array = event.specs[0].array
    assert array is not None
    rule = "" if array.rule is None else f"{array.rule.kind.value.lower()} by {array.rule.metric}"
    state.history(
        event.time, f"arrays/{event.number}", "array_submitted", event.cause,
        members=array.size, gpus_each=event.specs[0].gpus, at_once=array.at_once or array.size, rule=rule or "none",
    )  # fmt: skip


def end_all(state: State, event: events.ArrayCancelled) -> None:
    state.history(event.time, f"arrays/{event.number}", "cancel_ordered", event.cause, event.reason)
    for job in members_of(state.jobs, event.number):
        if not has_ended(job):
            ending.end(state, job.number, JobState.CANCELLED, event.time, event.reason or "its array was cancelled")


def follow(state: State, now: float) -> None:
    """Release held members of arrays where others have ended."""
    while state.dirty.arrays:
        number = next(iter(state.dirty.arrays))
        del state.dirty.arrays[number]
        members = members_of(state.jobs, number)
        array = members[0].spec.array if members else None
        if array is None or not array.at_once:
            continue
        room = array.at_once - sum(not job.held and not job.state.is_finished for job in members)
        waiting = [
            job
            for job in members
            if job.held and not job.awaits and job.state is JobState.PENDING and job.ending is None
        ]
        for job in waiting[: max(0, room)]:
            state.put_job(replace(job, held=False, pending_since=now, revision=job.revision + 1))
        # What was put is as it is to be.
        state.dirty.arrays.pop(number, None)


def learn(state: State, job: JobRecord, progress: JobProgress, now: float) -> None:
    """Apply the last report of a part that has ended: its end may have come before the next report."""
    rule = rule_of(job)
    report = None if rule is None else report_of(rule, progress.step, progress.loss, progress.metrics)
    if rule is not None and report is not None and has_climbed(rule, job, report[1]):
        climb(state, events.RungReached(now, f"epoch:{progress.epoch}", job.number, *report), is_over=True)


def climb(state: State, event: events.RungReached, is_over: bool = False) -> None:
    """Record the value at every rung reached, and stop the members that the rule selects. is_over: it has ended."""
    job = state.jobs[event.number]
    rule, array = rule_of(job), job.spec.array
    assert rule is not None
    assert array is not None
    rungs = list(job.rungs)
    while len(rungs) < RUNGS_LIMIT and event.at >= rule.rung(len(rungs)):
        rungs.append(event.value)
    state.put_job(replace(job, rungs=tuple(rungs)))
    members = {_index(one): one for one in members_of(state.jobs, array.array)}
    contenders = [
        Contender(
            index,
            one.rungs,
            not has_ended(one) and not (is_over and one is members[array.index]),
            one.state in (JobState.FAILED, JobState.CANCELLED),
        )
        for index, one in members.items()
    ]
    for stop in judge(rule, contenders, array.index):
        _stop(state, members[stop.index].number, rule, stop, event.time)


def _stop(state: State, number: int, rule: StopRule, stop: EarlyStop, now: float) -> None:
    job = state.jobs[number]
    array = job.spec.array
    assert array is not None
    value = "no number" if stop.value is None else f"{stop.value:.6g}"
    at = f"{rule.resource} {rule.rung(stop.rung):g}"
    why = f"{rule.kind.value.lower()}: {rule.metric} {value} at {at}: {stop.why}"
    state.put_job(replace(job, rungs=job.rungs[: stop.rung + 1]))
    cause = f"arrays/{array.array}"
    figures = {"metric": rule.metric, "value": value, "rung": stop.rung, "at": f"{rule.rung(stop.rung):g}"}
    state.history(now, job, "stop_ordered", cause, why, **figures)
    ending.end(state, number, JobState.STOPPED, now, why)


def _index(job: JobRecord) -> int:
    assert job.spec.array is not None
    return job.spec.array.index


def _repeated(state: State, command: commands.SubmitArray, first: JobRecord) -> answers.Answer:
    array = first.spec.array
    if array is not None:
        specs = _specs(command, array.array)
        kept = members_of(state.jobs, array.array)
        if len(specs) == array.size and all(job.submitted_spec == specs[job.number - array.array - 1] for job in kept):
            return answers.ArrayAnswer(array.array)
    text = f"request id {command.request_id} was used for {first.name} with another description; use a new one"
    raise RefusedError("REQUEST_REUSED", text, {"job": first.name})


def _specs(command: commands.SubmitArray, number: int) -> tuple[JobSpec, ...]:
    size, rule = len(command.members), command.rule
    return tuple(
        replace(
            command.spec,
            array=Membership(number, place, index, size, dict(sorted(given.items())), command.at_once, rule),
        )
        for place, (index, given) in enumerate(command.members)
    )


def _check(state: State, command: commands.SubmitArray) -> None:
    violations = [*_wrong_members(command.members), *_wrong_rule(command.rule)]
    if not 0 <= command.at_once <= MEMBERS_LIMIT:
        violations.append(("at_once", f"from 0, for all, to {MEMBERS_LIMIT}"))
    if command.spec.deadline and command.at_once:
        violations.append(("spec.deadline", "members that are held back cannot have one"))
    if not violations:
        indices = [index for index, _ in command.members]
        wrong = (*violations_of(command.spec), *dependencies.violations_of(state.jobs, command.spec, indices))
        violations = list(wrong)[:SEVERAL]
    if not violations:
        violations = _wrong_commands(command.spec, command.members)
    if violations:
        raise RefusedError("SPEC_INVALID", "the array cannot be accepted", violations=tuple(violations))
    jobs = len(command.members)
    check_room(state, command.spec, command.user, jobs)
    if command.limited:
        size = jobs * spec_bytes(command.spec) + sum([bytes_of_all(given) for _, given in command.members])
        check_share(state, command.user, jobs, size)


def _wrong_members(members: Sequence[tuple[int, Mapping[str, str]]]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if not 1 <= len(members) <= MEMBERS_LIMIT:
        return [("members", f"from 1 to {MEMBERS_LIMIT}")]
    if len({index for index, _ in members}) != len(members):
        found.append(("members", "their indices must differ"))
    named: set[str] = set()
    for place, (index, given) in enumerate(members):
        path = f"members[{place}]"
        if not 0 <= index <= _INDEX_LIMIT:
            found.append((f"{path}.index", f"from 0 to {_INDEX_LIMIT}"))
        if len(given) > _PARAMETERS_LIMIT:
            found.append((f"{path}.parameters", f"at most {_PARAMETERS_LIMIT}"))
        values = "".join(given.values())
        total = bytes_of(values)
        if total > _VALUES_LIMIT:
            found.append((f"{path}.parameters", f"at most {_VALUES_LIMIT} bytes in all"))
        # No value is longer than all of them together, so most need not be checked one by one.
        are_fine = total <= _VALUE_LIMIT and "\0" not in values
        # Most members have parameters of the same names.
        if are_fine and named.issuperset(given):
            continue
        for name, text in given.items():
            if name not in named and (not _NAME.fullmatch(name) or name in _RESERVED):
                found.append((f"{path}.parameters", f"{name[:40]!r} cannot be the name of a parameter"))
            elif not are_fine and (bytes_of(text) > _VALUE_LIMIT or "\0" in text):
                found.append((f"{path}.parameters.{name[:40]}", f"at most {_VALUE_LIMIT} bytes, no NUL"))
            else:
                named.add(name)
        if len(found) >= _SHOWN:
            break
    return found


def _wrong_commands(spec: JobSpec, members: Sequence[tuple[int, Mapping[str, str]]]) -> list[tuple[str, str]]:
    """Return what is wrong with the members' commands. Lengths are computed before any command is built."""
    template, shared = Template(spec.command), bytes_of_all(spec.environment)
    of_roles = [Template(program.command) for program in spec.role_programs if program.command]
    shared += sum([bytes_of_all(program.environment) for program in spec.role_programs])
    total = 0
    if template.places + sum([one.places for one in of_roles]) > _PLACES_LIMIT:
        return [("spec.command", f"at most {_PLACES_LIMIT} places such as {{NAME}}: put the program into a file")]
    for index, given in members:
        length = template.length(index, given) + sum([one.length(index, given) for one in of_roles])
        if length > COMMAND_BYTES_LIMIT:
            return [("spec.command", f"at most {COMMAND_BYTES_LIMIT} bytes in all, with the parameters put in")]
        if not all(one.has_program(index, given) for one in (template, *of_roles)):
            return [("spec.command", "must name a program to run, with the parameters put in")]
        total += length + shared
    if total > _BYTES_LIMIT:
        text = (
            f"{counted(len(members), 'member')} with command and environment are {total} bytes, at most {_BYTES_LIMIT}"
        )
        return [("members", f"{text}: put large values into a file")]
    return []


_RESERVED: Final = frozenset({"index", "INDEX", "SIZE", "PARAMETERS"})


def _wrong_rule(rule: StopRule | None) -> list[tuple[str, str]]:
    if rule is None:
        return []
    found: list[tuple[str, str]] = []
    for field, name in (("metric", rule.metric), ("resource", rule.resource)):
        if not _NAME.fullmatch(name):
            found.append((f"rule.{field}", "a name of at most 32 letters, digits and underscores"))
    if not 0 < rule.first <= 1e15:
        found.append(("rule.first", "more than zero"))
    if rule.kind in (RuleKind.HALVING, RuleKind.ASHA) and not 1 < rule.factor <= 1_000:
        found.append(("rule.factor", "more than 1, at most 1000"))
    if not 0 <= rule.every <= 1e15:
        found.append(("rule.every", "more than zero"))
    if abs(rule.bound) > 1e300 or rule.bound != rule.bound:
        found.append(("rule.bound", "must be a number"))
    return found


def report_of(
    rule: StopRule, step: int, loss: float | None, metrics: Sequence[JobMetric]
) -> tuple[float | None, float] | None:
    """Return the value of the rule's metric and the amount of its resource at that report; None before the first.

    Without a report of that name, `loss` is the one that the steps report."""
    named = {metric.name: metric for metric in metrics}
    value, at = named.get(rule.metric), named.get(rule.resource)
    if value is None:
        # Zero is what a daemon of an older version reports before the first loss.
        if rule.metric != LOSS or not loss:
            return None
        value = JobMetric(LOSS, loss, step)
    if rule.resource == STEP and at is None:
        return value.value, float(value.step)
    # Both must be of one report: a newer value has no amount yet.
    if at is None or at.value is None or at.step < value.step:
        return None
    return value.value, at.value
