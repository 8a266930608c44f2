"""All measurements of one job, and the condition under which they hold: epoch, devices and cores, and jobs beside it.

When the condition changes, windows begin anew once the job has settled. `now` is in seconds of the master's clock;
reports have times of their node's clock, of which only differences count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from ganger_master.planner.core_profiles import ProfiledCores
from ganger_master.planner.job_estimates import AttainedTime, ReportedLosses
from ganger_master.policies.trials import NO_WINDOWS, ProgressSample, RateWindows, TrialPace

# Windows and utilisation reports that are kept of a job that ran alone, the newest ones.
_MOST_BASELINE_WINDOWS: Final = 16
_MOST_UTILISATIONS: Final = 60
# Windows that are kept for each load of a job, and loads for each job.
_MOST_LOAD_WINDOWS: Final = 16
_MOST_LOADS: Final = 16

# Windows in steps/s, by the number of devices that other jobs use on the job's nodes.
RatesByLoad: TypeAlias = Mapping[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Rates and utilisation of a job that is alone on its devices, in one epoch and with one number of cores.

    `first` holds epoch, millicores and rate of the first window in another epoch or with other cores. One window does
    not show the variance, so the older rates stand until a second window confirms the change.
    """

    epoch: int = 0
    millicores: int = 0
    rates: tuple[float, ...] = ()
    utilisations: tuple[float, ...] = ()
    first: tuple[int, int, float] | None = None

    def after(self, epoch: int, millicores: int, rate: float) -> Baseline:
        """Return the baseline after one more window."""
        if (epoch, millicores) == (self.epoch, self.millicores):
            return replace(self, rates=(*self.rates, rate)[-_MOST_BASELINE_WINDOWS:])
        if self.first is None or self.first[:2] != (epoch, millicores):
            return replace(self, first=(epoch, millicores, rate))
        return Baseline(epoch, millicores, (self.first[2], rate), self.utilisations)


@dataclass(frozen=True, slots=True)
class RunCondition:
    """How a job runs; the default: not at all. `devices`: masks by node, none of a time-sliced job, beside which no
    other job runs."""

    epoch: int = 0
    gpus: int = 0
    millicores: int = 0
    is_time_sliced: bool = False
    devices: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class MeasuredJob:
    """All measurements of one job. It runs as `run` says, beside `neighbours`, under `load`."""

    create_time: float
    signature: int
    cores: ProfiledCores
    run: RunCondition = field(default_factory=RunCondition)
    neighbours: frozenset[int] = frozenset()
    load: int = 0
    # Epoch that ran last, and the time when it has warmed up.
    warm: tuple[int, float] = (0, 0.0)
    is_elastic: bool = False
    device_type: str = ""
    # Windows under the present run and neighbours, under the present load, and with the present GPUs and cores.
    present: RateWindows = NO_WINDOWS
    loaded: RateWindows = NO_WINDOWS
    sized: RateWindows = NO_WINDOWS
    baseline: Baseline = field(default_factory=Baseline)
    by_load: RatesByLoad = field(default_factory=dict)
    by_gpus: Mapping[int, float] = field(default_factory=dict)
    attained: AttainedTime | None = None
    losses: ReportedLosses | None = None

    @property
    def is_alone(self) -> bool:
        """Whether the job has no neighbours, and at least the cores of its baseline in this epoch.

        A host gives up cores before its guest arrives. Until then it has no neighbours, yet is slower than alone.
        """
        baseline, run = self.baseline, self.run
        return not self.neighbours and (run.epoch != baseline.epoch or run.millicores >= baseline.millicores)

    def interrupt_windows(self) -> None:
        """Begin the windows under way anew: the job evaluates, and does no steps meanwhile."""
        if self.present.open or self.loaded.open or self.sized.open:
            self.present, self.loaded, self.sized = (
                replace(windows, open=None) for windows in (self.present, self.loaded, self.sized)
            )

    def record_loaded(self, sample: ProgressSample, now: float, pace: TrialPace) -> None:
        """Record a report under the present load."""
        before, self.loaded = self.loaded, self.loaded.after(sample, now, pace)
        if self.loaded.rates is before.rates:
            return
        rates = (*self.by_load.get(self.load, ()), self.loaded.rates[-1])[-_MOST_LOAD_WINDOWS:]
        others = {load: some for load, some in self.by_load.items() if load != self.load}
        if len(others) >= _MOST_LOADS:
            # The first key is the load that was measured longest ago.
            del others[next(iter(others))]
        self.by_load = {**others, self.load: rates}

    def record_present(self, sample: ProgressSample, use: float | None, now: float, pace: TrialPace) -> None:
        """Record a report, and in the baseline if the job is alone."""
        if use is not None and self.is_alone:
            utilisations = (*self.baseline.utilisations, use)[-_MOST_UTILISATIONS:]
            self.baseline = replace(self.baseline, utilisations=utilisations)
        before, self.present = self.present, self.present.after(sample, now, pace)
        if self.present.rates is not before.rates and self.is_alone:
            self.baseline = self.baseline.after(self.run.epoch, self.run.millicores, self.present.rates[-1])

    def record_size(self, sample: ProgressSample, now: float, pace: TrialPace) -> bool:
        """Record a report with the present number of GPUs. Return whether it has filled a window."""
        if not self.is_elastic:
            return False
        before, self.sized = self.sized, self.sized.after(sample, now, pace)
        if self.sized.rates is before.rates:
            return False
        if self.sized.is_enough:
            self.by_gpus = {**self.by_gpus, self.run.gpus: self.sized.rate}
        return True
