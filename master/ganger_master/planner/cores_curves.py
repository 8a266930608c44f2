"""Measured rates of jobs by cores and memory, as the planner reports them to the master, and in words: why a job has
the cores and the host memory that it has. The master decides nothing from them, but daemons get their trials of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from ganger.cluster.resources import Claim
from ganger.text import counted, format_cores, format_duration, format_memory
from msgspec import structs

from ganger_master.core.commands import KEPT_PLACES_LIMIT
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import WHOLE_SHARE, JobRecord
from ganger_master.core.plan_changes import CURVE_POINTS, CoresCurve, CurvePoint
from ganger_master.core.state import State
from ganger_master.estimators.cores_and_memory import CpuPoint, enough_memory, sweet_point_bounds
from ganger_master.planner.core_profiles import CoreProfile
from ganger_master.planner.device_groups import shares_devices
from ganger_master.planner.resource_trials import ProfiledResources
from ganger_master.policies import Tune
from ganger_master.policies.tunings import ENOUGH


def curve_of(number: int, cores: ProfiledResources) -> CoresCurve:
    """Return the curve of a job in its present phase, with those of its other phases."""
    others = [_curve(number, phase, profile) for phase, profile in sorted(cores.others.items()) if profile.points]
    trial, found = cores.trial, _curve(number, cores.phase, cores.profile)
    return structs.replace(
        found,
        trial_millicores=0 if trial is None or trial.memory_bytes else trial.millicores,
        trial_memory_bytes=0 if trial is None else trial.memory_bytes,
        tried_s=cores.tried_s,
        lost_s=cores.lost_s,
        others=tuple(others),
    )


def _curve(number: int, phase: str, profile: CoreProfile) -> CoresCurve:
    own = {point.cores for point in profile.own}
    points = sorted(profile.points, key=lambda point: point.cores)[:CURVE_POINTS]
    shown = tuple([CurvePoint(point.cores, point.rate, point.cores not in own) for point in points])
    model, memory = profile.model, profile.memory_points[-CURVE_POINTS:]
    by_memory = tuple([_memory_point(one, profile) for one in memory])
    enough_memory_bytes = int(enough_memory(memory)) if memory else 0
    if model is None:
        found = CoresCurve(number, shown, phase=phase)
        return structs.replace(found, memory_points=by_memory, enough_memory_bytes=enough_memory_bytes)
    low, high = sweet_point_bounds(profile.points)
    most = max(points[-1].cores, model.knee)
    # Cores are given whole.
    whole = np.arange(1.0, max(2.0, math.ceil(most)) + 1.0)
    rates = model.rates(whole)
    enough = float(whole[int(np.argmax(rates >= ENOUGH * rates.max()))])
    grid = np.unique(np.round(np.linspace(1.0, whole[-1], CURVE_POINTS)))
    return CoresCurve(
        number,
        shown,
        tuple([CurvePoint(count, model.rate(count)) for count in grid.tolist()]),
        model.sweet_point,
        low,
        0.0 if math.isinf(high) else high,
        model.error.worst,
        round(1000 * enough),
        phase=phase,
        memory_points=by_memory,
        enough_memory_bytes=enough_memory_bytes,
    )


def _memory_point(point: CpuPoint, profile: CoreProfile) -> CurvePoint:
    return CurvePoint(point.cores, point.rate, point not in profile.own, int(point.memory_bytes))


class CurveNews:
    """The jobs whose measurements the planner has not reported since they changed."""

    def __init__(self) -> None:
        self._numbers: dict[int, None] = {}

    def note(self, number: int) -> None:
        """Note that the measurements of a job have changed."""
        self._numbers[number] = None

    def taken(self, cores_of: Callable[[int], ProfiledResources | None]) -> tuple[CoresCurve, ...]:
        """Return the curves to report now, as many as fit into a plan, once. `cores_of`: of a live job by number."""
        numbers = list(self._numbers)[:KEPT_PLACES_LIMIT]
        for number in numbers:
            del self._numbers[number]
        known = [(number, cores) for number in numbers if (cores := cores_of(number)) is not None]
        return tuple([curve_of(number, cores) for number, cores in known if cores.profile.points or cores.others])


_UNTUNED: Final = "no cores are tuned under policy {policy}: a job without a request gets the share of its GPUs"


def explain_cores(state: State, number: int) -> str:
    """Return why a job has the cores that it has, in a paragraph. Raises KeyError for an unknown job."""
    job, curve = state.jobs[number], state.cores_curves.get(number)
    gang = state.gangs.get(job.epoch)
    holds = gang is not None and not job.state.is_finished and any(piece.held for piece in gang.pieces)
    none = "has ended" if job.state.is_finished else "holds no cores now"
    sentences = [_held(gang.claims, job)] if gang is not None and holds else [f"job {job.number} {none}"]
    if gang is not None and holds:
        sentences += _division(gang.claims, job)
    sentences.append(_reason(state, job, gang if holds else None, curve))
    sentences += [] if curve is None else _measured(curve)
    return " ".join([f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences])


def explain_memory(state: State, number: int) -> str:
    """Return what a job holds of host memory and why, in a paragraph. Raises KeyError for an unknown job."""
    job = state.jobs[number]
    gang = state.gangs.get(job.epoch)
    held = [] if gang is None else gang.held
    texts = [f"{format_memory(claim.memory_bytes)} on {claim.node}" for claim in held]
    sentences = [f"Of host memory it holds {' and '.join(texts) or 'nothing now'}: {_memory_reason(job)}."]
    curve, tune = state.cores_curves.get(number), state.policy.stage(Tune)
    if curve is not None and curve.trial_memory_bytes:
        tried = format_memory(curve.trial_memory_bytes)
        sentences.append(f"File caches beyond {tried} for each GPU are held back now, as a trial.")
    if curve is not None and curve.memory_points:
        sentences.append(_by_memory(curve))
    elif tune is not None and tune.tuning.by_profiles and held:
        sentences.append(
            "Less page cache was not tried: not yet, no control group can hold it back, or it uses too little."
        )
    return " ".join(sentences)


def _by_memory(curve: CoresCurve) -> str:
    rates = ", ".join([f"{one.rate:.3g} with {format_memory(one.memory_bytes)}" for one in curve.memory_points])
    held, enough = curve.memory_points[-1].memory_bytes, curve.enough_memory_bytes
    loss = "with any less it is slower" if enough >= held else f"{format_memory(enough)} are enough"
    return f"Steps/s by host memory for each GPU, page cache included: {rates}; {loss}."


def _memory_reason(job: JobRecord) -> str:
    named = [(role.shape.memory_bytes, role.name) for role in job.shape.roles if role.shape.memory_bytes]
    if named:
        texts = [f"{format_memory(size)} for each task" + f" ({name})" * (len(named) > 1) for size, name in named]
        return f"its user asked for {' and '.join(texts)}, and no measurement changes that"
    share = "it gets a part of its node's in proportion to its devices"
    if len(job.spec.roles) > 1:
        return f"{share}, since memory of several roles is not measured by task"
    if job.working_set_bytes == WHOLE_SHARE:
        return f"{share}, since it ran out of memory with less"
    if not job.working_set_bytes:
        return f"{share}, and it was not measured yet, or no control group of its node measures memory"
    used, needed = format_memory(job.working_set_bytes), format_memory(job.task_memory_bytes)
    return f"{share}, and from its next start on {needed} for each task if that is less: it has used {used} at most"


def _held(claims: Sequence[Claim], job: JobRecord) -> str:
    parts = []
    for claim in claims:
        gpus = claim.device_mask.bit_count()
        beside = f" for {'its GPU' if gpus == 1 else f'{gpus} GPUs'}" if gpus else ""
        parts.append(f"{_cores(sum(claim.millicores))}{beside} on {claim.node}")
    return f"job {job.number} has {', '.join(parts)}"


def _division(claims: Sequence[Claim], job: JobRecord) -> Iterator[str]:
    """Yield how the cores of a node are divided among the ranks there, as the daemon does it; nothing of one rank."""
    if any(len([tasks for tasks in claim.tasks if tasks]) > 1 for claim in claims):
        yield "on a node each role has cores of its own, in proportion to what its tasks request"
    if any(tasks > 1 for claim in claims for tasks in claim.tasks):
        alike = "of one role" if len(job.spec.roles) > 1 else "on one node"
        yield f"ranks {alike} share theirs: one uses what others leave"


def _reason(state: State, job: JobRecord, gang: Gang | None, curve: CoresCurve | None) -> str:
    tune = state.policy.stage(Tune)
    roles = job.shape.roles
    named = [
        (role.shape.millicores, role.name if len(roles) > 1 else "task") for role in roles if role.shape.millicores
    ]
    if named and (tune is None or tune.tuning.keeps_requests):
        texts = [f"{_cores(millicores)} for each {name}" for millicores, name in named]
        return f"its user asked for {' and '.join(texts)}, and no measurement changes that"
    if tune is None:
        return _UNTUNED.format(policy=state.policy.name)
    if not tune.tuning.by_profiles:
        return f"tuning {tune.tuning.name} divides cores by a fixed rule, without measurements"
    if gang is None:
        return "it gets the share of its GPUs, or what is known of its series, when it starts"
    if shares_devices(gang):
        return "cores of a job that shares its devices are not tuned"
    claims = [one for one in gang.claims if one.device_mask]
    held = min([sum(one.millicores) // one.device_mask.bit_count() for one in claims], default=0)
    if curve is not None and curve.trial_millicores:
        how = "under trial now" if held == curve.trial_millicores else "to be tried next"
        return f"{_cores(curve.trial_millicores)} for each GPU are {how}: a point that the curve lacks"
    if curve is None or not curve.enough_millicores:
        return f"that is the share of its GPUs: {_unmeasured(job, curve)}"
    return _judged(state, gang, held, curve)


def _unmeasured(job: JobRecord, curve: CoresCurve | None) -> str:
    if not job.spec.preemptible:
        return "a job that is not preemptible is not tried with other numbers of cores"
    if not (job.capabilities.checkpoint or job.capabilities.offload):
        return "without an agent in its processes it is not tried with other numbers of cores"
    if curve is None:
        return "it was not measured yet, which takes four windows of steps once it has warmed up"
    return "it was measured with one number of cores, and no other one could be tried yet"


def _judged(state: State, gang: Gang, held: int, curve: CoresCurve) -> str:
    enough = curve.enough_millicores
    slots = [slot for one in gang.claims if (slot := state.view.slots.get(one.node)) is not None]
    has_free = min([sum(state.view.millicores[slot]) for slot in slots], default=0) >= 1000
    if held == enough and curve.sweet_high:
        return f"that is the fewest with {ENOUGH:.0%} of its best rate: more gain it nothing, and fewer lose"
    if held == enough:
        more = "more will be tried" if has_free else "no more are free on its node"
        return f"its rate rises up to the most cores that it was measured with, and {more}"
    if held > enough:
        return f"{_cores(enough)} for each GPU are enough: a plan takes the others back once a job can use them"
    why = "a plan adds cores" if has_free else "other jobs on its node gain as much or more by the others"
    return f"{_cores(enough)} for each GPU would be enough: {why}"


def _measured(curve: CoresCurve) -> Iterator[str]:
    rates = ", ".join([f"{one.rate:.3g} with {one.cores:g}{' (series)' * one.is_inherited}" for one in curve.points])
    during = f" in {curve.phase}" if curve.others or curve.phase not in ("", "training") else ""
    yield f"steps/s by cores for each GPU{during}: {rates or 'not measured yet'}"
    if curve.fitted:
        high = f"{curve.sweet_high:g}" if curve.sweet_high else "more than was tried"
        bounds = f"between {curve.sweet_low:g} and {high} with 95 % confidence"
        flat = f"the curve is flat from {counted(curve.sweet_point, 'core', 'g')} ({bounds})"
        yield f"{flat}, and at most {curve.fit_error:.1%} off"
    for other in curve.others:
        if other.enough_millicores:
            yield f"in {other.phase} it needs {_cores(other.enough_millicores)} for each GPU"
    if curve.tried_s:
        lost = format_duration(curve.lost_s) if curve.lost_s >= 1.0 else "less than a second"
        yield f"trials took {format_duration(curve.tried_s)} and cost {lost} of work"


def _cores(millicores: int) -> str:
    return counted(format_cores(millicores), "core")
