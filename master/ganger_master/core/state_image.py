"""A state as plain values, and the state restored from them: it decides as the first one would have.

An image has more than a store keeps, because a restart voids sessions and forgets leases, refusals and reserved places.
What can be derived is derived again. The state that a master finds in its store is restored here, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import ConfigurationSet
from ganger.cluster.view import LoadMode
from ganger.cluster.view_image import ViewImage, image_of_view, view_of_image
from msgspec import Struct, field
from msgspec.structs import replace

from ganger_master.core.commands import Observe, ObservedGang, ObservedRows, RecordedEnd
from ganger_master.core.desired_state import GangMember, Party, Projected, project
from ganger_master.core.effects import ELEMENT_TYPES, Dirty
from ganger_master.core.model import Claim, Counters, Element, Gang, JobRecord, Node, NodeSet, Request
from ganger_master.core.queue import Blocked, GrantedLease, ReservedPlaces
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State


class SentMembers(Struct, frozen=True, gc=False):
    """The members of a gang as sent to a node, where they have changed since: they are sent with other news."""

    node: str
    epoch: int
    members: tuple[GangMember, ...]
    # Of the gang whose arenas it starts from; None without one.
    source: tuple[GangMember, ...] | None


class Image(Struct, frozen=True, gc=False):
    """A state between two batches; names are those of `State`. Sets are in their order, which decisions may follow."""

    settings: CoreSettings
    started: float
    counters: Counters
    view: ViewImage
    nodes: tuple[Node, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    gangs: tuple[Gang, ...] = ()
    sets: tuple[NodeSet, ...] = ()
    # With the node that reported it.
    rows_seen: tuple[tuple[str, ObservedRows], ...] = ()
    former: tuple[Request, ...] = ()
    devices: int = 0
    free_devices: int = 0
    # Numbers of the jobs that their request ids mean.
    requested: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    resuming: tuple[int, ...] = ()
    running_limited: tuple[int, ...] = ()
    moving: tuple[int, ...] = ()
    backing_off: tuple[int, ...] = ()
    draining: tuple[str, ...] = ()
    choosy: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()
    # Versions of what nodes are to want, by node, and members as sent that differ from the present ones.
    desired: Mapping[str, int] = field(default_factory=dict)
    told: tuple[SentMembers, ...] = ()
    reports: Mapping[str, tuple[float, Observe]] = field(default_factory=dict)
    ends: Mapping[str, RecordedEnd] | None = None
    last_answer: Mapping[str, float] = field(default_factory=dict)
    left_by: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    drained_in_vain: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    # The last report of gangs that have not changed since, with its node.
    last_said: tuple[tuple[str, ObservedGang], ...] = ()
    next_silence_check: float | None = None
    refusals: Mapping[int, tuple[Refusal, ...]] = field(default_factory=dict)
    blocked: Blocked | None = None
    conflicts: Mapping[int, int] = field(default_factory=dict)
    aside_from: int = 0
    aside_at: float = 0.0
    kept: ReservedPlaces | None = None
    turns: tuple[GrantedLease, ...] = ()
    next_turn: int = 1
    passed: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    declined: Mapping[int, bool] = field(default_factory=dict)
    lost_turns: Mapping[int, int] = field(default_factory=dict)
    returned: Mapping[int, float] = field(default_factory=dict)
    claimed_by: Mapping[int, str] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)
    ranked_by: str = ""
    promised: Mapping[int, tuple[Claim, ...]] = field(default_factory=dict)
    promised_at: float = 0.0
    suggested: Mapping[int, tuple[Claim, ...]] = field(default_factory=dict)
    wake_at: float | None = None


# Attributes of a state that are in its image as they are: numbers and the like, dictionaries, keys of dictionaries that
# serve as sets, and values of dictionaries.
_SAME = (
    "started",
    "devices",
    "free_devices",
    "next_silence_check",
    "blocked",
    "kept",
    "next_turn",
    "ranked_by",
    "promised_at",
    "aside_from",
    "aside_at",
    "wake_at",
    "ends",
)
_MAPPINGS = (
    "reports",
    "last_answer",
    "left_by",
    "drained_in_vain",
    "refusals",
    "conflicts",
    "passed",
    "declined",
    "lost_turns",
    "returned",
    "claimed_by",
    "ranks",
    "promised",
    "suggested",
)
_SETS = ("finished", "resuming", "running_limited", "moving", "backing_off", "draining", "choosy", "unheard")
_VALUES = ("nodes", "jobs", "gangs", "sets", "former", "turns")


def image_of(state: State) -> Image:
    """Return a state as plain values. Call between batches: after `take_changes`, before the next command."""
    dirty = state.dirty
    open_ends = (dirty.jobs, dirty.rows, dirty.arenas, dirty.sets, dirty.wants, state.outbox)
    assert not any(open_ends), "an image of a state in mid-batch"
    parts: dict[str, object] = {name: getattr(state, name) for name in _SAME}
    parts.update({name: dict(getattr(state, name)) for name in _MAPPINGS})
    parts.update({name: tuple(getattr(state, name)) for name in _SETS})
    parts.update({name: tuple(getattr(state, name).values()) for name in _VALUES})
    return Image(
        settings=state.settings,
        counters=replace(state.counters),
        view=image_of_view(state.view),
        desired={name: desired.version for name, desired in state.desired.items()},
        told=tuple(_sent_members(state)),
        last_said=tuple(_last_reports(state)),
        requested=tuple(state.requests.values()),
        rows_seen=tuple([(node, seen) for (_, node), seen in state.rows_seen.items()]),
        **parts,  # type: ignore[arg-type]  # as the lists of names say
    )


def state_of(image: Image) -> State:
    """KeyError, ValueError or AssertionError if its parts do not go together."""
    state = State(image.settings, image.started)
    state.view = view_of_image(image.view)
    state.configuration_sets = dict(state.view.sets)
    state.counters = replace(image.counters)
    for name in _SAME:
        setattr(state, name, getattr(image, name))
    for name in _MAPPINGS:
        setattr(state, name, dict(getattr(image, name)))
    for name in _SETS:
        setattr(state, name, dict.fromkeys(getattr(image, name)))
    state.nodes = {node.name: node for node in image.nodes}
    state.jobs = {job.number: job for job in image.jobs}
    state.gangs = {gang.epoch: gang for gang in image.gangs}
    for node_set in image.sets:
        state.put_set(node_set)
    state.rows_seen = {(seen.node_set, node): seen for node, seen in image.rows_seen}
    requested = [state.jobs[number] for number in image.requested]
    state.requests = {(job.user, job.request_id): job.number for job in requested}
    state.former = {(request.user, request.request_id): request for request in image.former}
    state.turns = {turn.turn: turn for turn in image.turns}
    state.turn_of = {turn.number: turn.turn for turn in image.turns}
    _index(state)
    for name, version in image.desired.items():
        state.desired[name] = project(state, state.nodes[name], version)
    for told in image.told:
        _restore_sent(state, told)
    for name, said in image.last_said:
        gang = state.gangs[said.epoch]
        state.last_said[name, said.epoch] = (said, gang, state.jobs[gang.job])
    state.take_changes()
    state.dirty = Dirty()
    return state


def _index(state: State) -> None:
    """What follows from jobs, gangs, nodes and the view."""
    view = state.view
    free = [mask.bit_count() for mask, available in zip(view.free, view.available, strict=True) if mask and available]
    state.nodes_with = dict(Counter(free))
    state.gangs_on = {name: {} for name in state.nodes}
    for node in state.nodes.values():
        state.index_strays(None, node)
    for epoch in sorted(state.gangs):
        gang = state.gangs[epoch]
        state.gangs_of.setdefault(gang.job, []).append(epoch)
        for place, piece in enumerate(gang.pieces):
            state.gangs_on.setdefault(piece.claim.node, {})[epoch] = place
    for job in state.jobs.values():
        state.holdings.note(None, job)
        if not job.state.is_finished:
            state.live[job.number] = None
        if state.is_waiting(job):
            in_line = (*state.policy.key(job), job.number)
            state.waiting.add(in_line)
            state.front.add(in_line)
        if state.settings.quota_devices:
            state.shares.charge(job.number, job.user, state.charged_for(job))
    for number in state.refusals:
        state.note_lack(number)


def _sent_members(state: State) -> Iterator[SentMembers]:
    for name, projected in state.projected.items():
        for epoch, one in projected.items():
            party = one.party
            if party is not state.parties.get(epoch) or not _is_fresh(state, party):
                source = party.source
                yield SentMembers(name, epoch, party.members, None if source is None else source.members)


def _is_fresh(state: State, party: Party) -> bool:
    """Return whether its members would be the same if it were made now."""
    parked = party.gang.restore.parked_epoch
    if parked in state.gangs:
        source = party.source
        if source is None or source is not state.parties.get(parked) or not _is_fresh(state, source):
            return False
    elif party.source is not None:
        return False
    return all(
        _addresses(state.nodes.get(name)) == _addresses(node)
        for name, node in zip(party.gang.nodes, party.nodes, strict=True)
    )


def _addresses(node: Node | None) -> tuple[str, str]:
    return ("", "") if node is None else (node.peer_address, node.stream_address)


def _restore_sent(state: State, told: SentMembers) -> None:
    gang = state.gangs[told.epoch]
    job, settings = state.jobs[gang.job], state.settings
    nodes = [None] * len(gang.pieces)
    source = None if told.source is None else Party(gang, job, settings, nodes, None, told.source)
    party = Party(gang, job, settings, nodes, source, told.members)
    state.projected[told.node][told.epoch] = Projected(party, state.gangs_on[told.node][told.epoch])
    before = state.desired[told.node]
    wanted = tuple(state.projected[told.node].values())
    state.desired[told.node] = replace(before, wanted=wanted)


def _last_reports(state: State) -> Iterator[tuple[str, ObservedGang]]:
    for (name, epoch), (said, gang, job) in sorted(state.last_said.items(), key=lambda item: item[0]):
        if state.gangs.get(epoch) is gang and state.jobs.get(gang.job) is job:
            yield name, said


_KINDS: Final = {element: kind for kind, element in ELEMENT_TYPES.items()}


def restored(settings: CoreSettings, elements: Iterable[Element], now: float, former: State | None = None) -> State:
    """Return the state of stored elements.

    Sessions are void and free pieces unknown until each node's first report. With `former`, the state of a master that
    has lost only what it did not store, sessions go on and the reports of time slices stand; it needs a tick with
    `looks_again`."""
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
        # The store has no reports that changed nothing, and older ones may still be under way. That the node is silent
        # may be what could not be stored: storing it again would fail again.
        node = replace(node, observation=known.observation, applied_version=known.applied_version, silent=known.silent)
    state.put_node(node)
    if not node.lost:
        state.note_answer(node.name, former.last_answer.get(node.name, now))
        # Some may be silent for longer than the first: the next tick reviews all.
        state.next_silence_check = now
