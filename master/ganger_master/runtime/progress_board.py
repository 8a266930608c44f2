"""The latest measured progress of each job: sampled, lossy, kept in memory only and outside the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ganger_master.core.job_model import JobMetric


@dataclass(frozen=True, slots=True)
class Sample:
    """Progress of one job at one time. `loss`: NaN until the job reports one; `time`: Unix seconds."""

    epoch: int
    step: int
    samples: int
    steps_per_second: float
    loss: float
    data_wait_share: float
    time: float
    # Reason for its lack of progress, as the daemon of one of its nodes reports it.
    concern: str = ""
    # Time of the last step; zero: not reported.
    step_time: float = 0.0
    # Time of the first step since it last started or resumed; zero: none yet.
    since_time: float = 0.0
    # Utilisation of its devices, 0 to 1; None: not measurable.
    device_use: float | None = None
    # Metrics that the job reported by name; only the daemon of its first rank reports them.
    metrics: tuple[JobMetric, ...] = ()
    # Completed and planned epochs of training; zero: not reported.
    training_epoch: int = 0
    training_epochs: int = 0


# A daemon's concern holds until the daemon reports otherwise, or reports nothing for this time.
_CONCERN_S = 10.0


class ProgressBoard:
    """One sample per job; an older epoch or an earlier step of the same epoch never replaces a newer one."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}
        # By job and node: time of the report, and its text.
        self._concerns: dict[int, dict[str, tuple[float, str]]] = {}

    def report(self, job: int, sample: Sample, node: str = "") -> None:
        """Record a sample. `node`: the node of the reporting daemon, which reports for its own ranks."""
        before = self._samples.get(job)
        known = sample
        if before is not None:
            if (sample.epoch, sample.step, sample.time) < (before.epoch, before.step, before.time):
                known = before
            # Until the running attempt reports metrics, those of the attempt before are kept.
            known = replace(known, metrics=sample.metrics or before.metrics)
        self._samples[job] = replace(known, concern=self._concern(job, sample, node))

    def _concern(self, job: int, sample: Sample, node: str) -> str:
        """Return the concern of the first node, by name, whose daemon reports one."""
        concerns = {
            other: (since, text)
            for other, (since, text) in self._concerns.pop(job, {}).items()
            if other != node and sample.time - since < _CONCERN_S
        }
        if sample.concern:
            concerns[node] = (sample.time, sample.concern)
        if not concerns:
            return ""
        self._concerns[job] = concerns
        return concerns[min(concerns)][1]

    def of(self, job: int) -> Sample | None:
        return self._samples.get(job)

    def newer_than(self, marks: Mapping[int, float], jobs: Iterable[int] | None = None) -> dict[int, Sample]:
        """Return samples newer than the mark of their job. `jobs`: None: all jobs."""
        chosen = self._samples if jobs is None else [job for job in jobs if job in self._samples]
        return {job: self._samples[job] for job in chosen if self._samples[job].time > marks.get(job, 0.0)}

    def forget(self, is_live: Iterable[int]) -> None:
        """Drop the samples of all jobs that are not in `is_live`."""
        live = set(is_live)
        self._samples = {job: sample for job, sample in self._samples.items() if job in live}
        self._concerns = {job: concerns for job, concerns in self._concerns.items() if job in live}
