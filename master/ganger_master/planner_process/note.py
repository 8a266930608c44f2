"""The file from which a planner continues what the one before it remembered.

The note is a hint: without it, or if it cannot be read or written, the planner logs that and measures again. It is
replaced whole and not synced: it is to survive processes, and jobs do not survive a machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from ganger_master.planner.memory import PlannerMemory, Unusable, noted, packed, recalled

log = logging.getLogger(__name__)


class Note:
    """The note file. `path` None: nothing is noted. One writer."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written = b""
        self._has_failed = False

    @property
    def is_kept(self) -> bool:
        return self._path is not None

    def recall(self, policy: str, now: float, create_time: Callable[[int], float | None]) -> PlannerMemory | None:
        """What was noted, as `memory.recalled` has it; None where there is nothing that can be used."""
        try:
            content = b"" if self._path is None else self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("note not read", extra={"path": str(self._path), "reason": error.strerror})
            return None
        found = recalled(content, policy, now, create_time) if self._path is not None else None
        if isinstance(found, Unusable):
            log.warning("note not used", extra={"path": str(self._path), "reason": found.why})
            return None
        return found

    def write(self, memory: PlannerMemory, policy: str, now: float) -> None:
        """Write the note, unless it equals the last one."""
        packet = packed(memory)
        if self._path is None or packet == self._written:
            return
        # Readable only by its owner: it names nodes and what jobs do.
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(noted(packet, policy, now))
            new.replace(self._path)
        except OSError as error:
            if not self._has_failed:
                log.warning("note not written", extra={"path": str(self._path), "reason": error.strerror})
            self._has_failed = True
            return
        self._written, self._has_failed = packet, False

    def forget(self) -> None:
        """Remove the note, so that a planner that failed by it is not followed by one that does so again."""
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("note not removed", extra={"path": str(self._path), "reason": error.strerror})
