"""The order of a change of cores: shrinking tells the job first and takes cores after its ack; growing gives cores
first."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# A job that does not ack (opaque, or in a long evaluation) loses the cores anyway after this.
ACK_SECONDS = 5.0


class RetuneStep(Enum):
    TELL = "write threads into the pages"
    PIN = "rewrite the cpuset"
    WAIT = "wait for the ranks to apply their threads"


@dataclass(frozen=True, slots=True)
class Retune:
    """A change from one number of threads to another."""

    threads_before: int
    threads_after: int

    def steps(self) -> tuple[RetuneStep, ...]:
        if self.threads_after == self.threads_before:
            return (RetuneStep.PIN,)
        if self.threads_after < self.threads_before:
            return (RetuneStep.TELL, RetuneStep.WAIT, RetuneStep.PIN)
        return (RetuneStep.PIN, RetuneStep.TELL)
