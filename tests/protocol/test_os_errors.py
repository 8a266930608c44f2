"""What the system reports reaches a user as a sentence, without the number of an error."""

from __future__ import annotations

import errno
import os
import socket

import pytest
from ganger.protocol.os_errors import os_failure, os_reason
from ganger.wire.endpoints import why_not_listening

NOT_TEXT = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/a"), "/a: no such file or directory"),
        (OSError(errno.EEXIST, os.strerror(errno.EEXIST), "/a"), "/a: there is a file of this name"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "no space left on device"),
        (OSError("storage has not answered within 5 s"), "storage has not answered within 5 s"),
        (OSError(), "OSError"),
        (NOT_TEXT, "it is not UTF-8 text"),
    ],
)
def test_an_error_of_the_system_is_a_reason(error: Exception, reason: str) -> None:
    assert os_failure(error) == reason
    assert os_reason(error) == reason.removeprefix("/a: ")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "the host name m.lab is not known; give a"),
        (OSError(errno.EADDRNOTAVAIL, "-"), "m.lab is not an address of this machine; give one of its own"),
        (OSError(errno.EADDRINUSE, "-"), "in use; stop the program that has port 80, or give another port"),
        (PermissionError(errno.EACCES, "-"), "port 80 is not permitted; give one above 1023"),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files; give another address"),
    ],
)
def test_what_is_wrong_with_an_address_to_listen_at_is_told_apart(error: OSError, reason: str) -> None:
    assert why_not_listening("m.lab:80", error).startswith(f"cannot listen on m.lab:80: {reason}")
