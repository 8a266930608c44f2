"""All parts of all experiments through a few processes; an experiment of which one part fails has failed, the others go
on."""

from __future__ import annotations

import json
import math
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ganger_master.simulator.parallel_runs import Report, WorkerFailure, each

from experiments.experiment import Experiment, Row, Setting, measured
from experiments.journal import Journal, plain
from experiments.paper_claims import PaperClaim
from experiments.results import Result


@dataclass(frozen=True, eq=False)
class _Part:
    experiment: Experiment
    index: int
    values: Row

    def __str__(self) -> str:
        return f"{self.experiment.name} {' '.join(f'{name}={value}' for name, value in self.values.items())}".strip()


def run(
    chosen: Sequence[PaperClaim],
    experiments: Mapping[str, Experiment],
    unrun: Mapping[str, str],
    setting: Setting,
    rows_to: Path,
    workers: int,
    progress: Callable[[int, int], None] | None = None,
    is_saved: bool = False,
    is_anew: bool = False,
) -> list[Result]:
    """One result for each claim, in order; every claim has an experiment, or a reason in `unrun`. Rows go to
    `rows_to`/NAME.jsonl, or NAME.quick.jsonl. `progress` gets how many parts are done, of how many. `is_saved`: nothing
    is measured, only concluded from what these files hold. Parts that the same code has measured on the same data
    before, in a run that was stopped or not, are not measured again unless `is_anew`."""
    kind = ".quick" if setting.is_quick else ""
    results: dict[str, Result] = {}
    files = {claim.name: rows_to / f"{claim.name}{kind}.jsonl" for claim in chosen}
    for claim in chosen:
        result = _without_run(claim, experiments, unrun, setting)
        if result is None and is_saved:
            result = _from_saved(claim, experiments[claim.name], files[claim.name], setting)
        if result is not None:
            results[claim.name] = result
    running = {claim.name: experiments[claim.name] for claim in chosen if claim.name not in results}
    journals = {
        name: Journal(rows_to / "parts" / f"{name}{kind}.jsonl", experiment, setting)
        for name, experiment in running.items()
    }
    if is_anew:
        for journal in journals.values():
            journal.forget()
    rows, failed = _measured(running, setting, files, journals, workers, progress)
    for claim in chosen:
        if claim.name in failed:
            results[claim.name] = Result(
                claim, experiments[claim.name].core, failed=failed[claim.name], is_quick=setting.is_quick
            )
        elif claim.name in rows:
            results[claim.name] = _concluded(claim, experiments[claim.name], rows[claim.name], setting)
    return [results[claim.name] for claim in chosen]


def _measured(
    experiments: Mapping[str, Experiment],
    setting: Setting,
    files: Mapping[str, Path],
    journals: Mapping[str, Journal],
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """All rows by experiment, saved where they are complete, and what went wrong with the others."""
    parts = [
        _Part(experiment, index, values)
        for experiment in experiments.values()
        for index, values in enumerate(experiment.parts(setting))
    ]
    every = len(parts)
    by_part: dict[str, dict[int, list[Row]]] = {name: {} for name in experiments}
    for part in parts:
        known = journals[part.experiment.name].rows(part.values)
        if known is not None:
            by_part[part.experiment.name][part.index] = known
    parts = [part for part in parts if part.index not in by_part[part.experiment.name]]
    missing = Counter(part.experiment.name for part in parts)
    failed: dict[str, str] = {}
    with closing(each(parts, _measure, lambda part: (part.experiment, setting, part.values), workers)) as measuring:
        for done, (part, found) in enumerate(measuring, every - len(parts) + 1):
            name = part.experiment.name
            if isinstance(found, WorkerFailure):
                failed.setdefault(name, f"{part}: {found.what}\n{found.details}".strip())
            else:
                journals[name].add(part.values, found)
                by_part[name][part.index] = found
                missing[name] -= 1
            if progress is not None:
                progress(done, every)
    rows = {
        name: [row for index in sorted(of_parts) for row in of_parts[index]]
        for name, of_parts in by_part.items()
        if not missing[name]
    }
    for name, of_experiment in rows.items():
        _save(files[name], of_experiment)
    return rows, failed


def _without_run(
    claim: PaperClaim, experiments: Mapping[str, Experiment], unrun: Mapping[str, str], setting: Setting
) -> Result | None:
    """None: it is to be run."""
    if claim.name in unrun:
        return Result(claim, skipped=unrun[claim.name], is_quick=setting.is_quick)
    missing = experiments[claim.name].missing(setting)
    if missing:
        names = ", ".join(path.name for path in missing)
        what = f"{names} not found: say where the published data are with --traces and --papers"
        return Result(claim, experiments[claim.name].core, skipped=what, is_quick=setting.is_quick)
    return None


def _from_saved(claim: PaperClaim, experiment: Experiment, path: Path, setting: Setting) -> Result:
    if not path.is_file():
        what = f"not measured yet: there is no {path.name}"
        return Result(claim, experiment.core, skipped=what, is_quick=setting.is_quick)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return _concluded(claim, experiment, rows, setting)


def _concluded(claim: PaperClaim, experiment: Experiment, rows: Sequence[Row], setting: Setting) -> Result:
    """Return the result of one claim; an error in its conclusion does not affect other claims."""
    try:
        cpu_s = float(sum(row.get("cpu_s", math.nan) for row in rows))
        return Result(claim, experiment.core, experiment.conclude(rows), is_quick=setting.is_quick, cpu_s=cpu_s)
    except Exception as error:
        what = f"{claim.name}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        return Result(claim, experiment.core, failed=what.strip(), is_quick=setting.is_quick)


def _measure(experiment: Experiment, setting: Setting, values: Row, _: Report) -> list[Row]:
    """In the child."""
    return measured(experiment, setting, values)


def _save(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, default=plain) + "\n" for row in rows), encoding="utf-8")
