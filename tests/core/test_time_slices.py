"""Time slices: which matrices the master approves, what a group holds, and how it is dissolved."""

from __future__ import annotations

import pytest
from core.drive import GIB, SERVER, Drive, job_of
from faultsim.state_invariants import violations
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger_master.core.answers import JobAnswer, PlanAnswer, Refused, SessionAnswer
from ganger_master.core.commands import (
    CancelJob,
    DeclareLost,
    Observe,
    ObservedGang,
    ObservedSlices,
    OpenSession,
    ProposePlan,
    RemoveNode,
    ResumeJob,
    RetuneJob,
    SuspendJob,
)
from ganger_master.core.events import StoredChanges
from ganger_master.core.gang_model import GangIntent, ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import PlanChange, SliceChange
from ganger_master.core.state_image import image_of, restored, state_of
from ganger_master.core.timeslice_groups import charges, has_turn
from ganger_master.store.tables import Codec
from hypothesis import given
from hypothesis import strategies as st
from kit.memory_store import MemoryStore
from msgspec.structs import replace

ARENA = GIB + GIB // 10


class Turns(Drive):
    """Nodes whose daemons switch time slices. They report the state of their group that `stand` has set."""

    def __init__(self, nodes: int = 1, capability: str = "yes") -> None:
        self.capability = capability
        self.stands: dict[str, tuple[ObservedSlices, ...]] = {}
        super().__init__(nodes)

    def join(self, node: str) -> None:
        answer = self.step(OpenSession(node, f"machine-{node}", SERVER, capabilities={"rotation": self.capability}))
        assert isinstance(answer, SessionAnswer)
        self.sessions[node] = answer.session
        self.observe(node, version=0)

    def observe(self, node: str, *gangs: ObservedGang, version: int | None = None) -> object:  # type: ignore[override]
        self.observations += 1
        applied = self.state.desired.of(node).version if version is None else version
        rows = self.stands.get(node, ())
        command = Observe(node, self.sessions[node], self.observations, applied, gangs, storage_proved=True, rows=rows)
        return self.step(command)

    def stand(self, node: str, rows: ObservedSlices) -> None:
        self.stands[node] = (rows,)
        self.observe(
            node, *(self.reported(gang, node) or self.report(gang, ObservedPhase.STARTING) for gang in self.on(node))
        )

    def run(self, spec: JobSpec) -> int:
        number = self.submit(spec)
        self.start(number)
        self.runs(number)
        return number

    def place(self, guest: int, host: int, **other: object) -> tuple[Claim, ...]:
        """All that the host has, for the guest, with an arena of its own."""
        claims = self.state.gangs[self.job(host).epoch].claims
        arena = self.job(guest).arena_bytes_per_device
        return tuple(
            replace(claim, arena_bytes=claim.device_mask.bit_count() * arena, **other)  # type: ignore[arg-type]
            for claim in claims
        )

    def row(self, number: int, *rows: int, claims: tuple[Claim, ...] = (), **other: object) -> PlanChange:
        fields = {"level": SuspendLevel.OFFLOAD, "quantum_s": 60.0, "together": 1, **other}
        return SliceChange(number, self.job(number).revision, claims, rows=rows, **fields)  # type: ignore[arg-type]

    def propose(self, *changes: PlanChange) -> list[Refusal | None]:
        answer = self.step(ProposePlan(changes))
        assert isinstance(answer, PlanAnswer)
        return [None if one.approved else one.refusals[0] for one in answer.verdicts]

    def share(self, gpus: int = 4) -> tuple[int, int]:
        """Start a job and then a second one on the same devices, time-sliced."""
        host = self.run(job_of(gpus))
        guest = self.submit(job_of(gpus))
        changes = (self.row(host, 0), self.row(guest, 1, claims=self.place(guest, host)))
        assert self.propose(*changes) == [None, None]
        self.runs(guest)
        return host, guest


@pytest.fixture
def drive() -> Turns:
    return Turns()


def blamed(refusals: list[Refusal | None]) -> Refusal:
    """Return the refusal with a reason among those of changes that are refused together."""
    found = [one for one in refusals if one is not None and "happen together" not in one.detail]
    assert len(found) == 1, refusals
    assert all(refusals), refusals
    return found[0]


def test_a_waiting_job_starts_on_devices_of_a_running_one_and_both_are_time_sliced(drive: Turns) -> None:
    host, guest = drive.share()
    assert drive.job(guest).state is JobState.HOLDING
    row = drive.state.rows["n1"]
    assert (row.free_mask, row.device_rows) == (0, (2, 2, 2, 2))
    desired = drive.state.desired.of("n1")
    assert [gang.intent for gang in desired.gangs] == [GangIntent.RUN, GangIntent.RUN]
    matrix = desired.rows[0].matrix
    assert matrix.rows == ((drive.job(host).epoch,), (drive.job(guest).epoch,))
    assert (matrix.version, matrix.quantum_s, matrix.level) == (1, 60.0, SuspendLevel.OFFLOAD)
    assert desired.rows[0].members[0].node == "n1"


def test_cores_are_held_once_for_all_rows_and_memory_for_each(drive: Turns) -> None:
    before = drive.run(job_of(4))
    one = drive.state.rows["n1"]
    guest = drive.submit(job_of(4))
    drive.propose(drive.row(before, 0), drive.row(guest, 1, claims=drive.place(guest, before)))
    both = drive.state.rows["n1"]
    assert both.free_millicores == one.free_millicores
    assert one.free_memory_bytes - both.free_memory_bytes == 4 * (4 * GIB + ARENA)


def test_a_cancelled_job_leaves_the_group_and_the_last_one_has_the_devices_to_itself(drive: Turns) -> None:
    host, guest = drive.share()
    drive.step(CancelJob(host))
    assert drive.state.gangs.sets, "it still is on the devices"
    before = drive.state.gangs[drive.job(guest).epoch].master_sequence
    drive.seen_without("n1", host)
    assert drive.state.gangs.sets == {}
    assert drive.state.gangs.set_of == {}
    assert drive.state.gangs.set_on == {}
    assert drive.state.desired.of("n1").rows == ()
    gang = drive.state.gangs[drive.job(guest).epoch]
    assert gang.master_sequence == before + 1
    assert gang.pieces[0].held == gang.pieces[0].claim


def test_a_job_parked_at_offload_leaves_the_group_and_keeps_only_its_arena(drive: Turns) -> None:
    host, _guest = drive.share()
    drive.step(SuspendJob(host, SuspendLevel.OFFLOAD))
    epoch = drive.job(host).epoch
    assert drive.state.gangs.set_of[epoch]
    drive.seen(host, epoch, ObservedPhase.PARKED, 7)
    assert drive.job(host).suspended_level is SuspendLevel.OFFLOAD
    held = drive.state.gangs[epoch].pieces[0].held
    assert held is not None
    assert held.device_mask == 0
    assert not any(held.millicores)
    assert drive.state.gangs.sets == {}
    assert drive.state.rows["n1"].device_rows == (1, 1, 1, 1)


def test_a_refused_suspend_leaves_the_time_slices_unchanged(drive: Turns) -> None:
    host, guest = drive.share()
    drive.step(SuspendJob(host, SuspendLevel.OFFLOAD))
    gang = drive.state.gangs[drive.job(host).epoch]
    report = drive.report(gang, ObservedPhase.PARKED, 7)
    refused = replace(report, level=SuspendLevel.PAUSE, trouble="STORAGE_FULL: no")
    drive.observe("n1", refused, *drive.others("n1", gang.epoch))
    assert drive.state.gangs[gang.epoch].intent is GangIntent.RUN
    assert drive.state.gangs.set_of[gang.epoch] == drive.state.gangs.set_of[drive.job(guest).epoch]


@pytest.mark.parametrize(("nodes", "newest"), [(1, 1), (2, 3)])
def test_a_gang_on_several_nodes_whose_stop_is_withdrawn_resumes_by_the_next_matrix(nodes: int, newest: int) -> None:
    """Some of its parts rest already, and a switch may reach a node before the order does."""
    drive = Turns(nodes)
    host, guest = drive.share(4 * nodes)
    epoch = drive.job(host).epoch
    number = drive.state.gangs.set_of[epoch]
    rows = drive.state.gangs.sets[number].active.rows
    for _ in range(2):
        drive.step(SuspendJob(host, SuspendLevel.OFFLOAD))
        assert drive.state.gangs[epoch].intent is GangIntent.PARK
        drive.step(ResumeJob(host))
        assert drive.state.gangs[epoch].intent is GangIntent.RUN
    node_set = drive.state.gangs.sets[number]
    assert (node_set.active.version, node_set.newest.version) == (1, newest)
    assert node_set.newest.rows == rows
    assert drive.state.gangs.set_of[drive.job(guest).epoch] == number


def test_a_third_job_joins_by_the_whole_next_matrix_and_both_matrices_are_held_until_it_is_active(drive: Turns) -> None:
    host, guest = drive.share()
    number = next(iter(drive.state.gangs.sets))
    third = drive.submit(job_of(4))
    changes = [drive.row(one, index, node_set=number) for index, one in enumerate((host, guest))]
    changes.append(drive.row(third, 2, claims=drive.place(third, host), node_set=number))
    assert drive.propose(*changes) == [None] * 3
    node_set = drive.state.gangs.sets[number]
    assert node_set.coming is not None
    assert node_set.coming.version == 2
    assert node_set.active.version == 1
    assert drive.state.desired.of("n1").rows[0].matrix == node_set.coming
    drive.stand("n1", ObservedSlices(number, 1, 2, 0))
    assert drive.state.gangs.sets[number].coming is not None, "it knows of it, that is all"
    again = [drive.row(one, index, node_set=number) for index, one in enumerate((host, guest, third))]
    assert blamed(drive.propose(*again)).reason is Reason.STALE_REVISION
    drive.stand("n1", ObservedSlices(number, 2, 2, 1))
    assert drive.state.gangs.sets[number].coming is None
    assert drive.state.gangs.sets[number].active.version == 2


def test_a_matrix_that_leaves_out_a_member_of_the_group_is_refused(drive: Turns) -> None:
    host, _ = drive.share()
    number = next(iter(drive.state.gangs.sets))
    refusal = blamed(drive.propose(drive.row(host, 0, node_set=number)))
    assert refusal.reason is Reason.CLAIM_MISMATCH
    assert "is time-sliced there, too" in refusal.message


def test_a_restarted_master_has_its_time_slice_groups(drive: Turns) -> None:
    host, _guest = drive.share()
    store = MemoryStore()
    changes = drive.state.take_changes()
    store.commit(Codec().batch(changes.puts, changes.removes, ()))
    fresh = restored(drive.state.settings, Codec().elements(store.load()), drive.now)
    assert fresh.gangs.sets == drive.state.gangs.sets
    assert (fresh.gangs.set_of, fresh.gangs.set_on) == (drive.state.gangs.set_of, drive.state.gangs.set_on)
    assert fresh.desired.of("n1").rows == drive.state.desired.of("n1").rows
    assert fresh.gangs[drive.job(host).epoch] == drive.state.gangs[drive.job(host).epoch]
    assert fresh.counters.next_set == 2


def test_an_image_has_the_time_slice_groups_and_their_last_reports(drive: Turns) -> None:
    drive.share()
    number = next(iter(drive.state.gangs.sets))
    drive.stand("n1", ObservedSlices(number, 1, 1, 1, 0.5))
    drive.state.take_changes()
    again = state_of(image_of(drive.state))
    assert violations(again) == []
    assert (again.gangs.sets, again.gangs.rows_seen) == (drive.state.gangs.sets, drive.state.gangs.rows_seen)
    assert image_of(again) == image_of(drive.state)


def test_of_several_gangs_in_a_row_all_need_devices_of_their_own(drive: Turns) -> None:
    one, other = drive.run(job_of(2)), drive.run(job_of(2))
    guest = drive.submit(job_of(2))
    changes = (drive.row(one, 0), drive.row(other, 0), drive.row(guest, 0, claims=drive.place(guest, one)))
    assert blamed(drive.propose(*changes)).reason is Reason.GPUS
    changes = (drive.row(one, 0), drive.row(other, 0, 1), drive.row(guest, 1, claims=drive.place(guest, one)))
    assert drive.propose(*changes) == [None] * 3


def test_a_group_is_dissolved_when_no_two_gangs_share_a_device_any_more(drive: Turns) -> None:
    one, other = drive.run(job_of(2)), drive.run(job_of(2))
    guest = drive.submit(job_of(2))
    drive.propose(drive.row(one, 0), drive.row(other, 0, 1), drive.row(guest, 1, claims=drive.place(guest, one)))
    drive.step(CancelJob(one))
    drive.seen_without("n1", one)
    assert drive.state.gangs.sets == {}
    assert drive.state.rows["n1"].device_rows == (1, 1, 1, 1)


def refused_with(drive: Turns, guest_spec: JobSpec, host_spec: JobSpec | None = None, **change: object) -> Refusal:
    host = drive.run(host_spec or job_of(4))
    guest = drive.submit(guest_spec)
    claims = drive.place(guest, host)
    return blamed(drive.propose(drive.row(host, 0, **change), drive.row(guest, 1, claims=claims, **change)))


def test_a_job_that_must_not_be_suspended_is_not_time_sliced(drive: Turns) -> None:
    refusal = refused_with(drive, job_of(4), replace(job_of(4), preemptible=False))
    assert refusal.reason is Reason.WRONG_STATE
    assert "not preemptible" in refusal.message


def test_jobs_of_different_priorities_are_not_time_sliced(drive: Turns) -> None:
    refusal = refused_with(drive, replace(job_of(4), priority=3))
    assert refusal.reason is Reason.WRONG_STATE
    assert dict(refusal.figures) == {"priority": 3, "priority_there": 0}


def test_a_job_with_a_time_limit_is_not_time_sliced(drive: Turns) -> None:
    assert "time limit" in refused_with(drive, replace(job_of(4), time_limit_s=60.0)).message


def test_a_matrix_whose_arenas_do_not_fit_is_refused_with_the_number(drive: Turns) -> None:
    host = drive.run(job_of(4))
    guest = drive.submit(job_of(4))
    without = drive.place(guest, host)
    without = tuple(replace(claim, arena_bytes=0) for claim in without)
    refusal = blamed(drive.propose(drive.row(host, 0), drive.row(guest, 1, claims=without)))
    assert refusal.reason is Reason.MEMORY
    assert refusal.figures["needed_bytes"] == ARENA
    assert refusal.figures["reserved_bytes"] == 0


def test_the_states_of_all_rows_must_fit_into_host_memory(drive: Turns) -> None:
    host = drive.run(job_of(4, 8 * GIB))
    numbers = [drive.submit(job_of(4, 8 * GIB)) for _ in range(1)]
    claims = drive.place(numbers[0], host)
    refusal = blamed(drive.propose(drive.row(host, 0), drive.row(numbers[0], 1, claims=claims)))
    assert refusal.reason is Reason.MEMORY
    assert refusal.figures["needed_bytes"] == 4 * (8 * GIB + ARENA)


def test_a_job_of_unknown_memory_use_needs_room_for_the_whole_device(drive: Turns) -> None:
    unknown = replace(job_of(4), gpu_memory_bytes=0)
    host = drive.run(job_of(4))
    guest = drive.submit(unknown)
    refusal = blamed(drive.propose(drive.row(host, 0), drive.row(guest, 1, claims=drive.place(guest, host))))
    assert refusal.figures["needed_bytes"] == GIB
    whole = tuple(replace(claim, arena_bytes=4 * GIB) for claim in drive.place(guest, host))
    assert drive.propose(drive.row(host, 0), drive.row(guest, 1, claims=whole)) == [None, None]


def test_rows_pause_only_if_all_stay_on_the_device_together(drive: Turns) -> None:
    refusal = refused_with(drive, job_of(4), level=SuspendLevel.PAUSE)
    assert refusal.reason is Reason.DEVICE_MEMORY
    assert refusal.figures["needed_bytes"] == 2 * GIB
    small = replace(job_of(4), gpu_memory_bytes=GIB * 4 // 10)
    other = Turns()
    host, guest = other.run(small), other.submit(small)
    changes = (
        other.row(host, 0, level=SuspendLevel.PAUSE),
        other.row(guest, 1, claims=other.place(guest, host), level=SuspendLevel.PAUSE),
    )
    assert other.propose(*changes) == [None, None]


def test_a_quantum_is_at_least_fifty_switches(drive: Turns) -> None:
    host, guest = drive.share()
    number = next(iter(drive.state.gangs.sets))
    drive.stand("n1", ObservedSlices(number, 1, 1, 0, switch_s=0.5))
    changes = [drive.row(one, i, node_set=number, quantum_s=24.0) for i, one in enumerate((host, guest))]
    refusal = blamed(drive.propose(*changes))
    assert refusal.reason is Reason.QUANTUM
    assert dict(refusal.figures) == {
        "quantum_milliseconds": 24_000,
        "least_milliseconds": 25_000,
        "switch_milliseconds": 500,
    }
    changes = [drive.row(one, i, node_set=number, quantum_s=25.0) for i, one in enumerate((host, guest))]
    assert drive.propose(*changes) == [None, None]


def test_which_row_runs_is_known_and_never_stored(drive: Turns) -> None:
    host, guest = drive.share()
    node_set = next(iter(drive.state.gangs.sets.values()))
    drive.stand("n1", ObservedSlices(node_set.number, 1, 1, row=0))
    drive.state.take_changes()
    for row in (1, 0, 1):
        drive.stand("n1", ObservedSlices(node_set.number, 1, 1, row=row))
        turns = [has_turn(node_set, drive.state.gangs.rows_seen, drive.job(job).epoch) for job in (host, guest)]
        assert turns == [row == 0, row == 1]
    assert drive.state.take_changes() == StoredChanges({}, ())


def test_node_sets_have_no_node_in_common() -> None:
    drive = Turns(2)
    _host, _ = drive.share(2)
    number = next(iter(drive.state.gangs.sets))
    node = drive.state.gangs.sets[number].nodes[0]
    other = drive.submit(job_of(2))
    rest = next(place for place in drive.places(other) if place[0].node == node)
    assert drive.request(other, rest) is not None
    drive.runs(other)
    guest = drive.submit(job_of(2))
    changes = (drive.row(other, 0), drive.row(guest, 1, claims=drive.place(guest, other)))
    refusal = blamed(drive.propose(*changes))
    assert refusal.reason is Reason.WRONG_STATE
    assert refusal.figures["node_set"] == number


def test_a_node_whose_daemon_cannot_switch_slices_gets_none() -> None:
    refusal = refused_with(Turns(capability="no"), job_of(4))
    assert refusal.reason is Reason.NOT_SUPPORTED


def test_a_time_sliced_job_is_neither_paused_nor_given_other_cores(drive: Turns) -> None:
    host, _ = drive.share()
    assert isinstance(drive.step(RetuneJob(host, 1_000)), Refused)
    assert drive.step(RetuneJob(host, repin=True)) == JobAnswer(host)
    paused = drive.step(SuspendJob(host, SuspendLevel.PAUSE))
    assert isinstance(paused, Refused)
    assert paused.reason == "LEVEL_UNAVAILABLE"


def test_a_job_that_turns_out_to_be_unable_to_stop_waits_for_devices_of_its_own(drive: Turns) -> None:
    host, guest = drive.share()
    number = next(iter(drive.state.gangs.sets))
    drive.stand("n1", ObservedSlices(number, 1, 1, 1, unable=(drive.job(guest).epoch,)))
    assert drive.job(guest).ending is JobState.PENDING
    assert drive.job(guest).preemptions == 1
    drive.seen_without("n1", guest)
    assert drive.job(guest).state is JobState.PENDING
    assert drive.state.gangs.sets == {}
    assert drive.job(host).state is JobState.HOLDING


def ends_by(drive: Turns, number: int, kind: OutcomeKind) -> None:
    gang = drive.state.gangs[drive.job(number).epoch]
    ended = replace(drive.report(gang, ObservedPhase.ENDED), outcome=Outcome(kind))
    drive.observe("n1", ended, *drive.others("n1", gang.epoch))
    drive.seen_without("n1", number)


def test_a_job_killed_for_outstaying_its_slice_is_not_time_sliced_any_more(drive: Turns) -> None:
    host, guest = drive.share()
    ends_by(drive, guest, OutcomeKind.ESCALATED)
    assert drive.job(guest).state is JobState.PENDING
    again = drive.row(guest, 1, claims=drive.place(guest, host))
    refused = blamed(drive.propose(drive.row(host, 0), again))
    assert refused.job == f"jobs/{guest}"
    assert refused.detail == "it did not stop at the end of its time slice, and was killed"
    # It has a node to itself, and its next attempt reports all capabilities.
    drive.step(CancelJob(host))
    drive.seen_without("n1", host)
    drive.start(guest)
    drive.runs(guest)
    assert drive.job(guest).capabilities.offload
    newcomer = drive.submit(job_of(4))
    joining = drive.row(newcomer, 1, claims=drive.place(newcomer, guest))
    assert blamed(drive.propose(drive.row(guest, 0), joining)).job == f"jobs/{guest}"


@pytest.mark.parametrize("kind", [OutcomeKind.UNKNOWN, OutcomeKind.FENCED])
def test_a_job_whose_attempt_ended_in_another_way_can_be_time_sliced_again(drive: Turns, kind: OutcomeKind) -> None:
    host, guest = drive.share()
    ends_by(drive, guest, kind)
    again = drive.row(guest, 1, claims=drive.place(guest, host))
    assert drive.propose(drive.row(host, 0), again) == [None, None]


def test_a_node_set_whose_leader_is_lost_is_led_by_another_with_a_higher_epoch() -> None:
    drive = Turns(2)
    host = drive.run(job_of(8))
    guest = drive.submit(job_of(8))
    assert drive.propose(drive.row(host, 0), drive.row(guest, 1, claims=drive.place(guest, host))) == [None, None]
    node_set = next(iter(drive.state.gangs.sets.values()))
    assert (node_set.nodes, node_set.leader, node_set.set_epoch) == (("n1", "n2"), "n1", 1)
    ended = drive.report(drive.state.gangs[drive.job(host).epoch], ObservedPhase.ENDED)
    drive.observe("n1", replace(ended, outcome=Outcome(OutcomeKind.DONE)), *drive.others("n1", ended.epoch))
    drive.now += 100.0
    drive.step(DeclareLost("n1"))
    for one in drive.state.gangs.sets.values():
        assert (one.leader, one.set_epoch) == ("n2", 2)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=6, max_size=6),
)
def test_charges_sum_to_the_largest_slice_and_no_gang_is_charged_more_than_it_needs(
    rows: list[list[int]], needs: list[tuple[int, int]]
) -> None:
    named = dict(enumerate(needs))
    charged = charges(rows, named)
    for socket in (0, 1):
        largest = max(sum(named[epoch][socket] for epoch in set(row)) for row in rows)
        assert sum(charged[epoch][socket] for epoch in named) == largest
        assert all(0 <= charged[epoch][socket] <= named[epoch][socket] for epoch in named)


def test_a_node_may_be_removed_where_gangs_over_it_and_others_took_turns() -> None:
    drive = Turns(2)
    host, guest = drive.share(8)
    (node_set,) = drive.state.gangs.sets.values()
    assert (node_set.nodes, node_set.leader) == (("n1", "n2"), "n1")
    number = node_set.number
    rows = (drive.row(host, 0, 1, node_set=number), drive.row(guest, 2, node_set=number))
    assert drive.propose(*rows) == [None, None]
    assert drive.state.gangs.sets[number].coming is not None, "not all nodes have it yet"
    drive.now += 60.0
    drive.step(DeclareLost("n1"))
    drive.step(RemoveNode("n1"))
    assert "n1" not in drive.state.nodes
    drive.observe("n2", *[drive.report(gang, ObservedPhase.STARTING) for gang in drive.on("n2")])
    assert [one.leader for one in drive.state.gangs.sets.values()] == ["n2"]
    drive.observe("n2")
    assert drive.state.gangs.sets == {}
    assert [drive.job(number).state for number in (host, guest)] == [JobState.PENDING] * 2


def test_no_job_starts_in_a_group_where_its_earlier_gang_may_be_on_its_devices_yet() -> None:
    """The node was lost, and has not reported since that the gang is gone."""
    drive = Turns()
    jobs = drive.share(4)
    places = {number: drive.place(number, number) for number in jobs}
    (before,) = drive.state.gangs.sets
    drive.now += 60.0
    drive.step(DeclareLost("n1"))
    assert [drive.job(number).state for number in jobs] == [JobState.PENDING] * 2
    changes = [drive.row(n, index, claims=places[n], node_set=before) for index, n in enumerate(jobs)]
    refusal = blamed(drive.propose(*changes))
    assert refusal.reason is Reason.WRONG_STATE
    assert refusal.detail.startswith("an earlier gang of jobs/")
