"""Seconds and the wire's times. Inside the programs a duration is float seconds, an instant is float Unix seconds."""

from __future__ import annotations

from datetime import UTC, datetime
from math import floor

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_NS_PER_S = 1_000_000_000
# Ten thousand years: what a Duration may hold by its own definition.
_SECONDS_LIMIT = 315_576_000_000


def duration(seconds: float) -> Duration:
    """Seconds, negative ones too, as a Duration, rounded to nanoseconds; more than it can hold becomes what it can."""
    nanos = round(max(-_SECONDS_LIMIT, min(seconds, _SECONDS_LIMIT)) * _NS_PER_S)
    sign = -1 if nanos < 0 else 1
    whole, rest = divmod(abs(nanos), _NS_PER_S)
    return Duration(seconds=sign * whole, nanos=sign * rest)


def seconds(value: Duration) -> float:
    """The float nearest to the duration: that of `round(seconds, 9)`."""
    return (value.seconds * _NS_PER_S + value.nanos) / _NS_PER_S


def timestamp(unix_s: float) -> Timestamp:
    """Unix seconds as a Timestamp, rounded to nanoseconds; `unix_s` returns an instant of today exactly."""
    # A float has not the digits for the nanoseconds since 1970.
    whole = floor(unix_s)
    return timestamp_of_ns(whole * _NS_PER_S + round((unix_s - whole) * _NS_PER_S))


def timestamp_of_ns(unix_ns: int) -> Timestamp:
    """Return Unix nanoseconds as a Timestamp, exactly."""
    whole, nanos = divmod(unix_ns, _NS_PER_S)
    return Timestamp(seconds=whole, nanos=nanos)


def unix_s(value: Timestamp) -> float:
    return value.seconds + value.nanos / _NS_PER_S


def local_datetime(value: Timestamp) -> datetime:
    """The instant in the machine's time zone, for people; the first or the last one of Python's years for others."""
    try:
        return datetime.fromtimestamp(unix_s(value), tz=UTC).astimezone()
    except (OverflowError, ValueError):
        return datetime.max.replace(tzinfo=UTC) if value.seconds > 0 else datetime.min.replace(tzinfo=UTC)
