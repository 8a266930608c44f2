"""Stories of gangs that take turns on simulated nodes whose rows the daemons' own core switches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faultsim.fault_cluster import FaultCluster
from faultsim.rows_of_daemons import DaemonTurns
from ganger.cluster.resources import Claim, Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger.job_state import JobState
from ganger_master.core import quarantine
from ganger_master.core.answers import Done, PlanAnswer
from ganger_master.core.commands import EndQuarantined, GoOn, OpenStore, ProposePlan
from ganger_master.core.gang_model import Gang, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import PlanChange, SliceChange, StartChange, SuspendChange
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * _GIB, device_memory_bytes=4 * _GIB)
QUANTUM_S = 5.0


class Story:
    """Nodes n1, n2, ...; only the plans here start jobs."""

    def __init__(self, nodes: int) -> None:
        self.cluster = FaultCluster(1, [], CoreSettings(restored_wait_s=5.0))
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

    def rows(
        self, *rows: tuple[int, ...], node_set: int = 0, moves: Mapping[int, tuple[Claim, ...]] | None = None
    ) -> None:
        """`moves`: the claims that jobs move to."""
        numbers = sorted({number for row in rows for number in row})
        self.propose(
            *[
                self.change(
                    SliceChange,
                    number,
                    (moves or {}).get(number, ()),
                    level=SuspendLevel.OFFLOAD,
                    together=1,
                    node_set=node_set,
                    rows=tuple([index for index, row in enumerate(rows) if number in row]),
                    quantum_s=QUANTUM_S,
                )
                for number in numbers
            ]
        )

    def go_back(self, copy: dict[tuple[str, str], bytes]) -> None:
        """The database goes back to the copy, and the master settles what its nodes run."""
        self.cluster.restore(copy, OpenStore("", is_restored=True))
        assert self.cluster.run_until(lambda: self.cluster.state.counters.restoring is None, 60.0)

    def end_quarantined(self, *numbers: int) -> None:
        """An operator ends the quarantined gangs of these jobs, which then wait for other ones."""
        for number in numbers:
            job = self.job(number)
            for epoch in quarantine.live_epochs(self.cluster.state, job.uid):
                assert isinstance(self.cluster.ask(EndQuarantined(job.uid, epoch)), Done)
        state = self.cluster.state
        assert self.cluster.run_until(
            lambda: not any(self.job(number).uid in state.nodes.strays_of for number in numbers), 60.0
        )
        assert all(self.job(number).state is JobState.PENDING for number in numbers)

    def beside(self, guest: int, host: int) -> Claim:
        """The only claim of the host, for the guest, with room for its own state."""
        (there,) = self.gang(host).claims
        return replace(there, arena_bytes=self.job(guest).arena_bytes_per_device * there.device_mask.bit_count())

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


def test_a_restored_master_gives_no_gang_the_devices_of_a_member_of_its_group_that_it_does_not_know() -> None:
    """One job was on its way into a time slice when the copy was made, and is there by now. The matrix is the same, but
    the gang obeys a later order than the database has."""
    story = Story(nodes=1)
    host, guest = story.submit(1, steps=400), story.submit(1, steps=400)
    story.place(host, ("n1", 0b1, 0))
    story.place(guest, ("n1", 0b10, 0))
    source = story.job(guest).epoch
    story.rows((host,), (guest,), moves={guest: (story.beside(guest, host),)})
    story.cluster.run_for(1.0)
    copy = story.cluster.backup()
    assert story.cluster.run_until(lambda: story.job(guest).moved_from == source, 60.0)
    story.cluster.run_for(30.0)
    story.go_back(copy)
    story.cluster.check_devices()
    assert not story.cluster.state.gangs.sets
    story.end_quarantined(host, guest)
    story.place(host, ("n1", 0b1, 0))
    story.place(guest, ("n1", 0b10, 0))
    story.all_end()


def test_a_restored_master_counts_time_sliced_gangs_of_a_changed_group_as_over_on_a_node_that_does_not_report() -> None:
    """Without their group they would hold one device of that node together. The node comes back, and stops them."""
    story = Story(nodes=2)
    one, two, third = story.submit(2, steps=400), story.submit(1, steps=400), story.submit(1, steps=400)
    story.place(one, ("n1", 0b1, 0), ("n2", 0b1, 0))
    story.rest(one)
    story.place(two, ("n2", 0b1, 0))
    story.rest(two)
    story.place(third, ("n1", 0b10, 0))
    story.rows((one,), (two,))
    story.cluster.run_for(30.0)
    copy = story.cluster.backup()
    (node_set,) = story.cluster.state.gangs.sets
    gang = story.job(third).epoch
    beside = replace(story.gang(third).pieces[0].claim, device_mask=0b1)
    story.rows((one,), (two,), (third,), node_set=node_set, moves={third: (beside,)})
    assert story.cluster.run_until(lambda: story.job(third).moved_from == gang, 60.0)
    story.cluster.daemons["n2"].crash()
    story.cluster.restore(copy, OpenStore("", is_restored=True))
    assert story.cluster.run_until(lambda: "n1" in story.cluster.state.reports, 30.0)
    assert isinstance(story.cluster.ask(GoOn()), Done)
    story.cluster.check_devices()
    story.cluster.daemons["n2"].start()
    story.cluster.run_for(60.0)
    story.end_quarantined(one, third)
    for number, devices in ((one, 0b11), (third, 0b1000)):
        story.place(number, ("n1", devices, 0))
    story.all_end()


def test_a_database_that_goes_back_twice_gives_no_gang_the_devices_of_a_member_that_joined_since_the_backup() -> None:
    """After the first restore no daemon knows the group any more, and the second restore finds it in the copy again."""
    story = Story(nodes=1)
    one, two, third = [story.submit(1, steps=400) for _ in range(3)]
    for number in (one, two):
        story.place(number, ("n1", 0b1, 0))
        story.rest(number)
    story.rows((one,), (two,))
    story.cluster.run_for(30.0)
    copy = story.cluster.backup()
    (node_set,) = story.cluster.state.gangs.sets
    story.rows((one,), (two,), (third,), node_set=node_set, moves={third: (story.beside(third, one),)})
    story.cluster.run_for(60.0)
    for _ in range(2):
        story.go_back(copy)
        story.cluster.check_devices()
        story.cluster.run_for(10.0)
    story.end_quarantined(one, two, third)
    for number, device in ((one, 0b1), (two, 0b10), (third, 0b100)):
        story.place(number, ("n1", device, 0))
    story.all_end()
