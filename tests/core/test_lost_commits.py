"""A master whose last decisions could not be stored continues from the decisions before, with its daemons."""

from __future__ import annotations

from core.drive import Drive, job_of
from core.test_time_slices import Turns
from ganger.job_state import JobState
from ganger_master.core.commands import ObservedSlices, Tick
from ganger_master.core.events import StoredChanges
from ganger_master.core.node_model import Element
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored
from ganger_master.store.tables import Codec
from kit.memory_store import MemoryStore


class Store:
    """What was kept of a drive so far."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._codec, self._memory = Codec(), MemoryStore()
        self.keep()

    def keep(self) -> None:
        changes: StoredChanges = self._drive.state.take_changes()
        self._memory.commit(self._codec.batch(changes.puts, changes.removes, ()))

    @property
    def elements(self) -> list[Element]:
        return list(Codec().elements(self._memory.load()))

    def lose(self) -> None:
        """What has not been kept."""
        drive = self._drive
        drive.state = restored(drive.state.settings, self.elements, drive.now, drive.state)
        drive.step(Tick(looks_again=True))


def test_sessions_go_on_and_what_is_free_is_known() -> None:
    drive = Drive()
    store = Store(drive)
    drive.submit(job_of(1))
    session, row = drive.sessions["n1"], drive.state.view.row("n1")
    store.lose()
    assert drive.state.jobs == {}
    assert drive.state.nodes["n1"].session == session
    assert (drive.state.view.row("n1").available, drive.state.view.row("n1").free_mask) == (True, row.free_mask)
    drive.start(drive.submit(job_of(4)))


def test_a_node_is_lost_as_early_as_if_nothing_had_failed() -> None:
    drive = Drive(nodes=2, settings=CoreSettings(lost_after_s=600.0, lost_margin_s=30.0))
    store = Store(drive)
    for _ in range(64):
        drive.now += 10.0
        drive.state.note_answer("n2", drive.now)
        store.lose()
    assert [name for name, node in drive.state.nodes.items() if node.lost] == ["n1"]


def test_a_report_that_changes_nothing_needs_no_store() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    drive.start(number)
    drive.runs(number)
    drive.state.take_changes()
    drive.runs(number)
    assert not drive.state.take_changes().puts


def test_a_report_on_time_slices_counts_although_its_consequences_were_lost() -> None:
    drive = Turns()
    host, guest = drive.share()
    number = next(iter(drive.state.gangs.sets))
    third = drive.submit(job_of(4))
    changes = [drive.row(one, index, node_set=number) for index, one in enumerate((host, guest))]
    changes.append(drive.row(third, 2, claims=drive.place(third, host), node_set=number))
    assert drive.propose(*changes) == [None] * 3
    store = Store(drive)
    drive.stand("n1", ObservedSlices(number, 2, 2, 1))
    assert drive.state.gangs.sets[number].active.version == 2
    store.lose()
    assert drive.state.gangs.sets[number].active.version == 2
    assert drive.job(third).state is JobState.HOLDING
