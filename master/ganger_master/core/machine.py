"""One step of the machine: decide, apply, answer. What every shell (the master's writer, the simulator) calls.

The caller's obligations, in order: (1) make `state.take_changes()` and every `History` effect durable in one
transaction; (2) only then send the answer and let the other effects out; (3) if that fails, refuse every caller of the
batch and go on from `State.restore`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ganger_master.core import answers
from ganger_master.core.answers import Answer
from ganger_master.core.apply import apply
from ganger_master.core.commands import Command
from ganger_master.core.decide import decide
from ganger_master.core.effects import Effect
from ganger_master.core.events import Event
from ganger_master.core.state import State


@dataclass(frozen=True, slots=True)
class Step:
    answer: Answer
    events: tuple[Event, ...] = ()
    effects: tuple[Effect, ...] = ()


def step(state: State, command: Command, now: float) -> Step:
    """Carries one command through."""
    decision = decide(state, command, now)
    effects: list[Effect] = []
    for event in decision.events:
        effects.extend(apply(state, event))
    return Step(_complete(state, decision.answer), decision.events, tuple(effects))


def _complete(state: State, answer: Answer) -> Answer:
    """Fills in what is known only after the events: epoch, revision, version."""
    match answer:
        case answers.Approved():
            job = state.jobs[answer.number]
            return replace(
                answer,
                epoch=job.next_epoch or job.epoch,
                revision=job.revision,
                view_version=state.view.version,
            )
        case answers.PlanAnswer():
            verdicts = tuple(
                replace(verdict, revision=state.jobs[verdict.number].revision)
                if verdict.number in state.jobs
                else verdict
                for verdict in answer.verdicts
            )
            return replace(answer, verdicts=verdicts, view_version=state.view.version)
        case _:
            return answer
