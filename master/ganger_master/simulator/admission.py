"""Which jobs of a trace the master of this cluster would take, as which it would take them, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from ganger.cluster.impossible import impossible

from ganger_master.core.model import JobSpec
from ganger_master.core.submission import violations_of
from ganger_master.simulator.bounded import within_quotas
from ganger_master.simulator.job_specs import devices_only, specs_of
from ganger_master.simulator.traces.row_findings import RowFinding, RowFindingCounts, RowFindingKind
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.transform import that_fit
from ganger_master.simulator.traces.workload import Labels, Workload

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
