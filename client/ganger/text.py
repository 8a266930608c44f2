"""Amounts as people write them ("16G", "2h30m", "1.5" cores), as numbers; numbers, counts and errors of the system as
people read them; names of nodes as ranges, as Slurm writes them ("gpu[01-08,10],login"); and texts of others, safe for
a terminal. In ranks, in programs and in commands."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)
_MAX_BYTES = 1 << 50
# A century: longer durations are typing errors.
_MAX_S = 36_525 * 86_400.0
_MOST_CHARACTERS = 100
_S_BY_UNIT = {"d": 86_400, "h": 3_600, "m": 60, "s": 1, "ms": 0.001}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|d|h|m|s)")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{2})(?::(\d{2}))?")
_DAYS_HOURS = re.compile(r"(\d+)-(\d+)")
_BARE = re.compile(r"\d+(\.\d+)?")
# Control codes, which move the cursor, colour, or rename the window; ends of lines that are none; marks that turn the
# direction of what follows; bytes that were no text. Marks that join the parts of one sign stay.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROLS_BUT_NEWLINE = re.compile(f"(?!\n){CONTROLS.pattern}")


def parse_memory(text: object) -> int:
    """Return the bytes of "512M", "16G", "16GiB" (powers of 1024), "16GB" (powers of 1000) or "100B"; 0 needs no unit.

    Raises ValueError; also for a number without a unit, which would be MiB in Slurm.
    """
    plain = str(text).strip()
    match = _MEMORY.fullmatch(plain)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory: write for example 512M or 16G")
    number, prefix, suffix = float(match[1]), match[2].upper(), match[3].upper()
    factor = _DECIMAL_BYTES[f"{prefix}B"] if prefix and suffix == "B" else _BYTES[prefix]
    if number * factor > _MAX_BYTES:
        raise ValueError(f"{text!r} is more memory than there is: at most 1024T")
    if number and not (prefix or suffix):
        raise ValueError(f"{text!r} has no unit: write {plain}M (MiB, as in Slurm), {plain}G or {plain}B (bytes)")
    return round(number * factor)


def parse_duration(text: object) -> float:
    """Return the seconds of "2h30m", "90s" or "1d", or as in Slurm "12:30:00", "1-12:00:00"; 0 needs no unit.

    Raises ValueError; also for a number without a unit, which would be minutes in Slurm.
    """
    is_other = isinstance(text, bool) or not isinstance(text, (str, int, float))
    plain = "" if is_other else str(text).strip().lower()
    is_bare = _BARE.fullmatch(plain) is not None
    seconds = float(plain) if is_bare and len(plain) <= _MOST_CHARACTERS else _parsed_s(plain)
    # Not a comparison the other way round: NaN is refused too.
    if not 0 <= seconds <= _MAX_S:
        raise ValueError(f"{text!r} is not a duration: write for example 90s, 2h30m or 1d, at most a century")
    if is_bare and seconds:
        raise ValueError(f"{text!r} has no unit: write {plain}s, {plain}m or {plain}h")
    return seconds


def _parsed_s(plain: str) -> float:
    """Return a duration with units or colons in seconds; negative for text that is none."""
    # A search for parts in digits without end takes the square of their number.
    if len(plain) > _MOST_CHARACTERS:
        return -1.0
    if clock := _CLOCK.fullmatch(plain):
        days, first, second, third = (int(part) if part else 0 for part in clock.groups())
        # As in Slurm: two fields are minutes:seconds, after days hours:minutes.
        if clock[4] is not None or clock[1] is not None:
            return days * 86_400 + first * 3_600 + second * 60 + third
        return first * 60 + second
    if found := _DAYS_HOURS.fullmatch(plain):
        return int(found[1]) * 86_400 + int(found[2]) * 3_600
    parts = _DURATION_PART.findall(plain)
    if not parts or re.sub(r"\s", "", _DURATION_PART.sub("", plain)):
        return -1.0
    return sum(float(number) * _S_BY_UNIT[unit] for number, unit in parts)


def parse_cores(text: object) -> int:
    """Millicores of a number of cores, "2" or "0.5". Raises ValueError."""
    try:
        cores = float(text) if isinstance(text, (str, int, float)) else -1.0
    except (ValueError, OverflowError):
        cores = -1.0
    if not 0.001 <= cores <= 65_536:
        raise ValueError(f"{text!r} is not a number of cores: write for example 2 or 0.5")
    return round(cores * 1_000)


def format_memory(count: int) -> str:
    """ "16G", "1.5G", "512M", "100B"."""
    for prefix in ("T", "G", "M", "K"):
        if count >= _BYTES[prefix]:
            return f"{count / _BYTES[prefix]:.1f}".removesuffix(".0") + prefix
    return f"{count}B" if count else "0"


def format_duration(seconds: float) -> str:
    """The two largest units: "2h 30m", "45s", "3d 4h"; "0.3s" below ten seconds."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    rest = round(seconds)
    parts = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        amount, rest = divmod(rest, size)
        if amount:
            parts.append(f"{amount}{unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def format_cores(millicores: int) -> str:
    return f"{millicores / 1_000:g}"


def format_ranges(numbers: Iterable[int], width: int = 0) -> str:
    """ "0-3,6" of ascending numbers. `width`: digits to which each is filled with zeros."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ",".join("-".join([str(end).zfill(width) for end in dict.fromkeys(one)]) for one in ranges)


def counted(count: float | str, noun: str, spec: str = "") -> str:
    """ "1 job", "2 jobs", "0.5 cores": a number, or the text of one, with its noun. `spec`: as in f-strings."""
    shown = f"{count:{spec}}"
    if shown == "1":
        return f"{shown} {noun}"
    if noun.endswith("ry"):
        return f"{shown} {noun[:-1]}ies"
    return f"{shown} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def meant(name: str, known: Iterable[str]) -> str:
    """Return "is it gpus?" for an unknown name, of the most similar known one; "there are gpus, tasks" if none is."""
    from difflib import get_close_matches

    names = sorted(known)
    near = get_close_matches(name[:_MOST_CHARACTERS], names, 1)
    return f"is it {near[0]}?" if near else f"there are {', '.join(names)}"


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


def visible(text: str, lines: bool = False) -> str:
    """Return the text with each sign that a terminal would obey written out, as Python does: \\x1b. lines: newlines
    stay what they are."""
    if text.isprintable():
        return text
    return (_CONTROLS_BUT_NEWLINE if lines else CONTROLS).sub(lambda found: ascii(found[0])[1:-1], text)


# -- node names as ranges ----------------------------------------------------------------------------------------------

# More names than any cluster has nodes.
_MOST_NAMES: Final = 100_000
_PART: Final = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_SPAN: Final = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_NUMBERED: Final = re.compile(r"(.*?)(\d+)", re.ASCII)


def expand_names(text: str) -> tuple[str, ...]:
    """Return the names that a list of names and ranges stands for, each once. Raises ValueError."""
    found: dict[str, None] = {}
    for item in _items(text):
        parts = _PART.findall(item)
        if not parts or "".join(parts) != item:
            raise ValueError(f"{item!r} is no name of a node: write n1, or gpu[01-08,10] for several")
        choices = [_numbers(part, item) if part.startswith("[") else [part] for part in parts]
        for chosen in product(*choices):
            found["".join(chosen)] = None
            if len(found) > _MOST_NAMES:
                raise ValueError(f"{text[:60]!r} stands for more than {_MOST_NAMES} nodes")
    return tuple(found)


def _items(text: str) -> Iterator[str]:
    """Yield what commas outside of brackets separate."""
    depth, item = 0, ""
    for sign in text:
        depth += (sign == "[") - (sign == "]")
        if sign == "," and not depth:
            yield item.strip()
            item = ""
        else:
            item += sign
    if item.strip():
        yield item.strip()


def _numbers(bracket: str, item: str) -> list[str]:
    """Return the numbers that "[01-08,10]" stands for, with the zeros that they begin with."""
    found: list[str] = []
    for span in bracket[1:-1].split(","):
        match = _SPAN.fullmatch(span.strip())
        if match is None:
            raise ValueError(f"{item!r}: {span!r} is no number and no range such as 01-08")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST_NAMES:
            raise ValueError(f"{item!r}: {span!r} is no range from a smaller to a larger number")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def compress_names(names: Iterable[str]) -> str:
    """Return names as ranges, which `expand_names` reads: "gpu[01-08,10],login"."""
    plain, numbered = [], []
    for name in sorted(set(names)):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.append(name)
        else:
            numbered.append((match[1], match[2]))
    # Numbers that begin with zeros go together with those of as many digits.
    padded = {(stem, len(digits)) for stem, digits in numbered if digits.startswith("0")}
    by_stem: dict[tuple[str, int], list[int]] = {}
    for stem, digits in numbered:
        width = len(digits) if (stem, len(digits)) in padded else 0
        by_stem.setdefault((stem, width), []).append(int(digits))
    found = []
    for (stem, width), numbers in by_stem.items():
        spans = format_ranges(sorted(numbers), width)
        found.append(f"{stem}{spans}" if spans.isdecimal() else f"{stem}[{spans}]")
    return ",".join(sorted(found + plain))
