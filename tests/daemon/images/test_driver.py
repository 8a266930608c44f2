"""CUDA state of processes by the driver's calls: what holds whatever the driver answers."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from ganger_daemon.images.contract import DeviceStateLostError, ImageRefusedError
from ganger_daemon.images.descriptors import unsavable
from ganger_daemon.images.driver import (
    CudaBindings,
    DeviceState,
    DriverCallError,
    DriverCalls,
    DriverProcessState,
    Replacements,
    choose_device_state,
    replacements,
)
from kit.scripted_driver import ScriptedDriver

# A process that is there, and one that is not.
PID, GONE = os.getpid(), 2**22 + 1
RUNNING, LOCKED = DriverProcessState.RUNNING, DriverProcessState.LOCKED
CHECKPOINTED, FAILED = DriverProcessState.CHECKPOINTED, DriverProcessState.FAILED


def test_a_process_is_saved_and_restored_in_four_calls() -> None:
    driver = ScriptedDriver(PID)
    devices = DeviceState(driver)
    assert devices.save([PID, 1]) == (PID,)
    assert driver.states[PID] is CHECKPOINTED
    devices.restore([PID], Replacements({"GPU-old": "GPU-new"}))
    assert driver.made == ["lock", "checkpoint", "restore", "unlock"]
    assert driver.moved == {"GPU-old": "GPU-new"}
    assert driver.states[PID] is RUNNING


def test_a_process_gets_the_devices_that_replace_its_own_in_their_order() -> None:
    assert replacements(["a", "b"], ["c"], ["x", "y"], ["z"]) == ({"a": "x", "b": "y"}, {"c": "z"})
    assert replacements(["a"], ["b"], ["a"], ["b"]) == Replacements()
    assert replacements(["a"], ["b"], ["b"], ["a"]).own == {"a": "b"}


def test_partners_of_devices_that_a_process_cannot_see_are_left_out_where_the_driver_rejects_them() -> None:
    driver = ScriptedDriver(PID)
    devices = DeviceState(driver)
    moved = Replacements({"a": "x"}, {"b": "y"})
    devices.save([PID])
    devices.restore([PID], moved)
    assert driver.moved == {"a": "x", "b": "y"}
    devices.save([PID])
    driver.faults["restore"] = ("CUDA_ERROR_INVALID_VALUE", None)
    devices.restore([PID], moved)
    assert driver.moved == {"a": "x"}


def test_processes_without_gpu_state_need_no_call() -> None:
    driver = ScriptedDriver()
    assert DeviceState(driver).save([PID]) == ()
    assert driver.made == []
    assert DeviceState(None, "no driver").save([PID]) == ()


@pytest.mark.parametrize("state", [LOCKED, CHECKPOINTED])
def test_an_interrupted_save_is_finished_by_the_next_one(state: DriverProcessState) -> None:
    driver = ScriptedDriver(PID)
    driver.states[PID] = state
    assert DeviceState(driver).save([PID]) == (PID,)
    assert driver.states[PID] is CHECKPOINTED


@pytest.mark.parametrize("state", [RUNNING, LOCKED, CHECKPOINTED])
def test_a_restore_may_be_repeated_from_any_state(state: DriverProcessState) -> None:
    driver = ScriptedDriver(PID)
    driver.states[PID] = state
    DeviceState(driver).restore([PID])
    assert driver.states[PID] is RUNNING


def test_a_process_whose_work_takes_too_long_is_refused_and_runs_on() -> None:
    driver = ScriptedDriver(PID)
    driver.faults["lock"] = ("CUDA_ERROR_NOT_READY", None)
    with pytest.raises(ImageRefusedError, match=f"process {PID}: its work on the device was not done in time"):
        DeviceState(driver).save([PID])
    assert driver.states[PID] is RUNNING


def test_what_the_driver_cannot_save_is_refused_by_name_and_unlocked() -> None:
    driver = ScriptedDriver(PID)
    driver.faults["checkpoint"] = ("CUDA_ERROR_NOT_SUPPORTED", None)
    with pytest.raises(ImageRefusedError, match="NCCL, managed memory"):
        DeviceState(driver).save([PID])
    assert driver.made == ["lock", "checkpoint", "unlock"]
    assert driver.states[PID] is RUNNING


def test_several_processes_with_gpu_state_are_refused_before_any_is_stopped() -> None:
    driver = ScriptedDriver(PID, 1)
    with pytest.raises(ImageRefusedError, match="several of its processes use a GPU"):
        DeviceState(driver).save([1, PID])
    assert driver.made == []


def test_a_process_that_fails_in_the_driver_is_lost_and_not_only_refused() -> None:
    driver = ScriptedDriver(PID)
    driver.faults["checkpoint"] = ("CUDA_ERROR_UNKNOWN", FAILED)
    with pytest.raises(DeviceStateLostError, match=f"process {PID} has lost its GPU state"):
        DeviceState(driver).save([PID])


def test_a_process_that_stays_locked_is_lost() -> None:
    driver = ScriptedDriver(PID)
    driver.faults["checkpoint"] = ("CUDA_ERROR_NOT_SUPPORTED", None)
    driver.faults["unlock"] = ("CUDA_ERROR_UNKNOWN", None)
    with pytest.raises(DeviceStateLostError, match="stays locked"):
        DeviceState(driver).save([PID])


def test_a_process_that_was_killed_is_reported_as_ended() -> None:
    driver = ScriptedDriver(GONE)
    driver.faults["checkpoint"] = ("CUDA_ERROR_INVALID_VALUE", DriverProcessState.NONE)
    with pytest.raises(ImageRefusedError, match=f"process {GONE}: it has ended"):
        DeviceState(driver).save([GONE])


def test_a_restore_on_a_full_device_can_be_tried_again() -> None:
    driver = ScriptedDriver(PID)
    devices = DeviceState(driver)
    devices.save([PID])
    driver.faults["restore"] = ("CUDA_ERROR_OUT_OF_MEMORY", None)
    with pytest.raises(ImageRefusedError, match="too little free memory"):
        devices.restore([PID])
    devices.restore([PID])
    assert driver.states[PID] is RUNNING


def test_a_restore_that_fails_in_the_driver_loses_the_process() -> None:
    driver = ScriptedDriver(PID)
    devices = DeviceState(driver)
    devices.save([PID])
    driver.faults["restore"] = ("CUDA_ERROR_UNKNOWN", FAILED)
    with pytest.raises(DeviceStateLostError):
        devices.restore([PID])


def no_bindings() -> DriverCalls:
    raise ImportError("cuda")


def no_driver() -> DriverCalls:
    raise DriverCallError("cuInit", "CUDA_ERROR_NO_DEVICE")


def test_a_node_without_a_suitable_driver_gives_the_reason() -> None:
    assert "no GPU driver" in choose_device_state("").unavailable
    assert "no GPU driver" in choose_device_state("virtual").unavailable
    assert "the GPU driver is 550.54.14; 570 is the oldest" in choose_device_state("550.54.14").unavailable
    assert "ganger[gpu]" in choose_device_state("580.1", no_bindings).unavailable
    assert "CUDA_ERROR_NO_DEVICE" in choose_device_state("580.1", no_driver).unavailable
    assert choose_device_state("580.1", ScriptedDriver).unavailable == ""
    with pytest.raises(ImageRefusedError, match="no GPU driver"):
        choose_device_state("").restore([PID])


def test_a_gpu_that_a_process_has_open_is_refused_unless_the_driver_can_save_it() -> None:
    descriptors = {3: "/dev/nvidiactl", 4: "anon_inode:[io_uring]", 5: "/dev/null"}
    without = unsavable(descriptors, 12, "python", "there is no GPU driver")
    assert without == (
        "uses a GPU (/dev/nvidiactl, descriptor 3 of python, pid 12): there is no GPU driver",
        "uses io_uring (anon_inode:[io_uring], descriptor 4 of python, pid 12)",
    )
    assert unsavable(descriptors, 12, "python", "") == without[1:]


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed")
def test_the_bindings_take_pairs_of_devices() -> None:
    if Path("/proc/driver/nvidia").exists():
        one = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
        assert CudaBindings().restore_arguments({one: one}).gpuPairsCount == 1
    else:
        with pytest.raises(DriverCallError, match="cuInit"):
            CudaBindings()
