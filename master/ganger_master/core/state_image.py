"""A state as plain values, and the state restored from them: it decides as the first one would have.

An image has more than a store keeps, because a restart voids sessions and forgets leases, refusals and kept places.
What can be derived is derived again. The state that a master finds in its store is restored here, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import TypeVar

from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import Claim, ConfigurationSet
from ganger.cluster.view import LoadMode, ViewImage, image_of_view, view_of_image
from msgspec import Struct, field
from msgspec.structs import replace

from ganger_master.core import usage
from ganger_master.core.accounting import UserUsage
from ganger_master.core.commands import Observe, ObservedGang, ObservedSlices, RecordedEnd
from ganger_master.core.desired_projection import GangMember, Party, Projected
from ganger_master.core.events import Dirty
from ganger_master.core.gang_model import Gang, TimesliceGroup
from ganger_master.core.gang_orders import party_of, project_node
from ganger_master.core.job_model import JobRecord, Request
from ganger_master.core.node_model import AccessToken, Counters, Element, Node, Reservation
from ganger_master.core.plan_changes import CoresCurve
from ganger_master.core.queue import Blocked, GrantedLease, KeptPlaces
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
    sets: tuple[TimesliceGroup, ...] = ()
    # With the node that reported it.
    rows_seen: tuple[tuple[str, ObservedSlices], ...] = ()
    former: tuple[Request, ...] = ()
    usage: tuple[UserUsage, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    tokens: tuple[AccessToken, ...] = ()
    reserved: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()
    reservation_at: float = 0.0
    devices: int = 0
    free_devices: int = 0
    # Numbers of the jobs that their request ids mean.
    requested: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    resuming: tuple[int, ...] = ()
    running_limited: tuple[int, ...] = ()
    moving: tuple[int, ...] = ()
    backing_off: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    at_epoch_ends: tuple[int, ...] = ()
    draining: tuple[str, ...] = ()
    faulty: tuple[str, ...] = ()
    choosy: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()
    # Versions of what nodes are to want, by node, and members as sent that differ from the present ones.
    desired: Mapping[str, int] = field(default_factory=dict)
    sent: tuple[SentMembers, ...] = field(default=(), name="told")
    reports: Mapping[str, tuple[float, Observe]] = field(default_factory=dict)
    ends: Mapping[str, RecordedEnd] | None = None
    last_answer: Mapping[str, float] = field(default_factory=dict)
    left_by: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    drained_in_vain: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    # The last report of gangs that have not changed since, with its node.
    last_reports: tuple[tuple[str, ObservedGang], ...] = field(default=(), name="last_said")
    next_silence_check: float | None = None
    refusals: Mapping[int, tuple[Refusal, ...]] = field(default_factory=dict)
    blocked: Blocked | None = None
    conflicts: Mapping[int, int] = field(default_factory=dict)
    aside_from: int = 0
    aside_at: float = 0.0
    kept: KeptPlaces | None = None
    turns: tuple[GrantedLease, ...] = ()
    next_turn: int = 1
    passed: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    declined: Mapping[int, bool] = field(default_factory=dict)
    lost_turns: Mapping[int, int] = field(default_factory=dict)
    returned: Mapping[int, float] = field(default_factory=dict)
    claimed_by: Mapping[int, str] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)
    ranked_by: str = ""
    kept_by_plan: Mapping[int, tuple[Claim, ...]] = field(default_factory=dict)
    kept_by_plan_at: float = 0.0
    suggested: Mapping[int, tuple[Claim, ...]] = field(default_factory=dict)
    cores_curves: Mapping[int, CoresCurve] = field(default_factory=dict)
    wake_at: float | None = None


def _paths(names: str) -> tuple[str, ...]:
    return tuple(names.split())


# Attributes of a state and its parts that are in its image as they are: numbers and the like, dictionaries, keys of
# dictionaries that serve as sets, and values of dictionaries.
_SAME = _paths(
    "started nodes.devices nodes.free_devices nodes.next_silence_check queue.blocked queue.kept queue.ranked_by"
    " queue.kept_by_plan_at queue.aside_from queue.aside_at leases.next_turn wake_at ends reservation_at"
)
_MAPPINGS = _paths(
    "reports nodes.last_answer nodes.drained_in_vain jobs.left_by queue.refusals queue.conflicts queue.passed"
    " queue.declined queue.ranks queue.kept_by_plan queue.suggested leases.lost_turns leases.returned leases.claimed_by"
    " cores_curves"
)
_SETS = _paths(
    "jobs.finished jobs.running_limited jobs.moving jobs.backing_off gangs.idle gangs.at_epoch_ends queue.resuming"
    " nodes.draining nodes.faulty nodes.reserved nodes.tested nodes.choosy nodes.unheard"
)
_VALUES = ("nodes", "jobs", "gangs", "gangs.sets", "jobs.former", "usage", "reservations", "tokens")


def image_of(state: State) -> Image:
    """Return a state as plain values. Call between batches: after `take_changes`, before the next command."""
    dirty = state.dirty
    open_ends = (dirty.jobs, dirty.rows, dirty.arenas, dirty.sets, dirty.wants, dirty.usage, state.unstored.history)
    assert not any(open_ends), "an image of a state in mid-batch"
    parts: dict[str, object] = {_field(path): attrgetter(path)(state) for path in _SAME}
    parts.update({_field(path): dict(attrgetter(path)(state)) for path in _MAPPINGS})
    parts.update({_field(path): tuple(attrgetter(path)(state)) for path in _SETS})
    parts.update({_field(path): tuple(attrgetter(path)(state).values()) for path in _VALUES})
    reports = sorted(state.gangs.last_reports.items(), key=itemgetter(0))
    last_reports = [
        (name, report)
        for (name, epoch), (report, gang, job) in reports
        if state.gangs.get(epoch) is gang and state.jobs.get(gang.job) is job
    ]
    return Image(
        settings=state.settings,
        counters=replace(state.counters),
        view=image_of_view(state.view),
        desired={name: desired.version for name, desired in state.desired.items()},
        sent=tuple(_sent_members(state)),
        last_reports=tuple(last_reports),
        turns=tuple(state.leases.values()),
        requested=tuple(state.jobs.requests.values()),
        rows_seen=tuple([(node, seen) for (_, node), seen in state.gangs.rows_seen.items()]),
        **parts,  # type: ignore[arg-type]  # as the lists of names say
    )


def state_of(image: Image) -> State:
    """KeyError, ValueError or AssertionError if its parts do not go together."""
    state = State(image.settings, image.started)
    state.view = view_of_image(image.view)
    state.nodes.configuration_sets = dict(state.view.sets)
    state.counters = replace(image.counters)
    for path in _SAME:
        setattr(_owner(state, path), _field(path), getattr(image, _field(path)))
    for path in _MAPPINGS:
        setattr(_owner(state, path), _field(path), dict(getattr(image, _field(path))))
    for path in _SETS:
        setattr(_owner(state, path), _field(path), dict.fromkeys(getattr(image, _field(path))))
    state.nodes.update({node.name: node for node in image.nodes})
    state.jobs.update({job.number: job for job in image.jobs})
    state.gangs.update({gang.epoch: gang for gang in image.gangs})
    for node_set in image.sets:
        state.put_set(node_set)
    for node, seen in image.rows_seen:
        state.gangs.note_rows(node, seen)
    requested = [state.jobs[number] for number in image.requested]
    state.jobs.requests.update({(job.user, job.request_id): job.number for job in requested})
    for request in image.former:
        state.jobs.former[request.user, request.request_id] = request
    for turn in image.turns:
        state.leases.put(turn)
    state.usage.update({usage.user: usage for usage in image.usage})
    state.reservations.update({reservation.name: reservation for reservation in image.reservations})
    state.tokens.update({token.name: token for token in image.tokens})
    _index(state)
    # Jobs that joined the queue have discarded it.
    state.queue.blocked = image.blocked
    for name, version in image.desired.items():
        state.desired[name] = project_node(state, state.nodes[name], version)
    for sent in image.sent:
        _restore_sent(state, sent)
    for name, report in image.last_reports:
        gang = state.gangs[report.epoch]
        state.gangs.last_reports[name, report.epoch] = (report, gang, state.jobs[gang.job])
    state.take_changes()
    state.dirty = Dirty()
    usage.restore(state, image.started)
    return state


def _field(path: str) -> str:
    """Return the name that an attribute of a state has in its image."""
    return path.rpartition(".")[2]


def _owner(state: State, path: str) -> object:
    """Return the part of a state that has an attribute, or the state."""
    part = path.rpartition(".")[0]
    return attrgetter(part)(state) if part else state


def _index(state: State) -> None:
    """What follows from jobs, gangs, nodes and the view."""
    view = state.view
    free = [mask.bit_count() for mask, available in zip(view.free, view.available, strict=True) if mask and available]
    state.nodes.nodes_with = dict(Counter(free))
    for node in state.nodes.values():
        state.nodes.index_strays(None, node)
        state.gangs.places_on.setdefault(node.name, {})
    for epoch in sorted(state.gangs):
        gang = state.gangs[epoch]
        state.gangs.index(gang)
        for place, piece in enumerate(gang.pieces):
            state.gangs.place(piece.claim.node, epoch, place)
    for job in state.jobs.values():
        state.jobs.holdings.note(None, job)
        state.jobs.index_dependencies(None, job)
        if not job.state.is_finished:
            state.jobs.live[job.number] = None
        if job.is_waiting:
            state.queue.join((*state.policy.key(job), job.number))
        if state.limits:
            state.jobs.charges.charge(job.number, state.owners(job), state.charged_for(job))
    for number, refusals in state.queue.refusals.items():
        job = state.jobs[number]
        at = (*state.policy.key(job), number)
        state.queue.note_refusals(at, refusals, job.is_waiting, state.policy.protects_all)


def _sent_members(state: State) -> Iterator[SentMembers]:
    for name, projected in state.desired.projected.items():
        for epoch, one in projected.items():
            party = one.party
            if party is not state.desired.parties.get(epoch) or not _is_fresh(state, party):
                source = party.source
                yield SentMembers(name, epoch, party.members, None if source is None else source.members)


def _is_fresh(state: State, party: Party) -> bool:
    """Return whether its members would be the same if it were made now."""
    parked = party.gang.restore.parked_epoch
    if parked in state.gangs:
        source = party.source
        if source is None or source is not state.desired.parties.get(parked) or not _is_fresh(state, source):
            return False
    elif party.source is not None:
        return False
    return all(
        _addresses(state.nodes.get(name)) == _addresses(node)
        for name, node in zip(party.gang.nodes, party.nodes, strict=True)
    )


def _addresses(node: Node | None) -> tuple[str, str]:
    return ("", "") if node is None else (node.peer_address, node.stream_address)


def _restore_sent(state: State, sent: SentMembers) -> None:
    gang = state.gangs[sent.epoch]
    job, settings = state.jobs[gang.job], state.settings
    nodes = [None] * len(gang.pieces)
    source = None if sent.source is None else Party(gang, job, settings, nodes, None, _members=sent.source)
    tried = party_of(state, gang).trial_memory_bytes
    party = Party(gang, job, settings, nodes, source, tried, sent.members)
    state.desired.projected[sent.node][sent.epoch] = Projected(party, state.gangs.places_on[sent.node][sent.epoch])
    before = state.desired[sent.node]
    wanted = tuple(state.desired.projected[sent.node].values())
    state.desired[sent.node] = replace(before, wanted=wanted)


_T = TypeVar("_T")


def restored(settings: CoreSettings, elements: Iterable[Element], now: float, former: State | None = None) -> State:
    """Return the state of stored elements.

    Sessions are void and free pieces unknown until each node's first report. With `former`, the state of a master that
    has lost only what it did not store, sessions continue and the reports of time slices stand; it needs a tick with
    `looks_again`."""
    state = State(settings, now)
    stored = list(elements)

    def of(kind: type[_T]) -> list[_T]:
        return [element for element in stored if isinstance(element, kind)]

    for configuration_set in of(ConfigurationSet):
        state.put_configuration_set(configuration_set)
    for counters in of(Counters):
        state.counters = replace(counters)
        state.view.version = counters.view_version
        state.view.mode = LoadMode.PACK if counters.packs else LoadMode.SPREAD
    for node in of(Node):
        _put_node(state, node, now, former)
    for gang in sorted(of(Gang), key=lambda gang: gang.epoch):
        state.put_gang(gang)
    for job in sorted(of(JobRecord), key=lambda job: job.number):
        state.put_job(job)
    state.jobs.finished = dict.fromkeys(sorted(state.jobs.finished, key=lambda number: state.jobs[number].end_time))
    for node_set in of(TimesliceGroup):
        state.put_set(node_set)
    for request in sorted(of(Request), key=lambda one: one.time):
        state.jobs.former[request.user, request.request_id] = request
    for name in sorted(state.nodes):
        node = state.nodes[name]
        state.refresh_row(name)
        state.desired[name] = project_node(state, node, state.counters.desired_version)
    if former is not None:
        for (_, name), rows in former.gangs.rows_seen.items():
            state.gangs.note_rows(name, rows)
    state.usage.update({one.user: one for one in of(UserUsage)})
    state.reservations.update({one.name: one for one in of(Reservation)})
    state.tokens.update({one.name: one for one in of(AccessToken)})
    state.take_changes()
    state.dirty = Dirty()
    usage.restore(state, now)
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
        state.note_answer(node.name, former.nodes.last_answer.get(node.name, now))
        # Some may be silent for longer than the first: the next tick reviews all.
        state.nodes.next_silence_check = now
