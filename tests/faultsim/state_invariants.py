"""What must hold after every event, as far as one state can show it. A violation is our bug, never a user's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ganger.cluster.fit import MEMORY_SHARE
from ganger.cluster.resources import Bandwidth, Claim, exceeds, more_bandwidth, tasks_of
from ganger.cluster.topology import bits
from ganger.job_state import JobState
from ganger.node_test import TEST_USER
from ganger.protocol.stop_rules import EPOCH_BIT
from ganger_master.core.colocation import holders_on
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole
from ganger_master.core.job_model import JobRecord, SuspendLevel, members_of
from ganger_master.core.job_spec import Dependency
from ganger_master.core.kept_places import find_blocked
from ganger_master.core.queue import is_lack
from ganger_master.core.state import State
from ganger_master.core.state_indexes import row_of
from ganger_master.core.timeslice_groups import is_free_of_turns, members
from ganger_master.core.usage import running_microgpus
from msgspec.structs import replace


def violations(state: State) -> list[str]:
    """One sentence per broken rule; empty when all hold."""
    found = (_pieces, _gangs, _sets, _jobs, _derived, _use, _partitions)
    return [text for of in found for text in of(state)]


def _partitions(state: State) -> Iterator[str]:
    """No gang is outside its partition, and no partition holds more than its limit. Gangs of before a restart may be
    where former settings allowed it."""
    held: Counter[str] = Counter()
    for gang in state.gangs.values() if state.partitions else ():
        job = state.jobs.get(gang.job)
        if gang.create_time < state.started or (job is not None and job.user == TEST_USER):
            continue
        name = "" if job is None else job.partition.name
        if job is None or name not in state.partitions:
            yield f"jobs/{gang.job} has a gang, and is in no partition"
            continue
        for claim in gang.claims:
            if claim.node in state.view and name not in state.view.topology(claim.node).partitions:
                yield f"{job.name} of partition {name} is on {claim.node}, which is not in it"
        if gang.epoch == job.epoch and not job.state.is_finished:
            held[name] += job.gpus
    for name, gpus in held.items():
        limit = state.partitions[name].gpus
        if limit is not None and gpus > limit:
            yield f"the jobs of partition {name} hold {gpus} GPUs, more than its {limit}"


def _use(state: State) -> Iterator[str]:
    """The use of each user grows by what its running jobs use, and by nothing else."""
    running: Counter[str] = Counter()
    for job in state.jobs.values():
        running[job.user] += running_microgpus(state, job)
    for user in sorted({*running, *state.usage}) if state.counts_use else ():
        usage = state.usage.get(user)
        counted = 0.0 if usage is None else usage.gpus
        if counted != running[user] / 1e6:
            yield f"user {user!r} uses {running[user] / 1e6:g} GPUs, and {counted:g} are counted"


def _pieces(state: State) -> Iterator[str]:
    """No device twice but where it is shared, nothing over-committed, rows as the pieces say."""
    rows = state.rows
    for name in sorted(state.nodes):
        node = state.nodes[name]
        configuration_set = state.nodes.configuration_sets[node.configuration_set]
        held = state.gangs.held_on(name)
        yield from _devices(state, name, _with_turns_as_one(state, name), configuration_set.device_memory_bytes)
        for index, socket in enumerate(configuration_set.sockets):
            cores = sum(claim.millicores[index] for claim in held if index < len(claim.millicores))
            if cores > socket.millicores:
                yield f"{name}: {cores} of {socket.millicores} millicores are held at socket {index}"
        memory = sum(claim.memory_bytes + claim.arena_bytes for claim in held)
        if memory > configuration_set.free_memory_bytes:
            yield f"{name}: {memory} of {configuration_set.memory_bytes} bytes are held"
        bandwidth: Bandwidth = ()
        for claim in held:
            bandwidth = more_bandwidth(bandwidth, claim.bandwidth)
        if exceeds(bandwidth, configuration_set.bandwidth):
            yield f"{name}: {bandwidth} of {configuration_set.bandwidth} MB/s are held"
        yield from _device_memory(state, name, configuration_set.device_memory_bytes)
        if rows.get(name) != row_of(node, state.view.topology(name), held, state.gangs.affinity_of(name)):
            yield f"{name}: its row in the view is not what its gangs hold"


def _with_turns_as_one(state: State, name: str) -> list[Claim]:
    """Check the holdings of a node; time-sliced gangs hold their devices together."""
    found: list[Claim] = []
    together = 0
    for epoch, place in state.gangs.places_on.get(name, {}).items():
        held = state.gangs[epoch].pieces[place].held
        if held is None:
            continue
        if state.gangs[epoch].node_set:
            together |= held.device_mask
        else:
            found.append(held)
    return [*found, Claim(name, together, (), 0)] if together else found


def _devices(state: State, name: str, held: list[Claim], whole: int) -> Iterator[str]:
    """A device is held by one gang, or by several that all share it and fit into its memory together."""
    used = shared = 0
    for claim in held:
        shared |= claim.device_mask & used
        used |= claim.device_mask
    alone = sum([shared & claim.device_mask & ~claim.shared_mask for claim in held])
    if alone:
        yield f"{name}: devices {shared:#x} are held twice, and not all holders share them"
    for device in bits(shared):
        holders = [number for number, claim in holders_on(state, name) if claim.device_mask >> device & 1]
        there = [state.jobs[number] for number in holders]
        needed = sum([job.spec.gpu_memory_bytes for job in there])
        if needed > MEMORY_SHARE * whole:
            yield f"{name}: device {device} has {whole} bytes, the gangs that share it need {needed}"
        if not all(job.preemptible for job in there):
            yield f"{name}: device {device} is shared by a job that is not to be suspended"


def _device_memory(state: State, name: str, whole: int) -> Iterator[str]:
    """Check that the memory of a device suffices for its holders beside what parked gangs keep."""
    parked = [claim.parked_bytes for claim in state.gangs.held_on(name) if claim.parked_bytes]
    if not parked or not whole:
        return
    kept = [sum(sizes) for sizes in zip(*parked, strict=True)]
    for number, claim in holders_on(state, name):
        needed = state.jobs[number].spec.gpu_memory_bytes
        for device, size in enumerate(kept):
            if claim.device_mask >> device & 1 and needed and needed + size > whole:
                yield f"{name}: device {device} has {whole} bytes, {size} are kept and jobs/{number} needs {needed}"


def _gangs(state: State) -> Iterator[str]:
    for epoch in sorted(state.gangs):
        gang = state.gangs[epoch]
        job = state.jobs.get(gang.job)
        if job is None:
            yield f"epoch {epoch} belongs to no job"
            continue
        yield from _size_and_role(state, gang, job)
        yield from _orders(state, gang, job)
        named = state.gangs.set_of.get(epoch, 0)
        if gang.node_set != (named if named and epoch in members(state, state.gangs.sets[named]) else 0):
            yield f"epoch {epoch} is time-sliced in nodeSets/{gang.node_set}, which is not where it is named"
    for number in sorted(state.gangs.epochs_of):
        running = [gang.epoch for gang in state.gangs.of_job(number) if gang.intent is GangIntent.RUN]
        if len(running) > 1:
            yield f"jobs/{number} is to run as epochs {running} at once"


def _size_and_role(state: State, gang: Gang, job: JobRecord) -> Iterator[str]:
    epoch = gang.epoch
    if epoch >= state.counters.next_epoch:
        yield f"epoch {epoch} was never given"
    if not gang.pieces or len(set(gang.nodes)) != len(gang.nodes):
        yield f"epoch {epoch} has no pieces, or two on one node"
    if gang.role is GangRole.ACTIVE and job.epoch != epoch:
        yield f"epoch {epoch} is active, but {job.name} is at epoch {job.epoch}"
    is_of_its_size = gang.role is GangRole.ACTIVE or (gang.role is GangRole.DESTINATION and not gang.resizes)
    if is_of_its_size and gang.devices != job.gpus:
        yield f"epoch {epoch} has {gang.devices} devices, but {job.name} has {job.gpus}"
    ranges = [(role.tasks_min or role.tasks, role.tasks_max or role.tasks) for role in job.spec.roles]
    if job.spec.has_role_ranges:
        tasks = tasks_of(gang.claims)
        if not all(least <= number <= most for number, (least, most) in zip(tasks, ranges, strict=True)):
            yield f"epoch {epoch} has tasks {tasks}, which {job.name} does not accept"
    elif not job.spec.accepts(gang.devices):
        yield f"epoch {epoch} has {gang.devices} devices, which {job.name} does not accept"
    if gang.role is GangRole.DESTINATION and job.next_epoch != epoch:
        yield f"epoch {epoch} is a destination of no move"


def _orders(state: State, gang: Gang, job: JobRecord) -> Iterator[str]:
    epoch = gang.epoch
    if gang.intent is GangIntent.RUN:
        if gang.role is not GangRole.ACTIVE or gang.stop_sequence:
            yield f"epoch {epoch} is to run, but is {gang.role} with stop {gang.stop_sequence}"
        if epoch <= job.moved_from:
            yield f"epoch {epoch} is to run, though {job.name} has moved on from epoch {job.moved_from}"
        if not _holds_its_place(state, gang):
            yield f"epoch {epoch} is to run without holding its placement"
    if gang.intent in (GangIntent.PARK, GangIntent.HAND_OVER) and not gang.stop_sequence:
        yield f"epoch {epoch} is to stop, but its stop has no number"
    if gang.stop_sequence & ~EPOCH_BIT > gang.master_sequence:
        yield f"epoch {epoch} stops at a later order than its newest"
    if (gang.intent is GangIntent.STOP) != (gang.role is GangRole.LEAVING):
        yield f"epoch {epoch} is {gang.role} with intent {gang.intent}"


def _holds_its_place(state: State, gang: Gang) -> bool:
    """Return whether a gang holds its claim; time-sliced gangs hold their cores together."""
    turns = gang.node_set != 0
    return all(
        piece.gone
        or piece.held == piece.claim
        or (turns and piece.held is not None and replace(piece.held, millicores=piece.claim.millicores) == piece.claim)
        for piece in gang.pieces
    )


def _sets(state: State) -> Iterator[str]:
    """Check node sets: disjoint, one gang per slice and device, needs held, every sharing gang in a slice."""
    seen: dict[str, int] = {}
    for number, node_set in sorted(state.gangs.sets.items()):
        for node in node_set.nodes:
            if node in seen:
                yield f"{node} is in nodeSets/{seen[node]} and nodeSets/{number}"
            seen[node] = number
        if node_set.leader not in node_set.nodes:
            yield f"nodeSets/{number} is led from outside"
        live = members(state, node_set)
        for matrix in (node_set.active, node_set.coming):
            for index, row in enumerate(matrix.rows if matrix is not None else ()):
                gangs = [state.gangs[epoch] for epoch in row if epoch in live]
                if not is_free_of_turns([gang.claims for gang in gangs]):
                    yield f"nodeSets/{number}: two gangs of row {index} have a device in common"
                yield from _row_of_set(state, number, index, gangs, live)
        if set(live) - node_set.newest.epochs:
            yield f"nodeSets/{number}: {sorted(set(live) - node_set.newest.epochs)} take turns in no row"
        for epoch in live:
            if any(node not in node_set.nodes for node in state.gangs[epoch].nodes):
                yield f"nodeSets/{number}: epoch {epoch} is on nodes outside"
    if seen != state.gangs.set_on:
        yield f"{state.gangs.set_on} are not the nodes of sets, {seen}"


def _row_of_set(state: State, number: int, index: int, gangs: list[Gang], live: list[int]) -> Iterator[str]:
    """Parts that have gone need nothing."""
    for node in {node for gang in gangs for node in gang.nodes}:
        needs = [
            piece.claim.millicores
            for gang in gangs
            for piece in gang.pieces
            if piece.claim.node == node and piece.held is not None and piece.held.device_mask
        ]
        held = [
            piece.held.millicores
            for epoch in live
            for piece in state.gangs[epoch].pieces
            if piece.claim.node == node and piece.held is not None and piece.held.device_mask
        ]
        if not needs:
            continue
        wanted = [sum(cores) for cores in zip(*needs, strict=True)]
        there = [sum(cores) for cores in zip(*held, strict=True)]
        if any(want > have for want, have in zip(wanted, there, strict=True)):
            yield f"nodeSets/{number}: row {index} needs {wanted} millicores of {node}, {there} are held"


def _jobs(state: State) -> Iterator[str]:
    for number in sorted(state.jobs):
        yield from _job(state, state.jobs[number])
    numbers = set(state.queue.waiting)
    if numbers != {n for n, job in state.jobs.items() if job.is_waiting}:
        yield "the queue is not what waits"
    aside = {number for number in numbers if number in state.queue.aside}
    if list(state.queue.front) != [number for number in state.queue.waiting if number not in aside]:
        yield "the front of the queue is not the jobs that wait for other jobs, in order"
    if set(state.queue.resuming) != {number for number in numbers if state.jobs[number].epoch}:
        yield f"{sorted(state.queue.resuming)} are not those that wait and rest somewhere"
    if any(number >= state.counters.next_job for number in state.jobs):
        yield "a job's number was never given"


def _job(state: State, job: JobRecord) -> Iterator[str]:
    gang = state.gangs.get(job.epoch)
    if job.epoch and gang is None:
        yield f"{job.name} is at epoch {job.epoch}, which is not there"
    if job.state.is_finished:
        if job.epoch or job.next_epoch or job.ending is not None or not job.end_time:
            yield f"{job.name} has ended, but is not at rest"
        alive = [g.epoch for g in state.gangs.of_job(job.number) if not g.is_gone or g.intent is not GangIntent.STOP]
        if alive:
            yield f"{job.name} has ended, but epochs {alive} are alive"
        return
    if job.state is JobState.HOLDING and gang is None and job.ending is None:
        yield f"{job.name} is HOLDING without a gang"
    waits = job.is_waiting
    rests = gang is None or (gang.intent in (GangIntent.PARK, GangIntent.HAND_OVER) and gang.phase is GangPhase.PARKED)
    if waits and not rests:
        yield f"{job.name} waits, but epoch {job.epoch} does not rest"
    if waits and not job.pending_since:
        yield f"{job.name} waits since never"
    if job.suspended_level is not SuspendLevel.NONE and job.state is not JobState.SUSPENDED:
        yield f"{job.name} rests at {job.suspended_level.name}, but is {job.state}"
    if job.failures > job.spec.max_failures and job.ending is not JobState.FAILED and job.ending is None:
        yield f"{job.name} goes on after {job.failures} failures"
    if job.held and gang is not None:
        yield f"{job.name} is held, but has epoch {job.epoch}"
    if job.awaits and not job.held:
        yield f"{job.name} awaits {job.awaits}, but is not held"
    for number in {one.number for one in job.awaits}:
        if all(other.state.is_finished for other in members_of(state.jobs, number) or [state.jobs[number]]):
            yield f"{job.name} awaits {number}, which has ended"
    if job.running_since and (gang is None or gang.role is not GangRole.ACTIVE):
        yield f"{job.name} counts running time without an active gang"


def _derived(state: State) -> Iterator[str]:
    for name in sorted(state.desired):
        desired = state.desired[name]
        if desired.version > state.counters.desired_version:
            yield f"{name}: desired version {desired.version} is beyond {state.counters.desired_version}"
    for turn in state.leases.values():
        if state.leases.turn_of.get(turn.number) != turn.turn or not state.jobs[turn.number].is_waiting:
            yield f"turn {turn.turn} belongs to jobs/{turn.number}, which does not wait for it"
    awaited: dict[Dependency, dict[int, None]] = {}
    for number in sorted(state.jobs.live):
        for one in state.jobs[number].awaits:
            awaited.setdefault(one, {})[number] = None
    if state.jobs.dependents != awaited:
        yield f"{state.jobs.dependents} are not the jobs that wait for others: {awaited}"
    rows = state.rows.values()
    counts = [row.free_mask.bit_count() for row in rows if row.available]
    if sum(counts) != state.nodes.free_devices:
        yield f"{sum(counts)} devices are free, not {state.nodes.free_devices}"
    if Counter(filter(None, counts)) != state.nodes.nodes_with:
        yield f"{state.nodes.nodes_with} nodes have so many devices free, not {dict(Counter(filter(None, counts)))}"
    available = [state.nodes.configuration_sets[row.configuration_set] for row in rows if row.available]
    if sum(configuration_set.devices for configuration_set in available) != state.nodes.devices:
        yield f"{state.nodes.devices} devices are not those of the nodes that take gangs"
    if set(state.nodes.choosy) != {name for name, node in state.nodes.items() if node.is_choosy}:
        yield f"{sorted(state.nodes.choosy)} are not the nodes that may refuse a job"
    lacking = [job for job in state.queue.refusals if is_lack(state.queue.refusals[job])]
    if list(state.queue.lacking) != sorted(lacking, key=lambda number: (state.policy.key(state.jobs[number]), number)):
        yield f"{list(state.queue.lacking)} are not the jobs refused for lack of pieces, in order"
    if set(state.nodes.unheard) != {name for name, node in state.nodes.items() if not node.heard and not node.lost}:
        yield f"{sorted(state.nodes.unheard)} are not the nodes that have not said what they have"
    remembered = state.queue.blocked
    if remembered is not None and remembered != find_blocked(state):
        yield f"{remembered} is not the jobs that lack pieces"
