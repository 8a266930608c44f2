"""What a master finds in its store, as a state to go on from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ganger.cluster.resources import ConfigurationSet
from ganger.cluster.view import LoadMode
from msgspec.structs import replace

from ganger_master.core.changes import ELEMENT_TYPES, Dirty
from ganger_master.core.desired_state import project
from ganger_master.core.model import Counters, Element, Gang, JobRecord, Node, NodeSet, Request
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State

_KINDS: Final = {element: kind for kind, element in ELEMENT_TYPES.items()}


def restored(settings: CoreSettings, elements: Iterable[Element], now: float, former: State | None = None) -> State:
    """The state of those elements. Sessions are void and free pieces unknown until each node's first report, unless
    this is the master that has them from `former`, and has lost no more than what it did not store since: its sessions
    go on, and what nodes said of their rows stands. It owes a tick that looks again."""
    state = State(settings, now)
    by_kind: dict[str, list[Element]] = {kind: [] for kind in ELEMENT_TYPES}
    for element in elements:
        by_kind[_KINDS[type(element)]].append(element)
    for configuration_set in by_kind["configuration_set"]:
        assert isinstance(configuration_set, ConfigurationSet)
        state.put_configuration_set(configuration_set)
    for counters in by_kind["counters"]:
        assert isinstance(counters, Counters)
        state.counters = replace(counters)
        state.view.version = counters.view_version
        state.view.mode = LoadMode.PACK if counters.packs else LoadMode.SPREAD
    for node in by_kind["node"]:
        assert isinstance(node, Node)
        _put_node(state, node, now, former)
    for gang in sorted((g for g in by_kind["gang"] if isinstance(g, Gang)), key=lambda gang: gang.epoch):
        state.put_gang(gang)
    for job in sorted((j for j in by_kind["job"] if isinstance(j, JobRecord)), key=lambda job: job.number):
        state.put_job(job)
    state.finished = dict.fromkeys(sorted(state.finished, key=lambda number: state.jobs[number].end_time))
    for node_set in by_kind["node_set"]:
        assert isinstance(node_set, NodeSet)
        state.put_set(node_set)
    for request in sorted((r for r in by_kind["request"] if isinstance(r, Request)), key=lambda one: one.time):
        state.former[request.user, request.request_id] = request
    for name in sorted(state.nodes):
        node = state.nodes[name]
        state.refresh_row(name)
        state.desired[name] = project(state, node, state.counters.desired_version)
    if former is not None:
        state.rows_seen = {key: rows for key, rows in former.rows_seen.items() if key[0] in state.sets}
    state.take_changes()
    state.dirty = Dirty()
    return state


def _put_node(state: State, node: Node, now: float, former: State | None) -> None:
    if former is None:
        state.put_node(replace(node, session="", heard=False, silent=False, unanswerable=""))
        if not node.lost:
            state.note_answer(node.name, now)
        return
    known = former.nodes.get(node.name)
    if known is not None and known.session == node.session:
        # Of reports that changed nothing the store knows nothing; older ones may still be under way. Who is silent may
        # be what could not be stored: to say so again would fail again.
        node = replace(node, observation=known.observation, applied_version=known.applied_version, silent=known.silent)
    state.put_node(node)
    if not node.lost:
        state.note_answer(node.name, former.last_answer.get(node.name, now))
        # Some may be silent for longer than the first: looked at with the next tick.
        state.next_silence_check = now
