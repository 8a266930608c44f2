"""The guards of the source find what they are for, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from guards.class_names import repeated_classes, repeated_in, report
from guards.function_length import long_functions
from guards.import_circles import circles
from guards.import_circles import report as circle_report
from guards.page_width import wide_lines
from guards.person_words import allowed_lines, person_words, stale_lines, without_people
from guards.unit_suffixes import defined_in_proto, defined_in_python, with_long_units


def test_a_public_class_name_that_two_modules_define_is_reported_with_both_places() -> None:
    sources = [
        ("a.py", "class Pace: ...\n"),
        ("b.py", "x = 1\n\nclass Pace(list): ...\n"),
        ("c.py", "class Other: ..."),
    ]
    repeated = repeated_classes(sources)
    assert report(repeated) == "Pace: a.py:1, b.py:3\npublic class names that exist more than once: 1"


def test_private_and_nested_classes_may_have_the_same_name() -> None:
    nested = "class Outer:\n    class Inner: ...\n\nclass _Own: ...\n"
    assert repeated_classes([("a.py", nested), ("b.py", nested.replace("Outer", "Another"))]) == {}


def test_only_tracked_files_without_generated_code_are_read(tmp_path: Path) -> None:
    for name in ("client/one.py", "client/one_pb2.py", "tests/two.py", "client/untracked.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("class Job: ...\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "client/one.py", "client/one_pb2.py", "tests/two.py"], cwd=tmp_path, check=True)
    assert repeated_in(tmp_path, ("client",)) == {}
    assert [place.file for place in repeated_in(tmp_path, ())["Job"]] == ["client/one.py", "tests/two.py"]


def test_modules_that_import_each_other_through_a_third_are_one_circle() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"g", "a"}, "g": {"f"}}
    assert circles(imports) == [frozenset("abc"), frozenset("fg")]


def test_a_known_circle_is_no_fault_until_it_is_gone() -> None:
    circle = frozenset({"a", "b"})
    assert circle_report([circle], frozenset({circle})) == "circles of imports: 1, of which 1 are known"
    assert "circle of imports: a, b" in circle_report([circle], frozenset())
    assert "delete it from KNOWN_CIRCLES: a, b" in circle_report([], frozenset({circle}))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Whoever waits, nobody else.", ["whoever", "nobody"]),
        ("def test_who_waits_moves_nobody() -> None:", ["who", "nobody"]),
        ("class _NobodyReads(Exception):", ["nobody"]),
        ("NOBODY = KeptOut()", ["nobody"]),
        ("the whole job, whose nodes: whom", ["whom"]),
    ],
)
def test_words_for_people_are_found_in_prose_and_in_identifiers(line: str, words: list[str]) -> None:
    assert [found.word for found in person_words("a.py", line)] == words


def test_a_line_on_the_allow_list_is_not_counted() -> None:
    text = "# users who log in\n    # jobs who wait\n"
    allowed = allowed_lines("# comment\na.py\t# users who log in\n")
    assert [(one.line, one.text) for one in without_people(person_words("a.py", text), allowed)] == [
        (2, "# jobs who wait")
    ]


def test_a_line_of_the_allow_list_that_its_file_lost_is_reported() -> None:
    found = list(person_words("a.py", "# users who log in"))
    assert stale_lines({("a.py", "# users who log in"), ("b.py", "# users who log in")}, found) == [
        ("b.py", "# users who log in")
    ]


def test_a_function_is_long_by_its_lines_with_those_of_the_functions_inside() -> None:
    source = (
        "class A:\n    def short(self):\n        pass\n\n    def long(self):\n        def inner():\n            pass\n"
    )
    assert [(one.name, one.line, one.lines) for one in long_functions("a.py", source, most=2)] == [("long", 5, 3)]


def test_lines_of_prose_over_the_limit_are_reported_but_tables_code_and_links_are_not() -> None:
    page = "\n".join(
        ["a few words", "word " * 5, "| " + "cell " * 9, "```", "code " * 9, "```", "* https://" + "x" * 40]
    )
    assert [(one.line, one.columns) for one in wide_lines("a.md", page, most=20)] == [(2, 25)]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def wait_seconds(self, most_s, poll_millis): ...", ["poll_millis", "wait_seconds"]),
        ("self.age_seconds = age_s = 1", ["age_seconds"]),
        ("used_gpu_seconds = core_seconds = 1", []),
        ("_RETRY_SECONDS: float = 1.0\nRETRY_S = 2", ["_RETRY_SECONDS"]),
        ("call(timeout_s=1)\nmessage.lease_s\nseconds = 1", []),
    ],
)
def test_names_that_a_module_defines_with_a_long_unit_are_found(source: str, names: list[str]) -> None:
    assert sorted(one.name for one in with_long_units(defined_in_python("a.py", source))) == names


def test_fields_of_a_proto_with_a_long_unit_are_found() -> None:
    source = "message M {\n  optional double wait_seconds = 1;\n  repeated int64 size_bytes = 2;\n}\n"
    found = with_long_units(defined_in_proto("a.proto", source))
    assert [(one.name, one.line) for one in found] == [("wait_seconds", 2)]
