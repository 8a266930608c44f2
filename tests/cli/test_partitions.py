"""`ganger partitions`, and partitions in `submit`, `update`, `queue` and `nodes show`."""

from __future__ import annotations

import json

import pytest
from ganger.v1 import array_pb2, job_pb2, node_pb2
from ganger.wire import times
from kit.canned import Call, CannedMaster

Output = pytest.CaptureFixture[str]


@pytest.fixture
def table(master: CannedMaster) -> CannedMaster:
    batch = node_pb2.Partition(
        name="batch",
        is_default=True,
        nodes="gpu[01-08]",
        node_count=8,
        available_node_count=7,
        devices=64,
        devices_free=20,
        devices_held=30,
        jobs_pending=3,
        jobs_holding=5,
        time_limit=times.duration(86_400.0),
        gpus_limit=48,
        gpus_per_user_limit=16,
        preemptible=True,
    )
    urgent = node_pb2.Partition(
        name="urgent", priority=10, users=["ann"], teams=["vision"], gpus_per_job_limit=0, node_count=0
    )
    master.partitions.partitions.extend([batch, urgent])
    return master


def test_partitions_are_a_table_that_a_script_can_cut(call: Call, table: CannedMaster, capsys: Output) -> None:
    assert call("partitions") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    headings = "PARTITION TIME NODES GPUS FREE HELD JOBS PENDING PRIORITY MOST GPUS FOR NODELIST"
    assert lines == [
        headings,
        "batch* 1d 7/8 64 20 30 5 3 0 48, 16 a user all gpu[01-08]",
        "urgent any 0/0 0 0 0 0 0 10, not preempted 0 a job ann, team vision none",
    ]


def test_one_partition_is_shown_and_an_unknown_one_is_named(call: Call, table: CannedMaster, capsys: Output) -> None:
    assert call("partitions", "urgent", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["priority"], found["gpus_per_job_limit"]) == ("urgent", 10, 0)
    assert call("partitions", "text") == 3
    assert "there is no partition 'text': there are batch, urgent" in capsys.readouterr().err


def test_named_nodes_that_have_not_joined_are_a_line_beside_the_table(
    call: Call, table: CannedMaster, capsys: Output
) -> None:
    batch, urgent = table.partitions.partitions
    batch.absent_nodes, batch.absent_node_count = "gpu[09-10]", 2
    urgent.absent_nodes, urgent.absent_node_count = "gp01", 1
    assert call("partitions") == 0
    assert capsys.readouterr().err == (
        "ganger: partition batch names 2 nodes that have not joined: gpu[09-10]\n"
        "ganger: partition urgent names 1 node that has not joined: gp01\n"
    )
    assert call("partitions", "urgent", "--json") == 0
    assert capsys.readouterr().err == ""


def test_a_queue_of_a_partition_that_is_not_there_is_refused_unless_jobs_name_it(
    call: Call, table: CannedMaster, capsys: Output
) -> None:
    assert call("queue", "-p", "batch") == 0
    assert call("queue", "-p", "nope") == 3
    assert "there is no partition 'nope': there are batch, urgent" in capsys.readouterr().err
    spec = job_pb2.JobSpec(partition="former")
    table.jobs["jobs/1"] = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_PENDING, spec=spec)
    assert call("queue", "-p", "former") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("1")


def test_without_partitions_a_script_reads_nothing(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("partitions") == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "no partitions: jobs may be on all nodes\n")
    assert call("partitions", "gpu") == 3
    assert "there is no partition 'gpu': the cluster has none" in capsys.readouterr().err


def test_a_dry_run_shows_the_default_partition_and_its_time(call: Call, table: CannedMaster, capsys: Output) -> None:
    assert call("submit", "--dry-run", "--", "true") == 0
    said = capsys.readouterr()
    shown = dict(line.split(maxsplit=1) for line in said.out.splitlines())
    assert (shown["partition"], shown["time"]) == ("batch", "1d")
    assert said.err == ""


@pytest.mark.parametrize("flag", ["--partition", "-p"])
def test_submit_and_update_name_a_partition(call: Call, master: CannedMaster, flag: str, capsys: Output) -> None:
    assert call("submit", flag, "gpu", "--", "true") == 0
    assert master.requests[-1].spec.partition == "gpu"
    job = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_PENDING)
    master.jobs["jobs/1"] = job
    assert call("update", "1", flag, "other") == 0
    assert master.requests[-1].update.partition == "other"
    capsys.readouterr()


def test_the_queue_has_a_column_of_partitions_where_there_are_some_and_filters_by_it(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    for number, partition in ((1, "batch"), (2, "urgent")):
        spec = job_pb2.JobSpec(display_name=f"job{number}", partition=partition)
        name = f"jobs/{number}"
        master.jobs[name] = job_pb2.Job(name=name, user="ann", state=job_pb2.Job.STATE_PENDING, spec=spec)
    assert call("queue") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["JOB", "NAME", "USER", "PARTITION"]
    assert [line[3] for line in lines[1:]] == ["batch", "urgent"]
    assert call("queue", "-p", "urgent") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["2"]
    for job in master.jobs.values():
        job.spec.partition = ""
    array = array_pb2.Array(name="arrays/3", display_name="sweep", user="ann", size=2, partition="batch")
    master.arrays["arrays/3"] = array
    assert call("queue") == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["3[2]", "sweep", "ann", "batch"]
    del master.arrays["arrays/3"]
    assert call("queue") == 0
    assert "PARTITION" not in capsys.readouterr().out
