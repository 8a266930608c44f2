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
        """Pin a running group. Return the CPUs it now runs on, or () when it could not be pinned."""

    def set_memory_limit(self, group: str, memory_bytes: int) -> bool:
        """Limit the memory of a group. Return False when the limit is not enforced."""

    def track(self, group: str, pid: int) -> None:
        """Record that a process and its session belong to the group."""

    def pids(self, group: str) -> tuple[int, ...]: ...

    def freeze(self, group: str, timeout_s: float = 5.0) -> bool:
        """Freeze the group. Return True once every process is frozen."""

    def thaw(self, group: str, timeout_s: float = 5.0) -> bool: ...

    def frozen(self, group: str) -> bool: ...

    def kill(self, group: str) -> None:
        """Send SIGKILL to all processes of the group, frozen or not."""

    def oom_kills(self, group: str) -> int:
        """Return the number of processes that the kernel killed for the memory limit."""

    def cpu_s(self, group: str) -> float: ...

    def memory_bytes(self, group: str) -> int: ...

    def unreclaimable_bytes(self, group: str) -> int:
        """Return its memory in bytes without file caches, which the kernel reclaims under pressure; zero if unknown."""

    def destroy(self, group: str, timeout_s: float = 5.0) -> bool:
        """Remove a group. Return False if it still has processes after `timeout_s`; True also for a missing group."""

    def groups(self) -> tuple[str, ...]:
        """Return the names of all groups that exist, for adoption and for the janitor."""

    def tidy(self) -> None:
        """Remove the root of all groups if no group is left. The object stays usable."""


def is_done(cgroups: Cgroups, capability: str) -> bool:
    """Return whether the kernel provides a capability; false where signals replace it or nothing does."""
    return cgroups.capabilities[capability] in ("v1", "v2")


GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def checked(group: str) -> str:
    """A group name becomes part of a path, so nothing else passes."""
    if not GROUP_NAME.fullmatch(group):
        raise ValueError(f"{group!r} is no group name; use letters, digits, '.', '_' and '-'")
    return group
