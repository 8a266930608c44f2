"""The cluster as one table: what is free on every node, in lists for single questions and NumPy columns for scans.

Lists are the truth (a NumPy scalar costs ten times a list element, and verdicts touch few nodes); columns follow when a
scan asks for them. The owner of a view may change it; a trial works on `copy()`, or takes and gives back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from operator import add, sub

from msgspec import Struct
from msgspec.structs import replace

from ganger.cluster.columns import Columns, ColumnTable, Journal
from ganger.cluster.resources import Bandwidth, Claim, ConfigurationSet, NodeRow, exceeds
from ganger.cluster.topology import Topology, bits, counted_jobs


class LoadMode(Enum):
    """SPREAD under light load, PACK under heavy load."""

    SPREAD = "spread"
    PACK = "pack"


class View:
    """All nodes. `version` rises with every change; a row carries the version of its last change."""

    def __init__(
        self, sets: Iterable[ConfigurationSet] = (), version: int = 0, mode: LoadMode = LoadMode.SPREAD
    ) -> None:
        self.sets: dict[str, ConfigurationSet] = {}
        self.version = version
        # The version of the last change that made room anywhere: what found none since then still finds none.
        self.freed = version
        self.mode = mode
        self.slots: dict[str, int] = {}
        # By slot; read by fit and placement, written only here.
        self.nodes: list[str] = []
        self.free: list[int] = []
        self.millicores: list[tuple[int, ...]] = []
        self.memory: list[int] = []
        self.available: list[bool] = []
        self.topologies: list[Topology] = []
        self.racks: list[str] = []
        self.fabrics: list[str] = []
        self.socket_jobs: list[tuple[int, ...]] = []
        self.group_jobs: list[tuple[int, ...]] = []
        self.held: list[int] = []
        self.affinity: list[int] = []
        # Only of slots where parked gangs keep memory of devices: bytes by device.
        self.parked: dict[int, tuple[int, ...]] = {}
        # Only of slots where that is not one claim each: how many hold each device.
        self.shared: dict[int, tuple[int, ...]] = {}
        # Only of slots whose nodes declare a limit: what is free. Below zero where more is held than there is.
        self.bandwidth: dict[int, Bandwidth] = {}
        self._in_service: list[int] = []
        self._versions: list[int] = []
        self.journal = Journal()
        # By name of the configuration set and partitions of the nodes.
        self._topology_of: dict[tuple[str, tuple[str, ...]], Topology] = {}
        self._vacant: list[int] = []
        self._place_codes: dict[tuple[str, str], int] = {("", ""): 0}
        self._set_codes: dict[str, int] = {}
        self._table = ColumnTable()
        # What `idle` made; gone when a node comes, leaves or becomes another.
        self._idle: View | None = None
        # Free devices by partition, of a version.
        self._free_in: tuple[int, Counter[str]] = (-1, Counter())
        # What `vacant` made; gone too when a node or a device goes out of service, or comes back.
        self._bare: View | None = None
        # The capacity index of the view (`CapacityIndex.of`); a copy begins without.
        self.index: object = None
        for configuration_set in sets:
            self.put_configuration_set(configuration_set)

    def put_configuration_set(self, configuration_set: ConfigurationSet) -> None:
        """Add a configuration set. Sets are immutable: one with a known name is not replaced."""
        if configuration_set.name not in self.sets:
            self.sets[configuration_set.name] = configuration_set
            self._topology_of[configuration_set.name, ()] = Topology(configuration_set)
            self._set_codes[configuration_set.name] = len(self._set_codes)

    def put(self, row: NodeRow, in_service: int | None = None) -> bool:
        """Add or replace a node; return whether more than its version changed. KeyError for an unknown set.

        A row without a version gets the next one. `in_service`: devices that may ever be free; all by default.
        """
        topology = self.topology_named(row.configuration_set, row.partitions)
        slot = self.slots.get(row.node)
        claims = _padded(row.device_rows, topology.devices)
        parked = row.parked_bytes and _padded(row.parked_bytes, topology.devices)
        values: dict[str, object] = {
            "nodes": row.node,
            "free": row.free_mask,
            "millicores": tuple(row.free_millicores),
            "memory": row.free_memory_bytes,
            "available": row.available,
            "topologies": topology,
            "racks": row.rack,
            "fabrics": row.fabric,
            "socket_jobs": _padded(row.socket_jobs, len(topology.sockets)),
            "group_jobs": _padded(row.group_jobs, len(topology.groups)),
            "affinity": row.affinity,
        }
        if (
            slot is not None
            and all(getattr(self, name)[slot] == value for name, value in values.items())
            and (self.device_rows(slot), self.parked.get(slot, ())) == (claims, parked)
            and self._free_bandwidth(slot) == row.free_bandwidth
        ):
            if row.version > self._versions[slot]:
                self._versions[slot] = row.version
                self.version = max(self.version, row.version)
            return False
        place = (topology, row.rack, row.fabric)
        if slot is None or (self.topologies[slot], self.racks[slot], self.fabrics[slot]) != place:
            self._idle = self._bare = None
            # Numbered in order of arrival: ties between racks go by number, and must not depend on when a caller looks.
            self._place(row.fabric, row.rack)
            self._place(row.fabric, "")
        if slot is None:
            slot = self._vacant.pop() if self._vacant else self._grow()
            self.slots[row.node] = slot
            makes_room = True
        else:
            makes_room = self._makes_room(slot, row) or self.topologies[slot] is not topology
        serves = topology.all_mask if in_service is None else in_service
        if (self.available[slot], self._in_service[slot]) != (row.available, serves):
            self._bare = None
        for name, value in values.items():
            getattr(self, name)[slot] = value
        self._hold(slot, claims)
        self._keep_parked(slot, parked)
        self._limit_bandwidth(slot, row.free_bandwidth)
        self._in_service[slot] = serves
        self._versions[slot] = row.version or self.version + 1
        self.version = max(self.version, self._versions[slot])
        if makes_room:
            self.freed = self.version
        self.journal.note(slot)
        return True

    def remove(self, name: str) -> None:
        """The node is gone; its slot is reused. Unknown names are ignored."""
        slot = self.slots.pop(name, None)
        if slot is None:
            return
        self._idle = self._bare = None
        self.available[slot] = False
        self.free[slot] = 0
        # Racks and fabrics are numbered by their first slot: a node that left must not count.
        self.nodes[slot] = self.racks[slot] = self.fabrics[slot] = ""
        self.parked.pop(slot, None)
        self.bandwidth.pop(slot, None)
        self.shared.pop(slot, None)
        self._vacant.append(slot)
        self.journal.note(slot)
        self.version += 1
        self._versions[slot] = 0

    def take(self, claim: Claim, gang_gpus: int = 0) -> None:
        """Holds the claim's pieces. `gang_gpus`: devices of the whole gang, which become an idle node's affinity.

        The caller has checked the claim with `fit`: one that does not fit is a bug.
        """
        slot = self.slots[claim.node]
        mask, free = claim.device_mask, self.free[slot]
        held = mask & ~free
        assert not held & ~claim.shared_mask, f"devices {held:#x} of {claim.node} are held already, or not there"
        self._move(slot, claim, +1)
        self.free[slot] = free & ~mask
        if mask and not self.affinity[slot]:
            self.affinity[slot] = gang_gpus or mask.bit_count()

    def give(self, claim: Claim, affinity: int | None = None) -> None:
        """The inverse of `take`; claims of nodes that left are ignored. The last gang takes the affinity along, and
        a device that several gangs hold is free once the last of them gives it up. `affinity`: that of the gangs that
        stay, if known."""
        slot = self.slots.get(claim.node)
        if slot is None:
            return
        assert self.free[slot] & claim.device_mask == 0, f"devices of {claim.node} were given back twice"
        held = self._move(slot, claim, -1)
        self.free[slot] |= claim.device_mask & self._in_service[slot] & ~held
        if affinity is not None:
            self.affinity[slot] = affinity
        elif not self.held[slot]:
            self.affinity[slot] = 0
        self.freed = self.version

    def roomy(self, slot: int, needed: int, own: Sequence[int] = ()) -> int:
        """Return the devices with at least `needed` bytes left. `own` bytes that are kept there count as left.

        Return all devices if nothing is needed, or if the configuration set has no size of device memory.
        """
        topology = self.topologies[slot]
        capacity = topology.configuration_set.device_memory_bytes
        if not needed or not capacity:
            return topology.all_mask
        most = capacity - needed
        if most < 0:
            return 0
        kept = self.parked.get(slot)
        if kept is None or max(kept) <= most:
            return topology.all_mask
        if own:
            kept = tuple([size - mine for size, mine in zip(kept, _padded(tuple(own), len(kept)), strict=True)])
        return sum([1 << at for at, size in enumerate(kept) if size <= most])

    def device_memory_left(self, slot: int, own: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the bytes of each device without those that parked gangs keep. `own` bytes of these count as left."""
        topology = self.topologies[slot]
        capacity = topology.configuration_set.device_memory_bytes
        if not own and slot not in self.parked:
            return (capacity,) * topology.devices
        kept, ours = (_padded(tuple(some), topology.devices) for some in (self.parked.get(slot, ()), own))
        return tuple([max(0, capacity - size + mine) for size, mine in zip(kept, ours, strict=True)])

    def device_rows(self, slot: int) -> tuple[int, ...]:
        """Return the number of claims on each device."""
        shared = self.shared.get(slot)
        if shared is not None:
            return shared
        held = self.held[slot]
        return tuple([held >> device & 1 for device in range(self.topologies[slot].devices)])

    def set_available(self, name: str, available: bool) -> None:
        slot = self.slots[name]
        if self.available[slot] != available:
            self._bare = None
            self.available[slot] = available
            self._touch(slot)
            if available:
                self.freed = self.version

    def row(self, name: str) -> NodeRow:
        """Return the state of a node. KeyError for an unknown node."""
        return self._row(self.slots[name])

    def total(self, name: str) -> NodeRow:
        """The row as if nothing were held."""
        slot = self.slots[name]
        topology = self.topologies[slot]
        configuration_set = topology.configuration_set
        return replace(
            self._row(slot),
            free_mask=self._in_service[slot],
            free_millicores=tuple(socket.millicores for socket in configuration_set.sockets),
            free_memory_bytes=configuration_set.free_memory_bytes,
            socket_jobs=(0,) * len(topology.sockets),
            group_jobs=(0,) * len(topology.groups),
            device_rows=(0,) * topology.devices,
            affinity=0,
            parked_bytes=(),
            free_bandwidth=configuration_set.bandwidth,
        )

    def idle(self) -> View:
        """The cluster with nothing held and every node available, made once while its nodes stay; not to be changed."""
        if self._idle is None:
            self._idle = self.emptied(everywhere_available=True)
        return self._idle

    def vacant(self) -> View:
        """Return the cluster with nothing held, cached while its nodes stay. A caller that takes from it gives back."""
        if self._bare is None:
            self._bare = self.emptied()
        return self._bare

    def emptied(self, everywhere_available: bool = False) -> View:
        """The same nodes in the same slots with nothing held; `everywhere_available` counts cordoned and lost ones."""
        empty = self.copy()
        sets = [topology.configuration_set for topology in self.topologies]
        cores = {name: tuple(socket.millicores for socket in one.sockets) for name, one in self.sets.items()}
        zeros = {name: ((0,) * len(of.sockets), (0,) * len(of.groups)) for (name, _), of in self._topology_of.items()}
        empty.free = [mask if name else 0 for mask, name in zip(self._in_service, self.nodes, strict=True)]
        empty.millicores = [cores[one.name] for one in sets]
        empty.memory = [one.free_memory_bytes for one in sets]
        empty.socket_jobs = [zeros[one.name][0] for one in sets]
        empty.group_jobs = [zeros[one.name][1] for one in sets]
        empty.affinity, empty.held = [0] * len(sets), [0] * len(sets)
        empty.parked, empty.shared = {}, {}
        empty.bandwidth = {slot: sets[slot].bandwidth for slot in self.bandwidth}
        if everywhere_available:
            empty.available = [bool(name) for name in self.nodes]
        empty._table = ColumnTable()
        return empty

    def rows(self) -> Iterator[NodeRow]:
        """Yield node states in the order of slots: of arrival, but a new node may reuse the slot of one that left."""
        return (self._row(slot) for slot, name in enumerate(self.nodes) if name)

    def names(self) -> Iterator[str]:
        return (name for name in self.nodes if name)

    def free_devices_in(self, partition: str) -> int:
        """Return the free devices of the available nodes of a partition."""
        if self._free_in[0] != self.version:
            found: Counter[str] = Counter()
            for topology, free, is_available in zip(self.topologies, self.free, self.available, strict=True):
                for name in topology.partitions if is_available and free else ():
                    found[name] += free.bit_count()
            self._free_in = self.version, found
        return self._free_in[1][partition]

    def has_node_in(self, partition: str) -> bool:
        """Return whether a node is in a partition; empty: whether there is a node."""
        if not partition:
            return bool(self.slots)
        return any(name and of.is_in(partition) for name, of in zip(self.nodes, self.topologies, strict=True))

    def topology(self, name: str) -> Topology:
        return self.topologies[self.slots[name]]

    def topology_named(self, configuration_set: str, partitions: tuple[str, ...] = ()) -> Topology:
        """Return the topology of such nodes in these partitions. KeyError for an unknown configuration set."""
        found = self._topology_of.get((configuration_set, partitions))
        if found is None:
            made = self._topology_of[configuration_set, ()].configuration_set
            found = self._topology_of[configuration_set, partitions] = Topology(made, partitions)
        return found

    def copy(self) -> View:
        """Independent of this one; 16,000 nodes take about a millisecond."""
        twin = View((), self.version, self.mode)
        twin.freed = self.freed
        twin.sets = dict(self.sets)
        twin.slots = dict(self.slots)
        for name in _COPIED:
            setattr(twin, name, getattr(self, name).copy())
        twin._table, twin.journal = self._table.copied(self.journal)
        twin._topology_of = dict(self._topology_of)
        twin._place_codes = dict(self._place_codes)
        twin._set_codes = dict(self._set_codes)
        return twin

    def columns(self) -> Columns:
        """The table for scans, brought up to date; not to be written to."""
        return self._table.current(self.journal, self._fill_columns)

    def set_code(self, name: str) -> int:
        """Number of a configuration set in `Columns.sets`."""
        return self._set_codes[name]

    def __contains__(self, name: str) -> bool:
        return name in self.slots

    def __len__(self) -> int:
        return len(self.slots)

    def _move(self, slot: int, claim: Claim, sign: int) -> int:
        """The devices of the claim that claims hold then; none where no device or core changes hands."""
        held = 0
        topology = self.topologies[slot]
        mask, millicores = claim.device_mask, claim.millicores
        uses_cores = any(millicores)
        if uses_cores:
            have = self.millicores[slot]
            assert len(have) == len(millicores), f"{claim.node} has {len(have)} sockets, not those of the claim"
            cores = self.millicores[slot] = tuple(map(sub if sign > 0 else add, have, millicores))
            assert min(cores) >= 0, f"cores of {claim.node} are over-committed"
        memory = self.memory[slot] = self.memory[slot] - sign * (claim.memory_bytes + claim.arena_bytes)
        assert memory >= 0, f"host memory of {claim.node} is over-committed"
        if claim.bandwidth and slot in self.bandwidth:
            self.bandwidth[slot] = tuple(map(sub if sign > 0 else add, self.bandwidth[slot], claim.bandwidth))
        if claim.parked_bytes:
            kept = self.parked.get(slot, (0,) * topology.devices)
            changes = zip(kept, claim.parked_bytes, strict=True)
            self._keep_parked(slot, tuple([before + sign * more for before, more in changes]))
        if uses_cores or mask & topology.neighbours:
            counts = (self.socket_jobs[slot], self.group_jobs[slot])
            self.socket_jobs[slot], self.group_jobs[slot] = counted_jobs(topology, counts, mask, millicores, sign)
        if uses_cores or mask:
            held = self._recount(slot, mask, sign)
        self._touch(slot)
        return held

    def _recount(self, slot: int, mask: int, sign: int) -> int:
        """One claim more, or less, on each of these devices; those of them that claims hold then."""
        held = self.held[slot]
        if slot not in self.shared and mask & held == (0 if sign > 0 else mask):
            # The usual case: no other gang is on these devices, before or after.
            self.held[slot] = held ^ mask
            return mask if sign > 0 else 0
        rows = list(self.device_rows(slot))
        for device in bits(mask):
            rows[device] += sign
        self._hold(slot, tuple(rows))
        return mask & self.held[slot]

    def _hold(self, slot: int, rows: tuple[int, ...]) -> None:
        self.held[slot] = sum([1 << device for device, claims in enumerate(rows) if claims > 0])
        if all(map(_ONE_OR_NONE.__contains__, rows)):
            self.shared.pop(slot, None)
        else:
            self.shared[slot] = rows

    def _fill_columns(self, columns: Columns, where: slice, slots: Sequence[int]) -> None:
        columns.free[where] = [self.free[slot] for slot in slots]
        columns.available[where] = [self.available[slot] for slot in slots]
        columns.millicores[where] = [sum(self.millicores[slot]) for slot in slots]
        columns.memory[where] = [self.memory[slot] for slot in slots]
        columns.sets[where] = [self._set_codes[self.topologies[slot].configuration_set.name] for slot in slots]
        racks = [(self.fabrics[slot], self.racks[slot]) for slot in slots]
        columns.racks[where] = [self._place(fabric, rack) if rack else 0 for fabric, rack in racks]
        columns.fabrics[where] = [self._place(self.fabrics[slot], "") if self.fabrics[slot] else 0 for slot in slots]

    def _keep_parked(self, slot: int, kept: tuple[int, ...]) -> None:
        if any(kept):
            self.parked[slot] = kept
        else:
            self.parked.pop(slot, None)

    def _touch(self, slot: int) -> None:
        self.version = self._versions[slot] = self.version + 1
        # As `Journal.note`, without its call: this is the innermost step of a placement.
        journal = self.journal
        journal.slots.append(slot)
        journal.changed_at[slot] = noted = journal.forgotten + len(journal.slots)
        if noted >= journal.full_at:
            journal.forget()

    def _grow(self) -> int:
        for name, empty in _EMPTY_SLOT.items():
            getattr(self, name).append(empty)
        self.topologies.append(next(iter(self._topology_of.values())))
        self.journal.changed_at.append(0)
        return len(self.nodes) - 1

    def _makes_room(self, slot: int, row: NodeRow) -> bool:
        return bool(
            row.free_mask & ~self.free[slot]
            or row.free_memory_bytes > self.memory[slot]
            or (row.available and not self.available[slot])
            or len(row.free_millicores) != len(self.millicores[slot])
            or any(now > before for now, before in zip(row.free_millicores, self.millicores[slot], strict=True))
            or (row.rack, row.fabric) != (self.racks[slot], self.fabrics[slot])
            or slot in self.parked
            or exceeds(row.free_bandwidth, self.bandwidth.get(slot, ()))
            or (slot in self.bandwidth and not row.free_bandwidth)
        )

    def _limit_bandwidth(self, slot: int, free: Bandwidth) -> None:
        if free:
            self.bandwidth[slot] = free
        else:
            self.bandwidth.pop(slot, None)

    def _free_bandwidth(self, slot: int) -> Bandwidth:
        free = self.bandwidth.get(slot, ())
        return tuple([max(0, amount) for amount in free]) if free else ()

    def _row(self, slot: int) -> NodeRow:
        return NodeRow(
            node=self.nodes[slot],
            configuration_set=self.topologies[slot].configuration_set.name,
            free_mask=self.free[slot],
            free_millicores=self.millicores[slot],
            free_memory_bytes=self.memory[slot],
            version=self._versions[slot],
            available=self.available[slot],
            rack=self.racks[slot],
            fabric=self.fabrics[slot],
            socket_jobs=self.socket_jobs[slot],
            group_jobs=self.group_jobs[slot],
            device_rows=self.device_rows(slot),
            affinity=self.affinity[slot],
            parked_bytes=self.parked.get(slot, ()),
            free_bandwidth=self._free_bandwidth(slot),
            partitions=self.topologies[slot].partitions,
        )

    def _place(self, fabric: str, rack: str) -> int:
        return self._place_codes.setdefault((fabric, rack), len(self._place_codes))


_ONE_OR_NONE = frozenset({0, 1})
# The lists that have an entry by slot, beside `topologies`, and the entry of a slot without a node.
_EMPTY_SLOT: dict[str, object] = {
    **dict.fromkeys(("nodes", "racks", "fabrics"), ""),
    **dict.fromkeys(("free", "memory", "held", "affinity", "_in_service", "_versions"), 0),
    **dict.fromkeys(("millicores", "socket_jobs", "group_jobs"), ()),
    "available": False,
}
_COPIED = (*_EMPTY_SLOT, "topologies", "parked", "shared", "bandwidth", "_vacant")


def _padded(counts: tuple[int, ...], length: int) -> tuple[int, ...]:
    if len(counts) == length:
        return counts
    return tuple(counts[:length]) + (0,) * (length - len(counts))


class ViewImage(Struct, frozen=True, gc=False):
    """Everything of a view that an answer may depend on: a view made of it decides as the original does."""

    sets: tuple[ConfigurationSet, ...]
    version: int
    freed: int
    mode: LoadMode
    # By slot; None where a node has left.
    rows: tuple[NodeRow | None, ...]
    # By slot: devices that may ever be free; zero where a node has left.
    in_service: tuple[int, ...]
    # Slots for the nodes that come next, the last one first.
    vacant: tuple[int, ...]
    # Fabric and rack, in the order of their numbers.
    places: tuple[tuple[str, str], ...]
    # By slot: devices of the idle view if one was made; it stays while nodes stay.
    idle: tuple[int, ...] | None = None


def image_of_view(view: View) -> ViewImage:
    """Shares nothing with the view that changes."""
    return ViewImage(
        sets=tuple(view.sets.values()),
        version=view.version,
        freed=view.freed,
        mode=view.mode,
        rows=tuple([view._row(slot) if name else None for slot, name in enumerate(view.nodes)]),
        in_service=tuple([mask if name else 0 for mask, name in zip(view._in_service, view.nodes, strict=True)]),
        vacant=tuple(view._vacant),
        places=tuple(view._place_codes),
        idle=None if view._idle is None else tuple(view._idle.free),
    )


def view_of_image(image: ViewImage) -> View:
    """KeyError or ValueError if its parts do not go together."""
    view = View(image.sets)
    view._place_codes = {place: code for code, place in enumerate(image.places)}
    for row, in_service in zip(image.rows, image.in_service, strict=True):
        if row is None:
            view._grow()
        else:
            view.put(row, in_service)
    view._vacant = list(image.vacant)
    view.version, view.freed, view.mode = image.version, image.freed, image.mode
    if image.idle is not None:
        view._idle = view.emptied(everywhere_available=True)
        view._idle.free = list(image.idle)
    return view
