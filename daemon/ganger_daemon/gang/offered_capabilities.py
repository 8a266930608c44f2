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

from ganger_daemon.core.gang_judgement import has_opaque_rank
from ganger_daemon.core.mechanism import NO_SIGNAL, MechanismFacts, choose_mechanism, keeps_state
from ganger_daemon.core.part_facts import GangPart
from ganger_daemon.gang.gang_parts import GangParts

# Beside the levels' names in Capabilities.missing: why the job can go to no other process, whatever can be parked.
MOVE = "MOVE"
# Why an elastic job has to stay at its number of ranks.
RESIZE = "RESIZE"
# Why it does not share devices in turns, although it can be suspended.
TURNS = "TURNS"
# An agent that offers one of these does not run its script again.
_SAVED_OTHERWISE = Capability.ADAPTER | Capability.FIVE_LINE | Capability.IMAGE
# Imports and data take their time on a busy machine.
_LATEST_REPORT_S = 20.0
_FOREIGN = "its control page is of another version of Ganger"


@dataclass(frozen=True, slots=True)
class GangFindings:
    """What the daemon has found out about a gang. `pages`: progress of the local ranks; empty where their pages are of
    another version."""

    parts: GangParts
    facts: GangPart
    pages: Sequence[PageProgress] = ()

    @property
    def desired(self) -> agent_pb2.DesiredGang:
        return self.parts.orders.desired


def is_still_looking(progress: PageProgress) -> bool:
    """Return whether the agent of an unmodified script has not seen a whole step yet: then it promises no more than
    PAUSE."""
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
            message.capabilities_presumed = True
            for capability in list(capabilities.missing):
                capabilities.missing[capability] = "that is not known before its first step"
    elif found.desired.spec.mechanism not in (job_pb2.MECHANISM_SIGNAL, job_pb2.MECHANISM_NONE):
        return
    else:
        capabilities.missing["PAUSE"] = "no agent has reported so far"
    _add_mechanism(message, found)


def _is_saved_anyway(found: GangFindings) -> bool:
    """Return whether a job whose agent does not report can be saved all the same, and has had the time to report: a
    script without an optimizer of PyTorch has an agent that never does."""
    return found.parts.images.are_possible and time.monotonic() - found.facts.launched_at >= _LATEST_REPORT_S


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
            # a suspend without a level is to let it save itself
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
        # without a look at the files of reasons, in every report
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
    if found.desired.spec.gpus_max:
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
    capabilities.can_checkpoint = has_images and context.host.storage.proved
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
    _add_sizes(capabilities, found, able)


def _add_sizes(capabilities: job_pb2.Capabilities, found: GangFindings, able: int) -> None:
    """Add whether another number of ranks can go on from the job's state. `able`: what all ranks can."""
    capabilities.can_resize = bool(able & Capability.RESIZE)
    capabilities.can_reshard = bool(able & Capability.RESHARD)
    if capabilities.can_resize or capabilities.can_reshard:
        capabilities.resize_divides = math.gcd(*[progress.resize_divides for progress in found.pages])
    if capabilities.can_resize or not found.desired.spec.gpus_max:
        return
    if capabilities.can_reshard:
        capabilities.missing[RESIZE] = (
            "its state is sharded, and only a checkpoint on storage has all of it: suspend the job with "
            "`--level checkpoint`, resize it, and resume it"
        )
    elif able & Capability.FIVE_LINE:
        capabilities.missing[RESIZE] = "its log says why, or it has made no job.dataloader yet"
    else:
        why = "an unmodified script goes on with as many ranks as before: attach it to change that"
        capabilities.missing[RESIZE] = why
