"""`ganger nodes quarantine`: its list, its questions and its requests."""

from __future__ import annotations

import json

import pytest
from ganger.v1 import node_pb2
from ganger.wire.errors import AdoptionRefused
from kit.canned import Call, CannedMaster

QUARANTINE = ("nodes", "quarantine")


@pytest.fixture
def gangs(master: CannedMaster) -> list[node_pb2.QuarantinedGang]:
    """One of a job that the master does not know, which can be adopted, and one of a job that it does, which cannot."""
    part = node_pb2.QuarantinedGang.Part
    master.quarantined = [
        node_pb2.QuarantinedGang(
            name="quarantinedGangs/aa11-5", job="jobs/7", job_uid="aa11", epoch=5, user="ann",
            parts=[part(node="nodes/n1", phase="RUNNING"), part(node="nodes/n2", phase="RUNNING")],
            reason="an unknown job",
        ),
        node_pb2.QuarantinedGang(
            name="quarantinedGangs/ab22-9", job="jobs/3", job_uid="ab22", job_known=True, epoch=9,
            parts=[part(node="nodes/n1", phase="PARKED")],
            reason="an epoch of after the backup", adoption_refusal="it is time-sliced with other jobs on its devices",
        ),
    ]  # fmt: skip
    return master.quarantined


def sent(master: CannedMaster, kind: type) -> list[str]:
    return [request.name for request in master.requests if isinstance(request, kind)]


@pytest.mark.parametrize("words", [(), ("list",)])
@pytest.mark.usefixtures("gangs")
def test_the_list_has_a_gang_per_line_with_what_can_be_done_about_it(
    call: Call, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert call(*QUARANTINE, *words) == 0
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["GANG", "JOB", "USER", "NODES", "STATE", "WHY"]
    assert first.split()[:7] == ["aa11-5", "7", "(unknown)", "ann", "n1", "n2", "running"]
    assert "it can be adopted" in first
    assert second.split()[:2] == ["ab22-9", "3"]
    assert "an epoch of after the backup; it is time-sliced" in second


@pytest.mark.usefixtures("gangs")
def test_the_list_as_json_has_every_field(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*QUARANTINE, "list", "--json") == 0
    first, _ = json.loads(capsys.readouterr().out)
    assert (first["name"], first["parts"][1]["node"]) == ("quarantinedGangs/aa11-5", "nodes/n2")


def test_an_empty_list_is_reported(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*QUARANTINE, "list") == 0
    assert "no gang is quarantined" in "".join(capsys.readouterr())


@pytest.mark.usefixtures("gangs")
def test_a_gang_is_ended_by_the_beginning_of_its_name(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*QUARANTINE, "end", "aa", "--yes") == 0
    assert sent(master, node_pb2.EndQuarantinedGangRequest) == ["quarantinedGangs/aa11-5"]
    assert capsys.readouterr().out == "epoch 5 of job 7 on n1 n2 is ended\n"


@pytest.mark.usefixtures("gangs")
def test_no_gang_is_ended_without_a_yes(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("click.confirm", lambda question, err: False)
    assert call(*QUARANTINE, "end", "aa11-5") != 0
    assert sent(master, node_pb2.EndQuarantinedGangRequest) == []
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "problem"),
    [("a", "2 quarantined gangs begin with 'a'"), ("zz", "no quarantined gang is 'zz'")],
)
@pytest.mark.parametrize("command", ["end", "adopt"])
@pytest.mark.usefixtures("gangs")
def test_a_name_that_is_not_one_gang_is_refused(
    call: Call, capsys: pytest.CaptureFixture[str], command: str, text: str, problem: str
) -> None:
    assert call(*QUARANTINE, command, text) != 0
    told = capsys.readouterr().err
    assert problem in told
    assert "ganger nodes quarantine list" in told


@pytest.mark.usefixtures("gangs")
def test_a_gang_is_adopted_and_its_job_named(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*QUARANTINE, "adopt", "aa11-5") == 0
    assert sent(master, node_pb2.AdoptQuarantinedGangRequest) == ["quarantinedGangs/aa11-5"]
    assert capsys.readouterr().out == "job 7 has the gang of epoch 5\n"


@pytest.mark.usefixtures("gangs")
def test_a_refused_adoption_is_reported_with_its_reason(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    master.refused_adoption = AdoptionRefused("it is time-sliced with other jobs on its devices")
    assert call(*QUARANTINE, "adopt", "ab22-9") != 0
    assert "it is time-sliced with other jobs on its devices" in capsys.readouterr().err


def test_going_on_names_the_nodes_that_have_not_reported(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str]
) -> None:
    master.cluster.restore.awaited_nodes.extend(["nodes/n2", "nodes/n4"])
    assert call(*QUARANTINE, "go-on", "--yes") == 0
    assert capsys.readouterr().out == "the master goes on without n2 n4\n"


def test_going_on_asks_where_nodes_are_missing(
    call: Call, master: CannedMaster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("click.confirm", lambda question, err: bool(asked.append(question)))
    master.cluster.restore.awaited_nodes.append("nodes/n2")
    assert call(*QUARANTINE, "go-on") != 0
    assert asked == ["go on without n2? Jobs that run there may run twice."]
    assert not any(isinstance(request, node_pb2.SettleRestoreRequest) for request in master.requests)
    capsys.readouterr()
