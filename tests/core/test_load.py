"""Light load spreads gangs, heavy load packs them, and the mode does not flutter in between."""

from __future__ import annotations

from itertools import pairwise

from core.drive import Drive, job_of
from ganger.resources.view import Mode
from ganger_master.core.commands import CancelJob, CordonNode


def test_a_load_that_rises_and_falls_again_flips_the_mode_exactly_twice() -> None:
    drive = Drive(5)
    modes = [drive.state.view.mode]
    numbers = []
    for _ in range(18):
        numbers.append(drive.submit(job_of(1)))
        drive.start(numbers[-1])
        modes.append(drive.state.view.mode)
    while len(numbers) > 4:
        number = numbers.pop()
        node = drive.state.gangs[drive.job(number).epoch].nodes[0]
        drive.step(CancelJob(number))
        drive.seen_without(node, number)
        modes.append(drive.state.view.mode)
    flips = [after for before, after in pairwise(modes) if before is not after]
    assert flips == [Mode.PACK, Mode.SPREAD]
    assert modes[0] is Mode.SPREAD


def test_load_is_counted_over_nodes_that_take_gangs() -> None:
    drive = Drive(2)
    drive.start(drive.submit(job_of(3)))
    assert drive.state.view.mode is Mode.SPREAD
    held = drive.state.gangs[drive.job(1).epoch].nodes[0]
    drive.step(CordonNode("n1" if held == "n2" else "n2", "repair"))
    assert drive.state.view.mode is Mode.PACK
