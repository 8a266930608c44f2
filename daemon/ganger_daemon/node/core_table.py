"""Which cores of a node each gang runs on.

A claim says how many thousandths of a physical core a gang holds on each socket; here they become core ids: whole
physical cores with all their hardware threads, near the gang's devices first, never a housekeeping core. A claim that
is no multiple of a core shares its last core, packed with other such claims. What the claims of a socket sum to always
fits if the sum fits: in the worst case a claim is spread over the pieces that are left.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

CORE = 1000
"""Millicores of one physical core."""


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core (or one declared core of a virtual node) and the CPUs, as the kernel numbers them, it stands
    for."""

    id: int
    socket: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoreMap:
    """All cores of a node by socket. `shared`: several cores stand for the same CPU (declared cores of a virtual
    node)."""

    sockets: tuple[tuple[Core, ...], ...]
    housekeeping: frozenset[int] = frozenset()
    shared: bool = False

    def usable(self, socket: int) -> tuple[Core, ...]:
        """The cores of a socket that jobs may claim."""
        return tuple(core for core in self.sockets[socket] if core.id not in self.housekeeping)

    def millicores(self) -> tuple[int, ...]:
        """Millicores that jobs may claim, by socket."""
        return tuple(CORE * len(self.usable(socket)) for socket in range(len(self.sockets)))

    def core(self, core_id: int) -> Core | None:
        return next((core for socket in self.sockets for core in socket if core.id == core_id), None)


@dataclass(frozen=True, slots=True)
class Grant:
    """Cores of one gang: (core id, millicores), ordered by core id."""

    shares: tuple[tuple[int, int], ...] = ()

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(core for core, _ in self.shares)

    @property
    def millicores(self) -> int:
        return sum(part for _, part in self.shares)


@dataclass(frozen=True, slots=True)
class CoreShortage:
    """A socket has fewer millicores left than were requested."""

    socket: int
    needed_millicores: int
    free_millicores: int


@dataclass(frozen=True, slots=True)
class CoreTable:
    """The cores of one node, by owner."""

    core_map: CoreMap
    held: Mapping[str, Grant] = field(default_factory=dict)

    @classmethod
    def empty(cls, core_map: CoreMap) -> CoreTable:
        return cls(core_map)

    def free(self) -> dict[int, int]:
        """Millicores left by core id. Never negative, even when adopted grants over-commit a core."""
        left = {core.id: CORE for socket in range(len(self.core_map.sockets)) for core in self.core_map.usable(socket)}
        for grant in self.held.values():
            for core, part in grant.shares:
                if core in left:
                    left[core] = max(0, left[core] - part)
        return left


def allocate(
    table: CoreTable, owner: str, millicores: Sequence[int], near: Collection[int] = (), preferred: Collection[int] = ()
) -> CoreTable | CoreShortage:
    """Give `owner` that much of each socket. `near`: CPUs close to its devices, preferred; `preferred`: cores it had
    before, rather than those. An owner that holds something keeps what it can (see `resize`)."""
    if owner in table.held:
        return resize(table, owner, millicores, near)
    return _grant(table, owner, millicores, near, preferred, avoided=())


def allocate_after(
    table: CoreTable, former: str, owner: str, millicores: Sequence[int], near: Collection[int] = ()
) -> CoreTable | CoreShortage:
    """Give `owner` cores as if `former`, which it replaces, had none. Until `former` ends, both run on the cores that
    they have in common. Cores of `former` are preferred."""
    kept = table.held.get(former, Grant())
    found = _grant(release(table, former), owner, millicores, near, preferred=kept.cores, avoided=())
    if isinstance(found, CoreShortage) or former not in table.held:
        return found
    return adopt(found, former, kept)


def resize(
    table: CoreTable, owner: str, millicores: Sequence[int], near: Collection[int] = ()
) -> CoreTable | CoreShortage:
    """Change how much `owner` holds; it stays on its cores as far as the new amount allows."""
    own = table.held.get(owner, Grant())
    return _grant(release(table, owner), owner, millicores, near, preferred=own.cores, avoided=())


def repin(table: CoreTable, owner: str, near: Collection[int] = ()) -> CoreTable:
    """Put `owner` on other cores of the same number, as many others as there are. Without an owner of that name, or
    without a free core, nothing changes."""
    own = table.held.get(owner)
    if own is None:
        return table
    amounts = [0] * len(table.core_map.sockets)
    for core_id, part in own.shares:
        core = table.core_map.core(core_id)
        if core is None:
            return table
        amounts[core.socket] += part
    moved = _grant(release(table, owner), owner, amounts, near, preferred=(), avoided=own.cores)
    return table if isinstance(moved, CoreShortage) else moved


def release(table: CoreTable, owner: str) -> CoreTable:
    return replace(table, held={name: grant for name, grant in table.held.items() if name != owner})


def adopt(table: CoreTable, owner: str, grant: Grant) -> CoreTable:
    """Record the cores that an owner is found to hold after a restart of the daemon."""
    return replace(table, held={**table.held, owner: grant})


def cpus_of(core_map: CoreMap, cores: Grant | Iterable[int]) -> tuple[int, ...]:
    """Return the CPUs of cores, ascending, as for a cpuset."""
    wanted = frozenset(cores.cores if isinstance(cores, Grant) else cores)
    return tuple(
        sorted({cpu for socket in core_map.sockets for core in socket if core.id in wanted for cpu in core.cpus})
    )


def quota_cpus(core_map: CoreMap, grant: Grant) -> float:
    """Return the CPU time that a grant is worth, in CPUs; zero if no core of it is shared, so that the CPUs alone limit
    it. Declared cores of a virtual node stand for no CPU time."""
    if core_map.shared or all(part == CORE for _, part in grant.shares):
        return 0.0
    found = [(core_map.core(core_id), part) for core_id, part in grant.shares]
    return sum([part / CORE * len(core.cpus) for core, part in found if core is not None])


def split(core_map: CoreMap, grant: Grant, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The cores of a gang dealt out to its local ranks in order, as evenly as they come, neighbours together. With
    fewer cores than ranks, ranks share."""
    order = sorted(grant.cores, key=lambda core_id: _place_of(core_map, core_id))
    if not order or ranks <= 0:
        return ((),) * max(0, ranks)
    if len(order) < ranks:
        return tuple((order[rank * len(order) // ranks],) for rank in range(ranks))
    bounds = [rank * len(order) // ranks for rank in range(ranks + 1)]
    return tuple(tuple(order[first:last]) for first, last in itertools.pairwise(bounds))


def declared_cores(count: int, sockets: int, cpus: Sequence[int], housekeeping: int | None = None) -> CoreMap:
    """The cores of a virtual node: `count` of them, dealt to `sockets`, mapped round-robin onto real CPUs. By default
    no housekeeping core below 8."""
    if count < sockets or not cpus:
        raise ValueError(
            f"{count} virtual cores cannot fill {sockets} sockets on {len(cpus)} cpus; declare one each or more"
        )
    cores = [Core(i, i * sockets // count, (cpus[i % len(cpus)],)) for i in range(count)]
    by_socket = tuple(tuple(core for core in cores if core.socket == socket) for socket in range(sockets))
    return CoreMap(by_socket, housekeeping_of(by_socket, housekeeping), shared=count > len(cpus))


def housekeeping_of(sockets: Sequence[Sequence[Core]], count: int | None) -> frozenset[int]:
    """The first cores of the first socket, kept for the daemon, interrupts and the page cache; a socket keeps at least
    one core for jobs. `count`: how many; None: as many as the node's size demands."""
    cores = sum(map(len, sockets))
    default = 0 if cores < 8 else 1 if cores < 32 else 2
    first = sockets[0] if sockets else ()
    return frozenset(core.id for core in first[: max(0, min(default if count is None else count, len(first) - 1))])


def format_ids(ids: Iterable[int]) -> str:
    """(0, 1, 4) -> "0-1,4": the kernel's list format."""
    runs: list[list[int]] = []
    for value in sorted(set(ids)):
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_ids(text: str) -> tuple[int, ...]:
    """ "0-1,4" -> (0, 1, 4). Raises ValueError for anything else than the kernel's list format."""
    ids: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if not part.strip():
            continue
        start, end = int(first), int(last) if dash else int(first)
        if not 0 <= start <= end < MAX_ID:
            raise ValueError(f"no list of ids: {text!r}")
        ids.update(range(start, end + 1))
    return tuple(sorted(ids))


MAX_ID = 1 << 16
"""Bound of ids read from text, so that a range cannot fill the memory."""


def _grant(
    table: CoreTable,
    owner: str,
    millicores: Sequence[int],
    near: Collection[int],
    preferred: Collection[int],
    avoided: Collection[int],
) -> CoreTable | CoreShortage:
    free = table.free()
    shares: dict[int, int] = {}
    for socket, amount in enumerate(millicores):
        if amount <= 0:
            continue
        cores = table.core_map.usable(socket) if socket < len(table.core_map.sockets) else ()
        left = sum(free[core.id] for core in cores)
        if amount > left:
            return CoreShortage(socket, amount, left)
        for core_id, part in _choose(cores, free, amount, frozenset(near), frozenset(preferred), frozenset(avoided)):
            shares[core_id] = shares.get(core_id, 0) + part
            free[core_id] -= part
    return replace(table, held={**table.held, owner: Grant(tuple(sorted(shares.items())))})


def _choose(
    cores: Sequence[Core],
    free: Mapping[int, int],
    amount: int,
    near: frozenset[int],
    preferred: frozenset[int],
    avoided: frozenset[int],
) -> list[tuple[int, int]]:
    """Whole cores first, best rank first; then the remainder on the fullest piece that holds it; then any pieces."""

    # of declared cores that stand for one CPU, another one of the same CPU would be no change
    avoided_cpus = {cpu for core in cores if core.id in avoided for cpu in core.cpus}

    def rank(core: Core) -> tuple[bool, int, bool, int]:
        unwanted = 2 if core.id in avoided else int(bool(avoided_cpus.intersection(core.cpus)))
        return core.id not in preferred, unwanted, not near.intersection(core.cpus), core.id

    taken: dict[int, int] = {}
    whole = [core for core in sorted(cores, key=rank) if free[core.id] == CORE]
    for core in whole[: amount // CORE]:
        taken[core.id] = CORE
    rest = amount - sum(taken.values())
    # a piece of an already shared core first: it keeps whole cores whole
    pieces = sorted(
        (core for core in cores if core.id not in taken and free[core.id] > 0),
        key=lambda core: (rank(core)[:2], free[core.id] < min(rest, CORE), free[core.id], rank(core)),
    )
    for core in pieces:
        if rest <= 0:
            break
        part = min(rest, free[core.id])
        taken[core.id] = part
        rest -= part
    assert rest == 0, "the caller has checked that the sum fits"
    return sorted(taken.items())


def _place_of(core_map: CoreMap, core_id: int) -> tuple[int, int]:
    core = core_map.core(core_id)
    return (core.socket if core else 0), core_id
