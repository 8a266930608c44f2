"""Names and groups that follow from what was found."""

from __future__ import annotations

import pytest
from ganger.cluster.resources import UNLIMITED_MB_PER_S, ConfigurationSet, LocalityLevel
from ganger_daemon.devices.inventory import device_type_of, groups_of, named, with_dimensions
from ganger_daemon.devices.virtual import VirtualSpec, virtual_inventory
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

LEVELS = st.sampled_from([LocalityLevel.NVLINK, LocalityLevel.SWITCH, LocalityLevel.SOCKET, LocalityLevel.NODE])


@pytest.mark.parametrize(
    ("product", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("", "gpu"),
    ],
)
def test_a_product_has_the_short_name_people_use(product: str, kind: str) -> None:
    assert device_type_of(product) == kind


def test_sets_that_differ_have_names_that_differ() -> None:
    one = ConfigurationSet("", "h100", 8, 2**36)
    assert named(one).name == named(one).name
    assert named(one).name != named(replace(one, memory_bytes=1)).name


def test_declared_bandwidth_makes_another_set_and_none_the_same() -> None:
    found = virtual_inventory(VirtualSpec(2), "n1", (0, 1), 1 << 30)
    assert with_dimensions(found, {}) is found
    declared = with_dimensions(found, {"disk_mb_per_s": 500}).configuration_set
    assert declared.bandwidth == (500, UNLIMITED_MB_PER_S)
    assert declared.name != found.configuration_set.name


@given(st.integers(0, 7).flatmap(lambda n: st.tuples(st.just(n), st.lists(LEVELS, min_size=n * n, max_size=n * n))))
def test_two_devices_share_a_group_of_a_level_exactly_when_their_path_is_that_good(
    drawn: tuple[int, list[LocalityLevel]],
) -> None:
    count, flat = drawn
    levels = {(a, b): flat[a * count + b] for a in range(count) for b in range(a + 1, count)}
    groups = groups_of(levels, count)
    for (a, b), path in levels.items():
        best = min(
            (group.level for group in groups if group.device_mask >> a & group.device_mask >> b & 1),
            default=LocalityLevel.NODE,
        )
        assert best == path
