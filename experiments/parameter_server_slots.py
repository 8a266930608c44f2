"""Training over parameter servers in intervals: what Optimus and its baselines are compared in.

The elastic gangs of the production core have one role; jobs whose numbers of parameter servers and of workers change
from one interval to the next it does not carry. Hence this small simulation in intervals, as the public ones of Optimus
and DL2 are; what decides in it are the functions `allocated`, `spread`, `aligned` and `scores`, the first of
them as in the pass of the policy `optimus`.

How fast a job really is follows from where its tasks are, by DL2's measurements and formula (pengyanghua/DL2, trace.py
and job.py): a step takes the time to compute plus that to push and pull the model over the busiest link, between
servers or within one. Asynchronous workers each step for themselves on a batch of their own; synchronous ones share one
batch, so that each computes less the more there are (Optimus, section 3.2, and the batches of DL2's measurements). No
policy sees that: it has eight noisy samples of each job's speed, one more of each interval in which it ran, and an
estimate of the steps left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from ganger_master.policies.optimus_sizes import allocated, growing
from ganger_master.policies.orders import Flags, Floats, Integers
from ganger_master.policies.tetris import Knobs, within_fairness

from experiments.optimus_spread import TaskSpread, spread
from experiments.server_speed import ServerPoint, ServerSpeed, UpdateMode, fit_server_speed, server_speeds
from experiments.tetris_pass import aligned, scores

INTERVAL_S = 600.0
# What a job loses when its tasks change: it is checkpointed and started again (dossier, section 9.6).
RESTART_S = 30.0
# More tasks of a kind no job gets (DL2's MAX_NUM_WORKERS).
MOST_TASKS = 16
# A job is young while less than this part of its steps is done.
_YOUNG = 0.1
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Model:
    """Seconds a worker computes, size in MB, MB/s between servers and within one, mini-batches in an epoch."""

    compute_s: float
    size: float
    across: float
    within: float
    batches: int


# DL2's constants (dossier, section 3b).
MODELS = {
    "resnet-50": Model(0.449, 102.2, 91.9, 306.5, 115),
    "vgg-16": Model(0.535, 553.4, 233.0, 427.8, 115),
    "resnext-110": Model(0.226, 6.92, 59.5, 63.0, 390),
    "inception-bn": Model(0.815, 42.1, 145.9, 1082.0, 120),
    "seq2seq": Model(0.075, 36.5, 120.1, 181.0, 780),
    "cnn-text": Model(0.585, 24.0, 60.8, 159.6, 193),
    "dssm": Model(0.567, 6.0, 92.1, 65.6, 349),
    "wlm": Model(0.154, 19.2, 10.4, 22.9, 165),
}


def step_s(model: Model, counts: Integers, mode: UpdateMode) -> float:
    """With so many (parameter servers, workers) on each server, one row a server."""
    servers, workers = (int(total) for total in counts.sum(axis=0))
    hosts_servers, hosts_workers = counts[:, 0] > 0, counts[:, 1] > 0
    across = max(
        int((servers - counts[hosts_workers, 0]).max()),
        int((workers - counts[hosts_servers, 1]).max()),
    )
    both = hosts_servers & hosts_workers
    within = int(counts[both].max()) if both.any() else 0
    part = 2.0 * model.size / servers
    compute_s = model.compute_s / (workers if mode is UpdateMode.SYNCHRONOUS else 1)
    return compute_s + max(part * across / model.across, part * within / model.within)


def batches_per_second(model: Model, counts: Integers, mode: UpdateMode) -> float:
    """Of all workers together."""
    together = 1.0 if mode is UpdateMode.SYNCHRONOUS else float(counts[:, 1].sum())
    return together / step_s(model, counts, mode)


@dataclass(frozen=True, eq=False)
class SlotJobs:
    """In order of arrival. `modes`: how each trains; `batches` is the work; `shapes` (jobs, 2, resources) of a
    parameter server and a worker; `samples` of each job's speed before it begins, and the relative `noise` of that and
    of all measurements to come; `misjudged`: by what factor the steps left of a job that has just begun are misjudged
    (the error shrinks with progress)."""

    arrival_s: Floats
    models: Sequence[Model]
    modes: Sequence[UpdateMode]
    batches: Floats
    shapes: Floats
    samples: Sequence[tuple[ServerPoint, ...]]
    noise: float
    misjudged: Floats


def sampled(
    model: Model,
    mode: UpdateMode,
    shape: Floats,
    servers: Floats,
    random: np.random.Generator,
    noise: float,
    count: int = 8,
) -> tuple[ServerPoint, ...]:
    """As Optimus learns a speed: so many runs with 1 to 10 tasks of each kind, as many as fit, placed as it would place
    them on the idle servers."""
    points = []
    for pair in random.integers(1, 11, (count, 2)).tolist():
        counts = spread(np.array([pair]), shape[None], servers).counts
        points.append(_measured(model, mode, counts, random, noise))
    return tuple(points)


def _measured(
    model: Model, mode: UpdateMode, counts: Integers, random: np.random.Generator, noise: float
) -> ServerPoint:
    rate = batches_per_second(model, counts, mode) * max(0.1, 1.0 + noise * float(random.standard_normal()))
    servers, workers = counts.sum(axis=0).tolist()
    return ServerPoint(servers, workers, rate)


def _fitted(points: Sequence[ServerPoint], mode: UpdateMode) -> ServerSpeed:
    found = fit_server_speed(points, mode)
    assert found is not None
    return found


@dataclass(frozen=True, eq=False)
class SlotRequest:
    """What a policy sees at the beginning of an interval, of the live jobs in order of arrival: what their tasks take
    (jobs, 2, resources), what is believed of their speeds and of the batches they have left, whether they are young;
    and the servers' resources."""

    shapes: Floats
    speeds: Sequence[ServerSpeed]
    left: Floats
    is_young: Flags
    free: Floats


# From what it sees to where tasks of the live jobs (by position among them) lie.
SlotPolicy: TypeAlias = Callable[[SlotRequest], TaskSpread]


@dataclass(frozen=True)
class SlotOutcomes:
    avg_jct_s: float
    makespan_s: float
    restart_share: float


def simulated(jobs: SlotJobs, servers: Floats, policy: SlotPolicy, seed: int = 0) -> SlotOutcomes:
    """`servers` (servers, resources). Seconds from the first arrival; ends are exact within an interval. The seed is
    that of measurements."""
    count = len(jobs.batches)
    random = np.random.default_rng(seed)
    points = [list(some) for some in jobs.samples]
    speeds = [_fitted(some, mode) for some, mode in zip(points, jobs.modes, strict=True)]
    left, ends = jobs.batches.copy(), np.full(count, np.nan)
    before: dict[int, bytes] = {}
    now = restarting = running = 0.0
    while np.isnan(ends).any():
        live = np.flatnonzero((jobs.arrival_s <= now) & np.isnan(ends))
        if len(live):
            progress = 1.0 - left[live] / jobs.batches[live]
            believed = left[live] * (1.0 + (jobs.misjudged[live] - 1.0) * (1.0 - progress))
            of_live = [speeds[job] for job in live.tolist()]
            where = policy(SlotRequest(jobs.shapes[live], of_live, believed, progress < _YOUNG, servers))
            _check(where, jobs.shapes[live], servers)
            held: dict[int, bytes] = {}
            for place in np.unique(where.job).tolist():
                job, rows = int(live[place]), where.job == place
                mode = jobs.modes[job]
                held[job] = where.server[rows].tobytes() + where.counts[rows].tobytes()
                rate = batches_per_second(jobs.models[job], where.counts[rows], mode)
                # a job that has never run starts, which costs the same under all policies
                lost = RESTART_S if job in before and before[job] != held[job] else 0.0
                seconds = min(INTERVAL_S - lost, left[job] / rate)
                restarting, running = restarting + lost, running + lost + seconds
                left[job] -= seconds * rate
                points[job].append(_measured(jobs.models[job], mode, where.counts[rows], random, jobs.noise))
                speeds[job] = _fitted(points[job], mode)
                if left[job] <= _ROUNDING * jobs.batches[job]:
                    ends[job] = now + lost + seconds
            before = {**before, **held}
        now += INTERVAL_S
    return SlotOutcomes(
        float(np.mean(ends - jobs.arrival_s)), float(ends.max() - jobs.arrival_s[0]), restarting / max(running, 1e-9)
    )


def optimus(asked: SlotRequest) -> TaskSpread:
    """Tasks by marginal gain, placed on the fewest servers."""
    most = np.full((len(asked.speeds), 2), MOST_TASKS)
    jobs = growing(asked.left, server_speeds(asked.speeds), asked.shapes, asked.is_young, most)
    return spread(allocated(jobs, asked.free.sum(axis=0)), asked.shapes, asked.free)


def drf(asked: SlotRequest) -> TaskSpread:
    """Progressive filling: one parameter server and one worker more for the job with the least dominant share, each on
    the emptiest server that holds it, as long as anything fits (the baseline of Optimus, on Kubernetes's placement)."""
    shapes = asked.shapes
    dominant = (shapes.sum(axis=1) / asked.free.sum(axis=0)).max(axis=1)
    placing = _Placing(asked)
    bundles = np.zeros(len(shapes))
    may_grow = np.ones(len(shapes), bool)
    while may_grow.any():
        job = int(np.argmin(np.where(may_grow, bundles * dominant, np.inf)))
        if bundles[job] < MOST_TASKS and placing.bundle(job, lambda free, demand: free[:, 0]):
            bundles[job] += 1
        else:
            may_grow[job] = False
    return placing.found()


def tetris(asked: SlotRequest) -> TaskSpread:
    """One parameter server and one worker more, again and again, for the job with the best score of alignment and
    little remaining work among those furthest below their fair share (Tetris's defaults), each on the server it is best
    aligned with, as long as anything fits."""
    shapes = asked.shapes
    whole = asked.free.max(axis=0)
    demands = shapes.sum(axis=1) / whole
    dominant = demands.max(axis=1)
    seconds = asked.left / np.array([speed.steps_per_second(1, 1) for speed in asked.speeds])
    work = demands.sum(axis=1) * seconds
    placing = _Placing(asked)
    bundles = np.zeros(len(shapes), np.int64)
    may_grow = np.ones(len(shapes), bool)

    def best(free: Floats, demand: Floats) -> Floats:
        return np.asarray(aligned((demand / whole)[None], free / whole)[0], float)

    while may_grow.any():
        along = aligned(demands, placing.free / whole).max(axis=1, keepdims=True)
        eligible = within_fairness(bundles * dominant, may_grow, Knobs().fairness)
        score = scores(along, work, eligible=eligible[:, None])[:, 0]
        job = int(np.argmax(np.round(score, 9)))
        if bundles[job] < MOST_TASKS and placing.bundle(job, best):
            bundles[job] += 1
        else:
            may_grow[job] = False
    return placing.found()


class _Placing:
    """Tasks one by one onto what is free."""

    def __init__(self, asked: SlotRequest) -> None:
        self.free = asked.free.copy()
        self._shapes = asked.shapes
        self._held: dict[tuple[int, int], list[int]] = {}

    def bundle(self, job: int, score: Callable[[Floats, Floats], Floats]) -> bool:
        """One task of each kind, where the score is largest; False, and nothing taken, if they do not both fit."""
        taken: list[tuple[int, int]] = []
        for kind in (0, 1):
            demand = self._shapes[job, kind]
            fits = (self.free >= demand - _ROUNDING).all(axis=1)
            if not fits.any():
                for before, server in taken:
                    self.free[server] += self._shapes[job, before]
                return False
            server = int(np.argmax(np.where(fits, np.round(score(self.free, demand), 9), -np.inf)))
            self.free[server] -= demand
            taken.append((kind, server))
        for kind, server in taken:
            self._held.setdefault((job, server), [0, 0])[kind] += 1
        return True

    def found(self) -> TaskSpread:
        rows = sorted(self._held)
        return TaskSpread(
            np.array([job for job, _ in rows], np.int64),
            np.array([server for _, server in rows], np.int64),
            np.array([self._held[row] for row in rows], np.int64).reshape(len(rows), 2),
        )


def _check(where: TaskSpread, shapes: Floats, servers: Floats) -> None:
    used = np.zeros_like(servers)
    np.add.at(used, where.server, np.einsum("rk,rkx->rx", where.counts.astype(float), shapes[where.job]))
    assert (used <= servers * (1.0 + 1e-6) + 1e-6).all(), "a server was given away twice"
