"""Where checkpoints of a job lie on storage, what their names say, and which of them exist.

A checkpoint exists when its directory has its final name `STEP-EPOCH` and a readable manifest: the rename is the truth.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "MANIFEST.json"
_FINAL = re.compile(r"^(\d+)-(\d+)$")
_UNFINISHED = re.compile(r"^(\d+|\{step\})-(\d+)\.tmp$")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    step: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.step}-{self.epoch}"


def checkpoints_directory(storage: Path, job_uid: str) -> Path:
    return storage / job_uid / "checkpoints"


def unfinished_template(storage: Path, job_uid: str, epoch: int) -> str:
    """What ranks are told: `{step}` becomes K, which nobody knows when the order is written."""
    return str(checkpoints_directory(storage, job_uid) / f"{{step}}-{epoch}.tmp")


def parse_final(name: str) -> CheckpointName | None:
    match = _FINAL.match(name)
    return CheckpointName(int(match.group(1)), int(match.group(2))) if match else None


def parse_unfinished(name: str) -> CheckpointName | None:
    match = _UNFINISHED.match(name)
    if match is None or match.group(1) == "{step}":
        return None
    return CheckpointName(int(match.group(1)), int(match.group(2)))


def complete(directory: Path) -> tuple[CheckpointName, ...]:
    """Names of the published checkpoints in a job's directory, oldest first."""
    if not directory.is_dir():
        return ()
    found = [parse_final(path.name) for path in directory.iterdir() if (path / MANIFEST).exists()]
    return tuple(sorted(name for name in found if name is not None))


def read_manifest(directory: Path) -> dict[str, Any]:
    """Raises OSError or ValueError when there is none or it is no JSON object."""
    fields = json.loads((directory / MANIFEST).read_bytes())
    if not isinstance(fields, dict):
        raise ValueError(f"{directory / MANIFEST} is not a JSON object")
    return fields
