"""One choice for each piece on a node, so that cores and memory suffice and the values add up to the most.

A multiple-choice knapsack with two resources, solved exactly: partial choices are kept as long as no other one is worth
as much with no more of either, and as long as they could still beat the best choice known, by the bound that prices for
cores and memory put on the pieces that are left (Lagrange; the prices are those at which the concave envelopes of the
pieces demand just what the node has).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ganger_master.policies.job_facts import Floats, Integers
from ganger_master.policies.tunings import ROUNDING

# Steps of the search for prices: each halves the interval of one of them. Any prices give a valid bound.
_PRICE_STEPS = 12
# Partial choices kept for one piece: of more, the most promising are, and the answer is no longer proved best. A node
# of 8 GPUs and gangs with the published profiles needs up to a few hundred.
MOST_STATES = 4096
# Costs and values of each option of one piece.
Choices = tuple[Floats, Floats, Floats]


def best_choice(pieces: Sequence[Choices], cores: float, memory: float) -> list[int] | None:
    """For each piece the position of its option; None if even the cheapest do not fit. `pieces` gives arrays of cores,
    memory and value. Of equally good choices any, but always the same."""
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
    for parents, options in reversed(history):
        chosen.append(int(options[state]))
        state = int(parents[state])
    return chosen[::-1]


def _prices(costs: Sequence[Floats], values: Sequence[Floats]) -> Floats:
    """Of the whole of each resource. Found one at a time by bisection: dear enough that what is taken at these prices
    just fits."""
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
    """The value of a good choice: from the cheapest options on, the rise that gains most for what it needs."""
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
    """Ascending positions of the states that no other one beats in value with no more of either; of equals the first.

    By cores, then memory, then value falling: a state is beaten if one before it with no more memory is worth as much.
    """
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
