"""Rotation of the rows of a time-slice group under lost and late messages, new leaders and new matrices."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import pytest
from ganger.protocol.gang_orders import OrderKey
from ganger.protocol.slice_rotation import (
    NO_ROW,
    START_S,
    SliceCourse,
    SliceMatrix,
    SliceMember,
    SlicePosition,
    SliceSwitch,
    SliceUse,
    is_running,
    lead,
    obey,
    quantum_s,
)
from hypothesis import given, settings
from hypothesis import strategies as st

QUANTUM = 10.0


def matrix(
    *rows: tuple[int, ...], version: int = 1, members: tuple[str, ...] = ("n1",), set_epoch: int = 1
) -> SliceMatrix:
    return SliceMatrix(version, rows, QUANTUM, 2, members, set_epoch)


def alone(
    position: SlicePosition, rows: dict[int, SliceMatrix], alive: set[int], elapsed: float = QUANTUM
) -> SlicePosition | None:
    """What the only member of a set orders once its row has run for so long."""
    newest = rows[max(rows)]
    own = rows.get(position.version)
    running = frozenset(alive).intersection(own.rows[position.row]) if own is not None else frozenset(alive)
    member = SliceMember(position, newest.version, True, frozenset(alive), running)
    return lead(position, rows, {"n1": member}, elapsed, elapsed)


def row_by_row(rows: dict[int, SliceMatrix], alive: set[int], count: int) -> list[frozenset[int]]:
    position, seen = SlicePosition(), []
    for _ in range(count):
        position = alone(position, rows, alive) or position
        own = rows[position.version].rows[position.row]
        seen.append(frozenset(own) & alive)
    return seen


def test_rows_follow_each_other_and_begin_again() -> None:
    seen = row_by_row({1: matrix((1,), (2,), (3,))}, {1, 2, 3}, 7)
    assert seen == [{1}, {2}, {3}, {1}, {2}, {3}, {1}]


def test_a_gang_in_more_rows_has_the_larger_share() -> None:
    seen = row_by_row({1: matrix((1,), (2,), (1,), (3,))}, {1, 2, 3}, 400)
    assert [sum(gang in row for row in seen) for gang in (1, 2, 3)] == [200, 100, 100]


def test_a_gang_of_two_rows_on_end_is_not_stopped_between_them() -> None:
    rows = {1: matrix((1, 2), (2, 3))}
    first = alone(SlicePosition(), rows, {1, 2, 3})
    assert first is not None
    second = alone(first, rows, {1, 2, 3})
    assert second is not None
    assert set(second.stops) == {1}
    assert is_running(second, rows[1], 2)


def test_a_row_without_gangs_ends_at_once() -> None:
    rows = {1: matrix((1,), (2,), (3,))}
    first = alone(SlicePosition(), rows, {1, 2, 3})
    assert first is not None
    after = alone(first, rows, {3}, elapsed=0.0)
    assert after is not None
    assert after.row == 2


def test_a_gang_that_is_alone_is_not_stopped() -> None:
    rows = {1: matrix((1,), (2,))}
    first = alone(SlicePosition(), rows, {1})
    assert first is not None
    assert alone(first, rows, {1}) is None


def test_a_quantum_is_never_less_than_fifty_switches() -> None:
    rows = {1: matrix((1,), (2,))}
    first = alone(SlicePosition(), rows, {1, 2})
    assert first is not None
    slow = SliceMember(first, 1, True, frozenset({1, 2}), frozenset({1}), switch_s=1.0)
    assert lead(first, rows, {"n1": slow}, 49.0, 49.0) is None
    assert lead(first, rows, {"n1": slow}, 50.0, 50.0) is not None


def test_rows_of_a_cycle_have_one_quantum_whatever_each_switch_takes() -> None:
    rows = {1: matrix((1,), (2,), (3,))}
    position, turns = alone(SlicePosition(), rows, {1, 2, 3}), []
    for _ in range(9):
        assert position is not None
        # switching to the second row takes two seconds, to the others nearly nothing
        row = position.row
        member = SliceMember(position, 1, True, frozenset({1, 2, 3}), frozenset({row + 1}), 2.0 if row == 1 else 0.1)
        took = next(t for t in range(1000) if lead(position, rows, {"n1": member}, t, t) is not None)
        position = lead(position, rows, {"n1": member}, took, took)
        turns.append((row, took))
    cycles = [turns[at : at + 3] for at in range(3, 9, 3)]
    assert [[row for row, _ in cycle] for cycle in cycles] == [[0, 1, 2], [0, 1, 2]]
    assert all(len({took for _, took in cycle}) == 1 for cycle in cycles)


def test_a_cycle_after_slow_switches_has_the_longer_quantum() -> None:
    rows = {1: matrix((1,), (2,))}
    last = SlicePosition(SliceSwitch(1, 2), 1, 1, {1: SliceSwitch(1, 2)}, regular_row=1, quantum_s=QUANTUM)
    slow = SliceMember(last, 1, True, frozenset({1, 2}), frozenset({2}), switch_s=1.0)
    following = lead(last, rows, {"n1": slow}, QUANTUM, QUANTUM)
    assert following is not None
    assert (following.row, following.quantum_s) == (0, 50.0)


def saying(position: SlicePosition, known: int, alive: set[int], running: set[int], *unstarted: int) -> SliceMember:
    return SliceMember(position, known, True, frozenset(alive), frozenset(running), unstarted=frozenset(unstarted))


def test_a_slice_continues_with_a_gang_for_the_devices_that_another_has_left() -> None:
    # 2 has left the device that it shared with 1, which has it in both rows now
    rows = {1: matrix((1, 3), (2, 4)), 2: matrix((1, 3), (1, 4), version=2)}
    running = SlicePosition(
        SliceSwitch(1, 2), 1, 1, {1: SliceSwitch(1, 2), 3: SliceSwitch(1, 2)}, regular_row=1, quantum_s=QUANTUM
    )
    member = saying(running, 2, {1, 3, 4}, {4})
    filled = lead(running, rows, {"n1": member}, 4.0, 4.0)
    assert filled is not None
    assert (filled.version, filled.row, set(filled.stops)) == (2, 1, {3})
    # the turn is no longer for it, and the next one is whose it was
    member = saying(filled, 2, {1, 3, 4}, {1, 4})
    assert lead(filled, rows, {"n1": member}, 5.9, 5.0) is None
    following = lead(filled, rows, {"n1": member}, 6.0, 5.1)
    assert following is not None
    assert (following.row, set(following.stops), following.held_s) == (0, {4}, 0.0)


def test_no_gang_is_stopped_early_for_a_newer_matrix() -> None:
    rows = {1: matrix((1, 3), (2, 4)), 2: matrix((1, 4), (2, 3), version=2)}
    running = SlicePosition(
        SliceSwitch(1, 1), 1, 0, {2: SliceSwitch(1, 1), 4: SliceSwitch(1, 1)}, regular_row=0, quantum_s=QUANTUM
    )
    assert lead(running, rows, {"n1": saying(running, 2, {1, 2, 3, 4}, {1, 3})}, 4.0, 4.0) is None


@pytest.mark.parametrize(("fresh", "joins"), [(((1, 5), (2,)), False), (((1, 5), (2, 5)), True)])
def test_a_gang_that_was_never_started_joins_a_slice_only_if_it_is_in_every_row(
    fresh: tuple[tuple[int, ...], ...], joins: bool
) -> None:
    rows = {1: matrix((1,), (2,)), 2: matrix(*fresh, version=2)}
    running = SlicePosition(SliceSwitch(1, 1), 1, 0, {2: SliceSwitch(1, 1)}, regular_row=0, quantum_s=QUANTUM)
    found = lead(running, rows, {"n1": saying(running, 2, {1, 2, 5}, {1}, 5)}, 4.0, 4.0)
    assert (found is not None) is joins


def test_the_quantum_of_a_new_gang_begins_with_its_first_step_or_ends_after_a_while() -> None:
    rows = {1: matrix((1,), (2,))}
    first = alone(SlicePosition(), rows, {1, 2})
    assert first is not None
    starting = SliceMember(first, 1, False, frozenset({1, 2}))
    assert lead(first, rows, {"n1": starting}, 2 * QUANTUM, None) is None
    assert lead(first, rows, {"n1": starting}, START_S, None) is not None


def test_a_slice_that_waits_for_a_long_mini_batch_of_the_last_does_not_end_before_it_has_begun() -> None:
    rows = {1: matrix((1,), (2,))}
    first = alone(SlicePosition(), rows, {1, 2})
    assert first is not None
    waiting = SliceMember(first, 1, False, frozenset({1, 2}), blocked=True)
    assert lead(first, rows, {"n1": waiting}, 10 * START_S, None) is None
    # the shell counts from when it waits no more
    starting = replace(waiting, blocked=False)
    assert lead(first, rows, {"n1": starting}, 0.1, None) is None


@pytest.mark.parametrize(
    ("resting", "elapsed", "is_over"),
    [({1}, QUANTUM, False), ({1}, QUANTUM + START_S, True), ({2}, QUANTUM, True), (set(), QUANTUM, True)],
)
def test_no_turn_is_over_while_one_part_of_a_gang_of_it_has_not_heard_that_all_are_to_rest(
    resting: set[int], elapsed: float, is_over: bool
) -> None:
    rows = {1: matrix((1,), (2,), members=("n1", "n2"))}
    position = SlicePosition(SliceSwitch(1, 1), 1, 0, {2: SliceSwitch(1, 1)}, regular_row=0, quantum_s=QUANTUM)
    has_heard = SliceMember(position, 1, True, frozenset({2}), resting=frozenset(resting))
    members = {"n1": saying(position, 1, {1}, {1}), "n2": has_heard}
    assert (lead(position, rows, members, elapsed, elapsed) is not None) is is_over


def test_a_new_gang_comes_next_and_then_the_rows_continue_in_order() -> None:
    rows = {1: matrix((1,), (2,), (3,))}
    position = alone(SlicePosition(), rows, {1, 2, 3})
    assert position is not None
    rows[2] = matrix((1,), (2,), (3,), (4,), version=2)
    seen = []
    for _ in range(5):
        position = alone(position, rows, {1, 2, 3, 4})
        assert position is not None
        seen.append(position.row)
    assert seen == [3, 1, 2, 3, 0]


def test_a_gang_that_arrives_during_the_first_slice_of_another_has_the_next_slice() -> None:
    rows = {1: matrix((1,), (2,))}
    position = alone(SlicePosition(), rows, {1, 2})
    assert position is not None
    ran = []
    for version in range(2, 6):
        rows[version] = matrix(*((n,) for n in range(1, version + 2)), version=version)
        position = alone(position, rows, set(range(1, version + 2)))
        assert position is not None
        ran.append(rows[version].rows[position.row][0])
    assert ran == [3, 4, 5, 6]


def test_a_gang_that_ran_alone_and_is_time_sliced_from_now_on_is_not_new() -> None:
    # 3 comes to the device that 2 had alone, and has its turns beside 4, which has the turn
    rows = {1: matrix((1,), (4,)), 2: matrix((1, 2), (4, 3), version=2)}
    position = SlicePosition(SliceSwitch(1, 2), 1, 1, {1: SliceSwitch(1, 2)}, regular_row=1)
    following = lead(position, rows, {"n1": saying(position, 2, {1, 2, 3, 4}, {2, 4}, 3)}, QUANTUM, QUANTUM)
    assert following is not None
    assert (following.row, set(following.stops)) == (1, {1, 2})


def test_a_newcomer_whose_row_is_the_next_anyhow_has_it_once() -> None:
    rows = {1: matrix((1,), (2,)), 2: matrix((1,), (2,), (3,), version=2)}
    position = SlicePosition(SliceSwitch(1, 2), 1, 1, {1: SliceSwitch(1, 2)}, regular_row=1)
    seen = []
    for _ in range(4):
        position = alone(position, rows, {1, 2, 3}) or position
        seen.append(rows[2].rows[position.row][0])
    assert seen == [3, 1, 2, 3]


def test_a_gang_of_several_rows_keeps_its_place_in_the_cycle_when_another_arrives() -> None:
    rows = {1: matrix((1,), (2,), (1,), (3,)), 2: matrix((1,), (2,), (1,), (3,), (4,), version=2)}
    position = SlicePosition(SliceSwitch(1, 2), 1, 1, {1: SliceSwitch(1, 2), 3: SliceSwitch(1, 2)}, regular_row=1)
    seen = []
    for _ in range(4):
        position = alone(position, rows, {1, 2, 3, 4}) or position
        seen.append(rows[2].rows[position.row][0])
    assert seen == [4, 1, 3, 4]


def test_gangs_that_arrive_together_all_run_before_those_that_have_had_a_slice() -> None:
    rows = {1: matrix((1,), (2,)), 2: matrix((1,), (2,), (3,), (4,), version=2)}
    position = SlicePosition(SliceSwitch(1, 1), 1, 0, {2: SliceSwitch(1, 1)}, regular_row=0)
    unstarted, seen = {3, 4}, []
    for _ in range(5):
        said = SliceMember(position, 2, True, frozenset({1, 2, 3, 4}), unstarted=frozenset(unstarted))
        position = lead(position, rows, {"n1": said}, QUANTUM, QUANTUM) or position
        seen.append(position.row)
        unstarted -= {*rows[2].rows[position.row]}
    assert seen == [2, 3, 1, 2, 3]


def test_however_many_come_for_one_turn_each_the_others_have_every_second_one_in_the_end() -> None:
    rows = {1: matrix((1,), (2,))}
    position = alone(SlicePosition(), rows, {1, 2})
    assert position is not None
    ran = []
    for version in range(2, 60):
        rows = {version - 1: rows[version - 1], version: matrix((1,), (2,), (version + 1,), version=version)}
        position = alone(position, rows, {1, 2, version + 1})
        assert position is not None
        ran.append(rows[version].rows[position.row][0])
    assert ran[:3] == [3, 4, 5]
    late = ran[-40:]
    assert [late.count(1), late.count(2)] == pytest.approx([10, 10], abs=4)
    assert all({1, 2} & {*late[at : at + 2]} for at in range(len(late) - 1))


def test_an_old_order_and_one_of_a_former_leader_change_nothing() -> None:
    rows = {1: matrix((1,), (2,))}
    here = SlicePosition(SliceSwitch(2, 5), 1, 0, {2: SliceSwitch(2, 5)}, 0)
    assert obey(here, replace(here, switch=SliceSwitch(2, 4), row=1), rows, 2) is here
    assert obey(here, replace(here, switch=SliceSwitch(1, 9), row=1), rows, 2) is here
    assert obey(here, replace(here, switch=SliceSwitch(2, 6), version=7), rows, 2) is here
    assert obey(here, replace(here, switch=SliceSwitch(2, 6), row=1), rows, 2).row == 1


def test_a_leader_without_the_reports_of_all_members_orders_nothing() -> None:
    rows = {1: matrix((1,), (2,), members=("n1", "n2"))}
    said = SliceMember(SlicePosition(), 1, True, frozenset({1, 2}), frozenset({1}))
    assert lead(SlicePosition(), rows, {"n1": said, "n2": None}, 1e9, 1e9) is None
    assert lead(SlicePosition(), rows, {"n1": said}, 1e9, 1e9) is None
    assert lead(SlicePosition(), rows, {"n1": said, "n2": said}, 0.0, 0.0) is not None


def test_a_new_leader_says_again_where_the_set_stands_though_it_had_missed_the_last_order() -> None:
    rows = {1: matrix((1,), (2,), members=("n2", "n1"), set_epoch=2)}
    missed = SlicePosition(SliceSwitch(1, 3), 1, 0, {2: SliceSwitch(1, 2)}, 0)
    heard = SlicePosition(SliceSwitch(1, 4), 1, 1, {1: SliceSwitch(1, 4)}, 1)
    alive = frozenset({1, 2})
    said = {"n2": SliceMember(missed, 1, True, alive), "n1": SliceMember(heard, 1, True, alive)}
    order = lead(missed, rows, said, 0.0, 0.0)
    assert order is not None
    assert (order.switch, order.row, order.stops) == (SliceSwitch(2, 1), 1, {1: SliceSwitch(1, 4)})


@pytest.mark.parametrize("known", [(1, 2), (2,)])
def test_a_leader_that_lost_its_notes_goes_on_from_what_its_members_obey(known: tuple[int, ...]) -> None:
    """Its own gangs rest by no switch, or by an older one. It may have been told the newest matrix only."""
    both = {v: matrix((1,), (2,), (3,), version=v, members=("n1", "n2")) for v in (1, 2)}
    obeyed = SlicePosition(SliceSwitch(1, 16), 1, 1, {1: SliceSwitch(1, 16), 3: SliceSwitch(1, 15)}, regular_row=1)
    member = SliceMember(obeyed, 2, True, frozenset({1, 2, 3}), frozenset({2}))
    for left in (SliceSwitch(), SliceSwitch(1, 3), SliceSwitch(1, 16)):
        own = SlicePosition(left)
        order = lead(own, {v: both[v] for v in known}, {"n1": SliceMember(own, 2), "n2": member}, 0.0, None)
        assert order is not None
        assert (order.switch, order.row, order.version) == (SliceSwitch(1, 17), 1, known[0])
        assert obey(obeyed, order, both, 1) is not obeyed


def test_a_member_that_lost_its_notes_obeys_the_order_by_which_its_gangs_rest() -> None:
    rows = {1: matrix((1,), (2,), members=("n1", "n2"))}
    order = SlicePosition(SliceSwitch(1, 2), 1, 1, {1: SliceSwitch(1, 2)}, regular_row=1)
    assert obey(SlicePosition(SliceSwitch(1, 2)), order, rows, 1).row == 1


def test_keys_of_orders_rise_with_their_numbers() -> None:
    keys = [OrderKey(1, m, s, n) for m in (1, 2, 900) for s in (0, 1, 4095) for n in (0, 1, (1 << 28) - 1)]
    numbers = [key.number for key in keys]
    assert numbers == sorted(set(numbers))
    assert max(numbers) < 1 << 61


# -- several daemons ---------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """A gang on one node: `device` there, whether its daemon has begun it, whether it was launched, whether it runs,
    and by which switch it was stopped."""

    device: int
    is_here: bool = False
    is_launched: bool = False
    runs: bool = False
    stop: SliceSwitch | None = None


@dataclass
class Daemon:
    name: str
    parts: dict[int, Part]
    position: SlicePosition = field(default_factory=SlicePosition)
    rows: dict[int, SliceMatrix] = field(default_factory=dict)
    known: int = 0
    since: float = 0.0
    is_up: bool = True

    def begin_gangs(self) -> None:
        """The last of what is done about what the master told."""
        self.known = max(self.rows)
        for epoch in self.rows[self.known].epochs & self.parts.keys():
            self.parts[epoch].is_here = True

    def follow(self, whole: Collection[int]) -> None:
        """Act as the shell does. A gang to park stops at once if all its parts were launched; else it reaches no
        boundary. A gang to run waits until its device is free."""
        active = self.rows.get(self.position.version)
        for epoch, part in self.parts.items():
            stop = self.position.stops.get(epoch)
            if stop is not None and part.runs and epoch in whole:
                part.runs, part.stop = False, stop
        for epoch, part in sorted(self.parts.items()):
            others = [p for e, p in self.parts.items() if e != epoch and p.device == part.device]
            if part.is_here and is_running(self.position, active, epoch) and not any(other.runs for other in others):
                part.is_launched, part.runs, part.stop = True, True, None

    @property
    def said(self) -> SliceMember:
        active = self.rows.get(self.position.version)
        here = {epoch: part for epoch, part in self.parts.items() if part.is_here}
        running = frozenset(epoch for epoch, part in here.items() if part.runs)
        unstarted = frozenset(epoch for epoch, part in here.items() if not part.is_launched)
        started = all(part.runs for epoch, part in here.items() if is_running(self.position, active, epoch))
        return SliceMember(self.position, self.known, started, frozenset(here), running, unstarted=unstarted)


class World:
    """Daemons whose messages are lost, late and repeated, which take their time to begin gangs, and a master that
    changes leaders and matrices."""

    def __init__(self, seed: int, nodes: int, gangs: int) -> None:
        self.dice = random.Random(seed)
        names = [f"n{number}" for number in range(nodes)]
        self.now = 0.0
        self.version, self.set_epoch, self.leader = 0, 1, 0
        places: dict[int, dict[str, int]] = {}
        for epoch in range(1, gangs + 1):
            own = self.dice.sample(names, self.dice.randint(1, nodes))
            places[epoch] = {name: self.dice.randint(0, 1) for name in own}
        self.daemons = {
            name: Daemon(name, {e: Part(place[name]) for e, place in places.items() if name in place}) for name in names
        }
        self.places = places
        self.orders: list[tuple[float, str, SlicePosition]] = []
        self.heard: dict[str, dict[str, SliceMember | None]] = {name: {} for name in names}
        self.present = set(list(places)[: max(2, gangs - 2)])
        self.ran: set[int] = set()
        self.is_calm = False
        self.change()

    def change(self) -> None:
        """The master's next matrix: rows filled one after the other."""
        self.version += 1
        rows: list[list[int]] = []
        for epoch in sorted(self.present):
            fitting = next((row for row in rows if not any(self._collide(epoch, other) for other in row)), None)
            if fitting is None:
                rows.append([epoch])
            else:
                fitting.append(epoch)
        names = list(self.daemons)
        members = (*names[self.leader :], *names[: self.leader])
        made = SliceMatrix(self.version, tuple(map(tuple, rows)), QUANTUM, 2, members, self.set_epoch)
        for daemon in self.daemons.values():
            daemon.rows[made.version] = made

    def _collide(self, one: int, other: int) -> bool:
        mine, theirs = self.places[one], self.places[other]
        return any(theirs.get(name) == device for name, device in mine.items())

    def step(self) -> None:
        self.now += 1.0
        dice = self.dice
        if not self.is_calm:
            if dice.random() < 0.02:
                self.present.add(dice.choice(list(self.places)))
                self.change()
            if dice.random() < 0.02:
                self.leader, self.set_epoch = dice.randrange(len(self.daemons)), self.set_epoch + 1
                self.change()
            for daemon in self.daemons.values():
                daemon.is_up = dice.random() > (0.1 if daemon.is_up else 0.5)
        else:
            for daemon in self.daemons.values():
                daemon.is_up = True
        for daemon in self.daemons.values():
            if daemon.is_up and (self.is_calm or dice.random() < 0.05):
                daemon.begin_gangs()
        due = [one for one in self.orders if one[0] <= self.now]
        self.orders = [one for one in self.orders if one[0] > self.now]
        for _, name, order in due:
            daemon = self.daemons[name]
            if daemon.is_up:
                newest = daemon.rows[max(daemon.rows)]
                fresh = obey(daemon.position, order, daemon.rows, newest.set_epoch)
                if fresh is not daemon.position:
                    daemon.position, daemon.since = fresh, self.now
        for daemon in self.daemons.values():
            if daemon.is_up:
                daemon.follow(self._whole())
                self._lead(daemon)
                daemon.follow(self._whole())
        self.check()

    def _parts(self, epoch: int) -> list[Part]:
        return [daemon.parts[epoch] for daemon in self.daemons.values() if epoch in daemon.parts]

    def _whole(self) -> set[int]:
        return {epoch for epoch in self.places if all(part.is_launched for part in self._parts(epoch))}

    def _lead(self, daemon: Daemon) -> None:
        newest = daemon.rows[max(daemon.rows)]
        if newest.leader != daemon.name:
            return
        said = self.heard[daemon.name]
        for name, other in self.daemons.items():
            lost = not self.is_calm and self.dice.random() < 0.3
            if name == daemon.name:
                said[name] = daemon.said
            elif not other.is_up:
                said[name] = None
            elif not lost:
                said[name] = other.said
        is_begun = all(one is not None and one.started for one in said.values())
        elapsed = self.now - daemon.since
        position = lead(daemon.position, daemon.rows, said, elapsed, elapsed if is_begun else None)
        if position is not None:
            daemon.since = self.now
            daemon.position = position
        for name in self.daemons:
            for _ in range(1 if self.is_calm else self.dice.randint(0, 2)):
                late = 0.0 if self.is_calm else self.dice.choice((0.0, 1.0, 5.0, 40.0))
                if daemon.position.row != NO_ROW and daemon.position.switch.set_epoch == newest.set_epoch:
                    self.orders.append((self.now + late, name, daemon.position))

    def check(self) -> None:
        for daemon in self.daemons.values():
            devices = [part.device for part in daemon.parts.values() if part.runs]
            assert len(devices) == len(set(devices)), f"two rows on one device of {daemon.name}"
        for epoch in self.places:
            parts = self._parts(epoch)
            stops = {part.stop for part in parts if not part.runs and part.stop is not None}
            assert len(stops) <= 1, f"gang {epoch} is stopped by {stops}: its ranks would agree on two boundaries"
            if all(part.runs for part in parts):
                self.ran.add(epoch)


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(2, 6))
def test_daemons_never_run_two_rows_on_a_device_and_agree_on_stops_and_no_gang_starves(
    seed: int, nodes: int, gangs: int
) -> None:
    world = World(seed, nodes, gangs)
    for _ in range(150):
        world.step()
    world.is_calm = True
    for _ in range(60):
        world.step()
    world.ran.clear()
    rows = max(len(daemon.rows[max(daemon.rows)].rows) for daemon in world.daemons.values())
    for _ in range(int((rows + 1) * (QUANTUM + 5)) + 120):
        world.step()
    assert world.ran >= world.present, f"{world.present - world.ran} starve"


# -- many switches at once ---------------------------------------------------------------------------------------------

ROWS = st.lists(st.sets(st.integers(1, 5), min_size=1, max_size=3).map(sorted).map(tuple), min_size=1, max_size=5)


def one_by_one(position: SlicePosition, of: SliceMatrix, switch_s: float, until_s: float) -> SliceUse:
    """Every switch is an order of the leader, once the slice before it is over; `position`: its slice is over."""
    received, resumed = dict.fromkeys(of.epochs, 0.0), dict.fromkeys(of.epochs, 0)
    ordered_at, dead_s, entering = 0.0, 0.0, frozenset[int]()
    now, ends_at = 0.0, 0.0
    while True:
        row = frozenset(of.rows[position.row])
        until = min(until_s, ends_at)
        for epoch in row:
            begun = max(now, ordered_at + dead_s) if epoch in entering else now
            received[epoch] += max(0.0, until - begun)
        now = until
        if ends_at > until_s:
            used = {epoch: seconds for epoch, seconds in received.items() if seconds}
            return SliceUse(position, until_s - ordered_at, entering, used, {e: n for e, n in resumed.items() if n})
        member = SliceMember(position, of.version, True, of.epochs, row, switch_s)
        quantum = position.quantum_s or quantum_s(of, switch_s)
        ordered = lead(position, {of.version: of}, {"n1": member}, quantum, quantum)
        position = ordered or position
        entering = frozenset(of.rows[position.row]) - row
        ordered_at, dead_s = now, switch_s if entering else 0.0
        for epoch in entering:
            resumed[epoch] += 1
        ends_at = now + dead_s + (position.quantum_s or quantum_s(of, switch_s))


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, first=st.integers(0, 4), switch_s=st.sampled_from([0.0, 0.1, 0.5]), until_s=st.floats(0.0, 900.0))
def test_many_switches_at_once_are_as_one_after_another(
    rows: list[tuple[int, ...]], first: int, switch_s: float, until_s: float
) -> None:
    of, row = matrix(*rows), first % len(rows)
    stops = {epoch: SliceSwitch(1, 1) for epoch in of.epochs - set(rows[row])}
    position = SlicePosition(SliceSwitch(1, 1), 1, row, stops, row)
    found, slow = SliceCourse(position, of, switch_s).advance(until_s), one_by_one(position, of, switch_s, until_s)
    assert found.received_s == pytest.approx(
        slow.received_s | dict.fromkeys(found.received_s.keys() - slow.received_s, 0.0)
    )
    if abs(found.since_s - slow.since_s) < 1e-6:
        assert (found.position, found.entering, found.resumed) == (slow.position, slow.entering, slow.resumed)
    else:
        # Rounding: at the end of the slice, or at the begin of the next one.
        assert min(found.since_s, slow.since_s) < 1e-6


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, switch_s=st.sampled_from([0.0, 0.5]), seconds=st.floats(0.1, 900.0), gang=st.integers(1, 5))
def test_a_gang_has_received_its_time_exactly_when_that_was_foretold(
    rows: list[tuple[int, ...]], switch_s: float, seconds: float, gang: int
) -> None:
    of = matrix(*rows)
    position = SlicePosition(SliceSwitch(1, 1), 1, 0, {}, 0)
    when_s = SliceCourse(position, of, switch_s).time_to_receive(gang, seconds)
    if gang not in of.epochs:
        assert when_s == float("inf")
        return
    assert SliceCourse(position, of, switch_s).advance(when_s).received_s[gang] == pytest.approx(seconds)
    assert SliceCourse(position, of, switch_s).advance(when_s - 0.01).received_s.get(gang, 0.0) < seconds
