"""Identity of processes: a pid is used again, a pid with its start time is not."""

from __future__ import annotations


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in kernel clock ticks; None if there is none. A zombie counts as gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
