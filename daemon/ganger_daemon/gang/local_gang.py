"""Poll interval of a gang's loop: short where a job waits for the daemon, long where the ranks need the processor."""

from __future__ import annotations

from ganger_daemon.core.orders import PartPhase

_FAST_SECONDS = 0.0015
_BUSY_SECONDS = 0.005
_COPY_SECONDS = 0.02
_WAITING_SECONDS = 0.05
_SLOW_SECONDS = 0.25
_OVER_SECONDS = 60.0


def next_look(
    phase: PartPhase,
    *,
    is_over: bool = False,
    is_launched: bool = True,
    is_copying: bool = False,
    is_verifying: bool = False,
    is_death_awaited: bool = False,
    is_preparing: bool = False,
    is_young: bool = True,
    is_agreeing: bool = False,
) -> float:
    """Return the seconds until the next tick of a gang's loop; a wake-up comes sooner.

    `is_copying`: ranks copy their state; `is_verifying`: freed device memory is being verified; `is_preparing`: ranks
    get ready for a migration; `is_young`: launched or ordered a short while ago; `is_agreeing`: ranks on several nodes
    agree on a step to stop at."""
    if is_over:
        return _OVER_SECONDS
    if not is_launched:
        return _WAITING_SECONDS
    if is_copying:
        # the copying ranks need the processor, and send a packet when they are done
        return _COPY_SECONDS
    if phase is PartPhase.STOPPING:
        return _BUSY_SECONDS if is_verifying else _FAST_SECONDS
    if is_death_awaited:
        return _BUSY_SECONDS
    if phase in (PartPhase.STARTING, PartPhase.PREPARED) or is_preparing:
        # a script that never attaches is not polled fast for ever
        return _BUSY_SECONDS if is_young else _WAITING_SECONDS
    return _FAST_SECONDS if is_agreeing else _SLOW_SECONDS
