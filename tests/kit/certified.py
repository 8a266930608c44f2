"""An authority of a test's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ganger.certificates import issue, make_authority
from ganger.wire.roles import Identity, Role

HOSTS = ("127.0.0.1", "localhost")


class Authority:
    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._own = directory / name
        self.name = name
        make_authority(self._own)

    def issue(
        self, role: Role | str, name: str, hosts: Sequence[str] | None = None, days: float = 1.0, to: str = ""
    ) -> Path:
        """The directory with the new certificate; the one there is if it was issued before."""
        out = self._directory / (to or f"{self.name}-{role}-{name}")
        if not out.exists():
            identity = Identity(Role(role), name)
            serves = identity.role in (Role.MASTER, Role.DAEMON)
            issue(self._own, identity, (HOSTS if hosts is None else hosts) if serves else (), days, out)
        return out
