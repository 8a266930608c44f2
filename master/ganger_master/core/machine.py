"""One step of the machine: decide, apply, answer. What every shell (the master's writer, the simulator) calls.

A shell that commits several commands at once calls `advance` for each and `finish` once for all of them; `step` is both
for one. The caller's obligations, in order: (1) make `state.take_changes()` and all history durable in one
transaction; (2) only then send the answers and let the other effects out; (3) if that fails, refuse every caller of the
batch and go on from `restoring.restored`.
"""

from __future__ import annotations

from typing import Final

from ganger.cluster.view import LoadMode
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import answers, desired_state, moves, placement_leases, retry, rollback
from ganger_master.core.answers import Answer
from ganger_master.core.apply import apply
from ganger_master.core.commands import Command
from ganger_master.core.decide import decide
from ganger_master.core.effects import Effects
from ganger_master.core.events import Event
from ganger_master.core.state import State

_NONE: Final = Effects()
_TICK_S: Final = 0.001


class MachineStep(Struct, frozen=True, gc=False):
    answer: Answer
    events: tuple[Event, ...] = ()
    effects: Effects = _NONE


def step(state: State, command: Command, now: float) -> MachineStep:
    """Carry out one command as a batch of its own. Without events there are no effects."""
    answer, events = advance(state, command, now)
    return MachineStep(answer, events, finish(state, now) if events else _NONE)


def advance(state: State, command: Command, now: float) -> tuple[Answer, tuple[Event, ...]]:
    """Carry out one command of a batch; return its answer and events. Its effects come with `finish`."""
    events, answer = decide(state, command, now)
    for event in events:
        apply(state, event)
    return _complete(state, answer), events


def finish(state: State, now: float) -> Effects:
    """Return the effects of all events since the last call; call it before `state.take_changes`."""
    _note_mode(state, now)
    nodes = tuple(desired_state.refresh(state))
    turns = placement_leases.hand_out(state, now) if state.counters.restoring is None else ()
    wake = next_wake(state, now)
    if wake is not None:
        # Never at once again: what did not follow from this instant follows from a later one.
        wake = max(wake, now + _TICK_S)
    is_unchanged = wake == state.wake_at
    state.wake_at = wake
    dirty = state.dirty
    effects = Effects(
        state.unstored.take_history(),
        tuple(dirty.news),
        nodes,
        tuple(dirty.shown),
        turns,
        None if is_unchanged else wake,
    )
    dirty.news.clear()
    dirty.shown.clear()
    return effects


def next_wake(state: State, now: float) -> float | None:
    """Return the earliest time at which something happens without a command; None if nothing will."""
    if state.counters.restoring is not None:
        return rollback.next_time(state, now)
    times = [placement_leases.next_time(state, now), state.nodes.next_silence_check]
    if state.jobs.running_limited:
        times += [retry.ends_at(state, state.jobs[number]) for number in state.jobs.running_limited]
    if state.jobs.backing_off:
        times += [state.jobs[number].again_at for number in state.jobs.backing_off]
    if state.jobs.moving:
        times += [moves.due_at(state, number) for number in state.jobs.moving]
    if state.queue.promised:
        times.append(state.queue.promised_at + state.settings.move_deadline_s)
    return min([time for time in times if time is not None], default=None)


def _note_mode(state: State, now: float) -> None:
    """Record a change between pack mode and spread mode, for operators and for a restart."""
    packs = state.view.mode is LoadMode.PACK
    if packs == state.counters.packs:
        return
    state.counters.packs = packs
    devices = state.nodes.devices
    held = devices - state.nodes.free_devices
    text = "gangs are packed, to keep holes for large ones" if packs else "gangs are spread apart"
    state.history(
        now, "cluster", "mode_changed", "load", text, mode=state.view.mode.name, held=held, of=state.nodes.devices
    )


def _complete(state: State, answer: Answer) -> Answer:
    """Complete an answer with what the events have decided: epoch, revision, version."""
    match answer:
        case answers.Approved():
            job = state.jobs[answer.number]
            epoch = job.next_epoch or job.epoch
            return answers.Approved(job.number, epoch, job.revision, state.view.version, answer.candidate)
        case answers.PlanAnswer():
            verdicts = tuple(
                [
                    replace(verdict, revision=state.jobs[verdict.number].revision)
                    if verdict.number in state.jobs
                    else verdict
                    for verdict in answer.verdicts
                ]
            )
            return replace(answer, verdicts=verdicts, view_version=state.view.version)
        case _:
            return answer
