"""What a gang that takes turns is to do now: what its master wants, as far as it is the gang's turn.

Under a set's switches a gang that the master wants to run may have to rest. Its order is then the master's with the
switch added to the key, and the number of its boundary agreement is the switch's: all nodes of the gang know that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .orders import DesiredOrder, OrderIntent, ParkLevel
from .rotation import SliceSwitch

# Above all numbers that a master gives to stops.
_TURN_BIT = 1 << 61
_SET_BITS = 20
# Before any that a leader orders.
_FIRST = SliceSwitch(1, 0)


@dataclass(frozen=True, slots=True)
class GangSlice:
    """How a gang stands in its node set: under which switch, by which one its turn is over (None: it is not), what who
    rests there gives up, whether a newer matrix is known here that is not active yet, and whether the active one has a
    row for it."""

    node_set: int
    switch: SliceSwitch
    stop: SliceSwitch | None
    level: ParkLevel
    changes: bool = False
    has_row: bool = True


def may_wait_its_turn(told: DesiredOrder) -> bool:
    """Not an end without a checkpoint: that one needs neither a device nor an agreement."""
    return told.intent is not OrderIntent.STOP or told.checkpoint_first


def agreement(node_set: int, stop: SliceSwitch) -> int:
    """The number of the boundary agreement that a switch begins: the same on all nodes, and never one of before."""
    return _TURN_BIT | (node_set % (1 << _SET_BITS)) << 40 | stop.set_epoch << 28 | stop.sequence


def next_order(
    told: DesiredOrder,
    obeyed: DesiredOrder,
    turn: GangSlice | None,
    is_parked: bool,
    heard: int,
    is_blocked: Callable[[], bool],
) -> DesiredOrder | None:
    """What it is to obey from now on; None: what it does obey. `told`: by the master, `turn`: None outside of node
    sets, `is_parked`: it rests as it obeys, `heard`: the agreement that a peer spoke of last, `is_blocked`: whether
    others are on its devices."""
    if not may_wait_its_turn(told):
        return None
    is_new = told.order.master_sequence > obeyed.order.master_sequence
    if obeyed.intent is OrderIntent.PREPARE:
        # On its devices already, where it waits for its state: it leaves them by its turns once it runs.
        return told if is_new else None
    if turn is not None and turn.stop is not None:
        over = _when_over(told, obeyed, turn, turn.stop, is_new, is_parked)
        if over is None and _was_left(told, obeyed, turn, turn.stop, heard) and not is_blocked():
            return _catching_up(told, obeyed, turn, turn.stop)
        return over
    if told.intent is not OrderIntent.RUN:
        if is_new:
            return _own_stop(told, obeyed, turn, is_parked)
        return _joining(told, obeyed) if _stands_apart(told, obeyed, heard) and not is_blocked() else None
    if obeyed.intent is not OrderIntent.RUN:
        if is_blocked() or _waits_for_peers(obeyed, turn):
            return None
        return _under(told, turn.switch) if turn is not None else told
    if turn is None:
        return told
    # it runs, and is told so anew, with what else has changed
    return _under(told, _switch_of(obeyed)) if is_new else None


def _when_over(
    told: DesiredOrder, obeyed: DesiredOrder, turn: GangSlice, stop: SliceSwitch, is_new: bool, is_parked: bool
) -> DesiredOrder | None:
    if is_new and told.intent is not OrderIntent.RUN and (_rests_by_turn(obeyed) or _is_under_own_stop(obeyed)):
        return _own_stop(told, obeyed, turn, is_parked)
    if _rests_by_turn(obeyed):
        gives_up_more = told.intent in (OrderIntent.RUN, OrderIntent.PARK) and obeyed.level < turn.level
        # What was to be saved and ended, and is to run after all, may still have all that it had on its devices.
        is_spared = is_new and told.intent is OrderIntent.RUN and obeyed.level is ParkLevel.CHECKPOINT
        if gives_up_more or is_spared:
            return _resting(told, turn.switch, obeyed.stop_sequence, turn.level)
        return None
    if _is_under_own_stop(obeyed):
        if told.intent is not OrderIntent.RUN:
            return None
        if is_parked:
            return _resting(told, stop, obeyed.stop_sequence, turn.level)
    return _resting(told, stop, agreement(turn.node_set, stop), turn.level)


def _rests_by_turn(obeyed: DesiredOrder) -> bool:
    return obeyed.order.is_by_turn and obeyed.intent is not OrderIntent.RUN


def _is_under_own_stop(obeyed: DesiredOrder) -> bool:
    """Whether it stops, or rests, by an order of the master and by no switch."""
    return not obeyed.order.is_by_turn and obeyed.intent is not OrderIntent.RUN


def _waits_for_peers(obeyed: DesiredOrder, turn: GangSlice | None) -> bool:
    """Whether its peers may not have heard yet that they go on, or find others on their devices, and would rest if a
    switch came first. Who stopped by an order of the master, or has no row yet, knows that they go on with it once the
    matrix is active that was told with it."""
    return turn is not None and turn.changes and (not turn.has_row or obeyed.stop_sequence < _TURN_BIT)


def _resting(told: DesiredOrder, switch: SliceSwitch, stop_sequence: int, level: ParkLevel) -> DesiredOrder:
    """Its turn is over. Where the master wants it to rest too, at the deeper of both levels."""
    wanted = replace(_under(told, switch), stop_sequence=stop_sequence)
    if told.intent is OrderIntent.STOP:
        return wanted
    return replace(wanted, intent=OrderIntent.PARK, level=max(told.level, level))


def _own_stop(told: DesiredOrder, obeyed: DesiredOrder, turn: GangSlice | None, is_parked: bool) -> DesiredOrder:
    """A stop of the master's own. Who rests already stays where it stands, by the agreement that there is: the new one
    would wake it, to go on to a boundary of its own, and others may be on its devices."""
    if _rests_by_turn(obeyed):
        return _staying(told, obeyed, _switch_of(obeyed))
    if turn is not None and _is_under_own_stop(obeyed) and is_parked and obeyed.stop_sequence != told.stop_sequence:
        return _staying(told, obeyed, max(turn.switch, _FIRST))
    return told


def _staying(told: DesiredOrder, obeyed: DesiredOrder, switch: SliceSwitch) -> DesiredOrder:
    level = max(told.level, obeyed.level) if told.intent is OrderIntent.PARK else told.level
    return replace(_under(told, switch), stop_sequence=obeyed.stop_sequence, level=level)


def _stands_apart(told: DesiredOrder, obeyed: DesiredOrder, heard: int) -> bool:
    """Whether it stands by a former agreement while a peer, which went on meanwhile, obeys the master's newest stop:
    the two would never agree."""
    return obeyed.order.is_by_turn and obeyed.stop_sequence != told.stop_sequence == heard


def _was_left(told: DesiredOrder, obeyed: DesiredOrder, turn: GangSlice, stop: SliceSwitch, heard: int) -> bool:
    """Whether it still rests by a former switch while a peer had its turn meanwhile and now obeys the switch that ended
    it: the peer comes to no boundary alone. That happens where the master took a stop of the gang back while its turn
    ended."""
    is_apart = obeyed.stop_sequence != agreement(turn.node_set, stop) == heard
    return told.intent is OrderIntent.RUN and _rests_by_turn(obeyed) and is_apart


def _catching_up(told: DesiredOrder, obeyed: DesiredOrder, turn: GangSlice, stop: SliceSwitch) -> DesiredOrder:
    """Return the order to leave the boundary where it rests for that of the switch, with its peers."""
    switch = max(turn.switch, replace(_switch_of(obeyed), sequence=_switch_of(obeyed).sequence + 1))
    return _resting(told, switch, agreement(turn.node_set, stop), turn.level)


def _joining(told: DesiredOrder, obeyed: DesiredOrder) -> DesiredOrder:
    """It leaves the boundary where it stands for that of the master's stop, with its peers."""
    switch = _switch_of(obeyed)
    return _under(told, replace(switch, sequence=switch.sequence + 1))


def _switch_of(obeyed: DesiredOrder) -> SliceSwitch:
    return SliceSwitch(obeyed.order.set_epoch, obeyed.order.local_sequence)


def _under(told: DesiredOrder, switch: SliceSwitch) -> DesiredOrder:
    return replace(told, order=replace(told.order, set_epoch=switch.set_epoch, local_sequence=switch.sequence))
