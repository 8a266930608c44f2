"""Pending jobs of each user, and the bytes that the specs of jobs take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ganger_master.core.model import JobRecord, JobSpec, JobState
from ganger_master.core.substitution import bytes_of

# Bytes of a job beside its command, environment and parameters.
_JOB_BYTES: Final = 1_024


def spec_bytes(spec: JobSpec) -> int:
    """Bytes that the spec of a job takes in memory and in the store."""
    return _own_bytes(spec) + bytes_of_all(spec.environment)


def _own_bytes(spec: JobSpec) -> int:
    parameters = {} if spec.array is None else spec.array.parameters
    return _JOB_BYTES + sum(map(bytes_of, spec.command)) + bytes_of_all(spec.labels) + bytes_of_all(parameters)


def bytes_of_all(texts: Mapping[str, str]) -> int:
    """Bytes of names and values together."""
    return bytes_of("".join([*texts, *texts.values()]))


@dataclass(slots=True)
class Holdings:
    """Counts that follow each change of a job. Jobs that have ended count as finished, not for their user."""

    pending: Counter[str] = field(default_factory=Counter)
    live_bytes: Counter[str] = field(default_factory=Counter)
    finished_bytes: int = 0
    _bytes: dict[int, int] = field(default_factory=dict)
    # The environment that was measured last: members of an array share one.
    _measured: tuple[Mapping[str, str] | None, int] = field(default=(None, 0), compare=False)

    def note(self, old: JobRecord | None, new: JobRecord) -> None:
        """Count a job as it is now. `old`: as it was counted before, None for a new one."""
        if old is None or old.spec is not new.spec:
            self._take(old)
            if self._measured[0] is not new.spec.environment:
                self._measured = new.spec.environment, bytes_of_all(new.spec.environment)
            self._bytes[new.number] = _own_bytes(new.spec) + self._measured[1]
            self._give(new)
        elif old.state is not new.state:
            self._take(old)
            self._give(new)

    def forget(self, job: JobRecord) -> None:
        """Count a job no more."""
        self._take(job)
        del self._bytes[job.number]

    def bytes_of(self, number: int) -> int:
        """Bytes of one job's spec, as in `spec_bytes`."""
        return self._bytes[number]

    def _give(self, job: JobRecord, sign: int = 1) -> None:
        size = sign * self._bytes[job.number]
        if job.state.is_finished:
            self.finished_bytes += size
        else:
            self.live_bytes[job.user] += size
        if job.state is JobState.PENDING:
            self.pending[job.user] += sign

    def _take(self, job: JobRecord | None) -> None:
        if job is None:
            return
        self._give(job, -1)
        for counts in (self.pending, self.live_bytes):
            if not counts[job.user]:
                del counts[job.user]
