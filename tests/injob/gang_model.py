"""A gang as the boundary rule sees it: hosts that run ahead of their devices, and news that travels slowly.

Each rank's host begins a step, which enqueues it on its device; the host passes the next boundary at once, unless its
queue is full or the script waits for the device (`loss.item()`). A device finishes a step only when every rank has
begun it, for that is the collective. Ranks of one node see each other's pages; pages of other nodes are mirrors that
follow when a relayed message arrives. Orders reach ranks one by one. The next actor is drawn from a seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ganger.protocol.stop_rules import BoundaryDecision, RankPoint, stop_step

Rule = Callable[[Sequence[RankPoint], int], BoundaryDecision]


@dataclass(frozen=True)
class Setting:
    """``nodes[r]`` is the node of rank r; ``sync_every`` 0: the host never waits for the device.

    ``stops``: True is STOP (its number is its place + 1), False is RUN; ``pace`` weighs how often ranks, relays and
    order deliveries move.
    """

    nodes: tuple[int, ...]
    queue_depth: int
    sync_every: int
    steps: int
    orders: tuple[bool, ...]
    pace: tuple[int, ...]
    relay_pace: int
    order_pace: int
    seed: int


class OverrunError(AssertionError):
    """A rank stands behind the step all have agreed on."""


class DeadlockError(AssertionError):
    """No actor can move, and the order is not carried out."""


@dataclass
class Rank:
    step: int = 0  # boundaries passed
    begun: int = 0  # steps enqueued
    device: int = 0  # steps the device has finished
    ack_seq: int = 0
    ack_step: int = 0
    done: bool = False
    order: int = 0  # orders received
    agreed: dict[int, BoundaryDecision] = field(default_factory=dict)
    holds: int = 0  # number of the stop it stands at


Snapshot = tuple[int, int, int, bool]


class Gang:
    def __init__(self, setting: Setting, rule: Rule) -> None:
        self.setting = setting
        self.rule = rule
        self.ranks = [Rank() for _ in setting.nodes]
        self.random = random.Random(setting.seed)
        node_count = max(setting.nodes) + 1
        self.mirrors: list[dict[int, Snapshot]] = [
            {rank: (0, 0, 0, False) for rank, home in enumerate(setting.nodes) if home != node}
            for node in range(node_count)
        ]
        self.sent: dict[tuple[int, int], Snapshot] = {}
        self.travelling: dict[tuple[int, int], deque[Snapshot]] = {
            (node, rank): deque() for node, mirrors in enumerate(self.mirrors) for rank in mirrors
        }

    def run(self) -> None:
        """Move until no actor can; raises OverrunError or DeadlockError if the last order is not carried out then."""
        for _ in range(200_000):
            moves = self._moves()
            if not moves:
                self._check_end()
                return
            weights = [weight for weight, _ in moves]
            self.random.choices(moves, weights)[0][1]()
        raise DeadlockError("ranks move for ever")

    def _moves(self) -> list[tuple[int, Callable[[], None]]]:
        moves: list[tuple[int, Callable[[], None]]] = []
        slowest_begun = min(rank.begun for rank in self.ranks)
        slowest_device = min(rank.device for rank in self.ranks)
        for number, rank in enumerate(self.ranks):
            pace = self.setting.pace[number]
            if rank.device < slowest_begun and rank.device <= slowest_device:
                moves.append((pace, lambda rank=rank: self._finish_on_device(rank)))
            if rank.order < len(self.setting.orders):
                moves.append((self.setting.order_pace, lambda rank=rank: self._deliver_order(rank)))
            if rank.begun > rank.step:
                if self._may_pass(rank):
                    moves.append((pace, lambda number=number: self._pass_boundary(number)))
            elif not rank.done and self._look(number, probe=True):
                moves.append((pace, lambda number=number: self._look(number, probe=False)))
        for (node, source), queue in self.travelling.items():
            now = self._snapshot(source)
            if self.sent.get((node, source)) != now:
                moves.append((self.setting.relay_pace, lambda node=node, source=source: self._send(node, source)))
            if queue:
                moves.append((self.setting.relay_pace, lambda node=node, source=source: self._arrive(node, source)))
        return moves

    def _may_pass(self, rank: Rank) -> bool:
        after = rank.step + 1
        every = self.setting.sync_every
        if every and after % every == 0 and rank.device < after:
            return False
        return after - rank.device <= self.setting.queue_depth

    def _pass_boundary(self, number: int) -> None:
        """The boundary of the step in hand: acknowledge before publishing the step, as a rank does."""
        rank = self.ranks[number]
        after = rank.step + 1
        stop = self._stop_of(rank)
        if stop and rank.ack_seq != stop:
            rank.ack_seq, rank.ack_step = stop, after
        rank.step = after
        decision = rank.agreed.get(stop)
        if decision is not None and not decision.finished and decision.stop_step is not None:
            self._check_not_over(number, decision.stop_step)

    def _look(self, number: int, probe: bool) -> bool:
        """Stand at a boundary and look once; with ``probe`` only say whether looking would change anything."""
        rank = self.ranks[number]
        stop = self._stop_of(rank)
        if stop == 0:
            return probe or self._begin(rank)
        if rank.ack_seq != stop:
            if not probe:
                rank.ack_seq, rank.ack_step = stop, rank.step
            return True
        decision = rank.agreed.get(stop) or self.rule(self._points(number, stop), number)
        if decision.finished:
            return probe or self._begin(rank)
        if decision.stop_step is not None:
            if not probe:
                rank.agreed[stop] = decision
                self._check_not_over(number, decision.stop_step)
            if rank.step == decision.stop_step:
                if probe:
                    return rank.holds != stop
                rank.holds = stop
                return True
            return probe or self._begin(rank)
        if rank.step < decision.limit:
            return probe or self._begin(rank)
        return False

    def _begin(self, rank: Rank) -> bool:
        rank.holds = 0
        if rank.step == self.setting.steps:
            rank.done = True
        else:
            rank.begun += 1
        return True

    def _stop_of(self, rank: Rank) -> int:
        return rank.order if rank.order and self.setting.orders[rank.order - 1] else 0

    def _points(self, number: int, stop: int) -> list[RankPoint]:
        mirrors = self.mirrors[self.setting.nodes[number]]
        points = []
        for other in range(len(self.ranks)):
            step, ack_seq, ack_step, done = mirrors.get(other) or self._snapshot(other)
            points.append(RankPoint(step, ack_step if ack_seq == stop else None, done))
        return points

    def _snapshot(self, number: int) -> Snapshot:
        rank = self.ranks[number]
        return rank.step, rank.ack_seq, rank.ack_step, rank.done

    def _send(self, node: int, source: int) -> None:
        self.sent[node, source] = self._snapshot(source)
        self.travelling[node, source].append(self.sent[node, source])

    def _arrive(self, node: int, source: int) -> None:
        self.mirrors[node][source] = self.travelling[node, source].popleft()

    def _deliver_order(self, rank: Rank) -> None:
        rank.order += 1

    def _finish_on_device(self, rank: Rank) -> None:
        rank.device += 1

    def _check_not_over(self, number: int, agreed: int) -> None:
        if self.ranks[number].step > agreed:
            raise OverrunError(f"rank {number} is at {self.ranks[number].step}, the agreed stop was {agreed}")

    def _check_end(self) -> None:
        last = len(self.setting.orders) if self.setting.orders and self.setting.orders[-1] else 0
        if all(rank.done for rank in self.ranks):
            return
        if last and all(rank.holds == last for rank in self.ranks):
            if len({rank.step for rank in self.ranks}) != 1:
                raise OverrunError(f"ranks hold at {[rank.step for rank in self.ranks]}")
            return
        raise DeadlockError(f"no actor can move: {self.ranks}")


def fixed_allowance(points: Sequence[RankPoint], rank: int) -> BoundaryDecision:
    """The rule that does not work: an acknowledged rank may always make one further step, never more."""
    own = points[rank].ack
    step = stop_step(points)
    finished = any(point.done for point in points)
    assert own is not None
    return BoundaryDecision(own + 1 if step is None else step, step, finished)


class LeaderGang(Gang):
    """The other one that does not: rank 0 says "stop at my step + 2" when it sees the order."""

    stop_at: int | None = None

    def _look(self, number: int, probe: bool) -> bool:
        rank = self.ranks[number]
        stop = self._stop_of(rank)
        if stop and number == 0 and self.stop_at is None:
            if not probe:
                self.stop_at = rank.step + 2
            return True
        if stop and self.stop_at is not None:
            if not probe:
                self._check_not_over(number, self.stop_at)
            if rank.step >= self.stop_at and not probe:
                rank.holds = stop
            if rank.step >= self.stop_at:
                return rank.holds != stop if probe else True
        return probe or self._begin(rank)
