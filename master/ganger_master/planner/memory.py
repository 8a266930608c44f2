"""The planner's state as bytes that survive a restart: a planner that follows a killed one continues from the last
note.

A note of another version, policy or cluster, or a damaged one, is rejected as a whole, and jobs are measured again.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from math import isfinite
from typing import Final, get_origin

import msgspec
import numpy as np
from ganger.text import counted

from ganger_master.planner.growth_stage import GrowthTrials
from ganger_master.planner.in_place_resize import NOTHING_UNDER_WAY, Resizing
from ganger_master.planner.migration_plans import MigrationMemory
from ganger_master.planner.rate_registry import RememberedRates
from ganger_master.planner.sharing_stage import NOTHING, Shared
from ganger_master.planner.sharing_under_order import OrderColocation

_MAGIC: Final = "ganger planner"
# Clocks that are adjusted differ by no more.
_CLOCKS_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class PlannerMemory:
    """Decisions that are not done or judged yet, failed trials, and measured rates."""

    shared: Shared = NOTHING
    packing: OrderColocation = field(default_factory=OrderColocation)
    moving: MigrationMemory = field(default_factory=MigrationMemory)
    growing: GrowthTrials = field(default_factory=GrowthTrials)
    resizing: Resizing = NOTHING_UNDER_WAY
    rates: RememberedRates = field(default_factory=RememberedRates)


class _Note(msgspec.Struct, array_like=True, frozen=True):
    """`kind`: hash of the types of this version; `check`: checksum of `memory`."""

    magic: str
    kind: int
    policy: str
    time_s: float
    check: int
    memory: bytes


@dataclass(frozen=True, slots=True)
class Unusable:
    """`why`: the reason, as text for people."""

    why: str


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value)} is not noted")


def _array(kind: type, value: object) -> object:
    if get_origin(kind) is np.ndarray:
        return np.asarray(value, float)
    raise TypeError(f"{kind} is not noted")


_encode: Final = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def packed(memory: PlannerMemory) -> bytes:
    """Return the state as bytes, the same for equal states."""
    # The result of the inner pass is computed again.
    return _encode(replace(memory, moving=replace(memory.moving, found=None)))


def unpacked(packet: bytes) -> PlannerMemory:
    """Return the state of `packed`. Raises ValueError or RecursionError for one of another version."""
    return _decoder().decode(packet)


def noted(memory: bytes, policy: str, now: float) -> bytes:
    """Return a note of `memory` from `packed`, at `now` (Unix seconds by the master's clock), under this policy."""
    return _encode(_Note(_MAGIC, _kind(), policy, now, zlib.crc32(memory), memory))


def recalled(
    note: bytes, policy: str, now: float, create_time: Callable[[int], float | None]
) -> PlannerMemory | Unusable:
    """Return the noted state if this planner can continue from it. `create_time`: of a live job by number, or None."""
    try:
        found = msgspec.msgpack.decode(note, type=_Note)
    except (ValueError, RecursionError) as error:
        return Unusable(f"it is damaged: {error}")
    if found.magic != _MAGIC or not isfinite(found.time_s):
        return Unusable("it is no note of a planner")
    if found.kind != _kind():
        return Unusable("it is of another version of the planner")
    if found.check != zlib.crc32(found.memory):
        return Unusable("it is damaged: its sum is another one")
    if found.policy != policy:
        return Unusable(f"it is of policy {found.policy}")
    if found.time_s > now + _CLOCKS_S:
        return Unusable(f"it is of {counted(found.time_s - now, 'second', '.0f')} from now: clocks were set back")
    try:
        memory = unpacked(found.memory)
    except (ValueError, RecursionError) as error:
        return Unusable(f"it is damaged: {error}")
    for number, known in memory.rates.jobs.items():
        live = create_time(number)
        if live is not None and live != known.create_time:
            return Unusable(f"it is of another cluster, where jobs/{number} was another one")
    return memory


@cache
def _decoder() -> msgspec.msgpack.Decoder[PlannerMemory]:
    return msgspec.msgpack.Decoder(PlannerMemory, dec_hook=_array)


@cache
def _kind() -> int:
    """Return a hash that changes with every field of the state, but not with addresses of functions."""
    types = re.sub(r" at 0x[0-9a-f]+", "", repr(msgspec.inspect.type_info(PlannerMemory)))
    return zlib.crc32(types.encode())
