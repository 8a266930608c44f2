"""When the shards of a checkpoint make it complete, and what its manifest says; the launcher writes and renames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ganger_daemon.checkpoints.layout import MANIFEST_FORMAT, CheckpointName, checkpoints_directory


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's durable part. `digest` is "algorithm:hex" of its data, `header_digest` the same of its header;
    `device_model` the name of the accelerators its state was on, empty without any."""

    rank: int
    file: str
    size_bytes: int
    digest: str
    device_model: str = ""
    header_digest: str = ""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a member reports to the leader of one agreement: its durable shards, or (`refusal`) why there are none."""

    agreement: int
    step: int = 0
    shards: tuple[Shard, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Gathering:
    """Shards of one agreement, as they are reported; of an agreement nobody else hears before it is complete."""

    world: int
    step: int
    shards: Mapping[int, Shard] = field(default_factory=dict)

    def add(self, step: int, shards: tuple[Shard, ...]) -> Gathering:
        """With these shards too. Shards of another step do not belong together: the newer step begins afresh."""
        if step < self.step:
            return self
        known = dict(self.shards) if step == self.step else {}
        known.update({shard.rank: shard for shard in shards if 0 <= shard.rank < self.world})
        return Gathering(self.world, step, known)

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.world

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards.values())


def manifest(gathering: Gathering, job_uid: str, epoch: int, time_seconds: float) -> dict[str, Any]:
    assert gathering.complete, "a manifest is written when all shards are there"
    return {
        "format": MANIFEST_FORMAT,
        "job_uid": job_uid,
        "epoch": epoch,
        "step": gathering.step,
        "world": gathering.world,
        "time": time_seconds,
        "files": {
            shard.file: {
                "rank": shard.rank,
                "bytes": shard.size_bytes,
                "digest": shard.digest,
                "header_digest": shard.header_digest,
                "device_model": shard.device_model,
            }
            for _, shard in sorted(gathering.shards.items())
        },
    }


def directories(storage: Path, job_uid: str, epoch: int, step: int) -> tuple[Path, Path]:
    """(where the ranks write, what the rename makes of it)."""
    parent = checkpoints_directory(storage, job_uid)
    final = parent / str(CheckpointName(step, epoch))
    return final.with_name(final.name + ".tmp"), final
