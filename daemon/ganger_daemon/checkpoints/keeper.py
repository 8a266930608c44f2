"""The checkpoints of one running gang: asks for them when due, tells the leader of durable shards, publishes, collects.

The leader's daemon publishes; a member's only reports. Everything can be done again after a crash: what is durable
is found on storage, what is not is asked for anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ganger.injob.image import ImageError

from ganger_daemon.failpoints import hit

from . import storage as storage_checks
from .collect import collect
from .layout import CheckpointName, checkpoints_directory, complete, read_manifest
from .publish import Gathering, Shard, directories, manifest
from .schedule import Schedule, asked, due
from .verify import describe_shard

log = logging.getLogger(__name__)

# Shards are reported again at this pace until the leader has answered.
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Published:
    step: int
    epoch: int
    path: str  # relative to the job's directory on storage
    size_bytes: int
    time_seconds: float


Publish = Callable[[Path, Path, dict[str, Any]], None]
Report = Callable[[int, int, tuple[Shard, ...]], Awaitable[None]]


class Keeper:
    """`publish(tmp, final, manifest)` blocks (the launcher does it); `report` tells the leader, on a member."""

    def __init__(
        self,
        job_uid: str,
        epoch: int,
        world: int,
        leads: bool,
        publish: Publish,
        report: Report,
        changed: Callable[[], None],
    ) -> None:
        self._job_uid = job_uid
        self._epoch = epoch
        self._world = world
        self._leads = leads
        self._publish = publish
        self._report = report
        self._changed = changed
        self._gatherings: dict[int, Gathering] = {}
        self._described: dict[tuple[int, int], Shard] = {}  # by (agreement, rank)
        self._reported: set[tuple[int, int]] = set()
        self._done: set[int] = set()
        self._lock = asyncio.Lock()
        self._retry_at = 0.0
        self.published: Published | None = None
        self.handed: dict[int, int] = {}  # agreement -> step whose shards the leader has
        self.schedule = Schedule(time.monotonic())
        self.trouble = ""

    def recall(self, storage: Path | None) -> None:
        """After a daemon restart: the newest checkpoint of this epoch that is on storage."""
        if storage is None or not self._leads:
            return
        for name in reversed(complete(checkpoints_directory(storage, self._job_uid))):
            if name.epoch == self._epoch:
                self.published = _published(storage, self._job_uid, name)
                return

    def due(self, now: float, interval_seconds: float, request: int) -> bool:
        return self._leads and due(self.schedule, now, interval_seconds, request)

    def asked(self, now: float, request: int) -> None:
        self.schedule = asked(self.schedule, now, request)

    def room_missing(self, storage: Path) -> int:
        size = self.published.size_bytes if self.published is not None else 0
        return storage_checks.room_missing(storage, size)

    def is_settled(self, agreement: int) -> bool:
        """Whether every shard of this node has got where it must go."""
        return agreement in self._done

    async def durable(self, storage: Path, agreement: int, step: int, ranks: tuple[int, ...]) -> None:
        """All local shards of an agreement are durable: describe them, then report or gather them. Idempotent."""
        if agreement in self._done or time.monotonic() < self._retry_at:
            return
        async with self._lock:
            tmp, final = directories(storage, self._job_uid, self._epoch, step)
            shards = await self._describe(tmp, final, agreement, ranks)
            if shards is None:
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                return
            if not self._leads:
                await self._tell_leader(agreement, step, shards)
                return
        await self.gather(storage, agreement, step, shards)

    async def gather(self, storage: Path, agreement: int, step: int, shards: tuple[Shard, ...]) -> None:
        """Leader: shards of some ranks; publishes once all are there."""
        assert self._leads, "only the leader gathers shards"
        async with self._lock:
            gathering = self._gatherings.get(agreement, Gathering(self._world, step)).add(step, shards)
            self._gatherings = {agreement: gathering}
            if not gathering.complete or agreement in self._done:
                return
            try:
                await asyncio.to_thread(self._publish_now, storage, gathering)
            except OSError as error:
                self.trouble = f"checkpoint at step {step} cannot be published: {error}"
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                log.warning("checkpoint not published", extra={"job": self._job_uid, "step": step, "error": str(error)})
                return
            self.trouble = ""
            self._done.add(agreement)
            self.handed[agreement] = step
        self._changed()

    def _publish_now(self, storage: Path, gathering: Gathering) -> None:
        tmp, final = directories(storage, self._job_uid, self._epoch, gathering.step)
        if not (final.exists() and not tmp.exists()):
            hit("mid-fsync")
            self._publish(tmp, final, manifest(gathering, self._job_uid, self._epoch, time.time()))
            hit("after-rename")
        name = CheckpointName(gathering.step, self._epoch)
        self.published = _published(storage, self._job_uid, name)
        log.info("checkpoint published", extra={"job": self._job_uid, "checkpoint": str(name)})
        collect(
            checkpoints_directory(storage, self._job_uid), _epochs_from(self._epoch, storage, self._job_uid), (name,)
        )

    async def _describe(
        self, tmp: Path, final: Path, agreement: int, ranks: tuple[int, ...]
    ) -> tuple[Shard, ...] | None:
        for rank in ranks:
            if (agreement, rank) in self._described:
                continue
            file = f"rank-{rank}.shard"
            directory = tmp if (tmp / file).exists() else final
            try:
                size, digest = await asyncio.to_thread(describe_shard, directory / file)
            except (OSError, ImageError) as error:
                self.trouble = f"shard of rank {rank} is unreadable: {error}"
                log.warning("shard unreadable: %s", error, extra={"job": self._job_uid, "rank": rank})
                return None
            self._described[agreement, rank] = Shard(rank, file, size, digest)
        found = tuple(self._described[agreement, rank] for rank in ranks)
        self._described = {key: shard for key, shard in self._described.items() if key[0] == agreement}
        return found

    async def _tell_leader(self, agreement: int, step: int, shards: tuple[Shard, ...]) -> None:
        try:
            await self._report(agreement, step, shards)
        except Exception as error:  # the leader may be away for a while: asked again until it answers
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            log.info("leader not told of shards yet", extra={"job": self._job_uid, "error": str(error)})
            return
        self._done.add(agreement)
        self.handed[agreement] = step
        self._changed()


def publish_here(tmp: Path, final: Path, fields: dict[str, Any]) -> None:
    """What a launcher does, for when there is none: manifest, fsyncs, rename."""
    path = tmp / "MANIFEST.json"
    with open(path, "w") as file:
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(tmp)
    hit("before-rename")
    os.replace(tmp, final)
    _sync_directory(final.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _epochs_from(epoch: int, storage: Path, job_uid: str) -> tuple[int, ...]:
    """This epoch and all later ones that have begun to write: older ones are over once this one publishes."""
    directory = checkpoints_directory(storage, job_uid)
    epochs = {epoch}
    for path in directory.glob("*.tmp"):
        _, _, text = path.name.removesuffix(".tmp").rpartition("-")
        if text.isdigit() and int(text) >= epoch:
            epochs.add(int(text))
    return tuple(sorted(epochs))


def _published(storage: Path, job_uid: str, name: CheckpointName) -> Published:
    directory = checkpoints_directory(storage, job_uid) / str(name)
    fields = read_manifest(directory)
    size = sum(int(entry["bytes"]) for entry in fields["files"].values())
    return Published(name.step, name.epoch, f"checkpoints/{name}", size, float(fields.get("time", 0.0)))
