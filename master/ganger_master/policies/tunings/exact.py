"""The optimal division of each node's cores and memory: one choice for each gang, the highest sum of rates relative to
the shares, no gang below its share. Gangs on several nodes get one choice, one gang after the other.

The knapsack is solved exactly: partial choices are kept as long as no other one is worth as much with no more of either
resource, and as long as they could still beat the best choice known, by prices for cores and memory (Lagrange).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ganger_master.policies.orders import Floats, Integers
from ganger_master.policies.tunings import (
    ROUNDING,
    Gangs,
    Pieces,
    Tuning,
    TuningDemand,
    TuningNodes,
    demands,
    options,
    pieces,
    proportionally,
    runnable,
)
from ganger_master.policies.tunings.synergy import RoundPacking, best_amounts

# Steps of the search for prices: each halves the interval of one of them. Any prices give a valid bound.
_PRICE_STEPS = 12
# Partial choices kept for one piece: of more, the most promising are, and the answer is no longer proved best. A node
# of 8 GPUs and gangs with the published profiles needs up to a few hundred.
MOST_STATES = 4096
# Costs and values of each option of one piece.
Choices = tuple[Floats, Floats, Floats]


def best_choice(pieces: Sequence[Choices], cores: float, memory: float) -> list[int] | None:
    """Return the position of the chosen option of each piece; None if even the cheapest do not fit. `pieces`: arrays of
    cores, memory and value. Among equally good choices the result is always the same."""
    if not pieces:
        return []
    room = np.array([cores, memory]) * (1.0 + ROUNDING)
    scale = np.maximum(room, 1e-9)
    costs = [np.stack([piece[0], piece[1]], axis=1) / scale for piece in pieces]
    values = [np.asarray(piece[2], float) for piece in pieces]
    least = np.array([cost.min(axis=0) for cost in costs])
    prices = _prices(costs, values)
    # for the pieces from each position on: what they are worth at most beside their price, and what they need at least
    worth = np.array([np.max(value - cost @ prices) for cost, value in zip(costs, values, strict=True)])
    worth_after = np.append(np.cumsum(worth[::-1])[::-1], 0.0)[1:]
    least_after = np.vstack([np.cumsum(least[::-1], axis=0)[::-1], np.zeros(2)])[1:]
    known = _climbed(costs, values)
    target = -np.inf if known is None else known - ROUNDING * max(1.0, abs(known))

    used, value = np.zeros((1, 2)), np.zeros(1)
    history: list[tuple[Integers, Integers]] = []
    for cost, gain, after, needed in zip(costs, values, worth_after, least_after, strict=True):
        sums = (used[:, None, :] + cost[None, :, :]).reshape(-1, 2)
        totals = (value[:, None] + gain[None, :]).reshape(-1)
        bound = totals + after + (1.0 - sums) @ prices
        kept = np.flatnonzero(np.all(sums + needed <= 1.0 + ROUNDING, axis=1) & (bound >= target))
        kept = kept[_undominated(sums[kept], totals[kept])]
        if len(kept) > MOST_STATES:
            kept = np.sort(kept[np.argsort(-bound[kept], kind="stable")[:MOST_STATES]])
        if not len(kept):
            return None
        history.append((kept // len(gain), kept % len(gain)))
        used, value = sums[kept], totals[kept]
    state = int(np.argmax(value))
    chosen = []
    for parents, choices in reversed(history):
        chosen.append(int(choices[state]))
        state = int(parents[state])
    return chosen[::-1]


def _prices(costs: Sequence[Floats], values: Sequence[Floats]) -> Floats:
    """Return the price of each whole resource, by bisection: so high that what is taken just fits."""
    prices = np.zeros(2)
    most = float(sum(np.ptp(value) for value in values)) + 1e-12
    for resource in (0, 1, 0):
        low, high = 0.0, most * len(values)
        for _ in range(_PRICE_STEPS):
            prices[resource] = (low + high) / 2
            taken = sum(
                float(cost[int(np.argmax(value - cost @ prices)), resource])
                for cost, value in zip(costs, values, strict=True)
            )
            low, high = (prices[resource], high) if taken > 1.0 else (low, prices[resource])
        prices[resource] = high if high > most * len(values) / 2**_PRICE_STEPS else 0.0
    return prices


def _climbed(costs: Sequence[Floats], values: Sequence[Floats]) -> float | None:
    """Return the value of a good choice: from the cheapest options on, the rise that gains most for what it needs."""
    at = [int(np.argmin(cost.sum(axis=1))) for cost in costs]
    used = np.sum([cost[option] for cost, option in zip(costs, at, strict=True)], axis=0)
    if np.any(used > 1.0):
        return None
    while True:
        best = (0.0, -1, -1)
        for piece, (cost, value) in enumerate(zip(costs, values, strict=True)):
            more = cost - cost[at[piece]]
            gain = value - value[at[piece]]
            fits = np.all(used + more <= 1.0, axis=1) & (gain > ROUNDING)
            if fits.any():
                ratio = np.where(fits, gain / np.maximum(more.sum(axis=1), 1e-12), 0.0)
                option = int(np.argmax(ratio))
                if ratio[option] > best[0]:
                    best = (float(ratio[option]), piece, option)
        _, piece, option = best
        if piece < 0:
            return float(sum(value[option] for value, option in zip(values, at, strict=True)))
        used = used + costs[piece][option] - costs[piece][at[piece]]
        at[piece] = option


def _undominated(costs: Floats, values: Floats) -> Integers:
    """Return the positions of states that no other one beats in value with no more of either; of equals the first. By
    cores, then memory, then value falling: a state is beaten if one before it with no more memory is worth as much."""
    if not len(values):
        return np.zeros(0, np.int64)
    order = np.lexsort((-values, costs[:, 1], costs[:, 0]))
    memory = costs[order, 1]
    worth = values[order]
    levels, level = np.unique(memory, return_inverse=True)
    best = np.full(len(levels), -np.inf)
    kept = []
    for position, (at, value) in enumerate(zip(level.tolist(), worth.tolist(), strict=True)):
        if value > best[at] + ROUNDING:
            kept.append(position)
            # levels above that are worth less are beaten too
            above = best[at:]
            above[above < value] = value
    return np.sort(order[kept])


def place_by_demand(gangs: Gangs, nodes: TuningNodes, wanted: TuningDemand) -> Pieces:
    """Place gangs by GPUs, then by the part of a node that they want, most first, to separate gangs of large demand.

    Synergy-Tune fills node after node, so gangs that want many cores end up together and lose them again when gangs of
    small demand come last. Here only GPUs decide what fits, since shares always suffice; demands only decide which
    gangs are placed together.

    Each goes on the node that holds it whole and is then least full, by the fuller of cores and memory; ties go to the
    node named first. A gang that no node holds is split over the fewest nodes, if it may be. A gang without GPUs is
    left out.
    """
    packing = RoundPacking(gangs, nodes)
    capacity = np.maximum(np.stack([nodes.cores, nodes.memory_bytes]), 1e-9)
    each = np.stack([wanted.cores, wanted.memory_bytes])
    whole_gangs = each * gangs.gpus
    part = np.max(whole_gangs / capacity.max(axis=1, initial=1e-9)[:, None], axis=0)
    used = np.zeros_like(capacity)
    for gang in np.lexsort((-part, -gangs.gpus)).tolist():
        gpus = int(gangs.gpus[gang])
        holding = np.flatnonzero(packing.free_gpus >= gpus)
        if len(holding):
            full = np.max((used[:, holding] + whole_gangs[:, gang, None]) / capacity[:, holding], axis=0)
            where = [(int(holding[int(np.argmin(full))]), gpus)]
        else:
            found = packing.tightest(gang, 0.0, 0.0)
            if found is None:
                continue
            where = found
        packing.take(gang, where, 0.0, 0.0)
        for node, count in where:
            used[:, node] += count * each[:, gang]
    rows = [(gang, node, count) for gang in sorted(packing.where) for node, count in packing.where[gang]]
    return pieces([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


# Kinds of gangs (profile, GPUs) up to which the relaxed program is solved: some tenths of a second. Four
# thousand take half a minute, and there whole demands lead to within half a percent of the same rates.
_MOST_KINDS = 200


@dataclass(frozen=True, slots=True)
class _Problem:
    """The kinds of pieces that share a node, ascending, and what is there for them."""

    kinds: tuple[int, ...]
    cores: float
    memory_bytes: float


def place(gangs: Gangs, nodes: TuningNodes) -> Pieces:
    """Place the runnable gangs; ties go to the gangs and nodes named first."""
    running = runnable(gangs, nodes)
    of_round = gangs.take(running)
    placed = tune(of_round, nodes, place_by_demand(of_round, nodes, _wishes(of_round, nodes)))
    return placed.of(running[placed.gang])


def tune(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    board = _Board(gangs, nodes, placed)
    split = np.flatnonzero(np.bincount(placed.gang, minlength=len(gangs))[placed.gang] > 1)
    if len(split):
        for rows in np.split(split, np.flatnonzero(np.diff(placed.gang[split])) + 1):
            board.choose_for_split(rows)
    for node in board.whole_on:
        board.choose_on(node)
    return placed.given(board.cores, board.memory)


def _wishes(gangs: Gangs, nodes: TuningNodes) -> TuningDemand:
    """Return what each gang would get if the cluster were one node; its demand where that takes too long to compute."""
    columns = np.stack([gangs.profile, gangs.gpus], axis=1)
    if len(np.unique(columns, axis=0)) > _MOST_KINDS:
        return demands(gangs, nodes)
    return best_amounts(gangs, nodes, is_integer=False)


class _Board:
    def __init__(self, gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> None:
        self.gangs, self.nodes, self.placed = gangs, nodes, placed
        share = proportionally(nodes, placed)
        self.cores, self.memory = share.cores.copy(), share.memory_bytes.copy()
        self._choices: list[Choices] = []
        self._best: dict[_Problem, tuple[float, list[int]]] = {}
        is_split = np.bincount(placed.gang, minlength=len(gangs))[placed.gang] > 1
        kind = self._kinds(is_split)
        # By node: rows of the gangs that lie on it alone, by kind.
        self.whole_on: dict[int, list[int]] = {}
        for row in np.lexsort((np.arange(len(placed)), kind, placed.node)).tolist():
            self.whole_on.setdefault(int(placed.node[row]), [])
            if not is_split[row]:
                self.whole_on[int(placed.node[row])].append(row)
        # ... and what is there for them.
        self._problem = {
            node: _Problem(
                tuple(int(kind[row]) for row in rows), float(nodes.cores[node]), float(nodes.memory_bytes[node])
            )
            for node, rows in self.whole_on.items()
        }
        for row in np.flatnonzero(is_split).tolist():
            self._hand_back(row, -self.cores[row], -self.memory[row])

    def choose_on(self, node: int) -> None:
        """Choose options for all gangs that lie on this node alone."""
        problem = self._problem[node]
        _, chosen = self._solved(problem)
        for row, kind, option in zip(self.whole_on[node], problem.kinds, chosen, strict=True):
            cores, memory, _ = self._choices[kind]
            self.cores[row], self.memory[row] = cores[option], memory[option]

    def choose_for_split(self, rows: Integers) -> None:
        """Choose for a gang on several nodes the option with the highest value, with the best choice of all other gangs
        there. Among equals the share comes first, then the first option."""
        on, gpus = self.placed.node[rows], self.placed.gpus[rows]
        gang = int(self.placed.gang[rows[0]])
        profile = int(self.gangs.profile[gang])
        shares = self.nodes.share_cores[on], self.nodes.share_memory[on]
        slowest = int(np.argmin(self.gangs.profiles.at(np.array(profile), *shares)))
        offered = options(
            self.gangs.profiles,
            profile,
            float(shares[0][slowest]),
            float(shares[1][slowest]),
            float(np.min(self.nodes.cores[on] / gpus)),
            float(np.min(self.nodes.memory_bytes[on] / gpus)),
        )
        best, best_worth = (self.cores[rows], self.memory[rows]), -np.inf
        candidates = [(best, 1.0)]
        for cores, memory, value in zip(offered.cores, offered.memory_bytes, offered.value, strict=True):
            candidates.append(((cores * gpus, memory * gpus), float(value)))
        for (cores, memory), value in candidates:
            worth = value
            for place, row in enumerate(rows.tolist()):
                problem = self._with(row, self.cores[row] - cores[place], self.memory[row] - memory[place])
                worth += self._solved(problem)[0] if self._is_there(row, problem) else -np.inf
                if worth == -np.inf:
                    break
            if worth > best_worth + 1e-9:
                best, best_worth = (cores, memory), worth
        for place, row in enumerate(rows.tolist()):
            self._hand_back(row, self.cores[row] - best[0][place], self.memory[row] - best[1][place])
        self.cores[rows], self.memory[rows] = best

    def _kinds(self, is_split: np.ndarray) -> Integers:
        """Return the kind of each row: alike in profile, GPUs and node. Each kind has its options."""
        placed, nodes = self.placed, self.nodes
        columns = np.stack(
            [
                self.gangs.profile[placed.gang].astype(float),
                placed.gpus.astype(float),
                nodes.gpus[placed.node].astype(float),
                nodes.cores[placed.node],
                nodes.memory_bytes[placed.node],
            ],
            axis=1,
        )
        columns[is_split] = 0.0
        found, kind = np.unique(columns, axis=0, return_inverse=True)
        for profile, gpus, node_gpus, cores, memory in found.tolist():
            if gpus == 0.0:
                self._choices.append((np.zeros(1), np.zeros(1), np.zeros(1)))
                continue
            offered = options(
                self.gangs.profiles, int(profile), cores / node_gpus, memory / node_gpus, cores / gpus, memory / gpus
            )
            self._choices.append((offered.cores * gpus, offered.memory_bytes * gpus, offered.value))
        return kind.ravel()

    def _with(self, row: int, cores: float, memory: float) -> _Problem:
        """Return the problem of the row's node with so much more there."""
        problem = self._problem[int(self.placed.node[row])]
        return _Problem(problem.kinds, problem.cores + float(cores), problem.memory_bytes + float(memory))

    def _is_there(self, row: int, problem: _Problem) -> bool:
        node = int(self.placed.node[row])
        least_cores, least_memory = -ROUNDING * self.nodes.cores[node], -ROUNDING * self.nodes.memory_bytes[node]
        return bool(problem.cores >= least_cores and problem.memory_bytes >= least_memory)

    def _hand_back(self, row: int, cores: float, memory: float) -> None:
        self._problem[int(self.placed.node[row])] = self._with(row, cores, memory)

    def _solved(self, problem: _Problem) -> tuple[float, list[int]]:
        """Return the value of the best choices and the choices; minus infinity if none fit. Results are cached."""
        found = self._best.get(problem)
        if found is None:
            pieces = [self._choices[kind] for kind in problem.kinds]
            chosen = best_choice(pieces, problem.cores, problem.memory_bytes)
            found = (-np.inf, [])
            if chosen is not None:
                found = float(sum([piece[2][at] for piece, at in zip(pieces, chosen, strict=True)])), chosen
            self._best[problem] = found
        return found


EXACT = Tuning("exact", tune, place)
