"""Capabilities of jobs and their mechanisms: the core's values and `ganger.v1` messages, both ways."""

from __future__ import annotations

from typing import Final

from ganger.protocol.gang_orders import Mechanism
from ganger.v1 import job_pb2

from ganger_master.core.effects import cut
from ganger_master.core.job_model import Capabilities, RefusedMechanism

_MECHANISMS: Final = {int(mechanism): mechanism for mechanism in Mechanism}
# Levels that a daemon may report as missing, and the characters of each reason.
_MISSING_MOST: Final = 8
_WHY_MOST: Final = 200


def mechanism_to_wire(mechanism: Mechanism) -> job_pb2.Mechanism.ValueType:
    return job_pb2.Mechanism.ValueType(mechanism)


def mechanism_from_wire(number: int) -> Mechanism:
    """Return the mechanism; unspecified for one that this program does not have."""
    return _MECHANISMS.get(number, Mechanism.UNSPECIFIED)


def capabilities_to_wire(value: Capabilities) -> job_pb2.Capabilities:
    return job_pb2.Capabilities(
        can_pause=value.pause,
        can_offload=value.offload,
        can_checkpoint=value.checkpoint,
        missing=dict(value.missing),
        can_resize=value.resize,
        can_reshard=value.reshard,
        resize_divides=value.resize_divides,
        is_presumed=value.presumed,
        can_move=value.can_move,
        offload_by=value.offload_by,
        mechanism=mechanism_to_wire(value.mechanism),
        refused_mechanisms=[
            job_pb2.RefusedMechanism(mechanism=mechanism_to_wire(one.mechanism), reason=one.reason)
            for one in value.refused_mechanisms
        ],
    )


def capabilities_from_wire(message: job_pb2.Capabilities) -> Capabilities:
    return Capabilities(
        message.can_pause,
        message.can_offload,
        message.can_checkpoint,
        {level[:_WHY_MOST]: cut(why, _WHY_MOST) for level, why in sorted(message.missing.items())[:_MISSING_MOST]},
        known=True,
        resize=message.can_resize,
        reshard=message.can_reshard,
        resize_divides=message.resize_divides,
        presumed=message.is_presumed,
        mechanism=mechanism_from_wire(message.mechanism),
        offload_by=cut(message.offload_by, _WHY_MOST),
        refused_mechanisms=tuple(
            RefusedMechanism(mechanism_from_wire(one.mechanism), cut(one.reason, _WHY_MOST))
            for one in message.refused_mechanisms[: len(Mechanism)]
        ),
    )
