"""A state with resizable elastic jobs, and simulated daemons that report both of their worlds."""

from __future__ import annotations

from core.drive import ALL_LEVELS, GIB, Drive, job_of
from ganger.cluster.resources import Role, TaskShape
from ganger_master.core.commands import ObservedGang
from ganger_master.core.gang_model import Gang, ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_spec import JobSpec
from msgspec.structs import replace

RESIZABLE = replace(ALL_LEVELS, resize=True, resize_divides=12)
SMALL = GIB // 8


def elastic(gpus: int, least: int, most: int, device_bytes: int = SMALL, per_task: int = 1) -> JobSpec:
    role = Role("worker", gpus // per_task, TaskShape(per_task, 2_000, GIB))
    return replace(job_of(gpus), roles=(role,), gpus_min=least, gpus_max=most, gpu_memory_bytes=device_bytes)


class World(Drive):
    """Jobs that say what they can."""

    capabilities = RESIZABLE

    def report(self, gang: Gang, phase: ObservedPhase, stop_step: int = 0) -> ObservedGang:
        return replace(super().report(gang, phase, stop_step), capabilities=self.capabilities)

    def reported(self, gang: Gang, node: str) -> ObservedGang | None:
        piece = gang.piece(node)
        if piece is not None and piece.phase is ObservedPhase.NONE and not piece.gone:
            # Two worlds of a job are on one node: its daemon reports both.
            return self.report(gang, ObservedPhase.STARTING)
        return super().reported(gang, node)

    def running(self, spec: JobSpec) -> int:
        number = self.submit(spec)
        self.start(number)
        self.runs(number)
        return number

    def held(self, number: int) -> dict[int, int]:
        """By device of the first node, how often the job holds it."""
        masks = [
            piece.held.device_mask
            for gang in self.state.gangs.of_job(number)
            for piece in gang.pieces
            if piece.held is not None and piece.claim.node == "n1"
        ]
        return {device: sum(mask >> device & 1 for mask in masks) for device in range(4) if any(masks)}

    def fails(self, number: int, epoch: int) -> None:
        for node in self.state.gangs[epoch].nodes:
            gang = self.state.gangs.get(epoch)
            if gang is not None and not gang.piece(node).gone:  # type: ignore[union-attr]
                ended = replace(self.report(gang, ObservedPhase.ENDED), outcome=Outcome(OutcomeKind.FAILED, 1))
                self.observe(node, *self.others(node, epoch), ended)

    def part_fails(self, epoch: int, node: str) -> None:
        ended = replace(self.report(self.state.gangs[epoch], ObservedPhase.ENDED), outcome=Outcome(OutcomeKind.UNKNOWN))
        self.observe(node, *self.others(node, epoch), ended)

    def restarts(self, node: str) -> None:
        """Whatever was known to run there has ended with it."""
        outcome = Outcome(OutcomeKind.UNKNOWN)
        there = [(gang, gang.piece(node)) for gang in self.on(node)]
        ended = [
            replace(self.report(gang, ObservedPhase.ENDED), outcome=outcome)
            for gang, piece in there
            if piece is not None and piece.phase is not ObservedPhase.NONE
        ]
        self.join(node)
        self.observe(node, *ended, version=0)

    def gone(self, number: int, epoch: int) -> None:
        self.seen(number, epoch, ObservedPhase.ENDED)
