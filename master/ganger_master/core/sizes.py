"""With how many devices an elastic job may start: any number that its spec accepts, unless what it did before binds it.

How one that runs goes on with another number is the matter of `resizing` and `worlds`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, GangShape

from ganger_master.core.model import JobRecord


def devices_of(claims: Sequence[Claim]) -> int:
    return sum([claim.device_mask.bit_count() for claim in claims])


def tasks_divide(job: JobRecord, gpus: int) -> bool:
    """Whether the ranks that so many devices make divide what the job takes at once over all of them."""
    each = job.spec.roles[0].shape.gpus
    return not job.capabilities.resize_divides or not job.capabilities.resize_divides % (gpus // each)


def shape_for(job: JobRecord, claims: Sequence[Claim], rests_for_any_size: bool = False) -> GangShape | Refusal:
    """By what these claims are judged: the shape of the number of devices they have, or why the job may not have so
    many. `rests_for_any_size`: it rests where another number of ranks can take up its state."""
    gpus = devices_of(claims)
    if not job.spec.is_elastic or gpus == job.gpus:
        return job.shape
    spec = job.spec
    if not spec.accepts(gpus):
        figures = {"claimed": gpus, "gpus_min": spec.gpus_min, "gpus_max": spec.gpus_max}
        figures["gpus_per_task"] = spec.roles[0].shape.gpus
        detail = "the job does not accept so many devices"
        return Refusal(Reason.CLAIM_MISMATCH, figures, job=job.name, detail=detail)
    if job.is_bound and not rests_for_any_size:
        figures = {"needed": job.gpus, "claimed": gpus}
        where = "it rests on its devices" if job.epoch else "its checkpoint cannot be brought back with another number"
        return Refusal(Reason.CLAIM_MISMATCH, figures, job=job.name, detail=where)
    if job.capabilities.resize and not tasks_divide(job, gpus):
        figures = {"claimed": gpus, "global_batch": job.capabilities.resize_divides}
        detail = "so many ranks do not divide its global batch"
        return Refusal(Reason.CLAIM_MISMATCH, figures, job=job.name, detail=detail)
    return spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus)
