"""The state one writer owns: immutable elements in dictionaries, what is derived from them, and what changed.

Only `put_*` and `forget_gang` change elements, so what a store must make durable is exactly what is noted here.
What is volatile (turns, refusals, last answers) is gone after a restart and recomputed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from typing import Final

from ganger.cluster.placement import choose_mode
from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import ConfigurationSet, NodeRow
from ganger.cluster.view import View
from msgspec.structs import replace

from ganger_master.core.commands import Observe, ObservedGang, ObservedRows, RecordedEnd
from ganger_master.core.desired_state import DesiredSet, Party, Projected
from ganger_master.core.effects import Dirty, HistoryRow, StoredChanges, cut
from ganger_master.core.model import Claim, Counters, Element, Gang, JobRecord, JobState, Node, NodeSet, Request
from ganger_master.core.node_index import row_of
from ganger_master.core.queue import Blocked, GrantedLease, QueueSubset, ReservedPlaces, Waiting, is_lack, is_lasting
from ganger_master.core.settings import CoreSettings
from ganger_master.core.user_usage import Holdings, Shares
from ganger_master.policies import Places, policy_named

# To look up a member of an enumeration takes Python 3.11 as long as a call, and this one is compared all the time.
_PENDING: Final = JobState.PENDING


class State:
    """The state of the cluster; see the module.

    settings: limits and times of the core. now: the time of the restart, in seconds; every node counts as answered
    then, so that none is lost early. tells: keep changes, history and orders for a store and daemons; False where only
    the decisions matter.
    """

    def __init__(self, settings: CoreSettings, now: float = 0.0, tells: bool = True) -> None:
        self.settings = settings
        self.tells = tells
        self.policy = policy_named(settings.policy)
        self.started = now
        self.jobs: dict[int, JobRecord] = {}
        self.gangs: dict[int, Gang] = {}
        self.nodes: dict[str, Node] = {}
        self.sets: dict[int, NodeSet] = {}
        self.configuration_sets: dict[str, ConfigurationSet] = {}
        self.counters = Counters(storage_token=settings.storage_token)
        self.view = View()
        self._start_indexes()
        self._start_memory()
        # Changes since the last take_changes.
        self.dirty = Dirty()
        self.outbox: list[HistoryRow] = []
        self._puts: dict[tuple[str, str], Element] = {}
        self._removes: dict[tuple[str, str], None] = {}
        self._counters_taken: Counters | None = None

    def _start_indexes(self) -> None:
        """Create the indexes that follow from the stored elements."""
        # Of the nodes that take gangs.
        self.devices = 0
        self.free_devices = 0
        # How many of them have so many devices free, of those that have any.
        self.nodes_with: dict[int, int] = {}
        self.gangs_of: dict[int, list[int]] = {}
        # By node and epoch, in the order of epochs: which of the gang's pieces is there.
        self.gangs_on: dict[str, dict[int, int]] = {}
        # By user and request id; of `former` those that were forgotten first at the front.
        self.requests: dict[tuple[str, str], int] = {}
        self.former: dict[tuple[str, str], Request] = {}
        # In the order in which they ended.
        self.finished: dict[int, None] = {}
        self.live: dict[int, None] = {}
        # Only where there are quotas.
        self.shares = Shares()
        self.holdings = Holdings()
        self.waiting = Waiting()
        # All of these, except those that are `aside`.
        self.front = Waiting()
        # Waiting jobs that rest somewhere, and keep memory there.
        self.resuming: dict[int, None] = {}
        # Those with a time limit that have a gang.
        self.running_limited: dict[int, None] = {}
        self.moving: dict[int, None] = {}
        # Those that are tried again later, for they failed.
        self.backing_off: dict[int, None] = {}
        self.draining: dict[str, None] = {}
        # Node sets, by epoch and by node.
        self.set_of: dict[int, int] = {}
        self.set_on: dict[str, int] = {}
        # Nodes that may be closed to some jobs.
        self.choosy: dict[str, None] = {}
        # Nodes that are not lost and have not reported their gangs yet.
        self.unheard: dict[str, None] = {}
        # By uid: nodes with a gang of that job that is quarantined or being ended by an operator.
        self.strays_of: dict[str, dict[str, None]] = {}
        self.desired: dict[str, DesiredSet] = {}
        # What `desired` is made of, by epoch, and by node and epoch.
        self.parties: dict[int, Party] = {}
        self.projected: dict[str, dict[int, Projected]] = {}

    def _start_memory(self) -> None:
        """Create what a restart loses: reports, refusals, leases and the planner's ranking."""
        # During a restore: the nodes' reports with their times, and the recorded ends of jobs.
        self.reports: dict[str, tuple[float, Observe]] = {}
        self.ends: Mapping[str, RecordedEnd] | None = None
        self.last_answer: dict[str, float] = {}
        # By node: the job that last gave devices back there, and when; for the history of the job that gets them.
        self.left_by: dict[str, tuple[int, float]] = {}
        # By epoch, gangs without a place off a draining node: `freed` of the view that was searched, and when.
        self.drained_in_vain: dict[int, tuple[int, float]] = {}
        # By node and epoch: the last report of a gang, and gang and job as it left them.
        self.last_said: dict[tuple[str, int], tuple[ObservedGang, Gang, JobRecord]] = {}
        # By group and node: the last report of its time slices.
        self.rows_seen: dict[tuple[int, str], ObservedRows] = {}
        # No node can turn silent or be lost before this time; None while none can.
        self.next_silence_check: float | None = None
        self.refusals: dict[int, tuple[Refusal, ...]] = {}
        # Waiting jobs whose last refusal was a lack of pieces.
        self.lacking = QueueSubset()
        # Waiting jobs whose last refusal depends on no other job; the offset of those that are considered now, and
        # since when.
        self.aside = QueueSubset()
        self.aside_from = 0
        self.aside_at = 0.0
        # What `capacity` found, until a refusal or a conflict comes or goes.
        self.blocked: Blocked | None = None
        self.conflicts: dict[int, int] = {}
        self.kept: ReservedPlaces | None = None
        self.turns: dict[int, GrantedLease] = {}
        self.turn_of: dict[int, int] = {}
        self.next_turn = 1
        # Waiting jobs that were refused or passed at this view version: no turn until the view changes or time passes.
        self.passed: dict[int, tuple[int, float]] = {}
        # Waiting jobs whose schedulers left places that were there: kept no room, while they wait or (True) for a wish.
        self.declined: dict[int, bool] = {}
        self.lost_turns: dict[int, int] = {}
        # When a scheduler that had lost its turns last came back.
        self.returned: dict[int, float] = {}
        self.claimed_by: dict[int, str] = {}
        # The planner's last ranking, and its policy.
        self.ranks: dict[int, int] = {}
        self.ranked_by = ""
        # Places that the planner keeps for waiting jobs, and when it last reported them.
        self.promised: dict[int, tuple[Claim, ...]] = {}
        self.promised_at = 0.0
        # Places of a plan for jobs with a scheduler of their own, until these jobs get a lease.
        self.suggested: dict[int, tuple[Claim, ...]] = {}
        self.wake_at: float | None = None

    def __copy__(self) -> State:
        """Shares everything with this one: for what-ifs that replace what they change."""
        twin = State.__new__(State)
        twin.__dict__.update(self.__dict__)
        return twin

    # -- elements ------------------------------------------------------------------------------------------------------

    def put_job(self, job: JobRecord) -> None:
        old = self.jobs.get(job.number)
        if old == job:
            return
        self.jobs[job.number] = job
        self.holdings.note(old, job)
        self._index_job(old, job)
        if old is not None and (old.spec is not job.spec or old.checkpoint is not job.checkpoint):
            self._renew_job(job.number)
        if self.settings.quota_devices:
            self._charge(job.number)
        if self.tells:
            self._put(("job", str(job.number)), job)
        dirty = self.dirty
        if job.spec.array is not None:
            dirty.arrays[job.spec.array.array] = None
        dirty.jobs[job.number] = None
        dirty.news[job.number] = None

    def put_gang(self, gang: Gang) -> None:
        old = self.gangs.get(gang.epoch)
        if old == gang:
            return
        self.gangs[gang.epoch] = gang
        if self.tells:
            self._put(("gang", str(gang.epoch)), gang)
        dirty = self.dirty
        if self.set_of and gang.epoch in self.set_of:
            dirty.sets[self.set_of[gang.epoch]] = None
        dirty.jobs[gang.job] = None
        dirty.news[gang.job] = None
        if old is None:
            if self.settings.quota_devices:
                self._charge(gang.job)
            self._place(gang)
            return
        for before, piece in zip(old.pieces, gang.pieces, strict=True):
            dirty.wants[piece.claim.node] = []
            if piece.held is before.held or piece.held == before.held:
                continue
            if piece.held is not None or before.held is None or not self._give(before.held):
                dirty.rows[piece.claim.node] = None

    def forget_gang(self, epoch: int) -> None:
        gang = self.gangs.pop(epoch)
        self._unindex_gang(gang)
        if epoch in self.set_of:
            self.dirty.sets[self.set_of[epoch]] = None
        if self.settings.quota_devices:
            self._charge(gang.job)
        self.parties.pop(epoch, None)
        self.drained_in_vain.pop(epoch, None)
        self._remove(("gang", str(epoch)))
        self.dirty.jobs[gang.job] = None
        self.dirty.news[gang.job] = None
        for piece in gang.pieces:
            node = piece.claim.node
            self.last_said.pop((node, epoch), None)
            self.dirty.wants[node] = []
            if piece.held is not None:
                self.dirty.rows[node] = None

    def forget_job(self, number: int) -> None:
        """One that has ended, with nothing left anywhere."""
        job = self.jobs.pop(number)
        self.holdings.forget(job)
        del self.finished[number]
        if self.requests.get((job.user, job.request_id)) == number:
            del self.requests[job.user, job.request_id]
        for known in (self.claimed_by, self.lost_turns):
            known.pop(number, None)
        self._remove(("job", str(number)))
        self._forget_refusals(number)

    def put_request(self, request: Request) -> None:
        self.forget_request(request.user, request.request_id)
        self.former[request.user, request.request_id] = request
        self._put(("request", str(request.number)), request)

    def forget_request(self, user: str, request_id: str) -> None:
        former = self.former.pop((user, request_id), None)
        if former is not None:
            self._remove(("request", str(former.number)))

    def _charge(self, number: int) -> None:
        job = self.jobs.get(number)
        if job is not None:
            self.shares.charge(number, job.user, self.charged_for(job))

    def charged_for(self, job: JobRecord) -> int:
        """A job counts towards its user's quota from the approval of its gang until that is gone; one that is about to
        have more devices counts with those."""
        if job.state.is_finished or job.epoch not in self.gangs:
            return 0
        coming = self.gangs.get(job.next_epoch)
        return job.gpus if coming is None else max(job.gpus, coming.devices)

    def put_node(self, node: Node) -> None:
        old = self.nodes.get(node.name)
        if old == node:
            return
        self.nodes[node.name] = node
        self._put(("node", node.name), node)
        self.gangs_on.setdefault(node.name, {})
        if node.draining:
            self.draining[node.name] = None
        else:
            self.draining.pop(node.name, None)
        if not node.heard and not node.lost:
            self.unheard[node.name] = None
        elif node.name in self.unheard:
            del self.unheard[node.name]
            if old is None or not _is_other_row(old, node):
                # Where the row is another one by that, it follows, and the load with it.
                self._note_view()
        if node.is_choosy:
            self.choosy[node.name] = None
        else:
            self.choosy.pop(node.name, None)
        if old is None or old.strays is not node.strays:
            self.index_strays(old, node)
        if old is None or _is_other_row(old, node):
            self.dirty.rows[node.name] = None
            if node.name in self.set_on:
                self.dirty.sets[self.set_on[node.name]] = None
        self.dirty.wants[node.name] = []
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
            self._put(("node", name), node)
            self.dirty.wants[name] = []
        # Otherwise nothing follows, and nothing is stored: the report counts only for the session. So daemons without
        # news are answered even while the store fails, and their jobs run on.

    def forget_node(self, name: str) -> None:
        """Remove a node on which no job holds anything. Gangs that are still being stopped elsewhere may name it."""
        node = self.nodes[name]
        # Whatever it counted for, it does no longer.
        self.nodes[name] = replace(node, lost=True)
        self.unheard.pop(name, None)
        self.refresh_row(name)
        self.view.remove(name)
        self._note_view()
        self.kept = None
        self.index_strays(node, replace(node, strays=()))
        del self.nodes[name]
        self._renew_peers(name)
        for known in (self.draining, self.choosy, self.desired, self.projected, self.last_answer, self.left_by):
            known.pop(name, None)
        for touched in (self.dirty.rows, self.dirty.wants, self.dirty.shown):
            touched.pop(name, None)
        if not self.gangs_on[name]:
            del self.gangs_on[name]
        self._remove(("node", name))

    def put_set(self, node_set: NodeSet) -> None:
        old = self.sets.get(node_set.number)
        if old == node_set:
            return
        if old is not None:
            self._unindex_set(old)
        self.sets[node_set.number] = node_set
        self._index_set(node_set)
        self._put(("node_set", str(node_set.number)), node_set)
        self.dirty.sets[node_set.number] = None
        self._renew_set(node_set if old is None else old, node_set)

    def forget_set(self, number: int) -> None:
        node_set = self.sets.pop(number)
        self._unindex_set(node_set)
        for node in node_set.nodes:
            self.rows_seen.pop((number, node), None)
        self._remove(("node_set", str(number)))
        self._renew_set(node_set)

    def note_rows(self, node: str, seen: Iterable[ObservedRows]) -> None:
        """Record what a node reports of its time slices; groups with news are reviewed."""
        for rows in seen:
            key = rows.node_set, node
            if rows.node_set in self.sets and self.rows_seen.get(key) != rows:
                self.rows_seen[key] = rows
                self.dirty.sets[rows.node_set] = None

    def put_configuration_set(self, configuration_set: ConfigurationSet) -> None:
        self.configuration_sets[configuration_set.name] = configuration_set
        self.view.put_configuration_set(configuration_set)
        self._put(("configuration_set", configuration_set.name), configuration_set)

    def take_changes(self) -> StoredChanges:
        """What became different since the last call; the caller makes it durable before any effect leaves."""
        if self.counters != self._counters_taken:
            self._counters_taken = replace(self.counters)
            self._put(("counters", ""), self._counters_taken)
        changes = StoredChanges(self._puts, tuple(self._removes))
        self._puts, self._removes = {}, {}
        return changes

    def drop_turn(self, number: int) -> None:
        """Take the job's turn back, if it has one."""
        turn = self.turn_of.pop(number, None)
        if turn is not None:
            del self.turns[turn]

    # -- queries -------------------------------------------------------------------------------------------------------

    def blockers_of(self, number: int) -> tuple[Refusal, ...]:
        return self.refusals.get(number, ())

    def queue_rank(self, number: int) -> int:
        """Position among waiting jobs, from 1; zero when it does not wait, or the planner has not ranked it."""
        job = self.jobs.get(number)
        if job is None or not self.is_waiting(job):
            return 0
        if self.is_planned:
            return self.ranks.get(number, 0)
        return self.waiting.rank((*self.policy.key(job), number)) + 1

    @property
    def is_planned(self) -> bool:
        """Return whether the planner ranks the pending jobs and decides when one may start."""
        return self.policy.places is Places.PLANNER

    @staticmethod
    def is_waiting(job: JobRecord) -> bool:
        is_free = job.ending is None and job.next_epoch == 0
        return job.state is _PENDING and is_free and not job.held and not job.again_at

    def gangs_of_job(self, number: int) -> list[Gang]:
        """All gangs of a job that still have something somewhere, oldest first."""
        return list(map(self.gangs.__getitem__, self.gangs_of.get(number, ())))

    @property
    def rows(self) -> dict[str, NodeRow]:
        """The view by node, without versions."""
        return {name: replace(self.view.row(name), version=0) for name in self.nodes if name in self.view}

    @property
    def largest_free(self) -> int:
        """Devices that are free on one node that takes gangs, at most."""
        return max(self.nodes_with, default=0)

    def held_on(self, node: str) -> list[Claim]:
        """What the gangs of a node hold there, by epoch."""
        places = self.gangs_on.get(node, {}).items()
        held = [self.gangs[epoch].pieces[place].held for epoch, place in places]
        return [claim for claim in held if claim is not None]

    def gangs_there(self, node: str) -> list[Gang]:
        """Those that may have something on a node, by epoch; what was there when it was lost is gone for its job."""
        places = self.gangs_on.get(node, {}).items()
        return [self.gangs[epoch] for epoch, place in places if not self.gangs[epoch].pieces[place].gone]

    def affinity_of(self, node: str) -> int:
        """Devices of the gangs that live on a node, by its oldest one; zero when it is idle."""
        for epoch, place in self.gangs_on.get(node, {}).items():
            gang = self.gangs[epoch]
            held = gang.pieces[place].held
            if held is not None and held.device_mask:
                return gang.devices
        return 0

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def history(
        self, now: float, subject: JobRecord | str, kind: str, cause: str, message: str = "", **figures: object
    ) -> None:
        if not self.tells:
            return
        sequence = self.counters.next_event
        self.counters.next_event += 1
        texts = {name: cut(str(value)) for name, value in figures.items()}
        name = subject if isinstance(subject, str) else subject.name
        self.outbox.append(HistoryRow(sequence, now, name, kind, cause, cut(message), texts))

    def note_refusals(self, number: int, refusals: tuple[Refusal, ...]) -> None:
        self.refusals[number] = refusals
        self.note_lack(number)
        if self.blocked is not None and not self._is_behind(number, self.blocked):
            self.blocked = None

    def note_lack(self, number: int) -> None:
        """Follows `refusals`."""
        place = (*self.policy.key(self.jobs[number]), number)
        self.lacking.note(place, is_lack(self.refusals[number]))
        lasts = is_lasting(self.refusals[number], self.policy.protects_all)
        if lasts != (number in self.aside) and self.is_waiting(self.jobs[number]):
            (self.front.remove if lasts else self.front.add)(place)
        self.aside.note(place, lasts)

    def _is_behind(self, number: int, blocked: Blocked) -> bool:
        """Return whether so many blocked jobs are ahead that room is not kept for this one."""
        numbers = blocked.numbers
        if number in numbers or len(numbers) < self.settings.protected_jobs:
            return False
        key = self.policy.key
        return (key(self.jobs[numbers[-1]]), numbers[-1]) < (key(self.jobs[number]), number)

    def _forget_refusals(self, number: int) -> None:
        self.lacking.forget(number)
        self.aside.forget(number)
        if self.refusals.pop(number, None) is not None and self.blocked is not None and number in self.blocked.numbers:
            self.blocked = None

    def note_conflicts(self, number: int, count: int) -> None:
        self.conflicts[number] = self.conflicts.get(number, 0) + count
        self.blocked = None

    @property
    def next_desired_version(self) -> int:
        """Of what nodes will want with the end of this batch."""
        return self.counters.desired_version + 1

    def take_epoch(self) -> int:
        epoch = self.counters.next_epoch
        self.counters.next_epoch += 1
        return epoch

    def refresh_row(self, name: str) -> bool:
        """Computes a node's row anew; whether the view changed by it."""
        node = self.nodes[name]
        topology = self.view.topology_named(node.configuration_set)
        held: list[Claim] = []
        affinity = 0
        # `held_on` and `affinity_of` at once, because every node of every gang that comes or goes needs both.
        for epoch, place in self.gangs_on.get(name, {}).items():
            gang = self.gangs[epoch]
            claim = gang.pieces[place].held
            if claim is not None:
                held.append(claim)
                if not affinity and claim.device_mask:
                    affinity = gang.devices
        row = row_of(node, topology, held, affinity)
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
        self._note_free(was_free, row.free_mask.bit_count() if row.available else 0)
        self.devices += (topology.devices if row.available else 0) - was_devices
        self._note_view()
        return True

    def _place(self, gang: Gang) -> None:
        """Notes a new gang on its nodes and takes what it holds off the view; where more than that has changed, the row
        is computed anew."""
        view, dirty, wants, gangs_on = self.view, self.dirty, self.dirty.wants, self.gangs_on
        epoch, devices = gang.epoch, gang.devices
        insort(self.gangs_of.setdefault(gang.job, []), epoch)
        for place, piece in enumerate(gang.pieces):
            held, node = piece.held, piece.claim.node
            there = gangs_on.setdefault(node, {})
            is_newest = not there or epoch > next(reversed(there))
            there[epoch] = place
            if not is_newest:
                # An adopted gang may be older than those that are there.
                gangs_on[node] = dict(sorted(there.items()))
                wants[node] = []
            elif node not in wants:
                wants[node] = [(gang, place)]
            elif wants[node]:
                wants[node].append((gang, place))
            slot = view.slots.get(node)
            if held is None or slot is None or node in dirty.rows or held.shared_mask:
                dirty.rows[node] = None
                continue
            was_free = view.free[slot].bit_count()
            view.take(held, devices)
            dirty.shown[node] = None
            if view.available[slot]:
                self._note_free(was_free, was_free - held.device_mask.bit_count())
        self._note_view()

    def _give(self, held: Claim) -> bool:
        """Give back to the view what a gang held on a node; False where that may not be all that follows, and the row
        is to be computed anew."""
        view, node = self.view, self.nodes.get(held.node)
        slot = view.slots.get(held.node)
        if node is None or slot is None or held.node in self.dirty.rows:
            return False
        if held.shared_mask or held.parked_bytes or node.strays or node.device_faults:
            return False
        # Where nothing is left, more may be held than there is.
        if (held.memory_bytes or held.arena_bytes) and not view.memory[slot]:
            return False
        cores = zip(held.millicores, view.millicores[slot], strict=False)
        if any(held.millicores) and any(own and not left for own, left in cores):
            return False
        was_free = view.free[slot].bit_count()
        view.give(held, self.affinity_of(held.node))
        self.dirty.shown[held.node] = None
        if view.available[slot]:
            self._note_free(was_free, view.free[slot].bit_count())
        self._note_view()
        return True

    def _note_free(self, before: int, now: int) -> None:
        """A node that takes gangs has so many devices free; none before it does, and none once it does not."""
        if before == now:
            return
        self.free_devices += now - before
        counts = self.nodes_with
        if now:
            counts[now] = counts.get(now, 0) + 1
        if before:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]

    def _note_view(self) -> None:
        # After a restart the load is unknown until every node has reported: until then the mode stands.
        if not self.unheard:
            self.view.mode = choose_mode(self.view.mode, self.devices - self.free_devices, self.devices)
        self.counters.view_version = self.view.version

    def note_answer(self, node: str, now: float) -> None:
        """The node's daemon was answered: its lease, and our patience, count from here."""
        self.last_answer[node] = now
        for after in (self.silent_after, self.lost_after):
            if after is not None and (self.next_silence_check is None or now + after < self.next_silence_check):
                self.next_silence_check = now + after

    @property
    def silent_after(self) -> float | None:
        """Silence after which a node takes no gangs, longer than that of a daemon without news; None: never."""
        poll, margin = self.settings.poll_seconds, self.settings.silent_margin_seconds
        lost_after = self.settings.lost_after_seconds
        if margin is None:
            return None
        # Daemons see to it that answers come well within their lease.
        return margin + (poll if lost_after is None else min(poll, lost_after / 4))

    @property
    def lost_after(self) -> float | None:
        """Silence after which a node is lost, margin included; None never."""
        after = self.settings.lost_after_seconds
        return None if after is None else after + self.settings.lost_margin_seconds

    def _remove(self, key: tuple[str, str]) -> None:
        if not self.tells:
            return
        self._puts.pop(key, None)
        self._removes[key] = None

    def _put(self, key: tuple[str, str], element: Element) -> None:
        if not self.tells:
            return
        self._puts[key] = element
        self._removes.pop(key, None)

    def _index_job(self, old: JobRecord | None, job: JobRecord) -> None:
        if old is not None and _is_indexed_alike(old, job):
            return
        number, is_final = job.number, job.state.is_finished
        if old is None and job.request_id:
            self.requests[job.user, job.request_id] = number
        if is_final:
            self.live.pop(number, None)
            self.finished[number] = None
        else:
            self.live[number] = None
        waits = self._index_queue(old, job)
        # Most of these sets are empty most of the time.
        if job.again_at or self.backing_off:
            _list(self.backing_off, number, job.again_at and job.state is _PENDING)
        if job.epoch or self.resuming:
            _list(self.resuming, number, waits and job.epoch)
        if job.spec.time_limit_seconds is not None or self.running_limited:
            is_limited = job.spec.time_limit_seconds is not None and job.state is JobState.HOLDING
            _list(self.running_limited, number, is_limited)
        if job.next_epoch or self.moving:
            _list(self.moving, number, job.next_epoch)

    def _index_queue(self, old: JobRecord | None, job: JobRecord) -> bool:
        """Update the queue for a job that was `old`; return whether the job waits."""
        number = job.number
        was, waits = old is not None and self.is_waiting(old), self.is_waiting(job)
        if old is not None and was and (not waits or old.spec is not job.spec):
            place = (*self.policy.key(old), number)
            self.waiting.remove(place)
            if number not in self.aside:
                self.front.remove(place)
            self.drop_turn(number)
            self._forget_refusals(number)
            for known in (self.conflicts, self.passed, self.declined, self.returned, self.promised, self.suggested):
                if known:
                    known.pop(number, None)
            if waits:
                # Its spec changed: it joins the queue anew, at the place that the new spec gives it.
                was, self.kept = False, None
        if waits and not was:
            if number in self.refusals:
                self.blocked = None
            place = (*self.policy.key(job), number)
            self.waiting.add(place)
            if number not in self.aside:
                self.front.add(place)
        return waits

    def index_strays(self, old: Node | None, node: Node) -> None:
        """Update `strays_of` (job uid to nodes) for a node that was `old`; None where it is new."""
        uids = {stray.uid for stray in node.strays if stray.holds_back}
        for stray in old.strays if old is not None else ():
            nodes = self.strays_of.get(stray.uid)
            if nodes is not None and stray.uid not in uids:
                nodes.pop(node.name, None)
                if not nodes:
                    del self.strays_of[stray.uid]
        for uid in uids:
            self.strays_of.setdefault(uid, {})[node.name] = None

    def _unindex_gang(self, gang: Gang) -> None:
        self.gangs_of[gang.job].remove(gang.epoch)
        if not self.gangs_of[gang.job]:
            del self.gangs_of[gang.job]
        for node in gang.nodes:
            self.gangs_on[node].pop(gang.epoch, None)
            if node not in self.nodes and not self.gangs_on[node]:
                del self.gangs_on[node]

    def _index_set(self, node_set: NodeSet) -> None:
        for row in node_set.rows:
            for epoch in row:
                self.set_of[epoch] = node_set.number
        for node in node_set.nodes:
            self.set_on[node] = node_set.number

    def _unindex_set(self, node_set: NodeSet) -> None:
        for row in node_set.rows:
            for epoch in row:
                self.set_of.pop(epoch, None)
        for node in node_set.nodes:
            self.set_on.pop(node, None)

    def _renew_set(self, *node_sets: NodeSet) -> None:
        for node_set in node_sets:
            for node in node_set.nodes:
                self.dirty.wants[node] = []

    def _renew_job(self, number: int) -> None:
        """Renew the orders of the job's gangs, which carry its spec and its checkpoints."""
        for epoch in self.gangs_of.get(number, ()):
            self.parties.pop(epoch, None)
            for node in self.gangs[epoch].nodes:
                self.dirty.wants[node] = []

    def _renew_peers(self, name: str) -> None:
        """Renew the desired state of nodes whose orders carry this node's addresses, which have changed."""
        for epoch in self.gangs_on[name]:
            self.parties.pop(epoch, None)
            for other in self._listeners(self.gangs[epoch]):
                self.dirty.wants[other] = []
        if name in self.set_on:
            self._renew_set(self.sets[self.set_on[name]])

    def _listeners(self, gang: Gang) -> list[str]:
        """Nodes whose orders name the addresses of this gang's members: its own, and those of a destination."""
        nodes = list(gang.nodes)
        for epoch in self.gangs_of.get(gang.job, ()):
            if self.gangs[epoch].restore.parked_epoch == gang.epoch:
                nodes.extend(self.gangs[epoch].nodes)
        return nodes


def _list(listed: dict[int, None], number: int, belongs: object) -> None:
    if belongs:
        listed[number] = None
    else:
        listed.pop(number, None)


def _is_indexed_alike(old: JobRecord, job: JobRecord) -> bool:
    """Return whether a change keeps the places of a job in all indexes, as most changes do."""
    return (
        old.state is job.state
        and old.ending is job.ending
        and old.epoch == job.epoch
        and old.next_epoch == job.next_epoch
        and old.again_at == job.again_at
        and old.spec is job.spec
        and old.held is job.held
    )


def _is_other_row(old: Node, node: Node) -> bool:
    """Return whether a change of a node affects its free pieces (`node_index.row_of`), besides what its gangs hold."""
    return (
        old.takes_gangs != node.takes_gangs
        or old.strays != node.strays
        or old.device_faults != node.device_faults
        or (old.configuration_set, old.rack, old.fabric) != (node.configuration_set, node.rack, node.fabric)
    )
