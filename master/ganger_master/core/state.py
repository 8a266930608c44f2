"""The state one writer owns: immutable elements in dictionaries, what is derived from them, and what changed.

Only `put_*` and `forget_gang` change elements, so what a store must make durable is exactly what is noted here.
What is volatile (placement leases, refusals, last answers) is lost in a restart and recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy

from ganger.cluster.placement import choose_mode
from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import Claim, ConfigurationSet, NodeRow
from ganger.cluster.view import View
from ganger.node_test import TEST_USER
from ganger.protocol.stop_rules import longest_hold_s
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.accounting import Owner, UserUsage, limits_of
from ganger_master.core.commands import Observe, ObservedSlices, RecordedEnd
from ganger_master.core.desired_projection import DesiredProjection
from ganger_master.core.events import Dirty, HistoryRow, StoredChanges, Unstored, cut
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, StoredOrder, TimesliceGroup, uses_otherwise
from ganger_master.core.job_model import JobRecord, Request
from ganger_master.core.node_closures import NodeClosures
from ganger_master.core.node_model import AccessToken, Counters, Node, Reservation
from ganger_master.core.plan_changes import CoresCurve
from ganger_master.core.queue import Blocked, JobQueue, LeaseTable, Place
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_indexes import (
    GangIndex,
    JobIndex,
    NodeIndex,
    UsageIndex,
    is_other_row,
    list_if,
    opens,
    row_of,
)
from ganger_master.core.tenancy import PartitionIndex, TeamIndex
from ganger_master.policies import policy_named


class RestoreReport(Struct, frozen=True):
    """The newest complete report of a node during a restore, its Unix second, and the described orders by epoch."""

    time: float
    report: Observe
    described: Mapping[int, StoredOrder]


class State:
    """The state of the cluster; see the module.

    settings: limits and times of the core. now: the time of the restart, in seconds; every node counts as answered
    then, so that none is lost early. is_stored: keep changes, history and orders for a store and daemons; False where
    only the decisions matter.
    """

    def __init__(self, settings: CoreSettings, now: float = 0.0, is_stored: bool = True) -> None:
        self.settings = settings
        named = policy_named(settings.policy)
        self.policy = named.planned if settings.needs_planner else named
        self.teams = TeamIndex(settings.teams)
        self.limits = limits_of(settings.quota_devices, settings.teams, settings.partitions)
        self.partitions = PartitionIndex(settings.partitions)
        self.started = now
        self.jobs = JobIndex()
        self.gangs = GangIndex()
        self.nodes = NodeIndex()
        self.usage = UsageIndex()
        # By name, and when the next one enters another phase.
        self.reservations: dict[str, Reservation] = {}
        self.reservation_at = 0.0
        # What they close to which jobs; None: to be found anew.
        self.closures: NodeClosures | None = None
        # Free devices by node, of nodes that are closed, in a partition: at a version of the view.
        self.free_on: tuple[int, dict[tuple[frozenset[str], str], dict[str, int]]] = (-1, {})
        # Of people, by name.
        self.tokens: dict[str, AccessToken] = {}
        # Without teams, no decision depends on use.
        self.counts_use = is_stored or bool(settings.teams)
        self.counters = Counters(storage_token=settings.storage_token)
        self.view = View()
        self.desired = DesiredProjection()
        # The rest is lost in a restart.
        # During a restore: the nodes' reports, and the recorded ends of jobs.
        self.reports: dict[str, RestoreReport] = {}
        self.ends: Mapping[str, RecordedEnd] | None = None
        self.queue = JobQueue()
        self.leases = LeaseTable()
        # What the planner measured of jobs with several numbers of cores, by job number.
        self.cores_curves: dict[int, CoresCurve] = {}
        self.wake_at: float | None = None
        self.dirty = Dirty()
        self.unstored = Unstored(is_stored)

    def __copy__(self) -> State:
        """Return a copy that shares all but the queue, in which approval records what it finds."""
        twin = State.__new__(State)
        twin.__dict__.update(self.__dict__)
        twin.queue = copy(self.queue)
        return twin

    def put_job(self, job: JobRecord) -> None:
        old = self.jobs.get(job.number)
        if old == job:
            return
        if (old is None or old.spec.partition != job.spec.partition) and not job.state.is_finished:
            job = self._with_terms(job)
        self.jobs.put(old, job)
        self._index_queue(old, job)
        if old is not None and (old.spec is not job.spec or old.checkpoint is not job.checkpoint):
            self._renew_job(job.number)
        if self.limits:
            self._charge(job.number)
        if self.counts_use and (old is None or (old.running_since, old.epoch) != (job.running_since, job.epoch)):
            self.dirty.usage[job.number] = None
        if self.unstored.is_kept:
            self.unstored.put(("job", str(job.number)), job)
        dirty = self.dirty
        # Only arrays that hold members back wait for members to end.
        if job.spec.array is not None and job.spec.array.at_once:
            dirty.arrays[job.spec.array.array] = None
        if self.jobs.dependents and job.state.is_finished:
            dirty.ended[job.number] = None
            if job.spec.array is not None:
                dirty.ended[job.spec.array.array] = None
        dirty.jobs[job.number] = None
        dirty.news[job.number] = None

    def put_gang(self, gang: Gang) -> None:
        old = self.gangs.get(gang.epoch)
        if old == gang:
            return
        self.gangs[gang.epoch] = gang
        if gang.idle is not None or self.gangs.idle:
            list_if(self.gangs.idle, gang.epoch, gang.idle is not None and gang.intent is GangIntent.RUN)
        if gang.stops_at_epoch_end or self.gangs.at_epoch_ends:
            is_parked_there = gang.stops_at_epoch_end and gang.phase is GangPhase.STOPPING
            list_if(self.gangs.at_epoch_ends, gang.epoch, is_parked_there)
        if self.unstored.is_kept:
            self.unstored.put(("gang", str(gang.epoch)), gang)
        dirty = self.dirty
        if self.gangs.set_of and gang.epoch in self.gangs.set_of:
            dirty.sets[self.gangs.set_of[gang.epoch]] = None
        dirty.jobs[gang.job] = None
        dirty.news[gang.job] = None
        if old is None:
            if self.limits:
                self._charge(gang.job)
            self._place(gang)
            return
        if self.counts_use and uses_otherwise(old, gang):
            dirty.usage[gang.job] = None
        for before, piece in zip(old.pieces, gang.pieces, strict=True):
            dirty.wants[piece.claim.node] = None
            if piece.held is before.held or piece.held == before.held:
                continue
            if piece.held is not None or before.held is None or not self._give(before.held):
                dirty.rows[piece.claim.node] = None

    def forget_gang(self, epoch: int) -> None:
        gang = self.gangs.forget(epoch, self.nodes)
        if epoch in self.gangs.set_of:
            self.dirty.sets[self.gangs.set_of[epoch]] = None
        if self.limits:
            self._charge(gang.job)
        self.desired.forget_gang(epoch)
        self.nodes.drained_in_vain.pop(epoch, None)
        self.unstored.remove(("gang", str(epoch)))
        self.dirty.jobs[gang.job] = None
        self.dirty.news[gang.job] = None
        for piece in gang.pieces:
            node = piece.claim.node
            self.dirty.wants[node] = None
            if piece.held is not None:
                self.dirty.rows[node] = None
            if self.counts_use:
                self.dirty.usage.update(dict.fromkeys([gang.job, *self.gangs.sharing_on(node)]))

    def forget_job(self, number: int) -> None:
        """Delete a job that has ended and has no gang anywhere."""
        self.jobs.forget(number)
        self.leases.claimed_by.pop(number, None)
        self.leases.lost_turns.pop(number, None)
        self.unstored.remove(("job", str(number)))
        self.queue.forget_refusals(number)
        self.cores_curves.pop(number, None)

    def put_usage(self, usage: UserUsage) -> None:
        self.usage[usage.user] = usage
        self.unstored.put(("user_usage", usage.user), usage)

    def forget_usage(self, user: str) -> None:
        del self.usage[user]
        self.unstored.remove(("user_usage", user))

    def put_reservation(self, reservation: Reservation) -> None:
        self.reservations[reservation.name] = reservation
        self.closures = None
        self.unstored.put(("reservation", reservation.name), reservation)

    def forget_reservation(self, name: str) -> None:
        del self.reservations[name]
        self.closures = None
        self.unstored.remove(("reservation", name))

    def put_token(self, token: AccessToken) -> None:
        self.tokens[token.name] = token
        self.unstored.put(("access_token", token.name), token)

    def forget_token(self, name: str) -> None:
        del self.tokens[name]
        self.unstored.remove(("access_token", name))

    def put_request(self, request: Request) -> None:
        self.forget_request(request.user, request.request_id)
        self.jobs.former[request.user, request.request_id] = request
        self.unstored.put(("request", str(request.number)), request)

    def forget_request(self, user: str, request_id: str) -> None:
        former = self.jobs.former.pop((user, request_id), None)
        if former is not None:
            self.unstored.remove(("request", str(former.number)))

    def _charge(self, number: int) -> None:
        job = self.jobs.get(number)
        if job is not None:
            self.jobs.charges.charge(number, self.owners(job), self.charged_for(job))

    def owners(self, job: JobRecord) -> tuple[Owner, ...]:
        """Return the owners of limits that a job counts for; none for the test of a node."""
        if job.user == TEST_USER:
            return ()
        return self.limits.owners(job.user, self.teams.of(job.user), job.partition.name)

    def _with_terms(self, job: JobRecord) -> JobRecord:
        """Return a job with what follows from its partition now. One that has run keeps the time limit that it has. The
        test of a node is in none."""
        if job.user == TEST_USER:
            return job
        terms = self.partitions.terms_of(job.spec.partition)
        if job.start_time and job.partition.name == terms.name:
            terms = replace(terms, time_limit_s=job.partition.time_limit_s)
        return job if terms == job.partition else replace(job, partition=terms)

    def charged_for(self, job: JobRecord) -> int:
        """Return the devices of a job that count towards limits, from the approval of its gang until that is
        gone. A job that is about to have more devices counts with those."""
        if job.state.is_finished or job.epoch not in self.gangs:
            return 0
        coming = self.gangs.get(job.next_epoch)
        return job.gpus if coming is None else max(job.gpus, coming.devices)

    def put_node(self, node: Node) -> None:
        old = self.nodes.get(node.name)
        if old == node:
            return
        was_unheard = node.name in self.nodes.unheard
        self.nodes.put(old, node)
        self.unstored.put(("node", node.name), node)
        self.gangs.places_on.setdefault(node.name, {})
        if old is not None and opens(old, node):
            # What starts here now has waited for that, not for the jobs that left before.
            self.jobs.left_by.pop(node.name, None)
        is_other = old is None or is_other_row(old, node)
        if was_unheard and node.name not in self.nodes.unheard and not is_other:
            # Otherwise the row is refreshed, and the mode with it.
            self._note_view()
        if is_other:
            self.dirty.rows[node.name] = None
            if node.name in self.gangs.set_on:
                self.dirty.sets[self.gangs.set_on[node.name]] = None
        self.dirty.wants[node.name] = None
        if old is None or (old.peer_address, old.stream_address) != (node.peer_address, node.stream_address):
            self._renew_peers(node.name)

    def note_report(self, name: str, observation: int, applied_version: int, acknowledged: tuple[int, ...]) -> None:
        """Record a report that changes only the node's applied version and ended gangs, as nearly all do."""
        node = self.nodes[name]
        is_known = node.acknowledged == acknowledged
        if is_known and node.observation == observation and node.applied_version == applied_version:
            return
        node = self.nodes[name] = replace(
            node, observation=observation, applied_version=applied_version, acknowledged=acknowledged
        )
        if not is_known:
            self.unstored.put(("node", name), node)
            self.dirty.wants[name] = None
        # Otherwise nothing follows, and nothing is stored: the report counts only for the session. So daemons without
        # news are answered even while the store fails, and their jobs run on.

    def forget_node(self, name: str) -> None:
        """Remove a node on which no job holds anything. Gangs that are still being stopped elsewhere may name it."""
        node = self.nodes[name]
        # Whatever it counted for, it does no longer.
        self.nodes.put(node, replace(node, lost=True))
        self.refresh_row(name)
        self.view.remove(name)
        self._note_view()
        self.queue.kept = None
        self.nodes.forget(name)
        self._renew_peers(name)
        self.jobs.left_by.pop(name, None)
        self.desired.forget_node(name)
        for touched in (self.dirty.rows, self.dirty.wants, self.dirty.shown):
            touched.pop(name, None)
        if not self.gangs.places_on[name]:
            del self.gangs.places_on[name]
        self.unstored.remove(("node", name))

    def put_set(self, node_set: TimesliceGroup) -> None:
        old = self.gangs.sets.get(node_set.number)
        if old == node_set:
            return
        self.gangs.put_set(node_set)
        self.unstored.put(("node_set", str(node_set.number)), node_set)
        self.dirty.sets[node_set.number] = None
        self._renew_set(node_set if old is None else old, node_set)

    def forget_set(self, number: int) -> None:
        node_set = self.gangs.forget_set(number)
        self.unstored.remove(("node_set", str(number)))
        self._renew_set(node_set)

    def note_rows(self, node: str, seen: Iterable[ObservedSlices]) -> None:
        """Record what a node reports of its time slices; groups with news are reviewed."""
        for rows in seen:
            if self.gangs.note_rows(node, rows):
                self.dirty.sets[rows.node_set] = None

    def put_configuration_set(self, configuration_set: ConfigurationSet) -> None:
        self.nodes.configuration_sets[configuration_set.name] = configuration_set
        self.view.put_configuration_set(configuration_set)
        self.unstored.put(("configuration_set", configuration_set.name), configuration_set)

    def take_changes(self) -> StoredChanges:
        """Return what became different since the last call; store it before any effect leaves."""
        return self.unstored.take(self.counters)

    def blockers_of(self, number: int) -> tuple[Refusal, ...]:
        return self.queue.refusals.get(number, ())

    def queue_rank(self, number: int) -> int:
        """Return the position among waiting jobs, from 1; zero if it does not wait, or is not ranked."""
        job = self.jobs.get(number)
        if job is None or not job.is_waiting:
            return 0
        if self.is_planned:
            return self.queue.ranks.get(number, 0)
        return self.queue.waiting.rank((*self.policy.key(job), number)) + 1

    @property
    def is_planned(self) -> bool:
        """Return whether the planner ranks the pending jobs and decides when one may start."""
        return self.policy.is_planned

    @property
    def rows(self) -> dict[str, NodeRow]:
        """The view by node, without versions."""
        return {name: replace(self.view.row(name), version=0) for name in self.nodes if name in self.view}

    def history(
        self, now: float, subject: JobRecord | str, kind: str, cause: str, message: str = "", **figures: object
    ) -> None:
        if not self.unstored.is_kept:
            return
        sequence = self.counters.next_event
        self.counters.next_event += 1
        texts = {name: cut(str(value)) for name, value in figures.items()}
        name = subject if isinstance(subject, str) else subject.name
        self.unstored.note(HistoryRow(sequence, now, name, kind, cause, cut(message), texts))

    def note_refusals(self, number: int, refusals: tuple[Refusal, ...]) -> None:
        """Record why the last request of a job was refused; room is kept for other jobs by that."""
        job, queue = self.jobs[number], self.queue
        place = (*self.policy.key(job), number)
        queue.note_refusals(place, refusals, job.is_waiting, self.policy.protects_all)
        if queue.blocked is not None and not self._is_behind(place, queue.blocked):
            queue.blocked = None

    def _is_behind(self, place: Place, blocked: Blocked) -> bool:
        """Return whether so many blocked jobs are ahead of a place that room is not kept for its job."""
        numbers = blocked.numbers
        if place[-1] in numbers or len(numbers) < self.settings.protected_jobs:
            return False
        return (*self.policy.key(self.jobs[numbers[-1]]), numbers[-1]) < place

    @property
    def next_desired_version(self) -> int:
        """The version of the desired state that the end of this batch commits."""
        return self.counters.desired_version + 1

    def take_epoch(self) -> int:
        epoch = self.counters.next_epoch
        self.counters.next_epoch += 1
        return epoch

    def refresh_row(self, name: str) -> bool:
        """Recompute a node's row; return whether the view changed."""
        node = self.nodes[name]
        device_type = self.nodes.configuration_sets[node.configuration_set].device_type
        partitions = self.partitions.of_node(name, device_type) if self.partitions else ()
        topology = self.view.topology_named(node.configuration_set, partitions)
        row = row_of(node, topology, self.gangs.held_on(name), self.gangs.affinity_of(name))
        view = self.view
        slot = view.slots.get(name)
        was_free = was_devices = 0
        if slot is not None and view.available[slot]:
            # It may have been other hardware.
            was_free, was_devices = view.free[slot].bit_count(), view.topologies[slot].devices
        in_service = topology.all_mask
        for device in node.device_faults:
            in_service &= ~(1 << device)
        if not view.put(row, in_service):
            return False
        self.nodes.count_free(was_free, row.free_mask.bit_count() if row.available else 0)
        self.nodes.devices += (topology.devices if row.available else 0) - was_devices
        self._note_view()
        return True

    def _place(self, gang: Gang) -> None:
        """Note a new gang on its nodes and take what it holds off the view; where more has changed, compute the row."""
        view, dirty = self.view, self.dirty
        epoch, devices = gang.epoch, gang.devices
        self.gangs.index(gang)
        for place, piece in enumerate(gang.pieces):
            held, node = piece.held, piece.claim.node
            self.gangs.place(node, epoch, place)
            dirty.wants[node] = None
            slot = view.slots.get(node)
            if held is None or slot is None or node in dirty.rows or held.shared_mask:
                dirty.rows[node] = None
                continue
            was_free = view.free[slot].bit_count()
            view.take(held, devices)
            dirty.shown[node] = None
            if view.available[slot]:
                self.nodes.count_free(was_free, was_free - held.device_mask.bit_count())
        self._note_view()

    def _give(self, held: Claim) -> bool:
        """Give back to the view what a gang held on a node; False where the row is to be computed anew."""
        view, node = self.view, self.nodes.get(held.node)
        slot = view.slots.get(held.node)
        if node is None or slot is None or held.node in self.dirty.rows:
            return False
        if held.shared_mask or held.parked_bytes or node.strays or node.device_faults:
            return False
        # Where nothing is left, more may be held than there is.
        if (held.memory_bytes or held.arena_bytes) and not view.memory[slot]:
            return False
        if any(own and left <= 0 for own, left in zip(held.bandwidth, view.bandwidth.get(slot, ()), strict=False)):
            return False
        cores = zip(held.millicores, view.millicores[slot], strict=False)
        if any(held.millicores) and any(own and not left for own, left in cores):
            return False
        was_free = view.free[slot].bit_count()
        view.give(held, self.gangs.affinity_of(held.node))
        self.dirty.shown[held.node] = None
        if view.available[slot]:
            self.nodes.count_free(was_free, view.free[slot].bit_count())
        self._note_view()
        return True

    def _note_view(self) -> None:
        # After a restart the load is unknown until every node has reported: until then the mode stands.
        if not self.nodes.unheard:
            self.view.mode = choose_mode(
                self.view.mode, self.nodes.devices - self.nodes.free_devices, self.nodes.devices
            )
        self.counters.view_version = self.view.version

    def note_answer(self, node: str, now: float) -> None:
        """Record that the node's daemon was answered: its lease, and the time until it is silent, begin now."""
        self.nodes.note_answer(node, now, (self.silent_after, self.lost_after))

    @property
    def silent_after(self) -> float | None:
        """Silence after which a node takes no gangs, longer than that of a daemon without news; None: never."""
        margin = self.settings.silent_margin_s
        return None if margin is None else margin + longest_hold_s(self.settings.poll_s, self.settings.lost_after_s)

    @property
    def lost_after(self) -> float | None:
        """Silence after which a node is lost, margin included; None never."""
        after = self.settings.lost_after_s
        return None if after is None else after + self.settings.lost_margin_s

    def _index_queue(self, old: JobRecord | None, job: JobRecord) -> None:
        number, queue, key = job.number, self.queue, self.policy.key
        was, waits = old is not None and old.is_waiting, job.is_waiting
        if old is not None and was and (not waits or old.spec is not job.spec):
            queue.leave((*key(old), number))
            self.leases.drop(number)
            self.leases.returned.pop(number, None)
            if waits:
                # Its spec changed: it joins the queue anew, at the place that the new spec gives it.
                was = False
                queue.kept = None
        if waits and not was:
            queue.join((*key(job), number))
        list_if(queue.resuming, number, waits and job.epoch > 0)

    def _renew_set(self, *node_sets: TimesliceGroup) -> None:
        for node_set in node_sets:
            if self.counts_use:
                there = [self.gangs[epoch].job for row in node_set.rows for epoch in row if epoch in self.gangs]
                self.dirty.usage.update(dict.fromkeys(there))
            for node in node_set.nodes:
                self.dirty.wants[node] = None

    def _renew_job(self, number: int) -> None:
        """Renew the orders of the job's gangs, which carry its spec and its checkpoints."""
        for epoch in self.gangs.epochs_of.get(number, ()):
            self.desired.forget_gang(epoch)
            for node in self.gangs[epoch].nodes:
                self.dirty.wants[node] = None

    def _renew_peers(self, name: str) -> None:
        """Renew the desired state of nodes whose orders carry this node's addresses, which have changed."""
        for epoch in self.gangs.places_on[name]:
            self.desired.forget_gang(epoch)
            for other in self.gangs.listeners(self.gangs[epoch]):
                self.dirty.wants[other] = None
        if name in self.gangs.set_on:
            self._renew_set(self.gangs.sets[self.gangs.set_on[name]])
