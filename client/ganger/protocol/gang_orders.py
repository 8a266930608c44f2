"""Orders for gangs and their ranking, and the order of a time-sliced gang, made of the master's and the active slice.

A switch may park a gang that the master wants to run. Its order is then the master's with the switch added to the key.
Its boundary agreement has the number of the switch, which all nodes of the gang know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

from ganger.protocol.slice_rotation import SliceSwitch
from ganger.protocol.stop_rules import stops_at_epoch_end

# Above all stop numbers of a master.
_SLICE_BIT = 1 << 61
_SET_BITS = 20
# Before any switch that a leader orders.
_FIRST = SliceSwitch(1, 0)


@dataclass(frozen=True, order=True)
class OrderKey:
    """Rank of an order, compared field by field; the highest received is obeyed."""

    epoch: int = 0
    master_sequence: int = 0
    set_epoch: int = 0
    local_sequence: int = 0

    @property
    def number(self) -> int:
        """The order's number in the control pages of its epoch: as the keys rise, so do their numbers. Room for four
        million orders of a master, 4,095 leaders of a node set and 268 million switches of each."""
        return self.master_sequence << 40 | self.set_epoch << 28 | self.local_sequence

    @property
    def is_by_rotation(self) -> bool:
        """Whether the newest part of the order is a slice switch."""
        return self.set_epoch > 0


class OrderIntent(IntEnum):
    RUN = 1
    PREPARE = 2
    PARK = 3
    HAND_OVER = 4
    STOP = 5


class ParkLevel(IntEnum):
    """How much a parked gang gives up; NONE with intents that do not park."""

    NONE = 0
    PAUSE = 1
    OFFLOAD = 2
    CHECKPOINT = 3


class Mechanism(IntEnum):
    """How a job is stopped, saved and moved; values as on the wire. See docs/how-to/mechanisms.md."""

    UNSPECIFIED = 0
    ATTACHED = 1
    ADAPTER = 2
    IMAGE = 3
    REPLAY = 4
    SIGNAL = 5
    NONE = 6


@dataclass(frozen=True)
class DesiredOrder:
    """Order for one gang on this node."""

    job_uid: str
    order: OrderKey
    intent: OrderIntent
    level: ParkLevel = ParkLevel.NONE
    stop_sequence: int = 0
    grace_s: float = 10.0
    checkpoint_first: bool = False
    moves_in: bool = False  # Its state comes from an older epoch's arenas
    is_by_signal: bool = False  # Its script saves itself at a signal, and exits

    @property
    def epoch(self) -> int:
        return self.order.epoch

    @property
    def waits_for_epoch(self) -> bool:
        """Whether ranks that report epochs go on to the end of theirs."""
        return stops_at_epoch_end(self.stop_sequence)

    @property
    def asks_to_leave(self) -> bool:
        """Whether the script is to save itself at its signal and exit. The pages hold no order to stop then."""
        is_to_save = self.intent is OrderIntent.STOP and self.checkpoint_first
        is_to_rest = self.intent is OrderIntent.PARK and self.level is ParkLevel.CHECKPOINT
        return self.is_by_signal and (is_to_save or is_to_rest or self.intent is OrderIntent.HAND_OVER)

    @property
    def ends_at_once(self) -> bool:
        """Whether the gang is stale: its job may run elsewhere by now, so no instruction of it may run any more."""
        return self.intent is OrderIntent.STOP and not self.checkpoint_first and self.grace_s <= 0


def by_signal(wanted: DesiredOrder) -> DesiredOrder:
    """Return the order for a gang whose script saves itself at a signal: it needs no agreement on a boundary."""
    marked = replace(wanted, is_by_signal=True)
    return replace(marked, stop_sequence=0) if marked.asks_to_leave else marked


def hastened(wanted: DesiredOrder, is_stale: bool) -> DesiredOrder:
    """Return the order without grace if it stops a stale gang; else unchanged."""
    if wanted.intent is not OrderIntent.STOP or not is_stale:
        return wanted
    return replace(wanted, grace_s=0.0, checkpoint_first=False, stop_sequence=0)


@dataclass(frozen=True)
class GangSlice:
    """State of a gang in its time-slice group.

    `switch`: the last one; `stop`: the switch that ended the gang's slice, None while the slice is active; `level`:
    park level of the group; `changes`: a newer matrix is known here that is not active yet; `has_row`: the active
    matrix has a slice for the gang."""

    node_set: int
    switch: SliceSwitch
    stop: SliceSwitch | None
    level: ParkLevel
    changes: bool = False
    has_row: bool = True


def may_wait_for_slice(master: DesiredOrder) -> bool:
    """Return whether an order of the master may wait for a slice: not a stop without a checkpoint."""
    return master.intent is not OrderIntent.STOP or master.checkpoint_first


def agreement(node_set: int, stop: SliceSwitch) -> int:
    """Return the number of the boundary agreement that a switch begins: equal on all nodes, and never used before."""
    return _SLICE_BIT | (node_set % (1 << _SET_BITS)) << 40 | stop.set_epoch << 28 | stop.sequence


def next_order(
    master: DesiredOrder,
    current: DesiredOrder,
    gang_slice: GangSlice | None,
    is_parked: bool,
    peer_agreement: int,
    is_blocked: Callable[[], bool],
) -> DesiredOrder | None:
    """Return the order that a gang gets next; None to keep `current`.

    `master`: the master's order; `gang_slice`: None outside of time-slice groups; `is_parked`: the gang is parked as
    `current` demands; `peer_agreement`: the agreement that a peer has relayed last; `is_blocked`: returns whether other
    gangs are on its devices."""
    if not may_wait_for_slice(master):
        return None
    is_new = master.order.master_sequence > current.order.master_sequence
    if current.intent is OrderIntent.PREPARE:
        # It is on its devices already and waits for its state: switches park it only once it runs.
        return master if is_new else None
    if gang_slice is not None and gang_slice.stop is not None:
        over = _at_slice_end(master, current, gang_slice, gang_slice.stop, is_new, is_parked)
        if (
            over is None
            and _was_left_behind(master, current, gang_slice, gang_slice.stop, peer_agreement)
            and not is_blocked()
        ):
            return _catch_up(master, current, gang_slice, gang_slice.stop)
        return over
    if master.intent is not OrderIntent.RUN:
        if is_new:
            return _master_stop(master, current, gang_slice, is_parked)
        return (
            _join_peers(master, current)
            if _is_apart_from_peer(master, current, peer_agreement) and not is_blocked()
            else None
        )
    if current.intent is not OrderIntent.RUN:
        if is_blocked() or _waits_for_peers(current, gang_slice):
            return None
        return _with_switch(master, gang_slice.switch) if gang_slice is not None else master
    if gang_slice is None:
        return master
    # It runs already: a newer order of the master only changes other fields.
    return _with_switch(master, _switch_of(current)) if is_new else None


def _at_slice_end(
    master: DesiredOrder, current: DesiredOrder, gang_slice: GangSlice, stop: SliceSwitch, is_new: bool, is_parked: bool
) -> DesiredOrder | None:
    if (
        is_new
        and master.intent is not OrderIntent.RUN
        and (_is_stopped_by_switch(current) or _is_stopped_by_master(current))
    ):
        return _master_stop(master, current, gang_slice, is_parked)
    if _is_stopped_by_switch(current):
        gives_up_more = master.intent in (OrderIntent.RUN, OrderIntent.PARK) and current.level < gang_slice.level
        # A gang that was to be saved and ended, and is to run after all, may still have its device memory.
        is_spared = is_new and master.intent is OrderIntent.RUN and current.level is ParkLevel.CHECKPOINT
        if gives_up_more or is_spared:
            return _park_order(master, gang_slice.switch, current.stop_sequence, gang_slice.level)
        return None
    if _is_stopped_by_master(current):
        if master.intent is not OrderIntent.RUN:
            return None
        if is_parked:
            return _park_order(master, stop, current.stop_sequence, gang_slice.level)
    return _park_order(master, stop, agreement(gang_slice.node_set, stop), gang_slice.level)


def _is_stopped_by_switch(current: DesiredOrder) -> bool:
    return current.order.is_by_rotation and current.intent is not OrderIntent.RUN


def _is_stopped_by_master(current: DesiredOrder) -> bool:
    """Return whether the gang stops or is parked by an order of the master, and by no switch."""
    return not current.order.is_by_rotation and current.intent is not OrderIntent.RUN


def _waits_for_peers(current: DesiredOrder, gang_slice: GangSlice | None) -> bool:
    """Return whether the gang must not resume yet, because its peers on other nodes may not have the order to resume,
    or find their devices taken, so that a switch would park them first.

    The peers of a gang that the master has parked, or that has no slice yet, resume once the matrix that came with the
    order is active."""
    return (
        gang_slice is not None and gang_slice.changes and (not gang_slice.has_row or current.stop_sequence < _SLICE_BIT)
    )


def _park_order(master: DesiredOrder, switch: SliceSwitch, stop_sequence: int, level: ParkLevel) -> DesiredOrder:
    """Return the order to park at the end of a slice; at the deeper of both levels if the master parks it, too."""
    wanted = replace(_with_switch(master, switch), stop_sequence=stop_sequence)
    if master.intent is OrderIntent.STOP:
        return wanted
    return replace(wanted, intent=OrderIntent.PARK, level=max(master.level, level))


def _master_stop(
    master: DesiredOrder, current: DesiredOrder, gang_slice: GangSlice | None, is_parked: bool
) -> DesiredOrder:
    """Return the order for a new stop of the master. A parked gang keeps its boundary and its agreement: a new one
    would resume it up to another boundary, while other gangs may be on its devices."""
    if _is_stopped_by_switch(current):
        return _stay_at_boundary(master, current, _switch_of(current))
    if (
        gang_slice is not None
        and _is_stopped_by_master(current)
        and is_parked
        and current.stop_sequence != master.stop_sequence
    ):
        return _stay_at_boundary(master, current, max(gang_slice.switch, _FIRST))
    return master


def _stay_at_boundary(master: DesiredOrder, current: DesiredOrder, switch: SliceSwitch) -> DesiredOrder:
    level = max(master.level, current.level) if master.intent is OrderIntent.PARK else master.level
    return replace(_with_switch(master, switch), stop_sequence=current.stop_sequence, level=level)


def _is_apart_from_peer(master: DesiredOrder, current: DesiredOrder, peer_agreement: int) -> bool:
    """Return whether the gang is parked by an earlier agreement while a peer, which had resumed, obeys the master's
    newest stop: the two would never agree."""
    return current.order.is_by_rotation and current.stop_sequence != master.stop_sequence == peer_agreement


def _was_left_behind(
    master: DesiredOrder, current: DesiredOrder, gang_slice: GangSlice, stop: SliceSwitch, peer_agreement: int
) -> bool:
    """Return whether the gang is still parked by an earlier switch while a peer has run since and now obeys the switch
    that ended the slice. The peer alone reaches no boundary. This happens where the master withdrew a stop of the gang
    while its slice ended."""
    is_apart = current.stop_sequence != agreement(gang_slice.node_set, stop) == peer_agreement
    return master.intent is OrderIntent.RUN and _is_stopped_by_switch(current) and is_apart


def _catch_up(master: DesiredOrder, current: DesiredOrder, gang_slice: GangSlice, stop: SliceSwitch) -> DesiredOrder:
    """Return the order to leave the boundary where the gang is parked for that of the switch, with its peers."""
    switch = max(gang_slice.switch, replace(_switch_of(current), sequence=_switch_of(current).sequence + 1))
    return _park_order(master, switch, agreement(gang_slice.node_set, stop), gang_slice.level)


def _join_peers(master: DesiredOrder, current: DesiredOrder) -> DesiredOrder:
    switch = _switch_of(current)
    return _with_switch(master, replace(switch, sequence=switch.sequence + 1))


def _switch_of(current: DesiredOrder) -> SliceSwitch:
    return SliceSwitch(current.order.set_epoch, current.order.local_sequence)


def _with_switch(master: DesiredOrder, switch: SliceSwitch) -> DesiredOrder:
    return replace(master, order=replace(master.order, set_epoch=switch.set_epoch, local_sequence=switch.sequence))
