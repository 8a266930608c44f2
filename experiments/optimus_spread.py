"""Where the tasks of Optimus's jobs go (EuroSys 2018, section 4.2): each job on the fewest servers, with as equally
many parameter servers and workers on each as can be, since then the least crosses the network.

Works on arrays of what is free; knows no view, no locality and nothing of what ran where before.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from ganger_master.policies.orders import Flags, Floats, Integers

# What adds up to the whole by rounding fits: relative to what is free.
_ROUNDING = 1e-9
# Jobs placed between two sorts of what is free.
_SORTED_FOR = 32

# Tasks of each kind on a server; what a part takes of each resource; the same for one task of each kind.
Part: TypeAlias = tuple[int, ...]
Need: TypeAlias = tuple[float, ...]
Shape: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class TaskSpread:
    """One row per job and server it lies on, by job; `counts` (rows, k) are its tasks there."""

    job: Integers
    server: Integers
    counts: Integers


def spread(counts: Integers, shapes: Floats, free: Floats) -> TaskSpread:
    """Jobs with the fewest tasks first, servers with the most of the first resource first; ties go to the job and the
    server named first. On n servers, task i of each kind goes to server i mod n; n is the least that holds them.

    `counts` (jobs, kinds), `shapes` (jobs, kinds, resources), `free` (servers, resources). A server that cannot hold
    the smallest such part is passed over, so that servers without GPUs, which have the most free cores, block no job. A
    job that no number of servers holds in this way is placed task by task, kinds in turn, each on the first server that
    has room, as far as that goes; if that is less than one task of each kind, it waits for the next interval and is not
    in the answer.
    """
    room = _Servers(np.asarray(free, float))
    rows: list[tuple[int, int, Part]] = []
    for job in np.lexsort((np.arange(len(counts)), counts.sum(axis=1))).tolist():
        wanted: Part = tuple(counts[job].tolist())
        if min(wanted) > 0:
            shape: Shape = tuple(map(tuple, shapes[job].tolist()))
            rows += [(job, server, part) for server, part in room.hold(wanted, shape)]
    rows.sort(key=lambda row: row[0])
    return TaskSpread(
        np.array([row[0] for row in rows], np.int64),
        np.array([row[1] for row in rows], np.int64),
        np.array([row[2] for row in rows], np.int64).reshape(len(rows), counts.shape[1]),
    )


class _Servers:
    """What is free, and a heap of servers by it. Entries of servers that changed since are dropped when met."""

    def __init__(self, free: Floats) -> None:
        # (r, servers): looks go along one resource. What adds up to the whole by rounding fits.
        self.free = np.ascontiguousarray((free * (1.0 + _ROUNDING)).T)
        # What was free some jobs ago, each resource sorted: no server has more now.
        self._sorted = np.sort(self.free, axis=1)
        self._age = 0
        self._heap = [(-amount, server) for server, amount in enumerate(self.free[0].tolist())]
        heapq.heapify(self._heap)
        self._splits: dict[tuple[Part, Shape, int], tuple[list[Part], list[Need]]] = {}

    def hold(self, wanted: Part, shape: Shape) -> list[tuple[int, Part]]:
        """Take what a job gets: (server, tasks of each kind), by server."""
        self._age += 1
        if self._age % _SORTED_FOR == 0:
            self._sorted = np.sort(self.free, axis=1)
        emptiest: list[int] = []
        looked_at: dict[Need, list[int]] = {}
        found: list[tuple[int, Part]] = []
        for nodes in range(self._fewest(wanted, shape), max(wanted) + 1):
            parts, needs = self._split(wanted, shape, nodes)
            if not self._may_hold(needs[-1], nodes):
                continue
            on = self._emptiest(needs, emptiest) or self._emptiest_that_hold(needs, looked_at, max(wanted))
            if on is not None:
                for server, need in zip(on, needs, strict=True):
                    self.free[:, server] -= need
                found = list(zip(on, parts, strict=True))
                break
        else:
            found = self._one_by_one(wanted, shape)
        for server in {*emptiest, *(server for server, _ in found)}:
            heapq.heappush(self._heap, (-float(self.free[0, server]), server))
        return sorted(found)

    def _split(self, wanted: Part, shape: Shape, nodes: int) -> tuple[list[Part], list[Need]]:
        """The parts on so many servers, most first, and what each takes. Jobs repeat each other."""
        key = (wanted, shape, nodes)
        found = self._splits.get(key)
        if found is None:
            parts = [tuple((count - place + nodes - 1) // nodes for count in wanted) for place in range(nodes)]
            found = self._splits[key] = (parts, [_need(part, shape) for part in parts])
        return found

    def _fewest(self, wanted: Part, shape: Shape) -> int:
        """No fewer servers can hold it; more than it has tasks if none can."""
        fewest = 1
        for need, most in zip(
            _need(wanted, shape), self._sorted[:, -1:].max(axis=1, initial=0.0).tolist(), strict=True
        ):
            if need > most:
                fewest = max(fewest, math.ceil(need / most * (1.0 - _ROUNDING)) if most > 0.0 else max(wanted) + 1)
        return fewest

    def _may_hold(self, need: Need, nodes: int) -> bool:
        """Whether so many servers may have each resource of it: what is cheap to know before looking at all."""
        return all(
            len(column) - int(np.searchsorted(column, wanted)) >= nodes
            for wanted, column in zip(need, self._sorted, strict=True)
        )

    def _emptiest(self, needs: list[Need], emptiest: list[int]) -> list[int] | None:
        """The emptiest servers, if each holds its part; `emptiest` are those taken off the heap for this job so far."""
        while len(emptiest) < len(needs) and self._heap:
            key, server = heapq.heappop(self._heap)
            if -key == self.free[0, server] and server not in emptiest:
                emptiest.append(server)
        if len(emptiest) < len(needs) or not all(map(self._holds, emptiest, needs)):
            return None
        return emptiest[: len(needs)]

    def _emptiest_that_hold(self, needs: list[Need], looked_at: dict[Need, list[int]], most: int) -> list[int] | None:
        """The emptiest servers that hold the smallest part, if each holds its own. `looked_at`: which hold what, up to
        the `most` emptiest; several numbers of servers have the same smallest part."""
        on = looked_at.get(needs[-1])
        if on is None:
            can = np.flatnonzero(self._can_hold(needs[-1]))
            on = can[np.argsort(-self.free[0, can], kind="stable")[:most]].tolist()
            looked_at[needs[-1]] = on
        if len(on) < len(needs) or not all(map(self._holds, on, needs)):
            return None
        return on[: len(needs)]

    def _one_by_one(self, wanted: Part, shape: Shape) -> list[tuple[int, Part]]:
        """Kinds in turn, each task on the first server with room, until one finds none."""
        found: dict[int, list[int]] = {}
        placed = [0] * len(wanted)
        turns = [kind for turn in range(max(wanted)) for kind, count in enumerate(wanted) if turn < count]
        for kind in turns:
            can = self._can_hold(shape[kind])
            server = int(np.argmax(can))
            if not can[server]:
                break
            self.free[:, server] -= shape[kind]
            found.setdefault(server, [0] * len(wanted))[kind] += 1
            placed[kind] += 1
        if min(placed) > 0:
            return [(server, tuple(part)) for server, part in found.items()]
        for server, part in found.items():
            self.free[:, server] += _need(tuple(part), shape)
        return []

    def _holds(self, server: int, need: Need) -> bool:
        return all(wanted <= there for wanted, there in zip(need, self.free[:, server].tolist(), strict=True))

    def _can_hold(self, need: Need) -> Flags:
        can = self.free[0] >= need[0]
        for there, wanted in zip(self.free[1:], need[1:], strict=True):
            if wanted > 0.0:
                can &= there >= wanted
        return np.asarray(can, bool)


def _need(part: Part, shape: Shape) -> Need:
    """What a part takes of each resource."""
    return tuple(
        sum(count * each for count, each in zip(part, column, strict=True)) for column in zip(*shape, strict=True)
    )
