"""Messages as plain values for --json: snake_case names, short enum names, numbers as numbers, ISO times, seconds."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ganger.wire import times


def plain(message: Message) -> Any:
    """Unset messages and choices are null, unset numbers zero, so that a script finds every key. Environments are left
    out."""
    if isinstance(message, Timestamp):
        return times.local_datetime(message).isoformat()
    if isinstance(message, Duration):
        return times.seconds(message)
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.name == "environment":
            continue
        result[field.name] = _field(message, field)
    return result


def print_json(value: Message | Iterable[Message] | Any) -> None:
    """One JSON value and a newline."""
    if isinstance(value, Message):
        value = plain(value)
    elif isinstance(value, list | tuple):
        value = [plain(each) if isinstance(each, Message) else each for each in value]
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def print_json_line(value: Message) -> None:
    """One JSON value on one line, for streams."""
    sys.stdout.write(json.dumps(plain(value)) + "\n")
    sys.stdout.flush()


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if _is_map(field):
        return {str(key): plain(each) if isinstance(each, Message) else each for key, each in sorted(value.items())}
    if field.is_repeated:
        return [_single(each, field) for each in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single(value, field)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _single(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else short_enum(known.name, field.enum_type.name)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value


def short_enum(name: str, enum: str) -> str:
    """ "STATE_PENDING" of enum State is "PENDING", "SUSPEND_LEVEL_OFFLOAD" of SuspendLevel is "OFFLOAD"."""
    prefix = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in enum).lstrip("_") + "_"
    return name.removeprefix(prefix)
