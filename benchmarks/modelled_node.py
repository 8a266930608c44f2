"""One modelled server in virtual time, with the core, the planner's loop and its measurements as a live cluster has
them.

The server itself is the only thing that is modelled: how fast a job steps with its cores, and that it follows a change
of cores at once. Everything that decides is the code that decides in a cluster: leases, plans, trials, tunings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from ganger.cluster.resources import ConfigurationSet, Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger_master.core import machine
from ganger_master.core.answers import Answer, ChangeAnswer, JobAnswer, PlanAnswer, SessionAnswer
from ganger_master.core.commands import Command, Observe, ObservedGang, OpenSession, ProposePlan, RequestGang, SubmitJob
from ganger_master.core.gang_model import Gang, ObservedPhase
from ganger_master.core.job_model import Capabilities
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from ganger_master.planner.context import ClusterChange, PlanVerdict, ProgressReports, parts_of
from ganger_master.planner.loop import live_loop
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.policies import live_policy_named
from ganger_master.policies.trials import TrialPace

GIB: Final = 1 << 30
# Seconds between two reads of reports, and of these between two reports of a daemon, as in a cluster.
READ_S: Final = 0.5
READS: Final = 2
_NODE: Final = "n1"
_ABLE: Final = Capabilities(pause=True, offload=True, checkpoint=True, known=True)
_PLAN_EVERY_S: Final = 300.0

# Steps/s with this number of cores for a job's one GPU.
Curve = Callable[[float], float]
Found = TypeVar("Found")


@dataclass(slots=True)
class ModelledJob:
    """A job of one GPU that names no cores. `steps`: done, with the fraction under way. While `evaluation` is set, it
    does no steps but evaluates at this rate: so many mini-batches in all, and in a row."""

    curve: Curve
    signature: int
    steps: float = 0.0
    evaluation: Curve | None = None
    evaluated: float = 0.0
    in_row: float = 0.0

    def advance(self, cores: float, factor: float) -> None:
        """Let the time between two reads pass with these cores. `factor`: of the rate."""
        if self.evaluation is None:
            self.in_row = 0.0
            self.steps += READ_S * self.curve(cores) * factor
            return
        done = READ_S * self.evaluation(cores) * factor
        self.evaluated, self.in_row = self.evaluated + done, self.in_row + done

    def report(self, now: float) -> ProgressReport:
        """Return what the job's daemon reports now."""
        if self.evaluation is None:
            return ProgressReport(int(self.steps), now)
        counts = (int(self.evaluated), int(self.in_row))
        return ProgressReport(int(self.steps), now, evaluated=counts[0], evaluated_in_row=counts[1], evaluated_s=now)


class ModelledNode:
    """A server with a policy's planner. `noise`: relative standard deviation of the rate between two reads."""

    def __init__(self, gpus: int, cores: int, policy: str = "ganger", noise: float = 0.02, seed: int = 1) -> None:
        server: ConfigurationSet = parse_topology(
            f"1x{gpus}",
            name="modelled",
            millicores=1000 * cores,
            memory_bytes=64 * gpus * GIB,
            device_memory_bytes=16 * GIB,
        )
        self.state = State(CoreSettings(policy=policy), 0.0)
        self.now, self.jobs = 1.0, dict[int, ModelledJob]()
        self._reports, self._reads = dict[int, ProgressReport](), 0
        self._observations, self._noise, self._random = 0, noise, np.random.default_rng(seed)
        self.rates = RateRegistry(TrialPace())
        self._loop = live_loop(live_policy_named(policy), _PLAN_EVERY_S, self.rates, None)
        answer = _expect(self._send(OpenSession(_NODE, "machine", server, peer_address=f"{_NODE}:1")), SessionAnswer)
        self._session = answer.session
        self._report()
        self._follow(is_whole=True)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def submit(self, curve: Curve, signature: int) -> int:
        """Submit a job and let it start; return its number. Jobs of one `signature` are of one series."""
        role = Role("worker", 1, TaskShape(1, 0, 8 * GIB))
        spec = JobSpec(("train",), (role,), gpu_memory_bytes=12 * GIB)
        number = _expect(self._send(SubmitJob(spec, f"uid-{len(self.jobs)}", "user")), JobAnswer).number
        self.jobs[number] = ModelledJob(curve, signature)
        self._follow()
        return number

    def cores(self, number: int) -> float:
        """Return the cores that a job holds; zero before it runs."""
        gang = self._gang(number)
        return 0.0 if gang is None else sum(sum(claim.millicores) for claim in gang.claims) / 1000

    def run(self, seconds: float) -> None:
        """Let time pass: jobs step as their cores let them, their daemon reports each second, and the planner plans.
        What scatters is the rate between two reads."""
        ends = self.now + seconds
        while self.now < ends:
            self.now += READ_S
            self._reads += 1
            for number, job in self.jobs.items():
                factor = max(0.0, 1.0 + self._noise * self._random.standard_normal())
                job.advance(self.cores(number), factor)
            # Reports are read as late as it can happen.
            self._loop.observe(ProgressReports(self._reports), self.now)
            self._plan()
            is_due = self._reads % READS == 0
            self._reports = {number: job.report(self.now) for number, job in self.jobs.items()} if is_due else {}

    def is_on_trial(self, number: int) -> bool:
        """Return whether cores of a job are under trial now."""
        return number in self.rates.trials

    # -- the cluster ---------------------------------------------------------------------------------------------------

    def _gang(self, number: int) -> Gang | None:
        return self.state.gangs.get(self.state.jobs[number].epoch)

    def _send(self, command: Command) -> Answer:
        done = machine.step(self.state, command, self.now)
        for turn in done.effects.turns:
            lease = self.state.leases.get(turn)
            if lease is not None and lease.suggested:
                # As the default scheduler does.
                job = self.state.jobs[lease.number]
                self._send(RequestGang(job.number, job.revision, (lease.suggested,), turn))
        return done.answer

    def _report(self) -> None:
        """Report that all gangs run as they are wanted."""
        self._observations += 1
        gangs = [
            ObservedGang(
                gang.job,
                self.state.jobs[gang.job].uid,
                gang.epoch,
                ObservedPhase.RUNNING,
                gang.master_sequence,
                level=gang.park_level,
                capabilities=_ABLE,
            )
            for gang in self.state.gangs.values()
        ]
        version = self.state.desired.of(_NODE).version if self._observations > 1 else 0
        self._send(Observe(_NODE, self._session, self._observations, version, tuple(gangs), storage_proved=True))

    def _follow(self, is_whole: bool = False) -> None:
        """Let the planner observe the cluster, and carry out its plans until it has none."""
        jobs = [(self.state.jobs[number], self._gang(number), job.signature) for number, job in self.jobs.items()]
        self._loop.observe(ClusterChange(self.state.view, jobs, is_whole=is_whole), self.now)
        self._plan()

    def _plan(self) -> None:
        plan, _ = self._loop.step(self.now)
        if plan is None:
            return
        answers = list[ChangeAnswer]()
        for part in parts_of(plan):
            command = ProposePlan(
                part.changes, kept_places=part.kept_places, findings=part.findings, curves=part.curves
            )
            answers += _expect(self._send(command), PlanAnswer).verdicts
        self._loop.observe(PlanVerdict(answers), self.now)
        if any(answer.approved for answer in answers):
            self._report()
            self._follow()


def even_split(rates: Mapping[str, Curve], cores: float) -> dict[str, float]:
    """Return the rates of jobs that share the cores of a node evenly."""
    return {name: curve(cores / len(rates)) for name, curve in rates.items()}


def _expect(answer: Answer, kind: type[Found]) -> Found:
    if not isinstance(answer, kind):
        raise RuntimeError(f"the core answered {answer}")
    return answer
