"""The launchers of this node: one per user, interpreter and environment that matters, started when first needed.

A launcher outlives the daemon. One that died is replaced at the next use; the new one adopts the ranks that still run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from ganger.injob.inject import prepare_inject_directory
from ganger.injob.launcher.client import Launcher, LauncherError, start_launcher
from ganger.injob.launcher.launch import startup_variables

log = logging.getLogger(__name__)

# Besides what an interpreter reads once: what decides which code it finds. Everything else is set after the fork.
_ALSO_MATTERS = ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PATH")
_IDLE_SECONDS = 300.0

__all__ = ["LauncherError", "Launchers", "interpreter_of"]


def interpreter_of(command: tuple[str, ...], environment: Mapping[str, str], directory: str) -> str:
    """The Python a command starts, as an absolute path; ours for a command that is no Python."""
    name = os.path.basename(command[0])
    if not name.startswith("python"):
        return sys.executable
    if os.sep in command[0]:
        path = os.path.normpath(os.path.join(directory, command[0]))
        return path if os.access(path, os.X_OK) else sys.executable
    return shutil.which(command[0], path=environment.get("PATH")) or sys.executable


class Launchers:
    """Thread-safe; every call may block for as long as a launcher takes to start."""

    def __init__(self, directory: Path, inject: Path, preload: bool = True) -> None:
        self._directory = directory
        self._inject = inject
        self._preload = preload
        self._lock = threading.Lock()
        self._known: dict[str, Launcher] = {}
        self._starting: dict[str, threading.Lock] = {}

    @property
    def inject(self) -> str:
        return prepare_inject_directory(str(self._inject))

    @staticmethod
    def key(interpreter: str, environment: Mapping[str, str], user: str = "") -> str:
        parts = [user, interpreter, *(f"{name}={value}" for name, value in sorted(_base(environment).items()))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def socket_path(self, key: str) -> Path:
        return self._directory / f"{key}.sock"

    def running(self, key: str) -> Launcher | None:
        """A launcher that answers now, or None. Starts nothing."""
        with self._lock:
            launcher = self._known.get(key)
        if launcher is None:
            if not self.socket_path(key).exists():
                return None
            try:
                launcher = Launcher(str(self.socket_path(key)))
            except LauncherError:
                return None
        try:
            launcher.info()
        except (LauncherError, OSError):
            with self._lock:
                self._known.pop(key, None)
            launcher.close()
            return None
        with self._lock:
            self._known[key] = launcher
        return launcher

    def close(self) -> None:
        """Hangs up; launchers go on."""
        with self._lock:
            for launcher in self._known.values():
                launcher.close()
            self._known.clear()

    def get(self, key: str, interpreter: str, environment: Mapping[str, str]) -> Launcher:
        """A launcher that answers, started if need be. Raises LauncherError when none can be started."""
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        with starting:
            launcher = self.running(key)
            if launcher is not None:
                return launcher
            log.info("launcher starts", extra={"key": key, "interpreter": interpreter})
            base = _base(environment)
            for name in ("HOME", "USER", "TMPDIR"):
                if name in environment or name in os.environ:
                    base[name] = environment.get(name, os.environ.get(name, ""))
            base.setdefault("PATH", os.environ.get("PATH", os.defpath))
            start_launcher(
                interpreter,
                str(self.socket_path(key)),
                inject=self.inject,
                env=base,
                log=str(self._directory / f"{key}.log"),
                idle_seconds=_IDLE_SECONDS,
                preload=self._preload,
            )
            launcher = self.running(key)
            if launcher is None:
                raise LauncherError("NOT_STARTED", f"the launcher of {interpreter} does not answer; see its log")
            return launcher


def _base(environment: Mapping[str, str]) -> dict[str, str]:
    base = startup_variables(environment)
    base.update({name: environment[name] for name in _ALSO_MATTERS if name in environment})
    return base
