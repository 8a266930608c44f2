"""The use and the shares of teams, as metrics."""

from __future__ import annotations

from core.drive import Drive, job_of
from ganger_master import metrics
from ganger_master.core.accounting import UserUsage
from ganger_master.core.settings import CoreSettings
from ganger_master.core.tenancy import Team
from ganger_master.runtime.telemetry import MasterCounters

TEAMS = {"vision": Team(("ann", "eve"), 3.0, 8), "text": Team(("bob",))}


def samples(snapshot: metrics.Snapshot) -> dict[str, dict[str, float]]:
    """The values of the metrics of teams, by the team's label."""
    found = [one for one in metrics.families(snapshot, "1") if one.name.startswith("ganger_team_")]
    return {
        one.name.removeprefix("ganger_team_"): {sample.labels["team"]: sample.value for sample in one.samples}
        for one in found
    }


def snapshot_of(drive: Drive, *usages: UserUsage) -> metrics.Snapshot:
    return metrics.Snapshot(
        now=100.0,
        policy="las",
        is_ready=True,
        jobs=tuple(drive.state.jobs.values()),
        gangs=(),
        nodes=(),
        rows={},
        configuration_sets={},
        node_sets=0,
        blockers=(),
        answered={},
        daemons=0,
        approved=0,
        meter=MasterCounters(),
        teams=drive.state.teams,
        usages=usages,
        usage_half_life_s=1e9,
    )


def test_each_team_has_its_part_of_the_use_and_its_share() -> None:
    drive = Drive(settings=CoreSettings(teams=TEAMS))
    drive.submit(job_of(2), "eve")
    drive.submit(job_of(1), "eve")
    drive.submit(job_of(1), "cat")
    used = [UserUsage(user, 100.0, gpus, gpu_s) for user, gpus, gpu_s in (("ann", 1.5, 50.0), ("cat", 1.0, 150.0))]
    assert samples(snapshot_of(drive, *used)) == {
        "share": {"vision": 0.6, "text": 0.2, "-": 0.2},
        "used_share": {"vision": 0.25, "text": 0.0, "-": 0.75},
        "gpus": {"vision": 1.5, "text": 0.0, "-": 1.0},
        "pending_gpus": {"vision": 3, "text": 0, "-": 1},
        "gpus_limit": {"vision": 8},
    }


def test_without_teams_no_team_is_named() -> None:
    drive = Drive()
    drive.submit(job_of(2), "eve")
    assert [found for found in samples(snapshot_of(drive)).values() if found] == []
