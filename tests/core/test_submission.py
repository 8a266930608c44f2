"""The limits of a submission: numbers and texts that would break a later reader are rejected."""

from __future__ import annotations

from typing import Any

import pytest
from core.drive import job_of
from ganger.cluster.resources import Locality, Role, TaskShape
from ganger.protocol.gang_orders import Mechanism
from ganger_master.core.job_spec import RoleProgram
from ganger_master.core.submission import violations_of
from msgspec.structs import replace

FINE = replace(job_of(2), working_directory="/home/ann")


def role(**shape: int) -> tuple[Role, ...]:
    return (Role("worker", 1, TaskShape(**{"gpus": 1, "millicores": 0, "memory_bytes": 0, **shape})),)


def test_an_ordinary_job_is_fine() -> None:
    assert violations_of(FINE) == ()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"time_limit_s": 9.3e18}, "spec.time_limit"),
        ({"checkpoint_interval_s": 9.3e18}, "spec.checkpoint_interval"),
        ({"locality": Locality(patience_s=9.3e18)}, "spec.locality.patience"),
        ({"gpu_memory_bytes": (1 << 64) - 1}, "spec.gpu_memory_bytes"),
        ({"roles": role(memory_bytes=(1 << 64) - 1)}, "spec.roles[0].shape.memory_bytes"),
        ({"roles": role(millicores=(1 << 31) - 1)}, "spec.roles[0].shape.millicores"),
        ({"roles": (Role("worker", 10_000, TaskShape(0, 1_000, 1 << 50)),)}, "spec.roles"),
        ({"roles": (Role("x" * 64, 1, TaskShape(1, 0, 0)),)}, "spec.roles[0].name"),
        ({"stop_signal": "NOPE"}, "spec.stop_signal"),
        ({"stop_signal": "KILL"}, "spec.stop_signal"),
        ({"mechanism": Mechanism.SIGNAL}, "spec.stop_signal"),
        ({"stop_signal": "TERM", "stop_grace_s": 0.0}, "spec.stop_grace"),
        ({"stop_signal": "TERM", "stop_grace_s": 9.3e18}, "spec.stop_grace"),
        ({"command": ("python", "a\0b")}, "spec.command"),
        ({"working_directory": "/a\0b"}, "spec.working_directory"),
        ({"display_name": "two\nlines"}, "spec.display_name"),
        ({"device_type": "x" * 64}, "spec.device_type"),
        ({"device_type": "a100,"}, "spec.device_type"),
        ({"device_type": "a100, h100"}, "spec.device_type"),
        ({"device_type": "a100,h100,a100"}, "spec.device_type"),
        ({"scheduler": "a:" + "x" * 5_000}, "spec.scheduler"),
        ({"environment": {"A": "x" * (1 << 20)}}, "spec.environment"),
        ({"environment": {"A": "x" * 131_070}}, "spec.environment"),
        # Fewer characters than the limit has bytes.
        ({"environment": {"A": "\N{GRINNING FACE}" * 65_600}}, "spec.environment"),
        ({"environment": {"A": "x\0y"}}, "spec.environment"),
        ({"role_programs": (RoleProgram("ps", ("x",)),)}, "spec.role_programs[0].role"),
        ({"role_programs": (RoleProgram("worker", ("x",)), RoleProgram("worker"))}, "spec.role_programs"),
        ({"role_programs": (RoleProgram("worker", ("",)),)}, "spec.role_programs[0].command"),
        ({"role_programs": (RoleProgram("worker", environment={"A=": "x"}),)}, "spec.role_programs[0].environment"),
        (
            {"environment": {"A": "x" * 131_000}, "role_programs": (RoleProgram("worker", (), {"B": "x" * 131_070}),)},
            "spec.role_programs[0].environment",
        ),
        (
            {
                "environment": {"A" * n: "x" * 65_000 for n in (1, 2, 3)},
                "role_programs": (RoleProgram("worker", (), {"B": "x" * 90_000}),),
            },
            "spec.role_programs",
        ),
        ({"labels": {"a": "x" * 64}}, "spec.labels"),
        ({"labels": {str(number): "" for number in range(101)}}, "spec.labels"),
    ],
)
def test_values_that_would_break_a_reader_are_refused_with_their_path(change: dict[str, Any], path: str) -> None:
    assert path in [found for found, _ in violations_of(replace(FINE, **change))]
