"""Desired × observed: what the parts of a gang, seen together, mean for what is wanted of it.

One table, no state of its own. `docs/reference/states.md` shows it; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from ganger_master.core.model import Gang, GangIntent, ObservedPhase, Outcome, OutcomeKind, Piece, SuspendLevel


class Seen(StrEnum):
    """All parts of a gang seen together."""

    # Some part is on its way, or not heard of yet.
    BUSY = "BUSY"
    # Every part has its ranks waiting for RUN.
    PREPARED = "PREPARED"
    # ... with the complete state of the boundary.
    READY = "READY"
    # Every part has stepped since the last start or resume.
    RUNNING = "RUNNING"
    # Every part rests at the same step, for the present stop, at the wanted level.
    PARKED = "PARKED"
    # A part rests, but not at the level wanted, and says why that cannot be had.
    REFUSED = "REFUSED"
    # A part of a move says that it cannot go on.
    TROUBLED = "TROUBLED"
    # Every part ended well.
    DONE = "DONE"
    # Every part ended, some by yielding after a checkpoint.
    YIELDED = "YIELDED"
    # A part ended badly, or is lost.
    BROKEN = "BROKEN"
    # Nothing is left anywhere.
    GONE = "GONE"


class Act(StrEnum):
    """What follows."""

    WAIT = "WAIT"
    # Runs: clocks start, a move's source may go.
    STEPPED = "STEPPED"
    # The source of the move may hand over.
    HAND_OVER = "HAND_OVER"
    # This side is ready: commit if the other is.
    COMMIT = "COMMIT"
    # The move is given up; the source goes on.
    ABORT = "ABORT"
    # It rests where it was asked to: release what the level does not keep.
    REST = "REST"
    # It rests where it rested before, or runs on.
    STAY = "STAY"
    # The job has finished.
    SUCCEED = "SUCCEED"
    # The attempt has failed: stop what is left of it, then decide by the budgets.
    FAIL = "FAIL"
    # Nothing is left: forget the gang.
    FORGET = "FORGET"


_ANYWHERE: Final = {
    Seen.BUSY: Act.WAIT,
    Seen.PREPARED: Act.WAIT,
    Seen.READY: Act.WAIT,
    Seen.RUNNING: Act.WAIT,
    Seen.PARKED: Act.WAIT,
    Seen.REFUSED: Act.WAIT,
    Seen.TROUBLED: Act.WAIT,
    Seen.DONE: Act.SUCCEED,
    Seen.YIELDED: Act.FAIL,
    Seen.BROKEN: Act.FAIL,
    Seen.GONE: Act.FAIL,
}

_ROWS: Final[Mapping[GangIntent, Mapping[Seen, Act]]] = {
    GangIntent.RUN: {**_ANYWHERE, Seen.RUNNING: Act.STEPPED},
    GangIntent.PREPARE: {
        **_ANYWHERE,
        Seen.PREPARED: Act.HAND_OVER,
        Seen.READY: Act.COMMIT,
        Seen.TROUBLED: Act.ABORT,
        Seen.DONE: Act.ABORT,
        Seen.YIELDED: Act.ABORT,
        Seen.BROKEN: Act.ABORT,
        Seen.GONE: Act.ABORT,
    },
    GangIntent.PARK: {**_ANYWHERE, Seen.PARKED: Act.REST, Seen.REFUSED: Act.STAY, Seen.YIELDED: Act.REST},
    GangIntent.HAND_OVER: {**_ANYWHERE, Seen.PARKED: Act.COMMIT, Seen.TROUBLED: Act.ABORT},
    GangIntent.STOP: {**dict.fromkeys(Seen, Act.WAIT), Seen.GONE: Act.FORGET},
}

TABLE: Final[Mapping[tuple[GangIntent, Seen], Act]] = {
    (intent, seen): act for intent, row in _ROWS.items() for seen, act in row.items()
}


# Of the commonest case: to look up a member of an enumeration takes Python 3.11 as long as a call.
_RUN: Final = GangIntent.RUN
_RUNNING: Final = ObservedPhase.RUNNING
_NOT_SEEN: Final = ObservedPhase.NONE
_YIELDED: Final = OutcomeKind.YIELDED
_WELL: Final = frozenset({OutcomeKind.DONE, _YIELDED})


_ALL_RUN: Final = Seen.RUNNING
_BUSY: Final = Seen.BUSY


def act_of(gang: Gang) -> Act:
    return TABLE[gang.intent, seen_of(gang)]


def seen_of(gang: Gang) -> Seen:
    """Return what the parts of a gang amount to together; a bad end of one part outweighs everything."""
    pieces = gang.pieces
    if gang.intent is _RUN:
        for piece in pieces:
            if piece.phase is not _RUNNING or piece.gone:
                break
        else:
            return _ALL_RUN
    for piece in pieces:
        if piece.phase is not _NOT_SEEN or piece.gone or piece.trouble:
            break
    else:
        # No report yet, as for every gang that was just approved.
        return _BUSY
    return _seen_of_ended(gang) or _seen_of_present(gang)


def _seen_of_ended(gang: Gang) -> Seen | None:
    """Return what the parts that have ended decide for the whole gang; None if the others decide."""
    gone = [piece for piece in gang.pieces if piece.gone]
    if not gone:
        return None
    is_gone = len(gone) == len(gang.pieces)
    if is_gone and gang.intent is GangIntent.STOP:
        return Seen.GONE
    kinds = {piece.outcome.kind for piece in gone}
    if not kinds <= _WELL:
        return Seen.BROKEN
    if is_gone:
        return Seen.YIELDED if _YIELDED in kinds else Seen.DONE
    return None


def _seen_of_present(gang: Gang) -> Seen:
    """Return what the phases of the parts amount to, none of which has ended badly."""
    pieces = gang.pieces
    if gang.intent in (GangIntent.PREPARE, GangIntent.HAND_OVER) and any(_is_troubled(gang, piece) for piece in pieces):
        return Seen.TROUBLED
    phases = {piece.phase for piece in pieces}
    if ObservedPhase.PARKED in phases:
        if all(_is_parked(gang, piece) for piece in pieces) and len({piece.stop_step for piece in pieces}) == 1:
            return Seen.PARKED
        if gang.intent is GangIntent.PARK and any(is_refused(gang, piece) for piece in pieces):
            return Seen.REFUSED
    if phases == {_RUNNING}:
        return _ALL_RUN
    if phases == {ObservedPhase.READY}:
        return Seen.READY
    if phases <= {ObservedPhase.READY, ObservedPhase.PREPARED}:
        return Seen.PREPARED
    return _BUSY


def bad_outcome(gang: Gang) -> Outcome:
    """How it broke: of several bad ends the one that says most, then the first by node."""
    bad = [piece for piece in gang.pieces if _ended_badly(piece)]
    if not bad:
        return Outcome(OutcomeKind.UNKNOWN, message="ended without a reason")
    return min(bad, key=lambda piece: (_TELLING.index(piece.outcome.kind), piece.claim.node)).outcome


def trouble_of(gang: Gang | None) -> str:
    """Return the troubles that its parts report, by node; empty if there are none. The gang goes on all the same."""
    if gang is None:
        return ""
    told = {piece.trouble: f"nodes/{piece.claim.node}: {piece.trouble}" for piece in gang.pieces if piece.trouble}
    return "; ".join(told.values())


def is_refused(gang: Gang, piece: Piece) -> bool:
    """Whether a part that is to rest says, of the present order, that it rests short of the level wanted."""
    short = piece.phase is ObservedPhase.PARKED and piece.level < gang.park_level
    return short and piece.stop_sequence == gang.stop_sequence and _is_troubled(gang, piece)


# Most telling first: a rank that died of its own takes its peers along.
_TELLING: Final = (
    OutcomeKind.STATE_UNREADABLE,
    OutcomeKind.STATE_OUTDATED,
    OutcomeKind.OUT_OF_MEMORY,
    OutcomeKind.LAUNCH_FAILED,
    OutcomeKind.FAILED,
    OutcomeKind.ESCALATED,
    OutcomeKind.UNKNOWN,
    OutcomeKind.FENCED,
    OutcomeKind.STOPPED,
    OutcomeKind.NONE,
    OutcomeKind.YIELDED,
    OutcomeKind.DONE,
)


def _ended_badly(piece: Piece) -> bool:
    return piece.gone and piece.outcome.kind not in _WELL


def _is_troubled(gang: Gang, piece: Piece) -> bool:
    # What an earlier order met says nothing about this one.
    return bool(piece.trouble) and piece.master_sequence >= gang.master_sequence


def _is_parked(gang: Gang, piece: Piece) -> bool:
    if piece.phase is not ObservedPhase.PARKED or not gang.stop_sequence:
        return False
    if piece.stop_sequence != gang.stop_sequence:
        return False
    return gang.intent is GangIntent.HAND_OVER or piece.level >= max(gang.park_level, SuspendLevel.PAUSE)
