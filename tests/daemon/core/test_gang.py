"""One gang's local part: which phase follows from which facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ganger.injob.page_layout import PageState
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, OrderKey, ParkLevel, hastened
from ganger_daemon.core import gang_judgement
from ganger_daemon.core.gang_judgement import PartPhase, Todo, judge
from ganger_daemon.core.part_facts import SIGKILL, GangPart, PartOutcome, PartOutcomeKind, Rank, RankExit, settle
from hypothesis import given
from hypothesis import strategies as st

RUN = DesiredOrder("u", OrderKey(1, 5), OrderIntent.RUN)
PAUSE = DesiredOrder("u", OrderKey(1, 5), OrderIntent.PARK, ParkLevel.PAUSE, 5)
OFFLOAD = DesiredOrder("u", OrderKey(1, 5), OrderIntent.PARK, ParkLevel.OFFLOAD, 5)
SAVE = DesiredOrder("u", OrderKey(1, 5), OrderIntent.PARK, ParkLevel.CHECKPOINT, 5)
HAND = DesiredOrder("u", OrderKey(1, 5), OrderIntent.HAND_OVER, ParkLevel.NONE, 5)
PREPARE = DesiredOrder("u", OrderKey(1, 5), OrderIntent.PREPARE, moves_in=True)
STOP = DesiredOrder("u", OrderKey(1, 5), OrderIntent.STOP)

RUNNING = Rank(0, state=PageState.RUNNING, hello=True, first_step=True)


def number(sequence: int) -> int:
    """Of the master's order of that sequence, as pages have it."""
    return OrderKey(1, sequence).number


def resting(rank: int, state: int, step: int, sequence: int = 5) -> Rank:
    return Rank(rank, state=state, hello=True, reached_sequence=number(sequence), reached_step=step)


def ended(
    rank: int, code: int = 0, signal: int = 0, known: bool = True, at: float = 0.0, let_go: bool = False, **more: bool
) -> Rank:
    return Rank(rank, hello=True, let_go=let_go, exit=RankExit(code, signal, known, at), **more)


@pytest.mark.parametrize(
    ("wanted", "ranks", "phase"),
    [
        (RUN, (RUNNING,), PartPhase.RUNNING),
        (RUN, (RUNNING, Rank(1, hello=True)), PartPhase.STARTING),
        (RUN, (RUNNING, Rank(1, opaque=True)), PartPhase.RUNNING),
        (PAUSE, (resting(0, PageState.PAUSED, 7), resting(1, PageState.PAUSED, 7)), PartPhase.PARKED),
        (PAUSE, (resting(0, PageState.PAUSED, 7), resting(1, PageState.PAUSED, 8)), PartPhase.STOPPING),
        (PAUSE, (resting(0, PageState.PAUSED, 7), resting(1, PageState.WAITING, 7)), PartPhase.STOPPING),
        (PAUSE, (resting(0, PageState.PAUSED, 7, sequence=4),), PartPhase.STOPPING),
        (OFFLOAD, (resting(0, PageState.OFFLOADED, 7),), PartPhase.STOPPING),
        (HAND, (resting(0, PageState.HANDED_OVER, 7),), PartPhase.PARKED),
        (PREPARE, (Rank(0, state=PageState.RESTORING, hello=True),), PartPhase.PREPARED),
        (PREPARE, (Rank(0),), PartPhase.STARTING),
        (PREPARE, (Rank(0, state=PageState.READY, hello=True),), PartPhase.READY),
        (RUN, (ended(0), ended(1)), PartPhase.ENDED),
        (RUN, (ended(0), RUNNING), PartPhase.RUNNING),
        (RUN, (ended(0, code=1), RUNNING), PartPhase.STOPPING),
    ],
)
def test_phase_follows_from_pages_and_exits(wanted: DesiredOrder, ranks: tuple[Rank, ...], phase: PartPhase) -> None:
    assert judge(GangPart(wanted, ranks, launched=True), 1.0).phase is phase


def test_a_move_is_prepared_only_when_there_is_room_for_the_state() -> None:
    ranks = (Rank(0, state=PageState.RESTORING, hello=True),)
    assert judge(GangPart(PREPARE, ranks, launched=True, has_room=False), 1.0).phase is PartPhase.STARTING
    assert judge(GangPart(PREPARE, ranks, launched=True, has_room=True), 1.0).phase is PartPhase.PREPARED


def test_offload_is_parked_only_when_the_memory_was_seen_free() -> None:
    ranks = (resting(0, PageState.OFFLOADED, 7),)
    assert judge(GangPart(OFFLOAD, ranks, launched=True), 1.0).todo == (Todo.VERIFY_MEMORY,)
    parked = judge(GangPart(OFFLOAD, ranks, launched=True, memory_freed=True), 1.0)
    assert (parked.phase, parked.level, parked.stop_step) == (PartPhase.PARKED, ParkLevel.OFFLOAD, 7)


def test_a_checkpoint_is_parked_only_when_it_is_published() -> None:
    ranks = (ended(0, code=75, let_go=True), ended(1, code=75, let_go=True))
    assert judge(GangPart(SAVE, ranks, launched=True), 1.0).phase is PartPhase.STOPPING
    parked = judge(GangPart(SAVE, ranks, launched=True, published_step=9), 1.0)
    assert (parked.phase, parked.level, parked.stop_step) == (PartPhase.PARKED, ParkLevel.CHECKPOINT, 9)


@pytest.mark.parametrize(
    ("wanted", "ranks", "more", "kind"),
    [
        (RUN, (ended(0), ended(1)), {}, PartOutcomeKind.DONE),
        (RUN, (ended(0, code=3), ended(1, signal=15)), {}, PartOutcomeKind.FAILED),
        (RUN, (ended(0, signal=9),), {"out_of_memory": True}, PartOutcomeKind.OUT_OF_MEMORY),
        (RUN, (ended(0, signal=9),), {}, PartOutcomeKind.FAILED),
        (RUN, (ended(0, known=False),), {}, PartOutcomeKind.UNKNOWN),
        # without an agent it may have done its work; not if the machine has gone down
        (RUN, (Rank(0, exit=RankExit(known=False)),), {}, PartOutcomeKind.FAILED),
        (RUN, (Rank(0, exit=RankExit(known=False)),), {"pages_lost": True}, PartOutcomeKind.UNKNOWN),
        (RUN, (ended(0, code=76, fenced=True),), {}, PartOutcomeKind.FENCED),
        (RUN, (ended(0, code=75, let_go=True),), {}, PartOutcomeKind.YIELDED),
        # codes that a job gave itself, whatever was ordered
        (RUN, (ended(0, code=76),), {}, PartOutcomeKind.FAILED),
        (RUN, (ended(0, code=75),), {}, PartOutcomeKind.FAILED),
        (PAUSE, (ended(0, code=75),), {}, PartOutcomeKind.FAILED),
        (SAVE, (ended(0, code=75), ended(1, code=75, let_go=True)), {}, PartOutcomeKind.FAILED),
        (STOP, (ended(0, signal=15),), {"stop_signalled": True}, PartOutcomeKind.STOPPED),
        (PAUSE, (ended(0, signal=15),), {"escalated": True}, PartOutcomeKind.ESCALATED),
    ],
)
def test_the_outcome_names_how_it_ended(
    wanted: DesiredOrder, ranks: tuple[Rank, ...], more: dict[str, bool], kind: PartOutcomeKind
) -> None:
    found = judge(GangPart(wanted, ranks, launched=True, **more), 1.0)  # type: ignore[arg-type]
    assert found.outcome is not None
    assert found.outcome.kind is kind


def test_the_rank_that_failed_first_is_named() -> None:
    ranks = (ended(0, signal=15, at=2.0), ended(1, code=3, at=1.0))
    outcome = settle(GangPart(RUN, ranks, launched=True))
    assert (outcome.rank, outcome.exit_code) == (1, 3)


def test_what_a_gang_was_killed_for_is_said() -> None:
    for ending in (ended(0, signal=9), ended(0, known=False)):
        outcome = settle(GangPart(RUN, (ending,), launched=True, damage="its page was cut off"))
        assert (outcome.kind, outcome.message) == (PartOutcomeKind.FAILED, "killed: its page was cut off")


def test_a_gang_that_is_not_launched_is_launched_unless_it_is_to_stop() -> None:
    assert judge(GangPart(RUN), 1.0).todo == (Todo.LAUNCH,)
    assert judge(GangPart(STOP), 1.0).phase is PartPhase.ENDED


def test_a_rank_that_rests_at_another_level_is_not_disobedient() -> None:
    assert not gang_judgement.is_disobedient(GangPart(OFFLOAD, (resting(0, PageState.PAUSED, 7),), launched=True))
    assert gang_judgement.is_disobedient(GangPart(OFFLOAD, (RUNNING,), launched=True))


@pytest.mark.parametrize(
    ("states", "level"),
    [
        ((PageState.PAUSED, PageState.PAUSED), ParkLevel.PAUSE),
        ((PageState.OFFLOADED, PageState.OFFLOADED), ParkLevel.OFFLOAD),
        ((PageState.PAUSED, PageState.SAVING), None),
    ],
)
def test_a_level_that_cannot_be_had_is_said_once_all_ranks_rest_below_it(
    states: tuple[PageState, ...], level: ParkLevel | None
) -> None:
    ranks = tuple(Rank(number, state=state, step=7, hello=True) for number, state in enumerate(states))
    full = GangPart(SAVE, ranks, launched=True, refusal="STORAGE_FULL: rank 0: no room")
    found = judge(full, 1.0)
    if level is None:
        assert found.phase is PartPhase.STOPPING
    else:
        assert (found.phase, found.level, found.stop_step) == (PartPhase.PARKED, level, 7)
    assert judge(replace(full, refusal=""), 1.0).phase is PartPhase.STOPPING


def test_a_gang_that_is_to_end_ends_though_its_last_checkpoint_finds_no_room() -> None:
    last = DesiredOrder("u", OrderKey(1, 5), OrderIntent.STOP, stop_sequence=5, checkpoint_first=True)
    ranks = (Rank(0, state=PageState.PAUSED, step=7, hello=True),)
    assert judge(GangPart(last, ranks, launched=True), 1.0).todo == ()
    assert judge(GangPart(last, ranks, launched=True, refusal="STORAGE_FULL"), 1.0).todo == (Todo.TERMINATE,)
    # it may not stay parked for ever either, waiting for a checkpoint that is never published
    assert gang_judgement.is_disobedient(GangPart(last, ranks, launched=True))


def test_an_error_counts_against_an_order_only_while_the_rank_rests_without_having_carried_it_out() -> None:
    facts = GangPart(SAVE, launched=True)
    assert gang_judgement.refuses(facts, Rank(0, state=PageState.PAUSED, reached_sequence=number(4)))
    assert not gang_judgement.refuses(facts, Rank(0, state=PageState.SAVING, reached_sequence=number(4)))
    assert not gang_judgement.refuses(facts, Rank(0, state=PageState.PAUSED, reached_sequence=number(5)))
    assert not gang_judgement.refuses(
        GangPart(RUN, launched=True), Rank(0, state=PageState.PAUSED, reached_sequence=number(4))
    )


def test_a_job_that_begins_from_a_saved_state_is_not_taken_for_opaque_because_it_is_slow_to_start() -> None:
    late = 2 * gang_judgement.HELLO_S
    assert judge(GangPart(RUN, (Rank(0),), launched=True), late).phase is PartPhase.RUNNING
    assert judge(GangPart(RUN, (Rank(0),), launched=True, restores=True), late).phase is PartPhase.STARTING


def test_a_shell_command_that_restores_a_state_starts_until_its_first_boundary() -> None:
    shell = GangPart(RUN, (Rank(0),), launched=True, no_agent=True)
    assert judge(shell, 0.0).phase is PartPhase.RUNNING
    restoring = replace(shell, restores=True)
    assert not gang_judgement.is_opaque(restoring, restoring.ranks[0], 0.0), (
        "an agent saved the state, so one will report"
    )
    assert judge(restoring, 0.0).phase is PartPhase.STARTING
    stepped = replace(restoring, ranks=(Rank(0, hello=True, first_step=True),))
    assert judge(stepped, 0.0).phase is PartPhase.RUNNING


RANKS = st.lists(
    st.builds(
        Rank,
        rank=st.integers(0, 3),
        state=st.integers(0, 12),
        phase=st.integers(0, 7),
        reached_sequence=st.integers(0, 9).map(number),
        reached_step=st.integers(0, 3),
        first_step=st.booleans(),
        hello=st.booleans(),
        opaque=st.booleans(),
        let_go=st.booleans(),
        exit=st.none() | st.builds(RankExit, st.integers(0, 80), st.sampled_from([0, 9, 15]), st.booleans()),
    ),
    min_size=1,
    max_size=4,
)


@given(st.sampled_from([RUN, PAUSE, OFFLOAD, SAVE, HAND, PREPARE, STOP]), RANKS, st.booleans(), st.none() | st.just(3))
def test_parked_is_never_claimed_unless_all_ranks_agree(
    wanted: DesiredOrder, ranks: list[Rank], freed: bool, published: int | None
) -> None:
    found = judge(GangPart(wanted, tuple(ranks), launched=True, memory_freed=freed, published_step=published), 1.0)
    assert (found.phase is PartPhase.ENDED) == (found.outcome is not None and found.phase is not PartPhase.PARKED)
    if found.phase is PartPhase.PARKED:
        live = [rank for rank in ranks if rank.exit is None]
        assert len({rank.reached_step for rank in live}) <= 1
        assert all(rank.reached_sequence >= number(5) for rank in live)
        if found.level is ParkLevel.CHECKPOINT:
            assert not live
            assert published is not None
        if wanted is OFFLOAD:
            assert freed


def test_a_destination_that_is_ready_says_of_which_step_and_nothing_where_its_ranks_differ() -> None:
    def ready(*steps: int) -> gang_judgement.Judgement:
        ranks = tuple(Rank(k, state=PageState.READY, hello=True, reached_step=step) for k, step in enumerate(steps))
        return judge(GangPart(PREPARE, ranks, launched=True), 0.0)

    assert ready(7, 7) == gang_judgement.Judgement(PartPhase.READY, stop_step=7)
    assert ready(7, 8) == gang_judgement.Judgement(PartPhase.READY, stop_step=0)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("wanted", [OFFLOAD, SAVE])
def test_a_stop_that_is_beyond_a_job_without_boundaries_is_refused_by_resting_short_of_it(
    wanted: DesiredOrder, world: int
) -> None:
    gang = GangPart(wanted, (replace(RUNNING, opaque=True, step=9),), launched=True, world=world)
    assert gang_judgement.is_beyond(gang)
    assert gang_judgement.should_freeze(gang, 0.0, lease_is_over=False)
    assert judge(gang, 0.0).phase is PartPhase.STOPPING
    rests = judge(replace(gang, frozen=True), 0.0)
    assert (rests.phase, rests.level, rests.stop_step) == (PartPhase.PARKED, ParkLevel.PAUSE, 9)
    assert not gang_judgement.is_disobedient(replace(gang, frozen=True))


def test_a_job_without_boundaries_whose_image_is_refused_rests_short_of_its_checkpoint() -> None:
    gang = GangPart(SAVE, (replace(RUNNING, opaque=True, step=9),), launched=True, has_images=True)
    assert not gang_judgement.should_freeze(gang, 0.0, lease_is_over=False)
    refused = replace(gang, refusal="IMAGE_REFUSED: connected to 192.0.2.1:5432")
    assert gang_judgement.should_freeze(refused, 0.0, lease_is_over=False)
    rests = judge(replace(refused, frozen=True), 0.0)
    assert (rests.phase, rests.level, rests.stop_step) == (PartPhase.PARKED, ParkLevel.PAUSE, 9)


def test_a_hand_over_is_beyond_a_job_without_boundaries_and_a_pause_is_not() -> None:
    rank = replace(RUNNING, opaque=True)
    assert gang_judgement.is_beyond(GangPart(HAND, (rank,), launched=True))
    assert not gang_judgement.should_freeze(GangPart(HAND, (rank,), launched=True), 0.0, lease_is_over=False)
    assert not gang_judgement.is_beyond(GangPart(PAUSE, (rank,), launched=True))
    assert not gang_judgement.is_beyond(GangPart(RUN, (rank,), launched=True))
    assert not gang_judgement.is_beyond(GangPart(OFFLOAD, (RUNNING,), launched=True))


def test_a_program_whose_agent_reports_only_after_a_restore_obeys_at_its_boundary() -> None:
    """Its image was taken before it had an agent, so the daemon counts it as a program without one."""
    gang = GangPart(OFFLOAD, (replace(RUNNING, hello=False),), launched=True, no_agent=True)
    assert gang_judgement.is_beyond(gang)
    reported = replace(gang, ranks=(replace(RUNNING, hello=True),))
    assert not gang_judgement.is_beyond(reported)
    assert not gang_judgement.should_freeze(reported, 0.0, lease_is_over=False)


KILLED = replace(STOP, grace_s=0.0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("wanted", "todo"), [(STOP, (Todo.TERMINATE,)), (replace(STOP, checkpoint_first=True), (Todo.TERMINATE,)),
                         (KILLED, (Todo.KILL,))]
)  # fmt: skip
def test_only_a_stop_without_grace_kills_without_sigterm_whether_the_gang_stands_still_or_not(
    wanted: DesiredOrder, todo: tuple[Todo, ...], frozen: bool
) -> None:
    gang = GangPart(wanted, (replace(RUNNING, opaque=True),), launched=True, frozen=frozen)
    assert judge(gang, 0.0) == gang_judgement.Judgement(PartPhase.STOPPING, todo=todo)


def test_a_gang_that_was_killed_as_stale_was_stopped() -> None:
    gone = GangPart(KILLED, (ended(0, signal=SIGKILL),), launched=True, stop_signalled=True)
    assert judge(gone, 0.0).outcome == PartOutcome(PartOutcomeKind.STOPPED, -SIGKILL)


@pytest.mark.parametrize(
    ("wanted", "frozen", "lease_is_over", "is_stale"),
    [
        (RUN, True, True, True),
        (RUN, False, True, True),
        (PAUSE, True, True, True),
        (RUN, False, False, False),
        (PAUSE, True, False, False),
        # A daemon that has just taken over knows of no lease.
        (RUN, True, None, True),
        (RUN, False, None, False),
        (PAUSE, True, None, False),
    ],
)
def test_a_stop_of_a_gang_that_outlived_its_lease_gives_it_no_time(
    wanted: DesiredOrder, frozen: bool, lease_is_over: bool | None, is_stale: bool
) -> None:
    assert gang_judgement.has_outlived_lease(wanted, frozen, lease_is_over) is is_stale
    for stop in (STOP, replace(STOP, checkpoint_first=True, stop_sequence=5)):
        assert hastened(stop, is_stale).ends_at_once is is_stale
    assert hastened(PAUSE, is_stale) == PAUSE


def test_what_a_former_daemon_froze_stands_still_until_the_master_has_answered() -> None:
    gang = GangPart(RUN, (replace(RUNNING, opaque=True),), launched=True, frozen=True)
    assert gang_judgement.should_freeze(gang, 0.0, lease_is_over=None)
    assert not gang_judgement.should_freeze(gang, 0.0, lease_is_over=False)
    assert not gang_judgement.should_freeze(replace(gang, frozen=False), 0.0, lease_is_over=None)


@pytest.mark.parametrize(("world", "is_frozen"), [(2, True), (3, False)], ids=["on one node", "on several nodes"])
def test_a_gang_with_a_rank_without_boundaries_is_paused_by_freezing_only_where_all_of_it_is_on_one_node(
    world: int, is_frozen: bool
) -> None:
    gang = GangPart(PAUSE, (replace(RUNNING, opaque=True), replace(RUNNING, rank=1)), launched=True, world=world)
    assert gang_judgement.should_freeze(gang, 0.0, lease_is_over=False) is is_frozen
    parked = judge(replace(gang, frozen=True), 0.0)
    assert (parked.phase is PartPhase.PARKED) is is_frozen


@pytest.mark.parametrize(
    ("rank", "kind"),
    [
        (ended(0, signal=9, imaged=True), PartOutcomeKind.YIELDED),
        (ended(0, known=False, imaged=True), PartOutcomeKind.YIELDED),
        (ended(0, code=0, imaged=True), PartOutcomeKind.DONE),
        (ended(0, code=3, imaged=True), PartOutcomeKind.FAILED),
    ],
)
def test_a_rank_was_ended_with_its_image_only_if_it_was_killed(rank: Rank, kind: PartOutcomeKind) -> None:
    assert settle(GangPart(RUN, (rank,), launched=True)).kind is kind


def test_processes_that_stand_still_for_a_move_are_stopped_without_a_grace() -> None:
    gang = GangPart(STOP, (RUNNING,), launched=True, holds_still=True)
    assert judge(gang, 0.0).todo == (Todo.KILL,)
    assert judge(replace(gang, holds_still=False), 0.0).todo == (Todo.TERMINATE,)
