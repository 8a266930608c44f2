"""With how many devices an elastic job may start: any number that its spec accepts, unless what it did before binds it.

A running job's size never changes in place: it is suspended at CHECKPOINT and started again, in two plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from ganger.resources.reasons import Reason, Refusal
from ganger.resources.values import Claim, GangShape

from ganger_master.core.model import Job


def devices_of(claims: Sequence[Claim]) -> int:
    return sum([claim.device_mask.bit_count() for claim in claims])


def shape_for(job: Job, claims: Sequence[Claim]) -> GangShape | Refusal:
    """By what these claims are judged: the shape of the number of devices they have, or why the job may not have so
    many."""
    gpus = devices_of(claims)
    if not job.spec.is_elastic or gpus == job.gpus:
        return job.shape
    spec = job.spec
    if not spec.accepts(gpus):
        figures = {"claimed": gpus, "gpus_min": spec.gpus_min, "gpus_max": spec.gpus_max}
        figures["gpus_per_task"] = spec.roles[0].shape.gpus
        detail = "the job does not accept so many devices"
        return Refusal(Reason.CLAIM_MISMATCH, figures, job=job.name, detail=detail)
    if job.is_bound:
        figures = {"needed": job.gpus, "claimed": gpus}
        where = "it rests on its devices" if job.epoch else "its checkpoint cannot be brought back with another number"
        return Refusal(Reason.CLAIM_MISMATCH, figures, job=job.name, detail=where)
    return spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus)
