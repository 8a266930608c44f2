"""Recorded servers: their shape, and the faults they play."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from ganger.cluster.resources import LocalityLevel
from ganger_daemon.devices.inventory import UNREADABLE, HealthKind
from ganger_daemon.devices.virtual import FIXTURES, RecordedDevices, read_recording


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_faults_come_at_their_time_and_stay() -> None:
    clock = Clock()
    devices = RecordedDevices(read_recording(Path("dgx-a100")), clock=clock)
    clock.seconds += 4.9
    assert devices.take_events() == ()
    clock.seconds += 0.2
    (lost,) = devices.take_events()
    assert (lost.device, lost.kind) == (3, HealthKind.LOST)
    assert devices.used_memory()[3] == UNREADABLE
    clock.seconds += 10
    assert [(event.device, event.kind, event.fatal) for event in devices.take_events()] == [
        (5, HealthKind.ECC, True),
        (1, HealthKind.XID, False),
    ]
    assert sorted(devices.faults()) == [3, 5]


class Second(float):
    """Lets another thread run when it has been compared."""

    def __le__(self, other: float) -> bool:
        is_reached = super().__le__(other)
        time.sleep(0.0001)
        return is_reached


def test_each_fault_comes_once_and_none_before_its_time_whichever_threads_look(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = read_recording(Path("dgx-a100"))
    event = recording.timeline[0][1]
    timeline = tuple((Second(second), replace(event, device=second % 8)) for second in range(40))
    clock, found = Clock(), list[int]()
    devices = RecordedDevices(replace(recording, timeline=timeline), clock=clock)
    monkeypatch.setattr(devices, "_note", lambda event: found.append(event.device))
    clock.seconds += 19.5
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(devices.used_memory) for _ in range(8)]:
            done.result()
    assert Counter(found) == Counter(second % 8 for second in range(20))


def test_a_cube_mesh_has_every_nvlink_clique() -> None:
    described = RecordedDevices(read_recording(Path("dgx-1-v100"))).inventory.configuration_set
    nvlink = {group.device_mask for group in described.groups if group.level is LocalityLevel.NVLINK}
    assert nvlink == {0x0F, 0xF0, 0x11, 0x22, 0x44, 0x88}


def test_cards_without_nvlink_meet_at_the_socket() -> None:
    described = RecordedDevices(read_recording(Path("l40s-x4"))).inventory.configuration_set
    assert [(group.level, group.device_mask) for group in described.groups] == [
        (LocalityLevel.SOCKET, 3),
        (LocalityLevel.SOCKET, 12),
    ]
    assert described.device_type == "l40s"


def test_two_threads_make_one_core_and_two_cores_are_kept_for_the_daemon() -> None:
    found = RecordedDevices(read_recording(Path("dgx-h100"))).inventory
    assert found.core_map.sockets[0][3].cpus == (3, 115)
    assert found.core_map.housekeeping == {0, 1}
    assert found.core_map.millicores() == (54_000, 56_000)
    assert found.near(0b1) == found.devices[0].cpus


def test_a_device_unlike_the_others_is_out_of_service(tmp_path: Path) -> None:
    content = json.loads((FIXTURES / "l40s-x4.json").read_text())
    content["devices"][1]["name"] = "NVIDIA T4"
    content["devices"][2]["memory_bytes"] = 2**30
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(content))
    faults = RecordedDevices(read_recording(path)).faults()
    assert sorted(faults) == [1, 2]
    assert "unlike" in faults[1]
    assert "less" in faults[2]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "no recorded server"),
        ("[]", "format 1"),
        ('{"format": 2}', "format 2"),
        ('{"format": 1, "devices": []}', "driver"),
    ],
)
def test_a_file_that_is_no_recording_is_named_with_what_is_wrong(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "server.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read_recording(path)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="dgx-h100"):
        read_recording(Path("dgx-h1000"))
