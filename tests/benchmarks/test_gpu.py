"""The GPU bench without a GPU: it is refused with the reason, and its cases run on a virtual device."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger_daemon.devices.nvml import NoDriverError

from benchmarks import gpu, gpu_jobs, gpu_page


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NoDriverError("none")

    for module in (gpu, gpu_jobs):
        monkeypatch.setattr(module, "NvmlDevices", refuse)


@pytest.mark.usefixtures("no_driver")
def test_a_machine_without_a_gpu_skips_the_bench_and_says_why() -> None:
    assert gpu.main() == {"name": "gpu", "skipped": "this machine has no GPU with a driver that answers"}


@pytest.mark.usefixtures("no_driver")
def test_a_case_that_does_not_exist_is_refused_with_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no case 'warp': there are opaque, offload, hook, move, slice"):
        gpu.main(only="warp", virtual=True)


@pytest.mark.usefixtures("no_driver")
def test_a_case_that_fails_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(cases: gpu.GpuCases) -> None:
        raise RuntimeError("the device is on fire")

    for case in ("opaque", "offload", "identity", "move", "slice", "pack"):
        monkeypatch.setattr(gpu.GpuCases, case, lambda cases: None)
    monkeypatch.setattr(gpu.GpuCases, "hook", fail)
    result = gpu.main(virtual=True)
    assert result["failed"] == {"hook": "the device is on fire"}
    assert not result["ok"]
    assert "pack_case_seconds" in str(result["figures"])


@pytest.mark.usefixtures("no_driver")
def test_a_run_that_took_too_long_begins_no_further_case_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    now = 0.0

    def take(cases: gpu.GpuCases) -> None:
        nonlocal now
        now += 100.0

    monkeypatch.setattr("time.monotonic", lambda: now)
    for case in gpu.case_names(is_virtual=True):
        monkeypatch.setattr(gpu.GpuCases, case, take)
    result = gpu.main(virtual=True)
    late = {name: f"not begun, 400 s after the start: --only {name} runs it alone" for name in ("slice", "pack")}
    assert result["failed"] == late | {"identity": late["pack"].replace("pack", "identity")}


@pytest.mark.torch
@pytest.mark.system
@pytest.mark.usefixtures("no_driver")
def test_offload_of_a_real_job_is_measured_and_written_as_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "QUICK_SIZES", (50 * 10**6,))
    result = gpu.main(quick=True, only="offload", virtual=True)
    assert result["ok"], result
    machine = {"cpus": 2, "cpu": "a processor", "kernel": "6", "python": "3"}
    page = gpu_page.page_of({**result, "machine": machine})
    assert "| offload_50MB_freed_share_of_state | " in page
    assert page.startswith("# virtual device\n")


@pytest.mark.torch
@pytest.mark.system
@pytest.mark.usefixtures("no_driver")
def test_a_program_without_an_agent_is_offloaded_and_its_image_saved_and_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "QUICK_SIZES", (50 * 10**6,))
    result = gpu.main(quick=True, only="opaque", virtual=True)
    assert result["ok"], result
    assert "opaque_50MB_offload_resume_seconds" in str(result["figures"])
