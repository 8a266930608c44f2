"""A job never runs two attempts at once: masters that fence each other, daemons that hang, networks that part."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.cluster import NO_PRELOAD, Cluster, Service
from kit.shell import Shell
from kit.ticks import Ticks
from kit.waiting import eventually

pytestmark = pytest.mark.system


def another(service: Service, name: str, *more: str, **instead: Path | str) -> Service:
    """A program started as `service` is, but for the values of some options."""
    argv = [*service.argv, *more]
    for option, value in instead.items():
        argv[argv.index(f"--{option.replace('_', '-')}") + 1] = str(value)
    log = service.log.with_name(f"{name}.log")
    return Service(name, argv, log, service.environment, log.with_suffix(".failpoints"))


def test_a_daemon_that_stays_with_a_fenced_master_stops_its_job_before_the_newer_master_restarts_it(
    tmp_path: Path,
) -> None:
    # The newer master gives n0 up after 35 s; n0's daemon knows only the older one, which has nothing to commit.
    with Cluster(
        tmp_path, nodes=1, virtual_gpus=1, topology="1", lost_after="5s", daemon_options=NO_PRELOAD
    ) as cluster:
        ticks = Ticks(tmp_path / "ticks")
        Shell(cluster.master_directory).submit("--", *ticks.command())
        eventually(lambda: ticks.is_running(0), what="the job runs", story=cluster.story)

        database = f"sqlite:///{cluster.master_directory / 'ganger.db'}"
        newer = another(cluster.master, "newer", "--database-url", database, state_dir=tmp_path / "newer")
        newer.start()
        apart = {"state_dir": tmp_path / "n1", "run_dir": cluster.run_directory / "n1", "master": tmp_path / "newer"}
        n1 = another(cluster.daemons["n0"], "n1", node="n1", **apart)
        n1.start()
        try:
            eventually(lambda: ticks.is_running(1), within_seconds=90.0, what="it runs on n1", story=cluster.story)
            ticks.check()
            assert not cluster.master.alive
            assert cluster.master.process is not None
            assert cluster.master.process.returncode == 8
            assert "another master has taken it over: this one ends" in cluster.master.log.read_text()
        finally:
            n1.stop()
            newer.stop()
