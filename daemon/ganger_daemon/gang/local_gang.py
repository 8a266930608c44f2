"""How soon a gang is looked at again: often enough that nobody waits for the daemon, seldom enough that the processor
belongs to the ranks."""

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
    """Seconds until then; what wakes a gang comes sooner. `is_copying`: a state is on its way; `is_verifying`: device
    memory is being seen free; `is_preparing`: ranks are to get ready; `is_young`: it was launched a short while ago;
    `is_agreeing`: ranks on several nodes look for a step to stop at."""
    if is_over:
        return _OVER_SECONDS
    if not is_launched:
        return _WAITING_SECONDS
    if is_copying:
        # the processor belongs to who copies; the rank sends word when it is done
        return _COPY_SECONDS
    if phase is PartPhase.STOPPING:
        return _BUSY_SECONDS if is_verifying else _FAST_SECONDS
    if is_death_awaited:
        return _BUSY_SECONDS
    if phase in (PartPhase.STARTING, PartPhase.PREPARED) or is_preparing:
        # a script that never attaches is not worth a fast look for ever
        return _BUSY_SECONDS if is_young else _WAITING_SECONDS
    return _FAST_SECONDS if is_agreeing else _SLOW_SECONDS
