"""Names of nodes as ranges, in both directions."""

from __future__ import annotations

import pytest
from ganger.text import compress_names, expand_names
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("gpu[01-03,10],login", ("gpu01", "gpu02", "gpu03", "gpu10", "login")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n1, n1,n2", ("n1", "n2")),
        ("n[9-11]", ("n9", "n10", "n11")),
    ],
)
def test_ranges_stand_for_names(text: str, names: tuple[str, ...]) -> None:
    assert expand_names(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n]1[", "n[a-b]", "n[3-1]", "n[]", "n1,,n2", "n 1", "n[1-2", "n[1-9999999]"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no|stands for"):
        expand_names(text)


def test_numbers_of_one_width_are_one_range() -> None:
    assert compress_names(f"gpu{number:02}" for number in range(1, 13)) == "gpu[01-12]"
    assert compress_names(["n1", "n2", "n3", "n10", "login"]) == "login,n[1-3,10]"
    assert compress_names([]) == ""


NAMES = st.lists(st.from_regex(r"[a-z]{1,2}-?[0-9]{0,3}", fullmatch=True), max_size=20)


@given(NAMES)
def test_compressed_names_expand_to_the_same_names(names: list[str]) -> None:
    text = compress_names(names)
    assert set(expand_names(text) if text else ()) == set(names)
