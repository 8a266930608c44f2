"""Lines of a log, from chunks that are cut anywhere."""

from __future__ import annotations

import pytest
from ganger.cli.logs import lines


@pytest.mark.parametrize("sign", ["x", "é", "€", "😀"])
def test_a_line_that_is_longer_than_what_is_kept_is_never_cut_inside_a_sign(sign: str) -> None:
    text = ("a" + sign * 100_000).encode()
    chunks = [text[at : at + 1009] for at in range(0, len(text), 1009)]
    found = list(lines(chunks))
    assert len(found) > 1
    assert "".join(line.decode().removesuffix("\n") for line in found) == text.decode()


def test_bytes_that_are_no_text_are_printed_as_they_are() -> None:
    text = b"\xff\x80" * 100_000
    assert b"".join(line.removesuffix(b"\n") for line in lines([text])) == text
