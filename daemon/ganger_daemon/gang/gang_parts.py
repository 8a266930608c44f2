"""Collaborators of one gang on this node, and the facts that they give for its judgement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ganger_daemon.core import gang_judgement
from ganger_daemon.gang.boundary_relay import BoundaryExchange
from ganger_daemon.gang.checkpointing import CheckpointCoordinator
from ganger_daemon.gang.core_pinning import CorePinning
from ganger_daemon.gang.device_memory import MemoryWatch
from ganger_daemon.gang.escalation import Escalation, Freezer
from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import GangContext
from ganger_daemon.gang.incoming import IncomingState
from ganger_daemon.gang.launch_plan import has_no_agent
from ganger_daemon.gang.rank_errors import RankErrors
from ganger_daemon.gang.rank_launch import RankLaunch
from ganger_daemon.gang.received_orders import ReceivedOrders
from ganger_daemon.gang.shared_memory import Segments
from ganger_daemon.gang.step_rate import StallWatch, StepRate, UtilizationMeter


@dataclass(frozen=True, slots=True)
class GangParts:
    exits: ExitWatcher
    launching: RankLaunch
    incoming: IncomingState
    saving: CheckpointCoordinator
    boundary: BoundaryExchange
    rank_errors: RankErrors
    pinning: CorePinning
    memory: MemoryWatch
    segments: Segments
    escalation: Escalation
    freezer: Freezer
    step_rate: StepRate
    utilization: UtilizationMeter
    stall_watch: StallWatch

    @classmethod
    def of(
        cls,
        context: GangContext,
        orders: ReceivedOrders,
        blocked_by: Callable[[], str],
        cores_kept_by: Callable[[], str],
    ) -> GangParts:
        """Make the collaborators of a gang. `blocked_by`, `cores_kept_by`: as `RankLaunch` takes them."""
        host, group, ranks, desired = context.host, context.paths.group, context.part.ranks, orders.desired
        exits = ExitWatcher(context.paths, context.wake)
        launching = RankLaunch(context, exits, blocked_by, cores_kept_by)
        saving = CheckpointCoordinator(context, desired, launching.running_launcher)
        return cls(
            exits=exits,
            launching=launching,
            incoming=IncomingState(context, launching),
            saving=saving,
            boundary=BoundaryExchange(context, saving),
            rank_errors=RankErrors(context),
            pinning=CorePinning(context),
            memory=MemoryWatch(
                host,
                context.part,
                lambda: bool(orders.desired.claim.shared_mask),
                group,
                lambda: int(orders.desired.claim.arena_bytes),
            ),
            segments=Segments(host, group),
            escalation=Escalation(context, exits),
            freezer=Freezer(context),
            step_rate=StepRate(context.pages, ranks),
            utilization=UtilizationMeter(host, group, desired.claim.device_mask),
            stall_watch=StallWatch(context.pages, ranks),
        )

    @property
    def is_live(self) -> bool:
        """Whether the local ranks were launched and are not cleaned up yet."""
        return self.launching.is_done and not self.exits.is_reaped


def facts_of(context: GangContext, orders: ReceivedOrders, parts: GangParts) -> gang_judgement.GangPart:
    """Return the facts that the core judges a gang from."""
    launching, exits, wanted = parts.launching, parts.exits, orders.wanted
    was_killed = parts.is_live and exits.was_killed
    facts = gang_judgement.GangPart(
        wanted=wanted,
        ranks=_ranks(context, orders, parts) if launching.is_done else (),
        launched=launching.is_done,
        launched_at=launching.launched_at,
        world=context.part.world,
        no_agent=has_no_agent(orders.desired.spec),
        restores=orders.desired.HasField("restore"),
        frozen=parts.freezer.frozen,
        launch_failure=launching.failure,
        has_room=parts.incoming.has_room(wanted),
        memory_freed=parts.memory.freed,
        published_step=parts.saving.published_step(wanted, exits.settled),
        escalated=parts.escalation.escalated,
        out_of_memory=was_killed and context.host.cgroups.oom_kills(context.paths.group) > 0,
        damage=context.pages.damage(),
        stop_signalled=parts.escalation.stop_signalled,
        settled=exits.settled,
    )
    unpublished = parts.saving.keeper.refusal(wanted.stop_sequence)
    return replace(facts, refusal=parts.rank_errors.refusal(facts, unpublished))


def _ranks(context: GangContext, orders: ReceivedOrders, parts: GangParts) -> tuple[gang_judgement.Rank, ...]:
    pages = context.pages
    if pages.readable:
        ranks = pages.ranks(orders.mark)
    else:
        # pages that were lost with the machine's memory no longer show which ranks were let go
        is_gone = not pages.damage()
        ranks = tuple(
            gang_judgement.Rank(rank, opaque=bool(pages.foreign), let_go=is_gone) for rank in context.part.ranks
        )
    return tuple(replace(rank, exit=parts.exits.exits.get(rank.rank)) for rank in ranks)
