"""Retention of files of ended jobs on storage: STORAGE/UID/logs and STORAGE/UID/checkpoints.

Daemons write there, but only the master knows which jobs have ended. It keeps only the last finished jobs, so it notes
each end beside the files. Directories of jobs that are neither known nor noted are kept: a master with another database
knows none of them, and a suspended job may resume from its checkpoints after months.
"""

from __future__ import annotations

import math
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from ganger_master.core.commands import RecordedEnd
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.runtime.state_directory import ended_of, text_of

LOGS: Final = "logs"
CHECKPOINTS: Final = "checkpoints"
# When its job ended, in Unix seconds, and in which state, as text.
_ENDED: Final = "ended"
_TRASH: Final = ".trash-"


def ends_of(jobs: Mapping[int, JobRecord], gangs: Mapping[int, Gang]) -> dict[str, float]:
    """Return the end of each job by uid, in Unix seconds; infinite while it or one of its gangs may still run."""
    busy = {gang.job for gang in gangs.values()}
    return {
        job.uid: job.end_time if job.state.is_finished and job.number not in busy else math.inf for job in jobs.values()
    }


def may_go(ended: float | None, kept: float | None, now: float) -> bool:
    """Return whether files of a job may be deleted. `ended`: Unix seconds, None: unknown. `kept`: seconds, None: for
    ever."""
    return ended is not None and kept is not None and now - ended > kept


def known_ends(ends: Mapping[str, float], jobs: Mapping[int, JobRecord]) -> dict[str, RecordedEnd]:
    """Return how jobs ended, by uid. `ends`: the result of `ends_of`; jobs that have not ended are left out."""
    states = {job.uid: job.state for job in jobs.values()}
    return {uid: RecordedEnd(states.get(uid), ended) for uid, ended in ends.items() if ended != math.inf}


def note_ended(storage: Path, ends: Mapping[str, RecordedEnd]) -> None:
    """Record on storage which of the jobs with files there have ended. Blocks. Raises OSError."""
    for uid, ended in ends.items():
        directory = storage / uid
        if _is_directory(directory) and not (directory / _ENDED).exists():
            fresh = directory / f"{_ENDED}.new"
            fresh.write_text(f"{text_of(ended)}\n")
            fresh.rename(directory / _ENDED)


def noted_ends(storage: Path, uids: Iterable[str]) -> dict[str, RecordedEnd]:
    """Return the ends of these jobs that storage has a note of, by uid. Blocks."""
    found: dict[str, RecordedEnd] = {}
    for uid in uids:
        with suppress(OSError, UnicodeDecodeError):
            found[uid] = ended_of((storage / uid / _ENDED).read_text())
    return found


def expired(storage: Path, ends: Mapping[str, float], kept: Mapping[str, float | None], now: float) -> list[Path]:
    """Return the directories to delete, with those whose deletion was interrupted. Blocks.

    Unpublished checkpoints of ended jobs are deleted at once. `kept`: seconds by the directory's name, as in `may_go`.
    Raises OSError if storage cannot be read.
    """
    found: list[Path] = []
    for directory in _directories(storage):
        ended = ends[directory.name] if directory.name in ends else _noted(directory)
        if may_go(ended, 0.0, now):
            found += _unfinished(directory / CHECKPOINTS)
        for name, seconds in kept.items():
            if may_go(ended, seconds, now):
                found += [part for part in (directory / f"{_TRASH}{name}", directory / name) if _is_directory(part)]
    return found


def _unfinished(directory: Path) -> list[Path]:
    if not _is_directory(directory):
        return []
    names = (path for path in directory.iterdir() if path.name.endswith(".tmp") or path.name.startswith(_TRASH))
    return [path for path in sorted(names) if _is_directory(path)]


def remove(part: Path) -> None:
    """Delete a directory, and the job's directory with its last part. Blocks. Raises OSError.

    It is renamed first, so that no reader finds an incomplete one.
    """
    trash = part
    if not part.name.startswith(_TRASH):
        trash = part.with_name(f"{_TRASH}{part.name}")
        part.rename(trash)
    shutil.rmtree(trash)
    job = part.parent
    if [path.name for path in job.iterdir()] == [_ENDED]:
        (job / _ENDED).unlink()
    with suppress(OSError):
        job.rmdir()


def _directories(storage: Path) -> Iterator[Path]:
    """Yield the directories of jobs; other files on storage belong to other programs."""
    for path in sorted(storage.iterdir()):
        try:
            is_ours = str(uuid.UUID(path.name)) == path.name
        except ValueError:
            continue
        if is_ours and _is_directory(path):
            yield path


def _noted(directory: Path) -> float | None:
    try:
        return ended_of((directory / _ENDED).read_text()).time or None
    except (OSError, ValueError):
        return None


def _is_directory(path: Path) -> bool:
    """Return whether the path is a directory and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False
