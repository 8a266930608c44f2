"""NodeService: what operators call, with time-slice groups and quarantined gangs as they see them."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from ganger import __version__
from ganger.cluster.view import LoadMode
from ganger.job_state import JobState
from ganger.v1 import node_pb2, node_pb2_grpc, resources_pb2
from ganger.wire import errors, times
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire.endpoints import address_for_clients
from ganger.wire.methods import CallerIdentity, is_name
from ganger.wire.servers import Callers
from msgspec.structs import replace

from ganger_master.core import commands, quarantine, rollback
from ganger_master.core.answers import Done, JobAnswer, NodeAnswer
from ganger_master.core.commands import ObservedSlices
from ganger_master.core.gang_model import Gang, TimesliceGroup
from ganger_master.core.node_model import AccessToken, Stray
from ganger_master.core.state import State
from ganger_master.core.timeslice_groups import running_row
from ganger_master.decision_log import log_file, recorder
from ganger_master.rpc.access import new_token
from ganger_master.rpc.answer_messages import (
    ENTRIES_AT_ONCE,
    PAGE_MOST,
    PageRoom,
    VisibleState,
    expect,
    page_token,
    place_of,
)
from ganger_master.rpc.job_messages import level_to_wire
from ganger_master.rpc.node_selection_messages import (
    partitions_to_wire,
    reservation_from_wire,
    reservation_to_wire,
    reservation_update_from_wire,
)
from ganger_master.rpc.planner_messages import REASON_MOST
from ganger_master.runtime.writer import Writer


def node_set_to_wire(
    node_set: TimesliceGroup, gangs: Mapping[int, Gang], seen: Mapping[tuple[int, str], ObservedSlices]
) -> node_pb2.NodeSet:
    """Return the newest slice matrix, without gangs that are gone and rows that are empty.

    `seen`: the slices that nodes reported, as `running_row` takes them.
    """
    matrix, running = node_set.newest, running_row(node_set, seen)
    rows = [[names.job_name(gangs[epoch].job) for epoch in row if epoch in gangs] for row in matrix.rows]
    return node_pb2.NodeSet(
        name=names.node_set_name(node_set.number),
        nodes=[names.node_name(node) for node in node_set.nodes],
        leader=names.node_name(node_set.leader),
        version=matrix.version,
        quantum=times.duration(matrix.quantum_s),
        level=level_to_wire(matrix.level),
        slices=[node_pb2.NodeSet.Slice(jobs=row) for row in rows if row],
        is_changing=node_set.coming is not None,
        active_slice=0 if running is None or running[0] != matrix.version else _shown(rows, running[1]),
    )


def _shown(rows: Sequence[Sequence[str]], row: int) -> int:
    """Return the position of a slice among the slices with jobs, from 1; zero for an empty slice."""
    return sum(1 for own in rows[: row + 1] if own) if rows[row] else 0


# Words of a command, and characters of a word, so that a list of many gangs fits into one message.
_WORDS_MOST = 32
_CHARACTERS_MOST = 200


def gangs_to_wire(state: State) -> Iterator[node_pb2.QuarantinedGang]:
    """Yield all quarantined gangs, by job and epoch."""
    parts: dict[tuple[int, str, int], dict[str, Stray]] = {}
    for uid in state.nodes.strays_of:
        for name in sorted(state.nodes.strays_of[uid]):
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
    order = next((part.newest_order for part in parts.values() if part.newest_order is not None), None)
    if order is not None:
        message.user = order.user
        if order.spec is not None:
            message.display_name = order.spec.display_name
            message.command.extend([word[:_CHARACTERS_MOST] for word in order.spec.command[:_WORDS_MOST]])
    return message


def _token_to_wire(token: AccessToken) -> node_pb2.Token:
    return node_pb2.Token(
        name=token.name,
        user=token.user,
        create_time=times.timestamp(token.create_time),
        expire_time=times.timestamp(token.expiry),
        revoke_time=times.timestamp(token.revoke_time) if token.revoke_time else None,
        creator=token.creator,
    )


_MODES: Final = {LoadMode.SPREAD: resources_pb2.LOAD_MODE_SPREAD, LoadMode.PACK: resources_pb2.LOAD_MODE_PACK}

# Where one is in the list of nodes and node sets: the kind of an entry, and its node or number.
_Place: TypeAlias = tuple[int, Any]
_FIRST: Final[_Place] = (0, "")


def _place_of(name: str) -> _Place:
    if name.startswith("nodes/"):
        return 0, names.parse_node_name(name)
    return 1, names.parse_node_set_name(name)


class NodeService(node_pb2_grpc.NodeServiceServicer):
    def __init__(
        self,
        writer: Writer,
        shown: VisibleState,
        callers: Callers,
        is_held: Callable[[str], bool],
        captures: Path,
        token_address: Callable[[], str],
    ) -> None:
        self._writer = writer
        self._shown = shown
        self._callers = callers
        self._started = writer.now()
        self._is_held = is_held
        self._captures = captures
        self._token_address = token_address

    async def ListNodes(self, request: node_pb2.ListNodesRequest, context: Any) -> node_pb2.ListNodesResponse:
        size = min(request.page_size, PAGE_MOST) or sys.maxsize
        committed = self._writer.committed
        response, room, last = node_pb2.ListNodesResponse(), PageRoom(size), ""
        kinds: set[str] = set()
        for message in self._after(place_of(request.page_token, _place_of, _FIRST), self._callers.of(context)):
            news = []
            kind_name = message.configuration_set if isinstance(message, node_pb2.Node) else ""
            # A node that was never accepted has none.
            if kind_name and kind_name not in kinds:
                kind = committed.configuration_sets[kind_name]
                news.append(convert.configuration_set_to_wire(kind))
            if not room.take(message, *news):
                response.next_page_token = page_token(last)
                break
            response.configuration_sets.extend(news)
            kinds.update(kind.name for kind in news)
            if isinstance(message, node_pb2.NodeSet):
                response.node_sets.append(message)
            else:
                response.nodes.append(message)
            last = message.name
            if (len(response.nodes) + len(response.node_sets)) % ENTRIES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return response

    def _after(self, place: _Place, caller: CallerIdentity) -> Iterator[node_pb2.Node | node_pb2.NodeSet]:
        """Yield nodes by name, then node sets by number. Other calls are served meanwhile, so some may have gone."""
        committed = self._writer.committed
        fallen_at_once = self._shown.fallen_at_once()
        for node in self._shown.node_names():
            if (0, node) > place:
                with suppress(errors.NodeNotFound):
                    yield self._shown.node(node, caller, fallen_at_once)
        for number in sorted(committed.sets):
            node_set = committed.sets.get(number)
            if (1, number) > place and node_set is not None:
                yield node_set_to_wire(node_set, committed.gangs, self._writer.state.gangs.rows_seen)

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Any) -> node_pb2.Node:
        return self._shown.node(names.parse_node_name(request.name), self._callers.of(context))

    async def DrainNode(self, request: node_pb2.DrainNodeRequest, context: Any) -> node_pb2.Node:
        node, user = self._named(request.name, context)
        return await self._change(commands.DrainNode(node, request.reason[:REASON_MOST], user), context)

    async def CordonNode(self, request: node_pb2.CordonNodeRequest, context: Any) -> node_pb2.Node:
        node, user = self._named(request.name, context)
        return await self._change(commands.CordonNode(node, request.reason[:REASON_MOST], user), context)

    async def UncordonNode(self, request: node_pb2.UncordonNodeRequest, context: Any) -> node_pb2.Node:
        node, user = self._named(request.name, context)
        return await self._change(commands.UncordonNode(node, user, request.test), context)

    async def DeclareNodeLost(self, request: node_pb2.DeclareNodeLostRequest, context: Any) -> node_pb2.Node:
        node = names.parse_node_name(request.name)
        if self._is_held(node):
            raise errors.NodeAlive(f"the daemon of nodes/{node} is connected: stop it first, or drain the node")
        return await self._change(commands.DeclareLost(node, self._callers.of(context).name), context)

    async def RemoveNode(self, request: node_pb2.RemoveNodeRequest, context: Any) -> node_pb2.RemoveNodeResponse:
        node = names.parse_node_name(request.name)
        if self._is_held(node):
            raise errors.NodeAlive(f"the daemon of nodes/{node} is connected: stop it first")
        expect(await self._writer.submit(commands.RemoveNode(node, self._callers.of(context).name)), Done)
        return node_pb2.RemoveNodeResponse()

    async def ListPartitions(
        self, request: node_pb2.ListPartitionsRequest, context: Any
    ) -> node_pb2.ListPartitionsResponse:
        committed = self._writer.committed
        return partitions_to_wire(self._writer.state, committed.jobs.values(), committed.gangs)

    async def CreateReservation(self, request: node_pb2.CreateReservationRequest, context: Any) -> node_pb2.Reservation:
        # Ranges may stand for many names.
        reservation = await asyncio.to_thread(reservation_from_wire, request.reservation)
        command = commands.ReserveNodes(reservation, self._callers.of(context).name)
        expect(await self._writer.submit(command), Done)
        return reservation_to_wire(replace(reservation, user=command.user), self._writer.now())

    async def UpdateReservation(self, request: node_pb2.UpdateReservationRequest, context: Any) -> node_pb2.Reservation:
        # Ranges may stand for many names.
        update = await asyncio.to_thread(reservation_update_from_wire, request)
        expect(await self._writer.submit(replace(update, user=self._callers.of(context).name)), Done)
        found = self._writer.committed.reservations.get(request.name)
        if found is None:
            raise errors.ReservationNotFound(f"reservation {request.name!r} has just ended")
        return reservation_to_wire(found, self._writer.now())

    async def ListReservations(
        self, request: node_pb2.ListReservationsRequest, context: Any
    ) -> node_pb2.ListReservationsResponse:
        now, known = self._writer.now(), self._writer.committed.reservations
        after = place_of(request.page_token, str, "")
        found, room = node_pb2.ListReservationsResponse(), PageRoom(min(request.page_size, PAGE_MOST) or sys.maxsize)
        for name in sorted(name for name in known if name > after):
            message = reservation_to_wire(known[name], now)
            if not room.take(message):
                found.next_page_token = page_token(found.reservations[-1].name)
                break
            found.reservations.append(message)
        return found

    async def DeleteReservation(
        self, request: node_pb2.DeleteReservationRequest, context: Any
    ) -> node_pb2.DeleteReservationResponse:
        expect(
            await self._writer.submit(commands.DeleteReservation(request.name, self._callers.of(context).name)), Done
        )
        return node_pb2.DeleteReservationResponse()

    async def CreateToken(self, request: node_pb2.CreateTokenRequest, context: Any) -> node_pb2.Token:
        if not self._token_address():
            raise errors.NotSupported("this master takes no access tokens: start it with --listen-tokens HOST:PORT")
        if not is_name(request.user):
            raise errors.RequestInvalid("user: letters, digits, '.', '-', '_', @, at most 63")
        name, text, digest = new_token(request.user)
        lasts_s, caller = times.seconds(request.lifetime), self._callers.of(context).name
        command = commands.CreateToken(name, digest, request.user, lasts_s, caller)
        expect(await self._writer.submit(command), Done)
        message = _token_to_wire(self._writer.committed.tokens[name])
        message.text = text
        return message

    async def ListTokens(self, request: node_pb2.ListTokensRequest, context: Any) -> node_pb2.ListTokensResponse:
        known, after = self._writer.committed.tokens, place_of(request.page_token, str, "")
        found, room = node_pb2.ListTokensResponse(), PageRoom(min(request.page_size or PAGE_MOST, PAGE_MOST))
        for name in sorted([name for name in known if name > after]):
            message = _token_to_wire(known[name])
            if not room.take(message):
                found.next_page_token = page_token(found.tokens[-1].name)
                break
            found.tokens.append(message)
        return found

    async def RevokeToken(self, request: node_pb2.RevokeTokenRequest, context: Any) -> node_pb2.Token:
        expect(await self._writer.submit(commands.RevokeToken(request.name, self._callers.of(context).name)), Done)
        return _token_to_wire(self._writer.committed.tokens[request.name])

    async def GetCluster(self, request: node_pb2.GetClusterRequest, context: Any) -> node_pb2.Cluster:
        committed, state = self._writer.committed, self._writer.state
        jobs = Counter(job.state for job in committed.jobs.values())
        devices = sum(committed.configuration_sets[node.configuration_set].devices for node in committed.nodes.values())
        # A device shared by several gangs counts once.
        on_nodes: dict[str, int] = {}
        for gang in committed.gangs.values():
            for claim in gang.held:
                on_nodes[claim.node] = on_nodes.get(claim.node, 0) | claim.device_mask
        held = sum(mask.bit_count() for mask in on_nodes.values())
        return node_pb2.Cluster(
            version=__version__,
            view_version=committed.view_version,
            start_time=times.timestamp(self._started),
            policy=state.settings.policy,
            jobs_pending=jobs[JobState.PENDING],
            jobs_holding=jobs[JobState.HOLDING],
            jobs_suspended=jobs[JobState.SUSPENDED],
            devices=devices,
            devices_held=held,
            verdicts_approved=state.counters.approved,
            verdicts_rejected=self._writer.meter.rejections.total(),
            storage=state.settings.storage,
            event_sequence=committed.counters.next_event - 1,
            load_mode=_MODES[committed.mode],
            restore=self._restore(),
            token_address=address_for_clients(self._token_address()) if self._token_address() else "",
            current_time=times.timestamp(self._writer.now()),
        )

    def _restore(self) -> node_pb2.Restore | None:
        restoring, state = self._writer.committed.counters.restoring, self._writer.state
        if restoring is None:
            return None
        return node_pb2.Restore(
            reason=restoring.why,
            notice_time=times.timestamp(restoring.since),
            awaited_nodes=[names.node_name(name) for name in rollback.awaited(state)],
        )

    async def ListQuarantinedGangs(
        self, request: node_pb2.ListQuarantinedGangsRequest, context: Any
    ) -> node_pb2.ListQuarantinedGangsResponse:
        return node_pb2.ListQuarantinedGangsResponse(gangs=gangs_to_wire(self._writer.state))

    async def EndQuarantinedGang(
        self, request: node_pb2.EndQuarantinedGangRequest, context: Any
    ) -> node_pb2.EndQuarantinedGangResponse:
        uid, epoch = names.parse_quarantined_gang_name(request.name)
        command = commands.EndQuarantined(uid, epoch, self._callers.of(context).name)
        expect(await self._writer.submit(command), Done)
        return node_pb2.EndQuarantinedGangResponse()

    async def AdoptQuarantinedGang(
        self, request: node_pb2.AdoptQuarantinedGangRequest, context: Any
    ) -> node_pb2.AdoptQuarantinedGangResponse:
        uid, epoch = names.parse_quarantined_gang_name(request.name)
        command = commands.AdoptQuarantined(uid, epoch, self._callers.of(context).name)
        number = expect(await self._writer.submit(command), JobAnswer).number
        return node_pb2.AdoptQuarantinedGangResponse(job=names.job_name(number))

    async def SettleRestore(
        self, request: node_pb2.SettleRestoreRequest, context: Any
    ) -> node_pb2.SettleRestoreResponse:
        missing = [names.node_name(name) for name in rollback.awaited(self._writer.state)]
        expect(await self._writer.submit(commands.GoOn(self._callers.of(context).name)), Done)
        return node_pb2.SettleRestoreResponse(missing_nodes=missing)

    async def RecordDecisions(self, request: node_pb2.RecordDecisionsRequest, context: Any) -> node_pb2.Recording:
        seconds = times.seconds(request.duration)
        if not 0.0 < seconds <= recorder.MOST_S:
            raise errors.RequestInvalid(f"duration: more than zero, at most {recorder.MOST_S:g} s")
        recording = recorder.DecisionRecording(
            self._captures,
            __version__,
            with_environment=request.with_environment,
            most_bytes=request.max_bytes or log_file.MOST_BYTES,
        )
        try:
            found = await recorder.record(self._writer, recording, seconds)
        except log_file.RecordingError as error:
            raise errors.NotRecorded(str(error)) from error
        return node_pb2.Recording(
            path=str(found.path),
            end_reason=found.reason,
            duration=times.duration(found.seconds),
            commands=found.commands,
            batches=found.batches,
            size_bytes=found.size_bytes,
        )

    def _named(self, name: str, context: Any) -> tuple[str, str]:
        """Return the node's id and the caller's name. Raises NameInvalid."""
        return names.parse_node_name(name), self._callers.of(context).name

    async def _change(self, command: commands.Command, context: Any) -> node_pb2.Node:
        name = expect(await self._writer.submit(command), NodeAnswer).name
        return self._shown.node(name, self._callers.of(context))
