"""A job without boundaries that was frozen at the end of its lease, and started elsewhere: its old processes do no more
when their node is back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import NO_PRELOAD
from kit.machines import cut_off, heal
from kit.waiting import eventually
from system.test_several_machines import CertifiedCluster, two_servers_apart

pytestmark = pytest.mark.system

# Appends "PID" to the file $0 for ever, and does not mind SIGTERM.
TICK = "trap 'echo told $$ >> $0' TERM; while :; do echo $$ >> $0; sleep 0.05; done"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[CertifiedCluster]:
    with two_servers_apart(tmp_path, "10s", *NO_PRELOAD) as running:
        yield running


def test_a_stale_job_that_traps_sigterm_does_nothing_more_when_its_node_is_back(
    cluster: CertifiedCluster, tmp_path: Path
) -> None:
    record = tmp_path / "ticks"
    job = str(cluster.asked("ann", "submit", "--gpus", "1", "--", "bash", "-c", TICK, str(record))["name"])

    def ticks() -> list[str]:
        return record.read_text().split("\n")[:-1] if record.exists() else []

    def where() -> list[str]:
        gang = cluster.asked("olga", "show", job.removeprefix("jobs/")).get("gang") or {"claims": []}
        return [str(claim["node"]).removeprefix("nodes/") for claim in gang["claims"]]

    eventually(ticks, what="the job ticks", within_seconds=60, story=cluster.story)
    old, (node,) = ticks()[0], where()
    cut_off(cluster.machines[node])
    # Refused while the lease of the node may run.
    eventually(
        lambda: cluster.try_("olga", "lost", node, "--yes").returncode == 0,
        what=f"{node} is lost",
        within_seconds=90,
        every_seconds=0.5,
        story=cluster.story,
    )
    eventually(lambda: set(ticks()) - {old}, what="it ticks elsewhere", within_seconds=60, story=cluster.story)
    assert Path(f"/proc/{old}").exists(), "the old attempt is there, frozen"
    heal(cluster.machines[node])
    eventually(
        lambda: not Path(f"/proc/{old}").exists(),
        what="the old attempt is gone",
        within_seconds=90,
        story=cluster.story,
    )
    said = ticks()
    begun = next(number for number, tick in enumerate(said) if tick != old)
    assert old not in said[begun:], f"{said[begun:].count(old)} ticks beside its successor"
    assert f"told {old}" not in said
    assert where() == [name for name in cluster.daemons if name != node]
