"""Nodes on which jobs step more slowly than elsewhere.

Ranks of a gang step together, so one slow node slows all of its gangs, and their nodes, alike. What tells nodes apart
is the same work elsewhere: another job of the same command and size (a member of the same array, the next run), or the
same job before it moved. A node is slow if several jobs there are. Gangs that share devices, or are time-sliced, are
left out, for their rates follow from their company.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Final, Protocol, TypeAlias

from ganger.cluster.resources import ConfigurationSet
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.gang_model import Gang, GangIntent, GangRole
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Node

# What gangs of equal work have in common.
WorkKind: TypeAlias = tuple[object, ...]

# A node is slow from the first ratio on, and until it falls below the second; by as many jobs at least.
SLOW_RATIO: Final = 1.3
RECOVERED_RATIO: Final = 1.15
JOBS_LEAST: Final = 3
# Rates of gangs that count for a node and for a kind of work: the newest ones.
_KEPT_ON_NODE: Final = 12
_KEPT_OF_KIND: Final = 48
_KEPT: Final = 4_096
# A rate is known after so many steps and seconds.
_STEPS_LEAST: Final = 20
_WINDOW_LEAST_S: Final = 5.0
# Daemons compute the time of the first step anew for each sample, from two clocks.
_SAME_S: Final = 1.0
# A rate is of the last one or two such times.
_WINDOW_S: Final = 300.0


class GangRate(Struct, frozen=True, gc=False):
    """The mean rate of a gang in the last minutes, in steps/s."""

    job: int
    kind: WorkKind
    nodes: tuple[str, ...]
    steps_per_s: float


class NodeSpeed(Struct, frozen=True, gc=False):
    """How many times longer the same steps take on a node than on others: the median over so many jobs."""

    ratio: float
    jobs: int

    @property
    def text(self) -> str:
        """ "slow: steps take 1.5 times as long as on other nodes, by 4 jobs"."""
        return f"slow: steps take {self.ratio:.1f} times as long as on other nodes, by {self.jobs} jobs"


def node_speeds(rates: Iterable[GangRate]) -> dict[str, NodeSpeed]:
    """Return the speeds of the nodes of which enough is known. `rates`: those of gangs, oldest first."""
    ratios = _ratios(rates)
    suspected = _speeds([(rate, ratio, rate.nodes) for rate, ratio in ratios])
    blamed = []
    for rate, ratio in ratios:
        # One node slows the whole gang: it counts for the slowest of its nodes, by all of their gangs.
        most = max(suspected[node].ratio for node in rate.nodes)
        blamed.append((rate, ratio, [node for node in rate.nodes if suspected[node].ratio == most]))
    return {node: speed for node, speed in sorted(_speeds(blamed).items()) if speed.jobs >= JOBS_LEAST}


def is_slow(speed: NodeSpeed, was_slow: bool) -> bool:
    """Return whether a node of this speed is slow."""
    return speed.ratio >= (RECOVERED_RATIO if was_slow else SLOW_RATIO)


def _ratios(rates: Iterable[GangRate]) -> list[tuple[GangRate, float]]:
    """Return the rates with how many times longer their steps take than the same steps on other nodes."""
    of_kind: dict[WorkKind, list[GangRate]] = defaultdict(list)
    for rate in rates:
        of_kind[rate.kind].append(rate)
    found = []
    for alike in of_kind.values():
        newest = alike[-_KEPT_OF_KIND:]
        for rate in newest:
            others = [one.steps_per_s for one in newest if set(one.nodes).isdisjoint(rate.nodes)]
            if others:
                found.append((rate, median(others) / rate.steps_per_s))
    return found


def _speeds(counted: Iterable[tuple[GangRate, float, Iterable[str]]]) -> dict[str, NodeSpeed]:
    """Return the speed of each node by the ratios that count for it, the newest one of each job."""
    by_node: dict[str, dict[int, float]] = defaultdict(dict)
    for rate, ratio, nodes in counted:
        for node in nodes:
            by_node[node].pop(rate.job, None)
            by_node[node][rate.job] = ratio
    newest = {node: list(by_job.values())[-_KEPT_ON_NODE:] for node, by_job in by_node.items()}
    return {node: NodeSpeed(median(found), len(found)) for node, found in newest.items()}


def work_kind(
    job: JobRecord, gang: Gang, nodes: Mapping[str, Node], kinds: Mapping[str, ConfigurationSet]
) -> WorkKind | None:
    """Return what a gang's rate can be compared by; None for one whose rate says nothing of its nodes."""
    if gang.intent is not GangIntent.RUN or gang.role is not GangRole.ACTIVE or gang.node_set:
        return None
    claims = gang.claims
    if not gang.devices or any(claim.shared_mask or claim.node not in nodes for claim in claims):
        return None
    places = sorted((kinds[nodes[one.node].configuration_set].name, one.device_mask.bit_count()) for one in claims)
    return job.user, job.spec.command, tuple(places), sum(sum(claim.millicores) for claim in claims)


class _Stretch(Struct):
    """The steps of a gang since `since` (Unix seconds), which a suspend ends. `first`, `middle`: its step and the time
    at the beginning of the window, and where the next window begins."""

    rate: GangRate
    since: float
    first: tuple[int, float]
    middle: tuple[int, float]


class StepSample(Protocol):
    """Progress of a gang: it steps since `since_time`, and has made `step` steps at `step_time`; zero: not known."""

    @property
    def epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def step_time(self) -> float: ...
    @property
    def since_time(self) -> float: ...


class SpeedWatch:
    """The rates of gangs that run, and of the newest ones that have ended, and what they show of nodes."""

    def __init__(self) -> None:
        self._stretches: dict[int, _Stretch] = {}
        self._reported: frozenset[str] = frozenset()

    def note(
        self,
        samples: Mapping[int, StepSample],
        jobs: Mapping[int, JobRecord],
        gangs: Mapping[int, Gang],
        nodes: Mapping[str, Node],
        kinds: Mapping[str, ConfigurationSet],
    ) -> None:
        """Record the progress of jobs, by number."""
        for number, sample in samples.items():
            job, gang = jobs.get(number), gangs.get(sample.epoch)
            if job is None or gang is None or not (sample.since_time and sample.step_time):
                continue
            kind = work_kind(job, gang, nodes, kinds)
            if kind is not None:
                self._note(sample, GangRate(number, kind, gang.nodes, math.nan))

    def _note(self, sample: StepSample, rate: GangRate) -> None:
        known = self._stretches.get(sample.epoch)
        goes_on = known is not None and abs(known.since - sample.since_time) < _SAME_S
        if known is None or not goes_on or known.rate.kind != rate.kind:
            self._stretches.pop(sample.epoch, None)
            mark = sample.step, sample.step_time
            self._stretches[sample.epoch] = _Stretch(rate, sample.since_time, mark, mark)
            while len(self._stretches) > _KEPT:
                del self._stretches[next(iter(self._stretches))]
            return
        steps, passed_s = sample.step - known.first[0], sample.step_time - known.first[1]
        if steps >= _STEPS_LEAST and passed_s >= _WINDOW_LEAST_S:
            known.rate = replace(known.rate, steps_per_s=steps / passed_s)
        if sample.step_time - known.middle[1] >= _WINDOW_S:
            known.first, known.middle = known.middle, (sample.step, sample.step_time)

    def news(self, nodes: Mapping[str, Node]) -> dict[str, str]:
        """Return what has become of nodes: of a slow one how slow it is, empty for one that is slow no longer. A node
        of which too little is known stays as it was."""
        slow = frozenset([name for name, node in nodes.items() if node.slow])
        for name in self._reported - slow:
            # An operator has returned it: what was measured before does not count.
            self._stretches = {epoch: one for epoch, one in self._stretches.items() if name not in one.rate.nodes}
        speeds = node_speeds([one.rate for one in self._stretches.values() if one.rate.steps_per_s > 0])
        now_slow = {name for name, speed in speeds.items() if name in nodes and is_slow(speed, name in slow)}
        recovered = {name for name in slow if name in speeds and name not in now_slow}
        self._reported = (slow | now_slow) - recovered
        return {name: speeds[name].text if name in now_slow else "" for name in sorted((now_slow - slow) | recovered)}
