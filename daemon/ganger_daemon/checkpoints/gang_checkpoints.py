"""Checkpoints of one running gang: due requests, reports of durable shards to the leader, which publishes, and removal.
Every action can be repeated after a crash. A checkpoint of a later epoch is newer, whatever its step: a job that went
back leaves unreadable ones of higher steps, which must not replace the good ones."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ganger.failpoints import hit
from ganger.injob.page_layout import CHECKPOINT_BIT
from ganger.injob.state_image import ImageError
from ganger.text import os_failure

from ganger_daemon.checkpoints import storage as layout
from ganger_daemon.checkpoints.storage import (
    CHECKPOINTS,
    PLACES,
    CheckpointName,
    Shard,
    ShardCollection,
    ShardReport,
    checkpoints_directory,
    complete,
    describe_shard,
    directories,
    every,
    found_checkpoint,
    manifest,
    parse_unfinished,
    shard_name,
)
from ganger_daemon.core.part_facts import FoundCheckpoint
from ganger_daemon.node.daemon_files import remove_tree

log = logging.getLogger(__name__)

_RETRY_S = 0.5
# First wait of a member before it reports to the leader again; it grows up to the interval above.
_FIRST_REPORT_S = 0.02
# The newest, and the one before it for when the newest turns out to be damaged.
KEEP = 2
_TRASH = ".trash-"


class StorageError(Exception):
    """Storage rejects a checkpoint, and a retry at once would not help. `reason`: as in the control page."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Publish = Callable[[Path, Path, dict[str, Any]], None]
Run = Callable[..., Awaitable[Any]]
Report = Callable[[ShardReport], Awaitable[bool]]


class OnNode(NamedTuple):
    """How checkpoints are kept on the disk of one node. `collect(unfinished, shards)` blocks and fetches shards of
    other nodes; it raises OSError. `copy(path)` has other nodes keep a copy, and returns them with what went wrong.
    `by_node`: the ranks of each node of the gang."""

    node: str
    collect: Callable[[Path, Collection[Shard]], None]
    copy: Callable[[str], Awaitable[tuple[tuple[str, ...], str]]]
    by_node: Sequence[Sequence[int]] = ()


class GangCheckpoints:
    """`publish(tmp, final, manifest)` blocks (the launcher does it) and raises StorageError, or OSError for what may
    pass; `report`, of a member, sends the leader shards or a refusal, and returns whether the checkpoint is published.
    `wanted`: checkpoints the master would start the job from; None: not known, and nothing is removed. `run` calls
    functions that block. `on_node`: of gangs whose checkpoints do not lie on storage. `roles`: as of `LocalPart`."""

    def __init__(
        self,
        job_uid: str,
        epoch: int,
        world: int,
        leads: bool,
        publish: Publish,
        report: Report,
        changed: Callable[[], None],
        wanted: frozenset[CheckpointName] | None = frozenset(),
        run: Run = asyncio.to_thread,
        on_node: OnNode | None = None,
        roles: Mapping[str, int] | None = None,
    ) -> None:
        self._job_uid = job_uid
        self._epoch = epoch
        self._world = world
        self._leads = leads
        self._publish = publish
        self._report = report
        self._changed = changed
        self.wanted = wanted
        self._run = run
        self._on_node = on_node
        self._roles = roles
        self._copying: asyncio.Future[None] | None = None
        self._collections: dict[int, ShardCollection] = {}
        self._described: dict[tuple[int, int], Shard] = {}  # By (agreement, rank)
        self._refused: dict[int, str] = {}
        self._reported_refusal = 0  # The agreement whose refusal the leader has received
        self._lock = asyncio.Lock()
        self._gathering: set[asyncio.Future[None]] = set()
        self._retry_at = 0.0
        self._next_report_s = _FIRST_REPORT_S
        self.published: FoundCheckpoint | None = None
        self.handed: dict[int, int] = {}  # agreement -> step of its published checkpoint
        self.requested_at = time.monotonic()
        self._served = 0  # The newest request of the master that was obeyed
        self.trouble = ""

    def recall(self, storage: Path | None) -> None:
        """Find the newest checkpoint of this epoch on storage, after a restart of the daemon."""
        if storage is None or not self._leads:
            return
        for name, place in reversed(every(storage, self._job_uid)):
            if name.epoch == self._epoch:
                with suppress(ValueError):  # A manifest that its job has spoilt
                    found = self._found(storage, name, place)
                    # Where storage hung, a newer one may have been published meanwhile.
                    self.published = self.published or found
                    return

    def prune(self, storage: Path) -> None:
        """Remove checkpoints that are neither among the newest nor wanted by the master. Blocks."""
        if self._leads and self.published is not None and self.wanted is not None:
            newest = CheckpointName(self.published.step, self.published.epoch)
            for place in PLACES:
                collect(checkpoints_directory(storage, self._job_uid, place), newest, self.wanted)

    def due(self, now: float, interval_s: float, request: int) -> bool:
        """Return whether to request a checkpoint now: the master raised its counter `request`, or the interval is over
        (0: never)."""
        is_over = interval_s > 0 and now - self.requested_at >= interval_s
        return self._leads and (request > self._served or is_over)

    def note_request(self, now: float, request: int) -> None:
        self.requested_at, self._served = now, max(self._served, request)

    def room_missing(self, storage: Path) -> int:
        size = self.published.size_bytes if self.published is not None else 0
        return layout.room_missing(storage, size)

    def is_settled(self, agreement: int) -> bool:
        """Return whether the checkpoint of an agreement is published."""
        return agreement in self.handed

    def refusal(self, agreement: int) -> str:
        """Return why the checkpoint of an agreement cannot be published; empty while it may be."""
        return self._refused.get(agreement, "")

    async def refuse(self, agreement: int, why: str) -> None:
        """Give up the checkpoint of an agreement, as a rank cannot write its shard, and report that to the leader.

        Idempotent. `why`: the reason, for users."""
        self._refuse(agreement, why)
        if self._leads or self._reported_refusal == agreement or time.monotonic() < self._retry_at:
            return
        try:
            await self._report(ShardReport(agreement, refusal=why))
        except Exception as error:  # As in `_report_shards`
            self._retry_at = time.monotonic() + _RETRY_S
            log.info("refusal not reported to the leader yet", extra={"job": self._job_uid, "error": str(error)})
            return
        self._reported_refusal = agreement

    def _refuse(self, agreement: int, why: str) -> None:
        if agreement in self._refused or agreement in self.handed:
            return
        self.trouble = why
        self._refused = {agreement: why}
        log.warning("checkpoint refused", extra={"job": self._job_uid, "cause": why})
        self._changed()

    def abandon(self, agreement: int) -> None:
        """Give up the checkpoint of a stop whose ranks continue. If the same stop is ordered again, they save anew."""
        self._collections.pop(agreement, None)
        if self._refused.pop(agreement, None):
            self.trouble = ""
        self._described = {key: shard for key, shard in self._described.items() if key[0] != agreement}

    def tidy(self, storage: Path) -> None:
        """Remove the files of checkpoints that were given up. Blocks."""
        for place in PLACES if self._leads or self._on_node is not None else ():
            collect_abandoned(checkpoints_directory(storage, self._job_uid, place), self._epoch)

    async def durable(
        self, storage: Path, agreement: int, step: int, ranks: tuple[int, ...], place: str = CHECKPOINTS
    ) -> None:
        """All local shards of an agreement are durable: describe them, then report or gather them. Idempotent."""
        if agreement in self.handed or agreement in self._refused or time.monotonic() < self._retry_at:
            return
        async with self._lock:
            tmp, final = directories(storage, self._job_uid, self._epoch, step, place)
            shards = await self._describe(tmp, final, agreement, ranks)
            if shards is None:
                self._retry_at = time.monotonic() + _RETRY_S
                return
            if not self._leads:
                if await self._report_shards(agreement, step, shards) and self._on_node is not None:
                    # The leader has them all. These stay until the next: a restarted daemon reports them again.
                    await self._run(remove_before, tmp)
                return
        await self.gather(storage, agreement, step, shards, place)

    async def gather(
        self, storage: Path, agreement: int, step: int, shards: tuple[Shard, ...], place: str = CHECKPOINTS
    ) -> None:
        """Leader's side: add shards of some ranks, and publish once all are there.

        It goes on where its caller is cancelled: fetching shards and making a copy take longer than a member waits for
        an answer, and a second try would write the same files."""
        assert self._leads, "only the leader gathers shards"
        gathering = asyncio.ensure_future(self._gather(storage, agreement, step, shards, place))
        self._gathering.add(gathering)
        gathering.add_done_callback(self._gathering.discard)
        await asyncio.shield(gathering)

    async def _gather(self, storage: Path, agreement: int, step: int, shards: tuple[Shard, ...], place: str) -> None:
        async with self._lock:
            collection = self._collections.get(agreement, ShardCollection(self._world, step, place=place))
            collection = collection.add(step, shards)
            self._collections = {agreement: collection}
            if not collection.complete or agreement in self.handed or agreement in self._refused:
                return
            try:
                await self._run(self._publish_now, storage, collection)
            except StorageError as error:
                self._refuse(agreement, f"{error.reason}: the checkpoint at step {step} cannot be published: {error}")
                return
            except (OSError, ValueError) as error:
                former, self.trouble = (
                    self.trouble,
                    f"the checkpoint at step {step} is not published yet: {os_failure(error)}",
                )
                self._retry_at = time.monotonic() + _RETRY_S
                if former != self.trouble:
                    self._changed()
                log.warning("checkpoint not published", extra={"job": self._job_uid, "step": step, "error": str(error)})
                return
            self.trouble = ""
            if self._on_node is not None and self.published is not None:
                self._copying = asyncio.ensure_future(self._copy(self._on_node, self.published))
                if not agreement & CHECKPOINT_BIT:
                    # Before its ranks may end: then the copy is there when its node is lost.
                    await self._copying
            self.handed[agreement] = step
        self._changed()

    async def _copy(self, on_node: OnNode, published: FoundCheckpoint) -> None:
        """Have a published checkpoint copied, and note which nodes have it."""
        copies, trouble = await on_node.copy(published.path)
        if self.published is not None and self.published.path == published.path:
            self.trouble = trouble
            self.published = replace(self.published, nodes=(on_node.node, *copies))
            self._changed()

    def _found(self, storage: Path, name: CheckpointName, place: str) -> FoundCheckpoint:
        found = found_checkpoint(storage, self._job_uid, name, place)
        return found if self._on_node is None else replace(found, nodes=(self._on_node.node,))

    def _publish_now(self, storage: Path, collection: ShardCollection) -> None:
        tmp, final = directories(storage, self._job_uid, self._epoch, collection.step, collection.place)
        if not (final.exists() and not tmp.exists()):
            if self._on_node is not None:
                self._on_node.collect(tmp, collection.shards.values())
            hit("mid-fsync")
            by_node = () if self._on_node is None else self._on_node.by_node
            content = manifest(collection, self._job_uid, self._epoch, time.time(), self._roles, by_node)
            self._publish(tmp, final, content)
            hit("after-rename")
        name = CheckpointName(collection.step, self._epoch)
        self.published = self._found(storage, name, collection.place)
        log.info("checkpoint published", extra={"job": self._job_uid, "checkpoint": str(name)})
        self.prune(storage)

    async def _describe(
        self, tmp: Path, final: Path, agreement: int, ranks: tuple[int, ...]
    ) -> tuple[Shard, ...] | None:
        for rank in ranks:
            if (agreement, rank) in self._described:
                continue
            file = shard_name(rank)
            try:
                described = await self._run(_describe_either, tmp / file, final / file)
            except (OSError, ImageError) as error:
                self._refuse(agreement, f"STORAGE_FAILED: shard of rank {rank} is unreadable: {os_failure(error)}")
                return None
            self._described[agreement, rank] = replace(described, rank=rank)
        found = tuple(self._described[agreement, rank] for rank in ranks)
        self._described = {key: shard for key, shard in self._described.items() if key[0] == agreement}
        return found

    async def _report_shards(self, agreement: int, step: int, shards: tuple[Shard, ...]) -> bool:
        """Report shards to the leader; return whether the checkpoint is published."""
        try:
            published = await self._report(ShardReport(agreement, step, shards))
        except Exception as error:  # The leader may be away for a while: retried until it answers
            self._retry_at = time.monotonic() + _RETRY_S
            log.info("shards not reported to the leader yet", extra={"job": self._job_uid, "error": str(error)})
            return False
        if not published:
            self._retry_at = time.monotonic() + self._next_report_s
            self._next_report_s = min(_RETRY_S, 2 * self._next_report_s)
            return False
        self._next_report_s = _FIRST_REPORT_S
        self.trouble = ""
        self.handed[agreement] = step
        self._changed()
        return True


def remove_before(unfinished: Path) -> None:
    """Remove the unfinished checkpoints of earlier attempts, and of earlier steps of the same one. Blocks."""
    newest = parse_unfinished(unfinished.name)
    assert newest is not None, "the directory of an unfinished checkpoint"
    for name, other in _unfinished(unfinished.parent):
        if _age(other) < _age(newest):
            remove_tree(unfinished.with_name(name))


def _describe_either(unfinished: Path, published: Path) -> Shard:
    return describe_shard(unfinished if unfinished.exists() else published)


# -- retention


def surplus(
    names: Collection[CheckpointName], newest: CheckpointName, wanted: Collection[CheckpointName] = ()
) -> tuple[CheckpointName, ...]:
    """Return the checkpoints to remove once `newest` is published, oldest first.

    `wanted`: checkpoints the master may start the job from, as its newest desired set names them. The first one
    published since stays, too: the master may have recorded it although its answer was lost."""
    ordered = sorted(names, key=_age)
    newest_wanted = max(map(_age, wanted), default=(-1, -1))
    since = [name for name in ordered if _age(name) > newest_wanted]
    kept = {*ordered[-KEEP:], newest, *wanted, *since[:1]}
    return tuple(name for name in ordered if name not in kept)


def _age(name: CheckpointName) -> tuple[int, int]:
    return (name.epoch, name.step)


def collect(directory: Path, newest: CheckpointName, wanted: Collection[CheckpointName] = ()) -> tuple[str, ...]:
    """Remove surplus checkpoints, leftovers and old trash from a job's directory once `newest` is published; return the
    removed names. No rank writes an unfinished checkpoint any more that is no newer than the newest finished one.

    A checkpoint is renamed before it is deleted, so that no reader finds half of one under its name."""
    if not directory.is_dir():
        return ()
    doomed = [str(name) for name in surplus(complete(directory), newest, wanted)]
    doomed += [name for name, unfinished in _unfinished(directory) if _age(unfinished) <= _age(newest)]
    return _remove(directory, doomed)


def collect_abandoned(directory: Path, epoch: int) -> tuple[str, ...]:
    """Remove the unfinished checkpoints of an epoch that no rank is writing just now; return their names."""
    if not directory.is_dir():
        return ()
    mine = [name for name, unfinished in _unfinished(directory) if unfinished.epoch == epoch]
    return _remove(directory, [name for name in mine if not any((directory / name).glob("*.part"))])


def _unfinished(directory: Path) -> list[tuple[str, CheckpointName]]:
    found = [(path.name, parse_unfinished(path.name)) for path in sorted(directory.iterdir())]
    return [(name, unfinished) for name, unfinished in found if unfinished is not None]


def _remove(directory: Path, doomed: Collection[str]) -> tuple[str, ...]:
    removed: list[str] = []
    for name in doomed:
        try:
            os.replace(directory / name, directory / f"{_TRASH}{name}")
            removed.append(name)
        except OSError:
            continue  # Another process has removed it
    for path in directory.glob(f"{_TRASH}*"):
        remove_tree(path)
    return tuple(removed)
