"""What a job has of its array, and what it reports by name: the core's values and `ganger.v1` messages, both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ganger.v1 import array_pb2, job_pb2
from ganger.wire.errors import SpecInvalid, Violation

from ganger_master.core.array_model import LOSS, STEP, Membership, RuleKind, StopRule
from ganger_master.core.job_model import JobMetric, JobRecord

_KINDS: Final = {kind: array_pb2.StopRule.Kind.Value(f"KIND_{kind.name}") for kind in RuleKind}
_KINDS_FROM_WIRE: Final = {number: kind for kind, number in _KINDS.items()}


def membership_to_wire(job: JobRecord, array: Membership) -> array_pb2.ArrayMembership:
    return array_pb2.ArrayMembership(
        array=f"arrays/{array.array}",
        member=array_pb2.ArrayMember(index=array.index, parameters=array.parameters),
        size=array.size,
        max_concurrent=array.at_once,
        rule=None if array.rule is None else rule_to_wire(array.rule),
        held=job.held,
        rungs=[math.nan if value is None else value for value in job.rungs],
    )


def metrics_to_wire(metrics: Sequence[JobMetric]) -> list[job_pb2.Metric]:
    return [
        job_pb2.Metric(name=one.name, value=math.nan if one.value is None else one.value, step=one.step)
        for one in metrics
    ]


def metrics_from_wire(progress: job_pb2.Progress) -> tuple[JobMetric, ...]:
    """A value that is no number is None: it must not become durable as one."""
    return tuple(
        JobMetric(one.name[:_NAME_MOST], one.value if math.isfinite(one.value) else None, one.step)
        for one in progress.metrics[:_METRICS_MOST]
    )


# More than a page has room for.
_METRICS_MOST: Final = 16
_NAME_MOST: Final = 64


def rule_to_wire(rule: StopRule) -> array_pb2.StopRule:
    return array_pb2.StopRule(
        kind=_KINDS[rule.kind],
        metric=rule.metric,
        higher_is_better=rule.maximise,
        resource=rule.resource,
        first_rung=rule.first,
        factor=rule.factor,
        rung_interval=rule.every,
        bound=rule.bound,
    )


def rule_from_wire(message: array_pb2.StopRule) -> StopRule:
    kind = _KINDS_FROM_WIRE.get(message.kind)
    if kind is None:
        known = ", ".join(one.name for one in RuleKind)
        raise SpecInvalid(
            "the array cannot be accepted", violations=[Violation("rule.kind", f"must be one of {known}")]
        )
    return StopRule(
        kind,
        message.metric or LOSS,
        message.higher_is_better,
        message.resource or STEP,
        message.first_rung,
        message.factor or StopRule(kind).factor,
        message.rung_interval,
        message.bound,
    )
