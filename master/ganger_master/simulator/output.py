"""Output of `ganger simulate` and `ganger compare`: text and JSON, messages and progress on stderr.

A failing stderr (a full disk) does not fail the run.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ganger_master.simulator.inputs import Load, Material, ReplayOptions
from ganger_master.simulator.report import documents, side_by_side
from ganger_master.simulator.report.figures import Figures
from ganger_master.simulator.traces.row_findings import RowFinding, RowFindingKind, rows_of, shown
from ganger_master.simulator.traces.servers import Servers

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def say(text: str) -> None:
    """Print a line on stderr, as far as possible."""
    with ignoring_stderr_errors():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def ignoring_stderr_errors() -> Iterator[None]:
    """Redirect stderr to the null device if writing to it fails."""
    try:
        yield
    except OSError:
        # Buffered text would fail again when Python flushes at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def notes(source: Material, is_ideal: bool) -> list[str]:
    """Return lines on rows that were left out or changed; empty if every row became a job unchanged."""
    lines = []
    left_out = rows_of(source.findings, RowFindingKind.SKIPPED)
    if left_out or source.apart:
        kept = _several(source.rows - left_out - source.apart, "job")
        chosen = f", {source.apart:,} not asked for" if source.apart else ""
        lines.append(f"{_several(source.rows, 'row')}: {kept}, {left_out:,} left out{chosen}")
    words = {RowFindingKind.SKIPPED: "left out", RowFindingKind.CHANGED: "changed", RowFindingKind.MISTAKE: "mistake"}
    lines += [f"{words[finding.kind]}: {finding}" for finding in source.findings]
    if source.ignored_columns:
        lines.append(f"columns that were not read: {shown(', '.join(source.ignored_columns))}")
    unnamed = sum(not model for model in source.jobs.model.texts())
    # Ideal replays do not depend on models.
    if unnamed and not is_ideal:
        lines.append(f"changed: models are drawn for {_several(unnamed, 'job')} of unknown model")
    return [f"{source.trace}: {line}" for line in lines]


def cluster_in_words(servers: Servers) -> str:
    kinds = sorted({group.configuration_set.device_type for group in servers.groups if group.configuration_set.devices})
    types = "" if kinds == ["gpu"] else f" ({', '.join(kinds)})"
    parts = (
        _several(servers.nodes, "node"),
        _several(servers.gpus, "GPU") + types,
        _several(servers.millicores // 1000, "core"),
    )
    return ", ".join(parts)


def options_in_words(options: ReplayOptions) -> str:
    if options.ideal:
        words = "ideal: any free GPUs serve, nothing costs time"
    else:
        costs = ", ".join(f"{name.removesuffix('_s')} {seconds:g}s" for name, seconds in asdict(options.costs).items())
        words = f"costs: {costs}; stops at most every {options.plan_every_s:g}s"
    if options.moves_per_hour is not None:
        words += f"; at most {options.moves_per_hour:g} moves of a node in an hour that no pending job needs"
    if options.rates == "profiles":
        words += f"; rates by published profiles, known {options.profile_s:g}s after submission"
    return words if options.round_s is None else f"{words}; rounds of {options.round_s:g}s"


def quotas_if_any(options: ReplayOptions) -> list[tuple[str, str]]:
    """Return the row of the quotas, if there are any."""
    return [("quotas", ", ".join(f"{user}={gpus}" for user, gpus in options.quotas.items()))] if options.quotas else []


def unbounded_load_row(figures: Figures) -> list[tuple[str, str]]:
    """Return the row of the offered load for a run whose load is infinite, which the figures leave out."""
    if math.isfinite(figures.offered_load):
        return []
    return [("offered load", "all jobs are submitted at once")]


def simulated(source: Material, load: Load, options: ReplayOptions, figures: Figures) -> dict[str, Any]:
    """Return one run for JSON: figures by name, trace, cluster, options and load."""
    return documents.as_json(figures) | about(source, options) | {"load": load_asked(load)}


def compared(
    source: Material, options: ReplayOptions, groups: Sequence[tuple[Load, Mapping[str, Sequence[Figures]]]]
) -> dict[str, Any]:
    """Return a comparison for JSON: every run, and the policies side by side at each load."""
    return about(source, options) | {
        "loads": [
            {
                "load": load_asked(load),
                "policies": side_by_side.as_json(runs),
                "runs": [documents.as_json(run) for of_policy in runs.values() for run in of_policy],
            }
            for load, runs in groups
        ],
    }


def about(source: Material, options: ReplayOptions) -> dict[str, Any]:
    """Return trace, cluster and options of a run for JSON."""
    return {
        "trace": {
            "name": source.trace,
            "rows": source.rows,
            "jobs": source.jobs_of_a_run,
            "not_asked_for": source.apart,
            "left_out": [_finding(each) for each in source.findings if each.kind is RowFindingKind.SKIPPED],
            "changed": [_finding(each) for each in source.findings if each.kind is RowFindingKind.CHANGED],
            "ignored_columns": list(source.ignored_columns),
        },
        "cluster": {
            "nodes": source.servers.nodes,
            "gpus": source.servers.gpus,
            "cores": source.servers.millicores / 1000,
            "memory_bytes": source.servers.memory_bytes,
        },
        "options": {name: value for name, value in asdict(options).items() if name != "seed"},
    }


def load_asked(load: Load) -> float | list[dict[str, float]] | None:
    """Return the load for JSON; None: as recorded."""
    if load.phases:
        return [{"seconds": seconds, "load": offered} for seconds, offered in load.phases]
    return load.offered


def _finding(finding: RowFinding) -> dict[str, Any]:
    return {"what": finding.what, "rows": finding.rows, "first_lines": list(finding.lines)}


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


_SECONDS_BETWEEN_LOOKS = 0.1
_TENTHS = 10


class ProgressBar:
    """Progress on stderr: a bar on a terminal, elsewhere a line per tenth. Call it with the amount done and the total.

    `is_shown`: None: only on a terminal. `unit`, `scale`: amounts are shown as amount x scale in units.
    """

    def __init__(
        self,
        what: str,
        is_shown: bool | None,
        unit: str = "jobs",
        scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._unit = unit
        self._scale = scale
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = self._is_terminal if is_shown is None else is_shown
        self._next = clock() + _SECONDS_BETWEEN_LOOKS
        self._tenths = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with ignoring_stderr_errors():
                self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        # Called for each job, so all but the clock reading must be rare.
        if not self._is_shown or (now := self._clock()) < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LOOKS
        done, total = round(done * self._scale), round(total * self._scale)
        if self._is_terminal:
            with ignoring_stderr_errors():
                self._draw(done, total)
        elif (tenths := _TENTHS * done // max(total, 1)) > self._tenths:
            self._tenths = tenths
            say(f"{self._what}: {done:,} of {total:,} {self._unit}")

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self._unit),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                # The bar disappears: the lasting output is the result only.
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
