"""Sessions of nodes: which daemon the master accepts as a node."""

from __future__ import annotations

from typing import Any

import pytest
from core.drive import SERVER, Drive
from ganger.cluster.resources import DeviceGroup, LocalityLevel, Socket
from ganger_master.core.answers import Refused
from ganger_master.core.commands import OpenSession
from msgspec.structs import replace


@pytest.mark.parametrize(
    "change",
    [
        {"devices": 65},
        {"sockets": ()},
        {"sockets": (Socket(1_000, 0b10000),)},
        {"groups": (DeviceGroup(LocalityLevel.NVLINK, 1 << 63),)},
        {"memory_bytes": (1 << 64) - 1},
        {"device_memory_bytes": (1 << 64) - 1},
    ],
)
def test_hardware_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    answer = Drive().step(OpenSession("n9", "machine-n9", replace(SERVER, name="odd", **change)))
    assert isinstance(answer, Refused)
    assert answer.reason == "CONFIGURATION_SET_MISMATCH"
