"""Differences between the desired and the observed state of a node, and the actions that remove them. Nothing is killed
on doubt: a gang that the desired set lacks is stopped only if its epoch is provably over or an earlier set of this
session had it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, OrderKey

GangId = tuple[str, int]
"""(job uid, epoch)."""


class Absence(Enum):
    """Why a gang that the desired set lacks may be stopped."""

    OLDER_EPOCH = "the master has a newer epoch of this job"
    NO_LONGER_WANTED = "an earlier desired set of this session wanted it"


@dataclass(frozen=True, slots=True)
class Here:
    """A gang on this node: the highest order obeyed, and whether all its processes are gone."""

    order: OrderKey
    ended: bool = False
    stopping: bool = False  # Already, because the desired set lacks it


@dataclass(frozen=True, slots=True)
class Observed:
    gangs: Mapping[GangId, Here] = field(default_factory=dict)
    # Epochs that ended here and were forgotten, the highest by job: they never start again.
    finished: Mapping[str, int] = field(default_factory=dict)
    # Gangs that a desired set of this session has wanted.
    wanted_before: frozenset[GangId] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a gang of which there is nothing here."""

    wanted: DesiredOrder


@dataclass(frozen=True, slots=True)
class Obey:
    """A newer order for a gang that is here."""

    wanted: DesiredOrder


@dataclass(frozen=True, slots=True)
class StopAbsent:
    gang: GangId
    why: Absence


@dataclass(frozen=True, slots=True)
class ReportGone:
    """Report a desired gang as gone: nothing of it is here and it must not start; the master decides."""

    wanted: DesiredOrder


@dataclass(frozen=True, slots=True)
class Forget:
    """The outcome is durable at the master: remove what is left."""

    gang: GangId


Action = Start | Obey | StopAbsent | ReportGone | Forget


def reconcile(
    desired: Iterable[DesiredOrder], observed: Observed, acknowledged: frozenset[int] = frozenset()
) -> tuple[Action, ...]:
    """Return the actions that bring the observed to the desired state; stops first, since they free devices."""
    newest = _newest_order_of_each(desired)
    stops: list[Action] = []
    starts: list[Action] = []
    for gang, here in sorted(observed.gangs.items(), key=lambda item: item[0]):
        wanted = newest.get(gang)
        if wanted is not None:
            if wanted.order > here.order:
                (stops if wanted.intent is OrderIntent.STOP else starts).append(Obey(wanted))
            elif here.ended and wanted.intent is OrderIntent.STOP and gang[1] in acknowledged:
                stops.append(Forget(gang))
            continue
        if here.ended:
            if gang[1] in acknowledged:
                stops.append(Forget(gang))
            continue
        why = None if here.stopping else _absence(gang, newest, observed.wanted_before)
        if why is not None:
            stops.append(StopAbsent(gang, why))
    for gang in sorted(newest.keys() - observed.gangs.keys()):
        wanted = newest[gang]
        over = gang[1] <= observed.finished.get(gang[0], 0)
        if over or wanted.intent not in (OrderIntent.RUN, OrderIntent.PREPARE):
            starts.append(ReportGone(wanted))
        else:
            starts.append(Start(wanted))
    return (*stops, *starts)


def _newest_order_of_each(desired: Iterable[DesiredOrder]) -> dict[GangId, DesiredOrder]:
    newest: dict[GangId, DesiredOrder] = {}
    for wanted in desired:
        gang = (wanted.job_uid, wanted.epoch)
        newest[gang] = max(newest.get(gang, wanted), wanted, key=lambda one: one.order)
    return newest


def _absence(gang: GangId, newest: Mapping[GangId, DesiredOrder], wanted_before: frozenset[GangId]) -> Absence | None:
    uid, epoch = gang
    if any(other == uid and newer > epoch for other, newer in newest):
        return Absence.OLDER_EPOCH
    if gang in wanted_before:
        return Absence.NO_LONGER_WANTED
    return None
