"""What is chosen where: by trial, part by part, with the reason where something is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from daemon.cgroups.recorded_v2 import RecordedV2
from ganger_daemon.cgroups.contract import Variant
from ganger_daemon.cgroups.controllers import MemoryUse
from ganger_daemon.cgroups.group_tree import choose_cgroups

MEBIBYTE = 2**20


def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: str = "cpuset cpu memory") -> RecordedV2:
    made = RecordedV2(tmp_path / "cgroup", controllers)
    made.install(monkeypatch)
    return made


def own_group(tmp_path: Path, path: str) -> Path:
    file = tmp_path / "own"
    file.write_text(f"0::{path}\n")
    return file


def test_a_v2_kernel_gives_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = kernel(tmp_path, monkeypatch).mount
    cgroups = choose_cgroups("ganger/n1", mount, own=own_group(tmp_path, "/"))
    assert cgroups.variant is Variant.V2
    assert {cgroups.capabilities[need] for need in ("cpuset", "memory", "freeze", "kill", "cpu_usage")} == {"v2"}
    assert cgroups.groups() == ()


def test_v2_pins_and_limits_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = kernel(tmp_path, monkeypatch).mount
    cgroups = choose_cgroups("ganger/n1", mount, own=own_group(tmp_path, "/"))
    cgroups.create("job-1")
    assert cgroups.set_cpus("job-1", {4, 5, 6}) == (4, 5, 6)
    assert (mount / "ganger/n1/job-1/cpuset.cpus").read_text().strip() == "4-6"
    assert cgroups.set_cpus("job-1", {100}) == ()  # fell back to the parent's: not pinned
    assert cgroups.set_memory_limit("job-1", 100 * MEBIBYTE + 7)
    assert (mount / "ganger/n1/job-1/memory.max").read_text().strip() == str(100 * MEBIBYTE)
    assert (mount / "ganger/n1/job-1/memory.swap.max").read_text().strip() == "0"
    (mount / "ganger/n1/job-1/memory.events").write_text("oom 3\noom_kill 2\n")
    (mount / "ganger/n1/job-1/memory.current").write_text("4096\n")
    (mount / "ganger/n1/job-1/cpu.stat").write_text("usage_usec 1500000\n")
    assert cgroups.oom_kills("job-1") == 2
    assert cgroups.unreclaimable_bytes("job-1") == 4096
    assert cgroups.memory_use("job-1") == MemoryUse(4096, None, used=4096)
    stat = mount / "ganger/n1/job-1/memory.stat"
    stat.write_text("active_file 900\ninactive_file 1000\nworkingset_refault 7\n")
    assert cgroups.memory_use("job-1") == MemoryUse(3096, 7 * 4096, used=4096)
    stat.write_text("inactive_file 5000\nworkingset_refault_anon 9\nworkingset_refault_file 2\n")
    assert cgroups.memory_use("job-1") == MemoryUse(0, 2 * 4096, used=4096)
    stat.write_text("file 3500\nshmem 500\nfile_mapped 1000\n")
    (mount / "ganger/n1/job-1/memory.high").write_text("max\n")
    assert cgroups.memory_use("job-1") == MemoryUse(4096, None, used=4096, least=2096), "all but unmapped file caches"
    for held, written in ((50 * MEBIBYTE + 7, str(50 * MEBIBYTE)), (0, "max")):
        assert cgroups.hold_caches("job-1", held)
        assert (mount / "ganger/n1/job-1/memory.high").read_text().strip() == written
        assert (mount / "ganger/n1/job-1/memory.max").read_text().strip() == str(100 * MEBIBYTE)
    assert cgroups.cpu_s("job-1") == 1.5
    assert cgroups.join_files("job-1") == (str(mount / "ganger/n1/job-1/cgroup.procs"),)


def test_v2_pools_hand_down_what_groups_need_and_bound_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = kernel(tmp_path, monkeypatch).mount
    cgroups = choose_cgroups("ganger/n1", mount, own=own_group(tmp_path, "/"), quotas=True)
    assert cgroups.make_pool("devices-3", 0.5)
    assert (mount / "ganger/n1/pool-devices-3/cpu.max").read_text().strip() == "5000 10000"
    cgroups.create("job-1", "devices-3")
    assert cgroups.join_files("job-1") == (str(mount / "ganger/n1/pool-devices-3/job-1/cgroup.procs"),)
    assert cgroups.set_cpus("job-1", {4}) == (4,)
    assert cgroups.set_memory_limit("job-1", MEBIBYTE)
    limit = mount / "ganger/n1/pool-devices-3/job-1/cpu.max"
    for cpus, expected in ((1.5, "15000 10000"), (0.01, "1000 10000"), (0.0, "max 10000")):
        assert cgroups.set_quota("job-1", cpus)
        assert limit.read_text().strip() == expected
    assert cgroups.groups() == ("job-1",)
    assert cgroups.destroy("job-1")
    cgroups.tidy()
    assert not (mount / "ganger").exists()


def test_a_quota_that_was_not_requested_costs_no_group_and_is_not_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = kernel(tmp_path, monkeypatch).mount
    cgroups = choose_cgroups("ganger", mount, own=own_group(tmp_path, "/"))
    assert cgroups.capabilities["cpu_quota"] == "none: not asked for"
    assert not cgroups.make_pool("devices-1", 0.5)
    assert not (mount / "ganger/pool-devices-1").exists()


def test_a_kernel_without_the_cpu_controller_has_no_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = kernel(tmp_path, monkeypatch, controllers="cpuset memory").mount
    cgroups = choose_cgroups("ganger", mount, own=own_group(tmp_path, "/"), quotas=True)
    assert cgroups.capabilities["cpu_quota"].startswith("none: no controller")
    assert not cgroups.make_pool("devices-1", 0.5)


def test_v2_destroys_what_it_made_once_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = kernel(tmp_path, monkeypatch).mount
    cgroups = choose_cgroups("ganger/n1", mount, own=own_group(tmp_path, "/"))
    cgroups.create("job-1")
    (mount / "ganger/n1/job-1/cgroup.procs").write_text("4194305\n")
    assert not cgroups.destroy("job-1", timeout_s=0.01)
    (mount / "ganger/n1/job-1/cgroup.procs").write_text("")
    assert cgroups.destroy("job-1")
    cgroups.tidy()
    assert not (mount / "ganger").exists()


def test_a_missing_controller_degrades_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = kernel(tmp_path, monkeypatch, controllers="cpu memory").mount
    cgroups = choose_cgroups("ganger", mount, own=own_group(tmp_path, "/"))
    assert cgroups.variant is Variant.V2
    assert cgroups.capabilities["cpuset"].startswith("affinity: no controller")
    assert cgroups.capabilities["memory"] == "v2"


def test_a_delegated_unit_is_used_and_the_daemon_steps_into_a_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = kernel(tmp_path, monkeypatch)
    unit = tree.mount / "ganger.service"
    tree.take(tree.mount / "cgroup.subtree_control", "+cpuset")
    tree.take(tree.mount / "cgroup.subtree_control", "+memory")
    unit.mkdir()
    (unit / "cgroup.procs").write_text(f"{os.getpid()}\n")
    tree.busy.add(unit)
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1" if Path(path) == unit else b"")
    cgroups = choose_cgroups("ganger", tree.mount, own=own_group(tmp_path, "/ganger.service"))
    assert cgroups.join_files("job-1") == (str(unit / "ganger/job-1/cgroup.procs"),)
    assert (unit / "daemon/cgroup.procs").read_text().split() == [str(os.getpid())]
    assert (unit / "cgroup.procs").read_text() == ""


def test_a_machine_without_control_groups_is_variant_none_with_the_reason(tmp_path: Path) -> None:
    cgroups = choose_cgroups("ganger", tmp_path / "nothing")
    assert cgroups.variant is Variant.NONE
    assert "no controller" in cgroups.capabilities["cgroup"]


def test_a_mount_that_cannot_be_written_is_variant_none_with_the_reason(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    for controller in ("cpuset", "memory"):
        (mount / controller).mkdir(parents=True)
        (mount / controller / "cgroup.procs").write_text("")
    cgroups = choose_cgroups("ganger", mount, own=own_group(tmp_path, "/"))
    assert cgroups.variant is Variant.NONE
    assert "read back" in cgroups.capabilities["cgroup"]
    assert not (mount / "cpuset/ganger").exists()


@pytest.mark.parametrize("root", ["", "/", "../x", "a//b", "a b"])
def test_a_root_outside_the_tree_is_refused(root: str) -> None:
    with pytest.raises(ValueError, match="no cgroup root"):
        choose_cgroups(root)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, v1, v2, none"):
        choose_cgroups("ganger", only="v3")
