"""Whose turn it is: leases to request a gang, given to waiting jobs in the policy's order.

A turn is a hint that bounds how many ask at once; whether a request is granted is decided by fit and by what is kept
for those who go first. Losing a turn costs its job nothing but time.

What job schedulers ask for: a gang, or to give one back. Verdicts are answers, not errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import TypeAlias

from ganger.cluster.refusals import Reason, Refusal, RefusalKind
from ganger.cluster.resources import GangShape, LocalityLevel
from msgspec.structs import replace

from ganger_master.core import answers, commands, events
from ganger_master.core.answers import Answer, JobAnswer, Refused
from ganger_master.core.approval import (
    CandidateApproval,
    first_blocked,
    forbidden_nodes,
    has_place,
    judge,
    lacks_memory,
    reservations_of,
    rules,
)
from ganger_master.core.commands import ClaimTurns
from ganger_master.core.events import Event, GangRefused
from ganger_master.core.model import JobRecord, JobState
from ganger_master.core.preconditions import find_job, unfinished
from ganger_master.core.queue import WAITS_FOR_PIECES, GrantedLease
from ganger_master.core.state import State
from ganger_master.policies import Places

# How far behind the head of the queue turns are given: bounds the work of one event.
WINDOW = 64
# Of those who are passed over, for what they lack no other job holds, so many are looked at: the first ones, and as
# many more, every second others.
ASIDE = 128
# How soon such a job is asked again when the view has changed.
_LASTING_SECONDS = 1.0


def hand_out(state: State, now: float) -> tuple[int, ...]:
    """Gives turns while there are any to give; their numbers."""
    given: list[int] = []
    most = state.settings.turns_at_once
    if len(state.turns) >= most or not state.waiting or state.policy.places is Places.PLANNER:
        return ()
    _turn_aside(state, now)
    # What was refused on this view for lack of pieces, and the devices that are being asked for: by all, and by those
    # ahead. Those behind hold up nobody: who comes first asks, or they would ask by turns for what is kept for it.
    vain: set[GangShape] = set()
    asking, ahead = _asking(state), 0
    for number in _window(state):
        if len(state.turns) >= most:
            break
        if number in state.turn_of:
            if _keeps_all(state, number):
                break
            ahead += state.jobs[number].gpus
            continue
        job = state.jobs[number]
        if not _may_ask(state, number, now):
            if _lasts(state, number):
                continue
            if state.policy.protects_all and _holds_up(state, number):
                break
            vain.add(job.shape)
            continue
        # Parked jobs may have room where others have none: what they keep is there already.
        is_known = number in state.refusals and number not in state.declined and not job.epoch
        if is_known and (_is_too_large(state, job, ahead) or (vain and job.shape in vain)):
            # Who asks for the same goes first, and did not get it.
            if state.policy.protects_all and _holds_up(state, number):
                break
            continue
        if not _has_room_beside(state, job, asking):
            break
        if _lasts(state, number) and (_is_spent(state, job) or _asked_in_vain(state) >= most // 2):
            continue
        given.append(_give(state, job, now))
        asking += job.gpus
        ahead += job.gpus
        if _keeps_all(state, number):
            break
    if state.resuming and any(lacks_memory(state, job) for job in first_blocked(state)):
        # Also those who keep it, be there whoever before them.
        given.extend(
            _give(state, state.jobs[number], now)
            for number in islice(state.resuming, WINDOW)
            if number not in state.turn_of and _may_ask(state, number, now) and len(state.turns) < most
        )
    return tuple(given)


def _give(state: State, job: JobRecord, now: float) -> int:
    turn = GrantedLease(
        turn=state.next_turn,
        number=job.number,
        revision=job.revision,
        rank=state.queue_rank(job.number),
        given=now,
        expires=now + state.settings.turn_lease_seconds,
        scheduler=scheduler_of(state, job),
        reserved_nodes=_reserved_nodes(state, job, now),
    )
    state.next_turn += 1
    state.turns[turn.turn] = turn
    state.turn_of[job.number] = turn.turn
    return turn.turn


def scheduler_of(state: State, job: JobRecord) -> str:
    """Id of the scheduler whose stream claimed the job; "" for the default hosts. One that was named at submission has
    a few leases of time to appear."""
    if state.lost_turns.get(job.number, 0) >= state.settings.lost_turns_allowed:
        return ""
    return state.claimed_by.get(job.number, job.spec.scheduler)


def valid_turn(state: State, number: int, turn: int, now: float) -> GrantedLease | None:
    """The job's turn of that number, unless it has expired."""
    held = state.turns.get(turn)
    return held if held is not None and held.number == number and now <= held.expires else None


def expire(state: State, now: float, told: int | None = None) -> None:
    """Takes back leases that were not used; their jobs are asked again, behind those that were not asked yet. Of turns
    after the one that was `told` nobody knows yet: their leases begin now at the earliest."""
    for number in [number for number in state.turns if told is not None and number > told]:
        turn = state.turns[number]
        state.turns[number] = replace(turn, expires=now + state.settings.turn_lease_seconds)
    for turn in [turn for turn in state.turns.values() if now > turn.expires]:
        _lose(state, turn)


def note_approved(state: State, number: int) -> None:
    state.drop_turn(number)
    state.lost_turns.pop(number, None)


def note_refused(state: State, event: GangRefused) -> None:
    """Keeps why, for `explain`; the turn stays for another try, or its job waits until the view changes.

    A request without the job's turn changes nothing about it.
    """
    is_mistake = bool(event.refusals) and event.refusals[0].reason.kind is RefusalKind.MISTAKE
    turn = state.turns.get(state.turn_of.get(event.number, 0))
    in_turn = turn is not None and turn.turn == event.turn
    # A blocker that is known stands against what a stranger got wrong.
    if (in_turn or not is_mistake) and state.refusals.get(event.number) != event.refusals:
        state.note_refusals(event.number, event.refusals)
        state.dirty.news[event.number] = None
    if turn is None or not in_turn:
        return
    if is_mistake:
        # What can never be is no use of a turn: a scheduler that answers every one so would starve its job.
        _lose(state, turn)
        if not turn.scheduler:
            # There is nobody else to ask: not again before something changes.
            state.passed[event.number] = (state.view.version, event.time)
        return
    state.lost_turns.pop(event.number, None)
    if event.turn_kept:
        state.turns[turn.turn] = replace(turn, tries=turn.tries + 1)
        return
    state.note_conflicts(event.number, turn.tries + 1)
    # One that passes again on the same old view would learn nothing by being asked at once.
    before, last = state.passed.get(event.number, (0, 0.0))
    version = event.view_version if event.view_version > before else state.view.version
    state.passed[event.number] = (version, event.time)
    if version >= state.view.freed:
        _note_declined(state, turn, event, last)
    state.drop_turn(event.number)


def note_stream(state: State, claim: ClaimTurns, now: float) -> None:
    """A stream came or went: turns of jobs it claims are its, turns it leaves behind expire at once, and turns that
    went to nobody are given again with their whole lease."""
    for number in [number for number, owner in state.claimed_by.items() if owner == claim.scheduler]:
        del state.claimed_by[number]
    if claim.connected:
        for number in claim.jobs:
            if number in state.jobs:
                state.claimed_by[number] = claim.scheduler
                lost = state.lost_turns.get(number, 0)
                if (
                    lost >= state.settings.lost_turns_allowed
                    and now >= state.returned.get(number, 0.0) + _RETURN_SECONDS
                ):
                    # A turn to show that it is back, which one that dies again and again does not.
                    state.lost_turns[number] = state.settings.lost_turns_allowed - 1
                    state.returned[number] = now
    stale = [turn for turn in state.turns.values() if turn.scheduler != scheduler_of(state, state.jobs[turn.number])]
    if claim.alone:
        stale = [*stale, *[turn for turn in state.turns.values() if not turn.scheduler and turn not in stale]]
    for turn in stale:
        state.drop_turn(turn.number)


# How often a scheduler that lost its turns may try again with a new stream.
_RETURN_SECONDS = 10.0


def next_time(state: State, now: float) -> float | None:
    """When a lease runs out, or a job that found no place is to be asked again."""
    if not (state.turns or state.passed or state.aside):
        return None
    # Also of one that ran out already: only time that passes takes it back, and till then it may block all behind it.
    times = [turn.expires + _JUST_AFTER for turn in state.turns.values()]
    if len(state.aside) > ASIDE and (time := state.aside_at + _LASTING_SECONDS) > now:
        times.append(time)
    left = len(state.passed)
    if left:
        for number in _window(state):
            if number in state.passed:
                time = _asked_again(state, number)
                # One that may be asked already waits for a turn to become free, not for time to pass.
                if time > now:
                    times.append(time)
                left -= 1
                if not left:
                    break
    return min(times, default=None)


# An instant at which a lease still holds is not yet past it.
_JUST_AFTER = 0.001


def _lose(state: State, turn: GrantedLease) -> None:
    state.drop_turn(turn.number)
    state.lost_turns[turn.number] = state.lost_turns.get(turn.number, 0) + 1


def _note_declined(state: State, turn: GrantedLease, event: GangRefused, last: float) -> None:
    """Whose scheduler leaves a place that is there, by its own choice or for a wish, is kept none: it would hold up all
    behind it for as long as it likes."""
    number, declined, job = event.number, state.declined, state.jobs[event.number]
    locality = job.spec.locality
    is_patient = locality.wish is not None and event.time < job.pending_since + locality.patience_seconds
    if number in declined:
        if turn.scheduler and not declined[number]:
            return
        del declined[number]
        state.blocked = None
    elif event.time < last + _LOOKED_SECONDS:
        return
    # Only those ahead of all others are kept anything.
    if (turn.scheduler or is_patient) and job in first_blocked(state) and has_place(state, job, event.time):
        declined[number] = is_patient
        state.blocked = None


# To look for a place takes as long as many verdicts.
_LOOKED_SECONDS = 0.5


def _reserved_nodes(state: State, job: JobRecord, now: float) -> tuple[str, ...]:
    if state.policy.protects_all:
        return ()
    return tuple(node for reservation in reservations_of(state, [job], now) for node in reservation.nodes)


def _has_room_beside(state: State, job: JobRecord, asking: int) -> bool:
    """Where nobody may overtake, several ask at once only if there is ample room for all of them."""
    if not state.turns or not state.policy.protects_all:
        return True
    return _AMPLE * (asking + job.gpus) <= state.free_devices


def _keeps_all(state: State, number: int) -> bool:
    """Whether nobody behind it gets anything before it has asked: what it was last refused for stands until then. Who
    rests may go on all the same where memory is short."""
    return state.policy.protects_all and not state.resuming and _holds_up(state, number)


# Free devices per device asked for; fragments of the rest make less than this a gamble.
_AMPLE = 2


def _window(state: State) -> Iterator[int]:
    """Numbers of the first who wait, and of some of those before them who lack what no other job holds: however many
    those are, they are in nobody's way."""
    looked_at, aside, since = 0, state.aside, state.aside_from
    places = state.front.places()
    if aside:
        first, others = islice(aside.places(), ASIDE), islice(aside.places(), max(since, ASIDE), since + ASIDE)
        places = merge(places, first, others)
    for *_, number in places:
        yield number
        if number not in aside:
            looked_at += 1
            if looked_at >= WINDOW:
                return


def _turn_aside(state: State, now: float) -> None:
    """Has others looked at of those who are passed over, if they are too many for all of them."""
    if len(state.aside) <= ASIDE:
        state.aside_from = 0
    elif not 0.0 <= now - state.aside_at < _LASTING_SECONDS:
        since = state.aside_from + ASIDE
        state.aside_from, state.aside_at = since if since < len(state.aside) else ASIDE, now


def _lasts(state: State, number: int) -> bool:
    return number in state.aside


def _holds_up(state: State, number: int) -> bool:
    """Whether it is kept all there is in a strict queue, so that nobody behind it would get what they ask for."""
    return number in state.lacking and number not in state.declined


def _asking(state: State) -> int:
    """Devices that the holders of turns ask for."""
    return sum([state.jobs[turn.number].gpus for turn in state.turns.values()])


def _is_too_large(state: State, job: JobRecord, ahead: int) -> bool:
    """Whether it lacks devices wherever they may be, beside those that others ahead ask for at the moment; of who holds
    up all others also whether it does on every node, where it may lie on no more than one. (Others are refused three
    times before room is kept for them.) Schedulers of their own are asked all the same: that they answer shows that
    they are there."""
    lacks = job.gpus > state.free_devices - ahead
    if not lacks and state.policy.protects_all and job.shape.locality.widest <= LocalityLevel.NODE:
        lacks = job.gpus > state.largest_free and _holds_up(state, job.number)
    return lacks and not scheduler_of(state, job)


def _is_spent(state: State, job: JobRecord) -> bool:
    """Whether its user's quota leaves less than the job needs at least, so that there is no use in asking it."""
    return bool(rules(state, job, job.spec.gpus_min if job.spec.is_elastic and not job.is_bound else None))


def _asked_in_vain(state: State) -> int:
    """Turns of jobs for which the last answer holds for long."""
    return sum([_lasts(state, turn.number) for turn in state.turns.values()])


def _may_ask(state: State, number: int, now: float) -> bool:
    return number not in state.passed or now >= _asked_again(state, number)


def _asked_again(state: State, number: int) -> float:
    """When a job that passed may be asked again: on another view, or after some time, for patience changes with it."""
    version, time = state.passed[number]
    if version >= state.view.freed:
        return time + state.settings.turn_again_seconds
    return time + _LASTING_SECONDS if _lasts(state, number) else time


Result: TypeAlias = tuple[tuple[Event, ...], Answer]

_CANDIDATES_LIMIT = 16
_TRIES_LIMIT = 3


def request_gang(state: State, command: commands.RequestGang, now: float) -> Result:
    job = find_job(state, command.number)
    if isinstance(job, Refused):
        return (), job
    if len(command.candidates) > _CANDIDATES_LIMIT or () in command.candidates:
        return (), Refused("REQUEST_INVALID", f"at most {_CANDIDATES_LIMIT} candidates, none of them empty")
    if any(claim.shared_mask for claims in command.candidates for claim in claims):
        return (), Refused("NOT_SUPPORTED", "only plans put gangs on devices of others")
    if command.mode != "EXCLUSIVE":
        return (), Refused("NOT_SUPPORTED", f"mode {command.mode} is not built yet")
    refusal = _check_asked(state, job, command)
    if refusal is not None:
        return (), _rejected(state, job, (refusal,), False)
    turn = valid_turn(state, job.number, command.turn, now) if command.turn else None
    if command.turn and turn is None:
        late = Refusal(Reason.OUT_OF_TURN, job=job.name)
        return (), _rejected(state, job, (late,), False)
    cause = f"scheduler:{command.scheduler}"
    if not command.candidates:
        refusals = why_waiting(state, job, command.blockers)
        version = min(command.view_version or state.view.version, state.view.version)
        event = events.GangRefused(now, cause, job.number, refusals, command.turn, False, version)
        return (event,), _rejected(state, job, refusals, False)
    rank = state.queue_rank(job.number) if turn is not None else 0
    verdict = judge(state, job, command.candidates, rank, now)
    if isinstance(verdict, CandidateApproval):
        approved = events.GangApproved(now, cause, job.number, tuple(verdict.claims), verdict.level)
        return (approved,), answers.Approved(job.number, 0, 0, 0, verdict.candidate)
    # Another candidate may fit; what is kept for others stays kept.
    is_conflict = verdict.refusals[0].reason in WAITS_FOR_PIECES or verdict.refusals[0].reason.kind is RefusalKind.RACE
    kept = is_conflict and turn is not None and turn.tries + 1 < _TRIES_LIMIT
    refused = events.GangRefused(
        now, cause, job.number, tuple(verdict.refusals), command.turn, kept, state.view.version
    )
    rejected = answers.Rejected(job.number, tuple(verdict.refusals), tuple(verdict.rows), state.view.version, kept)
    return (refused,), rejected


def why_waiting(state: State, job: JobRecord, blockers: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """The scheduler's blockers, after what only the master knows."""
    own = rules(state, job)
    return (*own, *(blockers or ()), *(forbidden_nodes(state, job) if not own else ()))


def release_gang(state: State, command: commands.ReleaseGang, now: float) -> Result:
    job = unfinished(state, command.number)
    if isinstance(job, Refused):
        return (), job
    if job.epoch != command.epoch or job.next_epoch or job.ending is not None or job.state is not JobState.HOLDING:
        return (), Refused(
            "REVISION_CONFLICT", f"{job.name} does not hold epoch {command.epoch}", {"epoch": str(job.epoch)}
        )
    return (events.GangReleased(now, f"scheduler:{command.scheduler}", job.number),), JobAnswer(job.number)


def _check_asked(state: State, job: JobRecord, command: commands.RequestGang) -> Refusal | None:
    if state.policy.places is Places.PLANNER:
        text = f"the planner places all jobs: policy {state.settings.policy}"
        return Refusal(Reason.OUT_OF_TURN, detail=text, job=job.name)
    if command.revision != job.revision:
        figures = {"revision": job.revision, "given": command.revision}
        return Refusal(Reason.STALE_REVISION, figures, job=job.name)
    if not state.is_waiting(job):
        return Refusal(Reason.WRONG_STATE, job=job.name, detail=f"the job is {job.state.value} and waits for no gang")
    return None


def _rejected(state: State, job: JobRecord, refusals: tuple[Refusal, ...], kept: bool) -> answers.Rejected:
    return answers.Rejected(job.number, refusals, (), state.view.version, kept)
