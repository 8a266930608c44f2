"""A state driven by hand: commands at given times, and the reports of simulated daemons."""

from __future__ import annotations

from dataclasses import replace

from faultsim.state_invariants import violations
from ganger.cluster.placement import candidates
from ganger.cluster.resources import Claim, Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger_master.core import machine
from ganger_master.core.accounting import limits_of
from ganger_master.core.answers import Answer, Approved, JobAnswer, SessionAnswer
from ganger_master.core.commands import (
    Command,
    FinishedGang,
    Observe,
    ObservedGang,
    OpenSession,
    RequestGang,
    SubmitJob,
)
from ganger_master.core.events import HistoryRow
from ganger_master.core.gang_model import Gang, ObservedPhase
from ganger_master.core.job_model import Capabilities, JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State

GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * GIB, device_memory_bytes=GIB)
ALL_LEVELS = Capabilities(pause=True, offload=True, checkpoint=True, known=True)


def job_of(gpus: int, memory: int = 4 * GIB) -> JobSpec:
    return JobSpec(("train",), (Role("worker", gpus, TaskShape(1, 2_000, memory)),), gpu_memory_bytes=GIB)


class Drive:
    def __init__(self, nodes: int = 1, settings: CoreSettings | None = None) -> None:
        self.state = State(settings or CoreSettings(), 0.0)
        self.now = 1.0
        # What its processes keep of each device once they have offloaded.
        self.residue_bytes = 0
        self.sessions: dict[str, str] = {}
        self.observations = 0
        self.history: list[HistoryRow] = []
        for number in range(1, nodes + 1):
            self.join(f"n{number}")

    def step(self, command: Command) -> Answer:
        self.now += 0.01
        done = machine.step(self.state, command, self.now)
        self.history += done.effects.history
        assert violations(self.state) == []
        for turn in done.effects.turns:
            lease = self.state.leases.get(turn)
            if lease is not None and lease.suggested and not lease.scheduler:
                # As the default scheduler does.
                self.request(lease.number, lease.suggested)
        return done.answer

    def set_quotas(self, **devices: int) -> None:
        """Set other quotas, as a restart does; jobs that were accepted under the former ones stay."""
        self.state.settings = replace(self.state.settings, quota_devices=devices)
        self.state.limits = limits_of(devices)

    def join(self, node: str) -> None:
        answer = self.step(OpenSession(node, f"machine-{node}", SERVER, peer_address=f"{node}:1"))
        assert isinstance(answer, SessionAnswer)
        self.sessions[node] = answer.session
        self.observe(node, version=0)

    def observe(
        self, node: str, *gangs: ObservedGang, version: int | None = None, finished: tuple[FinishedGang, ...] = ()
    ) -> Answer:
        """Apply a complete report of a node, by default of the newest desired version."""
        self.observations += 1
        applied = self.state.desired.of(node).version if version is None else version
        return self.step(
            Observe(
                node, self.sessions[node], self.observations, applied, gangs, storage_proved=True, finished=finished
            )
        )

    def submit(self, spec: JobSpec, user: str = "") -> int:
        answer = self.step(SubmitJob(spec, f"uid-{len(self.state.jobs)}", user))
        assert isinstance(answer, JobAnswer)
        return answer.number

    def places(self, number: int) -> tuple[tuple[Claim, ...], ...]:
        job = self.state.jobs[number]
        return candidates(self.state.view, job.shape, waited_s=1e9).candidates

    def request(
        self,
        number: int,
        *places: tuple[Claim, ...],
        turn: int | None = None,
        view_version: int = 0,
        blockers: bool = False,
    ) -> Answer:
        """Request a gang, by default with the job's lease; without places the scheduler passes."""
        held = self.state.leases.turn_of.get(number, 0) if turn is None else turn
        job = self.state.jobs[number]
        found = candidates(self.state.view, job.shape).refusals if blockers else ()
        return self.step(
            RequestGang(number, job.revision, places, held, blockers=tuple(found), view_version=view_version)
        )

    def start(self, number: int) -> int:
        """Its epoch."""
        answer = self.request(number, *self.places(number))
        assert isinstance(answer, Approved), answer
        return answer.epoch

    def runs(self, number: int) -> None:
        """Its daemons say that it steps."""
        self.seen(number, self.job(number).epoch, ObservedPhase.RUNNING)

    def seen(self, number: int, epoch: int, phase: ObservedPhase, stop_step: int = 0) -> None:
        """One gang is reported so by all its nodes, beside whatever else they have, as it was last reported."""
        for node in self.state.gangs[epoch].nodes:
            others = self.others(node, epoch)
            gang = self.state.gangs.get(epoch)
            if gang is not None:
                self.observe(node, *others, self.report(gang, phase, stop_step))

    def others(self, node: str, epoch: int) -> list[ObservedGang]:
        """All but this gang, as they were last reported."""
        found = [self.reported(gang, node) for gang in self.on(node) if gang.epoch != epoch]
        return [one for one in found if one is not None]

    def seen_without(self, node: str, number: int) -> None:
        """A job's gang has gone from a node, the others are as they were last reported."""
        others = [self.reported(gang, node) or self.report(gang, ObservedPhase.STARTING) for gang in self.on(node)]
        self.observe(node, *(one for one in others if one.job != number))

    def on(self, node: str) -> list[Gang]:
        return [self.state.gangs[epoch] for epoch in sorted(self.state.gangs.places_on[node])]

    def reported(self, gang: Gang, node: str) -> ObservedGang | None:
        piece = gang.piece(node)
        assert piece is not None
        if piece.phase in (ObservedPhase.NONE, ObservedPhase.ENDED):
            return None
        return self.report(gang, piece.phase, piece.stop_step)

    def report(self, gang: Gang, phase: ObservedPhase, stop_step: int = 0) -> ObservedGang:
        parked = phase is ObservedPhase.PARKED
        return ObservedGang(
            gang.job,
            self.state.jobs[gang.job].uid,
            gang.epoch,
            phase,
            gang.master_sequence,
            level=gang.park_level,
            stop_sequence=gang.stop_sequence if parked else 0,
            stop_step=stop_step,
            residue_bytes=(self.residue_bytes,) * SERVER.devices if parked else (),
            capabilities=ALL_LEVELS,
        )

    def job(self, number: int) -> JobRecord:
        return self.state.jobs[number]
