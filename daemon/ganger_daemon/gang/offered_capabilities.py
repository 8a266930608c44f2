"""What one gang offers: its mechanism, its park levels, and why others are missing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ganger.agent.v1 import agent_pb2
from ganger.injob.page import PageProgress
from ganger.injob.page_layout import Capability
from ganger.protocol.gang_orders import Mechanism
from ganger.v1 import job_pb2

from ganger_daemon.core.gang_judgement import GangPart, has_opaque_rank
from ganger_daemon.core.mechanism import NO_SIGNAL, MechanismFacts, choose_mechanism
from ganger_daemon.gang.gang_context import GangContext
from ganger_daemon.gang.gang_parts import GangParts

# Beside the levels' names in Capabilities.missing: why the job can go to no other process, whatever can be parked.
MOVE = "MOVE"
# Why an elastic job has to stay at its number of ranks.
RESIZE = "RESIZE"
_FOREIGN = "its control page is of another version of Ganger"


@dataclass(frozen=True, slots=True)
class GangFindings:
    """What the daemon has found out about a gang. `pages`: progress of the local ranks; empty where their pages are of
    another version."""

    context: GangContext
    desired: agent_pb2.DesiredGang
    parts: GangParts
    facts: GangPart
    pages: Sequence[PageProgress] = ()


def is_still_looking(progress: PageProgress) -> bool:
    """Return whether the agent of an unmodified script has not seen a whole step yet: then it promises no more than
    PAUSE."""
    return progress.capabilities == Capability.PAUSE and not progress.first_step_time_ns


def mechanism_facts(desired: agent_pb2.DesiredGang) -> MechanismFacts:
    """Return what is known about the mechanism of a gang before it starts."""
    spec = desired.spec
    return MechanismFacts(
        wish=Mechanism(spec.mechanism),
        nodes=len(desired.members),
        signal="" if spec.stop_signal else NO_SIGNAL,
    )


def add_capabilities(message: agent_pb2.ObservedGang, found: GangFindings) -> None:
    """Add what the gang offers to the report on it. Nothing is added until every rank's agent has reported, or is known
    not to."""
    if not found.pages:
        _add_without_agent(message, found, _FOREIGN)
    elif has_opaque_rank(found.facts, time.monotonic()):
        is_certain = any(rank.opaque and rank.exit is None for rank in found.facts.ranks)
        is_certain = is_certain or found.desired.spec.agent == job_pb2.JobSpec.AGENT_NONE
        message.capabilities_presumed = not is_certain and not found.facts.no_agent
        # A shell may start a Python whose agent reports later.
        why = "no agent" if is_certain else "no agent has reported so far"
        agent_reason = "" if message.capabilities_presumed else found.parts.rank_errors.reason("BOUNDARIES")
        _add_without_agent(message, found, why, agent_reason)
    elif all(progress.hello_time_ns for progress in found.pages):
        _add_of_agent(message.capabilities, found)
        if any(map(is_still_looking, found.pages)):
            message.capabilities_presumed = True
            for capability in list(message.capabilities.missing):
                message.capabilities.missing[capability] = "that is not known before its first step"


def _add_mechanism(capabilities: job_pb2.Capabilities, facts: MechanismFacts) -> None:
    choice = choose_mechanism(facts)
    is_settled = None not in (facts.attached, facts.adapter, facts.replay)
    if choice.mechanism is not Mechanism.NONE or is_settled:
        capabilities.mechanism = job_pb2.Mechanism.ValueType(choice.mechanism)
    for mechanism, reason in choice.refused:
        capabilities.refused_mechanisms.add(mechanism=job_pb2.Mechanism.ValueType(mechanism), reason=reason)


def _add_without_agent(message: agent_pb2.ObservedGang, found: GangFindings, why: str, agent_reason: str = "") -> None:
    """`agent_reason`: the reason that the agent itself reported, if any; `why`: the one to give otherwise."""
    context, capabilities, why = found.context, message.capabilities, agent_reason or why
    if found.desired.spec.gpus_max:
        capabilities.missing[RESIZE] = f"{why}: its state cannot be carried to another number of ranks"
    freezer = context.host.cgroups.capabilities.get("freeze", "none")
    is_whole = context.part.world == len(context.part.ranks)
    capabilities.can_pause = is_whole and not freezer.startswith("none")
    if not is_whole:
        capabilities.missing["PAUSE"] = f"{why}: on several nodes some ranks would stop within a collective operation"
    elif not capabilities.can_pause:
        capabilities.missing["PAUSE"] = f"{why}, and processes cannot be frozen on this node ({freezer})"
    capabilities.missing["OFFLOAD"] = agent_reason or f"{why}: its state cannot be moved out of the device"
    capabilities.missing["CHECKPOINT"] = agent_reason or f"{why}: its state cannot be saved and restored"
    _add_mechanism(capabilities, replace(mechanism_facts(found.desired), attached=why, adapter=why, replay=why))


def _add_of_agent(capabilities: job_pb2.Capabilities, found: GangFindings) -> None:
    context, parts, able = found.context, found.parts, ~0
    for progress in found.pages:
        able &= progress.capabilities
    capabilities.can_pause = bool(able & Capability.PAUSE)
    capabilities.can_offload = bool(able & Capability.OFFLOAD)
    capabilities.can_checkpoint = bool(able & Capability.CHECKPOINT) and context.host.storage.proved
    if not capabilities.can_pause:
        capabilities.missing["PAUSE"] = "the script has no boundaries the agent could find"
    if not capabilities.can_offload:
        why = parts.rank_errors.reason("OFFLOAD") or parts.rank_errors.reason("CHECKPOINT")
        capabilities.missing["OFFLOAD"] = why or "the agent cannot move this job's state out of the device"
    if able & Capability.CHECKPOINT and not context.host.storage.proved:
        capabilities.missing["CHECKPOINT"] = "the storage of this node is not the cluster's"
    elif not capabilities.can_checkpoint:
        why = parts.rank_errors.reason("CHECKPOINT") or "its log says why"
        capabilities.missing["CHECKPOINT"] = f"the agent cannot bring this script back in a new process: {why}"
        capabilities.missing[MOVE] = capabilities.missing["CHECKPOINT"]
    capabilities.can_resize = bool(able & Capability.RESIZE)
    capabilities.can_reshard = bool(able & Capability.RESHARD)
    if capabilities.can_resize or capabilities.can_reshard:
        capabilities.resize_divides = math.gcd(*[progress.resize_divides for progress in found.pages])
    if capabilities.can_reshard:
        capabilities.missing[RESIZE] = (
            "its state is sharded, and only a checkpoint on storage has all of it: suspend the job with "
            "`--level checkpoint`, resize it, and resume it"
        )
    elif not capabilities.can_resize and found.desired.spec.gpus_max:
        capabilities.missing[RESIZE] = (
            "its log says why, or it has made no job.dataloader yet"
            if able & Capability.FIVE_LINE
            else "an unmodified script goes on with as many ranks as before: attach it to change that"
        )
    _add_mechanism(capabilities, _facts_of_agent(found, able))


def _facts_of_agent(found: GangFindings, able: int) -> MechanismFacts:
    """Return the facts about the mechanism. `able`: the capabilities that all ranks report."""
    reason = found.parts.rank_errors.reason
    attached = "" if able & Capability.FIVE_LINE else "the script does not attach itself"
    adapter: str | None = (
        "" if able & Capability.ADAPTER else reason("ADAPTER") or "it imports no trainer that Ganger knows"
    )
    is_replayed = able & Capability.CHECKPOINT and not able & (Capability.ADAPTER | Capability.FIVE_LINE)
    replay: str | None = "" if is_replayed else reason("CHECKPOINT") or "its log says why"
    if any(map(is_still_looking, found.pages)):
        adapter = replay = None
    return replace(mechanism_facts(found.desired), attached=attached, adapter=adapter, replay=replay)
