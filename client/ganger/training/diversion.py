"""Keeps a script's repeated output away from its logs and files while it is brought back to its position.

An unmodified script starts from its first line after a restart, and would print and write again what it has written
before. Until it is where it was, standard output and error, and files that its own code opens again for writing, go to
a replay log; at the end the same Python objects write to the real places again.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any

from ganger.training.ownership import is_own

TAIL_BYTES = 8192


class Diversion:
    """On from creation until `end`. Works on descriptors, so output of C code is caught too."""

    def __init__(self, log_path: str) -> None:
        self.log_path = log_path
        self._log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._streams = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in self._streams:
            os.dup2(self._log, number)
        self._files: list[tuple[Any, int]] = []
        self._open = builtins.open
        builtins.open = self._open_diverted
        self.active = True

    def end(self) -> None:
        """Let everything flow again. Idempotent."""
        if not self.active:
            return
        self.active = False
        _flush()
        for number, real in self._streams:
            os.dup2(real, number)
            os.close(real)
        for file, real in self._files:
            if not file.closed:
                file.flush()
                os.dup2(real, file.fileno())
            os.close(real)
        if builtins.open == self._open_diverted:
            builtins.open = self._open
        os.close(self._log)

    def tail(self) -> str:
        """The end of what was diverted, for a message about why it never ended."""
        with self._open(self.log_path, "rb") as file:
            file.seek(max(0, os.path.getsize(self.log_path) - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def _open_diverted(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not self.active or not self._writes_again(file, mode):
            return self._open(file, mode, *arguments, **options)
        # appended to from here on: "w" would cut off what was written before the restart
        real = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        opened = self._open(self.log_path, "ab" if "b" in mode else "a", *arguments, **options)
        self._files.append((opened, real))
        return opened

    def _writes_again(self, file: Any, mode: str) -> bool:
        by_script = is_own(sys._getframe(2).f_globals.get("__name__"))
        return by_script and mode.strip("bt") in ("w", "a") and not isinstance(file, int) and os.path.isfile(file)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
