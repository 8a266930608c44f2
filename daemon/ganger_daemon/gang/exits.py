"""How a rank ended: what the launcher recorded, else what the agent left in the page, else UNKNOWN."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ganger_daemon.core.gang_judgement import RankExit
from ganger_daemon.node.processes import ProcessId, is_alive
from ganger_daemon.node.safe_files import read_json


def exit_of(record: Path, process: ProcessId, page_exit_code: int | None, launcher_lives: bool) -> RankExit | None:
    """None while the rank lives, or while its launcher may still record how it ended.

    A missing record counts only when nobody is left to write one: the process is gone and so is its launcher.
    """
    recorded = _recorded(read_json(record), process, page_exit_code)
    if recorded is not None:
        return recorded
    if is_alive(process) or launcher_lives:
        return None
    return RankExit(known=False) if page_exit_code is None else RankExit(page_exit_code)


def _recorded(fields: Mapping[str, Any], process: ProcessId, page_exit_code: int | None) -> RankExit | None:
    """None without a record of this process; nonsense in its place is none."""
    if not fields:
        return None
    try:
        # a record of another pid belongs to a former try; after a reboot no pid is known, and any record is the one
        if process.pid and int(fields.get("pid") or 0) not in (0, process.pid):
            return None
        code, number = fields.get("code"), fields.get("signal")
        at = float(fields.get("time") or 0.0)
        if code is None and not number:
            return RankExit(known=False, at=at) if page_exit_code is None else RankExit(page_exit_code, at=at)
        return RankExit(int(code or 0) & 0xFF, int(number or 0) & 0x7F, at=at)
    except (TypeError, ValueError, OverflowError):
        return None
