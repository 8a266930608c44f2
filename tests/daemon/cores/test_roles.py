"""Which ranks of a gang share cores, and with how many threads each computes."""

from __future__ import annotations

import pytest
from ganger.agent.v1 import agent_pb2
from ganger.cluster.topology import parse_topology
from ganger_daemon.gang.gang_context import CorePool, local_part, threads_by_rank

# Four devices and 16 cores: four cores for each device.
SERVER = parse_topology("2x2", name="server", millicores=16_000, memory_bytes=1 << 36)
# By role: tasks here, devices and millicores of each; zero millicores: none named.
Roles = dict[str, tuple[int, int, int]]


def desired_of(roles: Roles, ranks: tuple[int, ...], held: int) -> agent_pb2.DesiredGang:
    desired = agent_pb2.DesiredGang(job="jobs/1", epoch=1, threads=9)
    for name, (tasks, gpus, millicores) in roles.items():
        role = desired.spec.roles.add(name=name, tasks=tasks)
        role.shape.gpus, role.shape.millicores = gpus, millicores
        desired.claim.tasks.append(tasks)
    desired.claim.millicores.append(held)
    desired.members.add(node="nodes/n1", ranks=ranks)
    return desired


@pytest.mark.parametrize(
    ("roles", "ranks", "pools"),
    [
        ({"worker": (2, 1, 0)}, (0, 1), ()),
        ({"worker": (2, 1, 3000)}, (4, 5), ()),
        # The other role has no task here.
        ({"ps": (0, 0, 6000), "worker": (2, 1, 1000)}, (1, 2), ()),
        ({"ps": (1, 0, 6000), "worker": (2, 1, 1000)}, (0, 3, 4), (((0,), 6000), ((3, 4), 2000))),
        # Equal requests hold, too: one role cannot use what the other has.
        ({"actor": (1, 1, 2000), "learner": (1, 1, 2000)}, (0, 1), (((0,), 2000), ((1,), 2000))),
        # A role that names none counts with its share: four cores for a device, one for a task without.
        ({"ps": (2, 0, 0), "worker": (1, 1, 0)}, (0, 1, 2), (((0, 1), 2000), ((2,), 4000))),
        # The message does not say of all ranks what they are.
        ({"ps": (1, 0, 6000), "worker": (1, 1, 1000)}, (0, 1, 2), ()),
    ],
)
def test_ranks_share_cores_by_role(
    roles: Roles, ranks: tuple[int, ...], pools: tuple[tuple[tuple[int, ...], int], ...]
) -> None:
    part = local_part(desired_of(roles, ranks, 8000), "n1", SERVER)
    assert part.pools == tuple(CorePool(*pool) for pool in pools)


@pytest.mark.parametrize(
    ("roles", "held", "threads"),
    [
        ({"worker": (3, 1, 0)}, 8000, [9, 9, 9]),
        ({"ps": (1, 0, 6000), "worker": (2, 1, 1000)}, 8000, [6, 1, 1]),
        ({"ps": (1, 0, 6000), "worker": (2, 1, 500)}, 7000, [6, 1, 1]),
        # Twice and half of what is requested.
        ({"ps": (1, 0, 6000), "worker": (2, 1, 1000)}, 16_000, [12, 2, 2]),
        ({"ps": (1, 0, 6000), "worker": (2, 1, 1000)}, 4000, [3, 1, 1]),
    ],
)
def test_threads_of_a_rank_follow_the_cores_of_its_role(roles: Roles, held: int, threads: list[int]) -> None:
    desired = desired_of(roles, (0, 1, 2), held)
    part = local_part(desired, "n1", SERVER)
    assert threads_by_rank(part, desired, 5) == dict(enumerate(threads))
