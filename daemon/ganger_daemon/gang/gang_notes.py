"""Notes that a daemon leaves of a gang for the next one, and the ranks that it left, as far as they can be trusted."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ganger.agent.v1 import agent_pb2

from ganger_daemon.gang.control_pages import RunMark
from ganger_daemon.gang.desired_messages import LocalPart, from_json, order_key, to_json, with_spec_of
from ganger_daemon.gang.gang_context import GangContext
from ganger_daemon.gang.gang_parts import GangParts
from ganger_daemon.gang.rank_launch import RankLaunch
from ganger_daemon.gang.received_orders import ReceivedOrders
from ganger_daemon.node.directories import GangPaths
from ganger_daemon.node.process_identity import ProcessId, RankProcess, is_alive, stranger_text
from ganger_daemon.node.safe_files import read_json, write_hint

log = logging.getLogger(__name__)


def write_notes(context: GangContext, orders: ReceivedOrders, parts: GangParts) -> None:
    """Note what the next daemon cannot find out from pages and processes. Notes may be lost: they save work."""
    fields = {
        "grant": [list(share) for share in context.host.shares_of(context.paths.group)],
        "baselines": parts.memory.baselines(),
        "mark": orders.mark.journal(),
        "kept_memory_bytes": parts.memory.kept_bytes,
        "wanted_checkpoints": parts.saving.wanted_paths,
        "segments": parts.segments.journal(),
        "told": to_json(orders.master_desired) if orders.is_by_rotation else {},
        **parts.launching.journal(),
    }
    write_hint(context.paths.local, fields)


def recall_notes(context: GangContext, orders: ReceivedOrders, parts: GangParts) -> None:
    """Restore what a former daemon noted of a gang. Unreadable notes count as none."""
    paths = context.paths
    try:
        left = read_json(paths.local)
        parts.launching.recall(left)
        orders.mark = RunMark.recall(left.get("mark", {}))
        parts.memory.kept_bytes = int(left.get("kept_memory_bytes", 0))
        parts.memory.recall({int(pid): int(size) for pid, size in left.get("baselines", {}).items()})
        parts.segments.recall(left.get("segments", {}))
        shares = [(int(core), int(share)) for core, share in left.get("grant", [])]
        context.host.adopt_cores(paths.group, shares)
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError) as error:
        log.warning("notes cannot be read", extra={"path": str(paths.local), "error": str(error)})
    orders.master_desired = _recall_master_desired(paths, orders.desired)


def recall_wanted_checkpoints(paths: GangPaths) -> list[str] | None:
    """Return the noted paths of the checkpoints that the master may start the job from; None without a note."""
    noted = read_json(paths.local).get("wanted_checkpoints")
    return [str(path) for path in noted] if isinstance(noted, list) else None


def _recall_master_desired(paths: GangPaths, desired: agent_pb2.DesiredGang) -> agent_pb2.DesiredGang:
    """Return the master's last desired state of a gang: the noted one where a slice switch came after it, else
    `desired`."""
    if not order_key(desired.order).is_by_rotation:
        return desired
    noted = read_json(paths.local).get("told", {})
    master_desired = from_json(noted) if isinstance(noted, dict) else None
    if master_desired is not None and master_desired.order.master_sequence >= desired.order.master_sequence:
        return with_spec_of(master_desired, desired)
    running = agent_pb2.DesiredGang()
    running.CopyFrom(desired)
    running.order.set_epoch = running.order.local_sequence = running.stop_sequence = 0
    running.intent, running.level = agent_pb2.INTENT_RUN, 0  # type: ignore[assignment]  # no level
    return running


def find_ranks(
    context: GangContext, launching: RankLaunch, children: Mapping[str, RankProcess]
) -> dict[int, ProcessId] | None:
    """Return the processes of the local ranks, dead ones too; None if not all of them were launched yet.

    Opens the pages, and spoils them where they contradict the processes."""
    paths, part, pages = context.paths, context.part, context.pages
    is_open = pages.open(_page_version(paths, part))
    found = launching.recognise(children)
    for rank, one in found.items():
        if one.stranger is not None:
            log.error("process not adopted", extra={"gang": paths.group, "cause": stranger_text(rank, one)})
        if one.is_lost:
            pages.spoil(stranger_text(rank, one))
    if not is_open and not pages.foreign and any(is_alive(one.process) for one in found.values()):
        # else they went with the machine's memory, and so did the processes
        pages.spoil(f"the control pages in {paths.run} were removed by its job")
    had_launches = any(paths.launch(rank).exists() for rank in part.ranks) or bool(pages.damage())
    if all(one.process.pid for one in found.values()) or (had_launches and not pages.readable):
        return {rank: one.process for rank, one in found.items()}
    return None


def _page_version(paths: GangPaths, part: LocalPart) -> int:
    """Return the version that the pages were created with; 0 if it is not known."""
    version = read_json(paths.launch(part.ranks[0])).get("page_version")
    return version if isinstance(version, int) else 0
