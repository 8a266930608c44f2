"""What others have named or written, as it may be shown on a terminal: it draws nothing but its signs."""

from __future__ import annotations

import re
import sys
from typing import TextIO

# Control codes, which move the cursor, colour, or rename the window; ends of lines that are none; marks that turn the
# direction of what follows; bytes that were no text. Marks that join the parts of one sign stay.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROLS_BUT_NEWLINE = re.compile(f"(?!\n){_CONTROLS.pattern}")


def visible(text: str, lines: bool = False) -> str:
    """The text with each sign that a terminal would obey written out, as Python does: \\x1b. With `lines` newlines stay
    what they are."""
    if text.isprintable():
        return text
    return (_CONTROLS_BUT_NEWLINE if lines else _CONTROLS).sub(lambda found: ascii(found[0])[1:-1], text)


def print_line(text: str, file: TextIO | None = None) -> None:
    """Prints one line, at once, to stdout or the file."""
    print(visible(text), file=file or sys.stdout, flush=True)
