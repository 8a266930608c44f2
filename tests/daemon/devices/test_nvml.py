"""What NVML reports, and what the daemon makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from daemon.devices.fake_pynvml import FakeNvml, NVMLError
from ganger.cluster.resources import LocalityLevel
from ganger_daemon.devices.inventory import UNREADABLE, HealthKind, SlowdownWatch
from ganger_daemon.devices.nvml import NoDriverError, NvmlDevices
from kit.waiting import eventually


def opened(fake: FakeNvml) -> NvmlDevices:
    return NvmlDevices(library=fake, core_map=fake.recording.core_map, memory_bytes=2**40, wait_ms=5)


@pytest.fixture
def fake() -> FakeNvml:
    return FakeNvml("dgx-a100")


@pytest.fixture
def devices(fake: FakeNvml) -> Iterator[NvmlDevices]:
    made = opened(fake)
    yield made
    made.close()
    assert fake.open == 0


def first_event(devices: NvmlDevices) -> Any:
    taken: list[Any] = []

    def look() -> bool:
        taken.extend(devices.take_events())
        return bool(taken)

    eventually(look)
    return taken[0]


def test_devices_are_shown_by_uuid_in_bus_order(devices: NvmlDevices, fake: FakeNvml) -> None:
    shown = devices.environment(0b101)
    assert shown["CUDA_VISIBLE_DEVICES"] == f"{fake.server.devices[0].uuid},{fake.server.devices[2].uuid}"
    assert shown["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_an_nvswitch_server_is_one_nvlink_group(devices: NvmlDevices) -> None:
    groups = devices.inventory.configuration_set.groups
    assert [(group.level, group.device_mask) for group in groups] == [(LocalityLevel.NVLINK, 0xFF)]


def test_a_fatal_xid_takes_the_device_out_of_service(devices: NvmlDevices, fake: FakeNvml) -> None:
    fake.events.put((3, fake.nvmlEventTypeXidCriticalError, 79))
    event = first_event(devices)
    assert (event.device, event.kind, event.code, event.fatal) == (3, HealthKind.LOST, 79, True)
    assert list(devices.faults()) == [3]


def test_an_xid_of_the_application_leaves_the_device_in_service(devices: NvmlDevices, fake: FakeNvml) -> None:
    fake.events.put((3, fake.nvmlEventTypeXidCriticalError, 31))
    event = first_event(devices)
    assert (event.kind, event.code, event.fatal) == (HealthKind.XID, 31, False)
    assert devices.faults() == {}


def test_growing_ecc_errors_are_noticed_without_an_event(devices: NvmlDevices, fake: FakeNvml) -> None:
    fake.ecc[5] = 2
    event = first_event(devices)
    assert (event.device, event.kind, event.code) == (5, HealthKind.ECC, 2)
    assert "ECC" in devices.faults()[5]


def test_a_lost_device_is_noticed_once_and_reads_as_unreadable(devices: NvmlDevices, fake: FakeNvml) -> None:
    fake.lost.add(1)
    assert first_event(devices).kind is HealthKind.LOST
    assert devices.used_memory()[1] == UNREADABLE
    assert devices.used_memory()[0] == 0
    assert devices.take_events() == ()
    assert devices.faults() == {1: "does not answer: lost"}


def test_a_driver_that_reports_no_events_is_polled(fake: FakeNvml) -> None:
    fake.can_report_events = False
    devices = opened(fake)
    try:
        fake.ecc[0] = 1
        assert first_event(devices).kind is HealthKind.ECC
        assert devices.capabilities["device_health"].startswith("polled")
    finally:
        devices.close()


def test_a_sliced_device_is_out_of_service_and_says_what_to_do(fake: FakeNvml) -> None:
    fake.mig.add(2)
    devices = opened(fake)
    devices.close()
    assert "MIG" in devices.faults()[2]


def test_an_idle_device_that_answers_success_as_an_error_is_idle(devices: NvmlDevices) -> None:
    assert devices.process_utilisation(0) == {}


def test_what_processes_used_of_their_devices_is_the_mean_of_these(devices: NvmlDevices, fake: FakeNvml) -> None:
    assert devices.use_by({7, 8}, 0b11) is None, "the driver reports nothing"
    fake.utilisation = {0: {7: 40, 8: 30, 9: 20}, 1: {9: 100}, 2: {7: 90, 8: 90}}
    assert devices.use_by({7, 8}, 0b01) == 0.7
    assert devices.use_by({7, 8}, 0b11) == 0.35
    # Samples of two processes are not of the same moment.
    assert devices.use_by({7, 8}, 0b100) == 1.0


def test_devices_are_used_by_the_processes_that_the_driver_names_or_else_by_any(
    devices: NvmlDevices, fake: FakeNvml
) -> None:
    assert devices.are_used({7}, 0b11) is None, "this driver reports no utilization of devices"
    fake.rates = {0: (0, 0), 1: (0, 0), 2: (40, 0), 3: (0, 5)}
    assert devices.are_used({7}, 0b11) is False
    assert devices.are_used({7}, 0b101) is True, "the driver names no process, as in a container"
    assert devices.are_used({7}, 0b1000) is True, "its memory is read"
    fake.utilisation = {2: {9: 40}, 1: {7: 1}}
    assert devices.are_used({7}, 0b101) is False, "another job uses device 2"
    assert devices.are_used({7}, 0b111) is True


def test_a_device_that_takes_one_process_only_is_not_shared(fake: FakeNvml) -> None:
    fake.compute_mode = 3
    devices = opened(fake)
    devices.close()
    assert devices.capabilities["packing"] == "no: device 0 is in an exclusive compute mode"


def test_a_constant_that_is_a_tuple_is_taken_apart(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNvml, "NVML_P2P_CAPS_INDEX_NVLINK", (2,))
    devices = opened(fake)
    devices.close()
    assert devices.inventory.configuration_set.groups[0].level is LocalityLevel.NVLINK


def test_a_driver_that_does_not_answer_is_no_driver(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NVMLError(9)

    monkeypatch.setattr(fake, "nvmlInit", refuse)
    with pytest.raises(NoDriverError, match="does not answer"):
        opened(fake)


def test_a_driver_without_devices_is_closed_again(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "nvmlDeviceGetCount", lambda: 0)
    with pytest.raises(NoDriverError, match="no device"):
        opened(fake)
    assert fake.open == 0


POWER_CAP, HEAT, POWER_BRAKE = 0x04, 0x40, 0x80


@pytest.mark.parametrize(
    ("looks", "reason"),
    [
        ([(HEAT, 59)], ""),
        ([(HEAT, 60)], "too hot"),
        ([(POWER_CAP, 500)], ""),
        ([(POWER_CAP | POWER_BRAKE, 60)], "power brake"),
        ([(HEAT, 40), (0, 30), (HEAT, 51)], "too hot"),
        ([(HEAT, 40), (0, 30), (HEAT, 49)], ""),
        ([(HEAT, 60), (0, 59)], "too hot"),
        ([(HEAT, 60), (0, 60)], ""),
        ([(HEAT, 5_000), (0, 119)], "too hot"),
        ([(HEAT, 5_000), (0, 120)], ""),
    ],
)
def test_a_device_is_slowed_down_once_it_was_for_a_minute_more_often_than_not(
    looks: list[tuple[int, int]], reason: str
) -> None:
    watch = SlowdownWatch()
    for reasons, seconds in looks:
        for _ in range(seconds):
            watch.add(reasons, 1.0)
    assert reason in watch.reason
    assert bool(watch.reason) == bool(reason)


def test_a_device_that_heat_slows_down_stays_in_service_with_a_warning(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ganger_daemon.devices.inventory._WARNED_S", 0.05)
    fake.slowdowns = {2: HEAT}
    devices = opened(fake)
    try:
        eventually(lambda: bool(devices.warnings()), what="a warning")
        assert list(devices.warnings()) == [2]
        assert devices.faults() == {}
        fake.slowdowns = {}
        eventually(lambda: not devices.warnings(), what="its end")
    finally:
        devices.close()
