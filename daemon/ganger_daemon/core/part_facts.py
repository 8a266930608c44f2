"""Facts of one gang's local part, and what follows from them, the same however often it is asked for: the outcome, and
the mechanism by which the gang is stopped, saved and moved, with the reasons why stronger ones do not apply."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ganger.injob.page_layout import EXIT_FENCED, EXIT_NO_STATE, EXIT_YIELDED, Capability
from ganger.protocol.gang_orders import DesiredOrder, Mechanism, OrderIntent
from ganger.text import counted


class PartOutcomeKind(IntEnum):
    DONE = 1
    YIELDED = 2
    FAILED = 3
    OUT_OF_MEMORY = 4
    STOPPED = 5
    UNKNOWN = 6
    LAUNCH_FAILED = 7
    FENCED = 8
    ESCALATED = 9
    STATE_UNREADABLE = 10
    STATE_OUTDATED = 11


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint; `path` is relative to the job's directory. `nodes`: those whose own disks have it; none:
    it lies on the storage that all nodes see."""

    step: int
    epoch: int
    path: str
    size_bytes: int = 0
    time_s: float = 0.0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartOutcome:
    kind: PartOutcomeKind
    exit_code: int = 0
    rank: int = 0
    message: str = ""
    # The newest ones, where it could not start from the one that was named.
    found: tuple[FoundCheckpoint, ...] = ()
    # What is wrong with the node, by its prolog or epilog: no gang may start there before it is mended.
    node_fault: str = ""


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank ended. `known` is false when its exit was not recorded."""

    code: int = 0
    signal: int = 0
    known: bool = True
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Rank:
    """One local rank: numbers from its page, and its exit once it is gone."""

    rank: int
    state: int = 0
    phase: int = 0
    step: int = 0
    ack_sequence: int = 0
    ack_step: int = 0
    reached_sequence: int = 0
    reached_step: int = 0
    first_step: bool = False  # A boundary passed since the present RUN order
    hello: bool = False
    opaque: bool = False
    let_go: bool = False  # What it saved for the order it reached is published: it may end with EXIT_YIELDED
    fenced: bool = False  # Its epoch is over: it is to end with EXIT_FENCED
    imaged: bool = False  # Its process image is published, and the daemon ends it
    exit: RankExit | None = None


@dataclass(frozen=True, slots=True)
class GangPart:
    """Facts that `judge` decides from. Times are seconds of one monotonic clock."""

    wanted: DesiredOrder
    ranks: tuple[Rank, ...] = ()
    launched: bool = False
    launched_at: float = 0.0
    world: int = 1
    no_agent: bool = False  # Not a Python, or the user wanted no agent: the daemon does not wait for its hello
    restores: bool = False  # From a saved state: an agent saved it, so one will report, however late
    has_images: bool = False  # Process images can be taken of it, at a boundary or without one
    awaits_image: bool = False  # No process is here before its image has come
    frozen: bool = False  # Every process is frozen
    holds_still: bool = False  # The daemon has stopped the processes for a move, or restored them so
    takes_devices: bool = False  # The devices can be taken from its processes without an agent, in place
    devices_taken: bool = False  # They were: the processes wait for them
    is_worked_on: bool = False  # The daemon takes or gives devices, or takes an image: the processes cannot obey
    launch_failure: PartOutcome | None = None
    has_room: bool = True  # For the state of a gang that moves in: bytes can come
    memory_freed: bool = False  # Device memory seen free since this stop
    published_step: int | None = None  # A checkpoint of this stop is on storage
    refusal: str = ""  # Why the ordered level cannot be reached: by a rank's report, or its checkpoint failed
    escalated: bool = False  # Killed because it ignored an order
    out_of_memory: bool = False
    pages_lost: bool = False  # With the machine's memory: the ranks have not outlived it
    damage: str = ""  # How its job damaged a control page: the gang is killed for it
    stop_signalled: bool = False  # SIGTERM sent for INTENT_STOP or after a rank's failure
    asked_to_save: bool = False  # The signal at which the script saves itself was sent: there is no way back
    awaits_hooks: bool = False  # Its prolog or its epilog may run, or the epilog has to, before it counts as ended
    node_fault: str = ""  # Why its epilog failed
    settled: PartOutcome | None = None  # The outcome is on disk: it never changes again

    @property
    def live(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.exit is None]

    @property
    def has_agent(self) -> bool:
        return any(rank.hello and not rank.opaque for rank in self.ranks)

    @property
    def ends_at_once(self) -> bool:
        """Whether no instruction of it may run any more. Processes that stand still for a move receive no signal, and
        may run at the destination by now."""
        return self.wanted.ends_at_once or (self.holds_still and self.wanted.intent is OrderIntent.STOP)


SIGKILL = 9


def settle(gang: GangPart) -> PartOutcome:
    """Return the outcome of the local part, once every process is gone. The rank that failed first determines it."""
    if gang.settled is not None:
        return gang.settled
    if gang.escalated:
        return PartOutcome(
            PartOutcomeKind.ESCALATED, -SIGKILL, message="did not obey an order within its deadline and was killed"
        )
    if gang.asked_to_save and not gang.stop_signalled and not gang.damage:
        return _saved_itself(gang)
    failed = first_failure(gang)
    if failed is None:
        ended = [(rank, rank.exit) for rank in gang.ranks if rank.exit is not None]
        yielded = [rank for rank, how in ended if _is_imaged(rank, how) or how.code == EXIT_YIELDED]
        if yielded:
            return PartOutcome(PartOutcomeKind.YIELDED, EXIT_YIELDED, yielded[0].rank)
        return PartOutcome(PartOutcomeKind.DONE)
    ending = failed.exit
    assert ending is not None, "a failed rank has an exit"
    code = -ending.signal if ending.signal else ending.code
    if gang.out_of_memory and ending.signal == SIGKILL:
        return PartOutcome(
            PartOutcomeKind.OUT_OF_MEMORY,
            code,
            failed.rank,
            "killed: it used more host memory than its claim; --memory asks for more",
        )
    if gang.wanted.intent is OrderIntent.STOP and gang.stop_signalled:
        return PartOutcome(PartOutcomeKind.STOPPED, code, failed.rank)
    if not ending.known and not gang.damage:
        return _unseen(gang, failed)
    if ending.code == EXIT_FENCED and not ending.signal and failed.fenced:
        return PartOutcome(PartOutcomeKind.FENCED, code, failed.rank, "its epoch was over")
    if ending.code == EXIT_NO_STATE and not ending.signal:
        return PartOutcome(PartOutcomeKind.FAILED, code, failed.rank, f"rank {failed.rank} could not restore its state")
    if gang.damage:
        return PartOutcome(PartOutcomeKind.FAILED, code, failed.rank, f"killed: {gang.damage}")
    how = f"was killed by signal {ending.signal}" if ending.signal else f"exited with code {ending.code}"
    return PartOutcome(PartOutcomeKind.FAILED, code, failed.rank, f"rank {failed.rank} {how}")


def _unseen(gang: GangPart, rank: Rank) -> PartOutcome:
    """Return the outcome of a rank whose exit was not recorded.

    An agent notes the exit of its program, so one that noted none was killed, and a machine that went down has killed
    all. Without either the rank may have done all its work: that it runs again is for its user to allow."""
    if rank.hello or gang.pages_lost:
        return PartOutcome(
            PartOutcomeKind.UNKNOWN, 0, rank.rank, f"rank {rank.rank} is gone and its exit was not recorded"
        )
    message = (
        f"the end of rank {rank.rank} was not seen, as its launcher was killed before: it may have done all its work,"
        " and is run again only with --max-failures"
    )
    return PartOutcome(PartOutcomeKind.FAILED, 0, rank.rank, message)


def _saved_itself(gang: GangPart) -> PartOutcome:
    """Return the outcome of ranks that were asked to save themselves: as under Slurm, any exit counts as preempted."""
    ranks = [rank for rank in gang.ranks if rank.exit is not None]
    last = max(
        ranks, key=lambda rank: (rank.exit.at if rank.exit else 0.0, -rank.rank), default=Rank(0, exit=RankExit())
    )
    ending = last.exit or RankExit()
    if ending.signal == SIGKILL:
        message = f"rank {last.rank} did not exit within the grace after its stop signal, and was killed"
    else:
        how = f"was ended by signal {ending.signal}" if ending.signal else f"exited with code {ending.code}"
        message = f"rank {last.rank} {how} after its stop signal"
    return PartOutcome(PartOutcomeKind.YIELDED, -ending.signal or ending.code, last.rank, message)


def awaits_publication(gang: GangPart) -> bool:
    """Return whether all ranks have yielded for a stop whose checkpoint is not seen published yet."""
    if gang.launch_failure is not None or not gang.ranks or settle(gang).kind is not PartOutcomeKind.YIELDED:
        return False
    return gang.published_step is None and bool(gang.wanted.stop_sequence)


def first_failure(gang: GangPart) -> Rank | None:
    """Return the rank that failed before all others, the lowest of several at one time; None if none has failed."""
    failed = [rank for rank in gang.ranks if rank.exit is not None and not _is_good(rank, rank.exit)]
    return min(failed, key=lambda rank: (rank.exit.at if rank.exit else 0.0, rank.rank), default=None)


def _is_good(rank: Rank, ending: RankExit) -> bool:
    if _is_imaged(rank, ending):
        return True
    # The code alone proves nothing: a job may use it for its own purposes.
    yielded = ending.code == EXIT_YIELDED and rank.let_go
    return ending.known and ending.signal == 0 and (ending.code == 0 or yielded)


def _is_imaged(rank: Rank, ending: RankExit) -> bool:
    """Return whether a rank was ended with its process image, which is by SIGKILL. A daemon that dies before its
    consent has noted an end that does not come, and the rank may finish its program."""
    return rank.imaged and (not ending.known or ending.signal == SIGKILL)


NO_IMAGE = "this node cannot dump and restore processes"
NO_SIGNAL = "the job names no signal at which it saves itself (--signal)"


@dataclass(frozen=True, slots=True)
class MechanismFacts:
    """What decides about the mechanism of a gang.

    `wish`: the only one that the user wants, UNSPECIFIED for the strongest; `nodes`: of the gang. The others say why a
    mechanism does not apply: empty where it applies, None while that is not known. `image`: why this node cannot dump
    and restore the processes."""

    wish: Mechanism = Mechanism.UNSPECIFIED
    nodes: int = 1
    attached: str | None = None
    adapter: str | None = None
    image: str | None = NO_IMAGE
    replay: str | None = None
    signal: str | None = NO_SIGNAL


@dataclass(frozen=True, slots=True)
class MechanismChoice:
    """The mechanism of a gang, and stronger ones that do not apply with the reasons, strongest first."""

    mechanism: Mechanism
    refused: tuple[tuple[Mechanism, str], ...] = ()


def choose_mechanism(facts: MechanismFacts) -> MechanismChoice:
    """Return the strongest mechanism that is known to apply, or NONE. Unknown ones are passed over."""
    refused: list[tuple[Mechanism, str]] = []
    for mechanism in _candidates(facts):
        reason = _reason_against(facts, mechanism)
        if reason == "":
            return MechanismChoice(mechanism, tuple(refused))
        if reason is not None:
            refused.append((mechanism, reason))
    return MechanismChoice(Mechanism.NONE, tuple(refused))


def keeps_state(wish: Mechanism, able: int) -> bool:
    """Return whether the agent may save the state of a job: not where its user wants another mechanism. `able`: the
    capabilities (`Capability`) that the agents of all ranks report."""
    otherwise = able & (Capability.FIVE_LINE | Capability.ADAPTER | Capability.IMAGE)
    match wish:
        case Mechanism.SIGNAL | Mechanism.NONE:
            return False
        case Mechanism.ATTACHED:
            return bool(able & Capability.FIVE_LINE)
        case Mechanism.ADAPTER:
            return bool(able & Capability.ADAPTER)
        case Mechanism.REPLAY:
            return not otherwise
        case _:
            return True


def _candidates(facts: MechanismFacts) -> tuple[Mechanism, ...]:
    """Return the mechanisms to try, strongest first. An image is exact, but of one node."""
    if facts.wish is Mechanism.NONE:
        return ()
    if facts.wish is not Mechanism.UNSPECIFIED:
        return (facts.wish,)
    by_nodes = (Mechanism.IMAGE, Mechanism.ADAPTER) if facts.nodes == 1 else (Mechanism.ADAPTER, Mechanism.IMAGE)
    return (Mechanism.ATTACHED, *by_nodes, Mechanism.REPLAY, Mechanism.SIGNAL)


def _reason_against(facts: MechanismFacts, mechanism: Mechanism) -> str | None:
    if mechanism is Mechanism.IMAGE and facts.nodes > 1:
        return f"its ranks are on {counted(facts.nodes, 'node')}, and an image is of one"
    reasons = {
        Mechanism.ATTACHED: facts.attached,
        Mechanism.ADAPTER: facts.adapter,
        Mechanism.IMAGE: facts.image,
        Mechanism.REPLAY: facts.replay,
        Mechanism.SIGNAL: facts.signal,
    }
    return reasons[mechanism]
