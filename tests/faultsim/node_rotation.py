"""The rotation of time slices on a simulated node. Daemons have a core of their own for it, which no master module
imports: the maker of a cluster passes it in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from faultsim.rank_processes import Ranks
from ganger_master.core.commands import ObservedSlices
from ganger_master.core.desired_projection import DesiredGang, DesiredSlices


class NodeRotation(Protocol):
    def hear(self, told: Sequence[DesiredSlices]) -> None:
        """The node sets of a desired set, complete; its gangs follow."""

    def know(self) -> None:
        """All gangs that were told with them are here."""

    def rules(self, ranks: Ranks, told: DesiredGang) -> bool:
        """Whether what the master wants of ranks here waits for a turn, or for the end of one."""

    def follow(self) -> None:
        """Lead the node sets of this node, and let each gang here run or park as ordered."""

    def observed(self) -> tuple[ObservedSlices, ...]: ...

    def forget(self) -> None:
        """The disk with the notes is gone."""

    def waits(self, ranks: Ranks) -> bool:
        """Whether ranks that were never forked are not to be yet."""

    def share_paused(self, one: Ranks, other: Ranks) -> bool:
        """Whether both stay on their devices while they take turns there."""


class NoTurns:
    """A daemon that switches no rows."""

    def hear(self, told: Sequence[DesiredSlices]) -> None: ...

    def know(self) -> None: ...

    def rules(self, ranks: Ranks, told: DesiredGang) -> bool:
        return False

    def follow(self) -> None: ...

    def observed(self) -> tuple[ObservedSlices, ...]:
        return ()

    def forget(self) -> None: ...

    def waits(self, ranks: Ranks) -> bool:
        return False

    def share_paused(self, one: Ranks, other: Ranks) -> bool:
        return False
