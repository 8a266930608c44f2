"""Reports on one gang for the master: its observed state with what it offers; apart from it steps, rates and losses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from ganger.agent.v1 import agent_pb2
from ganger.injob import metrics
from ganger.injob.metrics import ReportedMetric
from ganger.injob.page import PageProgress, now_ns
from ganger.injob.page_layout import Capability, PagePhase
from ganger.protocol.gang_orders import DesiredOrder, Mechanism, OrderIntent, ParkLevel
from ganger.v1 import job_pb2
from ganger.wire.resource_names import node_name
from ganger.wire.times import timestamp, timestamp_of_ns

from ganger_daemon.core.gang_judgement import Judgement, PartPhase, has_opaque_rank, is_beyond, is_to_be_taken
from ganger_daemon.core.part_facts import (
    NO_SIGNAL,
    FoundCheckpoint,
    GangPart,
    MechanismFacts,
    PartOutcome,
    choose_mechanism,
    keeps_state,
)
from ganger_daemon.gang.gang_context import GangContext, order_key_to_wire
from ganger_daemon.gang.gang_memory import WorkingSet, rounded_up
from ganger_daemon.gang.gang_parts import GangParts
from ganger_daemon.gang.launch_plan import has_no_agent, ranks_of_role
from ganger_daemon.gang.step_rate import PageSample, slowest_of
from ganger_daemon.node.core_table import format_ids

# Sums of a job's own numbers; a message holds no larger one.
_BYTES_LIMIT = (1 << 62) - 1


class JudgedState(NamedTuple):
    """A judgement, with the order and the master's desired state that it is about. Newer ones are pending."""

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
        # A job without a hello may still be importing.
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
            return parts.escalation.given_up  # Nothing else stands in the way of a move
        reason = parts.launching.trouble or parts.memory.trouble or parts.pinning.trouble
        return reason or parts.saving.keeper.trouble or self.parts.context.host.storage.trouble

    def progress(self) -> tuple[PageSample, float, float] | None:
        """Return the newest sample, steps/s and data-wait share since the last call; None before the first boundary."""
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

    def working_set(self) -> WorkingSet:
        """Return the memory of its processes, measured now if the gang runs."""
        if self._phase is PartPhase.RUNNING:
            self.parts.working_set.measure(time.monotonic())
        return self.parts.working_set

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
        # For the master a time-sliced gang runs, whichever slice is active.
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
    ran_unseen = parts.launching.is_done and has_no_agent(desired.spec)
    message.has_stepped = phase is PartPhase.ENDED and (report.has_stepped or ran_unseen)
    message.devices_idle = phase is PartPhase.RUNNING and parts.idle_watch.is_idle
    message.working_set_bytes = rounded_up(parts.working_set.peak_bytes)
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
    has_cores = context.paths.group in context.host.cores.held
    return [format_ids(ids) for ids in context.cores_by_rank().values()] if has_cores else []


def _outcome_to_wire(outcome: PartOutcome) -> agent_pb2.Outcome:
    return agent_pb2.Outcome(
        kind=agent_pb2.Outcome.Kind.ValueType(outcome.kind),
        exit_code=outcome.exit_code,
        rank=outcome.rank,
        message=outcome.message,
        checkpoints=[_checkpoint_to_wire(one) for one in outcome.found],
        node_fault=outcome.node_fault,
    )


def _checkpoint_to_wire(checkpoint: FoundCheckpoint) -> job_pb2.Checkpoint:
    return job_pb2.Checkpoint(
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        create_time=timestamp(int(checkpoint.time_s)),
        nodes=[node_name(node) for node in checkpoint.nodes],
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
    # In whole 64 MiB: a peak that creeps is no news.
    peak = max(per_device)
    if message.capabilities.offload_by:
        # What takes its device away needs an arena, however small.
        peak = max(peak, parts.devices.peak_bytes, 1)
    message.peak_device_bytes = -(-peak // (64 << 20)) * (64 << 20)
    if message.phase in (agent_pb2.ObservedGang.PHASE_PARKED, agent_pb2.ObservedGang.PHASE_ENDED):
        stepping = [context.pages.progress(rank) for rank in parts.step_rate.ranks]
        _add_progress(message.progress, report, stepping)


def _add_progress(message: job_pb2.Progress, report: GangReport, found: Sequence[PageProgress]) -> None:
    """Add the progress of an attempt that is parked or has ended. Steps that it repeats do not count as its own."""
    if any(progress.phase == PagePhase.REPLAY for progress in found):
        return
    slowest = slowest_of(found)
    message.step, message.samples, message.loss = slowest.step, slowest.samples, slowest.loss
    training_ns = slowest.step_time_ns - slowest.first_step_time_ns
    if slowest.first_step_time_ns and training_ns > 0:
        message.data_wait_share = min(1.0, slowest.data_wait_ns / training_ns)
    add_metrics(message, report.metrics())


@cache
def _booted_ns() -> int:
    """Return the Unix time, in ns, of zero on the clock of the pages. Read once, so that the time of a step stays the
    same in every report."""
    return time.time_ns() - now_ns()


def _add_step_times(message: agent_pb2.ObservedGang, report: GangReport, phase: PartPhase) -> None:
    context = report.parts.context
    found = [context.pages.progress(rank) for rank in context.part.ranks]
    if phase in (PartPhase.PARKED, PartPhase.STOPPING):
        message.arena_bytes = min(sum(progress.arena_size for progress in found), _BYTES_LIMIT)
    last, first = [one.step_time_ns for one in found], [one.first_step_time_ns for one in found]
    if phase is PartPhase.PARKED and all(last):
        message.last_step_time.CopyFrom(timestamp_of_ns(_booted_ns() + max(last)))
    if phase is PartPhase.RUNNING and all(first):
        message.first_step_time.CopyFrom(timestamp_of_ns(_booted_ns() + max(first)))


# Beside the levels' names in Capabilities.missing: why the job can go to no other process, whatever can be parked.
MOVE = "MOVE"
# Why an elastic job has to stay at its number of ranks.
RESIZE = "RESIZE"
# Why it is not time-sliced although it can be suspended.
TURNS = "TURNS"
# An agent that offers one of these does not run its script again.
_SAVED_OTHERWISE = Capability.ADAPTER | Capability.FIVE_LINE | Capability.IMAGE
# Imports and data take their time on a busy machine.
_LATEST_REPORT_S = 20.0
_FOREIGN = "its control page is of another version of Ganger"


@dataclass(frozen=True, slots=True)
class GangFindings:
    """What the daemon has found out about a gang. `pages`: progress of local ranks; empty for another version."""

    parts: GangParts
    facts: GangPart
    pages: Sequence[PageProgress] = ()

    @property
    def desired(self) -> agent_pb2.DesiredGang:
        return self.parts.orders.desired


def is_still_looking(progress: PageProgress) -> bool:
    """Return whether the agent of an unmodified script has seen no whole step yet: it offers no more than PAUSE."""
    return progress.capabilities == Capability.PAUSE and not progress.first_step_time_ns


def is_by_signal(parts: GangParts) -> bool:
    """Return whether the script is to save itself at a signal, as far as known now."""
    if not parts.orders.desired.spec.stop_signal:
        return False
    context = parts.context
    pages = [context.pages.progress(rank) for rank in context.part.ranks] if context.pages.readable else []
    return choose_mechanism(_facts_now(GangFindings(parts, parts.facts(), pages))).mechanism is Mechanism.SIGNAL


def add_capabilities(message: agent_pb2.ObservedGang, found: GangFindings) -> None:
    """Add what the gang offers to the report on it. As long as that depends on agents, nothing is added until every
    rank's agent has reported, or is known not to."""
    capabilities = message.capabilities
    if (why := _why_without_agent(found)) is not None:
        is_certain = not found.pages or _is_certainly_opaque(found)
        message.capabilities_presumed = not (is_certain or found.facts.no_agent or _is_saved_anyway(found))
        _add_without_agent(capabilities, found, why, is_certain)
    elif all(progress.hello_time_ns for progress in found.pages):
        _add_of_agent(capabilities, found)
        if any(map(is_still_looking, found.pages)):
            # A script may save itself at its signal and never make a step.
            message.capabilities_presumed = not (found.desired.spec.stop_signal and _is_saved_anyway(found))
            for capability in list(capabilities.missing):
                capabilities.missing[capability] = "that is not known before its first step"
    elif found.desired.spec.mechanism not in (job_pb2.MECHANISM_SIGNAL, job_pb2.MECHANISM_NONE):
        return
    else:
        capabilities.missing["PAUSE"] = "no agent has reported so far"
    _add_mechanism(message, found)


def _is_saved_anyway(found: GangFindings) -> bool:
    """Return whether a job whose agent does not report can be saved nevertheless. It must have had the time to report:
    the agent of a script without an optimizer of PyTorch never does."""
    is_saved = found.parts.images.are_possible or bool(found.desired.spec.stop_signal)
    return is_saved and time.monotonic() - found.facts.launched_at >= _LATEST_REPORT_S


def _is_certainly_opaque(found: GangFindings) -> bool:
    is_opaque = any(rank.opaque and (rank.exit is None or rank.imaged) for rank in found.facts.ranks)
    return is_opaque or found.desired.spec.agent == job_pb2.JobSpec.AGENT_NONE


def _why_without_agent(found: GangFindings) -> str | None:
    """Return why no agent carries out orders in this gang; None if one does, or may still report."""
    if not found.pages:
        return _FOREIGN
    if not has_opaque_rank(found.facts, time.monotonic()) and not found.parts.images.has_ended:
        return None
    # A shell may start a Python whose agent reports later.
    return "no agent" if _is_certainly_opaque(found) else "no agent has reported so far"


def _add_mechanism(message: agent_pb2.ObservedGang, found: GangFindings) -> None:
    """Add the mechanism in use, and what it offers beside the agent or in its place."""
    capabilities, facts = message.capabilities, _facts_now(found)
    choice = choose_mechanism(facts)
    is_settled = None not in (facts.attached, facts.adapter, facts.replay)
    if choice.mechanism is not Mechanism.NONE or is_settled or facts.wish is Mechanism.NONE:
        capabilities.mechanism = job_pb2.Mechanism.ValueType(choice.mechanism)
    for mechanism, reason in choice.refused:
        capabilities.refused_mechanisms.add(mechanism=job_pb2.Mechanism.ValueType(mechanism), reason=reason)
    is_without_agent = facts.wish in (Mechanism.SIGNAL, Mechanism.NONE)
    is_unmet = facts.wish is not Mechanism.UNSPECIFIED and choice.mechanism is Mechanism.NONE and bool(choice.refused)
    if is_without_agent or is_unmet or (is_settled and not keeps_state(facts.wish, _common_bits(found))):
        why = f"it was submitted with --mechanism {facts.wish.name.lower()}"
        why = f"{why}, which does not apply: {choice.refused[0][1]}" if is_unmet else why
        _withdraw_in_place(capabilities)
        capabilities.can_offload = capabilities.can_checkpoint = False
        capabilities.can_resize = capabilities.can_reshard = False
        capabilities.missing.update({"OFFLOAD": why, "CHECKPOINT": why})
        message.capabilities_presumed = message.capabilities_presumed and not is_without_agent
    if choice.mechanism is Mechanism.SIGNAL:
        # The script saves itself, wherever it keeps its files.
        capabilities.can_checkpoint = True
        for name in ("CHECKPOINT", MOVE):
            capabilities.missing.pop(name, None)
        if capabilities.offload_by:
            # A suspend without a level is to let it save itself.
            _withdraw_in_place(capabilities)
            capabilities.missing["OFFLOAD"] = "it saves itself at a signal"


def _withdraw_in_place(capabilities: job_pb2.Capabilities) -> None:
    """Take back what `_add_in_place` has added."""
    if capabilities.offload_by:
        capabilities.can_offload, capabilities.offload_by = False, ""
        for name in (MOVE, TURNS):
            capabilities.missing.pop(name, None)


def _facts_now(found: GangFindings) -> MechanismFacts:
    spec, images = found.desired.spec, found.parts.images
    facts = MechanismFacts(
        wish=Mechanism(spec.mechanism),
        nodes=len(found.desired.members),
        image="" if images.are_possible else images.why_not(found.desired),
        signal="" if spec.stop_signal else NO_SIGNAL,
    )
    if (why := _why_without_agent(found)) is not None:
        why = found.parts.rank_errors.reason("BOUNDARIES") or why
        return replace(facts, attached=why, adapter=why, replay=why)
    if not all(progress.hello_time_ns for progress in found.pages):
        return facts
    able = _common_bits(found)
    reason = found.parts.rank_errors.reason
    attached = "" if able & Capability.FIVE_LINE else "the script does not attach itself"
    is_strongest = not attached and facts.wish is Mechanism.UNSPECIFIED
    if is_strongest or any(map(is_still_looking, found.pages)):
        # Without a look at the files of reasons, in every report.
        return replace(facts, attached=attached)
    adapter = replay = ""
    if not able & Capability.ADAPTER:
        adapter = reason("ADAPTER") or "it imports no trainer that Ganger knows"
    if not able & Capability.CHECKPOINT or able & _SAVED_OTHERWISE:
        replay = reason("CHECKPOINT") or ("its log says why" if attached else "the script attaches itself")
    return replace(facts, attached=attached, adapter=adapter, replay=replay)


def _common_bits(found: GangFindings) -> int:
    able = ~0
    for progress in found.pages:
        able &= progress.capabilities
    return able


def _add_without_agent(capabilities: job_pb2.Capabilities, found: GangFindings, why: str, is_certain: bool) -> None:
    """`why`: the reason to give where the agent itself reported none."""
    agent_reason = found.parts.rank_errors.reason("BOUNDARIES") if is_certain or found.facts.no_agent else ""
    context, why = found.parts.context, agent_reason or why
    if may_change_size(found):
        capabilities.missing[RESIZE] = f"{why}: its state cannot be carried to another number of ranks"
    freezer = context.host.cgroups.capabilities.get("freeze", "none")
    is_whole = context.part.world == len(context.part.ranks)
    capabilities.can_pause = is_whole and not freezer.startswith("none")
    if not is_whole:
        capabilities.missing["PAUSE"] = f"{why}: on several nodes some ranks would stop within a collective operation"
    elif not capabilities.can_pause:
        capabilities.missing["PAUSE"] = f"{why}, and processes cannot be frozen on this node ({freezer})"
    if found.pages and (is_certain or found.facts.no_agent):
        _add_in_place(capabilities, found, why)
    else:
        capabilities.missing["OFFLOAD"] = f"{why}: its state cannot be moved out of the device"
    has_images = bool(found.pages) and found.parts.images.are_possible
    capabilities.can_checkpoint = has_images and context.proved_storage is not None
    if not capabilities.can_checkpoint:
        capabilities.missing["CHECKPOINT"] = agent_reason or f"{why}: its state cannot be saved and restored"
        if capabilities.can_offload:
            capabilities.missing[MOVE] = capabilities.missing["CHECKPOINT"]


def _add_in_place(capabilities: job_pb2.Capabilities, found: GangFindings, why: str) -> None:
    """Add whether the devices can be taken from processes without an agent. `why`: they have none."""
    if obstacle := found.parts.devices.why_not(found.desired):
        capabilities.missing["OFFLOAD"] = f"{why}, and {obstacle}"
        return
    capabilities.can_offload, capabilities.offload_by = True, found.parts.devices.means
    capabilities.missing[TURNS] = f"{why}: taking its devices away takes longer than a time slice should"


def _add_of_agent(capabilities: job_pb2.Capabilities, found: GangFindings) -> None:
    parts, context, able = found.parts, found.parts.context, _common_bits(found)
    capabilities.can_pause = bool(able & Capability.PAUSE)
    capabilities.can_offload = bool(able & Capability.OFFLOAD)
    capabilities.can_checkpoint = bool(able & Capability.CHECKPOINT) and context.proved_storage is not None
    if not capabilities.can_pause:
        capabilities.missing["PAUSE"] = "the script has no boundaries the agent could find"
    if not capabilities.can_offload:
        why = parts.rank_errors.reason("OFFLOAD") or parts.rank_errors.reason("CHECKPOINT")
        capabilities.missing["OFFLOAD"] = why or "the agent cannot move this job's state out of the device"
    if able & Capability.CHECKPOINT and context.proved_storage is None:
        capabilities.missing["CHECKPOINT"] = "the storage of this node is not the cluster's"
    elif not capabilities.can_checkpoint:
        why = parts.rank_errors.reason("CHECKPOINT") or "its log says why"
        capabilities.missing["CHECKPOINT"] = f"the agent cannot bring this script back in a new process: {why}"
        capabilities.missing[MOVE] = capabilities.missing["CHECKPOINT"]
    _add_sizes(capabilities, found, able)


def may_change_size(found: GangFindings) -> bool:
    """Return whether the job may have other numbers of ranks."""
    return found.desired.spec.gpus_max > 0 or bool(found.parts.context.part.roles)


def _add_sizes(capabilities: job_pb2.Capabilities, found: GangFindings, able: int) -> None:
    """Add whether another number of ranks can resume from the job's state. `able`: what all ranks can."""
    part = found.parts.context.part
    if part.roles:
        # Each role has its own state: only a checkpoint has all of it.
        any_size = Capability.RESIZE | Capability.RESHARD
        capabilities.can_reshard = all(progress.capabilities & any_size for progress in found.pages)
        divided = dict(zip(part.ranks, [progress.resize_divides for progress in found.pages], strict=True))
        of_roles = [ranks_of_role(part.roles, name) for name in part.roles]
        capabilities.role_divides.extend([math.gcd(*[divided.get(rank, 0) for rank in ranks]) for ranks in of_roles])
    else:
        capabilities.can_resize = bool(able & Capability.RESIZE)
        capabilities.can_reshard = bool(able & Capability.RESHARD)
    if capabilities.can_resize or (capabilities.can_reshard and not part.roles):
        capabilities.resize_divides = math.gcd(*[progress.resize_divides for progress in found.pages])
    if capabilities.can_resize or not may_change_size(found) or (part.roles and capabilities.can_reshard):
        return
    if capabilities.can_reshard:
        capabilities.missing[RESIZE] = (
            "its state is sharded, and only a checkpoint on storage has all of it: suspend the job with "
            "`--level checkpoint`, resize it, and resume it"
        )
    elif able & Capability.FIVE_LINE:
        why = ", or a rank has neither made a job.dataloader nor attached with shard=" if part.roles else ""
        capabilities.missing[RESIZE] = f"its log says why{why or ', or it has made no job.dataloader yet'}"
    else:
        why = "an unmodified script goes on with as many ranks as before: attach it to change that"
        capabilities.missing[RESIZE] = why
