"""Rows of a trace file: which columns mean what, and findings about rows.

Columns have the names and units that other traces use. A finding counts the rows of its kind and names the first lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ganger_master.simulator.traces.workload import Integers

_GIB = float(1 << 30)
_MIB = float(1 << 20)


@dataclass(frozen=True)
class Column:
    """One column of a file: `header` holds `field` of the workload, in units of `scale`."""

    field: str
    header: str
    scale: float = 1.0


# By field, the headers that name it; the first is ours. Others: Blox-like canonical traces, ElasticFlow (ef_), Gavel
# and Shockwave (total_steps), Sia (application), Philly and Helios (vc), Alibaba (cpu_milli, memory_mib, gpu_spec).
NUMBERS: tuple[Column, ...] = (
    Column("submit_s", "submit_time_s"),
    Column("submit_s", "arrival_s"),
    Column("gpus", "gpus"),
    Column("gpus", "num_gpus"),
    Column("duration_s", "duration_s"),
    Column("min_gpus", "min_gpus"),
    Column("min_gpus", "gpus_min"),
    Column("max_gpus", "max_gpus"),
    Column("max_gpus", "gpus_max"),
    Column("converges_s", "converges_s"),
    Column("cpus", "cpus"),
    Column("cpus", "cpu_request"),
    Column("cpus", "cpu_milli", 1e-3),
    Column("memory_bytes", "memory_gb", 1e9),
    Column("memory_bytes", "memory_request_gib", _GIB),
    Column("memory_bytes", "memory_mib", _MIB),
    Column("deadline_s", "deadline_s"),
    Column("deadline_s", "ef_deadline_s"),
    Column("deadline_s", "deadline_list_s"),
    Column("priority", "priority"),
    Column("weight", "weight"),
    Column("iterations", "iterations"),
    Column("iterations", "total_steps"),
    Column("iterations", "ef_num_iteration"),
    Column("batch_size", "batch_size"),
    Column("batch_size", "ef_batch_size"),
)
LABELS: tuple[Column, ...] = (
    Column("model", "model"),
    Column("model", "ef_model"),
    Column("model", "application"),
    Column("tenant", "tenant"),
    Column("tenant", "vc"),
    Column("user", "user"),
    Column("gpu_type", "gpu_type"),
    Column("gpu_type", "gpu_spec"),
)
JOB_ID = "job_id"
# Chronus: what its deadline list means depends on this column.
DEADLINE_LIST = "deadline_list_s"
JOB_TYPE = "job_type"
_BEST_EFFORT = "best"
_WHOLE = frozenset({"priority", "min_gpus", "max_gpus"})
_POSITIVE = frozenset({"weight", "min_gpus", "max_gpus", "converges_s"})
_SIGNED = frozenset({"priority"})


def understood(headers: Sequence[str]) -> tuple[dict[str, tuple[int, Column]], list[str], list[str]]:
    """Return (position and column by field, headers without a meaning here, what is wrong with the headers).

    Wrong are a header given twice, two headers for one field, and a missing `job_id`, time of submission or gang.
    Without `duration_s` a file needs iterations or a model, from which run times can follow.
    """
    known = {column.header: column for column in (*NUMBERS, *LABELS, Column(JOB_ID, JOB_ID))}
    found: dict[str, tuple[int, Column]] = {}
    wrong = [f"column {header} is there twice" for header in _repeated(headers)]
    for position, header in enumerate(headers):
        column = known.get(header)
        if column is None:
            continue
        if column.field in found and found[column.field][1].header != header:
            wrong.append(f"columns {found[column.field][1].header} and {header} mean the same: leave one out")
        found.setdefault(column.field, (position, column))
    wrong += [
        f"there is no column {_names(known.values(), field)}"
        for field in (JOB_ID, "submit_s", "gpus")
        if field not in found
    ]
    if "duration_s" not in found and "iterations" not in found and "model" not in found:
        wrong.append("there is no column duration_s, nor iterations or model to work it out from")
    read = {*known, JOB_TYPE} if DEADLINE_LIST in headers else {*known}
    ignored = [header for header in headers if header not in read]
    return found, ignored, wrong


def allowed(field: str) -> tuple[bool, bool, bool]:
    """Return (must be whole, must be above zero, may be negative) of an optional number."""
    return field in _WHOLE, field in _POSITIVE, field in _SIGNED


def first_deadlines(lists: Sequence[str], job_types: Sequence[str] | None) -> list[str]:
    """Return the deadline of full value, in seconds after submission, of lists such as "600-1200"; "" for best effort.

    Chronus (SoCC 2021): a soft job has several deadlines of falling value, a best-effort job's is a placeholder.
    """
    firsts = [text.partition("-")[0] for text in lists]
    if job_types is None:
        return firsts
    return ["" if kind == _BEST_EFFORT else first for first, kind in zip(firsts, job_types, strict=True)]


def _repeated(headers: Sequence[str]) -> list[str]:
    return sorted({header for header in headers if headers.count(header) > 1})


def _names(columns: Iterable[Column], field: str) -> str:
    return " or ".join(column.header for column in columns if column.field == field)


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
            return f"{what} ({several(self.rows, 'row')})"
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


def several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
