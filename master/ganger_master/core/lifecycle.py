"""Desired × observed: the act that follows from a gang's intent and from the reports of all its parts.

One table without state of its own. `docs/reference/states.md` shows it; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from ganger_master.core.gang_model import Gang, GangIntent, ObservedPhase, Outcome, OutcomeKind, Piece
from ganger_master.core.job_model import SuspendLevel


class GangObservation(StrEnum):
    """What the reports of all parts of a gang amount to."""

    # Some part is starting or stopping, or has not been reported yet.
    BUSY = "BUSY"
    # Every part has its ranks waiting for RUN.
    PREPARED = "PREPARED"
    # ... with the complete state of the boundary.
    READY = "READY"
    # Every part has stepped since the last start or resume.
    RUNNING = "RUNNING"
    # Every part is parked at the same step, for the present stop, at the desired level.
    PARKED = "PARKED"
    # A part is parked, but not at the desired level, and reports why that is not available.
    REFUSED = "REFUSED"
    # A part of a move reports that it cannot continue.
    TROUBLED = "TROUBLED"
    # Every part ended well.
    DONE = "DONE"
    # Every part ended, some by yielding after a checkpoint, or after the signal at which the script saves itself.
    YIELDED = "YIELDED"
    # A part ended badly, or is lost.
    BROKEN = "BROKEN"
    # Nothing is left anywhere.
    GONE = "GONE"


class Act(StrEnum):
    """What follows from an observation."""

    WAIT = "WAIT"
    # Runs: clocks start, a move's source may go.
    STEPPED = "STEPPED"
    # The source of the move may hand over.
    HAND_OVER = "HAND_OVER"
    # This side is ready: commit if the other is.
    COMMIT = "COMMIT"
    # The move is given up; the source continues.
    ABORT = "ABORT"
    # It is parked as ordered: release what the level does not keep.
    REST = "REST"
    # It stays parked at its old level, or runs on.
    STAY = "STAY"
    # The job has finished.
    SUCCEED = "SUCCEED"
    # The attempt has failed: stop what is left of it, then decide by the budgets.
    FAIL = "FAIL"
    # Nothing is left: forget the gang.
    FORGET = "FORGET"


_ANYWHERE: Final = {
    **dict.fromkeys(GangObservation, Act.WAIT),
    GangObservation.DONE: Act.SUCCEED,
    **dict.fromkeys((GangObservation.YIELDED, GangObservation.BROKEN, GangObservation.GONE), Act.FAIL),
}

_ROWS: Final[Mapping[GangIntent, Mapping[GangObservation, Act]]] = {
    GangIntent.RUN: {**_ANYWHERE, GangObservation.RUNNING: Act.STEPPED},
    GangIntent.PREPARE: {
        **_ANYWHERE,
        GangObservation.PREPARED: Act.HAND_OVER,
        GangObservation.READY: Act.COMMIT,
        **dict.fromkeys((GangObservation.TROUBLED, GangObservation.DONE), Act.ABORT),
        **dict.fromkeys((GangObservation.YIELDED, GangObservation.BROKEN, GangObservation.GONE), Act.ABORT),
    },
    GangIntent.PARK: {
        **_ANYWHERE,
        GangObservation.PARKED: Act.REST,
        GangObservation.REFUSED: Act.STAY,
        GangObservation.YIELDED: Act.REST,
    },
    GangIntent.HAND_OVER: {
        **_ANYWHERE,
        GangObservation.PARKED: Act.COMMIT,
        GangObservation.TROUBLED: Act.ABORT,
        GangObservation.YIELDED: Act.COMMIT,
    },
    GangIntent.STOP: {**dict.fromkeys(GangObservation, Act.WAIT), GangObservation.GONE: Act.FORGET},
}

TABLE: Final[Mapping[tuple[GangIntent, GangObservation], Act]] = {
    (intent, seen): act for intent, row in _ROWS.items() for seen, act in row.items()
}


# Of the commonest case: to look up a member of an enumeration takes Python 3.11 as long as a call.
_RUNNING: Final = ObservedPhase.RUNNING
_YIELDED: Final = OutcomeKind.YIELDED
_WELL: Final = frozenset({OutcomeKind.DONE, _YIELDED})


def act_of(gang: Gang) -> Act:
    return TABLE[gang.intent, observation_of(gang)]


def observation_of(gang: Gang) -> GangObservation:
    """Return what the parts of a gang amount to together; a bad end of one part outweighs everything."""
    return _of_ended_parts(gang) or _of_present_parts(gang)


def _of_ended_parts(gang: Gang) -> GangObservation | None:
    """Return what the parts that have ended decide for the whole gang; None if the others decide."""
    gone = [piece for piece in gang.pieces if piece.gone]
    if not gone:
        return None
    is_gone = len(gone) == len(gang.pieces)
    if is_gone and gang.intent is GangIntent.STOP:
        return GangObservation.GONE
    kinds = {piece.outcome.kind for piece in gone}
    if not kinds <= _WELL:
        return GangObservation.BROKEN
    if is_gone:
        return GangObservation.YIELDED if _YIELDED in kinds else GangObservation.DONE
    return None


def _of_present_parts(gang: Gang) -> GangObservation:
    """Return what the phases of the parts amount to, none of which has ended badly."""
    pieces = gang.pieces
    if gang.intent in (GangIntent.PREPARE, GangIntent.HAND_OVER) and any(_is_troubled(gang, piece) for piece in pieces):
        return GangObservation.TROUBLED
    phases = {piece.phase for piece in pieces}
    if ObservedPhase.PARKED in phases:
        if all(_is_parked(gang, piece) for piece in pieces) and len({piece.stop_step for piece in pieces}) == 1:
            return GangObservation.PARKED
        if gang.intent is GangIntent.PARK and any(is_refused(gang, piece) for piece in pieces):
            return GangObservation.REFUSED
    if phases == {_RUNNING}:
        return GangObservation.RUNNING
    if phases == {ObservedPhase.READY}:
        return GangObservation.READY
    if phases <= {ObservedPhase.READY, ObservedPhase.PREPARED}:
        return GangObservation.PREPARED
    return GangObservation.BUSY


def bad_outcome(gang: Gang) -> Outcome:
    """Return how a gang broke: of several bad ends the likeliest cause, then the first by node."""
    bad = [piece for piece in gang.pieces if piece.gone and piece.outcome.kind not in _WELL]
    if not bad:
        message = next((piece.outcome.message for piece in gang.pieces if piece.outcome.message), "")
        return Outcome(OutcomeKind.UNKNOWN, message=message or "ended without a reason")
    return min(bad, key=lambda piece: (_CAUSES_FIRST.index(piece.outcome.kind), piece.claim.node)).outcome


def trouble_of(gang: Gang | None) -> str:
    """Return the troubles that its parts report, by node; empty if there are none. The gang continues all the same."""
    if gang is None:
        return ""
    texts = {piece.trouble: f"nodes/{piece.claim.node}: {piece.trouble}" for piece in gang.pieces if piece.trouble}
    return "; ".join(texts.values())


def is_refused(gang: Gang, piece: Piece) -> bool:
    """Return whether a part reports, for the present order, that it is parked short of the desired level."""
    short = piece.phase is ObservedPhase.PARKED and piece.level < gang.park_level
    return short and piece.stop_sequence == gang.stop_sequence and _is_troubled(gang, piece)


# The likeliest cause first: a rank that dies takes its peers along.
_CAUSES_FIRST: Final = (
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


def _is_troubled(gang: Gang, piece: Piece) -> bool:
    # A trouble of an earlier order does not count for this one.
    return bool(piece.trouble) and piece.master_sequence >= gang.master_sequence


def _is_parked(gang: Gang, piece: Piece) -> bool:
    if piece.phase is not ObservedPhase.PARKED or not gang.stop_sequence:
        return False
    if piece.stop_sequence != gang.stop_sequence:
        return False
    return gang.intent is GangIntent.HAND_OVER or piece.level >= max(gang.park_level, SuspendLevel.PAUSE)
