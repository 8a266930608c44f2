"""What a node does: which gangs start, obey or stop, from the difference between its desired and its observed state;
and the judgement of one gang's local part: its phase, its outcome and the work left to do. Pure and level-triggered.

Nothing is killed on doubt: a gang that the desired set lacks is stopped only if its epoch is provably over or an
earlier set of this session had it. Numbers of a job are trusted only so far as they agree with each other: a level
counts as reached when every local rank reports it for this very order and at one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from ganger.injob.page_layout import PagePhase, PageState
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, OrderKey, ParkLevel
from ganger.protocol.stop_rules import must_be_frozen

from ganger_daemon.core.part_facts import GangPart, PartOutcome, PartOutcomeKind, Rank, first_failure, settle


class PartPhase(IntEnum):
    STARTING = 1
    PREPARED = 2
    READY = 3
    RUNNING = 4
    STOPPING = 5
    PARKED = 6
    ENDED = 7


# A Python without `attach` whose agent finds no training never sends a hello; after this long it counts as opaque.
HELLO_S = 5.0


class Todo(IntEnum):
    """Work for the shell, in the order of the values."""

    LAUNCH = 1
    VERIFY_MEMORY = 2  # Look whether the device memory of the offloaded ranks is free
    TERMINATE = 3  # SIGTERM to main processes, kill after grace
    KILL = 4  # Everything in the group at once, frozen as it may be
    ASK_TO_SAVE = 5  # The job's own signal to main processes, kill after its grace
    END_HOOKS = 6  # Every process gone: end the prolog if it still runs, then run the epilog
    REAP = 7  # Every process gone: settle the outcome, free cgroup and cores


@dataclass(frozen=True, slots=True)
class Judgement:
    phase: PartPhase
    level: ParkLevel = ParkLevel.NONE
    stop_step: int = 0
    outcome: PartOutcome | None = None
    todo: tuple[Todo, ...] = ()


def judge(gang: GangPart, now: float) -> Judgement:
    """Return the phase to report and the work to do, from the facts alone."""
    judgement = _judge_processes(gang, now)
    if Todo.REAP not in judgement.todo or gang.settled is not None:
        return judgement
    if gang.awaits_hooks:
        return Judgement(PartPhase.STOPPING, todo=(Todo.END_HOOKS,))
    if judgement.outcome is not None and not judgement.outcome.node_fault:
        return replace(judgement, outcome=replace(judgement.outcome, node_fault=gang.node_fault))
    return judgement


def _judge_processes(gang: GangPart, now: float) -> Judgement:
    if gang.launch_failure is not None:
        return _ended(gang.settled or gang.launch_failure)
    if not gang.launched and gang.settled is not None:
        return _ended(gang.settled)
    if not gang.launched:
        return _before_launch(gang)
    if gang.awaits_image:
        return _before_image(gang)
    if gang.ranks and all(rank.exit is not None for rank in gang.ranks):
        return _after_exit(gang)
    if gang.wanted.intent is OrderIntent.STOP and not gang.wanted.asks_to_leave:
        return _stopping(gang)
    if gang.wanted.asks_to_leave or gang.asked_to_save:
        # The other ranks save themselves, too, when one has exited.
        return Judgement(PartPhase.STOPPING, todo=() if gang.asked_to_save else (Todo.ASK_TO_SAVE,))
    if first_failure(gang) is not None:
        # The other ranks would wait for it in a collective: the whole gang stops.
        return Judgement(PartPhase.STOPPING, todo=() if gang.stop_signalled else (Todo.TERMINATE,))
    if gang.wanted.intent in (OrderIntent.PARK, OrderIntent.HAND_OVER):
        return _parking(gang, now)
    if gang.wanted.intent is OrderIntent.PREPARE:
        return _preparing(gang)
    return Judgement(_run_phase(gang, now))


def _ended(outcome: PartOutcome) -> Judgement:
    return Judgement(PartPhase.ENDED, outcome=outcome, todo=(Todo.REAP,))


def may_be_on_devices(wanted: DesiredOrder, judged_order: DesiredOrder, judgement: Judgement) -> bool:
    """Return whether launched processes run or may run at any moment.

    That they were parked by an earlier order proves nothing once a newer order resumes them, if only to their next
    boundary."""
    if judgement.phase is not PartPhase.PARKED:
        return judgement.phase is not PartPhase.ENDED
    if wanted.intent in (OrderIntent.RUN, OrderIntent.PREPARE):
        return True
    return wanted.stop_sequence != judged_order.stop_sequence


def _before_launch(gang: GangPart) -> Judgement:
    if gang.wanted.intent is OrderIntent.STOP:
        return _ended(PartOutcome(PartOutcomeKind.STOPPED, message="stopped before it was launched"))
    if gang.wanted.asks_to_leave:
        return _ended(PartOutcome(PartOutcomeKind.YIELDED, message="parked before it was launched"))
    if gang.wanted.intent is OrderIntent.PREPARE and not gang.restores:
        # Without a state to restore there is nothing to prepare, and a script that was started would step.
        return Judgement(PartPhase.PREPARED)
    # Parked before it was launched: it starts with the stop in its page and parks before its first step.
    return Judgement(PartPhase.STARTING, todo=(Todo.LAUNCH,))


def _before_image(gang: GangPart) -> Judgement:
    if gang.wanted.intent is OrderIntent.STOP:
        return _ended(gang.settled or PartOutcome(PartOutcomeKind.STOPPED, message="stopped before its process came"))
    is_prepared = gang.wanted.intent is OrderIntent.PREPARE and gang.has_room
    return Judgement(PartPhase.PREPARED if is_prepared else PartPhase.STARTING)


def _after_exit(gang: GangPart) -> Judgement:
    outcome = settle(gang)
    is_parking = outcome.kind is PartOutcomeKind.YIELDED and gang.wanted.intent is OrderIntent.PARK
    if is_parking and gang.published_step is not None:
        return Judgement(PartPhase.PARKED, ParkLevel.CHECKPOINT, gang.published_step, outcome, (Todo.REAP,))
    if is_parking and not gang.wanted.is_by_signal:
        return Judgement(PartPhase.STOPPING, todo=(Todo.REAP,))
    return Judgement(PartPhase.ENDED, outcome=outcome, stop_step=gang.published_step or 0, todo=(Todo.REAP,))


def _stopping(gang: GangPart) -> Judgement:
    if gang.ends_at_once:
        return Judgement(PartPhase.STOPPING, todo=(Todo.KILL,))
    saves = gang.wanted.checkpoint_first and gang.has_agent and not (gang.refusal and _rest(gang))
    if saves and not gang.stop_signalled:
        # The page orders CHECKPOINT; ranks leave by themselves, or the ladder ends it.
        return Judgement(PartPhase.STOPPING)
    return Judgement(PartPhase.STOPPING, todo=() if gang.stop_signalled else (Todo.TERMINATE,))


def is_opaque(gang: GangPart, rank: Rank, now: float) -> bool:
    """Return whether, as far as known, nothing in this rank can obey an order at a boundary."""
    has_waited = gang.no_agent or now - gang.launched_at >= HELLO_S
    return rank.opaque or (has_waited and not gang.restores and not rank.hello)


def has_opaque_rank(gang: GangPart, now: float) -> bool:
    """Return whether nothing in some live rank can obey an order at a boundary."""
    return any(is_opaque(gang, rank, now) for rank in gang.live)


def is_busy(gang: GangPart) -> bool:
    """Return whether some live rank is in a long phase without boundaries: its order's deadline waits for it."""
    return is_at_work(gang) or any(rank.phase == PagePhase.EVALUATION for rank in gang.live)


def is_at_work(gang: GangPart) -> bool:
    """Return whether some live rank compiles, replays, saves or restores, or the daemon works on the processes."""
    phases, states = (PagePhase.COMPILATION, PagePhase.REPLAY), (PageState.SAVING, PageState.RESTORING)
    return gang.is_worked_on or any(rank.phase in phases or rank.state in states for rank in gang.live)


def is_parked_by_freezing(gang: GangPart, now: float) -> bool:
    """Return whether PAUSE or OFFLOAD is done by freezing: for a job without boundaries whose ranks are all on this
    node, and so stop together. On several nodes some would wait in a collective operation for others that stopped
    earlier."""
    is_park = gang.wanted.intent is OrderIntent.PARK
    is_level = gang.wanted.level is ParkLevel.PAUSE or (gang.wanted.level is ParkLevel.OFFLOAD and gang.takes_devices)
    # Ranks with boundaries cannot stop at one without those that have none.
    return is_park and is_level and gang.world == len(gang.ranks) and has_opaque_rank(gang, now)


def is_to_be_taken(gang: GangPart, now: float) -> bool:
    """Return whether the devices must be taken from processes without an agent."""
    return gang.wanted.level is ParkLevel.OFFLOAD and is_parked_by_freezing(gang, now)


def is_beyond(gang: GangPart) -> bool:
    """Return whether the order demands more than a job without boundaries can do, and so is never carried out."""
    deeper = gang.wanted.intent is OrderIntent.PARK and gang.wanted.level > ParkLevel.PAUSE
    by_image = gang.has_images and (gang.wanted.level is ParkLevel.CHECKPOINT or not deeper)
    in_place = gang.takes_devices and deeper and gang.wanted.level is ParkLevel.OFFLOAD
    if gang.wanted.asks_to_leave or by_image or in_place:
        return False
    if not deeper and gang.wanted.intent is not OrderIntent.HAND_OVER:
        return False
    # A program whose image was taken before its agent had reported may have one by now.
    are_without = (rank.opaque or (gang.no_agent and not rank.hello) for rank in gang.live)
    return any(are_without) and reached_step(gang) is None


def _rests_short(gang: GangPart, now: float) -> bool:
    """Return whether a job without boundaries is frozen short of the level of its order, because that cannot be
    reached: at all, or as its image was refused."""
    is_refused = bool(gang.refusal) and has_opaque_rank(gang, now)
    return gang.wanted.intent is OrderIntent.PARK and (is_refused or is_beyond(gang))


def has_outlived_lease(wanted: DesiredOrder, frozen: bool, lease_is_over: bool | None) -> bool:
    """Return whether the job of a gang may run elsewhere by now. `lease_is_over`: None while this daemon knows of no
    lease; then a gang that is frozen without an order to pause has outlived its lease."""
    if lease_is_over is None:
        return frozen and wanted.intent is not OrderIntent.PARK
    return lease_is_over


def should_freeze(gang: GangPart, now: float, lease_is_over: bool | None) -> bool:
    """Return whether the processes must be frozen now: for a PAUSE without boundaries, or after the lease if no agent
    obeys it. Until this daemon has a lease, frozen processes stay frozen."""
    if not gang.live or gang.wanted.intent is OrderIntent.STOP or gang.stop_signalled or gang.asked_to_save:
        return False
    if lease_is_over is None and gang.frozen:
        return True
    if lease_is_over and any(must_be_frozen(rank.hello, rank.opaque) for rank in gang.live):
        return True
    if is_to_be_taken(gang, now):
        return gang.devices_taken  # The driver works with running processes only
    # An order that it cannot carry out: it is frozen until that is reported.
    return is_parked_by_freezing(gang, now) or _rests_short(gang, now)


def _parking(gang: GangPart, now: float) -> Judgement:
    if is_to_be_taken(gang, now):
        return _taking_devices(gang)
    if is_parked_by_freezing(gang, now) or _rests_short(gang, now):
        return Judgement(PartPhase.PARKED, ParkLevel.PAUSE, _stood(gang)) if gang.frozen else _STOPPING
    step = reached_step(gang)
    if step is None:
        return (_rest(gang) if gang.refusal else None) or _STOPPING
    if gang.wanted.intent is OrderIntent.HAND_OVER:
        return Judgement(PartPhase.PARKED, ParkLevel.OFFLOAD, step)
    if gang.wanted.level is ParkLevel.OFFLOAD:
        return Judgement(PartPhase.PARKED, ParkLevel.OFFLOAD, step) if gang.memory_freed else _VERIFYING
    if gang.wanted.level is ParkLevel.PAUSE:
        return Judgement(PartPhase.PARKED, ParkLevel.PAUSE, step)
    return _STOPPING  # CHECKPOINT is reached by leaving


_STOPPING = Judgement(PartPhase.STOPPING)
_VERIFYING = Judgement(PartPhase.STOPPING, todo=(Todo.VERIFY_MEMORY,))


def _taking_devices(gang: GangPart) -> Judgement:
    if not gang.frozen or not gang.devices_taken:
        return _STOPPING
    return Judgement(PartPhase.PARKED, ParkLevel.OFFLOAD, _stood(gang)) if gang.memory_freed else _VERIFYING


def _stood(gang: GangPart) -> int:
    return max(rank.step for rank in gang.ranks)


def _preparing(gang: GangPart) -> Judgement:
    # Without an agent processes get their devices once they may run.
    if _are_ready(gang) and not (gang.devices_taken and gang.has_agent):
        # The master commits the migration only if the step is that at which the source stopped.
        steps = {rank.reached_step for rank in gang.live}
        return Judgement(PartPhase.READY, stop_step=steps.pop() if len(steps) == 1 else 0)
    # The source trains on while memory is made ready here; once it stops, every page would cost it time.
    return Judgement(
        PartPhase.PREPARED if gang.has_room and all(rank.hello for rank in gang.live) else PartPhase.STARTING
    )


def _are_ready(gang: GangPart) -> bool:
    return all(rank.state == PageState.READY for rank in gang.live)


def _run_phase(gang: GangPart, now: float) -> PartPhase:
    is_ready = gang.wanted.moves_in and _are_ready(gang)
    if gang.devices_taken:
        return PartPhase.READY if is_ready else PartPhase.STARTING
    if all(rank.first_step or rank.phase == PagePhase.DONE for rank in gang.live):
        return PartPhase.RUNNING
    if is_ready:
        return PartPhase.READY
    # Of those that move in, only a process without an agent is opaque.
    if all(rank.first_step or is_opaque(gang, rank, now) for rank in gang.live):
        return PartPhase.RUNNING
    return PartPhase.STARTING


def reached_step(gang: GangPart) -> int | None:
    """Return the step at which all live local ranks are parked for the present order; None while one is not."""
    resting = {
        OrderIntent.HAND_OVER: (PageState.HANDED_OVER, PageState.OFFLOADED),
        OrderIntent.PARK: {
            ParkLevel.PAUSE: (PageState.PAUSED, PageState.OFFLOADED, PageState.HANDED_OVER),
            ParkLevel.OFFLOAD: (PageState.OFFLOADED,),
        }.get(gang.wanted.level, ()),
    }.get(gang.wanted.intent, ())
    live, number = gang.live, gang.wanted.order.number
    steps = {rank.reached_step for rank in live}
    are_all = all(rank.state in resting and rank.reached_sequence >= number for rank in live)
    return steps.pop() if are_all and len(steps) == 1 else None


def _rest(gang: GangPart) -> Judgement | None:
    """Return PARKED, at the common level, if all live ranks are parked at one step, whatever was ordered; else None."""
    steps = {rank.step for rank in gang.ranks}
    if any(rank.exit is not None or rank.state not in _AT_REST for rank in gang.ranks) or len(steps) != 1:
        return None
    offloaded = all(rank.state == PageState.OFFLOADED for rank in gang.ranks)
    return Judgement(PartPhase.PARKED, ParkLevel.OFFLOAD if offloaded else ParkLevel.PAUSE, steps.pop())


_AT_REST = (PageState.PAUSED, PageState.OFFLOADED)


def refuses(gang: GangPart, rank: Rank) -> bool:
    """Return whether a rank that reported an error under the present order is parked without having carried it out. An
    error on the way, as of an earlier checkpoint, no longer counts once it has."""
    parks = gang.wanted.intent is OrderIntent.PARK and gang.wanted.level > ParkLevel.PAUSE
    saves = gang.wanted.intent is OrderIntent.STOP and gang.wanted.checkpoint_first
    behind = rank.reached_sequence < gang.wanted.order.number
    return (parks or saves) and rank.exit is None and rank.state in _AT_REST and behind


def is_disobedient(gang: GangPart) -> bool:
    """Return whether some live rank is neither parked at a boundary nor exiting.

    A rank that is parked at another level than ordered has reported an error, and a frozen rank cannot act: neither is
    disobedient. Under an order to stop, a rank may not stay parked."""
    if gang.frozen:
        return False
    resting = (*_AT_REST, PageState.HANDED_OVER) if gang.wanted.intent is not OrderIntent.STOP else ()
    return any(rank.state not in resting for rank in gang.live)


_FAST_S = 0.0015
_BUSY_S = 0.005
_COPY_S = 0.02
_WAITING_S = 0.05
_SLOW_S = 0.25
_OVER_S = 60.0


def next_look(
    phase: PartPhase,
    *,
    is_over: bool = False,
    is_launched: bool = True,
    is_copying: bool = False,
    is_verifying: bool = False,
    is_death_awaited: bool = False,
    is_preparing: bool = False,
    is_young: bool = True,
    is_agreeing: bool = False,
    is_saving_itself: bool = False,
    is_in_hook: bool = False,
) -> float:
    """Return the seconds until the next tick of a gang's loop; a wake-up comes sooner.

    `is_copying`: ranks copy their state; `is_verifying`: freed device memory is being verified; `is_preparing`: ranks
    get ready for a migration; `is_young`: launched or ordered a short while ago; `is_agreeing`: ranks on several nodes
    agree on a step to stop at; `is_saving_itself`: a script was asked to save itself, and its exit wakes the loop;
    `is_in_hook`: a hook of the node runs, and its end wakes the loop."""
    if is_over:
        return _OVER_S
    if is_saving_itself or is_in_hook:
        return _SLOW_S
    if not is_launched:
        return _WAITING_S
    if is_copying:
        # The copying ranks need the processor, and send a packet when they are done.
        return _COPY_S
    if phase is PartPhase.STOPPING:
        return _BUSY_S if is_verifying else _FAST_S
    if is_death_awaited:
        return _BUSY_S
    if phase in (PartPhase.STARTING, PartPhase.PREPARED) or is_preparing:
        # A script that never attaches is not polled fast for ever.
        return _BUSY_S if is_young else _WAITING_S
    return _FAST_S if is_agreeing else _SLOW_S


GangId = tuple[str, int]
"""(job uid, epoch)."""


class Absence(Enum):
    """Why a gang that the desired set lacks may be stopped."""

    OLDER_EPOCH = "the master has a newer epoch of this job"
    NO_LONGER_WANTED = "an earlier desired set of this session wanted it"


@dataclass(frozen=True, slots=True)
class Here:
    """A gang on this node: the highest order obeyed, and whether all its processes are gone."""

    order: OrderKey
    ended: bool = False
    stopping: bool = False  # Already, because the desired set lacks it


@dataclass(frozen=True, slots=True)
class Observed:
    gangs: Mapping[GangId, Here] = field(default_factory=dict)
    # Epochs that ended here and were forgotten, the highest by job: they never start again.
    finished: Mapping[str, int] = field(default_factory=dict)
    # Gangs that a desired set of this session has wanted.
    wanted_before: frozenset[GangId] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a gang of which there is nothing here."""

    wanted: DesiredOrder


@dataclass(frozen=True, slots=True)
class Obey:
    """A newer order for a gang that is here."""

    wanted: DesiredOrder


@dataclass(frozen=True, slots=True)
class StopAbsent:
    gang: GangId
    why: Absence


@dataclass(frozen=True, slots=True)
class ReportGone:
    """Report a desired gang as gone: nothing of it is here and it must not start; the master decides."""

    wanted: DesiredOrder


@dataclass(frozen=True, slots=True)
class Forget:
    """The outcome is durable at the master: remove what is left."""

    gang: GangId


Action = Start | Obey | StopAbsent | ReportGone | Forget


def reconcile(
    desired: Iterable[DesiredOrder], observed: Observed, acknowledged: frozenset[int] = frozenset()
) -> tuple[Action, ...]:
    """Return the actions that bring the observed to the desired state; stops first, since they free devices."""
    newest = _newest_order_of_each(desired)
    stops: list[Action] = []
    starts: list[Action] = []
    for gang, here in sorted(observed.gangs.items(), key=lambda item: item[0]):
        wanted = newest.get(gang)
        if wanted is not None:
            if wanted.order > here.order:
                (stops if wanted.intent is OrderIntent.STOP else starts).append(Obey(wanted))
            elif here.ended and wanted.intent is OrderIntent.STOP and gang[1] in acknowledged:
                stops.append(Forget(gang))
            continue
        if here.ended:
            if gang[1] in acknowledged:
                stops.append(Forget(gang))
            continue
        why = None if here.stopping else _absence(gang, newest, observed.wanted_before)
        if why is not None:
            stops.append(StopAbsent(gang, why))
    for gang in sorted(newest.keys() - observed.gangs.keys()):
        wanted = newest[gang]
        over = gang[1] <= observed.finished.get(gang[0], 0)
        if over or wanted.intent not in (OrderIntent.RUN, OrderIntent.PREPARE):
            starts.append(ReportGone(wanted))
        else:
            starts.append(Start(wanted))
    return (*stops, *starts)


def _newest_order_of_each(desired: Iterable[DesiredOrder]) -> dict[GangId, DesiredOrder]:
    newest: dict[GangId, DesiredOrder] = {}
    for wanted in desired:
        gang = (wanted.job_uid, wanted.epoch)
        newest[gang] = max(newest.get(gang, wanted), wanted, key=lambda one: one.order)
    return newest


def _absence(gang: GangId, newest: Mapping[GangId, DesiredOrder], wanted_before: frozenset[GangId]) -> Absence | None:
    uid, epoch = gang
    if any(other == uid and newer > epoch for other, newer in newest):
        return Absence.OLDER_EPOCH
    if gang in wanted_before:
        return Absence.NO_LONGER_WANTED
    return None
