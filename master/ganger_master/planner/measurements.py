"""All measurements of running jobs: rates alone and co-located, by cores and by GPUs, received device time, and losses.

The planner records every job that changes and every progress report. Lost measurements are made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ganger.cluster.view import View

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.planner import colocation_rates, core_profiles
from ganger_master.planner.colocation_rates import ColocationRates
from ganger_master.planner.core_profiles import CoreProfiles
from ganger_master.planner.job_estimates import JobEstimates, LossReport, ReportedLosses
from ganger_master.planner.job_measures import (
    AttainedService,
    AttainedTime,
    JobRates,
    SpeedsByGpus,
    SpeedsOfJob,
    SpeedSource,
)
from ganger_master.policies.optimus_sizes import Believed
from ganger_master.policies.trials import TrialPace
from ganger_master.policies.tunings import Known


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """A job's report: steps done at a time, in seconds of its node's clock. `since_s`: as in `ProgressSample`; `use`:
    utilization of its devices. The rest as in `LossReport`."""

    step: int
    time_s: float
    since_s: float = math.nan
    use: float | None = None
    loss: float = math.nan
    passes: int = 0
    passes_in_all: int = 0


class RateSources(Protocol):
    """All measurements that stages read. Rates by cores: `known` curves, and `trials` in millicores per GPU by number.
    `received_s`: device time by number."""

    @property
    def windows(self) -> JobRates: ...

    @property
    def speeds(self) -> SpeedSource: ...

    @property
    def known(self) -> Known: ...

    @property
    def trials(self) -> Mapping[int, int]: ...

    @property
    def received_s(self) -> Mapping[int, float]: ...

    @property
    def remembered(self) -> RememberedRates:
        """Return the measurements, for a planner that continues from them."""
        ...

    def believed(self, gpus_per_node: int) -> Believed:
        """Return the function that estimates the remaining steps and the speeds of jobs."""
        ...

    def put(self, job: JobRecord, gang: Gang | None, signature: int, now: float) -> None:
        """Record a job as it is now."""
        ...

    def forget(self, number: int, now: float) -> None:
        """Drop a job that has ended."""
        ...

    def keep(self, is_live: Callable[[int], bool], now: float) -> None:
        """Drop the jobs that are not live; their ends were not reported."""
        ...

    def record(self, number: int, heard: ProgressReport, now: float) -> bool:
        """Record a report; return whether it is reason for another plan."""
        ...

    def update_trials(self, view: View, running_s: Mapping[int, float], now: float) -> bool:
        """Begin and end trials of cores; return whether that is reason for another plan."""
        ...


@dataclass(frozen=True, slots=True)
class RememberedRates:
    colocations: colocation_rates.RememberedColocations = field(default_factory=colocation_rates.RememberedColocations)
    profiles: core_profiles.RememberedProfiles = field(default_factory=core_profiles.RememberedProfiles)
    attained: Mapping[int, AttainedTime] = field(default_factory=dict)
    speeds: Mapping[int, SpeedsOfJob] = field(default_factory=dict)
    foreseen: Mapping[int, ReportedLosses] = field(default_factory=dict)


class Measurements:
    """Measurements by job number. `now` is by the master's clock, as all times of jobs. `weighs_sizes`: losses are
    kept, too."""

    def __init__(self, pace: TrialPace) -> None:
        self.profiles = CoreProfiles(pace)
        self.windows = ColocationRates(pace)
        self.attained = AttainedService()
        self.speeds = SpeedsByGpus(pace)
        self.foreseen = JobEstimates(self.speeds)
        self.weighs_sizes = False

    @property
    def known(self) -> Known:
        return self.profiles.known

    @property
    def trials(self) -> Mapping[int, int]:
        return self.profiles.trials

    @property
    def received_s(self) -> Mapping[int, float]:
        return self.attained.received_s

    def believed(self, gpus_per_node: int) -> Believed:
        return self.foreseen.believed(gpus_per_node)

    def update_trials(self, view: View, running_s: Mapping[int, float], now: float) -> bool:
        return self.profiles.update_trials(view, running_s, now)

    def put(self, job: JobRecord, gang: Gang | None, signature: int, now: float) -> None:
        """Record a job as it is now."""
        self.profiles.put(job, gang, signature, now)
        self.windows.put(job, gang, signature, now)
        self.speeds.put(job, gang, now)

    def forget(self, number: int, now: float) -> None:
        """Drop a job that has ended."""
        self.profiles.forget(number)
        self.windows.forget(number, now)
        self.attained.forget(number)
        self.speeds.forget(number)
        self.foreseen.forget(number)

    def keep(self, is_live: Callable[[int], bool], now: float) -> None:
        """Drop the jobs that are not live; their ends were not reported."""
        self.profiles.keep(is_live)
        self.windows.keep(is_live, now)
        self.attained.keep(is_live)
        self.speeds.keep(is_live)
        self.foreseen.keep(is_live)

    def record(self, number: int, heard: ProgressReport, now: float) -> bool:
        """Record a report; return whether it is reason for another plan."""
        step, time_s, since_s = heard.step, heard.time_s, heard.since_s
        self.profiles.record(number, step, time_s, now)
        self.windows.record(number, step, time_s, heard.use, now, since_s)
        self.attained.record(number, step, time_s)
        sizes = len(self.speeds.rates(number))
        is_full = self.speeds.record(number, step, time_s, now, since_s)
        if not self.weighs_sizes:
            return is_full
        self.foreseen.record(number, LossReport(step, heard.loss, heard.passes, heard.passes_in_all))
        # Sizes are planned every interval anyway: only the first measurement of a size is reason for a plan.
        return len(self.speeds.rates(number)) > sizes

    @property
    def remembered(self) -> RememberedRates:
        """The measurements, for a planner that continues from them."""
        return RememberedRates(
            self.windows.remembered,
            self.profiles.remembered,
            self.attained.remembered,
            self.speeds.remembered,
            self.foreseen.remembered,
        )

    def recall(self, remembered: RememberedRates) -> None:
        """Take over the measurements of an earlier planner."""
        self.windows.recall(remembered.colocations)
        self.profiles.recall(remembered.profiles)
        self.attained.recall(remembered.attained)
        self.speeds.recall(remembered.speeds)
        self.foreseen.recall(remembered.foreseen)
