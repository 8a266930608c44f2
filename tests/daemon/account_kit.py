"""Clusters whose jobs run as accounts that are made for a test."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from daemon.kit import TINY_JOB, Cluster, Intents, Observed, cluster, in_phase, log_of, with_changes
from ganger.agent.v1 import agent_pb2
from ganger_daemon.cgroups.contract import Cgroups
from ganger_daemon.node.accounts import Account
from ganger_daemon.node.launchers import interpreter_for_accounts
from kit.accounts import made_accounts


class Accounted:
    """A cluster with jobs of two accounts; those of its own kit are `ann`'s."""

    def __init__(self, made: Cluster, ann: Account, bob: Account) -> None:
        self.made, self.ann, self.bob = made, ann, bob
        self.python = made.python = interpreter_for_accounts()
        made.accounts, made.user, made.place = "system", ann.name, Path(ann.home)
        self.cgroups: list[Cgroups] = []

    def gang(self, account: Account, epoch: int, command: list[str], device: int = 0, **changes: Any) -> Any:
        uid = changes.pop("uid", str(uuid.uuid4()))
        ranks, mask = changes.pop("ranks", [0]), changes.pop("device_mask", 1 << device)
        gang = self.made.gang({"n1": ranks}, "n1", uid=uid, epoch=epoch, command=command, user=account.name, **changes)
        gang.spec.working_directory = account.home
        gang.job, gang.claim.device_mask = f"jobs/{epoch}", mask
        gang.claim.millicores[:] = [500, 500]
        return gang

    def tiny(self, account: Account, epoch: int, steps: int = 0, device: int = 0, **changes: Any) -> Any:
        return self.gang(
            account, epoch, [self.python, str(TINY_JOB), str(steps), "0.01", "1024", ""], device, **changes
        )

    async def phase(self, epoch: int, phase: int) -> agent_pb2.ObservedGang:
        return await self.made.master.until("n1", epoch, in_phase(phase))

    async def parked(self, gang: Any, sequence: int, level: int) -> agent_pb2.ObservedGang:
        park = with_changes(gang, sequence, intent=Intents.INTENT_PARK, level=level, stop_sequence=sequence)
        await self.made.master.want("n1", park)
        return await self.made.master.until(
            "n1", gang.epoch, lambda one: one.phase == Observed.PHASE_PARKED and one.stop_sequence == sequence
        )

    def steps(self, gang: Any) -> list[str]:
        lines = log_of(self.made.directory, "n1", gang.job_uid, 0, gang.epoch)
        return [line.split()[1] for line in lines if line.startswith("step")]

    async def daemon(self, node: str = "n1", **changes: Any) -> Any:
        made = await self.made.daemon(node, **{"cgroups": "auto", **changes})
        self.cgroups.append(made.host.cgroups)
        return made


def remove_groups(cgroups: Cgroups) -> None:
    """Remove what a daemon had to leave, as its jobs go on when it ends."""
    for group in cgroups.groups():
        cgroups.kill(group)
        assert cgroups.destroy(group)
    cgroups.tidy()


def run(story: Callable[[Accounted], Awaitable[None]], *, certified: bool = False) -> None:
    async def inside(ann: Account, bob: Account) -> None:
        async with cluster(certified=certified, base="/var/tmp") as made:
            for path in (made.directory, made.storage):
                path.chmod(0o711)
            these = Accounted(made, ann, bob)
            await story(these)
        for groups in these.cgroups:
            remove_groups(groups)

    with made_accounts(2) as (ann, bob):
        asyncio.run(inside(ann, bob))
