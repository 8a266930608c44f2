"""Clusters of all kinds with gangs on them, for what must hold whatever is free."""

from __future__ import annotations

from ganger.cluster.placement import candidates
from ganger.cluster.resources import ConfigurationSet, DeviceGroup, GangShape, Locality, LocalityLevel, Role, TaskShape
from ganger.cluster.view import LoadMode, View
from hypothesis import strategies as st
from kit.clusters import GIB, idle_row, server
from msgspec.structs import replace

_LINKED = replace(
    server("2x2x2", cores=16, device_type="linked"),
    groups=(DeviceGroup(LocalityLevel.NVLINK, 0x0F), DeviceGroup(LocalityLevel.NVLINK, 0xF0)),
)
_PLAIN = ConfigurationSet("plain", memory_bytes=32 * GIB, sockets=server("2x2").sockets)
_PLAIN = replace(_PLAIN, sockets=tuple(replace(socket, device_mask=0) for socket in _PLAIN.sockets))
_DISK = replace(server("2x2", cores=10), name="disk", dimensions={"disk_mb_per_s": 500.0})
_BOTH = replace(server("4", cores=6, device_type="other"), dimensions={"disk_mb_per_s": 900.0, "net_mb_per_s": 1_000.0})
SETS = (server("2x2"), server("2x2x2", cores=12, gib=96), _BOTH, _LINKED, _PLAIN, _DISK)

shapes = st.builds(
    GangShape,
    roles=st.lists(
        st.builds(
            Role,
            st.just("role"),
            st.integers(1, 12),
            st.builds(
                TaskShape,
                gpus=st.sampled_from([0, 1, 1, 1, 2, 4]),
                millicores=st.sampled_from([0, 0, 500, 1000, 3000]),
                memory_bytes=st.sampled_from([0, 0, GIB, 20 * GIB]),
                bandwidth=st.sampled_from([(), (), (200, 0), (100, 300)]),
            ),
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
    device_type=st.sampled_from(["", "", "virtual", "other"]),
    locality=st.builds(
        Locality, widest=st.sampled_from([*LocalityLevel, LocalityLevel.CLUSTER, LocalityLevel.CLUSTER])
    ),
    nodes=st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
    arena_bytes_per_device=st.sampled_from([0, GIB]),
    device_memory_bytes=st.sampled_from([0, 0, 3 * GIB, 6 * GIB]),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    """A few nodes of several kinds, racks and fabrics named or not, some out of service, some with parked gangs, with
    gangs on them."""
    view = View(SETS, mode=draw(st.sampled_from(LoadMode)))
    for index in range(draw(st.integers(1, 10))):
        of = draw(st.sampled_from(SETS))
        fabric = draw(st.sampled_from(["", "f", "f", "g"]))
        rack = draw(st.sampled_from(["", "r0", "r1", "r1"]))
        row = idle_row(f"s{index}", of, rack, fabric, available=draw(st.sampled_from([True, True, True, False])))
        if of.devices and draw(st.sampled_from([True, False, False])):
            row = replace(row, parked_bytes=tuple(draw(st.sampled_from([0, 2 * GIB])) for _ in range(of.devices)))
        view.put(row)
    for shape in draw(st.lists(shapes, max_size=4)):
        for found in candidates(view, replace(shape, nodes=0, locality=Locality()), limit=1).candidates:
            for claim in found:
                view.take(claim, shape.gpus)
    return view
