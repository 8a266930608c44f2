"""Replay a workload under one policy: the production core on virtual time, with modelled nodes."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ganger.cluster.preferences import BY_COUNTS

from ganger_master.core import colocation, commands, machine, timeslice_admission
from ganger_master.core.accounting import by_user
from ganger_master.core.answers import Refused
from ganger_master.core.commands import Command
from ganger_master.core.gang_model import Gang
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from ganger_master.planner.plan_pace import rounds_until
from ganger_master.policies import (
    Colocate,
    Grow,
    Migrate,
    Policy,
    ResizeByOptimus,
    ShareByTimeSlices,
    SliceNewcomers,
    StartByRank,
    Tune,
    policy_named,
)
from ganger_master.policies.order_registry import LAS2D
from ganger_master.simulator.admission import ModelledSchedulers, devices_only, specs_of, users_of
from ganger_master.simulator.inputs import FREE, ReplayOptions
from ganger_master.simulator.node_model import NodeModel
from ganger_master.simulator.planner_shell import Planning
from ganger_master.simulator.report.outcomes import Ledger, Meters, Run
from ganger_master.simulator.time_slices import EPOCH_S, Clock, instant
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.workload import Workload, offered_load, with_models
from ganger_master.simulator.true_rates import (
    Footprints,
    Scaling,
    SizeLaw,
    TrueRates,
    Work,
    devices_by_node,
    without_arenas,
)

if TYPE_CHECKING:
    from ganger_master.simulator.measurement_model import ModelledRates

_NEVER_S = 1e12
_DEFAULTS = ReplayOptions()
# Ideal runs rank by attained service itself instead of by queues.
_CONTINUOUS = {"tiresias": LAS2D}
_CAPABILITIES = {colocation.CAPABILITY: "yes"}
_SLICING = {**_CAPABILITIES, timeslice_admission.CAPABILITY: "yes"}
# Maximum number of plans per instant: one preempts, the next starts jobs on the released devices.
_PLANS_AT_ONCE = 64


def simulate(
    jobs: Workload,
    servers: Servers,
    policy: str | Policy,
    options: ReplayOptions = _DEFAULTS,
    progress: Callable[[int, int], None] | None = None,
    scaling: SizeLaw | None = None,
) -> Run:
    """Run every job from submission to end and return the outcomes.

    Every gang must fit into the cluster (`admission.that_fit`) and every duration must be known. `progress` is
    called with the number of ended jobs and of all jobs. `scaling`: the speeds of elastic jobs; None: published ones.
    Raises KeyError for an unknown policy.
    """
    began, began_cpu = time.perf_counter(), time.process_time()
    if options.rates == "profiles":
        jobs, servers = with_models(jobs, options.seed), without_arenas(servers)
    replay = _Replay(jobs, servers, policy, options, progress, scaling)
    replay.run()
    end = replay.clock.now
    return Run(
        policy=replay.named.name,
        outcomes=replay.ledger.outcomes(),
        gpus=servers.gpus,
        cores=servers.millicores / 1000,
        start_s=float(jobs.submit_s[0]) if len(jobs) else 0.0,
        end_s=end - EPOCH_S,
        series=replay.meters.series(end - EPOCH_S),
        shares=replay.policy.shares_devices,
        seed=options.seed,
        offered_load=offered_load(jobs, servers.gpus),
        wall_s=time.perf_counter() - began,
        cpu_s=time.process_time() - began_cpu,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        events=replay.events,
    )


def _as_simulated(policy: Policy, options: ReplayOptions) -> Policy:
    tune = policy.stage(Tune)
    if tune is not None and options.rates == "recorded" and tune.tuning.by_profiles and tune.tuning.place is None:
        # Cores make no job faster or slower.
        policy = policy.without(Tune)
    if options.ideal:
        # Where any free devices serve, job schedulers have no choice to make, and no job is moved.
        order = _CONTINUOUS.get(policy.order.name, policy.order)
        planned = policy.planned.without(Colocate, SliceNewcomers, Migrate)
        return replace(planned, order=order, placement=BY_COUNTS)
    # Job schedulers would start jobs in the middle of a round.
    return policy if options.round_s is None else policy.planned


def _core_settings(policy: str, options: ReplayOptions, jobs: int) -> CoreSettings:
    return CoreSettings(
        lost_after_s=None,
        silent_margin_s=None,
        policy=policy,
        keep_place_after_s=options.keep_place_after_s,
        checkpoint_interval_s=-1.0,
        jobs_waiting_limit=jobs + 1,
        # Modelled schedulers do not relax with time: only a change of the cluster lets a refused job retry.
        turn_again_s=_NEVER_S,
        # No client reads ended jobs.
        request_kept_s=0.0,
        finished_jobs_limit=1_000,
        quota_devices=by_user(options.quotas),
        teams=options.teams,
        partitions=options.partitions,
        usage_half_life_s=options.usage_half_life_s,
    )


class _Replay:
    def __init__(
        self,
        jobs: Workload,
        servers: Servers,
        policy: str | Policy,
        options: ReplayOptions,
        progress: Callable[[int, int], None] | None,
        scaling: SizeLaw | None = None,
    ) -> None:
        self.named = named = policy_named(policy) if isinstance(policy, str) else policy
        self.policy = _as_simulated(named.planned if options.teams or options.partitions else named, options)
        if options.ideal:
            # Placement by counts claims devices only.
            servers = devices_only(servers)
        self.jobs, self.servers = jobs, servers
        self.options = options
        self.progress = progress
        self.clock = Clock(EPOCH_S)
        self.settings = _core_settings(named.name, options, len(jobs))
        # Modelled nodes read the state directly, and nothing is stored: the core need not collect orders and rows.
        self.state = State(self.settings, EPOCH_S, is_stored=False)
        self.state.policy = self.policy
        self.work = Work(jobs.duration_s)
        self.nodes = NodeModel(self.clock, self.state, FREE if options.ideal else options.costs, self)
        self._model_rates(scaling)
        # By node: training jobs (positions in the workload) with their device masks. By job: its gang.
        self._on: dict[str, dict[int, int]] = {}
        self._where: dict[int, Gang] = {}
        self.turns = ModelledSchedulers(self.state, self.send)
        self.events = 0
        self._happened = False
        self.ledger = Ledger(jobs)
        self.planning = Planning(self)
        self._specs = specs_of(jobs, servers, options.ideal, EPOCH_S, bool(options.partitions))
        self._users = users_of(jobs)
        self._submitted = [instant(EPOCH_S + submit_s) for submit_s in jobs.submit_s.tolist()]
        self._open()
        self.meters = Meters(jobs, self.state, servers.millicores)
        if len(jobs):
            self._expect(0)

    def _model_rates(self, scaling: SizeLaw | None) -> None:
        jobs, servers, options = self.jobs, self.servers, self.options
        # None: every job runs at its recorded rate.
        self.rates = TrueRates(jobs, servers) if options.rates == "profiles" else None
        # None: no job is elastic.
        is_elastic = bool((jobs.min_gpus < jobs.max_gpus).any())
        self.scaling = (scaling or Scaling(jobs, options.seed)) if is_elastic else None
        # None: the policy does not share GPUs.
        self.footprints = Footprints(jobs, servers, options.seed) if self.policy.shares_devices else None
        # Jobs park in host memory only if their device memory was measured.
        measures = self.policy.migrates or (is_elastic and self.policy.has(Grow, ResizeByOptimus))
        self.memory = Footprints(jobs, servers, options.seed) if measures else self.footprints
        self.windows: ModelledRates | None = None
        if self.memory is not None:
            # Most replays need none, and the import takes longer than a replay of a hundred jobs.
            from ganger_master.simulator.measurement_model import ModelledRates

            self.windows = ModelledRates(self.memory, options.seed)

    def run(self) -> None:
        count = len(self.jobs)
        while self.ledger.ended < count and self.clock.next_time() is not None:
            self.events += self.clock.run_instant()
            self._settle()
        stuck = count - self.ledger.ended
        assert not stuck, f"{stuck} jobs never ended"

    def send(self, command: Command) -> object:
        answer, happened = machine.advance(self.state, command, self.clock.now)
        assert not isinstance(answer, Refused), f"{type(command).__name__} was refused: {answer}"
        self._happened = self._happened or bool(happened)
        return answer

    # -- the cluster and its jobs --------------------------------------------------------------------------------------

    def _open(self) -> None:
        for group in self.servers.groups:
            for row in group.rows():
                self.send(
                    commands.OpenSession(
                        row.node,
                        f"machine-{row.node}",
                        group.configuration_set,
                        rack=row.rack,
                        fabric=row.fabric,
                        capabilities=_SLICING if self.policy.has(ShareByTimeSlices) else _CAPABILITIES,
                    )
                )
                self.nodes.report_of(row.node)
        self._finish()

    def _expect(self, job: int) -> None:
        self.clock.at(self._submitted[job], lambda: self._submit(job))

    def _submit(self, job: int) -> None:
        self.send(commands.SubmitJob(self._specs[job], self.jobs.job_ids[job], self._users[job]))
        if (self.rates is not None and self.policy.has(Tune)) or self.planning.estimates is not None:
            self.clock.at(self.clock.now + self.options.profile_s, self.planning.estimates_changed)
        if job + 1 < len(self.jobs):
            self._expect(job + 1)

    def begins(self, number: int, gang: Gang, held_since: float) -> float:
        job, now = number - 1, self.clock.now
        self.ledger.trains(job, held_since - EPOCH_S, now - EPOCH_S)
        ends = self.release(self.work.begin(job, now, self._rate(job, gang)))
        if self.windows is not None:
            self._where[job] = gang
            for piece in gang.pieces:
                self._on.setdefault(piece.claim.node, {})[job] = piece.claim.device_mask
            ends = self.release(self._beside(job))
            self._retime(self._company(job, gang))
        return ends

    def sliced(self, number: int, gang: Gang, held_s: float, trained_s: float, stops: int) -> float:
        """Record slices of a gang; return the seconds of training until its end."""
        job, rate = number - 1, self._rate(number - 1, gang)
        self.ledger.sliced(job, gang, held_s, trained_s, stops)
        return self.work.credit(job, trained_s * rate) / rate

    def slice_starts(self, number: int, time: float) -> None:
        self.ledger.starts(number - 1, time - EPOCH_S)

    def moves(self, number: int, gang: Gang) -> None:
        self.ledger.moves(number - 1, gang)

    def slice_begins(self, number: int, gang: Gang) -> None:
        if self.windows is not None:
            # Its neighbours in a group do not run beside it.
            self.windows.trains(number, self.clock.now, self._rate(number - 1, gang), frozenset(), gang.devices)

    def received_s(self) -> dict[int, float]:
        """Return the seconds for which each running job has trained, by number."""
        self.nodes.sync_groups()
        now = self.clock.now - EPOCH_S
        return {job.number: self.ledger.received_s(job.number - 1, now) for job, _ in self.planning.loop.table.running}

    def _company(self, job: int, gang: Gang) -> frozenset[int]:
        if self.footprints is None:
            return frozenset()
        found = []
        for piece in gang.pieces:
            mask = piece.claim.device_mask
            for other, theirs in self._on.get(piece.claim.node, {}).items():
                if mask & theirs and other != job:
                    found.append(other)
        return frozenset(found)

    def _beside(self, job: int) -> float:
        """Set its rate for the jobs now co-located with it; return its new end."""
        assert self.windows is not None
        rate = self._rate(job, self._where[job])
        gang = self._where[job]
        beside = frozenset(other + 1 for other in self._company(job, gang))
        self.windows.trains(job + 1, self.clock.now, rate, beside, gang.devices)
        if self._specs[job].is_elastic:
            self.planning.trains(job + 1)
        return self.work.change(job, self.clock.now, rate)

    def _retime(self, company: frozenset[int]) -> None:
        for other in sorted(company):
            self.nodes.retimed(other + 1)

    def peak_bytes(self, number: int) -> int:
        # Profiles cover host memory, and a tuning by them gives all of it to jobs: none is left for parked states.
        is_divided = self.rates is not None and self.policy.has(StartByRank) and self.policy.has(Tune)
        return 0 if self.memory is None or is_divided else self.memory.memory_bytes(number - 1)

    def changes(self, number: int, gang: Gang) -> float | None:
        job = number - 1
        if job in self._where:
            return self.release(self._beside(job))
        if self.rates is None:
            return None
        return self.release(self.work.change(job, self.clock.now, self._rate(job, gang)))

    def _rate(self, job: int, gang: Gang) -> float:
        rate = 1.0 if self.rates is None else self.rates.rate(job, gang)
        if self.footprints is not None:
            rate *= self.footprints.speed(job, sorted(self._company(job, gang)))
        return rate if self.scaling is None else rate * self.scaling.rate(job, devices_by_node(gang))

    def release(self, ends: float) -> float:
        """Return when its devices are released."""
        step = self.options.round_s
        if step is None:
            return instant(ends)
        # Held to the end of the round.
        return instant(EPOCH_S + step * math.ceil(rounds_until(ends, EPOCH_S, step)))

    def epoch_end(self, number: int) -> float:
        return instant(self.work.epoch_end(number - 1, self.clock.now, float(self.jobs.epoch_s[number - 1])))

    def halts(self, number: int, gang: Gang) -> None:
        job, now = number - 1, self.clock.now
        self.work.stop(job, now)
        self.ledger.halts(job, now - EPOCH_S)
        if self.windows is None:
            return
        self.windows.rests(number, now)
        if self._where.pop(job, None) is not None:
            for piece in gang.pieces:
                self._on[piece.claim.node].pop(job, None)
            self._retime(self._company(job, gang))

    def ends(self, number: int, gang: Gang, held_since: float, finished: bool) -> None:
        job, now = number - 1, self.clock.now
        if finished and self.windows is not None:
            self.windows.ended(number)
        self.halts(number, gang)
        self.ledger.leaves(job, gang, held_since - EPOCH_S, now - EPOCH_S, finished)
        if finished and self.planning.estimates is not None:
            self.planning.estimates.forget(number)
        if finished and self.progress is not None:
            self.progress(self.ledger.ended, len(self.jobs))

    # -- what follows --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Run reports, commands and plans of this instant until nothing changes."""
        for _ in range(_PLANS_AT_ONCE):
            while self.nodes.report() or self._happened:
                self._finish()
                if self.clock.next_time() == self.clock.now:
                    self.events += self.clock.run_instant()
            if not self.planning.plan():
                break
        self.meters.read(self.clock.now - EPOCH_S)

    def _follow(self, news: Iterable[int]) -> None:
        for number in news:
            if number in self.state.jobs:
                self.nodes.follow(number)
        self.nodes.follow_groups()

    def _finish(self) -> None:
        """Finish a batch of the core, which includes the immediate reports of nodes on their new orders."""
        now, news = self.clock.now, self.state.dirty.news
        self._follow(news)
        while self.nodes.report():
            self._follow(news)
        self._happened = False
        effects = machine.finish(self.state, now)
        self.planning.jobs_changed(effects.jobs)
        if effects.turns:
            self.turns.take(effects.turns, now)
        wake = effects.wake_at
        if self.state.limits:
            wake = self.turns.wake_at(wake)
        # A wake-up at `_NEVER_S` need not be scheduled.
        if wake is not None and wake < _NEVER_S:
            # Most leases are used long before they expire, which makes the wake-up void.
            self.clock.at(wake, self._tick, lambda: self.state.wake_at != wake)

    def _tick(self) -> None:
        self.send(commands.Tick())
