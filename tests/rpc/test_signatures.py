"""Which jobs count as one series."""

from __future__ import annotations

import pytest
from ganger.cluster.resources import Role, TaskShape
from ganger_master.rpc.planner_messages import signature_of

ROLES = (Role("worker", 2, TaskShape(gpus=1)),)
COMMAND = ("python", "train.py", "--arch", "resnet50", "--lr", "0.1", "--seed=3")


@pytest.mark.parametrize(
    ("user", "command", "roles", "is_same"),
    [
        ("ada", ("python", "train.py", "--arch", "resnet50", "--lr", "1e-3", "--seed=-12.5"), ROLES, True),
        ("ada", COMMAND, (Role("worker", 2, TaskShape(gpus=1, millicores=4_000)),), True),
        ("bob", COMMAND, ROLES, False),
        ("ada", ("python", "train.py", "--arch", "resnet18", "--lr", "0.1", "--seed=3"), ROLES, False),
        ("ada", ("python", "train.py", "--arch", "resnet50", "--wd", "0.1", "--seed=3"), ROLES, False),
        ("ada", COMMAND, (Role("worker", 4, TaskShape(gpus=1)),), False),
    ],
)
def test_a_series_is_one_users_program_with_other_numbers(
    user: str, command: tuple[str, ...], roles: tuple[Role, ...], is_same: bool
) -> None:
    assert (signature_of(user, command, roles) == signature_of("ada", COMMAND, ROLES)) is is_same


def test_a_signature_stays_the_same_in_another_process() -> None:
    assert signature_of("ada", ("python", "train.py"), ROLES) == 9_722_694_180_595_601_837
