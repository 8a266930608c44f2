"""A run as documents other programs read: one JSON object of its figures, one CSV row for each of its jobs."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict
from typing import Any, TextIO

import numpy as np

from ganger_master.simulator.report.figures import Figures
from ganger_master.simulator.report.outcomes import Outcomes
from ganger_master.simulator.report.series import StepSeries

_JOBS_AT_ONCE = 16_384


def as_json(figures: Figures) -> dict[str, Any]:
    """The figures by name, ready for `json.dumps`; what is not known is null, never NaN, which is no JSON."""
    return {name: _plain(value) for name, value in asdict(figures).items()}


def write_jobs(jobs: Outcomes, file: TextIO) -> None:
    """One row for each job, in order of submission; unknown times are blank. Opens nothing: `file` should have been
    opened with newline=""."""
    columns = {
        "submit_time_s": jobs.submit_s,
        "gpus": jobs.gpus,
        "duration_s": jobs.duration_s,
        "first_start_s": jobs.first_start_s,
        "end_s": jobs.end_s,
        "jct_s": jobs.jct_s,
        "start_delay_s": jobs.start_delay_s,
        "waiting_s": jobs.waiting_s,
        "service_s": jobs.service_s,
        "overhead_s": jobs.overhead_s,
        "gpu_seconds": jobs.gpu_seconds,
        "core_seconds": jobs.core_seconds,
        "preemptions": jobs.preemptions,
        "migrations": jobs.migrations,
        "resizes": jobs.resizes,
        "deadline_s": jobs.deadline_s,
    }
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["job_id", *columns])
    for first in range(0, len(jobs), _JOBS_AT_ONCE):
        part = slice(first, first + _JOBS_AT_ONCE)
        texts = [map(_cell, column[part].tolist()) for column in columns.values()]
        writer.writerows(zip(jobs.job_ids[part], *texts, strict=True))


def write_series(series: dict[str, StepSeries], file: TextIO) -> None:
    """Every step of every series: name, from when, value; and the end of each with a blank value."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["series", "time_s", "value"])
    for name, steps in series.items():
        writer.writerows(
            (name, _cell(when), _cell(value))
            for when, value in zip(steps.times.tolist(), steps.values.tolist(), strict=True)
        )
        writer.writerow((name, _cell(steps.end), ""))


def _cell(value: float) -> str:
    """Milliseconds are enough, and whole numbers stay short."""
    if isinstance(value, int):
        return str(value)
    return "" if math.isnan(value) else f"{value:.3f}".rstrip("0").rstrip(".")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
