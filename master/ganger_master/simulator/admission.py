"""Admission of trace jobs: their specs as a user would submit them, the jobs that a master of this cluster would
accept, and findings on the others; and their default job schedulers, which propose as soon as they get a lease.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from ganger.cluster.placement import impossible
from ganger.cluster.resources import Locality, LocalityLevel, Role, Socket, TaskShape
from ganger.scheduling import DefaultScheduler, PlacementLease, Proposal
from msgspec import structs

from ganger_master.core import answers
from ganger_master.core.accounting import ANY_USER, Owner, by_user, limits_of
from ganger_master.core.commands import Command, RequestGang
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.placement_leases import ASIDE
from ganger_master.core.queue import GrantedLease as Lease
from ganger_master.core.state import State
from ganger_master.core.submission import violations_of
from ganger_master.core.tenancy import ALL_OTHER_USERS, NO_PARTITIONS, PartitionIndex, Team, TeamIndex
from ganger_master.simulator.traces.rows import RowFinding, RowFindingCounts, RowFindingKind
from ganger_master.simulator.traces.servers import ServerGroup, Servers
from ganger_master.simulator.traces.workload import Labels, Workload

_NOTHING = (Socket(0, 0),)
_TOGETHER = Locality(LocalityLevel.NODE)
_ANYWHERE = Locality(LocalityLevel.CLUSTER)
_COMMAND = ("train",)
# Per server: the number of bits of a device mask.
_MOST_DEVICES = 64


def specs_of(
    jobs: Workload, servers: Servers, ideal: bool, epoch_s: float = 0.0, partitioned: bool = False
) -> Sequence[JobSpec]:
    """Return one spec per job; equal jobs share one object.

    A gang that fits into one server of its GPU type has to run in one. Missing cores and memory are left to the master,
    which gives shares in proportion to the devices. `ideal`: request devices only, anywhere. `epoch_s`: start of the
    trace's clock. `partitioned`: the cluster has partitions, so that those of the jobs count.
    """
    largest = _largest_by_type(servers)
    made: dict[tuple[Any, ...], JobSpec] = {}
    nothing = [math.nan] * len(jobs)
    # Lists: reading single elements of NumPy arrays takes seconds for a hundred thousand jobs.
    columns = zip(
        jobs.gpus.tolist(),
        jobs.min_gpus.tolist(),
        jobs.max_gpus.tolist(),
        nothing if ideal else jobs.cpus.tolist(),
        nothing if ideal else jobs.memory_bytes.tolist(),
        nothing if ideal else jobs.disk_mb_per_s.tolist(),
        nothing if ideal else jobs.net_mb_per_s.tolist(),
        jobs.priority.tolist(),
        [""] * len(jobs) if ideal else jobs.gpu_type.texts(),
        jobs.model.texts(),
        np.where(np.isnan(jobs.deadline_s), 0.0, jobs.deadline_s + epoch_s).tolist(),
        jobs.weight.tolist(),
        jobs.partition.texts() if partitioned else [""] * len(jobs),
        (~np.isnan(jobs.epoch_s)).tolist(),
        strict=True,
    )
    specs = []
    for gpus, least, most, cpus, memory, disk, net, *rest in columns:
        priority, device_type, model, deadline, weight, inside, at_epochs = rest
        millicores = 0 if math.isnan(cpus) else int(1000 * cpus) // gpus
        each = 0 if math.isnan(memory) else int(memory) // gpus
        bandwidth = tuple([0 if math.isnan(amount) else math.ceil(amount / gpus) for amount in (disk, net)])
        task = TaskShape(1, millicores, each, bandwidth if any(bandwidth) else ())
        sizes = (least, most) if least < most else (0, 0)
        key = (gpus, *sizes, task, *rest)
        spec = made.get(key)
        if spec is None:
            spec = made[key] = JobSpec(
                _COMMAND,
                (Role("worker", gpus, task),),
                locality=_TOGETHER if max(gpus, sizes[1]) <= largest[device_type] and not ideal else _ANYWHERE,
                priority=priority,
                gpus_min=sizes[0],
                gpus_max=sizes[1],
                device_type=device_type,
                display_name=model,
                deadline=deadline,
                weight=weight,
                partition=inside,
                is_scheduled_at_epochs=at_epochs,
            )
        specs.append(spec)
    return specs


def users_of(jobs: Workload) -> list[str]:
    """Return the user of each job, or else its tenant; empty if the trace names neither."""
    return [user or tenant for user, tenant in zip(jobs.user.texts(), jobs.tenant.texts(), strict=True)]


def _largest_by_type(servers: Servers) -> Mapping[str, int]:
    """Return the GPUs of the largest server by type; "": of any type. A type that no server has maps to 0."""
    largest: defaultdict[str, int] = defaultdict(int)
    for group in servers.groups:
        made = group.configuration_set
        for device_type in ("", made.device_type):
            largest[device_type] = max(largest[device_type], made.devices)
    return largest


def devices_only(servers: Servers) -> Servers:
    """Return few large servers with the same number of devices of each type and no other resource.

    For placements that accept any free devices, the boundaries of servers make no difference.
    """
    groups = []
    for group in servers.groups:
        made = structs.replace(group.configuration_set, sockets=_NOTHING, groups=(), memory_bytes=0)
        full, rest = divmod(group.nodes * made.devices, _MOST_DEVICES)
        if full:
            name = f"{made.name}-{_MOST_DEVICES}"
            groups.append(ServerGroup(structs.replace(made, name=name, devices=_MOST_DEVICES), full))
        if rest:
            groups.append(ServerGroup(structs.replace(made, devices=rest), 1))
    return Servers(tuple(groups))


_NO_QUOTAS: Final[Mapping[str, int]] = MappingProxyType({})
_NO_TEAMS: Final[Mapping[str, Team]] = MappingProxyType({})
# Maximum number of users named in an error.
_SHOWN_USERS = 8


def strangers_among(
    quotas: Mapping[str, int], jobs: Workload, teams: Mapping[str, Team] = _NO_TEAMS
) -> RowFinding | None:
    """Return a mistake if quotas name users without jobs, or teams only such users: a name is mistyped, or another
    trace is meant."""
    users = set(users_of(jobs)) - {""}
    strangers = sorted(quotas.keys() - users - {ALL_OTHER_USERS})
    there = f"it has jobs of {', '.join(sorted(users)[:_SHOWN_USERS])}{', ...' if len(users) > _SHOWN_USERS else ''}"
    if strangers:
        names = ", ".join(map(repr, strangers[:_SHOWN_USERS]))
        if not users:
            there = "its jobs name no user: all of them together are bounded by *=GPUS"
        return RowFinding(RowFindingKind.MISTAKE, f"it has no job of {names}, named by --quotas; {there}", 0)
    idle = [name for name, team in teams.items() if not users.intersection(team.users) and "*" not in team.users]
    if not idle:
        return None
    names = ", ".join(map(repr, idle[:_SHOWN_USERS]))
    return RowFinding(RowFindingKind.MISTAKE, f"it has no job of the teams {names}, named by --teams; {there}", 0)


def within_quotas(
    jobs: Workload, quotas: Mapping[str, int], teams: Mapping[str, Team] = _NO_TEAMS
) -> tuple[Workload, tuple[RowFinding, ...]]:
    """Return the jobs whose gang fits the quotas of their user and team, and findings on skipped jobs and jobs without
    a user."""
    users, limits, index = users_of(jobs), limits_of(by_user(quotas), teams), TeamIndex(teams)
    tally, kept = RowFindingCounts(), np.ones(len(jobs), bool)
    # Of each job its user's limit, then its team's.
    for place, whose in enumerate(("user's", "team's")):
        owners = [limits.owners(user, index.of(user))[place : place + 1] for user in users]
        bounds = [limits.of(one[0]) if one else None for one in owners]
        limit = np.array([np.inf if bound is None else bound for bound in bounds], float)
        skipped = kept & ~np.asarray(jobs.gpus <= limit)
        for bound in np.unique(limit[skipped]).tolist():
            what = f"needs more GPUs than the {bound:,.0f} of its {whose} quota"
            tally.note(RowFindingKind.SKIPPED, what, jobs.lines[skipped & (limit == bound)])
        kept &= ~skipped
    without_user = kept & (np.array(users, object) == "")
    any_user = limits.of(Owner(ANY_USER))
    shared = "no quota bounds it" if any_user is None else f"all such jobs together have {ALL_OTHER_USERS}={any_user}"
    tally.note(RowFindingKind.CHANGED, f"names no user: {shared}", jobs.lines[without_user])
    return jobs if kept.all() else jobs.take(kept), tally.findings()


# Type of GPUs for which the cluster names none.
_UNNAMED = "gpu"


def acceptable(
    jobs: Workload,
    servers: Servers,
    is_ideal: bool,
    quotas: Mapping[str, int] = _NO_QUOTAS,
    teams: Mapping[str, Team] = _NO_TEAMS,
    partitions: PartitionIndex = NO_PARTITIONS,
) -> tuple[Workload, tuple[RowFinding, ...]]:
    """Return the jobs that the master would accept and can start, and findings on changed and skipped jobs.

    `is_ideal`: servers have devices only, and jobs request nothing else. `quotas`, `teams`: as in `ReplayOptions`.
    """
    if is_ideal:
        unknown = np.full(len(jobs), np.nan)
        jobs = jobs.with_columns(cpus=unknown, memory_bytes=unknown, disk_mb_per_s=unknown, net_mb_per_s=unknown)
    typed, changed = with_one_type(jobs, servers)
    fitting, too_large = that_fit(typed, servers)
    admitted, outside = in_partitions(fitting, partitions, TeamIndex(teams)) if partitions else (fitting, ())
    placed, refused = that_are_taken(admitted, servers, is_ideal, partitions)
    bounded, beyond = within_quotas(placed, quotas, teams) if quotas or teams else (placed, ())
    return bounded, (*changed, *too_large, *outside, *refused, *beyond)


def in_partitions(
    jobs: Workload, partitions: PartitionIndex, teams: TeamIndex
) -> tuple[Workload, tuple[RowFinding, ...]]:
    """Return the jobs that may be in their partition, and findings on skipped ones. A job that the trace gives no
    partition is in the default."""
    tally, kept = RowFindingCounts(), np.ones(len(jobs), bool)
    columns = zip(jobs.partition.texts(), users_of(jobs), jobs.gpus.tolist(), strict=True)
    why: dict[str, list[int]] = {}
    for job, (named, user, gpus) in enumerate(columns):
        refusal = partitions.refusal(named or partitions.default, user, teams.of(user), gpus, None)
        if refusal is not None:
            kept[job] = False
            # Without numbers of GPUs, which differ from job to job.
            why.setdefault(f"{named or partitions.default}: {refusal.reason.meaning}", []).append(job)
    for what, positions in why.items():
        tally.note(RowFindingKind.SKIPPED, f"may not be in partition {what}", jobs.lines[positions])
    return jobs if kept.all() else jobs.take(kept), tally.findings()


def that_fit(jobs: Workload, servers: Servers) -> tuple[Workload, tuple[RowFinding, ...]]:
    """Return (jobs whose gang the idle cluster could hold, findings on those that are left out).

    A gang must fit into the GPUs of the types it accepts; cores and memory, where the trace states them, into what
    those servers have together. Whether it fits with all its wishes of locality is decided when it is placed.
    """
    tally = RowFindingCounts()
    fits = np.ones(len(jobs), bool)
    for code, accepted in enumerate(jobs.gpu_type.names):
        of_type = jobs.gpu_type.codes == code
        room = servers.of_types(accepted)
        if not room.gpus:
            tally.note(
                RowFindingKind.SKIPPED, f"needs GPUs of type {accepted}, of which there are none", jobs.lines[of_type]
            )
            fits &= ~of_type
            continue
        for what, needed, there in (
            ("GPUs", jobs.gpus, room.gpus),
            ("cores", jobs.cpus, room.millicores / 1000),
            ("bytes of memory", jobs.memory_bytes, room.memory_bytes),
        ):
            # NaN is no request: the trace does not state it.
            too_large = of_type & fits & (needed > there)
            kind = f" of type {accepted}" if accepted else ""
            tally.note(
                RowFindingKind.SKIPPED,
                f"needs more {what} than the {there:,.0f} of the cluster's servers{kind}",
                jobs.lines[too_large],
            )
            fits &= ~too_large
    return jobs if fits.all() else jobs.take(fits), tally.findings()


def with_one_type(jobs: Workload, servers: Servers) -> tuple[Workload, tuple[RowFinding, ...]]:
    """Reduce each job to one GPU type: of the types it accepts, the most frequent one (ties: first by name).

    On servers without type names the type is dropped.
    """
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


def that_are_taken(
    jobs: Workload, servers: Servers, is_ideal: bool, partitions: PartitionIndex = NO_PARTITIONS
) -> tuple[Workload, tuple[RowFinding, ...]]:
    """Return the jobs that pass the master's checks: a valid spec, and a place on the idle cluster."""
    view = (devices_only(servers) if is_ideal else servers).view(partitions=partitions)
    positions: dict[int, list[int]] = {}
    kinds: dict[int, JobSpec] = {}
    for job, spec in enumerate(specs_of(jobs, servers, is_ideal, partitioned=bool(partitions))):
        kinds[id(spec)] = spec
        positions.setdefault(id(spec), []).append(job)
    tally = RowFindingCounts()
    taken = np.ones(len(jobs), bool)
    for kind, spec in kinds.items():
        violations = violations_of(spec)
        inside = partitions.terms_of(spec.partition).name
        refusal = None if violations else impossible(view, spec.shape(partition=inside))
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


class ModelledSchedulers:
    """Runs one `DefaultScheduler` per pending job. `send` passes a command to the core and returns its answer."""

    def __init__(self, state: State, send: Callable[[Command], object]) -> None:
        self._state = state
        self._send = send
        # By job number; a scheduler keeps its delay-scheduling state while its job is pending.
        self._schedulers: dict[int, DefaultScheduler] = {}
        # `view.freed` at the last release of resources; batches of jobs over quota since, and when the last one began.
        self._freed = self._looks = 0
        self._looked_at = 0.0

    def take(self, turns: Iterable[int], now: float) -> None:
        for number in turns:
            lease = self._state.leases.get(number)
            if lease is not None:
                self._ask(lease, now)

    def wake_at(self, wake: float | None) -> float | None:
        """Return when the core next needs a tick, given its own wish `wake`.

        The core offers leases to jobs over quota in batches, one per second. Once every such job was offered one,
        further batches are futile until resources are released, so no tick is needed.
        """
        state = self._state
        if len(state.queue.aside) <= ASIDE:
            return wake
        if state.view.freed != self._freed:
            self._freed, self._looked_at, self._looks = state.view.freed, state.queue.aside_at, 0
            return state.wake_at
        if state.queue.aside_at != self._looked_at:
            self._looked_at = state.queue.aside_at
            self._looks += 1
        is_vain = not state.leases and self._looks > len(state.queue.aside) // ASIDE + 1
        return None if is_vain else wake

    def _ask(self, lease: Lease, now: float) -> None:
        state, number = self._state, lease.number
        job = state.jobs[number]
        scheduler = self._schedulers.get(number)
        if scheduler is None:
            scheduler = self._schedulers[number] = DefaultScheduler()
        turn = PlacementLease(
            turn=lease.turn,
            job=job.name,
            revision=lease.revision,
            shape=job.shape,
            lease_s=lease.expires - now,
            rank=lease.rank,
            waited_s=now - job.pending_since,
            kept_nodes=lease.kept_nodes,
            suggested=lease.suggested,
        )
        proposal: Proposal | None = scheduler.propose(turn, state.view)
        while proposal is not None:
            version = state.view.version
            request = RequestGang(
                number,
                lease.revision,
                proposal.candidates,
                lease.turn,
                blockers=proposal.blockers,
                view_version=version,
            )
            answer = self._send(request)
            if isinstance(answer, answers.Approved):
                del self._schedulers[number]
                return
            assert isinstance(answer, answers.Rejected)
            if not answer.turn_kept:
                return
            proposal = scheduler.on_rejected(turn, state.view, answer.refusals)
