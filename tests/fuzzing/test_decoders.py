"""No bytes make a decoder raise anything but its refusals. `make fuzz` tries a million more."""

from __future__ import annotations

import random

import pytest
from fuzzing.decoders import Decoder, decoders

_TRIED = 200
_TOKENS = (
    *(b"null", b"-1", b"1e999", b"NaN", b"99999999999999999999999", b"true", b"1.5", b'"a"', b"\\ud800", b"0x"),
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"=", b"/", b"..", b"\0", b"\n", b"\xff", b"&a", b"*a", b"%", b"~x"),
    *(b"[" * 2_000, b'{"a":' * 2_000, b"1" * 5_000, b"x" * 300, b"!!python/object:os.system"),
)


def mutated(seed: bytes, drawn: random.Random) -> bytes:
    """The bytes with some of them changed, left out, repeated, or replaced by what means something somewhere."""
    data = bytearray(seed)
    for _ in range(drawn.choice((1, 1, 2, 4, 8))):
        at, count = drawn.randrange(len(data) + 1), drawn.randrange(12)
        match drawn.randrange(6):
            case 0:
                data[at : at + count] = drawn.randbytes(count)
            case 1:
                del data[at : at + count]
            case 2:
                data[at:at] = drawn.choice(_TOKENS)
            case 3:
                data[at : at + count] = drawn.choice(_TOKENS)
            case 4:
                data[at:at] = data[(begin := drawn.randrange(len(data) + 1)) : begin + 2 * count]
            case _:
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize("decoder", decoders(), ids=lambda decoder: decoder.name)
def test_a_decoder_takes_what_is_right(decoder: Decoder) -> None:
    for seed in decoder.seeds:
        decoder.decode(seed)


@pytest.mark.parametrize("decoder", decoders(), ids=lambda decoder: decoder.name)
def test_a_decoder_refuses_what_is_wrong_with_its_own_errors(decoder: Decoder) -> None:
    drawn = random.Random(decoder.name)
    for _ in range(_TRIED):
        data = mutated(drawn.choice(decoder.seeds), drawn)
        try:
            decoder.decode(data)
        except decoder.errors:
            pass
        except Exception as error:
            raise AssertionError(f"{decoder.name} raised {error!r} for {data[:2000]!r}") from error


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("flags", b"1" * 400),
        ("flags", b"1:30:0" + b"1" * 5_000),
        ("flags", b"/" + b"x" * 300),
        ("flags", b"~no-account-of-this-name"),
        ("settings", b"policy = " + b"[" * 2_000),
        ("settings", b"listen = " + b"1" * 5_000),
        ("recorded server", b"[" * 2_000),
        ("line of a recording", b'{"line":' + b"[" * 2_000),
        ("facts of an image", b'{"root_pid": "\x9f"}'),
        ("state tree", b'{"$":"device","v":"\\ud800"}'),
        ("certificate", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"),
    ],
)
def test_inputs_that_once_ended_in_a_traceback_are_refused(name: str, data: bytes) -> None:
    decoder = next(one for one in decoders() if one.name == name)
    try:
        decoder.decode(data)
    except decoder.errors:
        pass


def test_a_metric_named_by_a_job_moves_no_cursor_in_the_table_of_its_array() -> None:
    from contextlib import redirect_stdout
    from io import StringIO

    from ganger.console import print_table

    with redirect_stdout(StringIO()) as screen:
        print_table(["job", "loss\x1b[2J"], [["1", "2"]])
    assert screen.getvalue() == "job  loss\\x1b[2J\n1    2\n"


def test_a_role_named_by_a_user_moves_no_cursor_where_a_job_is_shown() -> None:
    from contextlib import redirect_stdout
    from io import StringIO

    from ganger.console import print_pairs

    with redirect_stdout(StringIO()) as screen:
        print_pairs([("command of \x1b[2J", "python"), ("user", "ann")])
    assert screen.getvalue() == "command of \\x1b[2J  python\nuser                ann\n"
