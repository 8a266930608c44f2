"""What a daemon's complete report changes: parts of gangs, checkpoints, quarantined gangs, the node itself."""

from __future__ import annotations

import math
from itertools import zip_longest
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from ganger_master.core import arrays, ending, gang_orders, idle_gpus, node_checkpoints, quarantine
from ganger_master.core.colocation import kept_memory_of, residue_of
from ganger_master.core.commands import Observe, ObservedGang
from ganger_master.core.events import CopiesNoted, NodeLost
from ganger_master.core.gang_model import (
    Gang,
    GangIntent,
    GangPhase,
    GangRole,
    ObservedPhase,
    Outcome,
    OutcomeKind,
    Piece,
)
from ganger_master.core.job_model import Capabilities, Checkpoint
from ganger_master.core.node_faults import cordon, note_faults
from ganger_master.core.node_model import Node, Stray
from ganger_master.core.state import State


def observe(state: State, report: Observe, now: float, cause: str) -> None:
    """Apply a report of the node's present session that is not older than the last one."""
    node = state.nodes[report.node]
    strays: list[Stray] = []
    acknowledged: list[int] = []
    seen: set[int] = set()
    for observed in sorted(report.gangs, key=_epoch_of) if len(report.gangs) > 1 else report.gangs:
        seen.add(observed.epoch)
        gang = state.gangs.get(observed.epoch)
        before = state.gangs.last_reports.get((report.node, observed.epoch))
        if gang is not None and before is not None and before[1] is gang and before[2] is state.jobs[gang.job]:
            former = before[0]
            if former is observed or former == observed:
                # Nothing new, of a gang that is what it was: most of what daemons report.
                continue
        piece = gang.piece(report.node) if gang is not None else None
        is_ours = gang is not None and (observed.job, observed.uid) == (gang.job, state.jobs[gang.job].uid)
        if gang is None or piece is None or not is_ours or (piece.gone and not piece.lost):
            if observed.checkpoint is not None:
                _learn_checkpoint(state, report.node, observed, observed.checkpoint, now)
            stray = _stray_of(state, node, observed)
            if stray is not None:
                strays.append(stray)
            elif observed.phase is ObservedPhase.ENDED:
                acknowledged.append(observed.epoch)
            continue
        _observe_part(state, node, gang, piece, observed, now)
        if observed.phase is _ENDED:
            acknowledged.append(observed.epoch)
            if observed.outcome.node_fault:
                cordon(state, report.node, f"{observed.outcome.node_fault} (jobs/{observed.job})", now, cause)
        else:
            key = report.node, observed.epoch
            state.gangs.last_reports[key] = (observed, state.gangs[gang.epoch], state.jobs[gang.job])
    # A daemon that has applied no desired state yet cannot have ended what it does not report.
    for epoch in sorted(state.gangs.places_on.get(report.node, ())) if report.desired_version else ():
        if epoch not in seen:
            _observe_absence(state, state.gangs[epoch], report)
    _note_quarantine(state, node, strays, now, cause)
    if report.rows:
        state.note_rows(report.node, report.rows)
    if not node.heard:
        state.history(now, f"nodes/{node.name}", "node_ready", cause)
    _note_node(state, node, report, tuple(strays), tuple(acknowledged))
    note_faults(state, node, state.nodes[node.name], now, cause)


def _observe_part(state: State, node: Node, gang: Gang, piece: Piece, observed: ObservedGang, now: float) -> None:
    if observed.presumed and state.jobs[gang.job].capabilities.known:
        # The capabilities that its ranks reported before stand until they report others.
        observed = replace(observed, capabilities=Capabilities())
    elif observed.presumed:
        observed = replace(observed, capabilities=replace(observed.capabilities, presumed=True))
    _observe_piece(state, gang, piece, observed, now)
    _learn(state, gang, node, observed, now)
    if observed.checkpoint is not None:
        _learn_checkpoint(state, node.name, observed, observed.checkpoint, now)


def _note_node(
    state: State, node: Node, report: Observe, strays: tuple[Stray, ...], acknowledged: tuple[int, ...]
) -> None:
    """Record what a report states about the node itself. `node`: as it was before the report."""
    is_as_before = node.heard and node.storage_proved == report.storage_proved and node.strays == strays
    is_as_before = is_as_before and node.device_warnings == report.device_warnings
    if is_as_before and node.device_faults == report.device_faults and node.faults == report.node_faults:
        state.note_report(node.name, report.observation, report.desired_version, acknowledged)
        return
    state.put_node(
        replace(
            state.nodes[report.node],
            heard=True,
            observation=report.observation,
            applied_version=report.desired_version,
            device_faults=dict(sorted(report.device_faults.items())),
            faults=dict(sorted(report.node_faults.items())),
            device_warnings=dict(sorted(report.device_warnings.items())),
            storage_proved=report.storage_proved,
            strays=strays,
            acknowledged=acknowledged,
        )
    )


_epoch_of: Final = attrgetter("epoch")
# To look up a member of an enumeration takes Python 3.11 as long as a call.
_ENDED: Final = ObservedPhase.ENDED


def lose(state: State, event: NodeLost) -> None:
    """Count every part on a lost node as gone for its job; its pieces stay held until the node reports otherwise."""
    name, reason = event.node, event.reason
    node = state.nodes[name]
    strays = tuple([_given_up(state, stray) for stray in node.strays])
    state.put_node(replace(node, lost=True, heard=False, silent=False, session="", state_reason=reason, strays=strays))
    _lose_parts(state, name, f"nodes/{name} is lost: {reason}")
    state.history(event.time, f"nodes/{name}", "node_lost", event.cause, reason)


def _given_up(state: State, stray: Stray) -> Stray:
    """Return the stray as one to stop: its job continues without it, should the node come back."""
    job = state.jobs.get(stray.job)
    is_ours = job is not None and job.uid == stray.uid
    return replace(stray, quarantined=False, is_ordered=False) if is_ours and stray.holds_back else stray


def change_hardware(state: State, name: str, wanted: str, now: float, cause: str) -> None:
    """Release all pieces of a node whose machine came back with other hardware. A gang that all the same is
    found there is stopped as that of any node that was taken for lost."""
    reason = f"was {state.nodes[name].configuration_set!r}, came back as {wanted!r}"
    _lose_parts(state, name, f"nodes/{name} {reason}")
    give_up(state, name)
    state.history(now, f"nodes/{name}", "node_changed", cause, reason)


def _lose_parts(state: State, name: str, message: str) -> None:
    outcome = Outcome(OutcomeKind.UNKNOWN, message=message)
    for epoch in sorted(state.gangs.places_on.get(name, ())):
        gang = state.gangs[epoch]
        piece = gang.piece(name)
        if piece is not None and not piece.gone:
            state.put_gang(_with_piece(gang, replace(piece, gone=True, lost=True, outcome=outcome)))


def give_up(state: State, name: str) -> None:
    """Release the pieces of parts that were lost with a node that does not come back."""
    for epoch in sorted(state.gangs.places_on.get(name, ())):
        gang = state.gangs[epoch]
        piece = gang.piece(name)
        if piece is not None and piece.lost:
            state.put_gang(_with_piece(gang, replace(piece, held=None, lost=False)))


_AS_REPORTED: Final = (
    "phase", "level", "stop_sequence", "stop_step", "trouble", "threads", "repin_done", "arena_bytes",
    "last_step_time", "first_step_time",
)  # fmt: skip


def _observe_piece(state: State, gang: Gang, piece: Piece, observed: ObservedGang, now: float) -> None:
    ended = observed.phase is _ENDED
    if piece.lost:
        # Its job went on without it: all that counts is that it goes.
        if ended:
            state.put_gang(_with_piece(gang, replace(piece, held=None, lost=False, phase=ObservedPhase.ENDED)))
        return
    outcome = piece.outcome
    if ended:
        outcome = observed.outcome
        if outcome.kind is OutcomeKind.NONE:
            outcome = Outcome(OutcomeKind.UNKNOWN, message="ended, and how was not recorded")
    fresh = replace(
        piece,
        **{name: getattr(observed, name) for name in _AS_REPORTED},
        master_sequence=max(piece.master_sequence, observed.master_sequence),
        pids=observed.pids or piece.pids,
        launch_time=piece.launch_time or (now if observed.pids else 0.0),
        cores=observed.cores or piece.cores,
        residue_bytes=residue_of(state, gang, piece, observed),
        kept_memory_bytes=kept_memory_of(piece, observed),
        capabilities=observed.capabilities if observed.capabilities.known else piece.capabilities,
        gone=piece.gone or ended,
        held=None if ended else piece.held,
        outcome=outcome,
        idle_since=idle_gpus.piece_idle_since(state, gang, piece, observed, now),
    )
    gang = idle_gpus.noted(state, _with_piece(gang, fresh), now)
    if observed.master_sequence > gang.master_sequence and not fresh.gone:
        # An order that a restored database does not contain. The gang obeys only a later one.
        gang = gang_orders.begin_anew(replace(gang, master_sequence=observed.master_sequence))
    state.put_gang(gang)
    if fresh.trouble and not piece.trouble and not fresh.gone and gang.intent is GangIntent.RUN:
        node = piece.claim.node
        state.history(
            now, state.jobs[gang.job], "trouble", f"daemon:{node}", fresh.trouble, epoch=gang.epoch, node=node
        )


def _observe_absence(state: State, gang: Gang, report: Observe) -> None:
    """Count a part that is not reported as gone if the version that the daemon has applied contained it.

    An older version decides nothing: the daemon may not have received the gang, or may have just restarted. It then
    gets the gang without a spec, and cannot start it."""
    piece = gang.piece(report.node)
    if piece is None or (piece.gone and not piece.lost):
        return
    if not 0 < piece.wanted_from <= report.desired_version:
        return
    if piece.lost:
        state.put_gang(_with_piece(gang, replace(piece, held=None, lost=False)))
        return
    outcome = Outcome(OutcomeKind.UNKNOWN, message=f"nodes/{report.node} knows nothing of it any more")
    state.put_gang(_with_piece(gang, replace(piece, gone=True, held=None, outcome=outcome)))


def _learn(state: State, gang: Gang, node: Node, observed: ObservedGang, now: float) -> None:
    """Record peak memory, capabilities and progress, from the job's present gangs only."""
    job = state.jobs[gang.job]
    if gang.epoch not in (job.epoch, job.next_epoch) or job.state.is_finished:
        return
    fresh, peak = job, observed.peak_device_bytes
    if peak:
        used = min(peak, state.nodes.configuration_sets[node.configuration_set].device_memory_bytes or peak)
        fresh = replace(
            job, peak_device_bytes=max(job.peak_device_bytes, peak), used_device_bytes=max(job.used_device_bytes, used)
        )
    if observed.phase is ObservedPhase.RUNNING and observed.working_set_bytes and len(job.spec.roles) == 1:
        piece = gang.piece(node.name)
        tasks = piece.claim.tasks[0] if piece is not None else 1
        largest = max(job.working_set_bytes, -(-observed.working_set_bytes // tasks))
        fresh = replace(fresh, working_set_bytes=largest)
    is_unchanged = observed.capabilities == job.capabilities and len(gang.pieces) == 1
    if observed.capabilities.known and not is_unchanged and gang.role is not GangRole.DESTINATION:
        # What an earlier attempt did in its turn is not for this one to deny.
        common = _common(state.gangs[gang.epoch]).without_turns(job.capabilities.no_turns)
        common = common.without(job.capabilities.withdrawn)
        if job.spec.has_role_ranges:
            is_before_steps = gang.phase is GangPhase.STARTING and observed.phase is not ObservedPhase.RUNNING
            before = job.capabilities if is_before_steps else Capabilities()
            common = _known_by_role(common, state.gangs[gang.epoch], before)
        if common != fresh.capabilities:
            fresh = replace(fresh, capabilities=common)
    if observed.progress is not None and ending.is_newer(observed.progress, fresh.progress):
        fresh = replace(fresh, progress=replace(observed.progress, time=now))
    if fresh is not job and fresh != job:
        state.put_job(fresh)
        is_new = fresh.progress is not None and fresh.progress is not job.progress
        if observed.phase is _ENDED and fresh.spec.array is not None and fresh.progress is not None and is_new:
            arrays.learn(state, fresh, fresh.progress, now)
    if fresh.arena_bytes_per_device:
        state.dirty.arenas[job.number] = None


def _learn_checkpoint(state: State, node: str, observed: ObservedGang, checkpoint: Checkpoint, now: float) -> None:
    """Record a complete checkpoint, whichever attempt wrote it, also one whose node was cut off then."""
    job = state.jobs.get(observed.job)
    if job is None or job.uid != observed.uid or job.state.is_finished:
        return
    if observed.epoch >= state.counters.next_epoch or checkpoint.path in job.unreadable:
        return
    # The nodes of a gang can be checked only while the gang is kept.
    gang = state.gangs.get(observed.epoch)
    if gang is not None and (gang.job != job.number or node not in gang.nodes):
        return
    # It would be the newest for ever.
    if checkpoint.epoch > observed.epoch:
        return
    checkpoint = replace(checkpoint, nodes=tuple([name for name in checkpoint.nodes if name in state.nodes]))
    known = job.checkpoint
    if known is None or ending.is_newer(checkpoint, known):
        ending.record(state, job, checkpoint, now, f"epoch:{observed.epoch}")
    elif known.nodes:
        # It is reported once it is published, and again once another node has a copy.
        state.put_job(node_checkpoints.with_copies(job, checkpoint.path, checkpoint.nodes))


def note_copies(state: State, event: CopiesNoted) -> None:
    """Record that a node's disk has further copies of checkpoints, as a daemon that starts from one fetches it."""
    for number, path in event.copies:
        state.put_job(node_checkpoints.with_copies(state.jobs[number], path, [event.node]))


def _common(gang: Gang) -> Capabilities:
    known = [piece.capabilities for piece in gang.pieces if piece.capabilities.known]
    if known and not known[0].missing and known.count(known[0]) == len(known):
        # All report the same, as nearly always.
        return known[0]
    weakest = max(known, key=lambda capabilities: capabilities.mechanism, default=Capabilities())
    return Capabilities(
        all(capabilities.pause for capabilities in known),
        all(capabilities.offload for capabilities in known),
        all(capabilities.checkpoint for capabilities in known),
        {level: why for capabilities in known for level, why in sorted(capabilities.missing.items())},
        known=True,
        resize=all(capabilities.resize for capabilities in known),
        resize_divides=math.gcd(*[capabilities.resize_divides for capabilities in known]),
        role_divides=tuple(
            [math.gcd(*one) for one in zip_longest(*[each.role_divides for each in known], fillvalue=0)]
        ),
        reshard=all(capabilities.reshard for capabilities in known),
        presumed=any(capabilities.presumed for capabilities in known),
        mechanism=weakest.mechanism,
        refused_mechanisms=weakest.refused_mechanisms,
        offload_by=next((capabilities.offload_by for capabilities in known if capabilities.offload_by), ""),
    )


def _known_by_role(common: Capabilities, gang: Gang, before: Capabilities) -> Capabilities:
    """Return the capabilities of a job with ranges of roles. Daemons of the former release report none by role: they
    neither record the roles of a checkpoint nor start from one of another number of ranks. `before`: of a job
    that starts again, those that it had: its script may have made no loader yet."""
    if before.starts_at_any_size and not common.starts_at_any_size:
        missing = {level: why for level, why in common.missing.items() if level != "RESIZE"}
        sizes = {"resize": before.resize, "reshard": before.reshard, "role_divides": before.role_divides}
        return replace(common, missing=missing, **sizes)
    known = [piece.capabilities for piece in gang.pieces if piece.capabilities.known]
    if not common.starts_at_any_size or all(capabilities.role_divides for capabilities in known):
        return common
    missing = {**common.missing, "RESIZE": "a daemon of its nodes is older than the master, and cannot do that"}
    return replace(common, resize=False, reshard=False, missing=missing)


def _stray_of(state: State, node: Node, observed: ObservedGang) -> Stray | None:
    """Return None for one that has ended and needs no decision: the daemon may forget it."""
    job = state.jobs.get(observed.job)
    is_ours = job is not None and job.uid == observed.uid
    is_known = is_ours and not quarantine.is_skipped(state, observed.epoch)
    before = next((s for s in node.strays if (s.uid, s.epoch) == (observed.uid, observed.epoch)), None)
    is_quarantined = before.quarantined if before is not None else not is_ours
    if observed.phase is ObservedPhase.ENDED and not is_quarantined:
        return None
    note = "an older epoch" if is_known else "an unknown job or an epoch from the future"
    return quarantine.stray_of(observed, not is_known, note, before)


def _note_quarantine(state: State, node: Node, strays: list[Stray], now: float, cause: str) -> None:
    if not strays:
        return
    before = {(stray.uid, stray.epoch) for stray in node.strays}
    for stray in strays:
        if (stray.uid, stray.epoch) not in before:
            kind = "gang_quarantined" if stray.quarantined else "stale_gang_found"
            state.history(
                now, f"nodes/{node.name}", kind, cause, stray.note, job=f"jobs/{stray.job}", epoch=stray.epoch
            )


def _with_piece(gang: Gang, fresh: Piece) -> Gang:
    pieces = tuple(fresh if piece.claim.node == fresh.claim.node else piece for piece in gang.pieces)
    return replace(gang, pieces=pieces)
