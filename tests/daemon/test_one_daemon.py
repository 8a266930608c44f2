"""One real daemon under a fake master: what is wanted happens, and what is seen is said."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_pb2
from ganger.wire.channels import NEWEST_VERSION, SUPPORTED_VERSIONS
from ganger_daemon import claimed_directories
from rpc.kit import until

pytestmark = pytest.mark.system


def steps_in(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("step ")]


def test_a_job_runs_to_its_end_and_its_outcome_stays_until_acknowledged() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, steps=20))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == 1, ended.outcome
        assert ended.progress.step == 20
        assert steps_in(log_of(made.directory, "n1", uid, 0, 1)) == list(range(1, 21))
        await made.master.forget("n1", 1)
        await made.master.until_absent("n1", 1)
        assert not (made.directory / "n1" / "jobs" / uid).exists()

    run(story)


def test_of_a_job_that_has_gone_nothing_stays_on_the_node_and_its_log_on_storage() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, steps=3))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        await made.master.forget("n1", 1)
        await made.master.until_absent("n1", 1)
        await until(lambda: not (made.directory / "n1" / "logs" / uid).exists())
        assert steps_in((made.storage / uid / "logs" / "rank-0.1.log").read_text().splitlines()) == [1, 2, 3]

    run(story)


def test_a_daemon_that_ends_without_jobs_leaves_no_run_directory_that_it_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(made: Cluster) -> None:
        run_directory, uid = made.directory / "chosen", str(uuid.uuid4())
        monkeypatch.setattr(claimed_directories, "choose_run_directory", lambda *_: run_directory)
        await made.daemon("n1", run_directory=None)
        gang = made.gang({"n1": [0]}, "n1", uid=uid)
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await made.stop_daemon("n1")
        assert (run_directory / uid).is_dir(), "its job goes on"
        await made.daemon("n1", run_directory=None)
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_STOP))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        await made.master.forget("n1", 1)
        await made.master.until_absent("n1", 1)
        await made.stop_daemon("n1")
        assert not run_directory.exists()
        await made.daemon("n1")
        await made.stop_daemon("n1")
        assert (made.directory / "r-n1").is_dir(), "it was named"

    run(story)


def test_a_daemon_removes_logs_after_their_retention_time_but_not_those_of_running_jobs() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, pause=0.005))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await made.stop_daemon("n1")
        old = made.directory / "n1" / "logs" / str(uuid.uuid4())
        old.mkdir()
        (old / "rank-0.1.log").write_text("a line")
        made.master.logs_kept = 0.0
        await made.daemon("n1")
        await until(lambda: not old.exists())
        assert log_of(made.directory, "n1", uid, 0, 1)

    run(story)


def test_a_job_pauses_at_a_boundary_and_goes_on() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        gang = made.gang({"n1": [0, 1]}, "n1", uid=uid, pause=0.005)
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        for sequence, level in ((2, job_pb2.SUSPEND_LEVEL_PAUSE), (4, job_pb2.SUSPEND_LEVEL_OFFLOAD)):
            await made.master.want(
                "n1", with_changes(gang, sequence, intent=Intents.INTENT_PARK, level=level, stop_sequence=sequence)
            )
            parked = await made.master.until(
                "n1", 1, lambda seen, s=sequence: seen.phase == Observed.PHASE_PARKED and seen.stop_sequence == s
            )
            assert parked.level == level
            for rank in (0, 1):
                assert steps_in(log_of(made.directory, "n1", uid, rank, 1))[-1] == parked.stop_step
            await made.master.want("n1", with_changes(gang, sequence + 1))
            await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await made.master.want("n1", with_changes(gang, 9, intent=Intents.INTENT_STOP))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == 5, ended.outcome

    run(story)


def test_a_daemon_refuses_a_master_without_a_common_version_and_sends_it_no_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    newer = NEWEST_VERSION + 1
    sentence = (
        f"the daemon speaks versions {SUPPORTED_VERSIONS} of the wire, the master {newer}-{newer}: upgrade the daemon"
    )

    async def story(made: Cluster) -> None:
        made.master.wire_versions = agent_pb2.WireVersions(oldest=newer, newest=newer)
        starting = asyncio.create_task(made.daemon("n1"))
        await until(lambda: sentence in [getattr(record, "error", "") for record in caplog.records])
        assert made.master.book("n1").reports == 0
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting

    run(story)
