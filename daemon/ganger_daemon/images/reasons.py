"""Reasons in plain words for what CRIU writes to its log."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LINE = re.compile(r"^(?:\(\s*[\d.]+\)\s*)?(?:\s*\d+:\s*)?Error \(([^)]*)\):\s*(.*)$")

PORT_IN_USE = "a network port of the image is in use on this node"

# What a message of CRIU means, most telling first. Named groups of the pattern are put into the text.
_MEANINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"Can't bind inet socket .*Address already in use|Can't connect inet socket", PORT_IN_USE),
        (r"io_uring", "a process uses io_uring, which cannot be saved"),
        (r"Connected TCP socket", "a process has an open TCP connection"),
        (r"External socket is used", "a process is connected to a program outside the job"),
        (
            r"[Pp]acket socket|[Nn]etlink|[Uu]nsupported socket|Unsupported proto",
            "a process has an unusual kind of socket",
        ),
        (
            r"ghost file (?P<path>\S+) of (?P<size>\d+) size",
            "{path}, removed and still open, has {size} bytes: too many",
        ),
        (r"Can't .*?(?P<path>/dev/nvidia[^\s)]*)", "a process still uses the GPU through {path}"),
        (
            r"Can't dump file .* of that type|[Cc]haracter device|[Bb]lock device",
            "a process uses a device or file of a kind that cannot be saved",
        ),
        (
            r"File (?P<path>\S+) has bad size (?P<found>\d+) \(expect (?P<wanted>\d+)\)",
            "/{path} has {found} bytes; it had {wanted} when the image was made",
        ),
        (
            r"File (?P<path>\S+) has bad (?:build-ID|mode|checksum)",
            "/{path} is another file than when the image was made",
        ),
        (r"Can't open file (?P<path>\S+) on restore", "/{path} cannot be opened"),
        (
            r"Can't fork for \d+: File exists|[Pp]id \d+ (?:mismatch|do not match)",
            "a process id of the image is in use",
        ),
        (
            r"CPU capabilities do not match|CPU .*not (?:compatible|match)",
            "the image needs a processor with other instructions",
        ),
        (
            r"get rlimit .*not permitted",
            "the daemon lacks CAP_SYS_RESOURCE, which images of other users' processes need",
        ),
        (r"No space left on device", "there is no space left for the image"),
        (r"Cannot allocate memory", "there is not enough memory"),
        (r"[Ff]ile lock", "a process holds a file lock that cannot be saved"),
        (r"PTRACE_SEIZE|[Pp]trace|Unable to (?:attach|seize)", "a process is being debugged, or may not be traced"),
    )
)

_NVIDIA = "/dev/nvidia"
# What a descriptor points to that no image can hold, by the beginning of its link in /proc.
_UNSAVABLE = (
    ("anon_inode:[io_uring]", "uses io_uring"),
    (_NVIDIA, "uses a GPU"),
    ("/dev/kfd", "uses a GPU"),
    ("/dev/infiniband/", "uses RDMA"),
    ("/dev/fuse", "serves a file system"),
    ("anon_inode:[perf_event]", "measures performance"),
    ("anon_inode:bpf-", "uses BPF"),
    ("anon_inode:[userfaultfd]", "uses userfaultfd"),
)


def unsavable(descriptors: Mapping[int, str], pid: int, program: str, gpu_obstacle: str) -> tuple[str, ...]:
    """Return what of a process's descriptors no image can hold. `descriptors`: as the links in /proc/PID/fd name it.
    `gpu_obstacle`: why the GPU's driver cannot close what belongs to it; empty if it can."""
    return tuple(
        f"{text} ({target}, descriptor {number} of {program}, pid {pid}){': ' + gpu_obstacle if is_gpu else ''}"
        for number, target in sorted(descriptors.items())
        for beginning, text in _UNSAVABLE
        for is_gpu in (beginning == _NVIDIA,)
        if target.startswith(beginning) and not (is_gpu and not gpu_obstacle)
    )


# Messages that say nothing of the cause.
_CONSEQUENCES = re.compile(
    r"rlimit:|Dumping FAILED|Dump .*failed|Restoring FAILED|exited, status|exited with|action scripts? failed|^\s*$"
    r"|Can't dump (?:task|processes)|Dump (?:core|files) \(pid|Collect mappings|Can't open vma|cgroupd: recv req error"
)


def errors_of(log: str) -> tuple[str, ...]:
    """Return the messages of the log's error lines that may name a cause, in order."""
    found = (match.group(2).strip() for line in log.splitlines() if (match := _LINE.match(line)))
    return tuple(message for message in found if not _CONSEQUENCES.search(message))


def reason_of(log: str) -> str:
    """Return why a dump or restore failed, from its log; empty if the log names no error.

    A known message is put in plain words, with CRIU's own behind it. Of several known ones the first in the log counts,
    as those after it tend to follow from it."""
    messages = errors_of(log)
    for message in messages:
        for pattern, text in _MEANINGS:
            if (match := pattern.search(message)) is not None:
                named = {name: value or "" for name, value in match.groupdict().items()}
                return f"{text.format(**named)} (CRIU: {message})"
    return f"CRIU: {messages[-1]}" if messages else ""
