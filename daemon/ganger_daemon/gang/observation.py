"""Observed state of one gang for the master, and the detection of stalls. Steps, rates and losses go apart."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import psutil
from ganger.agent.v1 import agent_pb2
from ganger.injob.metrics import ReportedMetric
from ganger.injob.page import Capability, PageProgress, now_ns
from ganger.protocol.gang_orders import ParkLevel
from ganger.v1 import job_pb2
from google.protobuf import timestamp_pb2

from ganger_daemon.core import stall_detection as core
from ganger_daemon.core.gang_judgement import RankPhase, is_opaque
from ganger_daemon.core.outcomes import FoundCheckpoint, PartOutcome, PartPhase
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.gang.desired_messages import order_key_to_wire

if TYPE_CHECKING:
    from ganger_daemon.checkpoints.gang_checkpoints import Published
    from ganger_daemon.gang.gang import LocalGang

# Beside the levels' names in Capabilities.missing: why the job can go to no other process, whatever can be parked.
MOVE = "MOVE"
# Why an elastic job has to stay at its number of ranks.
RESIZE = "RESIZE"

# Sums of a job's own numbers; a message holds no larger one.
_BYTES_LIMIT = (1 << 62) - 1


def observe(gang: LocalGang) -> agent_pb2.ObservedGang:
    """Return the present state of a gang as one message; equal messages mean that nothing changed."""
    # of the order that was judged: a newer one is not carried out yet
    desired, judgement, order, told = gang.desired, gang.judgement, gang.judged_order, gang.judged_master_desired
    phase, level, stop_sequence, stop_step = judgement.phase, judgement.level, order.stop_sequence, judgement.stop_step
    takes_turns = bool(order.order.set_epoch) and told.intent == agent_pb2.INTENT_RUN
    if takes_turns:
        # for the master a time-sliced gang runs, whichever slice is active
        if phase is not PartPhase.ENDED:
            phase, level = PartPhase.RUNNING if gang.has_stepped else PartPhase.STARTING, ParkLevel.NONE
        stop_sequence = stop_step = 0
    elif order.order.set_epoch:
        stop_sequence = told.stop_sequence
    message = agent_pb2.ObservedGang(
        job=desired.job,
        job_uid=desired.job_uid,
        epoch=desired.epoch,
        order=order_key_to_wire(replace(order.order, master_sequence=told.order.master_sequence)),
        phase=agent_pb2.ObservedGang.Phase.ValueType(phase),
        level=job_pb2.SuspendLevel.ValueType(level),
        stop_sequence=stop_sequence,
        stop_step=stop_step,
        trouble=gang.trouble(),
        claim_device_mask=desired.claim.device_mask,
        repin_done=gang.pinning.repin_done,
        cores=() if takes_turns else gang.host.core_texts(gang.paths.group, len(gang.part.ranks)),
    )
    for rank, process in sorted(gang.deaths.processes.items()):
        if gang.deaths.is_live(rank):
            message.ranks.add(rank=rank, pid=process.pid, start_ticks=process.start_ticks)
    if phase is PartPhase.PARKED and level is ParkLevel.OFFLOAD:
        message.residue_bytes.extend(gang.memory.residue)
        message.kept_memory_bytes = gang.memory.kept_bytes
    if judgement.outcome is not None:
        message.outcome.CopyFrom(_outcome_to_wire(judgement.outcome))
    published = gang.saving.keeper.published
    if published is not None:
        message.checkpoint.CopyFrom(_checkpoint_to_wire(published, published.time_seconds))
    if gang.pages.readable:
        _add_what_pages_say(message, gang)
        if not takes_turns:
            _add_where_it_stands(message, gang)
    elif gang.pages.foreign:
        _add_what_an_opaque_job_can(message.capabilities, gang, "its control page is of another version of Ganger")
    return message


def _outcome_to_wire(outcome: PartOutcome) -> agent_pb2.Outcome:
    return agent_pb2.Outcome(
        kind=agent_pb2.Outcome.Kind.ValueType(outcome.kind),
        exit_code=outcome.exit_code,
        rank=outcome.rank,
        message=outcome.message,
        checkpoints=[_checkpoint_to_wire(one, one.time_s) for one in outcome.found],
    )


def _checkpoint_to_wire(checkpoint: FoundCheckpoint | Published, time_s: float) -> job_pb2.Checkpoint:
    return job_pb2.Checkpoint(
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        create_time=timestamp_pb2.Timestamp(seconds=int(time_s)),
    )


def is_still_looking(progress: PageProgress) -> bool:
    """Whether the agent of an unmodified script has not seen a whole step yet: then it promises no more than PAUSE."""
    return progress.capabilities == Capability.PAUSE and not progress.first_step_time_ns


def add_metrics(progress: job_pb2.Progress, metrics: Iterable[ReportedMetric]) -> None:
    for metric in metrics:
        progress.metrics.add(name=metric.name, value=metric.value, step=metric.step)


def _add_what_pages_say(message: agent_pb2.ObservedGang, gang: LocalGang) -> None:
    found = [gang.pages.progress(rank) for rank in gang.part.ranks]
    message.threads = gang.pinning.threads()
    per_device = [
        -(-progress.peak_device_bytes // max(1, mask.bit_count()))
        for progress, mask in zip(found, gang.part.device_masks, strict=True)
    ]
    # in whole 64 MiB: a peak that creeps is no news
    message.peak_device_bytes = -(-max(per_device) // (64 << 20)) * (64 << 20) if max(per_device) else 0
    if message.phase in (agent_pb2.ObservedGang.PHASE_PARKED, agent_pb2.ObservedGang.PHASE_ENDED):
        _add_progress(message.progress, gang, found)
    now = time.monotonic()
    facts = gang.facts()
    live = [rank for rank in facts.ranks if rank.exit is None]
    if live and any(is_opaque(facts, rank, now) for rank in live):
        is_certain = any(rank.opaque for rank in live) or gang.desired.spec.agent == job_pb2.JobSpec.AGENT_NONE
        message.capabilities_presumed = not is_certain and not facts.no_agent
        # A shell may start a Python whose agent reports later.
        why = "no agent" if is_certain else "no agent has reported so far"
        agent_reason = "" if message.capabilities_presumed else gang.rank_errors.reason("BOUNDARIES")
        _add_what_an_opaque_job_can(message.capabilities, gang, why, agent_reason)
    elif all(progress.hello_time_ns for progress in found):
        _add_what_the_agent_can(message.capabilities, gang, found)
        if any(map(is_still_looking, found)):
            message.capabilities_presumed = True
            for what in list(message.capabilities.missing):
                message.capabilities.missing[what] = "that is not known before its first step"


def _add_progress(message: job_pb2.Progress, gang: LocalGang, found: Sequence[PageProgress]) -> None:
    """Add the progress of an attempt that is parked or has ended. Steps that it repeats do not count as its own."""
    if any(progress.phase == RankPhase.REPLAY for progress in found):
        return
    slowest = min(found, key=lambda progress: progress.step)
    message.step, message.samples, message.loss = slowest.step, slowest.samples, slowest.loss
    message.data_wait_share = _waited(slowest)
    add_metrics(message, gang.metrics())


@cache
def _booted_ns() -> int:
    """Return the Unix time, in ns, of zero on the clock of the pages. Read once, so that the time of a step stays the
    same in every report."""
    return time.time_ns() - now_ns()


def _add_where_it_stands(message: agent_pb2.ObservedGang, gang: LocalGang) -> None:
    """Add the fields that every time slice would change."""
    found = [gang.pages.progress(rank) for rank in gang.part.ranks]
    if gang.judgement.phase in (PartPhase.PARKED, PartPhase.STOPPING):
        message.arena_bytes = min(sum(progress.arena_size for progress in found), _BYTES_LIMIT)
    if gang.judgement.phase is PartPhase.PARKED and all(progress.step_time_ns for progress in found):
        message.last_step_time.FromNanoseconds(_booted_ns() + max(progress.step_time_ns for progress in found))
    if gang.judgement.phase is PartPhase.RUNNING and all(progress.first_step_time_ns for progress in found):
        message.first_step_time.FromNanoseconds(_booted_ns() + max(progress.first_step_time_ns for progress in found))


def _waited(progress: PageProgress) -> float:
    """The share of an attempt's time that went into waiting for data; from its first step to its last."""
    seconds = progress.step_time_ns - progress.first_step_time_ns
    return min(1.0, progress.data_wait_ns / seconds) if progress.first_step_time_ns and seconds > 0 else 0.0


def _add_what_an_opaque_job_can(
    capabilities: job_pb2.Capabilities, gang: LocalGang, why: str, agent_reason: str = ""
) -> None:
    """`agent_reason`: the reason that the agent itself reported, if any; `why`: the one to give otherwise."""
    why = agent_reason or why
    if gang.desired.spec.gpus_max:
        capabilities.missing[RESIZE] = f"{why}: its state cannot be carried to another number of ranks"
    freezer = gang.host.cgroups.capabilities.get("freeze", "none")
    is_whole = gang.part.world == len(gang.part.ranks)
    capabilities.pause = is_whole and not freezer.startswith("none")
    if not is_whole:
        capabilities.missing["PAUSE"] = f"{why}: on several nodes some ranks would stop within a collective operation"
    elif not capabilities.pause:
        capabilities.missing["PAUSE"] = f"{why}, and processes cannot be frozen on this node ({freezer})"
    capabilities.missing["OFFLOAD"] = agent_reason or f"{why}: its state cannot be moved out of the device"
    capabilities.missing["CHECKPOINT"] = agent_reason or f"{why}: its state cannot be saved and restored"


def _add_what_the_agent_can(capabilities: job_pb2.Capabilities, gang: LocalGang, found: Sequence[PageProgress]) -> None:
    able = ~0
    for progress in found:
        able &= progress.capabilities
    capabilities.pause = bool(able & Capability.PAUSE)
    capabilities.offload = bool(able & Capability.OFFLOAD)
    capabilities.checkpoint = bool(able & Capability.CHECKPOINT) and gang.host.storage.proved
    if not capabilities.pause:
        capabilities.missing["PAUSE"] = "the script has no boundaries the agent could find"
    if not capabilities.offload:
        why = gang.rank_errors.reason("OFFLOAD") or gang.rank_errors.reason("CHECKPOINT")
        capabilities.missing["OFFLOAD"] = why or "the agent cannot move this job's state out of the device"
    if able & Capability.CHECKPOINT and not gang.host.storage.proved:
        capabilities.missing["CHECKPOINT"] = "the storage of this node is not the cluster's"
    elif not capabilities.checkpoint:
        why = gang.rank_errors.reason("CHECKPOINT") or "its log says why"
        capabilities.missing["CHECKPOINT"] = f"the agent cannot bring this script back in a new process: {why}"
        capabilities.missing[MOVE] = capabilities.missing["CHECKPOINT"]
    capabilities.resize = bool(able & Capability.RESIZE)
    if capabilities.resize:
        capabilities.resize_divides = math.gcd(*[progress.resize_divides for progress in found])
    elif gang.desired.spec.gpus_max:
        capabilities.missing[RESIZE] = (
            "its log says why, or it has made no job.dataloader yet"
            if able & Capability.FIVE_LINE
            else "an unmodified script goes on with as many ranks as before: attach it to change that"
        )


_PROCESSES_SECONDS = 60.0


class Watching:
    """Stall detection for one gang's local ranks."""

    def __init__(self, pages: ControlPages, ranks: tuple[int, ...]) -> None:
        self._pages = pages
        self._ranks = ranks
        self._watched: core.Watched | None = None
        self._processes_at = 0.0

    def stall_reason(self, is_running: bool) -> str:
        """Return why the gang makes no progress, or an empty text. `is_running`: it should run and its pages can be
        read."""
        now = time.monotonic()
        if not is_running:
            self._watched = None
            return ""
        found = {rank: self._pages.progress(rank) for rank in self._ranks}
        counters = {
            rank: core.RankCounters(progress.step, progress.phase, progress.data_wait_ns / 1e9)
            for rank, progress in found.items()
        }
        self._watched = core.seen(self._watched or core.Watched(now), counters, now)
        return core.stall_reason(self._watched, now)

    async def look_at_processes(self, pids: Iterable[int], now: float) -> None:
        """Measure the CPU time of a job without boundaries, once a minute."""
        if self._watched is None or now - self._processes_at < _PROCESSES_SECONDS:
            return
        self._processes_at = now
        seconds = await asyncio.to_thread(processor_seconds, tuple(pids))
        if self._watched is not None:
            self._watched = core.used(self._watched, seconds, now)


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time in seconds of processes and their descendants, with ended ones that their parents reaped."""
    found = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    found += times.user + times.system + times.children_user + times.children_system
    return found
