"""Which cores of a node each gang runs on: claims of thousandths of a core become whole physical cores with all their
hardware threads, near the gang's devices first, never a housekeeping core; claims that are no multiple of a core share
their last. Claims fit if their sum fits, in the worst case spread over the pieces that are left."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ganger.text import counted, format_ranges

CORE = 1000
"""Millicores of one physical core."""


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core, or declared core of a virtual node, and its CPUs as the kernel numbers them."""

    id: int
    socket: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoreMap:
    """All cores of a node by socket. `shared`: several declared cores stand for the same CPU."""

    sockets: tuple[tuple[Core, ...], ...]
    housekeeping: frozenset[int] = frozenset()
    shared: bool = False

    def usable(self, socket: int) -> tuple[Core, ...]:
        """The cores of a socket that jobs may claim."""
        return tuple(core for core in self.sockets[socket] if core.id not in self.housekeeping)

    def millicores(self) -> tuple[int, ...]:
        """Millicores that jobs may claim, by socket."""
        return tuple(CORE * len(self.usable(socket)) for socket in range(len(self.sockets)))

    def cores(self, ids: Collection[int]) -> list[Core]:
        """The cores of these ids that there are, by socket."""
        return [core for socket in self.sockets for core in socket if core.id in ids]


Shares: TypeAlias = tuple[tuple[int, int], ...]
"""Cores of one gang: (core id, millicores), ordered by core id."""


class CoreTable:
    """The cores of one node, by owner."""

    def __init__(self, core_map: CoreMap) -> None:
        self.core_map = core_map
        self.held: dict[str, Shares] = {}

    def free(self, *ignored: str) -> dict[int, int]:
        """Millicores left by core id, if these owners had none. Never negative, even if adopted shares over-commit."""
        left = {core.id: CORE for socket in range(len(self.core_map.sockets)) for core in self.core_map.usable(socket)}
        for core, part in (one for owner, shares in self.held.items() if owner not in ignored for one in shares):
            if core in left:
                left[core] = max(0, left[core] - part)
        return left

    def ids(self, owner: str) -> tuple[int, ...]:
        return tuple([core for core, _ in self.held.get(owner, ())])

    def millicores(self, owner: str) -> int:
        return sum([part for _, part in self.held.get(owner, ())])

    def take(
        self,
        owner: str,
        millicores: Sequence[int],
        near: Collection[int] = (),
        preferred: Collection[int] = (),
        former: str = "",
    ) -> str:
        """Give `owner` that much of each socket; return the shortage as a text, or an empty text.

        It stays on its cores as far as the amount allows. `near`: CPUs close to its devices; `preferred`: cores that it
        had before, rather than those; `former`: an owner that it replaces: until that one ends, both run on the cores
        that they have in common."""
        return self._grant(owner, millicores, near, self.ids(owner) or preferred or self.ids(former), (), former)

    def repin(self, owner: str, near: Collection[int] = ()) -> None:
        """Put `owner` on other cores of the same number, as many others as there are. Without an owner of that name, or
        without a free core, nothing changes."""
        own = dict(self.held.get(owner, ()))
        amounts = [0] * len(self.core_map.sockets)
        found = self.core_map.cores(own)
        for core in found:
            amounts[core.socket] += own[core.id]
        if own and len(found) == len(own):
            self._grant(owner, amounts, near, preferred=(), avoided=own)

    def release(self, owner: str) -> None:
        self.held.pop(owner, None)

    def adopt(self, owner: str, shares: Shares) -> None:
        """Record the cores that an owner is found to hold after a restart of the daemon, if it holds none."""
        if shares:
            self.held.setdefault(owner, shares)

    def cpus(self, owner: str) -> tuple[int, ...]:
        """Return the CPUs of an owner's cores, ascending, as for a cpuset."""
        return self.cpus_of(self.ids(owner))

    def cpus_of(self, ids: Collection[int]) -> tuple[int, ...]:
        """Return the CPUs of some cores, ascending."""
        return tuple(sorted({cpu for core in self.core_map.cores(ids) for cpu in core.cpus}))

    def quota(self, owner: str) -> float:
        """Return the CPU time that an owner may use, in CPUs; zero if no core of it is shared, so that the CPUs alone
        limit it. Declared cores of a virtual node stand for no CPU time."""
        own = dict(self.held.get(owner, ()))
        if self.core_map.shared or all(part == CORE for part in own.values()):
            return 0.0
        return sum([own[core.id] / CORE * len(core.cpus) for core in self.core_map.cores(own)])

    def split(self, owner: str, parts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of an owner's cores, dealt out to parts of it in proportion to their millicores.

        The largest part comes first, and neighbours stay together. Two parts share the core that lies between them; no
        part of an owner with cores is without one."""
        own = dict(self.held.get(owner, ()))
        cores = sorted(self.core_map.cores(own), key=lambda core: own[core.id] < CORE)
        ends = list(itertools.accumulate(own[core.id] for core in cores))
        found: list[tuple[int, ...]] = [()] * len(parts)
        begin = passed = 0
        for index in sorted(range(len(parts)), key=lambda one: -parts[one]) if ends else ():
            passed += parts[index]
            end = ends[-1] * passed // sum(parts)
            first = min(begin, ends[-1] - 1)
            found[index] = tuple(
                sorted(
                    core.id
                    for core, until in zip(cores, ends, strict=True)
                    if until > first and until - own[core.id] < max(end, first + 1)
                )
            )
            begin = end
        return tuple(found)

    def _grant(
        self,
        owner: str,
        millicores: Sequence[int],
        near: Collection[int],
        preferred: Collection[int],
        avoided: Collection[int],
        former: str = "",
    ) -> str:
        free = self.free(owner, former)
        shares: dict[int, int] = {}
        for socket, amount in enumerate(millicores):
            cores = self.core_map.usable(socket) if socket < len(self.core_map.sockets) else ()
            left = sum(free[core.id] for core in cores)
            if amount > left:
                return f"socket {socket} has {left} millicores left, {amount} are needed"
            shares |= _choose(cores, free, max(0, amount), frozenset(near), frozenset(preferred), frozenset(avoided))
        self.held[owner] = tuple(sorted(shares.items()))
        return ""


def declared_cores(count: int, sockets: int, cpus: Sequence[int], housekeeping: int | None = None) -> CoreMap:
    """The cores of a virtual node: `count`, dealt to `sockets`, mapped round-robin onto real CPUs."""
    if count < sockets or not cpus:
        raise ValueError(
            f"{counted(count, 'virtual core')} cannot fill {counted(sockets, 'socket')} on {counted(len(cpus), 'CPU')};"
            " declare one each or more"
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
    return format_ranges(sorted(set(ids)))


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


def _choose(
    cores: Sequence[Core],
    free: Mapping[int, int],
    amount: int,
    near: frozenset[int],
    preferred: frozenset[int],
    avoided: frozenset[int],
) -> dict[int, int]:
    """Whole cores first, best rank first; then the remainder on the fullest piece that holds it; then any pieces."""

    # Of declared cores that stand for one CPU, another one of the same CPU would be no change.
    avoided_cpus = {cpu for core in cores if core.id in avoided for cpu in core.cpus}

    def rank(core: Core) -> tuple[bool, int, bool, int]:
        unwanted = 2 if core.id in avoided else int(bool(avoided_cpus.intersection(core.cpus)))
        return core.id not in preferred, unwanted, not near.intersection(core.cpus), core.id

    taken: dict[int, int] = {}
    whole = [core for core in sorted(cores, key=rank) if free[core.id] == CORE]
    for core in whole[: amount // CORE]:
        taken[core.id] = CORE
    rest = amount - sum(taken.values())
    # A piece of an already shared core first: it keeps whole cores whole.
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
    return taken
