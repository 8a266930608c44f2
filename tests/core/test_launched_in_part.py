"""A gang that is being launched on several nodes is not time-sliced before it has stepped on all of them: its first
parts would wait on their devices for the others, and these for their slice.
"""

from __future__ import annotations

from core.drive import job_of
from core.test_time_slices import Turns, blamed
from ganger.cluster.refusals import Reason
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.plan_changes import PlanChange


def test_a_gang_on_several_nodes_can_be_time_sliced_once_it_has_stepped() -> None:
    drive = Turns(2)
    host = drive.submit(job_of(8))
    epoch = drive.start(host)
    drive.observe("n2", drive.report(drive.state.gangs[epoch], ObservedPhase.STARTING))
    guest = drive.submit(job_of(8))

    def changes() -> tuple[PlanChange, PlanChange]:
        return drive.row(host, 0), drive.row(guest, 1, claims=drive.place(guest, host))

    refusal = blamed(drive.propose(*changes()))
    assert (refusal.reason, refusal.job) == (Reason.WRONG_STATE, f"jobs/{host}")
    drive.runs(host)
    assert drive.propose(*changes()) == [None, None]


def test_a_gang_on_one_node_can_be_time_sliced_at_once() -> None:
    drive = Turns()
    host = drive.submit(job_of(4))
    drive.start(host)
    guest = drive.submit(job_of(4))
    assert drive.propose(drive.row(host, 0), drive.row(guest, 1, claims=drive.place(guest, host))) == [None, None]
