"""Time-sliced jobs that move: to devices of their own, or to those of other groups, by their next matrix."""

from __future__ import annotations

import pytest
from core.drive import GIB, job_of
from core.test_time_slices import Turns, blamed
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger_master.core.answers import JobAnswer, Refused
from ganger_master.core.commands import DrainNode, MoveJob, ObservedSlices, ResizeJob
from ganger_master.core.gang_model import GangIntent, GangPhase, ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import Goal, PlanChange, Purpose
from ganger_master.core.timeslice_groups import filled
from msgspec.structs import replace

SMALL = replace(job_of(1, 2 * GIB), gpu_memory_bytes=GIB)


class Six(Turns):
    """Four devices, those of one node, and six jobs: two devices have two."""

    def __init__(self, nodes: int = 1, first: JobSpec = SMALL) -> None:
        super().__init__(nodes)
        self.jobs = [self.run(spec) for spec in (first, SMALL, SMALL, SMALL)]
        self.jobs += [self.submit(SMALL) for _ in range(2)]
        one, two, three, four, five, six = self.jobs
        changes = [self.row(one, 0), self.row(two, 0), self.row(three, 0, 1), self.row(four, 0, 1)]
        there = self.place(five, one, millicores=(2_000, 0))
        changes += [self.row(five, 1, claims=there), self.row(six, 1, claims=self.place(six, two))]
        assert self.propose(*changes) == [None] * 6
        (self.set,) = self.state.gangs.sets
        (node,) = self.state.gangs.sets[self.set].nodes
        self.observe(node, *(self.report(gang, ObservedPhase.RUNNING) for gang in self.on(node)))

    def beside(self, guest: int, host: int) -> list[PlanChange]:
        """All of the next matrix, in which the guest is where the host is."""
        rows: dict[int, tuple[int, ...]] = dict.fromkeys(self.jobs, (0, 1))
        one, two, three, four, five, six = self.jobs
        rows |= {one: (0,), two: (0,), three: (0,), four: (0, 1), five: (1,), six: (1,)}
        places = {guest: self.place(guest, host)}
        return [
            self.row(number, *own, claims=places.get(number, ()), node_set=self.set) for number, own in rows.items()
        ]

    def epoch(self, number: int) -> int:
        return self.job(number).epoch

    def mask(self, number: int) -> int:
        return self.state.gangs[self.epoch(number)].claims[0].device_mask

    def handed_over(self, number: int) -> None:
        """Its destination is prepared, it rests, the state has come and its first step there is done."""
        source, destination = self.job(number).epoch, self.job(number).next_epoch
        self.seen(number, destination, ObservedPhase.PREPARED)
        self.seen(number, source, ObservedPhase.PARKED, 7)
        self.seen(number, destination, ObservedPhase.READY, 7)
        self.seen(number, destination, ObservedPhase.RUNNING)
        node = self.state.gangs[source].nodes[0]
        self.observe(node, *self.others(node, source))


@pytest.fixture
def six() -> Six:
    return Six()


def active(drive: Six) -> list[set[int]]:
    """Jobs by row, of the newest matrix."""
    rows = drive.state.gangs.sets[drive.set].newest.rows
    gangs = drive.state.gangs
    return [{gangs[epoch].job for epoch in row if epoch in gangs} for row in rows]


def test_a_gang_moves_within_its_group_and_is_time_sliced_where_it_was_until_it_is_parked(six: Six) -> None:
    five, three = six.jobs[4], six.jobs[2]
    source = six.epoch(five)
    assert six.propose(*six.beside(five, three)) == [None] * 6
    destination = six.job(five).next_epoch
    newest = six.state.gangs.sets[six.set].newest
    assert [source in row for row in newest.rows] == [True, False]
    assert [destination in row for row in newest.rows] == [False, True]
    wanted = {gang.epoch: gang.intent for gang in six.state.desired.of("n1").gangs}
    assert (wanted[source], wanted[destination]) == (GangIntent.RUN, GangIntent.PREPARE)
    six.seen(five, destination, ObservedPhase.PREPARED)
    gang = six.state.gangs[source]
    assert (gang.intent, gang.park_level) == (GangIntent.PARK, SuspendLevel.OFFLOAD)
    assert gang.node_set == six.set, "it is on its devices until it rests"


def test_its_time_slice_neighbour_gets_its_slice_while_the_destination_starts_in_the_neighbours(six: Six) -> None:
    one, two, three, _, five, six_ = six.jobs
    source = six.epoch(five)
    six.propose(*six.beside(five, three))
    first, second = six.state.gangs.sets[six.set].newest.rows
    assert (six.epoch(one) in first, six.epoch(one) in second) == (False, True)
    assert {source, six.epoch(two), six.epoch(three)} <= set(first)
    assert {six.job(five).next_epoch, six.epoch(six_)} <= set(second)


def test_a_leaving_gang_shares_the_slice_of_its_destination_where_its_devices_idle(six: Six) -> None:
    four, one = six.jobs[3], six.jobs[0]
    rows = dict(zip(six.jobs, [(0,), (0,), (0, 1), (1,), (2,), (1, 2)], strict=True))
    moved = [
        six.row(number, *own, claims=six.place(four, one) if number == four else (), node_set=six.set)
        for number, own in rows.items()
    ]
    assert six.propose(*moved) == [None] * 6
    newest = six.state.gangs.sets[six.set].newest
    assert [six.epoch(four) in row for row in newest.rows] == [True, True, True]


def test_its_neighbour_keeps_its_slice_where_cores_lack_beside_the_destination() -> None:
    (role,) = SMALL.roles
    # a socket has eight cores
    many = replace(SMALL, roles=(replace(role, shape=replace(role.shape, millicores=6_000)),))
    six = Six(first=many)
    one, two, three, four, five, six_ = six.jobs
    changes = six.beside(five, three)
    changes[4] = replace(changes[4], claims=six.place(five, three, millicores=(4_000, 0)))
    assert six.propose(*changes) == [None] * 6
    first, second = six.state.gangs.sets[six.set].newest.rows
    assert {six.epoch(one), six.epoch(two), six.epoch(three), six.epoch(four)} == set(first)
    assert {six.epoch(five), six.job(five).next_epoch, six.epoch(six_), six.epoch(four)} == set(second)


def test_a_leaving_gang_has_no_slice_in_which_cores_lack_for_it() -> None:
    drive = Turns()
    stays = drive.run(SMALL)
    (role,) = SMALL.roles
    many = replace(SMALL, roles=(replace(role, shape=replace(role.shape, millicores=7_000)),))
    goes, host = drive.submit(SMALL), drive.submit(many)
    # beside the first one, whose device idles in its row; a socket has eight cores
    (claim,) = drive.place(host, stays, millicores=(7_000, 0))
    there = (replace(claim, device_mask=claim.device_mask << 1),)
    beside = drive.place(goes, stays)
    changes = [drive.row(stays, 0), drive.row(goes, 1, claims=beside), drive.row(host, 2, claims=there)]
    assert drive.propose(*changes) == [None] * 3
    drive.observe("n1", *(drive.report(gang, ObservedPhase.RUNNING) for gang in drive.on("n1")))
    (number,) = drive.state.gangs.sets
    moved = drive.place(goes, host, millicores=(2_000, 0))
    changes = [
        drive.row(stays, 0, node_set=number),
        drive.row(goes, 1, claims=moved, node_set=number),
        drive.row(host, 2, node_set=number),
    ]
    assert drive.propose(*changes) == [None] * 3
    epoch, matrix = drive.job(goes).epoch, drive.state.gangs.sets[number].newest
    (row,) = [row for row in matrix.rows if epoch in row]
    assert drive.job(host).epoch not in row


def test_two_gangs_that_leave_one_device_by_one_plan_keep_a_slice_each_until_they_are_parked() -> None:
    drive = Turns()
    stays, first, second, idle = [drive.run(SMALL) for _ in range(4)]
    one, other = drive.submit(SMALL), drive.submit(SMALL)
    others = [drive.row(number, 0, 1, 2) for number in (first, second, idle)]
    guests = [drive.row(guest, row, claims=drive.place(guest, stays)) for row, guest in ((1, one), (2, other))]
    assert drive.propose(drive.row(stays, 0), *others, *guests) == [None] * 6
    drive.observe("n1", *(drive.report(gang, ObservedPhase.RUNNING) for gang in drive.on("n1")))
    (number,) = drive.state.gangs.sets
    changes = [
        drive.row(stays, 0, node_set=number),
        drive.row(one, 1, 2, claims=drive.place(one, first), node_set=number),
        drive.row(other, 2, claims=drive.place(other, second), node_set=number),
        drive.row(first, 0, node_set=number),
        drive.row(second, 0, 1, node_set=number),
        drive.row(idle, 0, 1, 2, node_set=number),
    ]
    assert drive.propose(*changes) == [None] * 6
    rows = drive.state.gangs.sets[number].newest.rows
    there = [drive.job(name).epoch for name in (stays, one, other)]
    assert [sum(epoch in row for epoch in there) for row in rows] == [1] * len(rows)
    assert all(any(epoch in row for row in rows) for epoch in there)


def test_once_it_has_moved_its_neighbour_has_the_device_in_every_slice(six: Six) -> None:
    one, _, three, _, five, _ = six.jobs
    six.propose(*six.beside(five, three))
    six.stand("n1", ObservedSlices(six.set, 2, 2, 0))
    six.handed_over(five)
    assert six.mask(five) == six.mask(three)
    assert six.job(five).state is JobState.HOLDING
    assert six.state.gangs[six.epoch(five)].phase is GangPhase.RUNNING
    assert six.state.gangs[six.epoch(five)].node_set == six.set
    assert [one in row for row in active(six)] == [True, True]
    assert [(three in row, five in row) for row in active(six)] == [(True, False), (False, True)]
    assert sorted(six.state.rows["n1"].device_rows) == [1, 1, 2, 2]


def test_a_failed_move_leaves_the_gang_in_its_slices(six: Six) -> None:
    five, three = six.jobs[4], six.jobs[2]
    source = six.epoch(five)
    six.propose(*six.beside(five, three))
    six.seen(five, six.job(five).next_epoch, ObservedPhase.ENDED)
    assert six.job(five).next_epoch == 0
    assert six.state.gangs[source].intent is GangIntent.RUN
    assert six.state.gangs[source].node_set == six.set
    assert any(five in row for row in active(six))


def test_one_that_had_given_its_devices_up_when_its_move_failed_comes_back_by_the_next_matrix(six: Six) -> None:
    five, three = six.jobs[4], six.jobs[2]
    source = six.epoch(five)
    six.propose(*six.beside(five, three))
    six.stand("n1", ObservedSlices(six.set, 2, 2, 0))
    six.seen(five, six.job(five).next_epoch, ObservedPhase.PREPARED)
    six.seen(five, source, ObservedPhase.PARKED, 7)
    six.seen(five, six.job(five).next_epoch, ObservedPhase.ENDED)
    assert six.job(five).state is JobState.PENDING
    while (node_set := six.state.gangs.sets[six.set]).coming is not None:
        version = node_set.coming.version
        six.stand("n1", ObservedSlices(six.set, version, version, 0))
    rows: dict[int, tuple[int, ...]] = dict.fromkeys(six.jobs, (0, 1))
    rows |= dict.fromkeys((six.jobs[0], six.jobs[1]), (0,)) | dict.fromkeys((five, six.jobs[5]), (1,))
    assert six.propose(*(six.row(n, *own, node_set=six.set) for n, own in rows.items())) == [None] * 6
    assert six.epoch(five) == source
    assert six.state.gangs[source].intent is GangIntent.RUN
    assert six.state.gangs[source].node_set == six.set


def test_one_goes_to_devices_of_its_own_on_another_node_and_the_others_share_what_it_leaves() -> None:
    drive = Six(nodes=2)
    source = drive.epoch(drive.jobs[4])
    there = next(name for name in ("n1", "n2") if name not in drive.state.gangs.sets[drive.set].nodes)
    assert drive.step(MoveJob(drive.jobs[4])) == JobAnswer(drive.jobs[4])
    destination = drive.state.gangs[drive.job(drive.jobs[4]).next_epoch]
    assert (destination.nodes, destination.node_set) == ((there,), 0)
    drive.handed_over(drive.jobs[4])
    assert drive.state.gangs[drive.epoch(drive.jobs[4])].node_set == 0
    assert source not in drive.state.gangs
    assert all(drive.jobs[0] in row for row in active(drive))


def test_a_node_is_drained_of_time_sliced_jobs_without_a_restart() -> None:
    drive = Turns(2)
    host, guest = drive.share(2)
    here = drive.state.gangs[drive.job(host).epoch].nodes[0]
    drive.step(DrainNode(here, "new fans"))
    drive.observe("n2", *(drive.report(gang, ObservedPhase.STARTING) for gang in drive.on("n2")))
    for number in (host, guest):
        source, destination = drive.job(number).epoch, drive.job(number).next_epoch
        assert destination, "it is on its way"
        drive.seen(number, destination, ObservedPhase.PREPARED)
        drive.seen(number, source, ObservedPhase.PARKED, 7)
        drive.seen(number, destination, ObservedPhase.READY, 7)
        drive.seen(number, destination, ObservedPhase.RUNNING)
        drive.observe(here, *drive.others(here, source))
    assert drive.on(here) == []
    assert [drive.job(number).preemptions for number in (host, guest)] == [0, 0]
    assert drive.state.gangs.sets == {}


def test_the_reason_of_a_move_is_recorded(six: Six) -> None:
    five, three = six.jobs[4], six.jobs[2]
    changes = six.beside(five, three)
    changes[4] = replace(changes[4], purpose=Purpose(Goal.FAIRNESS))
    assert six.propose(*changes) == [None] * 6
    begun = [one for one in six.history if one.kind == "move_begun"]
    assert [one.figures["goal"] for one in begun] == [Goal.FAIRNESS.value]


def moved(claims: tuple[Claim, ...], **fields: object) -> tuple[Claim, ...]:
    return tuple(replace(claim, **fields) for claim in claims)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        (lambda drive: moved(drive.place(drive.jobs[4], drive.jobs[2]), arena_bytes=0), Reason.MEMORY),
        (lambda drive: moved(drive.place(drive.jobs[4], drive.jobs[2]), device_mask=3, tasks=(2,)), None),
        (lambda drive: moved(drive.place(drive.jobs[4], drive.jobs[3])), Reason.GPUS),
        (lambda drive: moved(drive.place(drive.jobs[4], drive.jobs[2]), node="n9"), Reason.NODE_GONE),
        (lambda drive: moved(drive.place(drive.jobs[4], drive.jobs[2]), shared_mask=1), Reason.NOT_SUPPORTED),
        (lambda drive: moved(drive.place(drive.jobs[4], drive.jobs[2]), millicores=(2_000,)), Reason.CLAIM_MISMATCH),
    ],
    ids=[
        "no room for its state",
        "of another size",
        "where another gang runs in its slice",
        "nowhere",
        "at once",
        "of fewer sockets than there are",
    ],
)
def test_an_impossible_matrix_is_refused_and_nothing_changes(six: Six, claims: object, reason: Reason | None) -> None:
    five = six.jobs[4]
    changes = six.beside(five, six.jobs[2])
    changes[4] = replace(changes[4], claims=claims(six))  # type: ignore[operator]
    before = six.state.gangs.sets[six.set]
    refusal = blamed(six.propose(*changes))
    assert reason is None or refusal.reason is reason
    assert six.state.gangs.sets[six.set] == before
    assert six.job(five).next_epoch == 0


def test_a_group_does_not_change_while_a_member_moves(six: Six) -> None:
    five, three = six.jobs[4], six.jobs[2]
    six.propose(*six.beside(five, three))
    six.stand("n1", ObservedSlices(six.set, 2, 2, 0))
    again = [six.row(number, 0, node_set=six.set) for number in six.jobs]
    assert blamed(six.propose(*again)).job == f"jobs/{five}"
    assert isinstance(six.step(MoveJob(five)), Refused)


def test_the_gang_with_the_fewest_slices_gets_devices_that_idle_in_a_slice(six: Six) -> None:
    gangs = {six.epoch(number): six.state.gangs[six.epoch(number)] for number in six.jobs}
    one, two, three, four, five, other = gangs
    full = (one, two, three, four)
    assert filled([full, [five, other]], gangs) == (full, (five, other, three, four))
    assert filled([full, [other]], gangs) == (full, (other, five, three, four))
    assert filled([[one, two], [five, other]], gangs) == ((one, two), (five, other)), "no more cores than before"


def test_a_resize_of_a_time_sliced_job_is_refused_without_the_advice_to_try_again() -> None:
    drive = Turns()
    rigid, elastic = drive.run(SMALL), drive.submit(replace(SMALL, gpus_min=1, gpus_max=2))
    changes = [drive.row(rigid, 0), drive.row(elastic, 1, claims=drive.place(elastic, rigid))]
    assert drive.propose(*changes) == [None] * 2
    for number, why in ((rigid, "with one number of GPUs"), (elastic, "keeps its size until it has some to itself")):
        answer = drive.step(ResizeJob(number, 2))
        assert isinstance(answer, Refused)
        assert why in answer.message
        assert "try again" not in answer.message
