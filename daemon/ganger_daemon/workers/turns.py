"""What a gang is to do now: what its master wants, as far as it is the gang's turn.

Under a set's switches a gang that the master wants to run may have to rest. Its order is then the master's with the
switch added to the key, and the number of its boundary agreement is the switch's: all nodes of the gang know that one.
"""

from __future__ import annotations

from ganger.agent.v1 import agent_pb2

from ganger_daemon.core.orders import Level
from ganger_daemon.core.rotation import Switch

# Above all numbers that a master gives to stops.
_TURN_BIT = 1 << 61
_SET_BITS = 20


def is_by_turn(desired: agent_pb2.DesiredGang) -> bool:
    """Whether a switch is what it was told last."""
    return desired.order.set_epoch > 0


def rests_by_turn(desired: agent_pb2.DesiredGang) -> bool:
    return is_by_turn(desired) and desired.intent == agent_pb2.INTENT_PARK


def is_under_own_stop(desired: agent_pb2.DesiredGang) -> bool:
    """Whether it stops, or rests, by an order of the master and by no switch."""
    return not is_by_turn(desired) and desired.intent != agent_pb2.INTENT_RUN


def may_wait_its_turn(told: agent_pb2.DesiredGang) -> bool:
    """Not an end without a checkpoint: that one needs neither a device nor an agreement."""
    return told.intent != agent_pb2.INTENT_STOP or told.checkpoint_first


def running(told: agent_pb2.DesiredGang, switch: Switch) -> agent_pb2.DesiredGang:
    """It is its turn."""
    return _under(told, switch)


def resting(told: agent_pb2.DesiredGang, node_set: int, stop: Switch, level: Level) -> agent_pb2.DesiredGang:
    """Its turn is over, by that switch. Where the master wants it to rest too, at the deeper of both levels."""
    message = _under(told, stop)
    message.stop_sequence = agreement(node_set, stop)
    if told.intent != agent_pb2.INTENT_STOP:
        message.intent = agent_pb2.INTENT_PARK
        deeper = told.level if told.intent == agent_pb2.INTENT_PARK else 0
        message.level = max(deeper, int(level))  # type: ignore[assignment]  # one of the enumeration's numbers
    return message


def staying(told: agent_pb2.DesiredGang, desired: agent_pb2.DesiredGang) -> agent_pb2.DesiredGang:
    """It rests by a switch, and the master wants it to rest: where it stands, by the agreement that there is."""
    message = _under(told, Switch(desired.order.set_epoch, desired.order.local_sequence))
    message.stop_sequence = desired.stop_sequence
    if told.intent == agent_pb2.INTENT_PARK:
        message.level = max(told.level, desired.level)
    return message


def deeper(
    told: agent_pb2.DesiredGang, desired: agent_pb2.DesiredGang, switch: Switch, level: Level
) -> agent_pb2.DesiredGang:
    """It rests, and gives up what that later switch asks: where it stands, by the agreement that there is."""
    message = _under(told, switch)
    message.stop_sequence = desired.stop_sequence
    message.intent = agent_pb2.INTENT_PARK
    deepest = told.level if told.intent == agent_pb2.INTENT_PARK else 0
    message.level = max(deepest, int(level))  # type: ignore[assignment]  # one of the enumeration's numbers
    return message


def goes_further(told: agent_pb2.DesiredGang, desired: agent_pb2.DesiredGang) -> bool:
    """Whether it rests, or is to, by a former stop of the master: the new one would wake it first."""
    return is_under_own_stop(desired) and _stop_of(desired) != _stop_of(told)


def stands_apart(told: agent_pb2.DesiredGang, desired: agent_pb2.DesiredGang, heard: int) -> bool:
    """Whether it stands by a switch while a peer, which had its next turn already, obeys the master's own stop: the
    two would never agree. `heard`: the agreement that a peer spoke of last."""
    return desired.stop_sequence >= _TURN_BIT and told.intent != agent_pb2.INTENT_RUN and heard == _stop_of(told)


def joining(told: agent_pb2.DesiredGang, desired: agent_pb2.DesiredGang) -> agent_pb2.DesiredGang:
    """It leaves the boundary of a switch for that of the master's stop, with its peers."""
    message = _under(told, Switch(desired.order.set_epoch, desired.order.local_sequence + 1))
    message.stop_sequence = _stop_of(told)
    return message


def _stop_of(told: agent_pb2.DesiredGang) -> int:
    return told.stop_sequence or told.order.master_sequence


def agreement(node_set: int, stop: Switch) -> int:
    """The number of the boundary agreement that a switch begins: the same on all nodes, and never one of before."""
    return _TURN_BIT | (node_set % (1 << _SET_BITS)) << 40 | stop.set_epoch << 28 | stop.sequence


def _under(told: agent_pb2.DesiredGang, switch: Switch) -> agent_pb2.DesiredGang:
    message = agent_pb2.DesiredGang()
    message.CopyFrom(told)
    message.order.set_epoch, message.order.local_sequence = switch.set_epoch, switch.sequence
    return message
