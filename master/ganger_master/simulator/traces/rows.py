"""Rows of a trace file: which columns mean what, and findings about rows.

Columns have the names and units that other traces use. A finding counts the rows of its kind and names the first lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from ganger.text import counted

from ganger_master.simulator.traces.workload import Integers


class Column(NamedTuple):
    """One column of a file: `header` holds `field` of the workload, in units of `scale`."""

    field: str
    header: str
    scale: float


# By field, the headers that name it, with the unit; the first is ours. Others: Blox-like canonical traces, ElasticFlow
# (ef_), Gavel and Shockwave (total_steps), Sia (application), Philly and Helios (vc), Alibaba (cpu_milli, memory_mib,
# gpu_spec).
_NUMBERS: Mapping[str, Mapping[str, float]] = {
    "submit_s": {"submit_time_s": 1, "arrival_s": 1},
    "gpus": {"gpus": 1, "num_gpus": 1},
    "duration_s": {"duration_s": 1},
    "min_gpus": {"min_gpus": 1, "gpus_min": 1},
    "max_gpus": {"max_gpus": 1, "gpus_max": 1},
    "converges_s": {"converges_s": 1},
    "epoch_s": {"epoch_s": 1},
    "cpus": {"cpus": 1, "cpu_request": 1, "cpu_milli": 1e-3},
    "memory_bytes": {"memory_gb": 1e9, "memory_request_gib": 1 << 30, "memory_mib": 1 << 20},
    "disk_mb_per_s": {"disk_mb_per_s": 1},
    "net_mb_per_s": {"net_mb_per_s": 1},
    "deadline_s": {"deadline_s": 1, "ef_deadline_s": 1, "deadline_list_s": 1},
    "priority": {"priority": 1},
    "weight": {"weight": 1},
    "iterations": {"iterations": 1, "total_steps": 1, "ef_num_iteration": 1},
    "batch_size": {"batch_size": 1, "ef_batch_size": 1},
}
LABELS: Mapping[str, Mapping[str, float]] = {
    "model": {"model": 1, "ef_model": 1, "application": 1},
    "tenant": {"tenant": 1, "vc": 1},
    "user": {"user": 1},
    "gpu_type": {"gpu_type": 1, "gpu_spec": 1},
    "partition": {"partition": 1},
}
JOB_ID = "job_id"
# Chronus: what its deadline list means depends on this column.
DEADLINE_LIST = "deadline_list_s"
JOB_TYPE = "job_type"
_BEST_EFFORT = "best"
# Optional numbers that must be whole, that must be above zero; a priority may be negative.
WHOLE = frozenset({"priority", "min_gpus", "max_gpus"})
POSITIVE = frozenset({"weight", "min_gpus", "max_gpus", "converges_s", "epoch_s"})


def understood(headers: Sequence[str]) -> tuple[dict[str, tuple[int, Column]], list[str], list[str]]:
    """Return (position and column by field, headers without a meaning here, what is wrong with the headers).

    Wrong are a header given twice, two headers for one field, and a missing `job_id`, time of submission or gang.
    Without `duration_s` a file needs iterations or a model, from which run times can follow.
    """
    named = {JOB_ID: {JOB_ID: 1.0}, **_NUMBERS, **LABELS}
    known = {header: Column(field, header, scale) for field in named for header, scale in named[field].items()}
    found: dict[str, tuple[int, Column]] = {}
    wrong = [f"column {header} is there twice" for header in sorted({one for one in headers if headers.count(one) > 1})]
    for position, header in enumerate(headers):
        column = known.get(header)
        if column is None:
            continue
        if column.field in found and found[column.field][1].header != header:
            wrong.append(f"columns {found[column.field][1].header} and {header} mean the same: leave one out")
        found.setdefault(column.field, (position, column))
    needed = (JOB_ID, "submit_s", "gpus")
    wrong += [f"there is no column {' or '.join(named[field])}" for field in needed if field not in found]
    if "duration_s" not in found and "iterations" not in found and "model" not in found:
        wrong.append("there is no column duration_s, nor iterations or model to work it out from")
    read = {*known, JOB_TYPE} if DEADLINE_LIST in headers else {*known}
    ignored = [header for header in headers if header not in read]
    return found, ignored, wrong


def first_deadlines(lists: Sequence[str], job_types: Sequence[str] | None) -> list[str]:
    """Return the deadline of full value, in seconds after submission, of lists such as "600-1200"; "" for best effort.

    Chronus (SoCC 2021): a soft job has several deadlines of falling value, a best-effort job's is a placeholder.
    """
    firsts = [text.partition("-")[0] for text in lists]
    if job_types is None:
        return firsts
    return ["" if kind == _BEST_EFFORT else first for first, kind in zip(firsts, job_types, strict=True)]


# Lines named of each finding; all are counted.
LINES_NAMED = 5
# What a terminal would obey instead of showing it.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


class RowFindingKind(Enum):
    """MISTAKE: a row that states something impossible. SKIPPED: a row left out. CHANGED: a row kept with changes."""

    MISTAKE = "mistake"
    SKIPPED = "skipped"
    CHANGED = "changed"


@dataclass(frozen=True)
class RowFinding:
    """A finding on rows of a trace, or on its file if `rows` is zero. `lines`: the first few in the file."""

    kind: RowFindingKind
    what: str
    rows: int
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = shown(self.what)
        if not self.rows:
            return what
        if not self.lines:
            return f"{what} ({counted(self.rows, 'row', ',')})"
        more = f" and {self.rows - len(self.lines):,} more" if self.rows > len(self.lines) else ""
        named = ", ".join(map(str, self.lines))
        return f"line{'s' if len(self.lines) > 1 else ''} {named}{more}: {what}"


class TraceError(ValueError):
    """The trace cannot be used; the message names file and lines, `findings` are the same as values."""

    def __init__(self, name: str, findings: Sequence[RowFinding]) -> None:
        self.name = name
        self.findings = tuple(findings)
        super().__init__("\n".join(f"{name}: {finding}" for finding in self.findings))


class RowFindingCounts:
    """Collects findings while rows go by."""

    def __init__(self) -> None:
        self._rows: dict[tuple[RowFindingKind, str], int] = {}
        self._lines: dict[tuple[RowFindingKind, str], list[int]] = {}

    def note(self, kind: RowFindingKind, what: str, lines: Sequence[int] | Integers) -> None:
        """Count one more row for each line; line 0 stands for a row without a file."""
        if not len(lines):
            return
        key = (kind, what)
        self._rows[key] = self._rows.get(key, 0) + len(lines)
        there_are = np.asarray(lines)
        first = np.sort(there_are[there_are > 0])[:LINES_NAMED].tolist()
        self._lines[key] = sorted([*self._lines.get(key, ()), *first])[:LINES_NAMED]

    def findings(self) -> tuple[RowFinding, ...]:
        """Return the findings in the order in which each was first noted."""
        return tuple(RowFinding(*key, rows, tuple(self._lines[key])) for key, rows in self._rows.items())


def shown(text: str) -> str:
    """Return text of a file in a form that is safe for a terminal."""
    return _CONTROL.sub("?", text)


def rows_of(findings: Iterable[RowFinding], kind: RowFindingKind) -> int:
    return sum(finding.rows for finding in findings if finding.kind is kind)
