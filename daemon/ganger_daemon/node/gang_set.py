"""All gangs of this node: application of desired sets, adoption after a restart, and the observed set."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, ParkLevel
from ganger.wire.times import seconds
from google.protobuf import json_format

from ganger_daemon.core.gang_judgement import (
    Absence,
    Action,
    Forget,
    GangId,
    Here,
    Obey,
    Observed,
    PartPhase,
    ReportGone,
    Start,
    StopAbsent,
    reconcile,
)
from ganger_daemon.core.part_facts import PartOutcome, PartOutcomeKind
from ganger_daemon.gang.gang_context import DesiredInvalidError, recall, wanted_of
from ganger_daemon.gang.local_gang import LocalGang
from ganger_daemon.node.daemon_files import read_json, write_json
from ganger_daemon.node.node_context import NodeContext, PeerCalls
from ganger_daemon.node.slice_rotation import Rotation, collide

log = logging.getLogger(__name__)

# Jobs whose last epoch is remembered so that it never starts again; the oldest are forgotten first.
_FINISHED_LIMIT = 10_000
# Interval of warnings about gangs that take long to adopt.
_JUDGED_S = 10.0


class GangSet:
    """The gangs of this node. All methods run on the event loop."""

    def __init__(self, host: NodeContext, peers: PeerCalls) -> None:
        self._host = host
        self._peers = peers
        self._gangs: dict[GangId, LocalGang] = {}
        self._tasks: dict[GangId, asyncio.Task[None]] = {}
        self._journal = host.paths.state / "finished.json"
        # By job uid, oldest end first: how the newest gang of the job that ended here, and was acknowledged, ended.
        self._ends = {uid: _end_of(uid, fields) for uid, fields in read_json(self._journal).items()}
        # Rendezvous addresses of gangs that this node led and has forgotten.
        self.met: dict[GangId, tuple[str, int]] = {}
        self._wanted_before: set[GangId] = set()
        self.rotation = Rotation(host, peers, self.all, self.blocked_by)
        self._rotating: asyncio.Task[None] | None = None
        self.refused: dict[GangId, str] = {}

    def adopt(self) -> None:
        """Take over every gang that has a directory here. Directories that cannot be read are logged and stay."""
        self.rotation.recall()
        children = self._host.launchers.children()
        for paths in self._host.paths.existing():
            desired = recall(read_json(paths.wanted), read_json(paths.gang))
            if desired is None or (desired.job_uid, desired.epoch) != (paths.job_uid, paths.epoch):
                log.warning("directory without a readable gang is left alone", extra={"path": str(paths.job)})
                continue
            try:
                gang = self._make(desired)
                # an account's ranks may have been restored by a launcher of this process's user
                gang.adopt(children.get(gang.context.paths.uid, {}) | children.get(os.geteuid(), {}))
            except (DesiredInvalidError, ValueError) as error:
                log.warning("gang cannot be adopted", extra={"path": str(paths.job), "error": str(error)})
                continue
            self._begin(gang)
        self._rotating = asyncio.create_task(self.rotation.run(), name="rotation")

    async def judged(self) -> None:
        """Wait until every adopted gang has been judged. A session must not open before: a gang that is missing in its
        first observed set counts as gone."""
        waiting = [asyncio.create_task(gang.judged.wait()) for gang in self._gangs.values()]
        while waiting:
            _, pending = await asyncio.wait(waiting, timeout=_JUDGED_S)
            if pending:
                log.warning("gangs are still being adopted", extra={"gangs": len(pending)})
            waiting = list(pending)

    def new_session(self) -> None:
        """Forget the desired sets of the earlier session: they do not prove that a gang may be stopped now."""
        self._wanted_before.clear()

    async def apply(
        self,
        desired: Iterable[agent_pb2.DesiredGang],
        acknowledged: frozenset[int],
        rows: Iterable[agent_pb2.DesiredSlices] = (),
        missing: frozenset[int] = frozenset(),
    ) -> frozenset[int]:
        """Apply one complete desired set. Idempotent. `missing`: epochs of gangs whose spec is still to come.

        Those that are not here are not started yet, and their epochs are returned."""
        self.rotation.set_desired(rows)
        messages: dict[GangId, agent_pb2.DesiredGang] = {}
        wanted: list[DesiredOrder] = []
        absent: set[int] = set()
        for message in desired:
            try:
                one = wanted_of(message)
            except DesiredInvalidError as error:
                log.error("desired gang not understood", extra={"job": message.job, "error": str(error)})
                continue
            here = self._gangs.get((one.job_uid, one.epoch))
            if one.epoch in missing and here is None:
                absent.add(one.epoch)
                continue
            if here is not None:
                here.set_kept_checkpoints(message.kept_checkpoints)
                here.try_memory(message.trial_memory_bytes)
                here.parts.idle_watch.after_s = seconds(message.idle_after)
            if here is not None and self.rotation.governs(here, one):
                # The rotation applies it when the gang's slice begins or ends.
                here.set_master_desired(message)
                one = replace(one, order=here.wanted.order)
            messages[one.job_uid, one.epoch] = message
            wanted.append(one)
        observed = Observed(
            {
                key: Here(gang.wanted.order, gang.phase is PartPhase.ENDED, gang.stop_wanted)
                for key, gang in self._gangs.items()
            },
            {one.job_uid: self._finished_epoch(one.job_uid) for one in wanted},
            frozenset(self._wanted_before),
        )
        self._wanted_before |= {(one.job_uid, one.epoch) for one in wanted}
        for action in reconcile(wanted, observed, acknowledged):
            try:
                await self._act(action, messages)
            except Exception:
                # A fault of one gang must not delay the others.
                log.exception("desired gang not applied", extra={"action": str(action)})
        if not absent:
            self.rotation.confirm_begun()
        self.rotation.follow()
        return frozenset(absent)

    def set_copy_peers(self, addresses: Mapping[int, Sequence[str]]) -> None:
        """Note by epoch the daemons that may keep a copy of a gang's checkpoints; gangs without any need none."""
        for (_, epoch), gang in self._gangs.items():
            gang.parts.saving.copy_peers = addresses.get(epoch, ())

    async def _act(self, action: Action, messages: Mapping[GangId, agent_pb2.DesiredGang]) -> None:
        match action:
            case Start(one):
                self._start(messages[one.job_uid, one.epoch])
            case Obey(one):
                self._gangs[one.job_uid, one.epoch].apply_order(messages[one.job_uid, one.epoch])
            case StopAbsent(key, why):
                log.info("gang stopped", extra={"job_uid": key[0], "epoch": key[1], "cause": why.value})
                self._gangs[key].stop(is_stale=why is Absence.OLDER_EPOCH)
            case ReportGone(one):
                kind = PartOutcomeKind.STOPPED if one.intent is OrderIntent.STOP else PartOutcomeKind.UNKNOWN
                gone = PartOutcome(kind, message="nothing of this gang is on this node")
                self._start(messages[one.job_uid, one.epoch], gone)
            case Forget(key):
                await self._forget(key)

    def observed(self, describe: frozenset[int] = frozenset()) -> list[agent_pb2.ObservedGang]:
        """The complete observed set, in a fixed order; gangs of the epochs `describe` with their desired state."""
        return [_described(gang) if gang.desired.epoch in describe else gang.observed for gang in self.all()]

    @property
    def finished(self) -> list[agent_pb2.FinishedGang]:
        """The newest acknowledged end of a gang here, for each job."""
        return list(self._ends.values())

    def all(self) -> tuple[LocalGang, ...]:
        return tuple(self._gangs[key] for key in sorted(self._gangs))

    def find(self, job_uid: str, epoch: int) -> LocalGang | None:
        return self._gangs.get((job_uid, epoch))

    @property
    def job_uids(self) -> frozenset[str]:
        """Return the jobs that have a gang here."""
        return frozenset([uid for uid, _ in self._gangs])

    def newest_epoch(self, job_uid: str) -> int:
        return max((epoch for uid, epoch in self._gangs if uid == job_uid), default=self._finished_epoch(job_uid))

    def is_finished(self, job_uid: str, epoch: int) -> bool:
        """Return whether this node's part of a gang has ended and is forgotten."""
        return self._finished_epoch(job_uid) == epoch

    def _finished_epoch(self, job_uid: str) -> int:
        end = self._ends.get(job_uid)
        return 0 if end is None else end.epoch

    def wake_all(self) -> None:
        for gang in self._gangs.values():
            gang.wake()

    async def close(self) -> None:
        """End all tasks. Every rank continues."""
        if self._rotating is not None:
            self._rotating.cancel()
            await asyncio.gather(self._rotating, return_exceptions=True)
        await self.rotation.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for gang in self._gangs.values():
            await gang.close()

    def _make(self, desired: agent_pb2.DesiredGang) -> LocalGang:
        def blocked_by(gang: LocalGang) -> str:
            return self.rotation.wait_reason(gang) or self.blocked_by(gang)

        return LocalGang(self._host, self._peers, desired, blocked_by, self._keeps_cores, self.rotation.news)

    def _start(self, desired: agent_pb2.DesiredGang, gone: PartOutcome | None = None) -> None:
        try:
            gang = self._make(desired)
        except (DesiredInvalidError, ValueError) as error:
            log.error("gang refused", extra={"job": desired.job, "error": str(error)})
            return
        if gone is None:
            intent = gang.wanted.intent.name
            log.info("gang starts", extra={"job": desired.job, "epoch": desired.epoch, "intent": intent})
        else:
            gang.mark_gone(gone)
        self._begin(gang)

    def _begin(self, gang: LocalGang) -> None:
        key = gang.uid_and_epoch
        self._gangs[key] = gang
        self._tasks[key] = asyncio.create_task(gang.run(), name=f"gang {key[0]} {key[1]}")
        self.rotation.news()

    async def _forget(self, key: GangId) -> None:
        gang = self._gangs.pop(key)
        task = self._tasks.pop(key)
        if gang.parts.launching.rendezvous.address is not None:
            self.met[key] = gang.parts.launching.rendezvous.address
            for first in list(self.met)[: max(0, len(self.met) - _FINISHED_LIMIT)]:
                del self.met[first]
        uid, epoch = key
        if epoch > self._finished_epoch(uid):
            self._ends.pop(uid, None)  # So that it comes last
            self._ends[uid] = _ended(gang)
            for old in list(self._ends)[: max(0, len(self._ends) - _FINISHED_LIMIT)]:
                del self._ends[old]
            fields = {other: json_format.MessageToDict(end) for other, end in self._ends.items()}
            await asyncio.to_thread(write_json, self._journal, fields, True)
        await gang.forget()
        await asyncio.gather(task, return_exceptions=True)
        if not any(other == uid for other, _ in self._gangs):
            await asyncio.to_thread(self._host.logs.forget, uid)
        self._host.changed()
        self.wake_all()

    def _keeps_cores(self, gang: LocalGang) -> str:
        """Return a job that still has cores that it is to give back; empty if there is none: a leaving one, or one that
        runs on with fewer, once its ranks have fewer threads.

        For the master a parked gang has no cores. A daemon that took over may find it with cores, and cannot release
        them before the gang is judged parked again or has ended."""
        for other in self._gangs.values():
            held = self._host.cores.millicores(other.context.paths.group)
            if other is not gang and held and (other.is_leaving or held > sum(other.desired.claim.millicores)):
                return other.desired.job
        return ""

    def blocked_by(self, gang: LocalGang) -> str:
        """Return a job that still uses the devices of a gang; empty if they are free.

        The daemon of a device starts no gang on it before it has seen the former one off. Gangs that the master
        co-locates are excepted: both claims show it."""
        for key, other in sorted(self._gangs.items()):
            if other is gang or not collide(gang, other):
                continue
            least = ParkLevel.PAUSE if self.rotation.share_paused(gang, other) else ParkLevel.OFFLOAD
            if not _holds_devices(other, least):
                continue
            if key[0] == gang.desired.job_uid and not gang.desired.restore.parked.alone:
                continue  # A migration onto the same devices: the source releases them at the boundary
            return other.desired.job
        return ""


def _described(gang: LocalGang) -> agent_pb2.ObservedGang:
    message = agent_pb2.ObservedGang()
    message.CopyFrom(gang.observed)
    message.newest_order.CopyFrom(gang.master_desired)
    message.in_time_slices = gang.wanted.order.is_by_rotation
    return message


def _ended(gang: LocalGang) -> agent_pb2.FinishedGang:
    observed = gang.observed
    end = agent_pb2.FinishedGang(
        job=observed.job,
        job_uid=observed.job_uid,
        epoch=observed.epoch,
        outcome=observed.outcome,
        nodes=len(gang.master_desired.members),
        has_stepped=observed.has_stepped,
    )
    if observed.HasField("checkpoint"):
        end.checkpoint.CopyFrom(observed.checkpoint)
    return end


def _end_of(uid: str, fields: Any) -> agent_pb2.FinishedGang:
    """Read the end of a gang from the journal. Earlier versions wrote the epoch alone."""
    if isinstance(fields, dict):
        with suppress(json_format.ParseError):
            return json_format.ParseDict(fields, agent_pb2.FinishedGang(), ignore_unknown_fields=True)
    epoch = fields if isinstance(fields, int) else 0
    return agent_pb2.FinishedGang(job_uid=uid, epoch=epoch)


def _holds_devices(gang: LocalGang, least: ParkLevel) -> bool:
    if gang.may_be_on_devices:
        return True
    return gang.phase is PartPhase.PARKED and gang.judgement.level < least
