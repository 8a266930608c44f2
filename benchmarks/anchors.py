"""`ganger bench anchors`: whether `ganger` serves real traces better than the policies of the papers
(`benchmarks.anchor_cells`).

Hours of one core at full size, so runs are kept in build/bench/anchors-runs.jsonl as they end and a later call goes on
from there: delete the file after a change of any policy. Traces are looked for in ../shared/traces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ganger_master.simulator.parallel_runs import Report, WorkerFailure, each

from benchmarks.anchor_cells import ANCHORS, JOBS, LOADS, ORACLES, OURS, TRACES, AnchorRow, figures, judged, run
from benchmarks.report import SAMPLES, AtLeast, AtMost, report

FOLDER: Final = Path("..") / "shared" / "traces"
RUNS: Final = SAMPLES / "anchors-runs.jsonl"
LIMITS: Final[Mapping[str, AtLeast | AtMost]] = {
    "lowest_jct_share": AtLeast(0.9),
    "jct_ratio_max": AtMost(1.03),
    "p95_waiting_ratio_max": AtMost(1.1),
}
_Task = tuple[str, float, str]


def main(quick: bool = False) -> dict[str, Any]:
    """The whole report; `quick` tries one trace with few jobs, and keeps nothing."""
    if not FOLDER.is_dir():
        return {"name": "anchors", "skipped": f"there are no traces in {FOLDER}"}
    policies = (OURS, *ANCHORS, *ORACLES)
    if quick:
        rows = [run(FOLDER, "muri_testbed400", load, 0, policy, 60) for load in LOADS for policy in policies]
    else:
        tasks = [(trace, load, policy) for load in LOADS for trace in TRACES for policy in policies]
        rows = list(gone_on(tasks, RUNS, JOBS, os.cpu_count() or 1))
    cells = judged(rows)
    return report("anchors", figures(cells), LIMITS, [asdict(cell) for cell in cells])


def gone_on(tasks: Sequence[_Task], kept: Path, count: int, workers: int) -> Iterator[AnchorRow]:
    """The rows of all tasks: those kept of so many jobs at most, then the others as they end, which are kept too."""
    done: set[_Task] = set()
    if kept.exists():
        for line in kept.read_text().splitlines():
            row = AnchorRow(**json.loads(line))
            task = (row.trace, row.load, row.policy)
            if task in tasks and row.jobs <= count and task not in done:
                done.add(task)
                yield row
    left = [task for task in tasks if task not in done]
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a") as file:
        for task, found in each(left, _ran, lambda task: (*task, count), workers):
            if isinstance(found, WorkerFailure):
                raise RuntimeError(f"{task}: {found.what}\n{found.details}")
            file.write(json.dumps(asdict(found)) + "\n")
            file.flush()
            yield found


def _ran(trace: str, load: float, policy: str, count: int, report: Report) -> AnchorRow:
    """In a process of its own."""
    return run(FOLDER, trace, load, 0, policy, count)
