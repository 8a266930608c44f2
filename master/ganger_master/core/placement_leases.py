"""Placement leases: the right to request a gang, given to waiting jobs in the policy's order, and the requests.

A lease only bounds how many jobs request at once. Fit, and the places kept for jobs that go first, decide whether a
request is granted. Losing a lease costs a job only time. Verdicts on requests are answers, not errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice

from ganger.cluster.refusals import Reason, Refusal, RefusalKind
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import answers, commands, events
from ganger_master.core.answers import JobAnswer, RefusedError
from ganger_master.core.approval import CandidateApproval, CandidateRejection, has_place, judge
from ganger_master.core.elastic import rests_for_any_size, shape_for
from ganger_master.core.events import Decision, Event, GangRefused, TurnsClaimed
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_rules import forbidden_nodes, rules
from ganger_master.core.kept_places import first_blocked, kept_places_of, lacks_memory
from ganger_master.core.preconditions import find_job, unfinished
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state import State

# Jobs behind the head of the queue that may get a lease: bounds the work of one event.
WINDOW = 64
# Jobs that lack what no other job holds are passed over. Each pass considers this many of the first ones, and as many
# of the rest, which rotate every second.
ASIDE = 128
# How soon such a job gets a lease again when the view has changed.
_LASTING_S = 1.0


def hand_out(state: State, now: float) -> tuple[int, ...]:
    """Give leases while there are any to give; return their numbers."""
    if len(state.leases) >= state.settings.turns_at_once or not state.queue.waiting:
        return ()
    if not state.is_planned:
        return _by_order(state, now)
    # To jobs that a plan starts, in its order.
    chosen = list(islice(state.queue.suggested, state.settings.turns_at_once - len(state.leases)))
    return tuple([_give(state, state.jobs[number], now, state.queue.suggested.pop(number)) for number in chosen])


def _by_order(state: State, now: float) -> tuple[int, ...]:
    """Give leases in the order of the policy, as long as devices are free that no job ahead may request."""
    given: list[int] = []
    most = state.settings.turns_at_once
    _turn_aside(state, now)
    # Shapes that this view was too small for, and the devices that holders of leases may request: all, and those ahead.
    # Jobs behind do not delay a job: otherwise they would request in turns the pieces that are kept for it.
    vain: set[GangShape] = set()
    asking, ahead = sum([state.jobs[turn.number].gpus for turn in state.leases.values()]), 0
    for number in _window(state):
        if len(state.leases) >= most:
            break
        if number in state.leases.turn_of:
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
        # Parked jobs may fit where others do not: they hold a part of what they need.
        is_known = number in state.queue.refusals and number not in state.queue.declined and not job.epoch
        if is_known and (_is_too_large(state, job, ahead) or (vain and job.shape in vain)):
            # A job ahead requested the same shape in vain.
            if state.policy.protects_all and _holds_up(state, number):
                break
            continue
        if not _has_room_beside(state, job, asking):
            break
        if _lasts(state, number):
            # Nor one whose user's quota leaves less than it needs at least.
            least = job.spec.gpus_min if job.spec.is_elastic and not job.is_bound else None
            lasting = sum([_lasts(state, turn.number) for turn in state.leases.values()])
            if lasting >= most // 2 or rules(state, job, least):
                continue
        given.append(_give(state, job, now))
        asking += job.gpus
        ahead += job.gpus
        if _keeps_all(state, number):
            break
    if state.queue.resuming and any(lacks_memory(state, job) for job in first_blocked(state)):
        # Resuming jobs hold some of that memory, so they get a lease whatever jobs are before them.
        given.extend(
            _give(state, state.jobs[number], now)
            for number in islice(state.queue.resuming, WINDOW)
            if number not in state.leases.turn_of and _may_ask(state, number, now) and len(state.leases) < most
        )
    return tuple(given)


def _give(state: State, job: JobRecord, now: float, suggested: tuple[Claim, ...] = ()) -> int:
    is_kept = not suggested and not state.policy.protects_all
    kept = kept_places_of(state, [job], now) if is_kept else ()
    turn = GrantedLease(
        turn=state.leases.next_turn,
        number=job.number,
        revision=job.revision,
        rank=state.queue_rank(job.number),
        given=now,
        expires=now + state.settings.turn_lease_s,
        scheduler=scheduler_of(state, job),
        kept_nodes=tuple([node for place in kept for node in place.nodes]),
        suggested=suggested,
    )
    state.leases.put(turn)
    return turn.turn


def scheduler_of(state: State, job: JobRecord) -> str:
    """Return the id of the scheduler whose stream claimed the job; "" for the default hosts.

    A scheduler that was named at submission has a few leases of time to connect."""
    if state.leases.lost_turns.get(job.number, 0) >= state.settings.lost_turns_allowed:
        return ""
    return state.leases.claimed_by.get(job.number, job.spec.scheduler)


def offer_start(
    state: State, job: JobRecord, claims: tuple[Claim, ...], proposer: str, now: float
) -> tuple[Event, ...] | Refusal:
    """Return what offers a plan's place to the job's scheduler: nothing beside a lease, a refusal after a pass."""
    if job.number in state.leases.turn_of:
        return ()
    if not _may_ask(state, job.number, now):
        return Refusal(Reason.WRONG_STATE, job=job.name, detail="its scheduler has passed its last lease")
    return (events.StartOffered(now, proposer, job.number, claims),)


def valid_turn(state: State, number: int, turn: int, now: float) -> GrantedLease | None:
    """Return the job's lease of that number, unless it has expired."""
    held = state.leases.get(turn)
    return held if held is not None and held.number == number and now <= held.expires else None


def expire(state: State, now: float, newest_sent: int | None = None) -> None:
    """Take back leases that were not used; their jobs get another one, behind jobs that have had none yet.

    newest_sent: the last lease that was sent. Leases after it begin now at the earliest."""
    for number in [number for number in state.leases if newest_sent is not None and number > newest_sent]:
        turn = state.leases[number]
        state.leases.put(replace(turn, expires=now + state.settings.turn_lease_s))
    for turn in [turn for turn in state.leases.values() if now > turn.expires]:
        _lose(state, turn)


def note_refused(state: State, event: GangRefused) -> None:
    """Record the refusals, for `explain`. The lease stays for another try, or its job waits until the view changes.

    A request without the job's lease does not change the lease.
    """
    is_mistake = bool(event.refusals) and event.refusals[0].reason.kind is RefusalKind.MISTAKE
    turn = state.leases.of_job(event.number)
    in_turn = turn is not None and turn.turn == event.turn
    # A mistake in a request without the lease does not replace a blocker that is known.
    if (in_turn or not is_mistake) and state.queue.refusals.get(event.number) != event.refusals:
        state.note_refusals(event.number, event.refusals)
        state.dirty.news[event.number] = None
    if turn is None or not in_turn:
        return
    if is_mistake:
        # A request that can never be granted does not count as a use of the lease: it would starve the job.
        _lose(state, turn)
        if not turn.scheduler:
            # The default host gives no other answer before something changes.
            state.queue.passed[event.number] = (state.view.version, event.time)
        return
    state.leases.lost_turns.pop(event.number, None)
    if event.turn_kept:
        state.leases.put(replace(turn, tries=turn.tries + 1))
        return
    state.queue.note_conflicts(event.number, turn.tries + 1)
    # A scheduler that passes again on the same old view would decide the same at once.
    before, last = state.queue.passed.get(event.number, (0, 0.0))
    version = event.view_version if event.view_version > before else state.view.version
    state.queue.passed[event.number] = (version, event.time)
    if version >= state.view.freed:
        _note_declined(state, turn, event, last)
    _take_back(state, event.number)


def note_stream(state: State, event: TurnsClaimed) -> None:
    """Apply a lease stream that opened or closed: it gets the leases of jobs that it claims, leases it leaves behind
    expire at once, and leases that no host received begin anew."""
    claim, now = event.claim, event.time
    state.leases.give_up_claims(claim.scheduler)
    if claim.connected:
        for number in claim.jobs:
            if number in state.jobs:
                state.leases.claimed_by[number] = claim.scheduler
                lost = state.leases.lost_turns.get(number, 0)
                if (
                    lost >= state.settings.lost_turns_allowed
                    and now >= state.leases.returned.get(number, 0.0) + _RETURN_S
                ):
                    # A turn to show that it is back, which one that dies again and again does not.
                    state.leases.lost_turns[number] = state.settings.lost_turns_allowed - 1
                    state.leases.returned[number] = now
    stale = [turn for turn in state.leases.values() if turn.scheduler != scheduler_of(state, state.jobs[turn.number])]
    if claim.alone:
        stale = [*stale, *[turn for turn in state.leases.values() if not turn.scheduler and turn not in stale]]
    for turn in stale:
        _take_back(state, turn.number)


# How often a scheduler that lost its turns may try again with a new stream.
_RETURN_S = 10.0


def next_time(state: State, now: float) -> float | None:
    """Return when a lease expires, or a job that found no place may get one again; None if neither is due."""
    if not (state.leases or state.queue.passed or state.queue.aside):
        return None
    # Expired leases count, too: only a tick takes them back, and until then they may block all jobs behind.
    times = [turn.expires + _JUST_AFTER for turn in state.leases.values()]
    if len(state.queue.aside) > ASIDE and (time := state.queue.aside_at + _LASTING_S) > now:
        times.append(time)
    left = len(state.queue.passed)
    if left:
        for number in _window(state):
            if number in state.queue.passed:
                time = _next_lease_at(state, number)
                # A job whose time has passed waits for a lease to become free.
                if time > now:
                    times.append(time)
                left -= 1
                if not left:
                    break
    return min(times, default=None)


# An instant at which a lease still holds is not yet past it.
_JUST_AFTER = 0.001


def _take_back(state: State, number: int) -> None:
    """Drop the job's lease. A planner plans anew for it: nothing else of the job has changed."""
    state.leases.drop(number)
    if state.is_planned:
        state.dirty.news[number] = None


def _lose(state: State, turn: GrantedLease) -> None:
    _take_back(state, turn.number)
    state.leases.lost_turns[turn.number] = state.leases.lost_turns.get(turn.number, 0) + 1


def _note_declined(state: State, turn: GrantedLease, event: GangRefused, last: float) -> None:
    """Record that a job's scheduler left a place unused, by choice or for a locality wish. No place is kept for such a
    job: it would block all jobs behind it for as long as its scheduler likes."""
    number, declined, job = event.number, state.queue.declined, state.jobs[event.number]
    locality = job.spec.locality
    is_patient = locality.wish is not None and event.time < job.pending_since + locality.patience_s
    if number in declined:
        if turn.scheduler and not declined[number]:
            return
        state.queue.note_declined(number, None)
    elif event.time < last + _LOOKED_S:
        return
    # Places are kept only for the jobs ahead of all others.
    if (turn.scheduler or is_patient) and job in first_blocked(state) and has_place(state, job, event.time):
        state.queue.note_declined(number, is_patient)


# A search for a place costs as much as many verdicts.
_LOOKED_S = 0.5


def _has_room_beside(state: State, job: JobRecord, asking: int) -> bool:
    """Return whether another job may request now: a strict queue allows several only with ample room for all."""
    if not state.leases or not state.policy.protects_all:
        return True
    return _AMPLE * (asking + job.gpus) <= state.nodes.free_devices


def _keeps_all(state: State, number: int) -> bool:
    """Return whether jobs behind this one must wait for its request: its last refusal stands until then. Where memory
    is short, parked jobs may resume all the same."""
    return state.policy.protects_all and not state.queue.resuming and _holds_up(state, number)


# Free devices per requested device: with fewer, fragmentation makes a place unlikely.
_AMPLE = 2


def _window(state: State) -> Iterator[int]:
    """Yield the numbers of the first waiting jobs, and of some jobs that are passed over. Those and holders of leases
    do not count towards the limit, so that they delay no other job."""
    looked_at, aside, since = 0, state.queue.aside, state.queue.aside_from
    places = state.queue.front.places()
    if aside:
        first, others = islice(aside.places(), ASIDE), islice(aside.places(), max(since, ASIDE), since + ASIDE)
        places = merge(places, first, others)
    for *_, number in places:
        yield number
        if number not in aside and number not in state.leases.turn_of:
            looked_at += 1
            if looked_at >= WINDOW:
                return


def _turn_aside(state: State, now: float) -> None:
    """Rotate the jobs that are passed over, if they are too many to consider all of them."""
    if len(state.queue.aside) <= ASIDE:
        state.queue.aside_from = 0
    elif not 0.0 <= now - state.queue.aside_at < _LASTING_S:
        since = state.queue.aside_from + ASIDE
        state.queue.aside_from = since if since < len(state.queue.aside) else ASIDE
        state.queue.aside_at = now


def _lasts(state: State, number: int) -> bool:
    return number in state.queue.aside


def _holds_up(state: State, number: int) -> bool:
    """Return whether a strict queue keeps all pieces for this job, so that no job behind it can be granted any."""
    return number in state.queue.lacking and number not in state.queue.declined


def _is_too_large(state: State, job: JobRecord, ahead: int) -> bool:
    """Return whether too few devices are free for a job, besides those that jobs ahead may request.

    For a job that blocks a strict queue and must be on one node, the largest node counts. (Other jobs are refused three
    times before room is kept for them.) Jobs with a scheduler of their own get a lease all the same: the answer shows
    that the scheduler is connected."""
    lacks = job.gpus > state.nodes.free_devices - ahead
    if not lacks and state.policy.protects_all and job.shape.locality.widest <= LocalityLevel.NODE:
        lacks = job.gpus > state.nodes.largest_free and _holds_up(state, job.number)
    return lacks and not scheduler_of(state, job)


def _may_ask(state: State, number: int, now: float) -> bool:
    return number not in state.queue.passed or now >= _next_lease_at(state, number)


def _next_lease_at(state: State, number: int) -> float:
    """Return when a job that passed may get another lease: on another view, or later, when its patience has changed."""
    version, time = state.queue.passed[number]
    if version >= state.view.freed:
        return time + state.settings.turn_again_s
    return time + _LASTING_S if _lasts(state, number) else time


_CANDIDATES_LIMIT = 16
_TRIES_LIMIT = 3


def request_gang(state: State, command: commands.RequestGang, now: float) -> Decision:
    job = find_job(state, command.number)
    if len(command.candidates) > _CANDIDATES_LIMIT or () in command.candidates:
        raise RefusedError("REQUEST_INVALID", f"at most {_CANDIDATES_LIMIT} candidates, none of them empty")
    if any(claim.shared_mask for claims in command.candidates for claim in claims):
        raise RefusedError("NOT_SUPPORTED", "only plans put gangs on devices of others")
    refusal = _check_request(state, job, command)
    if refusal is not None:
        return (), _rejected(state, job, (refusal,))
    turn = valid_turn(state, job.number, command.turn, now) if command.turn else None
    if command.turn and turn is None:
        late = Refusal(Reason.OUT_OF_TURN, job=job.name)
        return (), _rejected(state, job, (late,))
    cause = f"scheduler:{command.scheduler}"
    if not command.candidates:
        refusals = why_waiting(state, job, command.blockers, now)
        version = min(command.view_version or state.view.version, state.view.version)
        event = events.GangRefused(now, cause, job.number, refusals, command.turn, False, version)
        return (event,), _rejected(state, job, refusals)
    verdict = _judge_request(state, job, command, turn, now)
    if isinstance(verdict, CandidateApproval):
        approved = events.GangApproved(now, cause, job.number, tuple(verdict.claims), verdict.level)
        return (approved,), answers.Approved(job.number, 0, 0, 0, verdict.candidate)
    # Another candidate may fit; what is kept for others stays kept.
    first = verdict.refusals[0].reason
    is_conflict = first.waits_for_capacity or first.kind is RefusalKind.RACE
    kept = is_conflict and turn is not None and turn.tries + 1 < _TRIES_LIMIT
    refused = events.GangRefused(
        now, cause, job.number, tuple(verdict.refusals), command.turn, kept, state.view.version
    )
    rejected = answers.Rejected(job.number, tuple(verdict.refusals), tuple(verdict.rows), state.view.version, kept)
    return (refused,), rejected


def _judge_request(
    state: State, job: JobRecord, command: commands.RequestGang, turn: GrantedLease | None, now: float
) -> CandidateApproval | CandidateRejection:
    """Judge the candidates. The plan's suggestion, if first, may have other cores and devices than requested."""
    candidates, rank = command.candidates, state.queue_rank(job.number) if turn is not None else 0
    if turn is not None and turn.suggested and candidates[0] == turn.suggested:
        shape = shape_for(job, turn.suggested, rests_for_any_size(state, job))
        if not isinstance(shape, Refusal):
            verdict = judge(state, job, candidates[:1], rank, now, retune=True, shape=shape)
            if isinstance(verdict, CandidateApproval) or len(candidates) == 1:
                return verdict
    return judge(state, job, candidates, rank, now)


def why_waiting(state: State, job: JobRecord, blockers: Sequence[Refusal], now: float) -> tuple[Refusal, ...]:
    """Return the scheduler's blockers, after those that only the master can see."""
    own = rules(state, job)
    return (*own, *(blockers or ()), *(forbidden_nodes(state, job, now) if not own else ()))


def release_gang(state: State, command: commands.ReleaseGang, now: float) -> Decision:
    job = unfinished(state, command.number)
    if job.epoch != command.epoch or job.next_epoch or job.ending is not None or job.state is not JobState.HOLDING:
        raise RefusedError(
            "REVISION_CONFLICT", f"{job.name} does not hold epoch {command.epoch}", {"epoch": str(job.epoch)}
        )
    return (events.GangReleased(now, f"scheduler:{command.scheduler}", job.number),), JobAnswer(job.number)


def _check_request(state: State, job: JobRecord, command: commands.RequestGang) -> Refusal | None:
    if state.is_planned and not command.turn:
        text = f"policy {state.settings.policy}: jobs start only with a lease"
        return Refusal(Reason.OUT_OF_TURN, detail=text, job=job.name)
    if command.revision != job.revision:
        figures = {"revision": job.revision, "given": command.revision}
        return Refusal(Reason.STALE_REVISION, figures, job=job.name)
    if not job.is_waiting:
        return Refusal(Reason.WRONG_STATE, job=job.name, detail=f"the job is {job.state.value} and waits for no gang")
    return None


def _rejected(state: State, job: JobRecord, refusals: tuple[Refusal, ...]) -> answers.Rejected:
    return answers.Rejected(job.number, refusals, (), state.view.version, turn_kept=False)
