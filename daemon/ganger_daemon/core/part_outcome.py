"""Outcome of one gang's local part, from the exits of its ranks: pure, and the same however often it is asked for.

The rank that failed first determines it, because the exits of the others follow from that one.
"""

from __future__ import annotations

from ganger.injob.page_layout import EXIT_FENCED, EXIT_NO_STATE, EXIT_YIELDED
from ganger.protocol.gang_orders import OrderIntent

from ganger_daemon.core.part_facts import GangPart, PartOutcome, PartOutcomeKind, Rank, RankExit

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
            PartOutcomeKind.OUT_OF_MEMORY, code, failed.rank, "killed: it used more host memory than its claim"
        )
    if gang.wanted.intent is OrderIntent.STOP and gang.stop_signalled:
        return PartOutcome(PartOutcomeKind.STOPPED, code, failed.rank)
    if not ending.known and not gang.damage:
        return PartOutcome(
            PartOutcomeKind.UNKNOWN, 0, failed.rank, f"rank {failed.rank} is gone and its exit was not recorded"
        )
    if ending.code == EXIT_FENCED and not ending.signal and failed.fenced:
        return PartOutcome(PartOutcomeKind.FENCED, code, failed.rank, "its epoch was over")
    if ending.code == EXIT_NO_STATE and not ending.signal:
        return PartOutcome(PartOutcomeKind.FAILED, code, failed.rank, f"rank {failed.rank} could not restore its state")
    if gang.damage:
        return PartOutcome(PartOutcomeKind.FAILED, code, failed.rank, f"killed: {gang.damage}")
    how = f"was killed by signal {ending.signal}" if ending.signal else f"exited with code {ending.code}"
    return PartOutcome(PartOutcomeKind.FAILED, code, failed.rank, f"rank {failed.rank} {how}")


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
    # the code alone proves nothing: a job may use it for its own purposes
    yielded = ending.code == EXIT_YIELDED and rank.let_go
    return ending.known and ending.signal == 0 and (ending.code == 0 or yielded)


def _is_imaged(rank: Rank, ending: RankExit) -> bool:
    """Return whether a rank was ended with its process image, which is by SIGKILL. A daemon that dies before its
    consent has noted an end that does not come, and the rank may finish its program."""
    return rank.imaged and (not ending.known or ending.signal == SIGKILL)
