"""A database that was restored from a backup: detection, and the wait for the reports of all nodes.

Jobs have ended, started and moved since the copy was made. Until every node has reported what it runs, the master
starts, stops and changes nothing and sends no orders. Then it settles everything at once (`core.restore_settlement`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from msgspec.structs import replace

from ganger_master.core import commands, events, quarantine
from ganger_master.core.answers import Done, RefusedError
from ganger_master.core.commands import FinishedGang, Marks, Observe, ObservedGang
from ganger_master.core.events import Decision
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.gang_orders import undescribed
from ganger_master.core.node_model import Counters, PendingRestore
from ganger_master.core.state import RestoreReport, State

# Gangs of one job, by epoch and node: those that live, and those that have ended.
LiveGangs: TypeAlias = dict[int, dict[str, ObservedGang]]
EndedGangs: TypeAlias = dict[int, dict[str, FinishedGang]]
# How long a daemon has to describe the orders of its gangs: the longest time between two of its calls.
_DESCRIBED_S: Final = 5.0
# Versions of orders that nodes may have received since the copy was made are not given again.
_VERSIONS_SKIPPED: Final = 1 << 40
_NAMED: Final = 8
# Commands that are decided during a restore.
_ALWAYS: Final = (
    commands.OpenSession,
    commands.Observe,
    commands.Answer,
    commands.OpenStore,
    commands.NoteEnds,
    commands.GoOn,
    commands.ClaimTurns,
    commands.Tick,
)


def decide_open(state: State, command: commands.OpenStore, now: float) -> Decision:
    counters, marks = state.counters, command.marks
    name = counters.store or command.name
    is_used = bool(counters.store)
    why = ""
    if counters.restoring is not None:
        # Its nodes have to report again: what they reported to the former master is lost, or older than this copy.
        why = counters.restoring.why
    elif command.is_restored:
        why = "the operator says so"
    elif marks is not None and marks.store == counters.store and is_used and _is_behind(counters, marks):
        why = f"the file beside it has event {marks.next_event - 1}, and it ends with {counters.next_event - 1}"
    elif marks is None and is_used and command.must_have_marks:
        why = "the file that belongs beside it is not there"
    if not why and is_used:
        return (), Done()
    event = events.StoreOpened(now, "master", name, why, marks if why and marks is not None else commands.NO_MARKS)
    return (event,), Done()


def _is_behind(counters: Counters, marks: Marks) -> bool:
    return any(getattr(marks, name) > getattr(counters, name) for name in _COUNTED)


_COUNTED: Final = ("desired_version", "next_epoch", "next_job", "next_event", "next_session", "next_set")


def found_by_daemon(state: State, command: commands.OpenSession) -> str:
    """Return why what a daemon has seen shows that the database is an older copy; empty if it does not."""
    seen, counters = command.seen, state.counters
    if counters.restoring is not None or not seen.store or seen.store != counters.store:
        return ""
    if seen.desired_version <= counters.desired_version:
        return ""
    ends = counters.desired_version
    return f"nodes/{command.node} has had orders of version {seen.desired_version}, and it ends with {ends}"


def open_store(state: State, event: events.StoreOpened) -> None:
    counters, marks = state.counters, event.marks
    counters.store = event.store
    if not event.why:
        return
    quarantine.note_ids(state, marks.next_epoch, marks.next_job)
    for name in ("desired_version", "next_event", "next_session", "next_set"):
        setattr(counters, name, max(getattr(counters, name), getattr(marks, name)))
    # Beyond any version that a daemon can have: one that calls late does not begin another restore.
    counters.desired_version += _VERSIONS_SKIPPED
    counters.restoring = PendingRestore(event.time, event.why)
    state.reports.clear()
    state.ends = None
    state.leases.drop_all()
    state.queue.kept_by_plan = {}
    for node in list(state.nodes.values()):
        # Each daemon that has received orders is to report anew what it has.
        state.put_node(replace(node, session="", heard=False, silent=False))
        state.dirty.wants[node.name] = None
    state.history(event.time, "cluster", "restore_noticed", event.cause, event.why)


def check_may_decide(state: State, command: commands.Command) -> None:
    """Raise RefusedError for a command that is not decided during a restore."""
    if state.counters.restoring is None or isinstance(command, _ALWAYS):
        return
    missing = awaited(state)
    names = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
    waits = f"waits for what these nodes run: {names}" if missing else "settles what it has found"
    text = (
        f"the master's database was restored from a backup, and the master {waits}: try again, or start the nodes' "
        "daemons; an operator goes on without them with `ganger nodes quarantine go-on`"
    )
    raise RefusedError("RESTORING", text, {"nodes": names[:_TEXT_MOST]})


_TEXT_MOST: Final = 250


def awaited(state: State) -> list[str]:
    """Return the nodes that have not reported yet, in order."""
    return [name for name in sorted(state.nodes) if name not in state.reports]


def note_report(state: State, report: Observe, now: float) -> None:
    """Keep a node's complete report until everything is settled, with what the session has described before: a daemon
    describes an order only when it is asked to."""
    note_reported_ids(state, report)
    earlier = state.reports.get(report.node)
    described = {gang.epoch: gang.newest_order for gang in report.gangs if gang.newest_order is not None}
    state.reports[report.node] = RestoreReport(now, report, {**(earlier.described if earlier else {}), **described})
    state.dirty.wants[report.node] = None


def completed_reports(state: State) -> dict[str, Observe]:
    """Return the newest report of each node that has reported, with all that it has described."""
    return {name: _completed(one) for name, one in sorted(state.reports.items()) if name in state.nodes}


def _completed(reported: RestoreReport) -> Observe:
    """Return the report; a gang that it does not describe has its description of before, if its order is the same."""
    gangs = []
    for gang in reported.report.gangs:
        order = reported.described.get(gang.epoch)
        is_same = gang.newest_order is None and order is not None and order.master_sequence == gang.master_sequence
        gangs.append(replace(gang, newest_order=order) if is_same else gang)
    return replace(reported.report, gangs=tuple(gangs))


def by_job(reports: Mapping[str, Observe]) -> tuple[dict[str, LiveGangs], dict[str, EndedGangs]]:
    """Return the gangs that nodes report, by the uid of their job: those that live, and those that have ended."""
    alive: dict[str, LiveGangs] = {}
    over: dict[str, EndedGangs] = {}
    for name, report in reports.items():
        for gang in report.gangs:
            if gang.phase is ObservedPhase.ENDED:
                nodes = len(gang.newest_order.nodes) if gang.newest_order is not None else 0
                part = FinishedGang(
                    gang.job, gang.uid, gang.epoch, gang.outcome, nodes, gang.checkpoint, gang.has_stepped
                )
                over.setdefault(gang.uid, {}).setdefault(gang.epoch, {})[name] = part
            else:
                alive.setdefault(gang.uid, {}).setdefault(gang.epoch, {})[name] = gang
        for part in report.finished:
            over.setdefault(part.uid, {}).setdefault(part.epoch, {})[name] = part
    return alive, over


def note_reported_ids(state: State, report: Observe) -> None:
    """Mark the ids in a report as given, so that none of them is given again."""
    ids = [(gang.epoch, gang.job) for gang in report.gangs]
    ids += [(gang.epoch, gang.job) for gang in report.finished]
    if ids:
        quarantine.note_ids(state, max(epoch for epoch, _ in ids) + 1, max(job for _, job in ids) + 1)


def next_time(state: State, now: float) -> float | None:
    """Return when the restore may be settled although reports are missing; None where only a report can settle it."""
    restoring = state.counters.restoring
    assert restoring is not None, "called only during a restore"
    times = [restoring.since + state.settings.restored_wait_s]
    times += [one.time + _DESCRIBED_S for one in state.reports.values() if undescribed(one.report.gangs)]
    if state.lost_after is not None:
        times.append(restoring.since + max(state.lost_after, state.settings.restored_wait_s))
    return min([time for time in times if time > now], default=None)


def is_complete(state: State, now: float) -> bool:
    """Return whether the ends on storage are read and every node has reported. A node that has not called for
    lost_after counts as lost, for its ranks no longer step."""
    restoring = state.counters.restoring
    if restoring is None or state.ends is None or now < restoring.since + state.settings.restored_wait_s:
        return False
    given_up = state.lost_after is not None and now >= restoring.since + state.lost_after
    if awaited(state) and not given_up:
        return False
    return all(not undescribed(one.report.gangs) or now >= one.time + _DESCRIBED_S for one in state.reports.values())


def decide_go_on(state: State, command: commands.GoOn, now: float) -> Decision:
    if state.counters.restoring is None:
        text = "the master does not wait: its database was not restored, or what nodes run is settled already"
        raise RefusedError("NOT_RESTORING", text)
    return (events.RestoreSettled(now, f"user:{command.user}"),), Done()
