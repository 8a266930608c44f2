"""Files beside the database, by which a master notices that its database is an older copy.

DATABASE.marks has the next ids of the database and is rewritten after every commit. DATABASE.ended has the jobs that
have ended, one a line. Neither belongs into a backup. Both are hints: no commit waits for them or fails because of
them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec
from ganger.job_state import JobState

from ganger_master.core.commands import Marks, RecordedEnd
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Counters, Element

log = logging.getLogger(__name__)

# Marks are padded to this length, so that a text never leaves the end of a longer one behind it.
_MARKS_BYTES: Final = 512
_SYNC_SECONDS: Final = 10.0
# Bytes of the file of ended jobs; beyond them the older half is dropped.
_ENDED_MOST_BYTES: Final = 32 << 20


class Beside:
    """The files beside one database. The store's thread calls all methods except `take_ended`, and `marks` and `ends`,
    which read the files."""

    def __init__(self, database: Path) -> None:
        self._marks = database.with_name(f"{database.name}.marks")
        self._ended = database.with_name(f"{database.name}.ended")
        self._fresh: list[tuple[str, RecordedEnd]] = []
        self._synced = 0.0
        # Descriptor of the marks, kept open because opening costs more than writing. -1: none.
        self._descriptor = -1
        self._fails = False

    def marks(self) -> Marks | None:
        """Return the marks; None where there is no file, or one that cannot be read."""
        try:
            return msgspec.json.decode(self._marks.read_bytes(), type=Marks)
        except (OSError, msgspec.MsgspecError):
            return None

    def ends(self, uids: Collection[str]) -> dict[str, RecordedEnd]:
        """Return the recorded ends of these jobs, by uid. Blocks."""
        found: dict[str, RecordedEnd] = {}
        try:
            with self._ended.open("rb") as file:
                for line in file:
                    uid, _, end = line.decode(errors="replace").strip().partition(" ")
                    if uid in uids:
                        found[uid] = ended_of(end)
        except OSError:
            pass
        return found

    def note(self, changed: Iterable[Element]) -> None:
        """Record what a commit of these elements has changed."""
        counters, ended = None, []
        for element in changed:
            if isinstance(element, Counters):
                counters = element
            elif isinstance(element, JobRecord) and element.state.is_finished:
                ended.append((element.uid, RecordedEnd(element.state, element.end_time)))
        try:
            if ended:
                self._append(ended)
                self._fresh += ended
            if counters is not None and counters.store:
                self._write(counters)
            self._fails = False
        except OSError as error:
            if not self._fails:
                log.warning("not noted beside the database", extra={"path": str(self._marks), "error": str(error)})
            self._fails = True

    def take_ended(self) -> list[tuple[str, RecordedEnd]]:
        """Return the jobs that have ended since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _write(self, counters: Counters) -> None:
        text = msgspec.json.encode(Marks.of(counters)).ljust(_MARKS_BYTES - 1) + b"\n"
        now = time.monotonic()
        is_due = now - self._synced > _SYNC_SECONDS
        if self._descriptor < 0 or (is_due and not self._is_in_place()):
            self.close()
            self._descriptor = os.open(self._marks, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._descriptor, text, 0)
        if is_due:
            os.fdatasync(self._descriptor)
            self._synced = now

    def _is_in_place(self) -> bool:
        """Return whether the open file is still the one of that name: a person may have moved or removed it."""
        try:
            return os.path.samestat(os.stat(self._marks), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _append(self, ended: Iterable[tuple[str, RecordedEnd]]) -> None:
        text = "".join([f"{uid} {text_of(end)}\n" for uid, end in ended])
        descriptor = os.open(self._ended, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, text.encode())
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > _ENDED_MOST_BYTES:
            lines = self._ended.read_bytes().splitlines(keepends=True)
            fresh = self._ended.with_name(f"{self._ended.name}.new")
            fresh.write_bytes(b"".join(lines[len(lines) // 2 :]))
            fresh.replace(self._ended)


def text_of(end: RecordedEnd) -> str:
    """Return the text of an end, "TIME STATE"; without a state where that is not known."""
    return f"{end.time!r} {end.state.value}" if end.state is not None else f"{end.time!r}"


def ended_of(text: str) -> RecordedEnd:
    """Return the end in a text "TIME STATE". Its state is None where it is missing or of a newer master."""
    time_text, _, state = text.strip().partition(" ")
    try:
        when = float(time_text)
    except ValueError:
        when = 0.0
    return RecordedEnd(JobState(state) if state in set(JobState) else None, when)
