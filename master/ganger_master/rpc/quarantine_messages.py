"""Quarantined gangs as operators see them."""

from __future__ import annotations

from collections.abc import Iterator

from ganger.v1 import node_pb2
from ganger.wire import resource_names as names

from ganger_master.core import quarantine
from ganger_master.core.model import Stray
from ganger_master.core.state import State

# Words of a command, and characters of a word, so that a list of many gangs fits into one message.
_WORDS_MOST = 32
_CHARACTERS_MOST = 200


def gangs_to_wire(state: State) -> Iterator[node_pb2.QuarantinedGang]:
    """Yield all quarantined gangs, by job and epoch."""
    parts: dict[tuple[int, str, int], dict[str, Stray]] = {}
    for uid in state.strays_of:
        for name in sorted(state.strays_of[uid]):
            for stray in state.nodes[name].strays:
                if stray.uid == uid and stray.quarantined:
                    parts.setdefault((stray.job, uid, stray.epoch), {})[name] = stray
    for key in sorted(parts):
        yield _gang_to_wire(state, parts[key])


def _gang_to_wire(state: State, parts: dict[str, Stray]) -> node_pb2.QuarantinedGang:
    first = next(iter(parts.values()))
    job = state.jobs.get(first.job)
    message = node_pb2.QuarantinedGang(
        name=names.quarantined_gang_name(first.uid, first.epoch),
        job=names.job_name(first.job) if first.job else "",
        job_uid=first.uid,
        job_known=job is not None and job.uid == first.uid,
        epoch=first.epoch,
        reason=first.note,
        adoption_refusal=quarantine.adoption_refusal(state, parts),
    )
    for name, stray in parts.items():
        message.parts.add(node=names.node_name(name), device_mask=stray.device_mask, phase=stray.phase.value)
    told = next((part.told for part in parts.values() if part.told is not None), None)
    if told is not None:
        message.user = told.user
        if told.spec is not None:
            message.display_name = told.spec.display_name
            message.command.extend([word[:_CHARACTERS_MOST] for word in told.spec.command[:_WORDS_MOST]])
    return message
