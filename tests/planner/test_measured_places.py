"""First places by what was measured of gangs alike: not beside others where that makes one slower, and on the type of
GPU that is worth most to the program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import pytest
from core.drive import GIB, job_of
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.view import LoadMode, View
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.context import context_of
from ganger_master.planner.job_measurements import SeriesRates
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migrate_stage import plan_moves
from ganger_master.planner.migration_outcomes import harmless_load, types_by_gain
from ganger_master.planner.migration_plans import MigrationMemory
from ganger_master.planner.plan import plan
from ganger_master.planner.rate_registry import JobRates
from ganger_master.policies import policy_named
from kit.clusters import idle_row, server
from msgspec.structs import replace
from planner.test_moves import Moved, Rates, together

FAST = (9.9, 10.0, 10.1, 10.0)
SLOW = tuple([0.7 * rate for rate in FAST])
SENSITIVE = {"": SeriesRates({1: {0: FAST, 2: SLOW}})}


class KnownRates(Rates):
    """Measurements by the number of GPUs of a job, as if jobs of one size were of one series."""

    def __init__(self, known: Mapping[int, Mapping[str, SeriesRates]]) -> None:
        super().__init__()
        self.known_series = known

    def same_series(self, number: int, gpus: int) -> Mapping[str, SeriesRates]:
        return self.known_series.get(gpus, {})

    def signature(self, number: int) -> str:
        return ""

    @property
    def series(self) -> Iterable[Mapping[str, SeriesRates]]:
        return self.known_series.values()


def placed(known: Mapping[int, Mapping[str, SeriesRates]], running: Sequence[int]) -> Moved:
    """Two servers of four devices, whose best fit puts jobs together. `running`: their sizes, in order."""
    drive = Moved(2, "fifo-backfill+best-fit+defrag")
    for gpus in running:
        drive.running(together(gpus))
    drive.rates = KnownRates(known)
    return drive


def starts_beside(drive: Moved, gpus: int, other: int) -> bool:
    """Submit a job. Return whether it starts on the node of the first job of the size `other`."""
    number = drive.submit(together(gpus))
    (change,) = drive.found().changes
    assert change.number == number
    (running,) = [job for job in drive.state.jobs.values() if job.gpus == other and job.number != number]
    return [claim.node for claim in change.claims] == [drive.node_of(running.number)]


@pytest.mark.parametrize(
    ("known", "running", "is_beside"),
    [
        ({}, [2], True),
        ({1: SENSITIVE}, [2], False),
        ({1: {"": SeriesRates({1: {0: FAST, 2: FAST}})}}, [2], True),
        ({3: SENSITIVE}, [2], True),
        # A gang that loses speed is not joined, whatever the newcomer loses itself.
        ({2: SENSITIVE}, [2], False),
        ({2: {"": SeriesRates({1: {0: FAST, 1: FAST, 2: SLOW}})}}, [2], True),
        # It waits for no place: a crowded one is better than none.
        ({1: SENSITIVE, 2: SENSITIVE}, [2, 4], True),
    ],
    ids=["unknown", "sensitive", "insensitive", "other series", "sensitive host", "one is harmless", "no other room"],
)
def test_a_job_starts_where_neither_it_nor_others_lose_speed_if_there_is_room(
    known: Mapping[int, Mapping[str, SeriesRates]], running: Sequence[int], is_beside: bool
) -> None:
    assert starts_beside(placed(known, running), 1, 2) is is_beside


def rates_on(**speeds: float) -> Mapping[str, SeriesRates]:
    return {name: SeriesRates({1: {0: tuple([speed * rate for rate in FAST])}}) for name, speed in speeds.items()}


GAINS_MUCH, GAINS_LITTLE = rates_on(old=1.0, new=3.0), rates_on(old=1.0, new=1.2)


def type_of_start(rates: JobRates, mode: LoadMode, wanted: str = "", free: Sequence[str] = ("old", "new")) -> str:
    """Return the type of GPU on which a pending job of two GPUs starts; the servers of `old` ones came first."""
    servers = {name: server(device_type=name) for name in ("old", "new")}
    view = View(servers.values(), mode=mode)
    for name, of in servers.items():
        view.put(idle_row(name, of, available=name in free))
    table = LiveTable()
    table.put(JobRecord(1, "", "", replace(job_of(2, memory=GIB), device_type=wanted), 1.0), None)
    context = context_of(policy_named("fifo-backfill+best-fit+defrag"), table, CapacityIndex(view), 10.0, rates=rates)
    (change,) = plan_moves(plan, context, MigrationMemory())[0].changes
    return change.claims[0].node


@pytest.mark.parametrize(
    ("own", "other", "mode", "found"),
    [
        ({}, {}, LoadMode.SPREAD, "old"),
        (GAINS_LITTLE, GAINS_MUCH, LoadMode.SPREAD, "new"),
        (GAINS_LITTLE, GAINS_MUCH, LoadMode.PACK, "old"),
        (GAINS_MUCH, GAINS_LITTLE, LoadMode.PACK, "new"),
        (rates_on(new=3.0), GAINS_LITTLE, LoadMode.SPREAD, "old"),
    ],
)
def test_a_job_starts_on_the_type_of_gpu_that_is_worth_most_to_it(
    own: Mapping[str, SeriesRates], other: Mapping[str, SeriesRates], mode: LoadMode, found: str
) -> None:
    assert type_of_start(KnownRates({2: own, 3: other}), mode) == found


def test_what_a_job_asks_for_and_what_is_free_go_before_what_was_measured() -> None:
    rates = KnownRates({2: GAINS_MUCH})
    assert type_of_start(rates, LoadMode.SPREAD, wanted="old") == "old"
    assert type_of_start(rates, LoadMode.SPREAD, wanted="old,new") == "old"
    assert type_of_start(rates, LoadMode.SPREAD, free=["old"]) == "old"


@pytest.mark.parametrize(("rows", "found"), [((), "half"), ((0, 0, 1, 1), "whole")], ids=["broken", "in use"])
def test_devices_out_of_service_slow_no_gang_beside_them(rows: tuple[int, ...], found: str) -> None:
    of = server()
    view = View([of])
    view.put(replace(idle_row("half", of), free_mask=0b0011, device_rows=rows))
    view.put(idle_row("whole", of))
    table = LiveTable()
    table.put(JobRecord(1, "", "", job_of(1, memory=GIB), 1.0), None)
    policy, rates = policy_named("fifo-backfill+best-fit+defrag"), KnownRates({1: SENSITIVE})
    context = context_of(policy, table, CapacityIndex(view), 10.0, rates=rates)
    (change,) = plan_moves(plan, context, MigrationMemory())[0].changes
    assert change.claims[0].node == found


NOISY = (4.0, 14.0, 12.0, 6.0)


@pytest.mark.parametrize(
    ("rates", "load"),
    [
        ({}, math.inf),
        ({0: FAST}, math.inf),
        ({0: FAST, 4: FAST}, math.inf),
        ({0: SLOW, 4: FAST}, math.inf),
        ({0: FAST, 4: SLOW}, 0),
        ({0: FAST, 3: FAST, 4: SLOW}, 3),
        ({0: FAST, 40: SLOW}, 4),
        # What may be chance, or rests on too few windows, is no harm.
        ({0: NOISY, 4: SLOW}, math.inf),
        ({0: FAST, 4: SLOW[:3]}, math.inf),
    ],
)
def test_a_gang_is_kept_from_nodes_with_more_devices_in_use_than_are_harmless(
    rates: Mapping[int, tuple[float, ...]], load: float
) -> None:
    assert harmless_load(rates) == load


GAINED_MUCH, GAINED_LITTLE, GAINED_NOTHING = (
    {"old": 1.0, "new": 3.0},
    {"old": 4.0, "new": 5.0},
    {"old": 4.0, "new": 4.1},
)


@pytest.mark.parametrize(
    ("own", "is_scarce", "types"),
    [
        ({}, True, []),
        ({"new": 3.0}, True, []),
        (GAINED_NOTHING, False, []),
        (GAINED_NOTHING, True, []),
        (GAINED_LITTLE, False, ["new", "old"]),
        (GAINED_MUCH, False, ["new", "old"]),
        (GAINED_LITTLE, True, ["old", "new"]),
        (GAINED_MUCH, True, ["new", "old"]),
    ],
)
def test_once_devices_are_scarce_the_fast_ones_are_left_to_programs_that_gain_much(
    own: Mapping[str, float], is_scarce: bool, types: list[str]
) -> None:
    assert list(types_by_gain(own, [GAINED_MUCH, GAINED_LITTLE, {"new": 1.0}], is_scarce=is_scarce)) == types


def test_the_only_known_program_takes_the_fastest_type() -> None:
    assert list(types_by_gain(GAINED_LITTLE, [GAINED_LITTLE], is_scarce=True)) == ["new", "old"]
