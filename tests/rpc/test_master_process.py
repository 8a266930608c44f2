"""`ganger master` as a program: starting, stopping, refusing to start, and being killed at any instant."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import grpc
import pytest
from ganger.client import Client
from ganger.failpoints import VARIABLE
from ganger.v1 import job_service_pb2, job_service_pb2_grpc
from ganger.wire.channels import open_channel
from ganger.wire.endpoints import read_endpoint
from ganger_master.store import tables
from rpc.kit import spec_of
from rpc.processes import MasterProcess, master_process, wait_until_dead

pytestmark = pytest.mark.system


class Submitter:
    """Submits without pause from several threads and notes what was acknowledged, outside the system."""

    def __init__(self, state_dir: Path, threads: int = 4) -> None:
        self.acknowledged: dict[str, str] = {}
        self._endpoint = read_endpoint(state_dir)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        with open_channel(self._endpoint, (("grpc.enable_retries", 0),)) as channel:
            stub = job_service_pb2_grpc.JobServiceStub(channel)
            while not self._ended.is_set():
                request_id = str(uuid.uuid4())
                request = job_service_pb2.CreateJobRequest(spec=spec_of(), request_id=request_id)
                try:
                    self.acknowledged[request_id] = stub.CreateJob(request, timeout=5).name
                except grpc.RpcError:
                    return

    def end(self) -> dict[str, str]:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return self.acknowledged


def names_of(master: MasterProcess) -> set[str]:
    with open_channel(read_endpoint(master.state_dir)) as channel:
        stub = job_service_pb2_grpc.JobServiceStub(channel)
        found: set[str] = set()
        token = ""
        while True:
            page = stub.ListJobs(job_service_pb2.ListJobsRequest(page_size=1000, page_token=token))
            assert not found & {job.name for job in page.jobs}
            found |= {job.name for job in page.jobs}
            token = page.next_page_token
            if not token:
                return found


def test_master_says_one_line_when_ready_and_stops_cleanly(tmp_path: Path) -> None:
    with master_process(tmp_path) as master:
        assert master.start() == f"ganger master ready at unix:{tmp_path}/s\n"
        assert read_endpoint(master.state_dir).address == f"unix:{tmp_path}/s"
        code, said = master.end(signal.SIGTERM)
        assert (code, "Traceback" in said) == (0, False)
        assert not (master.state_dir / "endpoint.json").exists()


def test_kill_in_a_storm_of_submissions_loses_none_that_was_acknowledged(tmp_path: Path) -> None:
    dice = random.Random(7)
    acknowledged: dict[str, str] = {}
    with master_process(tmp_path) as master:
        for _ in range(3):
            assert master.start()
            storm = Submitter(master.state_dir)
            time.sleep(dice.uniform(0.1, 0.5))
            master.end(signal.SIGKILL)
            fresh = storm.end()
            assert fresh
            assert not set(fresh.values()) & set(acknowledged.values())
            acknowledged |= fresh
        assert master.start()
        assert set(acknowledged.values()) <= names_of(master)
        # The same request again is the same job.
        with open_channel(read_endpoint(master.state_dir)) as channel:
            stub = job_service_pb2_grpc.JobServiceStub(channel)
            for request_id, name in list(acknowledged.items())[:: max(1, len(acknowledged) // 50)]:
                request = job_service_pb2.CreateJobRequest(spec=spec_of(), request_id=request_id)
                assert stub.CreateJob(request).name == name
        assert master.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("name", [tables.BEFORE_COMMIT, tables.AFTER_COMMIT, tables.COMMIT_BEFORE_REPLY])
def test_kill_around_a_commit_never_loses_an_answer(tmp_path: Path, name: str) -> None:
    with master_process(tmp_path) as master:
        # The first start commits the counters; let the storm begin before the count is reached.
        assert master.start({VARIABLE: f"{name}:20"})
        storm = Submitter(master.state_dir)
        wait_until_dead(master)
        acknowledged = storm.end()
        assert master.wait()[0] == -signal.SIGKILL
        assert master.start()
        assert set(acknowledged.values()) <= names_of(master)
        master.end(signal.SIGTERM)


def test_second_master_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    with master_process(tmp_path) as first, master_process(tmp_path) as second:
        assert first.start()
        assert second.start() == ""
        code, said = second.wait()
        assert code == 4
        assert "another master" in said
        assert "Traceback" not in said
        first.end(signal.SIGTERM)


def test_a_changed_storage_is_refused_until_the_former_one_has_moved_there(tmp_path: Path) -> None:
    with master_process(tmp_path) as master:
        assert master.start(None, "--storage", str(tmp_path / "a"))
        with Client(str(master.state_dir)) as client:
            client.submit(["true"], directory=str(tmp_path))
        master.end(signal.SIGTERM)
        assert not master.start(None, "--storage", str(tmp_path / "b"))
        code, said = master.wait()
        assert code == 2
        assert f"--storage {tmp_path / 'b'} is not the storage of this cluster" in said
        shutil.rmtree(tmp_path / "b")
        (tmp_path / "a").rename(tmp_path / "b")
        assert master.start(None, "--storage", str(tmp_path / "b"))
        assert master.end(signal.SIGTERM)[0] == 0


def test_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, master_process(tmp_path) as master:
        port = taken.getsockname()[1]
        assert master.start(None, "--listen", f"127.0.0.1:{port}") == ""
        code, said = master.wait()
        assert code == 4
        assert str(port) in said
        assert "Traceback" not in said


def test_bad_flags_are_all_named(tmp_path: Path) -> None:
    with master_process(tmp_path) as master:
        assert master.start(None, "--lost-after", "soon", "--policy", "nosuch") == ""
        code, said = master.wait()
        assert code == 2
        assert "'soon'" in said


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("nosuch", "there is no policy 'nosuch'; there are backfill, drf, edf, fifo"),
        ("srtf", "policy 'srtf' asks an oracle how long jobs take: for the simulator only; there are backfill, drf"),
        ("fifo+las", "policy 'fifo+las': only the first part can be the policy las; then there are placements"),
    ],
)
def test_policy_it_cannot_go_by_is_a_clear_error(tmp_path: Path, policy: str, why: str) -> None:
    with master_process(tmp_path) as master:
        assert master.start(None, "--policy", policy) == ""
        code, said = master.wait()
        assert code == 2
        assert why in said
        assert "Traceback" not in said


def test_planner_started_by_hand_ranks_pending_jobs_and_ends_by_a_signal(tmp_path: Path) -> None:
    with master_process(tmp_path) as master:
        assert master.start(None, "--policy", "las+best-fit", "--no-planner")
        command = [sys.executable, "-m", "ganger.cli.main", "--master", str(master.state_dir), "planner", "run"]
        with open_channel(read_endpoint(master.state_dir)) as channel:
            stub = job_service_pb2_grpc.JobServiceStub(channel)
            name = stub.CreateJob(job_service_pb2.CreateJobRequest(spec=spec_of())).name
            missing = "policy las+best-fit needs a planner, and none is connected"
            explained = stub.ExplainJob(job_service_pb2.ExplainJobRequest(name=name))
            assert explained.blockers[0].message.startswith(missing)
            assert explained.assumption == "unknown, because no planner is connected"
            assert stub.GetJob(job_service_pb2.GetJobRequest(name=name)).blockers[0].message.startswith(missing)
        by_hand = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            with open_channel(read_endpoint(master.state_dir)) as channel:
                stub = job_service_pb2_grpc.JobServiceStub(channel)
                shown = stub.GetJob(job_service_pb2.GetJobRequest(name=name))
                deadline = time.monotonic() + 30.0
                while shown.queue_rank != 1:
                    assert time.monotonic() < deadline, shown
                    shown = stub.GetJob(job_service_pb2.GetJobRequest(name=name))
                    time.sleep(0.02)
            assert "planner of policy las+best-fit" in shown.blockers[-1].message
            by_hand.terminate()
            assert by_hand.wait(10.0) == 0
        finally:
            by_hand.kill()
            by_hand.wait()
        master.end(signal.SIGTERM)


def test_a_job_of_a_master_that_is_just_up_waits_for_the_planner_that_the_master_starts(tmp_path: Path) -> None:
    with master_process(tmp_path) as master:
        assert master.start(None, "--policy", "las+best-fit")
        with open_channel(read_endpoint(master.state_dir)) as channel:
            stub = job_service_pb2_grpc.JobServiceStub(channel)
            name = stub.CreateJob(job_service_pb2.CreateJobRequest(spec=spec_of())).name
            (*_, last) = stub.GetJob(job_service_pb2.GetJobRequest(name=name)).blockers
            assert "planner of policy las+best-fit" in last.message
            assert "none is connected" not in last.message
        master.end(signal.SIGTERM)


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/dev/full"), reason="no full device")
def test_database_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with master_process(tmp_path) as master:
        (master.state_dir).mkdir()
        (master.state_dir / "ganger.db").write_bytes(b"not a database" * 100)
        assert master.start() == ""
        code, said = master.wait()
        assert code == 4
        assert "ganger master restore" in said
        assert "Traceback" not in said
