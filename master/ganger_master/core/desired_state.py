"""The desired state of each node: a pure projection of the state, made once per batch for the nodes that were touched.

A node's version rises exactly when its set changes; versions are drawn from one counter, so that nothing of a node must
become durable for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ganger.cluster.resources import Claim
from msgspec.structs import replace

from ganger_master.core.commands import ObservedGang
from ganger_master.core.desired_projection import DesiredGang, DesiredSet, DesiredSlices, GangMember, Party, Projected
from ganger_master.core.gang_model import Gang, GangIntent, ObservedPhase
from ganger_master.core.node_model import Node, Stray
from ganger_master.core.state import State


def project(state: State, node: Node, version: int = 0) -> DesiredSet:
    """Return the gangs that the node is to have now, by epoch, and the strays that it is to stop.

    During a restore the set is empty and of version zero, with which a daemon begins: it changes nothing then."""
    if state.counters.restoring is not None:
        report = state.reports.get(node.name)
        state.desired.projected[node.name] = {}
        return DesiredSet(describe=() if report is None else undescribed(report.report.gangs))
    known = state.desired.projected.get(node.name, {})
    fresh: dict[int, Projected] = {}
    for epoch, place in state.gangs.places_on.get(node.name, {}).items():
        gang = state.gangs[epoch]
        piece = gang.pieces[place]
        # A lost piece counts as gone for its job, but is to be stopped should the node come back.
        if not piece.gone or piece.lost:
            party, before = party_of(state, gang), known.get(epoch)
            fresh[epoch] = before if before is not None and before.party is party else Projected(party, place)
    state.desired.projected[node.name] = fresh
    strays = [_desired_stray(state, node.name, stray) for stray in node.strays if not stray.quarantined]
    describe = tuple(
        [
            stray.epoch
            for stray in node.strays
            if stray.quarantined and stray.told is None and stray.phase is not ObservedPhase.ENDED
        ]
    )
    rows = rows_on(state, node.name)
    return DesiredSet(version, tuple(fresh.values()), node.acknowledged, tuple(strays), rows, describe)


def undescribed(gangs: Iterable[ObservedGang]) -> tuple[int, ...]:
    """Return the epochs of living gangs whose orders the daemon has not sent yet."""
    return tuple(sorted({gang.epoch for gang in gangs if gang.told is None and gang.phase is not ObservedPhase.ENDED}))


def rows_on(state: State, node: str) -> tuple[DesiredSlices, ...]:
    """Return the slice matrices of a node: that of the one group it is in."""
    number = state.gangs.set_on.get(node)
    if number is None:
        return ()
    node_set = state.gangs.sets[number]
    others = [name for name in node_set.nodes if name != node_set.leader]
    members = []
    for name in (node_set.leader, *others):
        known = state.nodes.get(name)
        members.append(GangMember(name, known.peer_address if known else "", known.stream_address if known else "", ()))
    return (DesiredSlices(number, node_set.set_epoch, node_set.newest, tuple(members)),)


def refresh(state: State) -> list[str]:
    """Project the nodes that were touched; those whose set differs get one new version. Return their names."""
    if not state.unstored.is_kept:
        state.dirty.wants.clear()
        return []
    version = state.counters.desired_version + 1
    changed = []
    if state.counters.restoring is not None:
        changed = [name for name in state.dirty.wants if name in state.nodes]
        state.desired.update({name: project(state, state.nodes[name]) for name in changed})
        state.dirty.wants.clear()
        return changed
    for name in state.dirty.wants:
        node = state.nodes.get(name)
        if node is None:
            continue
        old = state.desired.of(name)
        new = project(state, node, version)
        is_same = new.is_like(old)
        state.desired[name] = replace(new, version=old.version) if is_same else new
        # A daemon that has just opened a session may have lost its gangs: their specs are not sent again.
        if not is_same or not node.heard:
            changed.append(name)
    state.dirty.wants.clear()
    if changed:
        state.counters.desired_version = version
    return changed


def party_of(state: State, gang: Gang) -> Party:
    known = state.desired.parties.get(gang.epoch)
    parked = state.gangs.get(gang.restore.parked_epoch) if gang.restore.parked_epoch else None
    source = party_of(state, parked) if parked is not None else None
    if known is None or known.gang is not gang or known.source is not source:
        nodes = [state.nodes.get(piece.claim.node) for piece in gang.pieces]
        job = state.jobs[gang.job]
        curve = state.cores_curves.get(job.number) if job.epoch == gang.epoch else None
        tried = 0 if curve is None else curve.trial_memory_bytes
        known = Party(gang, job, state.settings, nodes, source, tried)
        state.desired.parties[gang.epoch] = known
    return known


def _desired_stray(state: State, node: str, stray: Stray) -> DesiredGang:
    return DesiredGang(
        job=stray.job,
        uid=stray.uid,
        epoch=stray.epoch,
        master_sequence=stray.master_sequence,
        intent=GangIntent.STOP,
        claim=stray.told.claim if stray.told is not None else Claim(node, stray.device_mask, (), 0),
        grace_s=state.settings.grace_s if stray.is_ordered else 0.0,
        needs_spec=False,
    )
