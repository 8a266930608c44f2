"""Many runs at once, each in a process of its own; one that dies is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ganger_master.runtime.heap import settle
from ganger_master.simulator.inputs import Load, Material, jobs_at
from ganger_master.simulator.options import ReplayOptions
from ganger_master.simulator.processes import Report, WorkerFailure, each
from ganger_master.simulator.report.outcomes import Run

# What `ganger_master.simulator.run.simulate` is.
Simulate = Callable[..., Run]
# How often a run says how far it is.
_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True)
class RunCell:
    """One run of a comparison."""

    policy: str
    load: Load
    seed: int

    def __str__(self) -> str:
        return f"policy {self.policy}, load {self.load}, seed {self.seed}"


class RunError(RuntimeError):
    """A run did not come to its end; the message names it, `details` are what its process had to say."""

    def __init__(self, cell: RunCell, what: str, details: str = "") -> None:
        super().__init__(f"{cell}: {what}")
        self.details = details


def run_all(
    cells: Sequence[RunCell],
    source: Material,
    options: Callable[[RunCell], ReplayOptions],
    simulate: Simulate,
    workers: int,
    progress: Callable[[RunCell, int], None] | None = None,
) -> Generator[tuple[RunCell, Run]]:
    """Runs in the order in which they end. `progress` gets a cell and how many of its jobs have ended. RunError for
    the first that fails; ValueError where the jobs cannot offer a cell's load."""

    def arguments(cell: RunCell) -> tuple[Any, ...]:
        return simulate, jobs_at(source, cell.load, cell.seed), source.servers, cell.policy, options(cell)

    with closing(each(cells, _simulated, arguments, workers, progress)) as every:
        for cell, found in every:
            if isinstance(found, WorkerFailure):
                raise RunError(cell, found.what, found.details)
            yield cell, found


def _simulated(simulate: Simulate, jobs: Any, servers: Any, policy: str, options: ReplayOptions, report: Report) -> Run:
    """In the child."""
    settle()
    return simulate(jobs, servers, policy, options, _Reports(report))


class _Reports:
    def __init__(self, report: Report) -> None:
        self._report = report
        self._next = time.monotonic()

    def __call__(self, ended: int, _: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_REPORTS
            self._report(ended)
