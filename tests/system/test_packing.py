"""Two jobs train on one device at once; one that shares with nobody waits for both to be off it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.packing import WANTS, Plans, beside, goes_on, packing_cluster

pytestmark = [pytest.mark.system, pytest.mark.torch]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with packing_cluster(tmp_path) as running:
        yield running


def test_two_jobs_share_a_device_and_both_end_right_though_their_daemon_is_killed(cluster: Cluster) -> None:
    plans = Plans(cluster)
    host, guest, stranger = (Run.submit(cluster, label, *WANTS) for label in ("host", "guest", "stranger"))
    plans.start(host, "n0", 0, shared=False)
    plans.start(stranger, "n0", 1, shared=False)
    stranger.hurry()
    host.wait_step(2)
    plans.start(guest, "n0", 0, shared=True)
    for run in (guest, host):
        goes_on(run)
    assert (beside(host), beside(guest)) == ([guest.name], [host.name])
    node = host.shell.json("nodes")["nodes"][0]
    assert node["capabilities"]["packing"] == "yes"

    # What shares a device is in the notes of the daemon, too.
    cluster.daemons["n0"].kill()
    cluster.daemons["n0"].start()
    for run in (guest, host):
        goes_on(run)

    # Apart and together again; who comes back to nobody's device comes to its own.
    plans.suspend(guest)
    assert beside(host) == []
    goes_on(host)
    plans.resume(guest)
    goes_on(guest)
    assert beside(host) == [guest.name]

    stranger.wait_state("SUCCEEDED")
    newcomer = Run.submit(cluster, "newcomer", *WANTS)
    plans.suspend(guest)
    host.hurry()
    plans.start(newcomer, "n0", 0, shared=False)
    host.wait_state("SUCCEEDED")
    newcomer.hurry()
    newcomer.wait_state("SUCCEEDED")
    eventually(lambda: beside(guest) == [], what="nobody is there any more")
    plans.resume(guest)
    guest.hurry()
    guest.wait_state("SUCCEEDED")
    for run in (host, guest, newcomer):
        run.check(stranger)
