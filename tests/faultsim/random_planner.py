"""A planner gone wild: at random whatever plans can say, of what it sees and of what it makes up.

Nothing it proposes has a purpose. What the master approves of it must keep every rule, what it refuses must change
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from ganger.cluster.claims import resplit_cores, split_cores
from ganger.cluster.fit import demand
from ganger.cluster.placement import candidates, resized
from ganger.cluster.resources import Claim
from ganger.cluster.topology import bits
from ganger_master.core.commands import KeepPlace, Line, ProposePlan
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import (
    CoresChange,
    Goal,
    MoveChange,
    PlanChange,
    Purpose,
    ResizeChange,
    ResumeChange,
    SliceChange,
    StartChange,
    SuspendChange,
    TrialFinding,
    claims_in,
)
from ganger_master.core.state import State
from msgspec.structs import replace

_KINDS: tuple[Callable[..., PlanChange], ...] = (
    StartChange,
    StartChange,
    MoveChange,
    MoveChange,
    SuspendChange,
    ResumeChange,
    ResumeChange,
    CoresChange,
    ResizeChange,
    ResizeChange,
)
_EVER = 1e12


def wild_plan(state: State, dice: Random, turns: float = 0.3) -> ProposePlan:
    """One plan about a few jobs; some of it may be approved. `turns`: the share of plans that are about them; where
    most are, some also move time-sliced jobs."""
    changes = _rows(state, dice, turns > 0.5) if dice.random() < turns else _changes(state, dice)
    changes = [_garbled(state, dice, change) if dice.random() < 0.1 else change for change in changes]
    kept_places = line = None
    if dice.random() < 0.1:
        kept_places = tuple(
            [
                KeepPlace(number, _claims(state, dice, state.jobs[number], {}))
                for number in dice.sample(sorted(state.jobs.live), min(2, len(state.jobs.live)))
            ]
        )
    if dice.random() < 0.1:
        line = Line(tuple(dice.sample(sorted(state.jobs.live), len(state.jobs.live))), state.settings.policy)
    findings = tuple([TrialFinding(change.number, Goal.UNPACK, dice.random() < 0.5, 1.1) for change in changes[:1]])
    return ProposePlan(tuple(changes), line=line, kept_places=kept_places, findings=findings)


def let_go(state: State) -> ProposePlan:
    """The last plans of a planner: every job that it parked resumes, there or on other nodes."""
    changes = []
    for number in state.jobs.live:
        job, gang = state.jobs[number], state.gangs.get(state.jobs[number].epoch)
        if gang is None or not gang.parked_by_plan or job.next_epoch:
            continue
        changes.append(ResumeChange(number, job.revision))
    return ProposePlan(tuple(changes), kept_places=())


def go_elsewhere(state: State) -> ProposePlan:
    """The same for jobs that cannot resume on their nodes."""
    changes = []
    for number in state.jobs.live:
        job, gang = state.jobs[number], state.gangs.get(state.jobs[number].epoch)
        if gang is None or not gang.parked_by_plan or job.next_epoch:
            continue
        found = candidates(state.view, job.shape, waited_s=_EVER).candidates
        if found:
            changes.append(MoveChange(number, job.revision, found[0]))
    return ProposePlan(tuple(changes))


# -- changes one by one ------------------------------------------------------------------------------------------------


def _changes(state: State, dice: Random) -> list[PlanChange]:
    numbers = dice.sample(sorted(state.jobs.live), min(dice.randint(1, 4), len(state.jobs.live)))
    together = dice.choice([0, 0, 1])
    return [replace(_change(state, dice, state.jobs[number]), together=together) for number in numbers]


def _change(state: State, dice: Random, job: JobRecord) -> PlanChange:
    gang = state.gangs.get(job.epoch)
    kind = dice.choice(_KINDS)
    if dice.random() < 0.8:
        # What has a chance.
        kind = StartChange if gang is None else ResumeChange if gang.parked_by_plan and dice.random() < 0.5 else kind
    claims: tuple[Claim, ...] = ()
    if kind in (StartChange, MoveChange):
        claims = _claims(state, dice, job, {})
    elif gang is not None and kind is ResizeChange:
        claims = _other_size(state, dice, job, gang)
    elif gang is not None and kind is CoresChange:
        claims = tuple([_other_cores(state, dice, claim) for claim in gang.claims])
    level = dice.choice(list(SuspendLevel)) if kind is SuspendChange else SuspendLevel.NONE
    details = () if kind is ResumeChange else (level,) if kind is SuspendChange else (claims,)
    purpose = Purpose(dice.choice(list(Goal)), dice.choice(sorted(state.jobs.live)), 10.0, 1.0)
    return kind(job.number, job.revision, *details, reason="why not", purpose=purpose)


def _claims(state: State, dice: Random, job: JobRecord, company: Mapping[str, int]) -> tuple[Claim, ...]:
    """Free devices, or those of others: of nodes in `company` these, else whichever."""
    gpus = job.gpus
    if job.spec.is_elastic and dice.random() < 0.5:
        gpus = dice.randint(job.spec.gpus_min, job.spec.gpus_max)
    shape = job.spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus if job.spec.is_elastic else 0)
    if dice.random() < 0.4 and not company:
        found = candidates(state.view, shape, waited_s=_EVER).candidates
        if found:
            return dice.choice(found)
    nodes = [name for name in state.view.names() if not company or name in company]
    dice.shuffle(nodes)
    claims, missing = [], gpus
    for name in nodes:
        topology = state.view.topology(name)
        there = sorted(bits(company.get(name, topology.all_mask)))
        chosen = dice.sample(there, min(missing, len(there)))
        if chosen:
            claims.append(_on(state, job, name, sum([1 << device for device in chosen]), not company))
            missing -= len(chosen)
    return tuple(claims)


def _on(state: State, job: JobRecord, node: str, mask: int, shares: bool) -> Claim:
    slot = state.view.slots[node]
    topology = state.view.topologies[slot]
    tasks = (mask.bit_count() // job.spec.roles[0].shape.gpus,)
    needed = demand(topology.configuration_set, job.shape, tasks)
    free = state.view.millicores[slot]
    cores = split_cores(topology, free, mask, needed.millicores) or resplit_cores((0,) * len(free), free, 1_000)
    shared = mask & ~state.view.free[slot] if shares else 0
    return Claim(node, mask, cores, needed.memory_bytes, needed.arena_bytes, tasks, shared_mask=shared)


def _other_size(state: State, dice: Random, job: JobRecord, gang: Gang) -> tuple[Claim, ...]:
    gpus = dice.randint(max(1, job.spec.gpus_min), max(2, job.spec.gpus_max))
    shape = replace(job.shape, roles=(replace(job.spec.roles[0], tasks=gpus),))
    return resized(state.view, shape, gang.claims) or _claims(state, dice, job, {})


def _other_cores(state: State, dice: Random, claim: Claim) -> Claim:
    slot = state.view.slots.get(claim.node)
    if slot is None:
        return claim
    wanted = max(1_000, sum(claim.millicores) + 1_000 * dice.randint(-2, 2))
    return replace(claim, millicores=resplit_cores(claim.millicores, state.view.millicores[slot], wanted))


# -- matrices ----------------------------------------------------------------------------------------------------------


def _rows(state: State, dice: Random, moves: bool) -> Sequence[PlanChange]:
    """A matrix of a set that there is, or of a new one: its gangs, some of them on others' devices, some that
    join, a pending job."""
    of = dice.choice(sorted(state.gangs.sets)) if state.gangs.sets and dice.random() < 0.7 else 0
    inside = [epoch for epoch, number in state.gangs.set_of.items() if number == of and epoch in state.gangs]
    outside = [number for number in sorted(state.jobs.live) if state.jobs[number].epoch not in state.gangs.set_of]
    joining = dice.sample(outside, min(dice.randint(0 if of else 1, 3), len(outside)))
    jobs = [state.jobs[number] for number in dict.fromkeys([*[state.gangs[e].job for e in inside], *joining])]
    company: dict[str, int] = {}
    for job in jobs:
        for claim in state.gangs[job.epoch].claims if job.epoch in state.gangs else ():
            company[claim.node] = company.get(claim.node, 0) | claim.device_mask
    places_of = {job.number: _place_in(state, dice, job, company) for job in jobs}
    there = [(job, state.gangs[job.epoch]) for job in jobs if job.epoch in state.gangs]
    pairs = [
        (job, other)
        for job, gang in there
        for _, other in there
        if job.gpus == other.devices and not _collide(gang.claims, other.claims)
    ]
    if moves and pairs and dice.random() < 0.6:
        guest, host = dice.choice(pairs)
        places_of[guest.number] = _beside(guest, host)
    rows = _apart([job.number for job in jobs], places_of, dice)
    quantum, level = dice.uniform(0.1, 10.0), dice.choice([SuspendLevel.OFFLOAD, SuspendLevel.PAUSE])
    changes = []
    for job in jobs:
        own = [index for index, row in enumerate(rows) if job.number in row]
        gang = state.gangs.get(job.epoch)
        claims = () if gang is not None and places_of[job.number] == gang.claims else places_of[job.number]
        changes.append(
            SliceChange(
                job.number, job.revision, claims, level, together=1, node_set=of, rows=tuple(own),
                quantum_s=quantum, reason="all in turn")
        )  # fmt: skip
    return changes


def _place_in(state: State, dice: Random, job: JobRecord, company: Mapping[str, int]) -> tuple[Claim, ...]:
    gang = state.gangs.get(job.epoch)
    return gang.claims if gang is not None else _claims(state, dice, job, company)


def _beside(job: JobRecord, host: Gang) -> tuple[Claim, ...]:
    """All that another one has, with room for its own state."""
    arena = job.arena_bytes_per_device
    return tuple([replace(c, arena_bytes=c.device_mask.bit_count() * arena, shared_mask=0) for c in host.claims])


def _apart(numbers: Iterable[int], places_of: Mapping[int, Sequence[Claim]], dice: Random) -> list[list[int]]:
    """Rows whose members have no device in common; some are in several."""
    rows: list[list[int]] = []
    for number in numbers:
        fits = [row for row in rows if not any(_collide(places_of[number], places_of[other]) for other in row)]
        if fits and dice.random() < 0.8:
            dice.choice(fits).append(number)
        else:
            rows.append([number])
        if dice.random() < 0.2:
            rows.append([number])
    return rows


def _collide(one: Sequence[Claim], other: Sequence[Claim]) -> bool:
    return any(a.node == b.node and a.device_mask & b.device_mask for a in one for b in other)


# -- nonsense ----------------------------------------------------------------------------------------------------------


def _garbled(state: State, dice: Random, change: PlanChange) -> PlanChange:
    """What cannot be, or is only a little wrong."""
    what = dice.randrange(8)
    if what == 0:
        return replace(change, revision=change.revision + dice.choice([-1, 1]))
    if what == 1:
        return replace(change, number=dice.randint(0, state.counters.next_job))
    if what == 2:
        rows = change.rows if isinstance(change, SliceChange) else ()
        rows, of = (*rows, dice.randint(-1, 70)), dice.randint(0, 3)
        return SliceChange(change.number, change.revision, claims_in(change), node_set=of, rows=rows)
    if isinstance(change, SuspendChange | ResumeChange) or not change.claims:
        level, quantum = dice.choice(list(SuspendLevel)), dice.choice([-1.0, 0.0])
        if isinstance(change, SliceChange):
            return replace(change, level=level, quantum_s=quantum)
        return replace(change, level=level) if isinstance(change, SuspendChange) else change
    place = dice.randrange(len(change.claims))
    claim = change.claims[place]
    wrong = {
        3: lambda: replace(claim, node="nowhere"),
        4: lambda: replace(claim, device_mask=claim.device_mask ^ (1 << dice.randrange(6))),
        5: lambda: replace(claim, millicores=claim.millicores[: dice.randrange(3)]),
        6: lambda: replace(claim, shared_mask=claim.shared_mask ^ (1 << dice.randrange(6))),
        7: lambda: replace(claim, tasks=(*claim.tasks, 1), arena_bytes=claim.arena_bytes // 2),
    }[what]()
    return replace(change, claims=(*change.claims[:place], wrong, *change.claims[place + 1 :]))
