"""Which parameter server keeps which block of a model, so that all have about as much to send and as many requests
(PAA of Optimus, EuroSys 2018, section 5.3; `best_fit_descend` of its public code).

Blocks largest first: those above an even share are cut into shares, spread over the least loaded servers; those of up
to a hundredth of a share go where the fewest requests go; the others where they leave the least room below the share,
or, if they fit nowhere, to the least loaded server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Blocks up to this part of an even share count as requests, not as load.
_SMALL = 0.01


@dataclass(frozen=True, slots=True)
class Slice:
    """A block, or a part of it."""

    block: int
    size: int


def assigned(sizes: Sequence[int], servers: int) -> tuple[tuple[Slice, ...], ...]:
    """The slices of each server, in the order they were assigned; ties go to the block and the server named first.
    `sizes` are in any whole unit (parameters, bytes) above zero."""
    if servers < 1 or any(size < 1 for size in sizes):
        raise ValueError("blocks need a size above zero and at least one server")
    share = -(-sum(sizes) // servers)
    load = [0] * servers
    slices: list[list[Slice]] = [[] for _ in range(servers)]

    def keep(server: int, block: int, size: int) -> None:
        load[server] += size
        slices[server].append(Slice(block, size))

    def best_fit(size: int) -> int:
        with_room = [server for server in range(servers) if load[server] + size <= share]
        if with_room:
            return max(with_room, key=lambda server: (load[server], -server))
        return min(range(servers), key=lambda server: (load[server], server))

    for block in sorted(range(len(sizes)), key=lambda block: (-sizes[block], block)):
        size = sizes[block]
        if size <= _SMALL * sum(sizes) / servers:
            keep(min(range(servers), key=lambda server: (len(slices[server]), server)), block, size)
        elif size <= share:
            keep(best_fit(size), block, size)
        else:
            for server in sorted(range(servers), key=lambda server: (load[server], server))[: size // share]:
                keep(server, block, share)
            if size % share:
                keep(best_fit(size % share), block, size % share)
    return tuple(tuple(kept) for kept in slices)
