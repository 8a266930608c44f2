"""Stories of gangs that take turns on simulated nodes whose rows the daemons' own core switches."""

from __future__ import annotations

from collections.abc import Callable

from faultsim.fault_cluster import FaultCluster
from faultsim.rows_of_daemons import DaemonTurns
from ganger.cluster.resources import Claim, Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger.job_state import JobState
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import ProposePlan
from ganger_master.core.gang_model import Gang, GangPhase
from ganger_master.core.job_model import JobRecord, JobSpec, SuspendLevel
from ganger_master.core.plan_changes import PlanChange, SliceChange, StartChange, SuspendChange
from ganger_master.core.settings import CoreSettings

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * _GIB, device_memory_bytes=4 * _GIB)
QUANTUM_S = 5.0


class Story:
    """Nodes n1, n2, ...; only the plans here start jobs."""

    def __init__(self, nodes: int) -> None:
        self.cluster = FaultCluster(1, [], CoreSettings())
        self.turns: dict[str, DaemonTurns] = {}
        for number in range(1, nodes + 1):
            self.cluster.add_node(
                f"n{number}",
                SERVER,
                {"packing": "yes", "rotation": "yes"},
                lambda daemon: DaemonTurns(daemon, self.turns),
            )
        self.cluster.host.crash(1e9)
        self.cluster.run_for(5.0)

    def submit(self, gpus: int, steps: int = 60) -> int:
        spec = JobSpec(
            ("train", str(steps)), (Role("worker", gpus, TaskShape(1, 1_000, 2 * _GIB)),), gpu_memory_bytes=_GIB
        )
        submission = self.cluster.submit(spec)
        assert self.cluster.run_until(lambda: submission.number > 0, 10.0)
        return submission.number

    def job(self, number: int) -> JobRecord:
        return self.cluster.state.jobs[number]

    def gang(self, number: int) -> Gang:
        return self.cluster.state.gangs[self.job(number).epoch]

    def change(
        self, kind: Callable[..., PlanChange], number: int, *claims: tuple[Claim, ...], **fields: object
    ) -> PlanChange:
        return kind(number, self.job(number).revision, *claims, **fields)

    def propose(self, *changes: PlanChange) -> None:
        answer = self.cluster.ask(ProposePlan(changes))
        assert isinstance(answer, PlanAnswer)
        assert all(verdict.approved for verdict in answer.verdicts), answer.verdicts

    def place(self, number: int, *devices: tuple[str, int, int]) -> None:
        """On (node, devices, those of them that are shared), and it runs."""
        self.propose(self.change(StartChange, number, tuple([claim(*where) for where in devices])))
        assert self.cluster.run_until(lambda: self.gang(number).phase is GangPhase.RUNNING, 60.0)

    def rest(self, number: int, within: float = 60.0) -> None:
        self.propose(self.change(SuspendChange, number, level=SuspendLevel.OFFLOAD))
        assert self.cluster.run_until(lambda: self.gang(number).phase is GangPhase.PARKED, within)

    def rows(self, *rows: tuple[int, ...], node_set: int = 0) -> None:
        numbers = sorted({number for row in rows for number in row})
        self.propose(
            *[
                self.change(
                    SliceChange,
                    number,
                    level=SuspendLevel.OFFLOAD,
                    together=1,
                    node_set=node_set,
                    rows=tuple([index for index, row in enumerate(rows) if number in row]),
                    quantum_seconds=QUANTUM_S,
                )
                for number in numbers
            ]
        )

    def all_end(self) -> None:
        jobs = self.cluster.state.jobs
        assert self.cluster.run_until(lambda: all(job.state.is_finished for job in jobs.values()), 1_000.0), jobs
        assert all(job.state is JobState.SUCCEEDED for job in self.cluster.state.jobs.values())
        self.cluster.check()


def claim(node: str, mask: int, shared: int = 0) -> Claim:
    gpus = mask.bit_count()
    return Claim(node, mask, (1_000 * gpus, 0), 2 * _GIB * gpus, 0, (gpus,), shared_mask=shared)


def test_a_job_that_parked_while_co_located_waits_in_its_time_slices_for_its_former_neighbour() -> None:
    """Both had been told, before, that they share the device. The leader of the set is on another node, and has not
    ordered anything yet when the parked one is ordered to run."""
    story = Story(nodes=2)
    one, other = story.submit(1), story.submit(2)
    story.place(one, ("n2", 0b1, 0))
    story.place(other, ("n1", 0b1, 0), ("n2", 0b1, 0b1))
    story.rest(one)
    story.rows((one,), (other,))
    story.all_end()


def test_a_job_suspended_again_before_its_time_slice_came_parks_at_once() -> None:
    """It rested before it came to take turns, another has the device, and their leader is away: a newer stop needs
    neither the device nor the leader."""
    story = Story(nodes=2)
    one, other = story.submit(1), story.submit(2, steps=100)
    story.place(one, ("n2", 0b1, 0))
    story.rest(one)
    story.place(other, ("n1", 0b1, 0), ("n2", 0b1, 0))
    story.cluster.daemons["n1"].crash()
    story.rows((other,), (one,))
    story.cluster.run_for(5.0)
    step = story.cluster.oracle.trainings["uid-1"].step
    story.rest(one, within=10.0)
    assert story.cluster.oracle.trainings["uid-1"].step == step
    story.cluster.daemons["n1"].start()
    story.cluster.run_for(10.0)
    story.rows((other,), (one,))
    story.all_end()


def test_turns_go_on_when_the_leader_has_lost_its_notes() -> None:
    """The leader has no gang that rests by a switch, so that nothing on its node shows how far the set had come."""
    story = Story(nodes=2)
    both, one, other = story.submit(2, steps=400), story.submit(1, steps=400), story.submit(1, steps=400)
    story.place(both, ("n1", 0b1, 0), ("n2", 0b10, 0))
    story.place(one, ("n2", 0b1, 0))
    story.rest(one)
    story.place(other, ("n2", 0b1, 0))
    story.rows((both, one), (both, other))
    story.cluster.run_for(60.0)
    leader = story.cluster.state.gangs.sets[story.gang(both).node_set].leader
    assert leader == "n1"
    story.cluster.daemons["n1"].crash()
    story.turns["n1"].forget()
    story.cluster.daemons["n1"].start()
    obeyed = story.turns["n2"].sets[story.gang(both).node_set].position.switch
    assert obeyed.sequence > 3
    assert story.cluster.run_until(
        lambda: story.turns["n2"].sets[story.gang(both).node_set].position.switch.sequence > obeyed.sequence + 3, 60.0
    )
    story.all_end()
