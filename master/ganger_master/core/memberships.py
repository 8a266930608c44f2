"""The members of an array, what one of them has reported for its rule, and what is told of it when one ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ganger_master.core.array_members import LOSS, MEMBERS_LIMIT, STEP, Membership, StopRule
from ganger_master.core.model import JobMetric, JobRecord
from ganger_master.core.state import State


def members_of(jobs: Mapping[int, JobRecord], array: int) -> list[JobRecord]:
    """Those that are kept, in their order; empty if there is no such array, or none any more."""
    found: list[JobRecord] = []
    end = array + 1 + MEMBERS_LIMIT
    number = array + 1
    while number < end:
        job = jobs.get(number)
        if job is not None:
            membership = job.spec.array
            if membership is None or membership.array != array:
                break
            end = array + 1 + membership.size
            found.append(job)
        number += 1
    return found


def report_of(
    rule: StopRule, step: int, loss: float | None, metrics: Sequence[JobMetric]
) -> tuple[float | None, float] | None:
    """The value of the rule's metric and the amount of its resource at which it was reported; None before that.

    Without a report of that name `loss` is what the steps themselves tell of."""
    named = {metric.name: metric for metric in metrics}
    value, at = named.get(rule.metric), named.get(rule.resource)
    if value is None:
        # Zero is what stands there before the first loss.
        if rule.metric != LOSS or not loss:
            return None
        value = JobMetric(LOSS, loss, step)
    if rule.resource == STEP and at is None:
        return value.value, float(value.step)
    # Of two that were reported together, or the newer one says nothing of the older.
    if at is None or at.value is None or at.step < value.step:
        return None
    return value.value, at.value


def note_ended(state: State, job: JobRecord, array: Membership, now: float, cause: str) -> None:
    """The history of the array: this member has ended, and perhaps with it all."""
    progress = job.progress
    figures: dict[str, object] = {f"parameter_{name}": text for name, text in array.parameters.items()}
    if progress is not None:
        values = {LOSS: progress.loss, **{metric.name: metric.value for metric in progress.metrics}}
        figures.update({name: f"{value:.6g}" for name, value in values.items() if value is not None})
    subject, became = f"arrays/{array.array}", job.state.value.lower()
    figures.update(member=array.name, job=job.name, state=became)
    if job.start_time:
        figures["run_s"] = f"{job.run_seconds:.1f}"
    _tell(state, now, subject, "member_ended", cause, job.reason, figures)
    if not _has_live(state.jobs, array):
        counts = Counter(member.state.value.lower() for member in members_of(state.jobs, array.array))
        _tell(state, now, subject, "array_ended", cause, "", dict(sorted(counts.items())))


def _has_live(jobs: Mapping[int, JobRecord], array: Membership) -> bool:
    """Return whether a member has not ended. The last one comes first, because members usually end in their order."""
    members = (jobs.get(number) for number in range(array.array + array.size, array.array, -1))
    return any(member is not None and not member.state.is_finished for member in members)


def _tell(
    state: State, now: float, subject: str, kind: str, cause: str, message: str, figures: Mapping[str, object]
) -> None:
    state.history(now, subject, kind, cause, message, **figures)
