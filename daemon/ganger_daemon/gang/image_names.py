"""Names by which the processes of a gang find their page, socket and temporary files.

They stay the same wherever the processes are restored, and lead to the directories of the present epoch.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ganger.injob.launcher.namespaces import LINKS, bind, make_links, unbind

from ganger_daemon.node.daemon_files import GangPaths, make_directory, remove_tree

log = logging.getLogger(__name__)


class ImageNames:
    """Names of one gang. `directory`: that of the names which its processes know, of their first epoch; empty without
    any. `files`: the directory with their temporary files."""

    def __init__(self, paths: GangPaths, temporary: Path) -> None:
        self._paths = paths
        self.directory = ""
        self.files = temporary / paths.group

    def make(self) -> str:
        """Make names for processes that start here. Return why that cannot be done; empty if it is done. Blocks."""
        self.directory = f"{LINKS}/{self._paths.group}"
        try:
            make_directory(self.files)
            make_links(self.directory, self.links)
            unbind(self.temporary)
            bind(str(self.files), self.temporary)
        except OSError as error:
            # as in a container that may not mount: the job starts, and is saved in other ways
            self.directory = ""
            log.warning("no process images of a gang", extra={"group": self._paths.group, "cause": str(error)})
            return f"its directories cannot be named: {error}"
        return ""

    def give(self, mapping: dict[str, Any], *, has_agent: bool) -> dict[str, Any]:
        """Return a launcher's request for a rank that finds its files by names; without names the request itself."""
        if not self.directory:
            return mapping
        environment = dict(mapping["env"])
        environment["GANGER_PAGE"] = str(self.page(Path(mapping["page"])))
        environment["GANGER_JOB_DIR"] = f"{self.directory}/job"
        environment["GANGER_SOCKET"] = f"{self.directory}/run/{self._paths.socket.name}"
        environment.setdefault("TMPDIR", self.temporary)
        # the address of this node is not that of another one
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if has_agent:
            environment["GANGER_IMAGE"] = "1"
        return {**mapping, "env": environment, "no_io_uring": True}

    def page(self, page: Path) -> Path:
        """Return the name by which a process that is started here finds its page."""
        return Path(f"{LINKS}/{self._paths.group}/run/{page.name}")

    @property
    def links(self) -> dict[str, str]:
        """Where the names lead now."""
        return {"run": str(self._paths.run), "job": str(self._paths.job)}

    @property
    def temporary(self) -> str:
        """The path at which the processes have their temporary files."""
        return f"{self.directory}/tmp"

    def remove(self) -> None:
        """Remove the names that were made here, and the temporary files. Blocks."""
        if self.directory:
            own = f"{LINKS}/{self._paths.group}"
            unbind(f"{own}/tmp")
            remove_tree(Path(own))
            remove_tree(self.files)
