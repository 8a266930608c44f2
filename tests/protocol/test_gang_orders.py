"""What a gang that takes turns obeys: its master as far as it is its turn, and never an order that sends it onto
devices which others are on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from ganger.protocol.gang_orders import DesiredOrder, GangSlice, OrderIntent, OrderKey, ParkLevel, agreement, next_order
from ganger.protocol.slice_rotation import SliceSwitch
from ganger_daemon.core.gang_judgement import Judgement, PartPhase, may_be_on_devices
from hypothesis import given
from hypothesis import strategies as st

EPOCH = 3
SET = 2
NOW = GangSlice(SET, SliceSwitch(1, 9), None, ParkLevel.OFFLOAD)
OVER = GangSlice(SET, SliceSwitch(1, 9), SliceSwitch(1, 8), ParkLevel.OFFLOAD)


def told(
    sequence: int,
    intent: OrderIntent = OrderIntent.RUN,
    level: ParkLevel = ParkLevel.NONE,
    switch: SliceSwitch | None = None,
) -> DesiredOrder:
    stop = sequence if intent in (OrderIntent.PARK, OrderIntent.STOP) else 0
    by = switch or SliceSwitch()
    return DesiredOrder("uid", OrderKey(EPOCH, sequence, by.set_epoch, by.sequence), intent, level, stop)


def by_turn(sequence: int, switch: SliceSwitch, rests: bool, level: ParkLevel = ParkLevel.OFFLOAD) -> DesiredOrder:
    order = told(sequence, switch=switch)
    if not rests:
        return order
    return replace(order, intent=OrderIntent.PARK, level=level, stop_sequence=agreement(SET, switch))


def next_of(
    master: DesiredOrder,
    obeyed: DesiredOrder,
    turn: GangSlice | None,
    is_blocked: bool = False,
    parked: bool = True,
    heard: int = 0,
) -> DesiredOrder | None:
    return next_order(master, obeyed, turn, parked, heard, lambda: is_blocked)


RUNS = by_turn(1, SliceSwitch(1, 7), rests=False)
RESTS = by_turn(1, SliceSwitch(1, 8), rests=True)
PARK = OrderIntent.PARK


@pytest.mark.parametrize(
    ("master", "obeyed", "turn", "intent", "key", "stop"),
    [
        # its turn is over, and comes again
        (told(1), RUNS, OVER, PARK, (1, 1, 8), agreement(SET, SliceSwitch(1, 8))),
        (told(1), told(1), OVER, PARK, (1, 1, 8), agreement(SET, SliceSwitch(1, 8))),
        (told(1), RESTS, NOW, OrderIntent.RUN, (1, 1, 9), 0),
        # it leaves its set while it rests, or while it runs
        (told(2), RESTS, None, OrderIntent.RUN, (2, 0, 0), 0),
        (told(2), RUNS, None, OrderIntent.RUN, (2, 0, 0), 0),
        # the master wants it to rest: where it stands, by the agreement that there is
        (told(2, PARK, ParkLevel.CHECKPOINT), RESTS, OVER, PARK, (2, 1, 8), agreement(SET, SliceSwitch(1, 8))),
        (told(2, PARK, ParkLevel.CHECKPOINT), RESTS, NOW, PARK, (2, 1, 8), agreement(SET, SliceSwitch(1, 8))),
        (told(2, PARK, ParkLevel.CHECKPOINT), RUNS, NOW, PARK, (2, 0, 0), 2),
        # it rests by the master's stop as its turn is over, and is to run again
        (told(3), told(2, PARK, ParkLevel.OFFLOAD), OVER, PARK, (3, 1, 8), 2),
        (told(3), told(2, PARK, ParkLevel.OFFLOAD), NOW, OrderIntent.RUN, (3, 1, 9), 0),
        # it runs, and is told so anew
        (told(2), RUNS, NOW, OrderIntent.RUN, (2, 1, 7), 0),
    ],
)
def test_what_is_obeyed(
    master: DesiredOrder,
    obeyed: DesiredOrder,
    turn: GangSlice | None,
    intent: OrderIntent,
    key: tuple[int, int, int],
    stop: int,
) -> None:
    wanted = next_of(master, obeyed, turn)
    assert wanted is not None
    assert wanted.order > obeyed.order
    order = wanted.order
    assert (wanted.intent, (order.master_sequence, order.set_epoch, order.local_sequence)) == (intent, key)
    assert wanted.stop_sequence == stop


@pytest.mark.parametrize(
    ("master", "obeyed", "turn"),
    [
        (told(1), RUNS, NOW),
        (told(1), RESTS, OVER),
        (told(2, PARK, ParkLevel.OFFLOAD), replace(RESTS, order=OrderKey(EPOCH, 2, 1, 8)), OVER),
        (told(2, PARK, ParkLevel.OFFLOAD), replace(RESTS, order=OrderKey(EPOCH, 2, 1, 8)), NOW),
        # a stop without a checkpoint waits for no slice
        (told(2, OrderIntent.STOP), RUNS, NOW),
    ],
)
def test_what_stays_as_it_is(master: DesiredOrder, obeyed: DesiredOrder, turn: GangSlice) -> None:
    assert next_of(master, obeyed, turn) is None


@pytest.mark.parametrize(
    ("master", "obeyed", "turn"),
    [
        (told(1), RESTS, NOW),
        (told(2), RESTS, None),
        (told(3), told(2, PARK, ParkLevel.OFFLOAD), NOW),
    ],
)
def test_no_parked_gang_is_resumed_while_others_are_on_its_devices(
    master: DesiredOrder, obeyed: DesiredOrder, turn: GangSlice | None
) -> None:
    assert next_of(master, obeyed, turn, is_blocked=True) is None
    assert next_of(master, obeyed, turn) is not None


@pytest.mark.parametrize("rests", [told(2, PARK, ParkLevel.CHECKPOINT), replace(RESTS, stop_sequence=2)])
def test_a_gang_parked_by_the_master_resumes_once_the_matrix_that_all_its_nodes_have_is_active(
    rests: DesiredOrder,
) -> None:
    """A switch that comes before would reach one node after the order, and another before it."""
    changes = replace(NOW, changes=True)
    assert next_of(told(3), rests, changes) is None
    assert next_of(told(3), rests, changes, parked=False) is None
    goes_on = next_of(told(3), rests, NOW)
    assert goes_on is not None
    assert goes_on.intent is OrderIntent.RUN
    stays = next_of(told(3), rests, replace(OVER, changes=True))
    assert stays is None or (stays.intent, stays.stop_sequence) == (PARK, 2)
    # A gang parked by a switch is parked on all nodes, and all receive the next switch.
    assert next_of(told(1), RESTS, changes) is not None


@pytest.mark.parametrize("rests", [RESTS, replace(RESTS, order=OrderKey(EPOCH, 2, 1, 8))])
def test_a_gang_without_a_row_waits_for_the_matrix_that_came_with_its_order_although_its_devices_idle(
    rests: DesiredOrder,
) -> None:
    """On another node they may not, and a part of the gang alone would never come to a boundary."""
    assert next_of(told(3), rests, replace(NOW, changes=True, has_row=False)) is None
    goes_on = next_of(told(3), rests, replace(NOW, changes=True))
    assert goes_on is not None
    assert goes_on.intent is OrderIntent.RUN


def test_a_gang_whose_save_was_withdrawn_frees_what_the_slice_switch_demands() -> None:
    """Storage had no room, so the gang still had its device memory, and no gang after it could run."""
    ends = replace(RESTS, order=OrderKey(EPOCH, 2, 1, 8), level=ParkLevel.CHECKPOINT)
    stays = next_of(told(3), ends, OVER)
    assert stays is not None
    assert stays.order > ends.order
    assert (stays.intent, stays.level, stays.stop_sequence) == (PARK, ParkLevel.OFFLOAD, RESTS.stop_sequence)
    assert next_of(told(3), stays, OVER) is None
    assert next_of(told(2, PARK, ParkLevel.CHECKPOINT), ends, OVER) is None, "that it is to be is no news"


@pytest.mark.parametrize("turn", [NOW, OVER, GangSlice(SET, SliceSwitch(), None, ParkLevel.OFFLOAD)])
def test_a_newer_stop_of_the_master_does_not_resume_a_gang_parked_by_an_earlier_one(turn: GangSlice) -> None:
    """It was to run between them, and others were on its devices all the time."""
    former, newer = told(2, PARK, ParkLevel.OFFLOAD), told(4, PARK, ParkLevel.CHECKPOINT)
    stays = next_of(newer, former, turn, is_blocked=True)
    assert stays is not None
    assert stays.order > former.order
    assert (stays.intent, stays.level, stays.stop_sequence) == (PARK, ParkLevel.CHECKPOINT, former.stop_sequence)
    # A gang on the way to its boundary goes to the newer one, with peers that were resumed meanwhile.
    assert next_of(newer, former, turn, parked=False) == newer
    # A peer that ran meanwhile waits for it there.
    joins = next_of(newer, stays, NOW, heard=4)
    assert joins is not None
    assert joins.order > stays.order
    assert joins.stop_sequence == 4


def test_a_gang_that_handed_over_and_is_to_run_after_all_stays_parked_until_its_slice() -> None:
    handed = next_of(told(2, OrderIntent.HAND_OVER), RESTS, OVER)
    assert handed is not None
    assert handed.intent is OrderIntent.HAND_OVER
    assert next_of(told(2, OrderIntent.HAND_OVER), handed, OVER) is None
    rests = next_of(told(3), handed, OVER)
    assert rests is not None
    assert (rests.intent, rests.level, rests.stop_sequence) == (PARK, ParkLevel.OFFLOAD, RESTS.stop_sequence)


def test_a_parked_gang_frees_more_under_a_deeper_matrix_and_keeps_its_boundary() -> None:
    paused = by_turn(1, SliceSwitch(1, 8), rests=True, level=ParkLevel.PAUSE)
    deeper = next_of(told(1), paused, OVER)
    assert deeper is not None
    assert deeper.order > paused.order
    assert deeper.level is ParkLevel.OFFLOAD
    assert deeper.stop_sequence == paused.stop_sequence


def test_a_rank_parked_by_a_switch_joins_a_stop_of_the_master_once_a_peer_obeys_it() -> None:
    master = told(6, PARK, ParkLevel.OFFLOAD)
    stays = next_of(master, RESTS, OVER)
    assert stays is not None
    # a peer that rests by the same switch says nothing, or speaks of that switch
    assert next_of(master, stays, None, heard=0) is None
    assert next_of(master, stays, None, heard=RESTS.stop_sequence) is None
    assert next_of(master, stays, None, heard=6, is_blocked=True) is None
    joins = next_of(master, stays, None, heard=6)
    assert joins is not None
    assert joins.order > stays.order
    assert joins.stop_sequence == 6
    assert next_of(master, joins, None, heard=6) is None


def test_a_part_that_rests_by_a_former_switch_joins_the_one_by_which_the_turn_of_a_peer_ended() -> None:
    """The master took a stop back while the turn ended: the peer had begun its turn, and comes to no boundary alone."""
    rests = by_turn(1, SliceSwitch(1, 5), rests=True)
    ends = agreement(SET, SliceSwitch(1, 8))
    assert next_of(told(1), rests, OVER) is None
    assert next_of(told(1), rests, OVER, is_blocked=True, heard=ends) is None
    assert next_of(told(1), rests, OVER, heard=agreement(SET, SliceSwitch(1, 5))) is None
    joins = next_of(told(1), rests, OVER, heard=ends)
    assert joins is not None
    assert (joins.intent, joins.level, joins.stop_sequence) == (PARK, ParkLevel.OFFLOAD, ends)
    assert joins.order > rests.order
    # once there it stays
    assert next_of(told(1), joins, OVER, heard=ends) is None


@pytest.mark.parametrize(
    ("wanted", "judged_order", "phase", "may"),
    [
        (told(2, PARK), told(2, PARK), PartPhase.PARKED, False),
        (told(2, PARK), told(2, PARK), PartPhase.STOPPING, True),
        (told(3), told(2, PARK), PartPhase.PARKED, True),
        (told(3), told(2, PARK), PartPhase.ENDED, False),
        # asked for more, where it stands
        (replace(told(3, PARK), stop_sequence=2), told(2, PARK), PartPhase.PARKED, False),
        # sent on to a further boundary, and not looked at since
        (told(4, PARK), told(2, PARK), PartPhase.PARKED, True),
    ],
)
def test_a_gang_parked_by_an_earlier_order_may_be_on_its_devices_under_a_new_one(
    wanted: DesiredOrder, judged_order: DesiredOrder, phase: PartPhase, may: bool
) -> None:
    assert may_be_on_devices(wanted, judged_order, Judgement(phase)) is may


@dataclass
class Gang:
    """Its part on one node: what it obeys, and the agreement by which it rests (0: it does not)."""

    obeyed: DesiredOrder = RUNS
    rests_by: int = 0

    def follow(self, master: DesiredOrder, turn: GangSlice | None, is_blocked: bool, heard: int) -> None:
        wanted = next_order(master, self.obeyed, turn, self.rests_by != 0, heard, lambda: is_blocked)
        if wanted is None or wanted.order <= self.obeyed.order:
            return
        if self.rests_by and (wanted.intent is OrderIntent.RUN or wanted.stop_sequence != self.rests_by):
            assert not is_blocked, f"{self.obeyed} is followed by {wanted} while others are on its devices"
            self.rests_by = 0
        self.obeyed = wanted

    def come_to_rest(self) -> None:
        if not self.rests_by and self.obeyed.intent is not OrderIntent.RUN:
            self.rests_by = self.obeyed.stop_sequence


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=60))
def test_under_random_events_no_gang_resumes_beside_others_and_every_gang_that_may_run_runs(
    events: list[tuple[int, bool, bool]],
) -> None:
    """Each event: the change, whether others are on the devices of the parked gang, and whether a peer relays the
    master's stop."""
    gang, master, position = Gang(), told(1), SliceSwitch(1, 7)
    turn: GangSlice | None = GangSlice(SET, position, None, ParkLevel.OFFLOAD)
    for what, is_blocked, speaks in events:
        if what < 3:
            intent = (OrderIntent.RUN, PARK, PARK)[what]
            master = told(
                master.order.master_sequence + 1, intent, ParkLevel(what + 1) if intent is PARK else ParkLevel.NONE
            )
        elif what < 6 and turn is not None:
            position = replace(position, sequence=position.sequence + 1)
            # A parked gang keeps its stop.
            stop = (turn.stop or position) if what < 5 else None
            turn = GangSlice(SET, position, stop, (ParkLevel.PAUSE, ParkLevel.OFFLOAD)[what % 2])
        elif what == 6:
            # Its set ends, and every gang of it is told anew.
            turn = None if turn is not None else GangSlice(SET, position, None, ParkLevel.OFFLOAD)
            order = replace(master.order, master_sequence=master.order.master_sequence + 1)
            master = replace(master, order=order)
        else:
            gang.come_to_rest()
        if turn is not None or gang.obeyed.order.is_by_rotation:
            gang.follow(master, turn, is_blocked and bool(gang.rests_by), master.stop_sequence if speaks else 0)
        elif master.order > gang.obeyed.order:
            gang.obeyed, gang.rests_by = master, 0
    master = told(master.order.master_sequence + 1)
    gang.follow(
        master, GangSlice(SET, replace(position, sequence=position.sequence + 1), None, ParkLevel.OFFLOAD), False, 0
    )
    assert gang.obeyed.intent is OrderIntent.RUN
