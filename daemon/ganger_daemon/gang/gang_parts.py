"""Collaborators of one gang on this node: the facts that they give for its judgement, and notes for the next daemon,
which count, as ranks that a former daemon left, as far as they can be trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.wire.times import seconds

from ganger_daemon.core.part_facts import GangPart, Rank
from ganger_daemon.gang.boundary_relay import BoundaryExchange
from ganger_daemon.gang.checkpointing import CheckpointCoordinator
from ganger_daemon.gang.control_pages import RunMark
from ganger_daemon.gang.escalation import Escalation, Freezer
from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import (
    GangContext,
    RankErrors,
    ReceivedOrders,
    from_json,
    order_key,
    to_json,
    with_spec_of,
)
from ganger_daemon.gang.gang_launcher import GangLauncher
from ganger_daemon.gang.gang_memory import MemoryTrial, MemoryWatch, WorkingSet, memory_limit_bytes
from ganger_daemon.gang.incoming import IncomingState
from ganger_daemon.gang.launch_plan import has_no_agent, reporting_ranks
from ganger_daemon.gang.process_image import GangImages
from ganger_daemon.gang.rank_launch import RankLaunch
from ganger_daemon.gang.shared_memory import Segments
from ganger_daemon.gang.step_rate import IdleWatch, StallWatch, StepRate, UtilizationMeter
from ganger_daemon.gang.taken_devices import CorePinning, TakenDevices
from ganger_daemon.node.daemon_files import read_json, write_hint
from ganger_daemon.node.process_identity import ProcessId, RankProcess, is_alive, stranger_text

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GangParts:
    context: GangContext
    orders: ReceivedOrders
    exits: ExitWatcher
    launcher: GangLauncher
    devices: TakenDevices
    images: GangImages
    launching: RankLaunch
    incoming: IncomingState
    saving: CheckpointCoordinator
    boundary: BoundaryExchange
    rank_errors: RankErrors
    pinning: CorePinning
    memory: MemoryWatch
    working_set: WorkingSet
    memory_trial: MemoryTrial
    segments: Segments
    escalation: Escalation
    freezer: Freezer
    step_rate: StepRate
    utilization: UtilizationMeter
    idle_watch: IdleWatch
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
        launcher = GangLauncher(context, exits)
        devices = TakenDevices(context, exits, lambda: memory_limit_bytes(orders.desired.claim))

        def used_arena_bytes() -> int:
            return launcher.used_arena_bytes(int(orders.desired.claim.arena_bytes))

        images = GangImages(context, exits, devices, is_outside_closed=desired.spec.closes_connections)
        launching = RankLaunch(context, exits, launcher, images, blocked_by, cores_kept_by, desired)
        saving = CheckpointCoordinator(context, desired, launcher.publisher, images)
        return cls(
            context=context,
            orders=orders,
            exits=exits,
            launcher=launcher,
            devices=devices,
            images=images,
            launching=launching,
            incoming=IncomingState(context, launcher),
            saving=saving,
            boundary=BoundaryExchange(context, saving),
            rank_errors=RankErrors(context),
            pinning=CorePinning(context, exits),
            memory=MemoryWatch(
                host,
                context.part,
                lambda: bool(orders.desired.claim.shared_mask),
                group,
                lambda: int(orders.desired.claim.arena_bytes),
                devices,
            ),
            working_set=WorkingSet(host, group, used_arena_bytes),
            memory_trial=MemoryTrial(host, group, used_arena_bytes),
            segments=Segments(host, group),
            escalation=Escalation(context, exits),
            freezer=Freezer(context, lambda: images.holds_still),
            step_rate=StepRate(context.pages, reporting_ranks(desired.spec, context.part)),
            utilization=UtilizationMeter(host, group, desired.claim.device_mask),
            idle_watch=IdleWatch(host, group, desired.claim.device_mask, seconds(desired.idle_after)),
            stall_watch=StallWatch(context.pages, ranks),
        )

    @property
    def is_live(self) -> bool:
        """Whether the local ranks were launched and are not cleaned up yet."""
        return self.launching.is_done and not self.exits.is_reaped

    def facts(self) -> GangPart:
        """Return the facts that the core judges a gang from."""
        context, orders, launching, exits = self.context, self.orders, self.launching, self.exits
        wanted, order = orders.wanted, orders.wanted.order.number
        was_killed = self.is_live and exits.was_killed
        facts = GangPart(
            wanted=wanted,
            ranks=self._ranks() if launching.is_done else (),
            launched=launching.is_done,
            launched_at=launching.launched_at,
            world=context.part.world,
            no_agent=has_no_agent(orders.desired.spec) or not self.images.awaits_agent,
            restores=orders.desired.HasField("restore") and self.images.awaits_agent,
            has_images=self.images.are_possible,
            awaits_image=launching.awaits_image,
            frozen=self.freezer.frozen,
            holds_still=self.images.holds_still,
            takes_devices=not self.devices.why_not(orders.desired) and not self.devices.refusal(order),
            devices_taken=self.devices.are_taken,
            is_worked_on=self.devices.are_changing,
            launch_failure=launching.failure,
            has_room=self.incoming.has_room(wanted),
            memory_freed=self.memory.freed,
            published_step=self.saving.published_step(wanted, exits.settled),
            escalated=self.escalation.escalated,
            out_of_memory=was_killed and context.host.cgroups.oom_kills(context.paths.group) > 0,
            pages_lost=not context.pages.readable and not context.pages.damage(),
            damage=context.pages.damage() or self.devices.lost,
            stop_signalled=self.escalation.stop_signalled,
            asked_to_save=bool(self.escalation.asked_to_save_s),
            awaits_hooks=launching.hooks.are_awaited,
            node_fault=launching.hooks.node_fault,
            settled=exits.settled,
        )
        unpublished = self.saving.keeper.refusal(wanted.stop_sequence)
        return replace(facts, refusal=self.rank_errors.refusal(facts, unpublished))

    def _ranks(self) -> tuple[Rank, ...]:
        pages = self.context.pages
        if pages.readable:
            ranks = pages.ranks(self.orders.mark)
        else:
            # Pages that were lost with the machine's memory no longer show which ranks were let go.
            is_gone = not pages.damage()
            ranks = tuple(Rank(rank, opaque=bool(pages.foreign), let_go=is_gone) for rank in self.context.part.ranks)
        imaged = self.images.has_ended
        return tuple(replace(rank, exit=self.exits.exits.get(rank.rank), imaged=imaged) for rank in ranks)

    def write_notes(self) -> None:
        """Note what the next daemon cannot find out from pages and processes. Notes may be lost: they save work."""
        paths, orders = self.context.paths, self.orders
        fields = {
            "grant": [list(share) for share in self.context.host.cores.held.get(paths.group, ())],
            "baselines": self.memory.baselines(),
            "mark": orders.mark.journal(),
            "kept_memory_bytes": self.memory.kept_bytes,
            "wanted_checkpoints": self.saving.wanted_paths,
            "segments": self.segments.journal(),
            "asked_to_save_s": self.escalation.asked_to_save_s,
            "told": to_json(orders.master_desired) if orders.is_by_rotation else {},
            **self.launcher.journal(),
            **self.launching.journal(),
            **self.images.journal(),
            **self.devices.journal(),
            **self.idle_watch.journal(),
        }
        write_hint(paths.local, fields)

    def recall_notes(self) -> None:
        """Restore what a former daemon noted of a gang. Unreadable notes count as none."""
        paths, orders = self.context.paths, self.orders
        left = read_json(paths.local)
        try:
            for part in (self.launcher, self.launching, self.images, self.devices, self.idle_watch):
                part.recall(left)
            orders.mark = RunMark.recall(left.get("mark", {}))
            self.memory.kept_bytes = int(left.get("kept_memory_bytes", 0))
            self.memory.recall({int(pid): int(size) for pid, size in left.get("baselines", {}).items()})
            self.segments.recall(left.get("segments", {}))
            self.escalation.recall(float(left.get("asked_to_save_s", 0.0)), orders.desired.spec)
            shares = tuple([(int(core), int(share)) for core, share in left.get("grant", [])])
            self.context.host.cores.adopt(paths.group, shares)
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            log.warning("notes cannot be read", extra={"path": str(paths.local), "error": str(error)})
        orders.master_desired = _recall_master_desired(left.get("told"), orders.desired)

    def recall_wanted_checkpoints(self) -> list[str] | None:
        """Return the noted paths of the checkpoints that the master may start the job from; None without a note."""
        noted = read_json(self.context.paths.local).get("wanted_checkpoints")
        return [str(path) for path in noted] if isinstance(noted, list) else None

    def find_ranks(self, children: Mapping[str, RankProcess]) -> dict[int, ProcessId] | None:
        """Return the processes of the local ranks, dead ones too; None if not all of them were launched yet.

        Opens the pages, and spoils them where they contradict the processes."""
        paths, ranks, pages = self.context.paths, self.context.part.ranks, self.context.pages
        version = read_json(paths.launch(ranks[0])).get("page_version")
        is_open = pages.open(version if isinstance(version, int) else 0)
        found = self.launching.recognise(children)
        for rank, one in found.items():
            if one.stranger is not None:
                log.error("process not adopted", extra={"gang": paths.group, "cause": stranger_text(rank, one)})
            if one.is_lost:
                pages.spoil(stranger_text(rank, one))
        if not is_open and not pages.foreign and any(is_alive(one.process) for one in found.values()):
            # Else they went with the machine's memory, and so did the processes.
            pages.spoil(f"the control pages in {paths.run} were removed by its job")
        had_launches = any(paths.launch(rank).exists() for rank in ranks) or bool(pages.damage())
        if all(one.process.pid for one in found.values()) or (had_launches and not pages.readable):
            return {rank: one.process for rank, one in found.items()}
        return None


def _recall_master_desired(noted: Any, desired: agent_pb2.DesiredGang) -> agent_pb2.DesiredGang:
    """Return the master's last desired state of a gang: the noted one after a slice switch, else `desired`."""
    if not order_key(desired.order).is_by_rotation:
        return desired
    master_desired = from_json(noted) if isinstance(noted, dict) else None
    if master_desired is not None and master_desired.order.master_sequence >= desired.order.master_sequence:
        return with_spec_of(master_desired, desired)
    running = agent_pb2.DesiredGang()
    running.CopyFrom(desired)
    running.order.set_epoch = running.order.local_sequence = running.stop_sequence = 0
    running.intent, running.level = agent_pb2.INTENT_RUN, 0  # type: ignore[assignment]  # no level
    return running
