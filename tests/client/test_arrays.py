"""Descriptions of arrays become requests, and what is wrong with them is said all at once with paths."""

from __future__ import annotations

from typing import Any

import pytest
from ganger.array_spec import from_flags, make_array
from ganger.v1.array_pb2 import StopRule
from ganger.v1.job_service_pb2 import CreateArrayRequest
from ganger.wire.errors import SpecInvalid


def made(array: Any, **description: Any) -> CreateArrayRequest:
    return make_array({"command": ["train", "{lr}"], **description, "array": array}, environ={})


def flags(*words: str, stop: str | None = None, present: Any = None) -> dict[str, Any]:
    array, wrong = from_flags(words, stop, present)
    assert not wrong
    return array


def parameters(request: CreateArrayRequest) -> list[dict[str, str]]:
    return [dict(member.parameters) for member in request.members]


def wrong(array: Any, **description: Any) -> dict[str, str]:
    with pytest.raises(SpecInvalid) as caught:
        made(array, **description)
    return {violation.field: violation.description for violation in caught.value.violations}


def test_a_grid_is_every_combination_and_the_last_parameter_changes_fastest() -> None:
    request = made(flags("lr=0.1,0.01", "batch=32,64%3"))
    assert parameters(request) == [
        {"lr": "0.1", "batch": "32"},
        {"lr": "0.1", "batch": "64"},
        {"lr": "0.01", "batch": "32"},
        {"lr": "0.01", "batch": "64"},
    ]
    assert [member.index for member in request.members] == [0, 1, 2, 3]
    assert request.max_concurrent == 3
    assert list(request.spec.command) == ["train", "{lr}"]


def test_indices_are_written_as_slurm_users_do() -> None:
    for text, indices in (("0-3", [0, 1, 2, 3]), ("1-9:4", [1, 5, 9]), ("7,2", [7, 2]), ("5", [5])):
        request = made(flags(f"{text}%2"))
        assert [member.index for member in request.members] == indices
        assert request.max_concurrent == 2


def test_flags_win_over_the_file_and_keep_what_they_do_not_name() -> None:
    present = {"grid": {"lr": [0.1, 0.2], "batch": [1]}, "at_once": 5, "stop": {"rule": "asha", "first": 3}}
    request = made(flags("lr=9", present=present))
    assert parameters(request) == [{"lr": "9", "batch": "1"}]
    assert (request.max_concurrent, request.rule.kind, request.rule.first_rung) == (5, StopRule.KIND_ASHA, 3)


def test_a_list_names_each_member() -> None:
    assert parameters(made({"list": [{"lr": 1e-3}, {"batch": "a b,c%4"}]})) == [{"lr": "0.001"}, {"batch": "a b,c%4"}]


def test_a_stop_rule_is_written_in_one_word() -> None:
    rule = made(flags("0-1", stop="threshold,metric=accuracy,goal=max,first=5,resource=epoch,bound=0.2")).rule
    assert rule == StopRule(
        kind=StopRule.KIND_THRESHOLD,
        metric="accuracy",
        higher_is_better=True,
        resource="epoch",
        first_rung=5,
        bound=0.2,
    )


def test_every_mistake_is_named_at_once() -> None:
    found = wrong(
        {"grid": {"lr": "0.1"}, "at_once": 0, "colour": "red", "stop": {"rule": "guess", "goal": "up", "bound": "x"}},
        gpus="two",
        scheduler="a:B",
    )
    assert sorted(found) == [
        "array.at_once",
        "array.colour",
        "array.grid",
        "array.stop.bound",
        "array.stop.first",
        "array.stop.goal",
        "array.stop.rule",
        "gpus",
        "scheduler",
    ]


@pytest.mark.parametrize(
    ("array", "path"),
    [
        (7, "array"),
        ({}, "array"),
        ({"grid": {"a": [1]}, "indices": "0-3"}, "array"),
        ({"grid": {"index": [1]}}, "array.grid"),
        ({"grid": {"a": [0.1, "0.1"]}}, "array.grid"),
        ({"grid": {"a b": [1]}}, "array.grid"),
        ({"grid": {"a": range(40), "b": range(40)}}, "array.grid"),
        ({"grid": {"a": [[1]]}}, "array.grid"),
        ({"list": ["lr"]}, "array.list"),
        ({"indices": "3-1"}, "array.indices"),
        ({"indices": "1,1"}, "array.indices"),
        ({"indices": "0-99999"}, "array.indices"),
        ({"indices": "one"}, "array.indices"),
        ({"indices": "0-1", "stop": "halving"}, "array.stop"),
        ({"indices": "0-1", "stop": {"rule": "threshold", "first": 1}}, "array.stop.bound"),
        ({"indices": "0-1", "stop": {"rule": "asha", "first": 1, "metric": "a b"}}, "array.stop.metric"),
        ({"indices": "0-1", "stop": {"rule": "asha", "first": float("nan")}}, "array.stop.first"),
        ({"indices": "0-1", "stop": {"rule": "asha", "first": 0}}, "array.stop.first"),
        ({"indices": "0-1", "stop": {"rule": "asha", "first": 2e15}}, "array.stop.first"),
        ({"indices": "0-1", "stop": {"rule": "halving", "first": 1, "factor": 1}}, "array.stop.factor"),
        ({"indices": "0-1", "stop": {"rule": "median", "first": 1, "every": -1}}, "array.stop.every"),
    ],
)
def test_what_makes_no_array_is_said(array: Any, path: str) -> None:
    assert list(wrong(array)) == [path]


@pytest.mark.parametrize(
    ("words", "stop"),
    [
        ([""], None),
        (["lr="], None),
        (["lr=1,,2"], None),
        ([], "halving,first"),
        ([], "halving,colour=red"),
        ([], "halving,first=1,first=2"),
    ],
)
def test_flags_that_mean_nothing_are_said(words: list[str], stop: str | None) -> None:
    assert from_flags(words, stop, None)[1]


def test_a_parameter_that_is_given_twice_is_refused_and_not_dropped() -> None:
    _, violations = from_flags(["lr=1,2", "batch=4", "lr=3"], None, None)
    assert [(one.field, one.description) for one in violations] == [
        ("--array", "lr is given twice: write --array lr=A,B,... once")
    ]
    assert flags("lr=3", present={"grid": {"lr": [1, 2]}}) == {"grid": {"lr": ["3"]}}, "flags win over the file"
