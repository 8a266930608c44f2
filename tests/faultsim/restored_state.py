"""Is what a restarted master makes of its store what the former one had in mind? Compared attribute by attribute.

Everything that a state holds is compared but what is named here as volatile, so a new field is compared unless a line
says why not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ganger_master.core.desired_projection import DesiredProjection, DesiredSet
from ganger_master.core.events import Unstored
from ganger_master.core.queue import JobQueue, LeaseTable
from ganger_master.core.state import State
from ganger_master.core.state_indexes import GangIndex, JobIndex, NodeIndex, UsageIndex
from msgspec import Struct
from msgspec.structs import replace

PARTS: Final = (DesiredProjection, GangIndex, JobIndex, JobQueue, LeaseTable, NodeIndex, Unstored, UsageIndex)
# What a master forgets: heartbeats, refusals and offers with their times; the next batch's work; what is for speed
# alone (`parties`, `projected`, `closures`, `kept`, `blocked`); and that it was started.
VOLATILE: Final = frozenset(
    {
        "settings", "policy", "started",
        "reports", "ends", "last_answer", "last_reports", "rows_seen", "left_by",
        "next_silence_check", "drained_in_vain", "reservation_at",
        "aside", "aside_from", "aside_at",
        "refusals", "lacking", "blocked", "conflicts", "kept", "leases", "turn_of", "next_turn", "passed", "declined",
        "lost_turns", "returned", "claimed_by", "ranks", "ranked_by", "kept_by_plan", "kept_by_plan_at", "wake_at",
        "cores_curves", "parties", "projected", "closures",
        "dirty", "is_kept", "history", "_puts", "_removes", "_counters_taken",
    }
)  # fmt: skip


def differences(live: State, restored: State) -> list[str]:
    """One sentence per difference. `restored` is used up: its nodes are given what the live ones have said."""
    for name, node in live.nodes.items():
        stored = restored.nodes.get(name)
        if stored is None:
            continue
        said = {"observation": stored.observation, "applied_version": stored.applied_version}
        if stored == replace(node, session="", heard=False, silent=False, unanswerable="", **said):
            restored.put_node(node)
            restored.refresh_row(name)
    found = []
    mine_of, theirs_of = attributes(live), attributes(restored)
    for name in sorted(mine_of.keys() - VOLATILE):
        mine, theirs = (_comparable(name, one, of[name]) for one, of in ((live, mine_of), (restored, theirs_of)))
        if mine != theirs:
            found.append(f"{name}: {_difference(mine, theirs)}")
    return found


def attributes(state: State) -> dict[str, Any]:
    """Return the values of a state by name: its own, and those of the parts that it owns."""
    found: dict[str, Any] = {}
    for name, value in vars(state).items():
        if type(value) in PARTS:
            if isinstance(value, dict):
                found[name] = dict(value)
            found.update(vars(value))
        else:
            found[name] = value
    return found


def _comparable(name: str, state: State, value: Any) -> object:
    if name == "view":
        return {"mode": state.view.mode, **state.rows}
    if name == "waiting":
        return list(state.queue.waiting)
    if name == "front":
        # No refusals yet.
        return None
    if name == "charges":
        return vars(state.jobs.charges)
    if name == "counters":
        # The view of a restarted master has had other versions.
        return replace(value, view_version=0)
    if name == "desired":
        return {node: _wanted(state, one) for node, one in value.items()}
    if name == "places_on":
        return {node: list(places.items()) for node, places in value.items()}
    return value


def _wanted(state: State, desired: DesiredSet) -> object:
    """Without its version. Where a gang's state came from is not said any more once nothing is left there; but those
    that were notified are not notified again."""
    gangs = [
        one
        if one.restore.parked_epoch in state.gangs
        else replace(one, restore=replace(one.restore, parked_members=()))
        for one in desired.gangs
    ]
    return gangs, desired.acknowledged_epochs, desired.rows


def _difference(mine: object, theirs: object) -> str:
    """The first place where they differ."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        if mine.keys() != theirs.keys():
            return f"{list(mine)} are restored as {list(theirs)}"
        key = next(key for key in mine if mine[key] != theirs[key])
        return f"{key}: {_difference(mine[key], theirs[key])}"
    if isinstance(mine, Struct) and type(mine) is type(theirs):
        names = [name for name in mine.__struct_fields__ if getattr(mine, name) != getattr(theirs, name)]
        return f"{names[0]}: {_difference(getattr(mine, names[0]), getattr(theirs, names[0]))}"
    if isinstance(mine, (tuple, list)) and isinstance(theirs, (tuple, list)) and len(mine) == len(theirs):
        place = next(place for place, one in enumerate(mine) if one != theirs[place])
        return f"[{place}] {_difference(mine[place], theirs[place])}"
    return f"{mine} is restored as {theirs}"
