"""One step of the machine: decide, apply, answer. What every shell (the master's writer, the simulator) calls.

A shell that commits several commands at once calls `advance` for each and `finish` once for all of them; `step` is both
for one. The caller's obligations, in order: (1) make `state.take_changes()` and all history durable in one
transaction; (2) only then send the answers and let the other effects out; (3) if that fails, refuse every caller of the
batch and go on from `restoring.restored`.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import answers
from ganger_master.core.answers import Answer
from ganger_master.core.apply import apply
from ganger_master.core.commands import Command
from ganger_master.core.decide import decide
from ganger_master.core.effects import Effects
from ganger_master.core.events import Event
from ganger_master.core.settle import finish as finish_batch
from ganger_master.core.state import State

_NONE: Final = Effects()


class MachineStep(Struct, frozen=True, gc=False):
    answer: Answer
    events: tuple[Event, ...] = ()
    effects: Effects = _NONE


def step(state: State, command: Command, now: float) -> MachineStep:
    """Carries one command through, as a batch of its own. Without events there are no effects."""
    answer, events = advance(state, command, now)
    return MachineStep(answer, events, finish(state, now) if events else _NONE)


def advance(state: State, command: Command, now: float) -> tuple[Answer, tuple[Event, ...]]:
    """Carries one command of a batch through: what to answer, and what happened. Its effects come with `finish`."""
    decision = decide(state, command, now)
    for event in decision.events:
        apply(state, event)
    return _complete(state, decision.answer), decision.events


def finish(state: State, now: float) -> Effects:
    """What the shell owes for all that advanced since the last call; before `state.take_changes`."""
    return finish_batch(state, now)


def _complete(state: State, answer: Answer) -> Answer:
    """Fills in what is known only after the events: epoch, revision, version."""
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
