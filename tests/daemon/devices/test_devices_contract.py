"""What holds for the devices of every node, whatever they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon.devices.fake_pynvml import FakeNvml
from ganger.cluster.resources import LocalityLevel
from ganger_daemon.devices.inventory import MAX_DEVICES, UNREADABLE, Devices
from ganger_daemon.devices.nvml import NvmlDevices
from ganger_daemon.devices.virtual import (
    FIXTURES,
    NoDevices,
    RecordedDevices,
    VirtualDevices,
    VirtualSpec,
    choose_devices,
    read_recording,
)
from ganger_daemon.node.core_table import declared_cores

RECORDED = sorted(path.stem for path in FIXTURES.glob("*.json"))


def over_nvml(name: str) -> Devices:
    fake = FakeNvml(name)
    return NvmlDevices(library=fake, core_map=fake.recording.core_map, memory_bytes=2**40, wait_ms=5)


MAKERS: dict[str, Callable[[], Devices]] = {
    "none": lambda: NoDevices(declared_cores(4, 2, (0, 1)), 2**34),
    "virtual 2x2": lambda: VirtualDevices(VirtualSpec(4, "2x2", 8, 2**34)),
    "virtual 2x2x2": lambda: VirtualDevices(VirtualSpec(8, "2x2x2", 16, 2**34)),
    "virtual without devices": lambda: VirtualDevices(VirtualSpec(0, "", 2, 2**34)),
    **{f"recorded {name}": lambda name=name: RecordedDevices(read_recording(Path(name))) for name in RECORDED},
    **{f"nvml {name}": lambda name=name: over_nvml(name) for name in RECORDED},
}


@pytest.fixture(params=MAKERS)
def devices(request: pytest.FixtureRequest) -> Iterator[Devices]:
    made = MAKERS[request.param]()
    yield made
    made.close()


def test_what_is_found_is_the_same_every_time(devices: Devices) -> None:
    assert devices.inventory == devices.inventory


def test_the_configuration_set_describes_the_devices(devices: Devices) -> None:
    found = devices.inventory
    described = found.configuration_set
    assert described.devices == len(found.devices) <= MAX_DEVICES
    assert [device.index for device in found.devices] == list(range(described.devices))
    assert bool(described.device_type) == bool(described.devices)
    assert 0 < len(described.name) <= 63
    assert described.name == described.name.lower()
    assert len({device.uuid for device in found.devices}) == described.devices


def test_sockets_share_out_the_devices_and_the_cores(devices: Devices) -> None:
    found = devices.inventory
    described = found.configuration_set
    assert sum(socket.device_mask for socket in described.sockets) == (1 << described.devices) - 1
    assert tuple(socket.millicores for socket in described.sockets) == found.core_map.millicores()
    assert all(socket.millicores > 0 for socket in described.sockets)
    assert described.memory_bytes > 0


def test_groups_are_of_several_known_devices_with_the_innermost_level_first(devices: Devices) -> None:
    described = devices.inventory.configuration_set
    levels = [group.level for group in described.groups]
    assert levels == sorted(levels)
    for group in described.groups:
        assert group.level < LocalityLevel.NODE
        assert group.device_mask.bit_count() > 1
        assert group.device_mask >> described.devices == 0
    assert len({group.device_mask for group in described.groups}) == len(described.groups)


def test_used_memory_is_told_for_each_device(devices: Devices) -> None:
    assert len(devices.used_memory()) == devices.inventory.configuration_set.devices


def test_the_memory_of_missing_processes_is_unreadable(devices: Devices) -> None:
    count = devices.inventory.configuration_set.devices
    assert devices.used_by(()) == devices.used_by({1 << 30}) == (UNREADABLE,) * count


def test_a_process_can_be_attached_and_detached_any_number_of_times(devices: Devices) -> None:
    devices.attach(os.getpid(), 1)
    devices.attach(os.getpid(), 1, baseline_bytes=0)
    devices.used_memory()
    devices.detach(os.getpid())
    devices.detach(os.getpid())
    assert devices.baseline(os.getpid()) is None


def test_a_rank_is_shown_its_devices_and_no_others(devices: Devices) -> None:
    found = devices.inventory
    shown = devices.environment(0b1)
    assert "CUDA_VISIBLE_DEVICES" in shown
    for device in found.devices[1:]:
        assert device.uuid not in shown["CUDA_VISIBLE_DEVICES"]
    assert all(isinstance(value, str) for value in shown.values())


def test_nothing_has_happened_at_the_start(devices: Devices) -> None:
    assert devices.take_events() == ()
    assert devices.faults() == {}


def test_capabilities_say_what_the_devices_are(devices: Devices) -> None:
    assert devices.capabilities["devices"] in ("nvml", "virtual", "recorded", "none")
    assert devices.capabilities["shared_cores"] in ("true", "false")
    assert devices.capabilities["packing"] == ("no" if devices.capabilities["devices"] == "none" else "yes")


def test_nothing_is_used_at_the_start(devices: Devices) -> None:
    assert devices.use_by((), 0b1) in (None, 0.0)


def test_closing_twice_is_allowed(devices: Devices) -> None:
    devices.close()
    devices.close()


@pytest.mark.parametrize("name", RECORDED)
def test_the_driver_and_the_recording_of_one_server_give_the_same_inventory(name: str) -> None:
    recording = read_recording(Path(name))
    played = RecordedDevices(recording)
    fake = FakeNvml(name)
    asked = NvmlDevices(
        library=fake, core_map=played.inventory.core_map, memory_bytes=recording.memory_bytes, wait_ms=5
    )
    asked.close()
    assert asked.inventory == played.inventory


def test_a_machine_without_a_driver_is_a_node_without_devices() -> None:
    found = choose_devices()
    if found.capabilities["devices"] != "none":
        found.close()
        pytest.skip("this machine has GPUs")
    assert found.inventory.configuration_set.devices == 0
    assert found.capabilities["devices_reason"]
