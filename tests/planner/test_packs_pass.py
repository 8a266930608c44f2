"""Passes that try co-locations, over a real state told by wire: what they propose, find out, tell, and remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from core.drive import GIB
from core.test_colocation import Packing, small
from ganger.cluster.capacity_index import CapacityIndex
from ganger.v1 import scheduling_pb2
from ganger_master.core.gang_model import GangPhase, ObservedPhase
from ganger_master.core.job_model import Capabilities, SuspendLevel
from ganger_master.core.plan_changes import Goal, ResumeChange, StartChange, SuspendChange, TrialFinding
from ganger_master.planner import colocations as packs_of
from ganger_master.planner.colocations import Colocations, plan_colocations, with_refusals
from ganger_master.planner.context import PlannerSettings, context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.rate_registry import JobRates
from ganger_master.policies import policy_named
from ganger_master.policies.orders import Capacity
from ganger_master.policies.trials import ALONE_WINDOWS
from ganger_master.rpc.planner_messages import live_job_from_wire, live_job_to_wire
from msgspec.structs import replace

STEADY = (9.9, 10.0, 10.1, 10.0) * 4
SLOWER = tuple(0.9 * rate for rate in STEADY)
HALF = tuple(0.5 * rate for rate in STEADY)


POLICY = policy_named("gandiva")


@dataclass
class Seen(JobRates):
    """Each job keeps its device a third busy."""

    now: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    co_located: Mapping[int, frozenset[int]] = field(default_factory=dict)
    # Windows in which each was measured alone.
    windows: int = 16

    def alone(self, number: int) -> tuple[float, ...]:
        return STEADY[: self.windows]

    def present(self, number: int) -> tuple[float, ...]:
        return self.now.get(number, ())

    def neighbours(self, number: int) -> frozenset[int]:
        return self.co_located.get(number, frozenset())

    def utilisation(self, number: int) -> float:
        return 0.3

    def signature(self, number: int) -> str:
        return f"model {number}"


class Tried(Packing):
    """Two jobs that run, and passes over what the planner is told of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = [self.run(small()), self.run(small())]
        self.colocations = Colocations()
        self.found: tuple[TrialFinding, ...] = ()

    def plan(self, seen: Seen, is_crowded: bool = True) -> list[tuple[str, int]]:
        """What it proposes, all of which must be approved."""
        table = LiveTable()
        for job in self.state.jobs.values():
            message = scheduling_pb2.LiveJob()
            live_job_to_wire(job, self.state.gangs.get(job.epoch), message)
            table.put(*live_job_from_wire(scheduling_pb2.LiveJob.FromString(message.SerializeToString())))
        changes, self.colocations, self.found = plan_colocations(
            self.colocations,
            context_of(
                POLICY,
                table,
                CapacityIndex(self.state.view.copy()),
                self.now,
                settings=PlannerSettings(capacity=Capacity(4, 16.0, 1e12, 4)),
                rates=seen,
            ),
            is_crowded,
        )
        assert self.propose(*changes) == [None] * len(changes) if changes else True
        return [(change.kind, change.number) for change in changes]

    def move_in(self, number: int) -> None:
        source, destination = self.job(number).epoch, self.job(number).next_epoch
        self.seen(number, destination, ObservedPhase.PREPARED)
        self.seen(number, source, ObservedPhase.PARKED, stop_step=7)
        self.seen(number, destination, ObservedPhase.READY, stop_step=7)
        self.runs(number)

    def together(self, rates: tuple[float, ...]) -> Seen:
        one, other = self.pair
        return Seen(dict.fromkeys(self.pair, rates), {one: frozenset({other}), other: frozenset({one})})


@pytest.fixture
def tried() -> Tried:
    drive = Tried()
    kinds = drive.plan(Seen())
    assert sorted(kind for kind, _ in kinds) == ["CORES", "MOVE"]
    (guest,) = [number for kind, number in kinds if kind == "MOVE"]
    assert drive.colocations.on_trial == set(drive.pair)
    drive.move_in(guest)
    assert drive.colocations.present[0].guest == guest
    return drive


def told(drive: Tried, kind: str) -> list[dict[str, str]]:
    return [dict(one.figures) for one in drive.history if one.kind == kind]


def test_no_trial_begins_while_every_job_has_a_device() -> None:
    assert Tried().plan(Seen(), is_crowded=False) == []


def test_no_job_is_tried_with_too_few_windows_alone_for_a_verdict() -> None:
    assert Tried().plan(Seen(windows=ALONE_WINDOWS - 1)) == []
    assert Tried().plan(Seen(windows=ALONE_WINDOWS)) != []


@pytest.mark.parametrize("why", ["it has a time limit", "it was killed in its turn"])
def test_a_job_that_cannot_be_time_sliced_is_not_co_located_for_its_guest_could_not_resume_afterwards(why: str) -> None:
    drive = Tried()
    job = drive.job(drive.pair[1])
    limited = replace(job, spec=replace(job.spec, time_limit_s=600.0))
    killed = replace(job, capabilities=job.capabilities.without_turns(why))
    drive.state.put_job(limited if "limit" in why else killed)
    assert drive.plan(Seen()) == []


def test_a_pack_that_pays_is_kept_and_its_figures_are_told(tried: Tried) -> None:
    assert tried.plan(tried.together(())) == []
    assert tried.plan(tried.together(SLOWER)) == []
    assert [one.number for one in tried.found] == [
        tried.colocations.present[0].numbers[0],
        tried.colocations.present[0].guest,
    ]
    for one in tried.found:
        assert (one.goal, one.kept) == (Goal.PACK, True)
        assert one.gain == pytest.approx(1.8, abs=0.01)
        assert 0.0 < one.deviation < 0.05
        assert "at 0.90 of the rate alone, by 16 windows" in one.detail
    assert [colocation.is_kept for colocation in tried.colocations.present] == [True]
    (begun,) = told(tried, "move_begun")
    assert begun["goal"] == "PACK"
    assert begun["detail"].startswith("with jobs/")


def test_a_pack_that_costs_too_much_is_undone_and_not_tried_again_at_once(tried: Tried) -> None:
    guest = tried.colocations.present[0].guest
    assert tried.plan(tried.together(HALF)) == [("SUSPEND", guest)]
    assert tried.found[0].kept is False
    assert tried.colocations.present == ()
    (stopped,) = told(tried, "suspend_ordered")
    assert (stopped["goal"], stopped["level"]) == ("UNPACK", "OFFLOAD")
    assert "at 0.50 of the rate alone, by 16 windows; in turns" in stopped["detail"]
    gang = tried.state.gangs[tried.job(guest).epoch]
    assert gang.park_level is SuspendLevel.OFFLOAD
    assert gang.phase is GangPhase.STOPPING
    again = Tried()
    again.colocations = tried.colocations
    assert again.plan(Seen()) == []


def test_of_a_pack_that_is_undone_because_nothing_can_be_told_just_that_is_told(tried: Tried) -> None:
    guest = tried.colocations.present[0].guest
    assert tried.plan(tried.together((3.0, 9.0) * 16)) == []
    assert tried.plan(tried.together((3.0, 9.0) * 32)) == [("SUSPEND", guest)]
    for one in tried.found:
        assert one.kept is False
        assert "by 64 windows, which leave open whether that pays; in turns" in one.detail


def test_interference_that_comes_later_undoes_a_pack_whatever_was_before(tried: Tried) -> None:
    guest = tried.colocations.present[0].guest
    assert tried.plan(tried.together(SLOWER)) == []
    assert tried.plan(tried.together(SLOWER * 3 + HALF[:8])) == []
    assert tried.plan(tried.together(SLOWER * 3 + HALF)) == [("SUSPEND", guest)]
    assert tried.found[0].kept is False


def test_without_an_arena_the_guest_of_an_undone_pack_rests_on_storage(tried: Tried) -> None:
    guest = tried.colocations.present[0].guest
    able = Capabilities(pause=True, checkpoint=True, known=True)
    tried.state.jobs[guest] = replace(tried.job(guest), capabilities=able)
    assert tried.plan(tried.together(HALF)) == [("SUSPEND", guest)]
    assert tried.state.gangs[tried.job(guest).epoch].park_level is SuspendLevel.CHECKPOINT


def test_a_trial_without_steps_ends_after_an_hour(tried: Tried) -> None:
    guest = tried.colocations.present[0].guest
    assert tried.plan(tried.together(())) == []
    tried.now += packs_of._LONGEST_TRIAL_S
    assert tried.plan(tried.together(())) == [("SUSPEND", guest)]
    assert tried.found == ()


def test_a_trial_whose_job_stops_stepping_ends_after_an_hour_and_its_measurements_are_reported(
    tried: Tried,
) -> None:
    guest = tried.colocations.present[0].guest
    seen = tried.together((14.0, 4.0, 9.0, 5.0, 11.0))
    assert tried.plan(seen) == []
    tried.now += packs_of._LONGEST_TRIAL_S
    assert tried.plan(seen) == [("SUSPEND", guest)]
    assert [one.kept for one in tried.found] == [False, False]
    assert "by 5 windows, which leave open whether that pays" in tried.found[0].detail
    assert tried.colocations.present == ()


def test_a_new_planner_separates_jobs_without_a_measured_rate_alone(tried: Tried) -> None:
    guest = tried.colocations.present[0].guest
    tried.colocations = Colocations()
    seen = tried.together(SLOWER)
    assert tried.plan(Seen(seen.now, seen.co_located, windows=0)) == [("SUSPEND", guest)]
    (stopped,) = told(tried, "suspend_ordered")
    assert stopped["detail"].startswith("the expected gain of its co-location is lost")


def test_a_refused_trial_did_not_begin_and_a_guest_that_was_not_parked_stays_co_located(tried: Tried) -> None:
    kept = tried.colocations
    (colocation,) = kept.present
    assert with_refusals(Colocations(), kept, frozenset({colocation.guest})) == Colocations()
    assert with_refusals(Colocations(), kept, frozenset({99})) == kept
    undone = Colocations()
    assert with_refusals(kept, undone, frozenset({colocation.guest})).present == (colocation,)
    assert with_refusals(kept, undone, frozenset()) == undone


def test_a_guest_that_does_no_step_yet_is_waited_for(tried: Tried) -> None:
    guest = tried.colocations.present[0].guest
    job = tried.job(guest)
    tried.state.put_job(replace(job, running_since=0.0))
    assert tried.plan(Seen()) == []
    assert tried.colocations.on_trial == set(tried.pair)
    tried.state.put_job(job)
    assert tried.plan(Seen()) != [], "it runs, and not beside the other"


def rest(drive: Tried, number: int, residue_bytes: int = 0) -> None:
    drive.residue_bytes = residue_bytes
    assert drive.propose(drive.change(SuspendChange, number, level=SuspendLevel.OFFLOAD)) == [None]
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, stop_step=9)


def rest_where(drive: Tried, number: int, residue_bytes: int) -> None:
    """Park another job on the devices of a parked one."""
    other = drive.submit(small())
    claims = drive.state.gangs[drive.job(number).epoch].claims
    assert drive.propose(drive.change(StartChange, other, tuple(replace(c, shared_mask=0) for c in claims))) == [None]
    drive.runs(other)
    rest(drive, other, residue_bytes)


def go_on(drive: Tried, number: int) -> None:
    assert drive.propose(drive.change(ResumeChange, number)) == [None]
    drive.runs(number)


@pytest.mark.parametrize(("residue_bytes", "tried"), [(0, ["CORES", "MOVE"]), (GIB // 5, [])])
def test_no_guest_is_admitted_where_parked_gangs_leave_too_little_memory_for_both(
    residue_bytes: int, tried: list[str]
) -> None:
    drive = Tried()
    for number in drive.pair:
        rest(drive, number)
        rest_where(drive, number, residue_bytes)
        go_on(drive, number)
    assert sorted(kind for kind, _ in drive.plan(Seen())) == tried


@pytest.mark.parametrize(("residue_bytes", "lasts"), [(0, True), (GIB // 5, False)])
def test_a_pack_whose_guest_has_no_room_any_more_beside_its_host_lasts_no_longer(
    tried: Tried, residue_bytes: int, lasts: bool
) -> None:
    assert tried.plan(tried.together(SLOWER)) == []
    (colocation,) = tried.colocations.present
    host = colocation.numbers[0]
    for number in (colocation.guest, host):
        rest(tried, number)
    rest_where(tried, host, residue_bytes)
    go_on(tried, host)
    assert tried.plan(Seen(dict.fromkeys(tried.pair, SLOWER)), is_crowded=False) == []
    assert bool(tried.colocations.present) is lasts
    assert {one.number for one in tried.found if "no room any more" in one.detail} == (
        set() if lasts else {*tried.pair}
    )
    # It takes turns with its host from now on, whose cores are made whole first.
    assert bool(tried.colocations.parting) is not lasts
