"""What is said of device memory that a gang keeps although it has offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from daemon.devices.fake_pynvml import FakeNvml
from ganger_daemon.devices.inventory import Devices
from ganger_daemon.devices.nvml import NvmlDevices
from ganger_daemon.devices.virtual import VirtualDevices, VirtualSpec
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.gang.gang_context import LocalPart
from ganger_daemon.gang.gang_memory import MemoryWatch
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.node.process_identity import ProcessId

MIB = 1 << 20
# Two ranks, one on device 1, one on devices 2 and 3.
PART = LocalPart((0, 1), (0b0010, 0b1100), 2, True)
RANKS = {0: ProcessId(71, 1), 1: ProcessId(72, 1)}


@pytest.fixture
def fake() -> FakeNvml:
    return FakeNvml("l40s-x4")


@pytest.fixture
def nvml(fake: FakeNvml) -> Iterator[NvmlDevices]:
    made = NvmlDevices(library=fake, core_map=fake.recording.core_map, memory_bytes=2**40, wait_ms=5)
    yield made
    made.close()


def host_of(devices: Devices) -> NodeContext:
    cgroups = SimpleNamespace(unreclaimable_bytes=lambda group: 0)
    return cast(NodeContext, SimpleNamespace(devices=devices, inventory=devices.inventory, cgroups=cgroups))


def watch(devices: Devices) -> MemoryWatch:
    return MemoryWatch(host_of(devices), PART)


def pages(*said: tuple[int, int]) -> ControlPages:
    """By rank: bytes of the framework when it was last measured, and bytes it freed."""
    progress = [SimpleNamespace(device_bytes=used, offloaded_bytes=freed, state=0) for used, freed in said]
    return cast(ControlPages, SimpleNamespace(progress=lambda rank: progress[rank]))


def settled(devices: Devices, said: ControlPages) -> MemoryWatch:
    found = watch(devices)
    found.begin()
    assert not found.residue
    found.verify(said, RANKS, 0b1110)
    assert found.freed
    return found


def test_the_driver_says_what_the_processes_of_the_gang_use_once_all_is_freed(
    fake: FakeNvml, nvml: NvmlDevices
) -> None:
    # Parked processes of another gang are there, too, and one of ours on a device that is not the gang's.
    fake.processes = {
        0: [(71, 9 * MIB)],
        1: [(71, 520 * MIB), (99, 480 * MIB)],
        2: [(72, 500 * MIB)],
        3: [(72, 300 * MIB), (71, 4 * MIB)],
    }
    found = settled(nvml, pages((0, 0), (0, 0)))
    assert found.residue == (0, 520 * MIB, 500 * MIB, 304 * MIB)
    fake.processes.clear()
    found.verify(pages((0, 0), (0, 0)), RANKS, 0b1110)
    assert found.residue == (0, 520 * MIB, 500 * MIB, 304 * MIB), "measured once, when it came to rest"
    found.begin()
    assert not found.residue


@pytest.mark.parametrize("unknown", [[], [(99, 500 * MIB)], [(72, None)]])
def test_where_the_driver_does_not_tell_of_every_device_nothing_is_said(
    fake: FakeNvml, nvml: NvmlDevices, unknown: list[Any]
) -> None:
    fake.processes = {1: [(71, 520 * MIB)], 2: [(72, 500 * MIB)], 3: unknown}
    assert settled(nvml, pages((0, 0), (0, 0))).residue == ()


def test_nothing_is_measured_before_the_memory_is_seen_free(fake: FakeNvml, nvml: NvmlDevices) -> None:
    fake.processes = {1: [(71, MIB)], 2: [(72, MIB)], 3: [(72, MIB)]}
    fake.used = [0, 900 * MIB, 900 * MIB, 900 * MIB]
    found, said = watch(nvml), pages((0, 600 * MIB), (0, 600 * MIB))
    found.begin()
    found.sample(said, RANKS)
    found.verify(said, RANKS, 0b1110)
    assert (found.freed, found.residue) == (False, ())
    fake.used = [0, 300 * MIB, 600 * MIB, 600 * MIB]
    found.verify(said, RANKS, 0b1110)
    assert (found.freed, found.residue) == (True, (0, MIB, MIB, MIB))


def test_of_a_device_that_others_use_too_only_what_is_its_own_has_to_go(fake: FakeNvml, nvml: NvmlDevices) -> None:
    said = pages((0, 600 * MIB), (0, 600 * MIB))
    host = host_of(nvml)
    for is_shared in (False, True):
        fake.processes = {device: [(71, 610 * MIB), (72, 610 * MIB)] for device in (1, 2, 3)}
        fake.used = [0, 900 * MIB, 900 * MIB, 900 * MIB]
        found = MemoryWatch(host, PART, lambda: is_shared)  # noqa: B023
        found.begin()
        found.sample(said, RANKS)
        fake.processes = {device: [(71, 10 * MIB), (72, 10 * MIB)] for device in (1, 2, 3)}
        # The memory of another gang there has grown meanwhile.
        fake.used = [0, 900 * MIB, 900 * MIB, 900 * MIB]
        found.verify(said, RANKS, 0b1110)
        assert found.freed is is_shared


@pytest.mark.parametrize(
    ("said", "residue"),
    [
        (((100 * MIB, 100 * MIB), (80 * MIB, 80 * MIB)), (0, 0, 0, 0)),
        (((100 * MIB, 40 * MIB), (80 * MIB, 40 * MIB)), (0, 60 * MIB, 20 * MIB, 20 * MIB)),
        # A little less or more was there when it was last measured.
        (((100, 40), (80 * MIB, 82 * MIB)), (0, 0, 0, 0)),
        # A page may hold any number.
        ((((1 << 64) - 1, 0), (0, 0)), (0, 200 * MIB, 0, 0)),
    ],
)
def test_of_virtual_devices_the_pages_say_what_lives_on(
    said: tuple[tuple[int, int], ...], residue: tuple[int, ...]
) -> None:
    devices = VirtualDevices(VirtualSpec(4, "2x2", 8, 2**34, gpu_memory_bytes=200 * MIB))
    assert settled(devices, pages(*said)).residue == residue
