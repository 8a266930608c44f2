"""Interface to control groups, whatever the kernel of the node offers.

One group holds the ranks of one gang on this node. Groups are flat and named by the daemon; several may share a pool,
which limits their common CPU time. All calls may be repeated. A job never fails because pinning, a limit or freezing is
unavailable: `capabilities` names what is missing, and calls return whether they took effect.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Protocol


class Variant(Enum):
    V1 = "v1"
    V2 = "v2"
    HYBRID = "hybrid"
    NONE = "none"


class Cgroups(Protocol):
    @property
    def variant(self) -> Variant: ...

    @property
    def capabilities(self) -> Mapping[str, str]:
        """`cgroup`: the variant. `cpuset`, `memory`, `freeze`, `kill`, `cpu_usage`, `cpu_quota`: how it is done
        here, or "none: why"."""

    def make_pool(self, pool: str, cores: float) -> bool:
        """Limit the groups of a pool to this many cores together. Return False if that is unavailable. Raises
        ValueError for an invalid name."""

    def create(self, group: str, pool: str = "") -> None:
        """Make a group. Raises OSError only if nothing at all can be made, ValueError for an invalid name."""

    def join_files(self, group: str) -> tuple[str, ...]:
        """Files a forked child writes "0" into, in this order and before it runs the user's command, to enter."""

    def freezer_file(self, group: str) -> str:
        """Return the kernel's file that freezes the group (`cgroup.freeze`, `freezer.state`); "" if signals must."""

    def hasten(self) -> None:
        """Prepare the kernel for a process that is about to join a group. Blocks for some 10 ms, which the process
        would wait otherwise: call it beside other work."""

    def set_cpus(self, group: str, cpus: Collection[int]) -> tuple[int, ...]:
        """Live. Returns the CPUs the group now runs on, or () when it could not be pinned."""

    def set_memory_limit(self, group: str, memory_bytes: int) -> bool:
        """False when it is not enforced."""

    def track(self, group: str, pid: int) -> None:
        """A process the daemon knows to belong to the group; its session belongs with it."""

    def pids(self, group: str) -> tuple[int, ...]: ...

    def freeze(self, group: str, timeout_s: float = 5.0) -> bool:
        """Freeze the group. Return True once every process is frozen."""

    def thaw(self, group: str, timeout_s: float = 5.0) -> bool: ...

    def frozen(self, group: str) -> bool: ...

    def kill(self, group: str) -> None:
        """SIGKILL to everything in it, frozen or not."""

    def oom_kills(self, group: str) -> int:
        """How many processes the kernel killed for the group's memory limit."""

    def cpu_s(self, group: str) -> float: ...

    def memory_bytes(self, group: str) -> int: ...

    def unreclaimable_bytes(self, group: str) -> int:
        """Return its memory in bytes without file caches, which the kernel reclaims under pressure; zero if unknown."""

    def destroy(self, group: str, timeout_s: float = 5.0) -> bool:
        """False while processes are still there after the time; a group that is gone is True."""

    def groups(self) -> tuple[str, ...]:
        """Those that exist, by name: for adoption and for the janitor."""

    def tidy(self) -> None:
        """Removes the root of all groups if none is left. Work can go on afterwards."""


def is_done(cgroups: Cgroups, capability: str) -> bool:
    """Return whether the kernel provides a capability; false where signals replace it or nothing does."""
    return cgroups.capabilities[capability] in ("v1", "v2")


GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def checked(group: str) -> str:
    """A group name becomes part of a path, so nothing else passes."""
    if not GROUP_NAME.fullmatch(group):
        raise ValueError(f"{group!r} is no group name; use letters, digits, '.', '_' and '-'")
    return group
