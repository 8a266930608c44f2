"""The nodes that reservations close to jobs, found for many jobs at once."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from typing import Final

from ganger.protocol.gang_orders import Mechanism

from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import Agent
from ganger_master.core.node_model import Reservation


class NodeClosures:
    """Which nodes reservations close to jobs that would start at a time; false if they close none to any job.

    reservations: those of the cluster. now: Unix seconds. The answers hold until the first reservation ends."""

    def __init__(self, reservations: Collection[Reservation], now: float) -> None:
        self._of, self._until = reservations, min([one.end for one in reservations if one.end > now], default=math.inf)
        self._reservations = sorted([one for one in reservations if one.end > now], key=lambda one: one.start)
        self._starts = [one.start for one in self._reservations]
        self._users = frozenset[str]().union(*[one.users for one in self._reservations])
        # By user, empty for a user of no reservation, and how many reservations a job reaches.
        self._known: dict[tuple[str, int], frozenset[str]] = {}
        # By node the reservations that have it, by their place in the order given; filled at the first use.
        self._on: dict[str, list[tuple[int, Reservation]]] = {}

    def __bool__(self) -> bool:
        return bool(self._reservations)

    def are_of(self, reservations: Collection[Reservation], now: float) -> bool:
        """Return whether the answers are for these reservations, and still hold."""
        return self.hold_at(now) and self._of == reservations

    def hold_at(self, now: float) -> bool:
        """Return whether the answers hold at a time, if the reservations are the same."""
        return now < self._until

    def of(self, job: JobRecord, now: float) -> frozenset[str]:
        """Return the nodes on which a job may not start now."""
        if can_leave(job):
            count = bisect_right(self._starts, now)
        else:
            count = bisect_left(self._starts, end_of_start(job, job.ran_s(now), now))
        key = job.user if job.user in self._users else "", count
        found = self._known.get(key)
        if found is None:
            others = [one.nodes for one in self._reservations[:count] if job.user not in one.users]
            found = self._known[key] = frozenset[str]().union(*others)
        return found

    def on(self, nodes: Iterable[str]) -> list[Reservation]:
        """Return the reservations that have any of these nodes, in the order in which all were given."""
        if not self._on:
            for place, reservation in enumerate(self._of):
                for name in reservation.nodes:
                    self._on.setdefault(name, []).append((place, reservation))
        found = dict([one for name in nodes for one in self._on.get(name, ())])
        return [found[place] for place in sorted(found)]


NO_CLOSURES: Final = NodeClosures((), 0.0)


def end_of_start(job: JobRecord, ran_s: float, now: float) -> float:
    """Return when a job that starts or resumes at `now` ends at the latest. ran_s: seconds that count against its limit
    already."""
    limit = job.time_limit_s
    return math.inf if limit is None else now + max(0.0, limit - ran_s)


def can_leave(job: JobRecord) -> bool:
    """Return whether a job can be moved or stopped without loss, as far as is known before it runs."""
    if job.capabilities.known:
        return job.capabilities.can_move or job.capabilities.checkpoint
    spec = job.spec
    saves_itself = bool(spec.stop_signal) or spec.mechanism is Mechanism.IMAGE
    return spec.agent is not Agent.NONE or saves_itself
