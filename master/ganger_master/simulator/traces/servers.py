"""The servers of a simulated cluster: from a few flags or a YAML file, as configuration sets and rows of the view.

    servers:
      - {name: old, nodes: 16, gpus_per_node: 4, gpu_type: P100, cores_per_node: 20, memory_per_node: 256G}
      - {name: new, nodes: 8, gpus_per_node: 8, gpu_type: V100, topology: 2x4, nodes_per_rack: 4, fabric: a,
         dimensions: {disk_mb_per_s: 500}}

Keys are the flags' names. The YAML is read strictly; all errors are reported together, each with its flag or its place
in the file.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ganger.cluster.resources import ConfigurationSet, NodeRow, Socket
from ganger.cluster.topology import parse_topology
from ganger.cluster.view import LoadMode, View
from ganger.text import counted, meant, os_reason, parse_cores, parse_memory
from msgspec.structs import replace

from ganger_master.core.tenancy import NO_PARTITIONS, PartitionIndex

Value = TypeVar("Value")

# As in Synergy's clusters (OSDI 2022): 24 cores and 500 GB beside eight V100 of 16 GB.
CORES_PER_GPU = 3
MEMORY_PER_GPU = 62_500_000_000
GPU_MEMORY = 16 << 30
_MOST_NODES = 100_000
_MOST_FILE_BYTES = 1 << 20
_CORES_WITHOUT_GPUS = 16
_MEMORY_WITHOUT_GPUS = 64 << 30
_NO_DIMENSIONS: Mapping[str, float] = {}
_KEYS = (
    "name",
    "nodes",
    "gpus_per_node",
    "gpu_type",
    "gpu_memory",
    "topology",
    "cores_per_node",
    "memory_per_node",
    "nodes_per_rack",
    "fabric",
    "dimensions",
)


class ServersFileError(ValueError):
    """Every problem of a description, one a line."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


@dataclass(frozen=True)
class LargestServer:
    """The totals of some servers."""

    gpus: int
    millicores: int
    memory_bytes: int


@dataclass(frozen=True)
class ServerGroup:
    """`nodes` servers of one configuration set, named after it. `nodes_per_rack` 0: the racks are unknown."""

    configuration_set: ConfigurationSet
    nodes: int
    nodes_per_rack: int = 0
    fabric: str = ""

    def rows(self) -> Iterator[NodeRow]:
        made = self.configuration_set
        width = len(str(self.nodes - 1))
        for number in range(self.nodes):
            yield NodeRow(
                f"{made.name}-{number:0{width}}",
                made.name,
                (1 << made.devices) - 1,
                tuple(socket.millicores for socket in made.sockets),
                made.free_memory_bytes,
                rack=f"{made.name}-rack-{number // self.nodes_per_rack}" if self.nodes_per_rack else "",
                fabric=self.fabric,
                free_bandwidth=made.bandwidth,
            )


@dataclass(frozen=True)
class Servers:
    """A cluster; groups of different configuration sets, in the order in which they were described."""

    groups: tuple[ServerGroup, ...]

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def gpus(self) -> int:
        return self.of_types("").gpus

    @property
    def millicores(self) -> int:
        return self.of_types("").millicores

    @property
    def memory_bytes(self) -> int:
        return self.of_types("").memory_bytes

    def of_types(self, accepted: str) -> LargestServer:
        """Return the totals of the servers whose GPUs a job accepts: types separated by "|", or all types for ""."""
        types = {kind.strip() for kind in accepted.split("|")}
        gpus = millicores = memory = 0
        for group in self.groups:
            made = group.configuration_set
            if not accepted or made.device_type in types:
                gpus += group.nodes * made.devices
                millicores += group.nodes * sum(socket.millicores for socket in made.sockets)
                memory += group.nodes * made.memory_bytes
        return LargestServer(gpus, millicores, memory)

    def view(self, mode: LoadMode = LoadMode.SPREAD, partitions: PartitionIndex = NO_PARTITIONS) -> View:
        """Return a view of all servers, idle."""
        view = View((group.configuration_set for group in self.groups), mode=mode)
        for group in self.groups:
            device_type = group.configuration_set.device_type
            for row in group.rows():
                view.put(replace(row, partitions=partitions.of_node(row.node, device_type)) if partitions else row)
        return view


def servers_from_flags(**flags: Any) -> Servers:
    """Return one group of equal servers from values by flag name (`gpus_per_node` for --gpus-per-node); None: not
    given. Raises ServersFileError."""
    given = {key: value for key, value in flags.items() if value is not None}
    reader = _Reader(given, lambda key: f"--{key.replace('_', '-')}")
    group = _group(reader, default_name="node")
    if group is None or reader.problems:
        raise ServersFileError(reader.problems)
    return _checked([group], [], [])


def servers_from_file(path: Path) -> Servers:
    """Return groups of servers from a YAML file. Raises ServersFileError, also for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ServersFileError([f"{path}: cannot be read: {os_reason(error)}"]) from error
    if len(text) > _MOST_FILE_BYTES:
        raise ServersFileError([f"{path}: longer than {_MOST_FILE_BYTES:,} bytes: this is no description of a cluster"])
    # Most clusters are described by a few flags.
    from ganger.spec import read_yaml

    try:
        description = read_yaml(text.decode())
    except ValueError as error:
        raise ServersFileError([f"{path}: not readable as YAML: {os_reason(error)}"]) from error
    try:
        return servers_from_description(description)
    except ServersFileError as error:
        raise ServersFileError([f"{path}: {problem}" for problem in error.problems]) from None


def servers_from_description(description: object) -> Servers:
    """Return groups of servers from the value of a YAML file with the key `servers`. Raises ServersFileError."""
    entries = description.get("servers") if isinstance(description, dict) else None
    if not isinstance(description, dict) or not isinstance(entries, list) or not entries:
        raise ServersFileError(["a cluster is a mapping with a list `servers`, one entry for each kind of server"])
    problems = [f"{key}: there is no such key; there is servers" for key in description if key != "servers"]
    groups, names = [], []
    for index, entry in enumerate(entries):
        place = f"servers[{index}]"
        if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
            problems.append(f"{place}: not a mapping of {', '.join(_KEYS)}")
            continue
        reader = _Reader(entry, lambda key, place=place: f"{place}.{key}")  # type: ignore[misc]
        group = _group(reader, default_name=f"kind{index}")
        problems += reader.problems
        if group is not None:
            groups.append(group)
        # Of an entry with other mistakes, too.
        names.append(group.configuration_set.name if group is not None else str(entry.get("name", f"kind{index}")))
    return _checked(groups, problems, names)


def _checked(groups: list[ServerGroup], problems: list[str], names: list[str]) -> Servers:
    problems += [
        f"servers: the name {name} is given twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    servers = Servers(tuple(groups))
    if servers.nodes > _MOST_NODES:
        problems.append(f"servers: {counted(servers.nodes, 'node', ',')} together, at most {_MOST_NODES:,}")
    if groups and not servers.gpus and not problems:
        problems.append("servers: none of them has a GPU")
    if problems:
        raise ServersFileError(problems)
    return servers


class _Reader:
    """Reads keys one by one and collects what is wrong with them."""

    def __init__(self, entries: Mapping[str, Any], place: Callable[[str], str]) -> None:
        self.problems: list[str] = []
        self._entries = entries
        self._place = place
        for key in entries:
            if key not in _KEYS:
                self.complain(key, f"there is no such key; {meant(key, _KEYS)}")

    def read(self, key: str, parse: Callable[[Any], Value], default: Value, required: bool = False) -> Value:
        if key not in self._entries:
            if required:
                self.complain(key, "is needed")
            return default
        entry = self._entries[key]
        # A few lines of YAML can stand for gigabytes: what has no business here is not even shown.
        if isinstance(entry, list) or (isinstance(entry, dict) and parse is not _dimensions):
            self.complain(key, f"one value is wanted here, not a {'list' if isinstance(entry, list) else 'mapping'}")
            return default
        try:
            return parse(entry)
        except (ValueError, TypeError) as error:
            self.complain(key, str(error))
            return default

    def complain(self, key: str, what: str) -> None:
        self.problems.append(f"{self._place(key)}: {what}")


def _group(reader: _Reader, default_name: str) -> ServerGroup | None:
    nodes = reader.read("nodes", _whole(1, _MOST_NODES), 1, required=True)
    gpus = reader.read("gpus_per_node", _whole(0, 64), 0, required=True)
    gpu_type = reader.read("gpu_type", _word, "gpu" if gpus else "")
    name = reader.read("name", _word, gpu_type if gpus and gpu_type != "gpu" else default_name)
    millicores = reader.read("cores_per_node", parse_cores, 1000 * (CORES_PER_GPU * gpus or _CORES_WITHOUT_GPUS))
    memory = reader.read("memory_per_node", parse_memory, MEMORY_PER_GPU * gpus or _MEMORY_WITHOUT_GPUS)
    gpu_memory = reader.read("gpu_memory", parse_memory, GPU_MEMORY)
    nodes_per_rack = reader.read("nodes_per_rack", _whole(1, _MOST_NODES), 0)
    fabric = reader.read("fabric", _word, "")
    dimensions = reader.read("dimensions", _dimensions, _NO_DIMENSIONS)
    topology = reader.read("topology", _text, str(gpus))
    made = ConfigurationSet(name, sockets=(Socket(millicores, 0),), memory_bytes=memory, dimensions=dimensions)
    if gpus:
        try:
            made = parse_topology(
                topology,
                name=name,
                device_type=gpu_type,
                device_memory_bytes=gpu_memory,
                millicores=millicores,
                memory_bytes=memory,
            )
        except ValueError as error:
            reader.complain("topology", str(error))
        else:
            made = replace(made, dimensions=dimensions)
            if made.devices != gpus:
                reader.complain(
                    "topology", f"{topology} has {counted(made.devices, 'GPU')}, but gpus_per_node is {gpus}"
                )
    elif topology != "0":
        reader.complain("topology", "a server without GPUs has none")
    return None if reader.problems else ServerGroup(made, nodes, nodes_per_rack, fabric)


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{value!r} is not a whole number from {least} to {most:,}")
        return value

    return parse


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a text")
    return str(value)


def _word(value: Any) -> str:
    text = _text(value)
    if not 0 < len(text) <= 63 or not text.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ValueError(f"{text[:80]!r} is not a name: letters, digits, '-', '_' and '.', at most 63")
    return text


def _dimensions(value: Any) -> Mapping[str, float]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a mapping of names to numbers")
    for key, amount in value.items():
        _word(key)
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise ValueError(f"{key} is {reprlib.repr(amount)}, not a number that is finite and not negative")
    return {str(key): float(amount) for key, amount in value.items()}
