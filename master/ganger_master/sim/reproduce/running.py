"""All parts of all experiments through a few processes; an experiment of which one part fails has failed, the others go
on."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ganger_master.sim.processes import Failed, Report, each
from ganger_master.sim.reproduce.claims import Claim
from ganger_master.sim.reproduce.experiment import Experiment, Row, Setting, measured
from ganger_master.sim.reproduce.results import Result


@dataclass(frozen=True, eq=False)
class _Part:
    experiment: Experiment
    index: int
    values: Row

    def __str__(self) -> str:
        return f"{self.experiment.name} {' '.join(f'{name}={value}' for name, value in self.values.items())}".strip()


def run(
    chosen: Sequence[Claim],
    experiments: Mapping[str, Experiment],
    unrun: Mapping[str, str],
    setting: Setting,
    rows_to: Path,
    workers: int,
    progress: Callable[[int, int], None] | None = None,
    is_saved: bool = False,
) -> list[Result]:
    """One result for each claim, in order; every claim has an experiment, or a reason in `unrun`. Rows go to
    `rows_to`/NAME.jsonl, or NAME.quick.jsonl. `progress` gets how many parts are done, of how many. `is_saved`: nothing
    is measured where that file is there already."""
    results = {claim.name: _without_run(claim, experiments, unrun, setting) for claim in chosen}
    kind = ".quick.jsonl" if setting.is_quick else ".jsonl"
    saved = {name: rows_to / f"{name}{kind}" for name, result in results.items() if is_saved and result is None}
    for claim in chosen:
        if claim.name in saved and saved[claim.name].is_file():
            rows_there = [json.loads(line) for line in saved[claim.name].read_text(encoding="utf-8").splitlines()]
            results[claim.name] = _concluded(claim, experiments[claim.name], rows_there, setting)
    running = [experiments[claim.name] for claim in chosen if results[claim.name] is None]
    parts = [
        _Part(experiment, index, values)
        for experiment in running
        for index, values in enumerate(experiment.parts(setting))
    ]
    count = Counter(part.experiment.name for part in parts)
    rows: dict[str, dict[int, list[Row]]] = {experiment.name: {} for experiment in running}
    failed: dict[str, str] = {}
    with closing(each(parts, _measure, lambda part: (part.experiment, setting, part.values), workers)) as every:
        for done, (part, found) in enumerate(every, 1):
            name = part.experiment.name
            if isinstance(found, Failed):
                failed.setdefault(name, f"{part}: {found.what}\n{found.details}".strip())
            else:
                rows[name][part.index] = found
                if len(rows[name]) == count[name]:
                    # At once: a long run that is interrupted keeps what it has.
                    _save(rows_to / f"{name}{kind}", _in_order(rows[name]))
            if progress is not None:
                progress(done, len(parts))
    made = []
    for claim in chosen:
        result = results[claim.name]
        if result is None:
            what = failed.get(claim.name, "")
            if what:
                result = Result(claim, failed=what, is_quick=setting.is_quick)
            else:
                result = _concluded(claim, experiments[claim.name], _in_order(rows[claim.name]), setting)
        made.append(result)
    return made


def _without_run(
    claim: Claim, experiments: Mapping[str, Experiment], unrun: Mapping[str, str], setting: Setting
) -> Result | None:
    """None: it is to be run."""
    if claim.name in unrun:
        return Result(claim, skipped=unrun[claim.name], is_quick=setting.is_quick)
    missing = experiments[claim.name].missing(setting)
    if missing:
        names = ", ".join(path.name for path in missing)
        what = f"{names} not found: say where the published data are with --traces and --papers"
        return Result(claim, skipped=what, is_quick=setting.is_quick)
    return None


def _in_order(rows: Mapping[int, Sequence[Row]]) -> list[Row]:
    """As the parts are."""
    return [row for index in sorted(rows) for row in rows[index]]


def _concluded(claim: Claim, experiment: Experiment, rows: Sequence[Row], setting: Setting) -> Result:
    """A mistake in one conclusion takes nobody else's rows with it."""
    try:
        return Result(claim, experiment.conclude(rows), is_quick=setting.is_quick)
    except Exception as error:
        what = f"{claim.name}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        return Result(claim, failed=what.strip(), is_quick=setting.is_quick)


def _measure(experiment: Experiment, setting: Setting, values: Row, _: Report) -> list[Row]:
    """In the child."""
    return measured(experiment, setting, values)


def _save(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, default=_number) + "\n" for row in rows), encoding="utf-8")


def _number(value: Any) -> Any:
    """NumPy's numbers are numbers."""
    return value.item()
