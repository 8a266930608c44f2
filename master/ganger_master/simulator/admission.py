"""Which jobs of a trace the master of this cluster would take, as which it would take them, and why not the others.

What quotas mean for the jobs of a trace: whom they bound, and which gangs could never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from ganger.cluster.impossible import impossible

from ganger_master.config import ALL_OTHER_USERS, as_settings
from ganger_master.core.model import JobSpec
from ganger_master.core.submission import violations_of
from ganger_master.core.user_usage import limit_of
from ganger_master.simulator.job_specs import devices_only, specs_of, users_of
from ganger_master.simulator.traces.row_findings import RowFinding, RowFindingCounts, RowFindingKind
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.transform import that_fit
from ganger_master.simulator.traces.workload import Labels, Workload

# Of all users of a trace, so many are told.
_TOLD = 8


def strangers_among(quotas: Mapping[str, int], jobs: Workload) -> RowFinding | None:
    """What is wrong where quotas name users of whom there are no jobs: it is mistyped, or another trace is meant."""
    users = set(users_of(jobs)) - {""}
    strangers = sorted(quotas.keys() - users - {ALL_OTHER_USERS})
    if not strangers:
        return None
    names = ", ".join(map(repr, strangers[:_TOLD]))
    there = f"it has jobs of {', '.join(sorted(users)[:_TOLD])}{', ...' if len(users) > _TOLD else ''}"
    if not users:
        there = "its jobs name no user: all of them together are bounded by *=GPUS"
    return RowFinding(RowFindingKind.MISTAKE, f"it has no job of {names}, named by --quotas; {there}", 0)


def within_quotas(jobs: Workload, quotas: Mapping[str, int]) -> tuple[Workload, tuple[RowFinding, ...]]:
    """(jobs whose gang is not larger than their user's quota, findings on those that are left out, and on those of
    nobody)."""
    users, limits = users_of(jobs), as_settings(quotas)
    bounds = [limit_of(limits, user) for user in users]
    limit = np.array([np.inf if bound is None else bound for bound in bounds], float)
    fits = np.asarray(jobs.gpus <= limit)
    tally = RowFindingCounts()
    for bound in np.unique(limit[~fits]).tolist():
        what = f"needs more GPUs than the {bound:,.0f} of its user's quota"
        tally.note(RowFindingKind.SKIPPED, what, jobs.lines[~fits & (limit == bound)])
    nobodys = fits & (np.array(users, object) == "")
    shared = f"all such jobs together have {ALL_OTHER_USERS}={limits['']}" if "" in limits else "no quota bounds it"
    tally.note(RowFindingKind.CHANGED, f"names no user: {shared}", jobs.lines[nobodys])
    return jobs if fits.all() else jobs.take(fits), tally.findings()


_NO_QUOTAS: Final[Mapping[str, int]] = MappingProxyType({})
# What GPUs are called whose type nobody named.
_UNNAMED = "gpu"


def acceptable(
    jobs: Workload, servers: Servers, is_ideal: bool, quotas: Mapping[str, int] = _NO_QUOTAS
) -> tuple[Workload, tuple[RowFinding, ...]]:
    """(jobs the master would take and some day start, findings on those that are changed or left out). Ideal servers
    are devices only, and to them nobody asks for more. `quotas`: as `replay.options.Options` has them."""
    if is_ideal:
        unknown = np.full(len(jobs), np.nan)
        jobs = jobs.with_columns(cpus=unknown, memory_bytes=unknown)
    typed, changed = with_one_type(jobs, servers)
    fitting, too_large = that_fit(typed, servers)
    placed, refused = that_are_taken(fitting, servers, is_ideal)
    bounded, beyond = within_quotas(placed, quotas) if quotas else (placed, ())
    return bounded, (*changed, *too_large, *refused, *beyond)


def with_one_type(jobs: Workload, servers: Servers) -> tuple[Workload, tuple[RowFinding, ...]]:
    """A job asks the master for GPUs of one type: of several that a trace accepts the one of which there are most
    (equally many: the first by name). Where no server's type is named, none can be asked for."""
    gpus = {kind: servers.of_types(kind).gpus for kind in _types(servers)}
    tally = RowFindingCounts()
    names = list(jobs.gpu_type.names)
    for code, accepted in enumerate(jobs.gpu_type.names):
        lines = jobs.lines[jobs.gpu_type.codes == code]
        if accepted and gpus.keys() == {_UNNAMED}:
            names[code] = ""
            tally.note(
                RowFindingKind.CHANGED, "asks for a type of GPU, but the servers' has no name: any serves", lines
            )
        elif "|" in accepted:
            there = sorted({kind.strip() for kind in accepted.split("|")} & gpus.keys())
            if there:
                names[code] = max(there, key=gpus.__getitem__)
                what = "accepts several types of GPU: asks for that of which there are most"
                tally.note(RowFindingKind.CHANGED, what, lines)
    if tuple(names) == jobs.gpu_type.names:
        return jobs, ()
    wishes = Labels.of([names[code] for code in jobs.gpu_type.codes.tolist()])
    return jobs.with_columns(gpu_type=wishes), tally.findings()


def that_are_taken(jobs: Workload, servers: Servers, is_ideal: bool) -> tuple[Workload, tuple[RowFinding, ...]]:
    """Jobs that the master's own checks let pass: nothing wrong in what they ask for, and a place on the idle
    cluster."""
    view = (devices_only(servers) if is_ideal else servers).view()
    positions: dict[int, list[int]] = {}
    kinds: dict[int, JobSpec] = {}
    for job, spec in enumerate(specs_of(jobs, servers, is_ideal)):
        kinds[id(spec)] = spec
        positions.setdefault(id(spec), []).append(job)
    tally = RowFindingCounts()
    taken = np.ones(len(jobs), bool)
    for kind, spec in kinds.items():
        violations = violations_of(spec)
        refusal = None if violations else impossible(view, spec.shape())
        if violations:
            what = "no master takes it: " + "; ".join(f"{path}: {text}" for path, text in violations)
        elif refusal is not None:
            # Without its figures, which differ from job to job.
            what = refusal.detail.partition(";")[0]
        else:
            continue
        tally.note(RowFindingKind.SKIPPED, what, jobs.lines[positions[kind]])
        taken[positions[kind]] = False
    return jobs if taken.all() else jobs.take(taken), tally.findings()


def _types(servers: Servers) -> set[str]:
    made = (group.configuration_set for group in servers.groups)
    return {configuration.device_type for configuration in made if configuration.devices}
