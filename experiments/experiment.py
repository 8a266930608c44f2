"""What an experiment is: parts that are measured anywhere, rows they leave, and what the rows say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from ganger_master.simulator.report.figures import Interval

# Plain values by name, ready for JSON.
Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where published data lie, and whether a quick look with fewer seeds will do."""

    traces: Path
    papers: Path
    is_quick: bool = False

    def seeds(self, full: int, quick: int = 2) -> range:
        return range(quick if self.is_quick else full)


@dataclass(frozen=True)
class MeasuredRows:
    """What the rows say. `ours`: figures by name, with an interval where chance has a part in them. `load`: what was
    offered, by what the cluster could do; by name where there are several, None where nothing is queued. `why`: what
    explains the distance from the paper's figures, where there is one."""

    ours: Mapping[str, float | Interval]
    seeds: int
    load: Mapping[str, float] | float | None = None
    why: str = ""


class CoreUse(StrEnum):
    """Whether the master's core ran in an experiment.

    WHOLE: the core and, where the policy plans, the planner's loop decided, in virtual time or as real programs.
    PLANNER: a pass of the planner alone. APPROVAL: the core's approval of gangs alone. ARITHMETIC: estimators, orders
    and searches of the production were called from a model of the experiment's own; no core and no planner ran.
    """

    WHOLE = "yes"
    PLANNER = "planner only"
    APPROVAL = "approval only"
    ARITHMETIC = "arithmetic only"


@dataclass(frozen=True)
class Experiment:
    """`parts`: what can be measured apart from each other. `measure`: one part, in a process of its own; its rows get
    the part's names and values too. `conclude`: from all rows, in the order of the parts; a pure function, so that
    saved rows say the same again. `core`: whether the core ran. `needs`: files by (which folder, name) that must be
    there.

    `measure` and `conclude` stand in one module, whose text describes the set-up.
    """

    name: str
    parts: Callable[[Setting], Sequence[Row]]
    measure: Callable[[Setting, Row], Sequence[Row]]
    conclude: Callable[[Sequence[Row]], MeasuredRows]
    core: CoreUse = field(kw_only=True)
    needs: tuple[tuple[str, str], ...] = field(default=())

    def files(self, setting: Setting) -> list[Path]:
        """What it needs."""
        return [{"traces": setting.traces, "papers": setting.papers}[folder] / name for folder, name in self.needs]

    def missing(self, setting: Setting) -> list[Path]:
        """Files that are not there."""
        return [path for path in self.files(setting) if not path.is_file()]


def measured(experiment: Experiment, setting: Setting, part: Row) -> list[Row]:
    """The rows of a part, each with the part's own values and an equal share of the processor time it took, `cpu_s`."""
    began = time.process_time()
    rows = experiment.measure(setting, part)
    cpu_s = (time.process_time() - began) / max(1, len(rows))
    return [{**part, **row, "cpu_s": cpu_s} for row in rows]
