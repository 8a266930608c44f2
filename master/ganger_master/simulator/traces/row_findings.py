"""What was noticed in the rows of a trace: how many rows of each kind, and where the first of them stand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ganger_master.simulator.traces.workload import Integers

# Lines named of each finding; all are counted.
LINES_NAMED = 5
# What a terminal would obey instead of showing it.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


class RowFindingKind(Enum):
    """MISTAKE: a row that says something impossible. SKIPPED: a row left out. CHANGED: a row kept, not as it stood."""

    MISTAKE = "mistake"
    SKIPPED = "skipped"
    CHANGED = "changed"


@dataclass(frozen=True)
class RowFinding:
    """`lines` are the first few; rows that came from no file have none. No rows: it is about the file."""

    kind: RowFindingKind
    what: str
    rows: int
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = shown(self.what)
        if not self.rows:
            return what
        if not self.lines:
            return f"{what} ({counted(self.rows)})"
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
        """One more row for each line; line 0 stands for a row that came from no file."""
        if not len(lines):
            return
        key = (kind, what)
        self._rows[key] = self._rows.get(key, 0) + len(lines)
        there_are = np.asarray(lines)
        first = np.sort(there_are[there_are > 0])[:LINES_NAMED].tolist()
        self._lines[key] = sorted([*self._lines.get(key, ()), *first])[:LINES_NAMED]

    def findings(self) -> tuple[RowFinding, ...]:
        """In the order in which each was first noted."""
        return tuple(RowFinding(*key, rows, tuple(self._lines[key])) for key, rows in self._rows.items())


def shown(text: str) -> str:
    """Words of a file as they may go to a terminal."""
    return _CONTROL.sub("?", text)


def rows_of(findings: Iterable[RowFinding], kind: RowFindingKind) -> int:
    return sum(finding.rows for finding in findings if finding.kind is kind)


def counted(rows: int) -> str:
    return f"{rows:,} row{'' if rows == 1 else 's'}"
