"""Lines of jobs, of job arrays with their members, and of recent changes of running jobs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from ganger.cli.options import number
from ganger.console import bounded, enum_text
from ganger.history import HistoryEvent, sentence
from ganger.job import FINISHED
from ganger.text import counted, format_duration, format_ranges
from ganger.v1 import array_pb2, job_pb2, job_service_pb2, resources_pb2
from ganger.wire import times

_NAME_WIDTH = 63
# A job that makes steps has reported one so long after the first.
_FIRST_REPORT_S = 10.0


def state_text(job: job_pb2.Job) -> str:
    """ "running" rather than "holding": the phase of the gang where it has one; of one in turns, whether it is its."""
    if job.state == job_pb2.Job.STATE_HOLDING:
        is_to_run = job.gang.phase in (job_pb2.Gang.PHASE_STARTING, job_pb2.Gang.PHASE_RUNNING)
        if is_to_run and job.gang.slice_state == job_pb2.Gang.SLICE_STATE_INACTIVE:
            return "waiting for its turn"
        # A script without boundaries never reports a step.
        if job.gang.phase == job_pb2.Gang.PHASE_RUNNING or (is_to_run and job.HasField("running_since_time")):
            return "running, in turn" if job.gang.slice_state == job_pb2.Gang.SLICE_STATE_ACTIVE else "running"
        phase = enum_text(job_pb2.Gang.Phase, job.gang.phase)
        if phase == "parked" and job.gang.move_claims:
            return "moving" if devices_in(job.gang.move_claims) == devices_in(job.gang.claims) else "resizing"
        level = level_text(job.gang.parked_level)
        return f"parked({level})" if phase == "parked" and level else phase if phase != "unspecified" else "holding"
    state = enum_text(job_pb2.Job.State, job.state)
    if job.state == job_pb2.Job.STATE_SUSPENDED:
        if job.gang.phase == job_pb2.Gang.PHASE_STOPPING:
            return "stopping"
        level = level_text(job.suspended_level)
        return f"suspended({level})" if level else state
    return "held" if state == "pending" and job.array.held else state


def devices_in(claims: Iterable[resources_pb2.Claim]) -> int:
    return sum(claim.device_mask.bit_count() for claim in claims)


def job_sentence(job: job_pb2.Job) -> str:
    """ "job 7 is running", "job 7 has failed: EXIT: rank 0 exited with code 3"."""
    subject = f"job {called(job)}"
    if job.state == job_pb2.Job.STATE_SUCCEEDED:
        return f"{subject} has succeeded"
    if job.state == job_pb2.Job.STATE_FAILED:
        return f"{subject} has failed: {note(job)}"
    if job.state == job_pb2.Job.STATE_STOPPED:
        return f"{subject} was stopped by the rule of its array: {job.end_reason}"
    # The table has "suspended(offload)" as one word.
    return f"{subject} is {state_text(job).replace('(', ' (')}"


def called(job: job_pb2.Job) -> str:
    """ "7", or "7_3" for the member of index 3 of array 7."""
    if job.HasField("array"):
        return f"{number(job.array.array)}_{job.array.member.index}"
    return number(job.name)


def level_text(level: job_pb2.SuspendLevel.ValueType) -> str:
    return "" if level == 0 else enum_text(job_pb2.SuspendLevel, level)


def locality_text(level: resources_pb2.Level.ValueType) -> str:
    return "" if level == 0 else enum_text(resources_pb2.Level, level)


def gpus(spec: job_pb2.JobSpec) -> int:
    return sum(role.tasks * role.shape.gpus for role in spec.roles)


def gpus_text(job: job_pb2.Job) -> str:
    """Return the number of GPUs that a job holds or requests; with its range for an elastic job: "4 (2-8)"."""
    spec = job.spec
    least, most = spec.gpus_min, spec.gpus_max
    if not most:
        least = sum((role.tasks_min or role.tasks) * role.shape.gpus for role in spec.roles)
        most = sum((role.tasks_max or role.tasks) * role.shape.gpus for role in spec.roles)
    if least == most:
        return str(gpus(spec))
    held = devices_in(job.gang.claims)
    return f"{held or gpus(spec)} ({least}-{most})"


def sizes_text(job: job_pb2.Job) -> str:
    """Return the sizes of an elastic job, and whether it can be resized as it runs; "" for other jobs."""
    spec, can = job.spec, job.capabilities
    if ranges := [f"{role.name} {role.tasks_min} to {role.tasks_max}" for role in spec.roles if role.tasks_max]:
        divided = [
            f"numbers of {role.name} that divide a batch of {batch}"
            for role, batch in zip(spec.roles, can.role_divides, strict=False)
            if batch
        ]
        return "; ".join([", ".join(ranges), *divided, _resizes(job)])
    if not spec.gpus_max:
        return ""
    each = spec.roles[0].shape.gpus if spec.roles else 1
    whole = f", whole tasks of {each}" if each > 1 else ""
    divides = f"; tasks that divide a batch of {can.resize_divides}" if can.resize_divides else ""
    return f"{spec.gpus_min} to {spec.gpus_max} GPUs{whole}{divides}; {_resizes(job)}"


def _resizes(job: job_pb2.Job) -> str:
    why = job.capabilities.missing.get("RESIZE", "")
    if job.state in FINISHED:
        return "has ended"
    if job.capabilities.can_resize and job.gang.slice_state != job_pb2.Gang.SLICE_STATE_UNSPECIFIED:
        return "grows and shrinks once it is no longer time-sliced"
    if job.capabilities.can_resize:
        return "grows and shrinks as it runs"
    if job.capabilities.can_reshard and any(role.tasks_max for role in job.spec.roles):
        return "changes them with a checkpoint, from which it starts again"
    if job.capabilities.can_reshard:
        return "may have another number whenever it starts from a checkpoint"
    if why:
        return f"keeps the number it was started with: {why}"
    if not job.gang.claims:
        return "reports after its first step whether it grows and shrinks as it runs"
    return "keeps the number that it has, for it has not reported that it can change it"


def bounds(spec: job_pb2.JobSpec) -> str:
    """Return the range of tasks of a job with a range of GPUs ("1 to 4"); "" for other jobs."""
    each = spec.roles[0].shape.gpus if spec.roles else 0
    return f"{spec.gpus_min // each} to {spec.gpus_max // each}" if spec.gpus_max and each else ""


def tasks(spec: job_pb2.JobSpec) -> int:
    return sum(role.tasks for role in spec.roles)


def rank_labels(spec: job_pb2.JobSpec, role: str | None = None) -> dict[int, str]:
    """Return ranks with the labels of their lines in a log: "0", or with several roles "ps 0". `role`: only its."""
    labels: dict[int, str] = {}
    first = 0
    for each in spec.roles:
        if role in (None, each.name):
            of_several = len(spec.roles) > 1
            labels |= {first + n: f"{each.name} {n}" if of_several else str(n) for n in range(each.tasks)}
        first += each.tasks
    return labels


def label(job: job_pb2.Job) -> str:
    """Return its name, else the last path component of what it runs, within the width of a column."""
    return column(job.spec.display_name or _script(job))


def column(name: str) -> str:
    """Return what a user named, no wider than a column once it is written out."""
    return bounded(name, _NAME_WIDTH)


def order(job: job_pb2.Job) -> tuple[int, int]:
    """Sorts jobs for people: those that wait come last, in the order in which they go."""
    return job.queue_rank, int(number(job.name))


def _script(job: job_pb2.Job) -> str:
    scripts = [word for word in job.spec.command if word.endswith(".py")]
    word = scripts[0] if scripts else job.spec.command[0] if job.spec.command else ""
    return " ".join(word.rpartition("/")[2].split())


def devices(mask: int) -> str:
    """Bit masks as people write them: "0-3,6"."""
    return format_ranges(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def place(job: job_pb2.Job) -> str:
    """ "n1[0-3] n2[0-3]", and where it is going; of a gang whose devices others may have, the nodes."""
    gang, given_back = job.gang, has_given_back(job)
    here = " ".join(number(claim.node) if given_back else _claim(claim) for claim in gang.claims)
    there = " ".join(_claim(claim) for claim in job.gang.move_claims)
    return f"{here} → {there}" if there else here


def beside(job: job_pb2.Job) -> str:
    """Return ", beside 4 9": the jobs that are co-located with this one on its devices; "" for none."""
    names = " ".join(map(number, job.gang.colocated_jobs))
    return f", beside {names}" if names else ""


def has_given_back(job: job_pb2.Job) -> bool:
    """Return whether others may have the devices and cores on which it was."""
    return job.gang.phase == job_pb2.Gang.PHASE_PARKED and job.gang.parked_level > job_pb2.SUSPEND_LEVEL_PAUSE


def cores(job: job_pb2.Job) -> list[str]:
    """Return the cores of the ranks: "0-3", or "rank 1: 4-7" and "ranks 2-3: 0-3" for several. Empty at first."""
    if has_given_back(job):
        return []
    if len(job.gang.cores) == 1:
        return [text for text in job.gang.cores if text]
    alike = [(text, list(ranks)) for text, ranks in groupby(range(len(job.gang.cores)), job.gang.cores.__getitem__)]
    return [f"{_ranks_text(ranks)}: {text}" for text, ranks in alike if text]


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def progress_text(progress: job_pb2.Progress) -> str:
    parts = [f"step {progress.step}"] if progress.step else []
    if progress.steps_per_s > 0:
        parts.append(f"{progress.steps_per_s:.3g}/s")
    if progress.step and math.isfinite(progress.loss):
        parts.append(f"loss {progress.loss:.4g}")
    return " ".join(parts)


def progress_column(job: job_pb2.Job, now: float | None = None) -> str:
    """Return the progress of a job, or that it runs and reports no steps. now: Unix time in seconds, default the
    clock."""
    text = progress_text(job.progress)
    if text or job.state != job_pb2.Job.STATE_HOLDING or not job.HasField("running_since_time"):
        return text
    ran_s = (time.time() if now is None else now) - times.unix_s(job.running_since_time)
    return "reports no steps" if ran_s >= _FIRST_REPORT_S else ""


def elapsed(job: job_pb2.Job, now: float | None = None) -> str:
    """Return how long the job ran, without the time that it was suspended or waited again; before its processes run,
    how long it has waited. Empty for a job that ended before it began."""
    has_begun, has_ended = has_run(job), job.HasField("end_time")
    now = time.time() if now is None else now
    if not has_begun:
        return "" if has_ended else format_duration(max(0.0, now - times.unix_s(job.create_time)))
    run_s = times.seconds(job.run_duration)
    if job.HasField("running_since_time"):
        run_s += max(0.0, now - times.unix_s(job.running_since_time))
    elif has_ended and not run_s:
        # It was over before the master saw a step of it.
        run_s = max(0.0, times.unix_s(job.end_time) - times.unix_s(job.start_time))
    return format_duration(run_s)


def has_run(job: job_pb2.Job) -> bool:
    return job.HasField("start_time") or job.HasField("running_since_time")


def efficiency(job: job_pb2.Job) -> str:
    """Return for a finished job the share of time that it ran, its speed and its GPU-hours."""
    if job.state not in FINISHED or not job.HasField("run_duration"):
        return ""
    run = times.seconds(job.run_duration)
    whole = times.unix_s(job.end_time) - times.unix_s(job.create_time)
    parts = [f"ran {format_duration(run)} of {format_duration(max(run, whole))} since its submission"]
    if job.progress.step:
        parts.append(f"{counted(job.progress.step, 'step')}, {job.progress.step / run:.3g}/s")
    if job.progress.data_wait_share:
        parts.append(f"waited for data {job.progress.data_wait_share:.0%} of the last attempt")
    if gpus(job.spec):
        parts.append(f"{gpus(job.spec) * run / 3600:.3g} GPU-hours")
    return "; ".join(parts)


def note(job: job_pb2.Job) -> str:
    """Place, or why it has none; one line."""
    if job.state == job_pb2.Job.STATE_FAILED:
        return " ".join(f"{job.failure.reason}: {job.failure.message}".split())
    if job.state in FINISHED:
        # Users know what they ordered: a cancelled job needs no reason.
        return job.end_reason if job.state == job_pb2.Job.STATE_STOPPED else ""
    if job.state == job_pb2.Job.STATE_PENDING:
        if job.blockers:
            return " ".join(f"({job.blockers[0].reason}) {_cause(job, job.blockers[0])}".split())
        # Why a job far behind waits is not computed for the list; `ganger why` does that.
        return f"({job.queue_rank - 1} ahead)" if job.queue_rank > 1 else ""
    lacking = unreported(job)
    concern = idle_text(job) or job.progress.stall_reason or (f"no {lacking} reported" if lacking else "")
    return place(job) + beside(job) + (f" ({concern})" if concern else "")


def idle_text(job: job_pb2.Job, now: float | None = None) -> str:
    """Return that a job does not use its GPUs, or was parked for that; "" for other jobs. now: Unix time in seconds,
    default the clock."""
    idle = job.gang.idle
    if not job.gang.HasField("idle"):
        return ""
    if job.state == job_pb2.Job.STATE_SUSPENDED:
        return f"suspended because it did not use its GPUs, from {instant(idle.since)} on"
    if job.state != job_pb2.Job.STATE_HOLDING:
        return ""
    now = time.time() if now is None else now
    text = f"has not used its GPUs for {format_duration(max(0.0, now - times.unix_s(idle.since)))}"
    if idle.HasField("park_time"):
        return f"{text}, will be suspended in {format_duration(max(0.0, times.unix_s(idle.park_time) - now))}"
    return f"{text}, not suspended: {idle.park_refusal}" if idle.park_refusal else text


def unreported(job: job_pb2.Job) -> str:
    """Return the metric or resource that the stop rule of a job's array judges by, and that the job has not reported,
    though it came to the first rung or has ended; "" for jobs that were or can be judged."""
    rule, progress = job.array.rule, job.progress
    if not job.array.HasField("rule") or job.array.rungs or not job.HasField("start_time"):
        return ""
    reported = {metric.name: metric.value for metric in progress.metrics}
    is_reported = rule.metric in reported
    if rule.metric == "loss" and progress.step:
        is_reported = is_reported or math.isfinite(progress.loss)
    amount = reported.get(rule.resource, float(progress.step) if rule.resource == "step" else None)
    if is_reported:
        return rule.resource if amount is None else ""
    has_come = amount is not None and amount >= rule.first_rung
    return rule.metric if has_come or job.state in FINISHED else ""


def unjudged(job: job_pb2.Job) -> str:
    """Return that the stop rule cannot judge a job, in words; "" where it can."""
    lacking = unreported(job)
    return f"judges nothing, because no {lacking} was reported" if lacking else ""


def _cause(job: job_pb2.Job, blocker: resources_pb2.Refusal) -> str:
    """Return what a job waits for, short: "4 GPUs wanted, 1 free, 2 ahead"."""
    figures = blocker.figures
    ahead = f"{job.queue_rank - 1} ahead" if job.queue_rank > 1 else ""
    if blocker.reason == "RANKED":
        return ahead or ("first in line" if job.queue_rank else blocker.message)
    if blocker.reason != "GPUS" or not {"needed", "free"} <= figures.keys():
        return blocker.message
    needed, free, largest = figures["needed"], figures["free"], figures.get("largest_free", 0)
    parts = [f"{counted(needed, 'GPU')} wanted", f"{free} free"]
    if 0 < largest < needed <= free:
        parts[-1] += f" of which {largest} together"
    if figures.get("draining"):
        parts.append(f"{figures['draining']} on draining nodes")
    return ", ".join([*parts, ahead] if ahead else parts)


def span_text(soonest_s: float, latest_s: float) -> str:
    """ "in 4m to 16m", "within 16m", or "in about 4m" where both ends read the same."""
    soonest, latest = format_duration(soonest_s), format_duration(latest_s)
    if soonest_s < 1.0:
        return f"within {latest}"
    return f"in about {latest}" if soonest == latest else f"in {soonest} to {latest}"


def mover(one: job_service_pb2.MigrationStep) -> str:
    """ "jobs/3 moves from nodes/n2 to nodes/n1"."""
    where = f"from {', '.join(one.from_nodes)}"
    does = f"moves {where} to {', '.join(one.to_nodes)}" if one.to_nodes else f"rests in host memory, {where}"
    return f"{one.job} {does}"


def _claim(claim: resources_pb2.Claim) -> str:
    node = number(claim.node)
    return f"{node}[{devices(claim.device_mask)}]" if claim.device_mask else node


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


def change_rows(events: Iterable[job_pb2.Event], before: Iterable[tuple[str, ...]] = ()) -> list[tuple[str, ...]]:
    """Return rows (time, jobs, sentence) of changes of running jobs, appended to the rows `before`.

    Jobs with the same sentence at the same time share a row. Events of other kinds are skipped.
    """
    shown = list(before)
    for event in events:
        if event.kind not in _KINDS or not event.subject.startswith(("jobs/", "cluster")):
            continue
        when = times.local_datetime(event.time).strftime("%H:%M:%S")
        subject, text = event.subject.removeprefix("jobs/"), sentence(plain_event(event))
        last = shown[-1] if shown else ()
        if last and (last[0], last[2]) == (when, text):
            shown[-1] = (when, f"{last[1]} {subject}", text)
        else:
            shown.append((when, subject, text))
    return shown


def plain_event(event: job_pb2.Event) -> HistoryEvent:
    """Return an event of the API as plain values."""
    return HistoryEvent(times.unix_s(event.time), event.kind, event.cause, event.message, dict(event.figures))


# What people look for first.
_STATES = ("holding", "pending", "held", "suspended", "succeeded", "stopped", "failed", "cancelled", "forgotten")


def array_row(array: array_pb2.Array) -> tuple[str, ...]:
    """A line of `ganger queue`."""
    return (
        f"{number(array.name)}[{array.size}]",
        column(array.display_name),
        column(array.user),
        "ended" if array.HasField("end_time") else "array",
        str(array.gpus * array.states["holding"]),
        array_elapsed(array),
        "",
        column(best(array, "")),
        states(array),
    )


def states(array: array_pb2.Array) -> str:
    """ "2 holding, 5 held, 1 stopped"."""
    return ", ".join(f"{array.states[state]} {state}" for state in _STATES if array.states.get(state))


def best(array: array_pb2.Array, otherwise: str) -> str:
    if not array.HasField("best"):
        return otherwise
    given = pairs(array.best.parameters)
    return (
        f"best {array.rule.metric} {array.best_value:.4g} of {number(array.name)}_{array.best.index} {given}".rstrip()
    )


def pairs(parameters: Mapping[str, str]) -> str:
    return " ".join(f"{name}={text}" for name, text in sorted(parameters.items()))


def array_elapsed(array: array_pb2.Array) -> str:
    end = times.unix_s(array.end_time) if array.HasField("end_time") else time.time()
    return format_duration(max(0.0, end - times.unix_s(array.create_time)))


def rule_text(rule: array_pb2.StopRule) -> str:
    """ "halving by accuracy, more is better, from step 100 on, by 2"."""
    kind = enum_text(array_pb2.StopRule.Kind, rule.kind)
    goal = "more" if rule.higher_is_better else "less"
    parts = [f"{kind} by {rule.metric}, {goal} is better, from {rule.resource} {rule.first_rung:g} on"]
    if kind in ("halving", "asha"):
        parts.append(f"then at {rule.factor:g} times as many, where 1 of {rule.factor:g} goes on")
    else:
        parts.append(f"every {rule.rung_interval or rule.first_rung:g}")
    if kind == "threshold":
        parts.append(f"no worse than {rule.bound:g}")
    return ", ".join(parts)


def instant(time: Timestamp) -> str:
    return times.local_datetime(time).strftime("%Y-%m-%d %H:%M:%S") if time.seconds else ""


def array_facts(array: array_pb2.Array) -> list[tuple[str, str]]:
    """Return the facts of an array that `ganger show` prints above its members."""
    return [
        ("array", number(array.name)),
        ("name", array.display_name),
        ("user", array.user),
        ("members", f"{array.size}: {states(array)}"),
        ("at once", str(array.max_concurrent or "")),
        ("stop rule", rule_text(array.rule) if array.HasField("rule") else ""),
        ("best", best(array, "").removeprefix("best ")),
        ("submitted", instant(array.create_time)),
        ("ended", instant(array.end_time)),
        ("time", array_elapsed(array)),
    ]


def members_table(members: Sequence[job_pb2.Job]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and one row for each member, with a column for each parameter and each reported metric."""
    parameters = sorted({name for job in members for name in job.array.member.parameters})
    metrics = sorted({metric.name for job in members for metric in job.progress.metrics})
    headings = ("MEMBER", "JOB", "STATE", "TIME", *parameters, "PROGRESS", *metrics, "NODES/REASON")
    rows = []
    for job in members:
        reported = {metric.name: value_text(metric.value) for metric in job.progress.metrics}
        rows.append(
            (
                called(job),
                number(job.name),
                state_text(job),
                elapsed(job),
                *(column(job.array.member.parameters.get(name, "")) for name in parameters),
                progress_column(job),
                *(reported.get(name, "") for name in metrics),
                note(job),
            )
        )
    return headings, rows


def value_text(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "no number"
