"""Pieces that a gang gives back are free in the view at once; `Drive` recomputes each node state after every step."""

from __future__ import annotations

from random import Random

from core.drive import GIB, Drive
from ganger.cluster.resources import Role, TaskShape
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_spec import JobSpec
from hypothesis import given, settings
from hypothesis import strategies as st

# Devices and millicores of each: two nodes of four devices and sixteen cores are full, or have no cores left.
SIZES = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1_000, 4_000, 8_000])), min_size=2, max_size=6)


def spec(gpus: int, millicores: int) -> JobSpec:
    return JobSpec(("train",), (Role("worker", gpus, TaskShape(1, millicores, 4 * GIB)),))


@settings(max_examples=40, deadline=None)
@given(SIZES, st.randoms(use_true_random=False))
def test_rows_are_right_after_each_of_the_gangs_has_ended(sizes: list[tuple[int, int]], random: Random) -> None:
    drive = Drive(nodes=2)
    started = []
    for size in sizes:
        number = drive.submit(spec(*size))
        if drive.places(number):
            drive.start(number)
            drive.runs(number)
            started.append(number)
    idle = Drive(nodes=2).state.rows
    assert started
    random.shuffle(started)
    for number in started:
        drive.seen(number, drive.job(number).epoch, ObservedPhase.ENDED)
    assert drive.state.rows == idle
