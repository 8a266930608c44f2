"""The latest measured progress of each job: sampled, lossy, kept in memory only and outside the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ganger_master.core.model import JobMetric


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one job at one time. `loss` is not a number until the job reported one; time is Unix seconds."""

    epoch: int
    step: int
    samples: int
    steps_per_second: float
    loss: float
    data_wait_share: float
    time: float
    # What keeps it from getting on, as the daemon of one of its nodes has it.
    concern: str = ""
    # When the last step was done; zero: nobody said.
    step_time: float = 0.0
    # When the first step was done since it last began to run, or went on; zero: not yet.
    since_time: float = 0.0
    # Share of its devices that it used; None: nobody can tell.
    device_use: float | None = None
    # What the job reported by name; only the daemon of its first rank says so.
    metrics: tuple[JobMetric, ...] = ()
    # Passes over its data that are behind it, and how many it is to make; zero: it does not say.
    training_epoch: int = 0
    training_epochs: int = 0


# What a daemon found holds until it says otherwise, or says nothing for so long.
_CONCERN_SECONDS = 10.0


class ProgressBoard:
    """One sample per job; an older epoch or an earlier step of the same epoch never replaces a newer one."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}
        # By job and node: since when it is known, and what.
        self._concerns: dict[int, dict[str, tuple[float, str]]] = {}

    def report(self, job: int, sample: Sample, node: str = "") -> None:
        """`node`: whose daemon says so; it speaks for its own ranks."""
        before = self._samples.get(job)
        known = sample
        if before is not None:
            if (sample.epoch, sample.step, sample.time) < (before.epoch, before.step, before.time):
                known = before
            # Until the attempt that now runs has reported anything, what the one before did.
            known = replace(known, metrics=sample.metrics or before.metrics)
        self._samples[job] = replace(known, concern=self._concern(job, sample, node))

    def _concern(self, job: int, sample: Sample, node: str) -> str:
        """Of what the daemons of a job say the first, by node."""
        said = {
            other: (since, text)
            for other, (since, text) in self._concerns.pop(job, {}).items()
            if other != node and sample.time - since < _CONCERN_SECONDS
        }
        if sample.concern:
            said[node] = (sample.time, sample.concern)
        if not said:
            return ""
        self._concerns[job] = said
        return said[min(said)][1]

    def of(self, job: int) -> Sample | None:
        return self._samples.get(job)

    def newer_than(self, marks: Mapping[int, float], jobs: Iterable[int] | None = None) -> dict[int, Sample]:
        """Samples whose time is beyond the mark of their job; of all jobs when none are named."""
        chosen = self._samples if jobs is None else [job for job in jobs if job in self._samples]
        return {job: self._samples[job] for job in chosen if self._samples[job].time > marks.get(job, 0.0)}

    def forget(self, is_live: Iterable[int]) -> None:
        """Drops the samples of all other jobs."""
        live = set(is_live)
        self._samples = {job: sample for job, sample in self._samples.items() if job in live}
        self._concerns = {job: said for job, said in self._concerns.items() if job in live}
