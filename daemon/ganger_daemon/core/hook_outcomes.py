"""What the end of a hook means for its node, and when a node that has failed its health check is healthy again. Hooks
are programs of the operator: prolog, epilog, health check."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

# Characters of a hook's last line, which is shown as the reason.
_LINE_MOST = 200
# Exit codes above this one, by the number of a signal, are a shell's for a program that the signal has killed.
_BEFORE_SIGNALS = 128
_LAST_SIGNAL = 64
_CONTROL_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")


@dataclass(frozen=True, slots=True)
class HookEnd:
    """How a hook ended. `code`: its exit code, as a shell has it; None: no code was recorded; `output`: the end of what
    it wrote; `is_late`: it was killed because its time was over."""

    code: int | None
    output: bytes = b""
    is_late: bool = False


def last_line(output: bytes) -> str:
    """Return the last line of an output that is not empty, without control sequences, of at most 200 characters."""
    lines = _CONTROL_SEQUENCE.sub("", output.decode(errors="replace")).splitlines()
    plain = ("".join(sign if sign.isprintable() else " " for sign in line).strip() for line in reversed(lines))
    line = next(filter(None, plain), "")
    return line if len(line) <= _LINE_MOST else f"{line[: _LINE_MOST - 1]}…"


def hook_failure(name: str, end: HookEnd, timeout_s: float) -> str:
    """Return why a hook failed, as text for people; empty for a hook that ended with 0.

    name: "prolog", "epilog", "health check"; timeout_s: the time that it had, in seconds."""
    if end.is_late:
        how = f"did not end within {timeout_s:g} s and was killed"
    elif end.code is None:
        how = "ended, and how was not recorded"
    elif end.code == 0:
        return ""
    elif 0 < end.code - _BEFORE_SIGNALS <= _LAST_SIGNAL:
        how = f"was killed by signal {end.code - _BEFORE_SIGNALS}"
    else:
        how = f"exited with code {end.code}"
    line = last_line(end.output)
    return f"{name} {how}: {line}" if line else f"{name} {how}"


# Checks in a row that a node has to pass before it returns: at first, and at most.
FIRST_NEEDED = 3
MOST_NEEDED = 96
# A node that has passed so many times the checks that it needed is as one that never failed.
_CALM = 4


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """What the health checks of a node have shown. `fault`: why it is unhealthy; empty while it is healthy; `passed`:
    checks in a row that it has passed since it failed, or since it returned; `needed`: how many it needs, or needed
    last, to return; 0: it has not failed for long."""

    fault: str = ""
    passed: int = 0
    needed: int = 0

    @property
    def reason(self) -> str:
        """Why the node is out of service, as text for people; empty if it is healthy."""
        if not self.fault or not self.passed:
            return self.fault
        return f"{self.fault}; it has passed {self.passed} of the {self.needed} checks that it needs to return"


def after_check(record: CheckRecord, failure: str) -> CheckRecord:
    """Return the record after one more check. `failure`: why the check failed; empty for one that passed.

    One failure makes a node unhealthy. A node that fails again soon after its return needs twice as many checks as
    before, so that a fault that comes and goes moves jobs ever more rarely."""
    if failure:
        needed = record.needed
        if not record.fault:
            needed = min(MOST_NEEDED, max(FIRST_NEEDED, 2 * needed))
        return CheckRecord(failure, 0, needed)
    passed = record.passed + 1
    if record.fault:
        is_back = passed >= record.needed
        return CheckRecord("", 0, record.needed) if is_back else replace(record, passed=passed)
    return CheckRecord() if passed >= _CALM * record.needed else replace(record, passed=passed)
