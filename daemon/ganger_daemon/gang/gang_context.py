"""One gang as the master desires it on this node: its order, its local ranks and devices, and the context of its parts:
what stays the same from the gang's start to its end, and its ways to other daemons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.cluster.fit import share_of_cores
from ganger.cluster.resources import ConfigurationSet
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, OrderKey, ParkLevel
from ganger.v1 import job_pb2
from ganger.wire.times import seconds
from google.protobuf import json_format

from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.node.accounts import Account
from ganger_daemon.node.daemon_files import GangPaths, read_json
from ganger_daemon.node.node_context import NodeContext, PeerCalls

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
    with cores of its own; empty where all ranks share the gang's cores."""

    ranks: tuple[int, ...]
    device_masks: tuple[int, ...]
    world: int
    leads: bool
    pools: tuple[CorePool, ...] = ()


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
    return LocalPart(ranks, _device_masks(desired, ranks), world, desired.members[0].node == mine[0].node, pools)


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
