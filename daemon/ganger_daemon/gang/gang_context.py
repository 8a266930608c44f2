"""One gang as the master desires it on this node: the message and the local ranks and devices that it names; the
context of its parts, which stays the same from the gang's start to its end; the orders that it has received; and the
errors of its ranks under them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ganger.agent.v1 import agent_pb2
from ganger.cluster.fit import share_of_cores
from ganger.cluster.resources import ConfigurationSet
from ganger.injob.page import now_ns
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, OrderKey, ParkLevel, by_signal, hastened
from ganger.text import os_failure
from ganger.v1 import job_pb2
from ganger.wire.times import duration, seconds
from google.protobuf import json_format

from ganger_daemon.checkpoints.storage import free_bytes
from ganger_daemon.core import gang_judgement
from ganger_daemon.core.part_facts import GangPart
from ganger_daemon.gang.control_pages import ControlPages, RunMark, page_order, write_details
from ganger_daemon.node.accounts import Account
from ganger_daemon.node.daemon_files import GangPaths, make_directory, read_json, write_hint
from ganger_daemon.node.node_context import NodeContext, PeerCalls

log = logging.getLogger(__name__)

DEFAULT_GRACE_S = 10.0
ACCOUNT = "account"
"""Field of gang.json beside those of the message: the account that its ranks run as."""


class DesiredInvalidError(Exception):
    """The message contradicts itself or does not concern this node."""


@dataclass(frozen=True, slots=True)
class CorePool:
    """Ranks of one role, and the millicores that these tasks request on this node together."""

    ranks: tuple[int, ...]
    millicores: int


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This node's share of a gang: global ranks ascending, and the devices of each. `pools`: its ranks by role, each
    with cores of its own; empty where all ranks share the gang's cores. `roles`: the tasks of each role in the whole
    gang, in the order of the ranks, of a job in which these numbers may change; else empty."""

    ranks: tuple[int, ...]
    device_masks: tuple[int, ...]
    world: int
    leads: bool
    pools: tuple[CorePool, ...] = ()
    # Its checkpoints are kept on its leader's own disk.
    on_nodes: bool = False
    roles: Mapping[str, int] = field(default_factory=dict)


def order_key(message: agent_pb2.OrderKey) -> OrderKey:
    return OrderKey(message.epoch, message.master_sequence, message.set_epoch, message.local_sequence)


def order_key_to_wire(key: OrderKey) -> agent_pb2.OrderKey:
    return agent_pb2.OrderKey(**asdict(key))


def wanted_of(desired: agent_pb2.DesiredGang) -> DesiredOrder:
    """Return a gang's order from its message. Raises DesiredInvalidError for an unknown intent or level."""
    key = order_key(desired.order)
    if key.epoch != desired.epoch:
        raise DesiredInvalidError(f"gang of epoch {desired.epoch} carries an order of epoch {key.epoch}")
    try:
        intent, level = OrderIntent(desired.intent), ParkLevel(desired.level)
    except ValueError as error:
        raise DesiredInvalidError(
            f"gang of epoch {desired.epoch}: {error}; the master is newer than this daemon"
        ) from error
    grace = seconds(desired.grace) if desired.HasField("grace") else DEFAULT_GRACE_S
    return DesiredOrder(
        job_uid=desired.job_uid,
        order=key,
        intent=intent,
        level=level if intent is OrderIntent.PARK else ParkLevel.NONE,
        stop_sequence=_stop_sequence(desired, intent),
        grace_s=grace,
        checkpoint_first=desired.checkpoint_first,
        moves_in=desired.restore.WhichOneof("source") == "parked",
    )


def _stop_sequence(desired: agent_pb2.DesiredGang, intent: OrderIntent) -> int:
    if intent in (OrderIntent.PARK, OrderIntent.HAND_OVER):
        return desired.stop_sequence or desired.order.master_sequence
    if intent is OrderIntent.STOP and desired.checkpoint_first:
        # the same on every node of the gang, which is all an agreement needs
        return desired.stop_sequence or desired.order.master_sequence
    return 0


def local_part(desired: agent_pb2.DesiredGang, node: str, configuration_set: ConfigurationSet) -> LocalPart:
    """`node` is the bare name. Raises DesiredInvalidError when the members do not name it."""
    name = f"nodes/{node}"
    mine = [member for member in desired.members if member.node in (name, node)]
    if len(mine) != 1 or not mine[0].ranks:
        raise DesiredInvalidError(f"{desired.job} epoch {desired.epoch}: {len(mine)} members are {name}")
    ranks = tuple(sorted(mine[0].ranks))
    world = sum(len(member.ranks) for member in desired.members)
    pools = core_pools(desired, ranks, configuration_set)
    leads = desired.members[0].node == mine[0].node
    roles = tasks_by_role(desired.spec) if has_role_ranges(desired.spec) else {}
    return LocalPart(ranks, _device_masks(desired, ranks), world, leads, pools, desired.checkpoints_on_nodes, roles)


def has_role_ranges(spec: job_pb2.JobSpec) -> bool:
    """Return whether the number of tasks of one of a job's roles may change."""
    return any(role.tasks_max for role in spec.roles)


def tasks_by_role(spec: job_pb2.JobSpec) -> dict[str, int]:
    """Return the tasks of each role of a gang, in the order of its ranks."""
    return {role.name: role.tasks for role in spec.roles}


def core_pools(
    desired: agent_pb2.DesiredGang, ranks: tuple[int, ...], configuration_set: ConfigurationSet
) -> tuple[CorePool, ...]:
    """Return the local ranks by role with the cores that each role requests; empty with a single role here.

    A role that names no cores counts with its tasks' proportional share of the node, as its claim does."""
    found, first = [], 0
    for role, tasks in zip(desired.spec.roles, desired.claim.tasks, strict=False):
        each = role.shape.millicores or share_of_cores(configuration_set, role.shape.gpus)
        found.append(CorePool(ranks[first : first + tasks], tasks * each))
        first += tasks
    found = [pool for pool in found if pool.millicores]
    return tuple(found) if len(found) > 1 and first == len(ranks) else ()


def threads_by_rank(part: LocalPart, desired: agent_pb2.DesiredGang, otherwise: int) -> dict[int, int]:
    """Return the number of computing threads of each local rank: the whole cores of its part of its role's, at least
    one; of ranks that share all cores, the number that the master names, or `otherwise`."""
    threads = dict.fromkeys(part.ranks, int(desired.threads) or otherwise)
    held, requested = sum(desired.claim.millicores), sum(pool.millicores for pool in part.pools)
    for pool in part.pools:
        each = held * pool.millicores // requested // len(pool.ranks)
        threads |= dict.fromkeys(pool.ranks, max(1, each // 1000))
    return threads


def _device_masks(desired: agent_pb2.DesiredGang, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Devices in ascending order to ranks in ascending order: ranks are numbered role by role, so roles follow too."""
    free = [bit for bit in range(64) if desired.claim.device_mask >> bit & 1]
    counts = zip(desired.spec.roles, desired.claim.tasks, strict=False)
    per_task = [role.shape.gpus for role, tasks in counts for _ in range(tasks)]
    if len(per_task) != len(ranks):
        per_task = [len(free) // len(ranks)] * len(ranks)
    masks, first = [], 0
    for gpus in per_task:
        masks.append(sum(1 << bit for bit in free[first : first + gpus]))
        first += gpus
    return tuple(masks)


def with_spec_of(new: agent_pb2.DesiredGang, old: agent_pb2.DesiredGang) -> agent_pb2.DesiredGang:
    """A copy of the new message that keeps what the master leaves out once it has been reported."""
    merged = agent_pb2.DesiredGang()
    merged.CopyFrom(new)
    if not new.spec.command:
        merged.spec.CopyFrom(old.spec)
    if not new.members:
        merged.members.extend(old.members)
    if not new.HasField("claim"):
        merged.claim.CopyFrom(old.claim)
    if not new.HasField("restore") and old.HasField("restore"):
        merged.restore.CopyFrom(old.restore)
    return merged


def with_order(desired: agent_pb2.DesiredGang, wanted: DesiredOrder) -> agent_pb2.DesiredGang:
    """Return a copy of the master's message with another order."""
    message = agent_pb2.DesiredGang()
    message.CopyFrom(desired)
    message.order.CopyFrom(order_key_to_wire(wanted.order))
    message.intent = agent_pb2.Intent.ValueType(wanted.intent)
    message.level = job_pb2.SuspendLevel.ValueType(wanted.level)
    message.stop_sequence = wanted.stop_sequence
    return message


def to_json(desired: agent_pb2.DesiredGang) -> dict[str, Any]:
    fields: dict[str, Any] = json_format.MessageToDict(desired, preserving_proto_field_name=True)
    return fields


def from_json(fields: dict[str, Any]) -> agent_pb2.DesiredGang | None:
    """Return the gang of these fields; None if a crash or a newer daemon left fields that are no gang."""
    if not fields:
        return None
    try:
        return json_format.ParseDict(fields, agent_pb2.DesiredGang(), ignore_unknown_fields=True)
    except json_format.ParseError:
        return None


def recall(wanted: dict[str, Any], started: dict[str, Any]) -> agent_pb2.DesiredGang | None:
    """The newest order a former daemon obeyed for a gang, with what to run; None when there is nothing to adopt."""
    first, newest = from_json(started), from_json(wanted)
    if first is None:
        return newest
    return first if newest is None else with_spec_of(newest, first)


@dataclass(frozen=True, slots=True)
class GangContext:
    """Facts that the collaborators of one gang share.

    `wake`: runs the next tick of the gang's loop at once; `write_notes`: writes the notes for the next daemon."""

    host: NodeContext
    peers: PeerCalls
    paths: GangPaths
    part: LocalPart
    pages: ControlPages
    wake: Callable[[], None]
    write_notes: Callable[[], None]

    @classmethod
    def of(
        cls,
        host: NodeContext,
        peers: PeerCalls,
        desired: agent_pb2.DesiredGang,
        wake: Callable[[], None],
        write_notes: Callable[[], None],
    ) -> GangContext:
        """Return the context of a desired gang. Raises DesiredInvalidError if it has no part on this node, ValueError
        where its record names half an account."""
        part = local_part(desired, host.node, host.inventory.configuration_set)
        paths = host.paths.of(desired.job_uid, desired.epoch)
        paths.account = Account.recall(read_json(paths.gang).get(ACCOUNT))
        pages = ControlPages(paths.run, desired.epoch, part.world, part.ranks)
        return cls(host, peers, paths, part, pages, wake, write_notes)

    @property
    def storage(self) -> Path | None:
        """Where the gang's checkpoints are kept: the storage that all nodes see, or this node's own disk."""
        return self.host.paths.checkpoints if self.part.on_nodes else self.host.storage.path

    @property
    def proved_storage(self) -> Path | None:
        """The same, if this node is proved to see it."""
        return self.host.paths.checkpoints if self.part.on_nodes else self.host.storage.shared

    def cores_by_rank(self) -> dict[int, tuple[int, ...]]:
        """Return the ids of the cores that each local rank may run on: those of its role, else the gang's."""
        cores, pools = self.host.cores, self.part.pools
        found = dict.fromkeys(self.part.ranks, cores.ids(self.paths.group))
        dealt = cores.split(self.paths.group, [pool.millicores for pool in pools])
        for pool, ids in zip(pools, dealt, strict=True):
            found |= dict.fromkeys(pool.ranks, ids)
        return found


class OfGang:
    """A collaborator of one gang, with the gang's context at hand."""

    def __init__(self, context: GangContext) -> None:
        self._context = context
        self._host, self._paths, self._part, self._pages = context.host, context.paths, context.part, context.pages
        self._group, self._ranks = context.paths.group, context.part.ranks


# -- orders ------------------------------------------------------------------------------------------------------------


class ReceivedOrders:
    """The newest order of one gang, `wanted`, and the message that it comes from, `desired`.

    `master_desired`: the master's desired state, which is `desired` or what `desired` was before a slice switch;
    `is_stop_wanted`: the desired set lacks the gang; `is_due`: the order is not in the pages yet; `ordered_at`: time of
    the order, in seconds of the monotonic clock; `mark`: progress at the last order to run."""

    def __init__(self, desired: agent_pb2.DesiredGang) -> None:
        """Raises DesiredInvalidError for a message with an unknown intent or level."""
        self.desired = desired
        self.master_desired = desired
        self.wanted = wanted_of(desired)
        self.is_stop_wanted = False
        self.is_due = True
        self.ordered_at = 0.0
        self.mark = RunMark()
        self._unwritten: OrderKey | None = None  # The last order that could not be written, as logged

    @property
    def is_hindered(self) -> bool:
        """Whether the newest order could not be written into the pages so far."""
        return self.is_due and self._unwritten is not None

    @property
    def is_by_rotation(self) -> bool:
        return self.wanted.order.is_by_rotation

    def set_master_desired(self, desired: agent_pb2.DesiredGang) -> None:
        """Record the master's desired state, which the gang follows only as its slices allow."""
        self.master_desired = with_spec_of(desired, self.master_desired)

    def take(
        self, desired: agent_pb2.DesiredGang, is_stale: bool, is_launched: bool, is_by_signal: bool = False
    ) -> DesiredOrder | None:
        """Record a newer order; return the former one, or None if the message has no newer one for a launched gang.

        `is_stale`: the job of the gang may run elsewhere by now; `is_by_signal`: it saves itself at a signal."""
        merged = with_spec_of(desired, self.desired)
        wanted = hastened(wanted_of(merged), is_stale)
        if is_by_signal:
            wanted = by_signal(wanted)
        if wanted.ends_at_once:
            # Also for a daemon that takes over.
            merged.grace.CopyFrom(duration(0.0))
            merged.checkpoint_first = False
        if not wanted.order.is_by_rotation:
            self.master_desired = merged
        if wanted.order <= self.wanted.order and is_launched:
            return None
        # Slice switches are too frequent for INFO.
        asked = {"intent": wanted.intent.name, "suspend_level": wanted.level.name}
        extra = {"job": desired.job, "epoch": desired.epoch, **asked}
        log.log(logging.DEBUG if wanted.order.is_by_rotation else logging.INFO, "order", extra=extra)
        former, self.desired, self.wanted = self.wanted, merged, wanted
        self.ordered_at = time.monotonic()
        self.is_due = True
        return former

    def stop(self, is_stale: bool) -> None:
        """Record that the gang is to stop, because the desired set lacks it."""
        self.is_stop_wanted = True
        stop = replace(self.wanted, intent=OrderIntent.STOP, grace_s=DEFAULT_GRACE_S, checkpoint_first=False)
        self.wanted = hastened(stop, is_stale)

    def hasten(self, is_stale: bool) -> None:
        """Take the grace from an order to stop a stale gang."""
        self.wanted = hastened(self.wanted, is_stale)

    def mark_by_signal(self) -> None:
        """Record that the script saves itself at a signal."""
        self.wanted = by_signal(self.wanted)

    def keep(self, paths: GangPaths) -> None:
        """Write the message of the order for a daemon that takes over."""
        make_directory(paths.job)
        write_hint(paths.wanted, to_json(self.desired))

    async def write(self, context: GangContext) -> bool:
        """Write the order into the pages. Return whether it is the one that could not be written before.

        If the disk is full, the gang's loop continues and its next tick retries."""
        try:
            await self._write(context)
        except OSError as error:
            if self._unwritten != self.wanted.order:
                self._unwritten = self.wanted.order
                log.error("order not written", extra={"job": self.desired.job, "error": str(error)})
            return False
        was_hindered, self._unwritten = self._unwritten is not None, None
        return was_hindered

    async def _write(self, context: GangContext) -> None:
        wanted = self.wanted
        order = page_order(wanted)
        if order is None:
            self.is_due = False
            return
        await asyncio.to_thread(write_details, context.proved_storage, context.paths, str(order.seq))
        deadline = now_ns() + int(context.host.order_deadline_s * 1e9) if order.stop_seq else 0
        context.pages.write_order(order._replace(deadline_ns=deadline))
        # A newer order may have come while the details were written.
        self.is_due = self.wanted is not wanted
        context.write_notes()


# -- errors of ranks ---------------------------------------------------------------------------------------------------

# A rank-K.error.json counts if it is newer than the details of the order: so a restarted daemon finds the same.

_LIMIT = 1000
_REASON_LIMIT = 500
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt): ")
_OF_SYSTEM = re.compile(r"\[Errno (\d+)\] (.+?)(?:: '(.+)')?")


class RankError(NamedTuple):
    """Error that a rank reported. `reason`: a word of the page (STORAGE_FULL, ...); `text`: one line for the user."""

    rank: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.reason}: rank {self.rank}: {self.text}"[:_LIMIT]


class RankErrors(OfGang):
    """Reported errors of one gang's local ranks."""

    def __init__(self, context: GangContext) -> None:
        super().__init__(context)
        self._refused = (0, "")  # (order, why)
        # By rank and capability that is not offered: time of the file, and its text.
        self._reasons: dict[tuple[int, str], tuple[int, str]] = {}

    def under(self, order: OrderKey, saved_request: int = 0) -> str:
        """Return the first error under an order; empty if there is none.

        `saved_request`: number of the newest published checkpoint without a stop, 0 for none. Errors from before its
        request no longer count."""
        if self._refused[0] == order.number:
            return self._refused[1]
        saved = _time_of(self._paths.orders / f"checkpoint-{saved_request}.json") if saved_request else 0
        found = (error_of(self._paths, rank, str(order.number), saved) for rank in self._part.ranks)
        return str(next((error for error in found if error is not None), ""))

    def refusal(self, facts: GangPart, unpublished: str) -> str:
        """Return why the level of the present order cannot be reached, or an empty text. The first reason found stays
        until the next order. `unpublished`: why the checkpoint cannot be published."""
        sequence = facts.wanted.order.number
        if self._refused[0] == sequence:
            return self._refused[1]
        refusing = (rank.rank for rank in facts.ranks if gang_judgement.refuses(facts, rank))
        reported = (error_of(self._paths, rank, str(sequence)) for rank in refusing)
        error = next((one for one in reported if one is not None), None)
        text = str(error or unpublished)
        if error is not None and error.reason == "STORAGE_FULL":
            text += self._room()
        if text:
            self._refused = (sequence, text)
        return text

    def reason(self, what: str) -> str:
        """Return why the ranks here do not offer `what` (see `GangPaths.reason`): the first reason found, or empty."""
        return next(filter(None, (self._reason_of(rank, what) for rank in self._part.ranks)), "")

    def _reason_of(self, rank: int, what: str) -> str:
        path = self._paths.reason(rank, what)
        written = _time_of(path)
        known = self._reasons.get((rank, what), (0, ""))
        if known[0] != written:
            text = str(read_json(path).get("message", ""))[:_REASON_LIMIT] if written else ""
            known = (written, "".join(sign if sign.isprintable() else " " for sign in text))
            self._reasons[rank, what] = known
        return known[1]

    def _room(self) -> str:
        storage = self._context.storage
        free = free_bytes(storage) if storage is not None else None
        if free is None:
            return ""
        found = [self._pages.progress(rank) for rank in self._part.ranks]
        needed = sum(max(progress.device_bytes, progress.arena_size) for progress in found)
        return f"; {storage} has {free} bytes free, this node's part needs about {needed}"


def error_of(paths: GangPaths, rank: int, order: str, since_ns: int = 0) -> RankError | None:
    """Return the error that a rank reported after the order of this name was written and after the file time
    `since_ns`; None without one, or without such an order."""
    written, reported = _time_of(paths.orders / f"{order}.json"), _time_of(paths.error(rank))
    if not 0 < written <= reported or reported < since_ns:
        return None
    fields = read_json(paths.error(rank))
    return RankError(rank, str(fields.get("reason", "UNKNOWN")), summary_of(str(fields.get("message", ""))))


def summary_of(message: str) -> str:
    """Return the last line of a message or traceback, without the exception's name and the number of an error."""
    lines = [line for line in message.splitlines() if line.strip()]
    text = _EXCEPTION.sub("", lines[-1]) if lines else "it did not say why"
    found = _OF_SYSTEM.fullmatch(text)
    return os_failure(OSError(int(found[1]), *found.groups()[1:])) if found else text


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
