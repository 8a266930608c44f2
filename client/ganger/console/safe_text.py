"""What others have named or written, as it may be shown on a terminal: it draws nothing but its signs."""

from __future__ import annotations

import codecs
import re
import sys
from typing import TextIO

# Control codes, which move the cursor, colour, or rename the window; ends of lines that are none; marks that turn the
# direction of what follows; bytes that were no text. Marks that join the parts of one sign stay.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# A whole colour, or a sign that is written out.
_CONTROLS_OF_LOGS = re.compile(f"\x1b\\[[0-9;:]{{0,64}}m|(?![\n\t\r]){_CONTROLS.pattern}")
_BEGUN_COLOUR = re.compile(r"\x1b(?:\[[0-9;:]{0,64})?\Z")
_CONTROLS_BUT_NEWLINE = re.compile(f"(?!\n){_CONTROLS.pattern}")


def visible(text: str, lines: bool = False) -> str:
    """The text with each sign that a terminal would obey written out, as Python does: \\x1b. With `lines` newlines stay
    what they are."""
    if text.isprintable():
        return text
    return (_CONTROLS_BUT_NEWLINE if lines else _CONTROLS).sub(lambda found: ascii(found[0])[1:-1], text)


def cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(sign) else 2 if east_asian_width(sign) in "WF" else 1 for sign in text)


def bounded(text: str, columns: int) -> str:
    """Return the beginning of a text, written out as by `visible`, in at most so many columns; no character in part."""
    kept, width = [], 0
    # The slice bounds characters without a width.
    for sign in text[:columns]:
        shown = visible(sign)
        width += cells(shown)
        if width > columns:
            break
        kept.append(shown)
    return "".join(kept)


class LogText:
    """Makes a log that comes in pieces printable: newlines, tabs, carriage returns and colours stay; all else that a
    terminal would obey is written out."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""
        self._has_colours = False

    def feed(self, data: bytes, final: bool = False) -> str:
        """Return what may be printed by now; a character or a colour that is cut waits for the next piece."""
        text = self._rest + self._decoder.decode(data, final)
        begun = None if final else _BEGUN_COLOUR.search(text)
        self._rest = begun[0] if begun else ""
        text = text.removesuffix(self._rest)
        return _CONTROLS_OF_LOGS.sub(self._written_out, text)

    def end(self) -> str:
        """Return what is left, and the code that resets colours."""
        return self.feed(b"", final=True) + ("\x1b[0m" if self._has_colours else "")

    def _written_out(self, found: re.Match[str]) -> str:
        if len(found[0]) > 1:
            self._has_colours = True
            return found[0]
        return ascii(found[0])[1:-1]


def print_line(text: str, file: TextIO | None = None) -> None:
    """Prints one line, at once, to stdout or the file."""
    print(visible(text), file=file or sys.stdout, flush=True)
