"""What quotas mean for the jobs of a trace: whom they bound, and which gangs could never run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ganger_master.core.shares import limit_of
from ganger_master.quotas import EVERYBODY_ELSE, as_settings
from ganger_master.simulator.job_specs import users_of
from ganger_master.simulator.traces.row_findings import RowFinding, RowFindingCounts, RowFindingKind
from ganger_master.simulator.traces.workload import Workload

# Of all users of a trace, so many are told.
_TOLD = 8


def strangers_among(quotas: Mapping[str, int], jobs: Workload) -> RowFinding | None:
    """What is wrong where quotas name users of whom there are no jobs: it is mistyped, or another trace is meant."""
    users = set(users_of(jobs)) - {""}
    strangers = sorted(quotas.keys() - users - {EVERYBODY_ELSE})
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
    shared = f"all such jobs together have {EVERYBODY_ELSE}={limits['']}" if "" in limits else "no quota bounds it"
    tally.note(RowFindingKind.CHANGED, f"names no user: {shared}", jobs.lines[nobodys])
    return jobs if fits.all() else jobs.take(fits), tally.findings()
