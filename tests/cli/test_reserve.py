"""`ganger reserve`: what it sends, and what it prints."""

from __future__ import annotations

import json
import time

import pytest
from ganger.v1 import node_pb2
from ganger.wire import times
from ganger.wire.errors import ReservationNotFound
from kit.canned import Call, CannedMaster

Output = pytest.CaptureFixture[str]


def test_create_sends_nodes_times_and_users(call: Call, master: CannedMaster, capsys: Output) -> None:
    words = ("--nodes", "gpu[01-02]", "--start", "2h", "--duration", "4h", "--users", "ann, bob", "--lead", "5m")
    assert call("reserve", "create", "course", *words, "-m", "a course") == 0
    sent = master.requests[-1].reservation
    assert (sent.name, sent.nodes, list(sent.users), sent.reason) == (
        "course",
        "gpu[01-02]",
        ["ann", "bob"],
        "a course",
    )
    assert abs(times.unix_s(sent.start_time) - time.time() - 7_200.0) < 60.0
    assert times.unix_s(sent.end_time) - times.unix_s(sent.start_time) == pytest.approx(14_400.0)
    assert times.seconds(sent.lead) == 300.0
    said = capsys.readouterr().out
    assert said.startswith("reserved gpu[01-02] from ")
    assert said.endswith(": ann, bob\n")
    assert call("reserve", "create", "now", "--nodes", "n1", "--start", "now", "--duration", "1h", "--json") == 0
    assert not master.requests[-1].reservation.HasField("lead")
    assert json.loads(capsys.readouterr().out)["name"] == "now"


@pytest.mark.parametrize(
    ("flag", "text", "told"),
    [
        ("--start", "soon", "--start: 'soon' is neither a time nor a duration"),
        ("--start", "2001-01-01T08:00", "--start: 2001-01-01 08:00:00 has passed\n"),
        ("--start", "25:00", "--start: '25:00' is no time of day; a duration is written 90m or 2h30m\n"),
        ("--duration", "long", "--duration: 'long' is not a duration"),
        ("--users", " ,", "--users: ' ,' names no user; leave it out for maintenance"),
        ("--users", "", "--users: '' names no user"),
        ("--lead", "x", "--lead: 'x' is not a duration"),
    ],
)
def test_times_and_users_that_are_none_are_refused(
    call: Call, master: CannedMaster, flag: str, text: str, told: str, capsys: Output
) -> None:
    words = {"--nodes": "n1", "--start": "1h", "--duration": "1h", flag: text}
    assert call("reserve", "create", "a", *[word for pair in words.items() for word in pair]) == 2
    assert told in capsys.readouterr().err


def test_the_list_has_the_state_of_each(call: Call, master: CannedMaster, capsys: Output) -> None:
    now = time.time()
    reservation, phases = node_pb2.Reservation, node_pb2.Reservation
    master.reservations.reservations.extend(
        [
            reservation(
                name="later",
                nodes="n[1-2]",
                start_time=times.timestamp(now + 7_205.0),
                end_time=times.timestamp(now + 9_000.0),
                users=["ann", "bob", "cat", "dan"],
                phase=phases.PHASE_AHEAD,
            ),
            reservation(
                name="upgrade",
                nodes="n3",
                start_time=times.timestamp(now - 300.0),
                end_time=times.timestamp(now + 9_000.0),
                reason="disks",
                phase=phases.PHASE_ACTIVE,
            ),
            reservation(name="soon", nodes="n4", start_time=times.timestamp(now + 65.0), phase=phases.PHASE_EMPTYING),
        ]
    )
    for words in (("reserve", "list"), ("reserve",)):
        assert call(*words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["NAME", "STATE", "START", "END", "FOR", "NODES", "REASON"]
        assert [line.split()[0] for line in lines[1:]] == ["upgrade", "soon", "later"]
        assert "since 5m" in lines[1]
        assert "maintenance" in lines[1]
        assert "emptying, begins in 1m" in lines[2]
        assert "in 2h" in lines[3]
        assert "ann, bob, cat, ..." in lines[3]
    assert call("reserve", "list", "--json") == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["upgrade", "soon", "later"]


def test_one_is_shown_with_all_its_users_and_an_unknown_one_is_named(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    now, reservation = time.time(), node_pb2.Reservation
    users = ["ann", "bob", "cat", "dan"]
    span = {"start_time": times.timestamp(now + 7_205.0), "end_time": times.timestamp(now + 9_000.0)}
    master.reservations.reservations.append(
        reservation(name="course", nodes="n[1-2]", users=users, lead=times.duration(600.0), user="olga", **span)  # type: ignore[arg-type]
    )
    assert call("reserve", "show", "course") == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (said["state"], said["for"], said["lead"]) == ("in 2h", "ann, bob, cat, dan", "10m")
    assert call("reserve", "show", "course", "--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "course"
    assert call("reserve", "show", "other") == 3
    assert "there is no reservation 'other': there are course" in capsys.readouterr().err


def test_update_sends_only_what_is_named(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("reserve", "update", "course", "--users", "ann, zoe") == 0
    sent = master.requests[-1]
    assert (sent.name, sent.nodes, list(sent.users)) == ("course", "", ["ann", "zoe"])
    assert not any(map(sent.HasField, ("start_time", "duration", "reason", "lead")))
    assert capsys.readouterr().out.startswith("reservation course: n1 from ")
    words = ("--start", "2h", "--duration", "90m", "--nodes", "gpu[1-2]", "--lead", "0s", "-m", "")
    assert call("reserve", "update", "course", *words, "--json") == 0
    sent = master.requests[-1]
    assert abs(times.unix_s(sent.start_time) - time.time() - 7_200.0) < 60.0
    assert (times.seconds(sent.duration), sent.nodes, list(sent.users)) == (5_400.0, "gpu[1-2]", [])
    assert (times.seconds(sent.lead), sent.HasField("reason"), sent.reason) == (0.0, True, "")


def test_update_adds_and_removes_nodes_and_users_and_makes_maintenance(call: Call, master: CannedMaster) -> None:
    change = node_pb2.UpdateReservationRequest
    assert call("reserve", "update", "course", "--nodes", "+=n5,gpu[1-2]", "--users", "-=ann,bob") == 0
    sent = master.requests[-1]
    assert (sent.nodes, sent.nodes_change) == ("n5,gpu[1-2]", change.LIST_CHANGE_ADD)
    assert (list(sent.users), sent.users_change) == (["ann", "bob"], change.LIST_CHANGE_REMOVE)
    assert call("reserve", "update", "course", "--maintenance") == 0
    assert master.requests[-1] == change(name="course", maintenance=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "name what to change: --start, --duration, --nodes, --users, --maintenance, --lead or --reason"),
        (("--users", ""), "names no user; --maintenance makes it maintenance"),
        (("--users", "+="), "names no user"),
        (("--users", "ann", "--maintenance"), "--maintenance goes without --users"),
        (("--nodes", "-="), "names no node"),
        (("--nodes", " "), "names no node; `ganger reserve delete a` ends it"),
        (("--start", "soon"), "--start: 'soon' is neither a time nor a duration"),
    ],
)
def test_an_update_that_names_nothing_is_refused(
    call: Call, master: CannedMaster, words: tuple[str, ...], told: str, capsys: Output
) -> None:
    assert call("reserve", "update", "a", *words) == 2
    assert told in capsys.readouterr().err
    assert not master.requests


def test_delete_names_what_is_deleted_and_without_any_a_script_reads_nothing(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    assert call("reserve", "delete", "a", "b") == 0
    assert [request.name for request in master.requests[-2:]] == ["a", "b"]
    assert capsys.readouterr().out == "deleted reservation a\ndeleted reservation b\n"
    master.failing = ReservationNotFound("there is no reservation 'a': there are none")
    assert call("reserve", "delete", "a", "b") == 3
    said = capsys.readouterr()
    assert said.out == "deleted reservation b\n"
    assert "there is no reservation 'a'" in said.err
    assert call("reserve") == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "no reservations\n")
