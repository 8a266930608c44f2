"""Cgroups and run directories that killed daemons left on this machine outside their state directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ganger_daemon.cgroups import controllers

_CGROUPS = Path("/sys/fs/cgroup")


def remove_leftovers(state_directories: Iterable[Path]) -> None:
    """Remove the leftovers of daemons all of whose processes have been killed."""
    for state in state_directories:
        with suppress(OSError, ValueError, KeyError):
            node = json.loads((state / "node.json").read_text())
            shutil.rmtree(node["run_directory"], ignore_errors=True)
            for root in (*_CGROUPS.glob(node["cgroup"]), *_CGROUPS.glob(f"*/{node['cgroup']}")):
                for group in sorted((path for path in root.glob("**/") if path.is_dir()), reverse=True):
                    # A killed process leaves its group some time after it can no longer be seen.
                    controllers.wait_until(lambda group=group: controllers.remove(group), 10.0)  # type: ignore[misc]
