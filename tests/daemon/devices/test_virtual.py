"""Declared devices: what can be declared, and what their memory is."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ganger.cluster.resources import LocalityLevel
from ganger_daemon.devices.virtual import VirtualDevices, VirtualSpec, parse_topology
from ganger_daemon.node.process_identity import anonymous_bytes
from hypothesis import given
from hypothesis import strategies as st

MEBIBYTE = 2**20


def test_two_by_two_is_two_sockets_of_two() -> None:
    found = VirtualDevices(VirtualSpec(4, "2x2", 8, 2**34)).inventory
    described = found.configuration_set
    assert [socket.device_mask for socket in described.sockets] == [0b0011, 0b1100]
    assert [(group.level, group.device_mask) for group in described.groups] == [
        (LocalityLevel.SOCKET, 3),
        (LocalityLevel.SOCKET, 12),
    ]
    assert described.memory_bytes == 2**34


def test_a_third_figure_declares_switches() -> None:
    described = VirtualDevices(VirtualSpec(8, "2x2x2", 8, 2**34)).inventory.configuration_set
    assert [group.device_mask for group in described.groups if group.level is LocalityLevel.SWITCH] == [3, 12, 48, 192]
    assert [group.device_mask for group in described.groups if group.level is LocalityLevel.SOCKET] == [15, 240]


def test_cores_that_outnumber_the_cpus_are_reported_as_shared() -> None:
    assert VirtualDevices(VirtualSpec(1, "", 4096, 2**34)).capabilities["shared_cores"] == "true"
    assert VirtualDevices(VirtualSpec(1, "", 1, 2**34)).capabilities["shared_cores"] == "false"


def test_the_cpu_time_of_a_device_is_said() -> None:
    assert VirtualDevices(VirtualSpec(1, "", 1, 2**34, gpu_cores=0.5)).capabilities["gpu_cores"] == "0.5"
    assert VirtualDevices(VirtualSpec(1, "", 1, 2**34)).capabilities["gpu_cores"] == "any"


def test_equal_declarations_have_equal_names_and_own_uuids() -> None:
    one, two = (VirtualDevices(VirtualSpec(2, "", 2, 2**34), node).inventory for node in ("a", "b"))
    assert one.configuration_set == two.configuration_set
    assert one.devices[0].uuid != two.devices[0].uuid


@pytest.mark.parametrize("text", ["2x", "x", "2x3", "0x4", "-2x-2", "2x2x2x2", "two", "4x0"])
def test_a_topology_that_cannot_be_is_refused_with_an_example_or_the_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"for example 2x2|make them agree"):
        parse_topology(text, 4)


@pytest.mark.parametrize(
    "spec", [VirtualSpec(65), VirtualSpec(-1), VirtualSpec(4, "4x1", cores=3), VirtualSpec(64, gpu_cores=4096.0)]
)
def test_a_declaration_that_cannot_be_is_refused(spec: VirtualSpec) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        VirtualDevices(spec)


def test_memory_counts_from_the_hello_on_and_is_shared_out() -> None:
    anonymous: dict[int, int] = {7: 100 * MEBIBYTE, 8: 50 * MEBIBYTE}
    devices = VirtualDevices(VirtualSpec(4, "2x2", 4, 2**34), anonymous_bytes=anonymous.get)
    devices.attach(7, 0b0011)
    devices.attach(8, 0b0010, baseline_bytes=40 * MEBIBYTE)
    anonymous[7] += 30 * MEBIBYTE
    assert devices.used_memory() == (15 * MEBIBYTE, 25 * MEBIBYTE, 0, 0)
    assert devices.baseline(7) == 100 * MEBIBYTE
    del anonymous[8]
    assert devices.used_memory()[1] == 15 * MEBIBYTE
    assert devices.baseline(8) is None


def test_a_process_that_uses_less_than_at_its_hello_uses_nothing() -> None:
    anonymous = {7: 100}
    devices = VirtualDevices(VirtualSpec(1, "", 1, 2**34), anonymous_bytes=anonymous.get)
    devices.attach(7, 1)
    anonymous[7] = 10
    assert devices.used_memory() == (0,)


def test_memory_of_a_real_process_is_anonymous_memory_only() -> None:
    script = (
        "import mmap, os, sys\n"
        "sys.stdin.readline()\n"
        "private = bytearray(b'x') * (64 << 20)\n"
        "shared = mmap.mmap(-1, 64 << 20); shared.write(b'x' * (64 << 20))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        devices = VirtualDevices(VirtualSpec(1, "", 1, 2**34))
        devices.attach(process.pid, 1)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        (used,) = devices.used_memory()
        process.stdin.close()
        process.wait(10)
    assert 60 * MEBIBYTE < used < 100 * MEBIBYTE
    assert devices.used_memory() == (0,)


def test_a_process_that_never_was_has_no_memory() -> None:
    assert anonymous_bytes(2**22 + 1) is None


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_regular_shape_can_be_declared(sockets: int, switches: int, devices: int) -> None:
    gpus = sockets * switches * devices
    found = VirtualDevices(VirtualSpec(gpus, f"{sockets}x{switches}x{devices}", 2 * sockets, 2**34)).inventory
    assert sum(socket.device_mask for socket in found.configuration_set.sockets) == (1 << gpus) - 1
