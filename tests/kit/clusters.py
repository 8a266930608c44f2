"""Small clusters and gangs for tests of decisions."""

from __future__ import annotations

from ganger.cluster.resources import (
    Claim,
    ConfigurationSet,
    GangShape,
    Locality,
    LocalityLevel,
    NodeRow,
    Role,
    TaskShape,
)
from ganger.cluster.topology import parse_topology
from ganger.cluster.view import LoadMode, View
from hypothesis import strategies as st

GIB = 1 << 30


def server(topology: str = "2x2", cores: int = 8, gib: int = 64, device_type: str = "virtual") -> ConfigurationSet:
    return parse_topology(
        topology,
        name=f"{device_type}-{topology}-{cores}",
        device_type=device_type,
        millicores=cores * 1000,
        memory_bytes=gib * GIB,
        device_memory_bytes=4 * GIB,
    )


def idle_row(name: str, of: ConfigurationSet, rack: str = "", fabric: str = "", available: bool = True) -> NodeRow:
    return NodeRow(
        name,
        of.name,
        (1 << of.devices) - 1,
        tuple(socket.millicores for socket in of.sockets),
        of.free_memory_bytes,
        available=available,
        rack=rack,
        fabric=fabric,
        free_bandwidth=of.bandwidth,
    )


def cluster(
    nodes: int = 4, of: ConfigurationSet | None = None, per_rack: int = 0, mode: LoadMode = LoadMode.SPREAD
) -> View:
    of = of or server()
    view = View([of], mode=mode)
    for index in range(nodes):
        rack = f"r{index // per_rack}" if per_rack else ""
        view.put(idle_row(f"s{index}", of, rack, "f" if per_rack else ""))
    return view


def gang(
    gpus: int = 1,
    *,
    cores: int = 0,
    gib: int = 0,
    widest: LocalityLevel = LocalityLevel.CLUSTER,
    wish: LocalityLevel | None = None,
    patience: float = 0.0,
    nodes: int = 0,
    device_type: str = "",
    arena_gib: int = 0,
    device_gib: int = 0,
) -> GangShape:
    """`gpus` tasks of one device each; with `gpus` 0 one task without."""
    role = Role("worker", gpus or 1, TaskShape(min(gpus, 1), cores * 1000, gib * GIB))
    return GangShape((role,), device_type, Locality(widest, wish, patience), nodes, arena_gib * GIB, device_gib * GIB)


def parked(node: str, *gib: float) -> Claim:
    """What a gang at OFFLOAD keeps of the devices of a node, and nothing else."""
    return Claim(node, 0, (), 0, parked_bytes=tuple(int(size * GIB) for size in gib))


def gangs() -> st.SearchStrategy[GangShape]:
    """Gangs of one or two roles of all kinds."""
    shapes = st.builds(
        TaskShape,
        gpus=st.sampled_from([0, 1, 1, 1, 2]),
        millicores=st.sampled_from([0, 0, 1000, 2000]),
        memory_bytes=st.sampled_from([0, 0, GIB, 20 * GIB]),
        bandwidth=st.sampled_from([(), (), (200, 0), (100, 300)]),
    )
    roles = st.lists(st.builds(Role, st.just("role"), st.integers(1, 6), shapes), min_size=1, max_size=2)
    localities = st.builds(
        Locality,
        widest=st.sampled_from([LocalityLevel.SOCKET, LocalityLevel.NODE, LocalityLevel.RACK, LocalityLevel.CLUSTER]),
    )
    return st.builds(
        GangShape,
        roles=roles.map(tuple),
        device_type=st.sampled_from(["", "virtual"]),
        locality=localities,
        nodes=st.sampled_from([0, 0, 0, 1, 2]),
        arena_bytes_per_device=st.sampled_from([0, GIB]),
        device_memory_bytes=st.sampled_from([0, 0, 2 * GIB, 4 * GIB]),
    )
