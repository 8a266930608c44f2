"""Strict first in, first out: by priority, then by submission. Nobody overtakes."""

from __future__ import annotations

from ganger_master.core.model import Job


def key(job: Job) -> tuple[int, ...]:
    return (-job.spec.priority, job.number)
