"""The gangs and the time-slice groups, with what follows from them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from ganger.cluster.resources import Claim

from ganger_master.core.commands import ObservedGang, ObservedRows
from ganger_master.core.gang_model import Gang, NodeSet
from ganger_master.core.job_model import JobRecord


class GangIndex(dict[int, Gang]):
    """The gangs by epoch, and indexes of them.

    epochs_of: by job, ascending. places_on: by node and epoch, in the order of epochs, which of the gang's pieces is
    there. sets: the time-slice groups by number. set_of, set_on: the group of an epoch and of a node. last_reports: by
    node and epoch the last report of a gang, and gang and job as it left them. rows_seen: by group and node the last
    report of its time slices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epochs_of: dict[int, list[int]] = {}
        self.places_on: dict[str, dict[int, int]] = {}
        self.sets: dict[int, NodeSet] = {}
        self.set_of: dict[int, int] = {}
        self.set_on: dict[str, int] = {}
        self.last_reports: dict[tuple[str, int], tuple[ObservedGang, Gang, JobRecord]] = {}
        self.rows_seen: dict[tuple[int, str], ObservedRows] = {}

    def of_job(self, number: int) -> list[Gang]:
        """Return all gangs of a job that still have something somewhere, oldest first."""
        return list(map(self.__getitem__, self.epochs_of.get(number, ())))

    def held_on(self, node: str) -> list[Claim]:
        """Return what the gangs of a node hold there, by epoch."""
        held = [self[epoch].pieces[place].held for epoch, place in self.places_on.get(node, {}).items()]
        return [claim for claim in held if claim is not None]

    def held_and_affinity(self, node: str) -> tuple[list[Claim], int]:
        """Return `held_on` and `affinity_of` at once: every node of a gang that comes or goes needs both."""
        held: list[Claim] = []
        affinity = 0
        for epoch, place in self.places_on.get(node, {}).items():
            gang = self[epoch]
            claim = gang.pieces[place].held
            if claim is not None:
                held.append(claim)
                if not affinity and claim.device_mask:
                    affinity = gang.devices
        return held, affinity

    def living_on(self, node: str) -> list[Gang]:
        """Return the gangs that may have something on a node, by epoch. What was there when it was lost is gone."""
        places = self.places_on.get(node, {}).items()
        return [self[epoch] for epoch, place in places if not self[epoch].pieces[place].gone]

    def affinity_of(self, node: str) -> int:
        """Return the devices of the oldest gang that holds some on a node; zero when it is idle."""
        for epoch, place in self.places_on.get(node, {}).items():
            gang = self[epoch]
            held = gang.pieces[place].held
            if held is not None and held.device_mask:
                return gang.devices
        return 0

    def listeners(self, gang: Gang) -> list[str]:
        """Return the nodes whose orders name the addresses of this gang: its own, and those of a destination."""
        nodes = list(gang.nodes)
        for other in self.of_job(gang.job):
            if other.restore.parked_epoch == gang.epoch:
                nodes.extend(other.nodes)
        return nodes

    def place(self, node: str, epoch: int, place: int) -> bool:
        """Record that piece number `place` of a new gang is on a node. Return whether no gang there is newer."""
        there = self.places_on.setdefault(node, {})
        is_newest = not there or epoch > next(reversed(there))
        there[epoch] = place
        if not is_newest:
            # An adopted gang may be older than those that are there.
            self.places_on[node] = dict(sorted(there.items()))
        return is_newest

    def index(self, gang: Gang) -> None:
        insort(self.epochs_of.setdefault(gang.job, []), gang.epoch)

    def forget(self, epoch: int, known_nodes: Iterable[str]) -> Gang:
        """Remove a gang and return it. known_nodes: those whose entries stay although no gang is left there."""
        gang = self.pop(epoch)
        self.epochs_of[gang.job].remove(epoch)
        if not self.epochs_of[gang.job]:
            del self.epochs_of[gang.job]
        for node in gang.nodes:
            self.places_on[node].pop(epoch, None)
            if node not in known_nodes and not self.places_on[node]:
                del self.places_on[node]
            self.last_reports.pop((node, epoch), None)
        return gang

    def note_report(self, node: str, report: ObservedGang, gang: Gang, job: JobRecord) -> None:
        self.last_reports[node, report.epoch] = (report, gang, job)

    def put_set(self, node_set: NodeSet) -> None:
        old = self.sets.get(node_set.number)
        if old is not None:
            self._unindex_set(old)
        self.sets[node_set.number] = node_set
        for row in node_set.rows:
            for epoch in row:
                self.set_of[epoch] = node_set.number
        for node in node_set.nodes:
            self.set_on[node] = node_set.number

    def forget_set(self, number: int) -> NodeSet:
        node_set = self.sets.pop(number)
        self._unindex_set(node_set)
        for node in node_set.nodes:
            self.rows_seen.pop((number, node), None)
        return node_set

    def note_rows(self, node: str, rows: ObservedRows) -> bool:
        """Record what a node reports of the slices of a group; return whether that is news."""
        key = rows.node_set, node
        if rows.node_set not in self.sets or self.rows_seen.get(key) == rows:
            return False
        self.rows_seen[key] = rows
        return True

    def _unindex_set(self, node_set: NodeSet) -> None:
        for row in node_set.rows:
            for epoch in row:
                self.set_of.pop(epoch, None)
        for node in node_set.nodes:
            self.set_on.pop(node, None)
