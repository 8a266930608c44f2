"""When the next checkpoint of a running gang is due. Only the gang's leader asks; members hear of it by the relay."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times are seconds of a monotonic clock. `asked` counts requests made, `served` is the master's counter obeyed."""

    last: float
    served: int = 0


def due(schedule: Schedule, now: float, interval_seconds: float, request: int) -> bool:
    """Whether to ask for a checkpoint now: the master raised its counter, or the interval is over (0: never)."""
    if request > schedule.served:
        return True
    return interval_seconds > 0 and now - schedule.last >= interval_seconds


def asked(schedule: Schedule, now: float, request: int) -> Schedule:
    return replace(schedule, last=now, served=max(schedule.served, request))
