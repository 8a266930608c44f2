"""Partitions as operators write them, which jobs may be in them, and that no request goes around them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from core.drive import Drive, job_of
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger_master.core import machine
from ganger_master.core.answers import ArrayAnswer, Refused
from ganger_master.core.approval import judge_change
from ganger_master.core.commands import (
    CordonNode,
    DrainNode,
    KeepPlace,
    ProposePlan,
    SubmitArray,
    SubmitJob,
    Tick,
    UpdateJob,
)
from ganger_master.core.explain import explain
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_rules import may_never_start, rules
from ganger_master.core.job_spec import JobSpec, Update
from ganger_master.core.plan_changes import Goal, MoveChange, Purpose, SingleChange, StartChange, SuspendChange
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored
from ganger_master.core.tenancy import NO_TERMS, TIER, Partition, PartitionIndex, PartitionTerms, Team, partitions_of
from msgspec.structs import replace

TEAMS = {"vision": Team(("ann", "bob"))}
BATCH = Partition(nodes=("n1", "n2"), time_s=3600.0, gpus=6, gpus_per_user=4, gpus_per_job=3)
URGENT = Partition(nodes=("n2",), users=("cat",), teams=("vision",), priority=2, preemptible=False)


def settings_of(partitions: dict[str, Partition], policy: str = "las") -> CoreSettings:
    return CoreSettings(policy=policy, teams=TEAMS, partitions=partitions)


def drive_of(nodes: int = 3, **partitions: Partition) -> Drive:
    return Drive(nodes, settings_of(partitions or {"batch": BATCH, "urgent": URGENT}))


def in_partition(name: str, gpus: int = 1, time_s: float | None = None) -> JobSpec:
    return replace(job_of(gpus), partition=name, time_limit_s=time_s)


def claim_on(node: str, gpus: int = 1) -> tuple[Claim, ...]:
    return (Claim(node, (1 << gpus) - 1, (2_000 * gpus, 0), 4 * (1 << 30) * gpus, tasks=(gpus,)),)


def plan_of(drive: Drive, *changes: SingleChange) -> list[Reason | None]:
    """Return the first reason of each change's refusal; None: it was approved."""
    answer: Any = drive.step(ProposePlan(changes))
    return [verdict.refusals[0].reason if verdict.refusals else None for verdict in answer.verdicts]


def started(drive: Drive, spec: JobSpec, node: str, user: str = "ann") -> int:
    number = drive.submit(spec, user)
    assert plan_of(drive, StartChange(number, drive.job(number).revision, claim_on(node, spec.gpus))) == [None]
    drive.runs(number)
    return number


# -- settings ----------------------------------------------------------------------------------------------------------


def test_partitions_are_a_table_or_its_toml() -> None:
    toml = """
    [gpu]
    nodes = ["gpu[01-02]", "big"]
    gpu_types = ["h100"]
    users = ["ann"]
    teams = ["vision"]
    time = "2h"
    gpus = 8
    gpus_per_user = 4
    gpus_per_job = 2
    priority = 5
    preemptible = false
    default = true
    """
    nodes = ("gpu01", "gpu02", "big")
    told = Partition(nodes, ("h100",), ("ann",), ("vision",), 7200.0, 8, 4, 2, 5, False, True)
    assert partitions_of(toml) == {"gpu": told}
    assert partitions_of({"all": {}, "one": {"nodes": "n[1,3]"}}) == {
        "all": Partition(),
        "one": Partition(nodes=("n1", "n3")),
    }


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (7, "7 is no table of partitions"),
        ("[[", "partitions: "),
        ({"a b": {}}, "'a b' is no name of a partition"),
        ({"a" * 64: {}}, "is no name of a partition"),
        ({"a": 7}, "'a' is no table with nodes"),
        ({"a": {"node": "n1"}}, "'a' has 'node': a partition has nodes, gpu_types"),
        ({"a": {"nodes": 7}}, "'a' has nodes = 7: write a list of names"),
        ({"a": {"nodes": ["*"]}}, "'a' has nodes = '*': patterns are not read"),
        ({"a": {"nodes": "n[2-1]"}}, "'2-1' is no range from a smaller to a larger number"),
        ({"a": {"nodes": ["n[1-"]}}, "'n[1-' is no name of a node"),
        ({"a": {"nodes": "n[1-999999999]"}}, "is no range"),
        ({"a": {"nodes": "n[1-60000]m[1-60000]"}}, "stands for more than 100000 nodes"),
        ({"a": {"users": "ann"}}, "'a' has users = 'ann': write a list of names"),
        ({"a": {"gpus": -1}}, "gpus = -1: write a number from 0 to 1000000000"),
        ({"a": {"gpus_per_job": True}}, "gpus_per_job = True: write a number"),
        ({"a": {"priority": -1}}, "priority = -1: write a number from 0 to 1000"),
        ({"a": {"preemptible": "no"}}, "preemptible = 'no': write true or false"),
        ({"a": {"time": "soon"}}, "'a' has time = 'soon'"),
        ({"a": {"time": 0}}, "'a' has time = 0: write more than zero"),
        ({"a": {"default": True}, "b": {"default": True}}, "'a' and 'b' are the default: only one can be"),
    ],
)
def test_mistakes_of_partitions_are_named(value: object, wrong: str) -> None:
    with pytest.raises(ValueError, match="partitions: ") as refused:
        partitions_of(value)
    assert wrong in str(refused.value)


def test_a_node_is_in_the_partitions_that_name_it_or_its_gpu_type_or_nothing() -> None:
    index = PartitionIndex(
        {"all": Partition(), "named": Partition(nodes=("n1",)), "typed": Partition(gpu_types=("h100",))}
    )
    assert index.of_node("n1", "") == ("all", "named")
    assert index.of_node("n2", "h100") == ("all", "typed")
    assert index.of_node("n1", "h100") == ("all", "named", "typed")


def test_the_default_is_the_partition_that_says_so_or_else_the_first() -> None:
    assert PartitionIndex({"a": Partition(), "b": Partition()}).terms_of("").name == "a"
    assert PartitionIndex({"a": Partition(), "b": Partition(default=True)}).terms_of("").name == "b"
    assert PartitionIndex({}).terms_of("a") is NO_TERMS
    assert PartitionIndex({"a": Partition()}).terms_of("gone") == PartitionTerms("gone")


# -- submission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "user", "reason", "told"),
    [
        (in_partition("none"), "ann", "NO_SUCH_PARTITION", "there is no partition 'none': there are batch, urgent"),
        (in_partition("urgent"), "dan", "PARTITION_CLOSED", "it is for 'cat', team 'vision'"),
        (
            in_partition("", time_s=7200.0),
            "ann",
            "PARTITION_TIME",
            "its time limit is 2h, and partition 'batch' allows",
        ),
        (in_partition("batch", 4), "ann", "PARTITION_LIMIT", "partition 'batch' allows a job 3 GPUs (4 needed)"),
        (in_partition("urgent", 5), "ann", "GANG_IMPOSSIBLE", "not even the idle partition 'urgent' could hold it"),
    ],
)
@pytest.mark.parametrize("is_array", [False, True])
def test_a_job_that_may_never_start_in_its_partition_is_refused_at_submission(
    spec: JobSpec, user: str, reason: str, told: str, is_array: bool
) -> None:
    one = SubmitJob(spec, "uid", user)
    answer = drive_of().step(SubmitArray(spec, ((0, {}),), ("uid",), user=user) if is_array else one)
    assert isinstance(answer, Refused)
    assert (answer.reason, told in answer.message) == (reason, True), answer.message


def test_without_partitions_a_job_that_names_one_is_refused() -> None:
    answer = Drive().step(SubmitJob(in_partition("gpu"), "uid", "ann"))
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.message) == (
        "NO_SUCH_PARTITION",
        "there is no partition 'gpu': the cluster has no partitions",
    )


def test_a_job_gets_the_default_partition_its_priority_and_its_time_limit() -> None:
    drive = drive_of()
    first, urgent = drive.submit(in_partition("", 2)), drive.submit(in_partition("urgent"), "cat")
    limited = drive.submit(in_partition("", time_s=60.0))
    jobs = [drive.job(number) for number in (first, urgent, limited)]
    assert [job.partition.name for job in jobs] == ["batch", "urgent", "batch"]
    assert [job.shape.partition for job in jobs] == ["batch", "urgent", "batch"]
    assert [job.time_limit_s for job in jobs] == [3600.0, None, 60.0]
    assert [job.priority for job in jobs] == [0, 2 * TIER, 0]
    assert [job.preemptible for job in jobs] == [True, False, True]
    assert jobs[0].spec.partition == "", "the description stays as it was submitted, so that a repetition is known"
    assert jobs[0].spec_in_force.partition == "batch"


def test_the_priority_of_a_partition_goes_before_every_priority_of_a_job() -> None:
    drive = drive_of(low=Partition(), high=Partition(priority=1))
    low = drive.submit(replace(in_partition("low"), priority=1_000))
    high = drive.submit(replace(in_partition("high"), priority=-1_000))
    assert drive.job(high).priority > drive.job(low).priority


def test_members_of_an_array_are_in_its_partition() -> None:
    drive = drive_of()
    answer = drive.step(SubmitArray(in_partition("urgent"), ((0, {}), (1, {})), ("a", "b"), user="cat"))
    assert isinstance(answer, ArrayAnswer)
    assert [job.partition.name for job in drive.state.jobs.values()] == ["urgent", "urgent"]


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (Update(partition="urgent"), None),
        (Update(partition=""), None),
        (Update(partition="none"), "NO_SUCH_PARTITION"),
        (Update(time_limit_s=7200.0), "PARTITION_TIME"),
        (Update(time_limit_s=1800.0), None),
    ],
)
def test_an_update_is_held_to_the_partition_as_a_submission_is(update: Update, reason: str | None) -> None:
    drive = drive_of()
    number = drive.submit(in_partition("batch"), "ann")
    answer = drive.step(UpdateJob(number, update, "ann"))
    assert (answer.reason if isinstance(answer, Refused) else None) == reason
    if update.partition == "urgent":
        assert drive.job(number).partition.name == drive.job(number).shape.partition == "urgent"


def test_a_job_that_has_run_stays_in_its_partition() -> None:
    drive = drive_of()
    number = started(drive, in_partition("batch"), "n1")
    answer = drive.step(UpdateJob(number, Update(partition="urgent"), "ann"))
    assert isinstance(answer, Refused)
    assert answer.reason == "UPDATE_REFUSED"


# -- places ------------------------------------------------------------------------------------------------------------


def test_no_plan_and_no_request_starts_a_job_outside_its_partition() -> None:
    drive = drive_of()
    number = drive.submit(replace(in_partition("batch"), scheduler="own:Scheduler"), "ann")
    assert plan_of(drive, StartChange(number, 1, claim_on("n3"))) == [Reason.NOT_IN_PARTITION]
    # Its scheduler gets a lease, and proposes another place than the planner.
    assert plan_of(drive, StartChange(number, 1, claim_on("n1"))) == [None]
    answer: Any = drive.request(number, claim_on("n3"))
    assert answer.refusals[0].reason is Reason.NOT_IN_PARTITION
    assert {claim.node for claims in drive.places(number) for claim in claims} == {"n1", "n2"}


def test_no_plan_moves_a_job_outside_its_partition_and_a_drain_parks_it_instead() -> None:
    drive = drive_of(urgent=URGENT)
    number = started(drive, in_partition("urgent"), "n2", "cat")
    move = MoveChange(number, drive.job(number).revision, claim_on("n3"))
    assert plan_of(drive, move) == [Reason.NOT_IN_PARTITION]
    drive.step(DrainNode("n2", "repair"))
    drive.step(Tick())
    assert drive.job(number).next_epoch == 0
    assert drive.state.gangs[drive.job(number).epoch].park_level is SuspendLevel.CHECKPOINT


def test_a_job_of_a_partition_that_is_not_preemptible_is_moved_and_not_suspended_by_plans() -> None:
    both = replace_of(URGENT, nodes=("n1", "n2"))
    drive = drive_of(urgent=both)
    number = started(drive, in_partition("urgent"), "n2", "cat")
    suspend = SuspendChange(number, drive.job(number).revision, level=SuspendLevel.CHECKPOINT)
    assert plan_of(drive, suspend) == [Reason.WRONG_STATE]
    assert plan_of(drive, MoveChange(number, drive.job(number).revision, claim_on("n1"))) == [None]


@pytest.mark.parametrize(
    ("user", "gpus", "held", "told"),
    [
        ("ann", 2, 4, "user 'ann' in partition 'batch' holds 3 of the 4 GPUs"),
        ("bob", 1, 0, ""),
        ("bob", 3, 1, "partition 'batch' holds 4 of the 6 GPUs of its limit: jobs/1 (3), jobs/2 (1)"),
    ],
)
def test_limits_of_a_partition_hold_for_each_user_and_for_all(user: str, gpus: int, held: int, told: str) -> None:
    drive = drive_of()
    started(drive, in_partition("batch", 3), "n1", "ann")
    if user == "bob" and held:
        started(drive, in_partition("batch", 1), "n2", "cat")
    number = drive.submit(in_partition("batch", gpus), user)
    refusals = rules(drive.state, drive.job(number))
    assert [one.reason for one in refusals] == [Reason.PARTITION_LIMIT] * bool(told)
    assert not told or refusals[0].message.startswith(told), refusals


# -- other settings ----------------------------------------------------------------------------------------------------


def after_restart(drive: Drive, settings: CoreSettings) -> Any:
    """Return the state that a master with other settings restores."""
    state = drive.state
    elements = [
        *state.nodes.configuration_sets.values(),
        state.counters,
        *state.nodes.values(),
        *state.jobs.values(),
        *state.gangs.values(),
    ]
    return restored(settings, elements, drive.now)


def test_a_running_job_whose_partition_goes_runs_on_and_a_pending_one_waits() -> None:
    drive = drive_of()
    running = started(drive, in_partition("urgent"), "n2", "cat")
    pending = drive.submit(in_partition("urgent"), "cat")
    state = after_restart(drive, settings_of({"batch": BATCH}))
    machine.step(state, Tick(), drive.now + 1.0)
    assert state.jobs[running].state is JobState.HOLDING
    assert [one.reason for one in rules(state, state.jobs[pending])] == [Reason.NO_SUCH_PARTITION]
    assert explain(state, pending, drive.now).assumption.startswith("never in this partition")


def test_why_names_no_node_of_another_partition() -> None:
    drive = drive_of()
    pending = drive.submit(in_partition("batch", 3), "ann")
    for node in ("n1", "n2", "n3"):
        drive.step(CordonNode(node, "new fan", "olga"))
    blocker = explain(drive.state, pending, drive.now).blockers[0]
    assert [name in blocker.message for name in ("nodes/n1", "nodes/n2", "nodes/n3")] == [True, True, False]


def test_a_running_job_keeps_its_time_limit_and_a_pending_one_gets_the_new_one() -> None:
    drive = drive_of()
    running = started(drive, in_partition("batch"), "n1")
    pending = drive.submit(in_partition("batch"), "ann")
    shorter = replace_of(BATCH, time_s=60.0)
    state = after_restart(drive, settings_of({"batch": shorter, "urgent": URGENT}))
    assert [state.jobs[number].time_limit_s for number in (running, pending)] == [3600.0, 60.0]


def test_a_cluster_that_gets_partitions_puts_its_jobs_into_the_default_and_one_that_loses_them_frees_all() -> None:
    drive = Drive(2, CoreSettings(policy="las"))
    number = drive.submit(job_of(1), "ann")
    state = after_restart(drive, settings_of({"batch": BATCH}))
    assert state.jobs[number].partition.name == "batch"
    partitioned = drive_of()
    number = partitioned.submit(in_partition("urgent"), "cat")
    state = after_restart(partitioned, CoreSettings(policy="las"))
    assert state.jobs[number].partition == NO_TERMS
    assert state.jobs[number].shape.partition == ""


def test_a_gang_on_a_node_that_left_its_partition_stays_and_may_get_other_cores() -> None:
    drive = drive_of()
    number = started(drive, in_partition("batch"), "n1")
    state = after_restart(drive, settings_of({"batch": replace_of(BATCH, nodes=("n2",)), "urgent": URGENT}))
    assert state.view.topology("n1").partitions == ()
    assert rules(state, state.jobs[number]) == ()
    gang, job = state.gangs[state.jobs[number].epoch], state.jobs[number]
    (claim,) = gang.claims
    fewer = replace(claim, millicores=(1_000, 0))
    assert judge_change(state, job, (fewer,), holding=gang.claims, retune=True) == ()


def replace_of(partition: Partition, **changes: Any) -> Partition:
    return dataclasses.replace(partition, **changes)


def test_no_job_is_stopped_and_no_place_is_kept_for_a_job_that_may_not_be_in_its_partition() -> None:
    drive = drive_of()
    running = started(drive, in_partition("batch", 2), "n2", "ann")
    pending = drive.submit(in_partition("urgent", 2), "cat")
    for users, reasons, kept in ((("dan",), [Reason.PARTITION_CLOSED], []), (("cat",), [None], [pending])):
        urgent = replace_of(URGENT, users=users, teams=())
        drive.state = after_restart(drive, settings_of({"batch": BATCH, "urgent": urgent}))
        is_closed = may_never_start(drive.state, drive.job(pending)) is not None
        assert (is_closed, may_never_start(drive.state, drive.job(running))) == (not kept, None)
        drive.step(ProposePlan((), kept_places=(KeepPlace(pending, claim_on("n2", 2)),)))
        assert list(drive.state.queue.kept_by_plan) == kept
        revision = drive.job(running).revision
        suspend = SuspendChange(running, revision, level=SuspendLevel.PAUSE, purpose=Purpose(Goal.HOLE, pending))
        move = MoveChange(running, revision, claim_on("n1", 2), purpose=Purpose(Goal.HOLE, pending))
        for change in (suspend,) if kept else (move, suspend):
            assert plan_of(drive, change) == reasons
