"""What the system reports, as part of a sentence for people: in ranks, in programs and in commands."""

from __future__ import annotations

import errno


def os_reason(error: Exception) -> str:
    """Return why the system refused something, without the error's number. `error`: an OSError, or the
    UnicodeDecodeError of a file that is no text; of any other error the text."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError) and error.strerror:
        is_taken = error.errno == errno.EEXIST
        return "there is a file of this name" if is_taken else error.strerror[:1].lower() + error.strerror[1:]
    return str(error) or type(error).__name__


def os_failure(error: Exception) -> str:
    """Return "PATH: reason" for an error that names a path, else the reason alone."""
    path = getattr(error, "filename", None)
    return os_reason(error) if path is None else f"{path}: {os_reason(error)}"
