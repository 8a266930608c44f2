"""Reports on one gang for the master: its observed state as one message, and apart from it steps, rates and losses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from ganger.agent.v1 import agent_pb2
from ganger.injob import metrics
from ganger.injob.metrics import ReportedMetric
from ganger.injob.page import PageProgress, now_ns
from ganger.injob.page_layout import PagePhase
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, ParkLevel
from ganger.v1 import job_pb2
from ganger.wire.times import timestamp, timestamp_of_ns

from ganger_daemon.core.gang_judgement import Judgement, PartPhase, has_opaque_rank, is_beyond, is_to_be_taken
from ganger_daemon.core.part_facts import FoundCheckpoint, PartOutcome
from ganger_daemon.gang.gang_context import GangContext, order_key_to_wire
from ganger_daemon.gang.gang_parts import GangParts
from ganger_daemon.gang.launch_plan import has_no_agent
from ganger_daemon.gang.offered_capabilities import GangFindings, add_capabilities
from ganger_daemon.gang.step_rate import PageSample
from ganger_daemon.node.core_table import format_ids

# Sums of a job's own numbers; a message holds no larger one.
_BYTES_LIMIT = (1 << 62) - 1


class JudgedState(NamedTuple):
    """A judgement, with the order and the master's desired state that it is about. Newer ones are not carried out
    yet."""

    judgement: Judgement
    order: DesiredOrder
    master_desired: agent_pb2.DesiredGang


@dataclass(slots=True)
class GangReport:
    """Reports on one gang. `judged`: its last judgement."""

    parts: GangParts
    judged: JudgedState

    @property
    def _phase(self) -> PartPhase:
        return self.judged.judgement.phase

    @property
    def _can_read(self) -> bool:
        return self.parts.is_live and self.parts.context.pages.readable

    @property
    def has_stepped(self) -> bool:
        """Whether a local rank has done a step in this epoch; of unreadable pages, whether it was launched."""
        if not self.parts.context.pages.readable:
            return self.parts.launching.is_done
        return self.parts.step_rate.last_step_ns > 0

    @property
    def cannot_park(self) -> bool:
        """Whether the launched gang was ordered to park at a boundary and will not reach the ordered level."""
        wanted, judged = self.parts.orders.wanted, self.judged
        if wanted.intent is not OrderIntent.PARK or wanted.asks_to_leave or judged.order is not wanted:
            return False
        if self._phase is PartPhase.PARKED:
            return judged.judgement.level < wanted.level
        facts, now = self.parts.facts(), time.monotonic()
        if self._phase is not PartPhase.STOPPING or not has_opaque_rank(facts, now) or is_to_be_taken(facts, now):
            return False
        # a job without a hello may still be importing
        is_late = now - self.parts.orders.ordered_at > self.parts.context.host.order_patience_s
        return is_late or any(rank.opaque for rank in facts.ranks) or has_no_agent(self.parts.orders.desired.spec)

    def trouble(self) -> str:
        """Return why a migration, or a stop at the ordered level, cannot continue; else the last checkpoint's error."""
        parts, wanted = self.parts, self.parts.orders.wanted
        reason = self.parts.context.pages.foreign or parts.incoming.trouble or parts.images.trouble
        reason = reason or parts.devices.refusal(wanted.order.number) or parts.devices.trouble
        reason = reason or parts.rank_errors.under(wanted.order, parts.saving.saved_request)
        if reason:
            return reason
        facts = parts.facts()
        if is_beyond(facts):
            why = parts.rank_errors.reason("BOUNDARIES") or "this job has no boundaries"
            what = wanted.level.name if wanted.intent is OrderIntent.PARK else "a move"
            return f"{why}: {what} is not possible"
        is_to_rest = self._phase is PartPhase.STOPPING and wanted.intent is OrderIntent.PARK
        is_imaged = parts.images.are_possible and wanted.level is ParkLevel.CHECKPOINT
        is_imaged = is_imaged or is_to_be_taken(facts, time.monotonic())
        is_to_rest = is_to_rest and not wanted.asks_to_leave and not is_imaged
        if is_to_rest and not parts.freezer.frozen and has_opaque_rank(facts, time.monotonic()):
            return f"this job has no boundaries: {wanted.level.name} is not possible"
        if wanted.intent in (OrderIntent.PREPARE, OrderIntent.HAND_OVER):
            return parts.escalation.given_up  # nothing else stands in the way of a move
        reason = parts.launching.trouble or parts.memory.trouble or parts.pinning.trouble
        return reason or parts.saving.keeper.trouble or self.parts.context.host.storage.trouble

    def progress(self) -> tuple[PageSample, float, float] | None:
        """Return the newest sample, steps per second and data-wait share since the last call; None before the first
        boundary."""
        if not self._can_read:
            return None
        if self.parts.orders.is_by_rotation and self._phase is not PartPhase.RUNNING:
            self.parts.step_rate.forget()
            self.parts.utilization.forget()
            return None
        return self.parts.step_rate.measure()

    def utilization(self, data_wait_share: float) -> float | None:
        """Return the utilization of its devices since the last call, 0 to 1; None where nothing reports it."""
        return self.parts.utilization.measure(data_wait_share)

    def metrics(self) -> tuple[ReportedMetric, ...]:
        """Return the named values that the job has reported through its first rank."""
        if (
            not self.parts.launching.is_done
            or 0 not in self.parts.context.part.ranks
            or not self.parts.context.pages.readable
        ):
            return ()
        return metrics.read(self.parts.context.pages[0])

    def stall_reason(self) -> str:
        """Return why a gang that should run makes no progress; empty otherwise."""
        has_begun = self._phase in (PartPhase.STARTING, PartPhase.RUNNING)
        should_run = has_begun and self.parts.orders.wanted.intent is OrderIntent.RUN
        return self.parts.stall_watch.stall_reason(self._can_read and should_run)


def observe(report: GangReport) -> agent_pb2.ObservedGang:
    """Return the state of a gang as one message; equal messages mean that nothing changed."""
    parts, context, desired = report.parts, report.parts.context, report.parts.orders.desired
    judgement, order, master = report.judged
    phase, level, stop_sequence, stop_step = judgement.phase, judgement.level, order.stop_sequence, judgement.stop_step
    is_sliced = bool(order.order.set_epoch) and master.intent == agent_pb2.INTENT_RUN
    if is_sliced:
        # for the master a time-sliced gang runs, whichever slice is active
        if phase is not PartPhase.ENDED:
            phase, level = PartPhase.RUNNING if report.has_stepped else PartPhase.STARTING, ParkLevel.NONE
        stop_sequence = stop_step = 0
    elif order.order.set_epoch:
        stop_sequence = master.stop_sequence
    message = agent_pb2.ObservedGang(
        job=desired.job,
        job_uid=desired.job_uid,
        epoch=desired.epoch,
        order=order_key_to_wire(replace(order.order, master_sequence=master.order.master_sequence)),
        phase=agent_pb2.ObservedGang.Phase.ValueType(phase),
        level=job_pb2.SuspendLevel.ValueType(level),
        stop_sequence=stop_sequence,
        stop_step=stop_step,
        trouble=report.trouble(),
        claim_device_mask=desired.claim.device_mask,
        repin_done=parts.pinning.repin_done,
        cores=() if is_sliced else _core_texts(context),
    )
    for rank, process in sorted(parts.exits.processes.items()):
        if parts.exits.is_live(rank):
            message.ranks.add(rank=rank, pid=process.pid, start_ticks=process.start_ticks)
    if phase is PartPhase.PARKED and level is ParkLevel.OFFLOAD:
        message.residue_bytes.extend(parts.memory.residue)
        message.kept_memory_bytes = parts.memory.kept_bytes
    if judgement.outcome is not None:
        message.outcome.CopyFrom(_outcome_to_wire(judgement.outcome))
    published = parts.saving.keeper.published
    if published is not None:
        message.checkpoint.CopyFrom(_checkpoint_to_wire(published))
    if context.pages.readable:
        _add_page_figures(message, report)
        if not is_sliced:
            _add_step_times(message, report, judgement.phase)
    elif context.pages.foreign:
        add_capabilities(message, GangFindings(parts, parts.facts()))
    return message


def _core_texts(context: GangContext) -> list[str]:
    """Return the cores of each local rank; none for a gang without cores."""
    cores, group = context.host.cores, context.paths.group
    return [format_ids(ids) for ids in cores.split(group, len(context.part.ranks))] if group in cores.held else []


def _outcome_to_wire(outcome: PartOutcome) -> agent_pb2.Outcome:
    return agent_pb2.Outcome(
        kind=agent_pb2.Outcome.Kind.ValueType(outcome.kind),
        exit_code=outcome.exit_code,
        rank=outcome.rank,
        message=outcome.message,
        checkpoints=[_checkpoint_to_wire(one) for one in outcome.found],
    )


def _checkpoint_to_wire(checkpoint: FoundCheckpoint) -> job_pb2.Checkpoint:
    return job_pb2.Checkpoint(
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        create_time=timestamp(int(checkpoint.time_s)),
    )


def add_metrics(progress: job_pb2.Progress, reported: Iterable[ReportedMetric]) -> None:
    for metric in reported:
        progress.metrics.add(name=metric.name, value=metric.value, step=metric.step)


def _add_page_figures(message: agent_pb2.ObservedGang, report: GangReport) -> None:
    parts, context = report.parts, report.parts.context
    found = [context.pages.progress(rank) for rank in context.part.ranks]
    message.threads = parts.pinning.threads()
    add_capabilities(message, GangFindings(parts, parts.facts(), found))
    per_device = [
        -(-progress.peak_device_bytes // max(1, mask.bit_count()))
        for progress, mask in zip(found, context.part.device_masks, strict=True)
    ]
    # in whole 64 MiB: a peak that creeps is no news
    peak = max(per_device)
    if message.capabilities.offload_by:
        # what takes its device away needs an arena, however small
        peak = max(peak, parts.devices.peak_bytes, 1)
    message.peak_device_bytes = -(-peak // (64 << 20)) * (64 << 20)
    if message.phase in (agent_pb2.ObservedGang.PHASE_PARKED, agent_pb2.ObservedGang.PHASE_ENDED):
        _add_progress(message.progress, report, found)


def _add_progress(message: job_pb2.Progress, report: GangReport, found: Sequence[PageProgress]) -> None:
    """Add the progress of an attempt that is parked or has ended. Steps that it repeats do not count as its own."""
    if any(progress.phase == PagePhase.REPLAY for progress in found):
        return
    slowest = min(found, key=lambda progress: progress.step)
    message.step, message.samples, message.loss = slowest.step, slowest.samples, slowest.loss
    message.data_wait_share = _waited(slowest)
    add_metrics(message, report.metrics())


@cache
def _booted_ns() -> int:
    """Return the Unix time, in ns, of zero on the clock of the pages. Read once, so that the time of a step stays the
    same in every report."""
    return time.time_ns() - now_ns()


def _add_step_times(message: agent_pb2.ObservedGang, report: GangReport, phase: PartPhase) -> None:
    """Add the fields that every time slice would change."""
    context = report.parts.context
    found = [context.pages.progress(rank) for rank in context.part.ranks]
    if phase in (PartPhase.PARKED, PartPhase.STOPPING):
        message.arena_bytes = min(sum(progress.arena_size for progress in found), _BYTES_LIMIT)
    last, first = [one.step_time_ns for one in found], [one.first_step_time_ns for one in found]
    if phase is PartPhase.PARKED and all(last):
        message.last_step_time.CopyFrom(timestamp_of_ns(_booted_ns() + max(last)))
    if phase is PartPhase.RUNNING and all(first):
        message.first_step_time.CopyFrom(timestamp_of_ns(_booted_ns() + max(first)))


def _waited(progress: PageProgress) -> float:
    """The share of an attempt's time that went into waiting for data; from its first step to its last."""
    seconds = progress.step_time_ns - progress.first_step_time_ns
    return min(1.0, progress.data_wait_ns / seconds) if progress.first_step_time_ns and seconds > 0 else 0.0
