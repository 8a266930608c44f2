"""What there is in a recording: commands by kind, verdicts by ground, and which jobs asked for gangs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ganger_master.core import commands
from ganger_master.decision_log.job_history import VerdictReason, verdict_of
from ganger_master.decision_log.rerun import Decided, Drawn, Happening


@dataclass(slots=True)
class Asking:
    """One job that asked, or was planned for."""

    requests: int = 0
    approved: int = 0
    # Of the last refusal.
    reason: str = ""


@dataclass(slots=True)
class LogSummary:
    commands: Counter[str] = field(default_factory=Counter)
    # Grounds of refused requests and changes; "" counts those that were approved.
    verdicts: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    jobs: dict[int, Asking] = field(default_factory=dict)

    def tell(self, happening: Happening) -> None:
        match happening:
            case Drawn():
                self.batches += 1
            case Decided(_, _, command, answer, _):
                self.commands[type(command).__name__] += 1
                match command:
                    case commands.RequestGang(number=number):
                        numbers = [number]
                    case commands.ProposePlan(changes=changes):
                        numbers = [change.number for change in changes]
                    case _:
                        return
                for number in numbers:
                    self._count(number, *verdict_of(answer, number))
            case _:
                return

    def _count(self, number: int, verdict: str, whys: tuple[VerdictReason, ...]) -> None:
        asking = self.jobs.setdefault(number, Asking())
        asking.requests += 1
        if verdict == "approved":
            asking.approved += 1
            self.verdicts[""] += 1
            return
        asking.reason = whys[0].reason if whys else "nothing said"
        self.verdicts[asking.reason] += 1
