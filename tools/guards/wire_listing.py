"""List the messages of the wire, and report changes that break a recorded version of it.

`PYTHONPATH=tools python -m guards.wire_listing` compares the generated code with the recorded listings, one for each
version of the wire in tests/contracts/wire; `--record` writes the listing of the present version (`make wire`).
Between two versions a field keeps its number, type and label, and a number that is no longer used is reserved. Within
one version it keeps its name, too. Exit code 1 if something breaks a version or is not recorded.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ganger.wire.channels import NEWEST_VERSION
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from guards.source_files import REPOSITORY

LISTINGS = REPOSITORY / "tests" / "contracts" / "wire"
PROTOS = REPOSITORY / "protos"


class WireField(NamedTuple):
    """A field of a message, or a value of an enum, whose `type` is empty."""

    name: str
    # With its label: "string", "repeated ganger.v1.Claim", "optional bool", "oneof uint64", "map<string, double>".
    type: str


@dataclass
class WireType:
    """A message or an enum: its fields or values by number, and what is reserved in it."""

    kind: str
    fields: dict[int, WireField] = field(default_factory=dict)
    reserved: set[int] = field(default_factory=set)

    def gaps(self) -> list[int]:
        """Return the numbers below the highest one that are neither used nor reserved."""
        known = self.reserved.union(self.fields)
        return [number for number in range(min(known, default=1), max(known, default=0)) if number not in known]


class WireMethod(NamedTuple):
    """The types of a method's messages, "stream " before those of which there are many."""

    request: str
    response: str


@dataclass
class WireListing:
    types: dict[str, WireType] = field(default_factory=dict)
    methods: dict[str, WireMethod] = field(default_factory=dict)


# -- the generated code


def generated_modules(protos: Path = PROTOS) -> list[str]:
    """Return the names of the modules that are generated from the files of a directory of protos."""
    files = (file.relative_to(protos) for file in sorted(protos.rglob("*.proto")))
    return [".".join((*file.parent.parts, f"{file.stem}_pb2")) for file in files]


def present_listing() -> WireListing:
    """Return the listing of the generated code."""
    listing = WireListing()
    for name in generated_modules():
        file = FileDescriptorProto()
        importlib.import_module(name).DESCRIPTOR.CopyToProto(file)
        for message in file.message_type:
            _add_message(listing, file.package, message)
        for enum in file.enum_type:
            _add_enum(listing, file.package, enum)
        for service in file.service:
            for method in service.method:
                request = ("stream " if method.client_streaming else "") + method.input_type.lstrip(".")
                response = ("stream " if method.server_streaming else "") + method.output_type.lstrip(".")
                path = f"/{file.package}.{service.name}/{method.name}"
                listing.methods[path] = WireMethod(request, response)
    return listing


def _add_message(listing: WireListing, prefix: str, message: DescriptorProto) -> None:
    name = f"{prefix}.{message.name}"
    maps = {f".{name}.{one.name}": one for one in message.nested_type if one.options.map_entry}
    made = WireType("message", reserved={n for r in message.reserved_range for n in range(r.start, r.end)})
    made.fields = {one.number: WireField(one.name, _type_of(one, maps)) for one in message.field}
    listing.types[name] = made
    for nested in message.nested_type:
        if not nested.options.map_entry:
            _add_message(listing, name, nested)
    for enum in message.enum_type:
        _add_enum(listing, name, enum)


def _add_enum(listing: WireListing, prefix: str, enum: EnumDescriptorProto) -> None:
    # The ranges of enums include their end.
    made = WireType("enum", reserved={n for r in enum.reserved_range for n in range(r.start, r.end + 1)})
    made.fields = {value.number: WireField(value.name, "") for value in enum.value}
    listing.types[f"{prefix}.{enum.name}"] = made


def _type_of(one: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    if one.type_name in maps:
        key, value = maps[one.type_name].field
        return f"map<{_type_of(key, {})}, {_type_of(value, {})}>"
    label = "repeated " if one.label == FieldDescriptorProto.LABEL_REPEATED else ""
    if one.HasField("oneof_index"):
        label = "optional " if one.proto3_optional else "oneof "
    return label + (one.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(one.type).removeprefix("TYPE_").lower())


# -- the text


def text_of(listing: WireListing) -> str:
    """Return the listing as text, which `read_listing` reads: types and methods by name, fields by number."""
    lines = []
    for name, one in sorted(listing.types.items()):
        lines.append(f"{one.kind} {name}")
        lines += [f"  {number} {made.name} {made.type}".rstrip() for number, made in sorted(one.fields.items())]
        lines += [f"  {number} reserved" for number in sorted(one.reserved)]
    lines += [
        f"method {path} {method.request} -> {method.response}" for path, method in sorted(listing.methods.items())
    ]
    return "\n".join(lines) + "\n"


def read_listing(text: str) -> WireListing:
    """Return the listing that `text_of` wrote. Raises ValueError for a line of another form."""
    listing, current = WireListing(), WireType("")
    for line in text.splitlines():
        if match := re.fullmatch(r"(message|enum) (\S+)", line):
            current = listing.types[match[2]] = WireType(match[1])
        elif match := re.fullmatch(r"method (\S+) (.+) -> (.+)", line):
            listing.methods[match[1]] = WireMethod(match[2], match[3])
        elif match := re.fullmatch(r"  (\d+) reserved", line):
            current.reserved.add(int(match[1]))
        elif match := re.fullmatch(r"  (\d+) (\S+) ?(.*)", line):
            current.fields[int(match[1])] = WireField(match[2], match[3])
        else:
            raise ValueError(f"no line of a listing of the wire: {line!r}")
    return listing


# -- what breaks a version


def breaks(old: WireListing, new: WireListing, *, has_same_names: bool) -> Iterator[str]:
    """Yield a sentence for each change from `old` to `new` that a peer of `old` cannot read, with what to do.

    Types are compared in pairs, from the methods down, so that a message may have another name. `has_same_names`: both
    are of one version, where fields and messages keep their names."""
    pairs: dict[tuple[str, str], None] = {}
    for path, method in old.methods.items():
        now = new.methods.get(path)
        if now is None:
            yield f"{path} is gone: keep the method as long as its version of the wire is supported"
            continue
        for before, after in zip(method, now, strict=True):
            if before.startswith("stream ") != after.startswith("stream "):
                yield f"{path} was {before!r}, is {after!r}: give the new form a new name, and keep the old method"
            pairs[before.removeprefix("stream "), after.removeprefix("stream ")] = None
    compared: set[tuple[str, str]] = set()
    while pairs:
        pair = next(iter(pairs))
        del pairs[pair]
        if pair in compared or not (pair[0] in old.types and pair[1] in new.types):
            continue
        compared.add(pair)
        if has_same_names and pair[0] != pair[1]:
            yield f"{pair[0]} is {pair[1]} now: keep the name, or raise NEWEST_VERSION of ganger.wire.channels"
        before_type, after_type = old.types[pair[0]], new.types[pair[1]]
        yield from _type_breaks(pair[1], before_type, after_type, has_same_names=has_same_names)
        for number, one in before_type.fields.items():
            if number in after_type.fields:
                pairs.update(dict.fromkeys(_type_pairs(one.type, after_type.fields[number].type)))


def _type_breaks(name: str, old: WireType, new: WireType, *, has_same_names: bool) -> Iterator[str]:
    for number, before in old.fields.items():
        now = new.fields.get(number)
        if now is None:
            if number not in new.reserved:
                yield f"{name}: {before.name} = {number} is gone: write `reserved {number};` in its place"
        elif _shape(before.type) != _shape(now.type):
            yield (
                f"{name}: {now.name} = {number} was {before.type!r}, is {now.type!r}: give the new type a new number, "
                f"and write `reserved {number};`"
            )
        elif has_same_names and before.name != now.name:
            yield (
                f"{name}: {before.name} = {number} is {now.name} now: keep the name, or raise NEWEST_VERSION of "
                "ganger.wire.channels"
            )
    for number in sorted(old.reserved.intersection(new.fields)):
        yield f"{name}: {new.fields[number].name} = {number} was reserved: take a number that was never used"


_NAMED = re.compile(r"ganger\.[\w.]+")


def _shape(type_name: str) -> str:
    return _NAMED.sub("*", type_name)


def _type_pairs(before: str, after: str) -> Iterable[tuple[str, str]]:
    return zip(_NAMED.findall(before), _NAMED.findall(after), strict=False)


def gaps_in(listing: WireListing) -> Iterator[str]:
    """Yield a sentence for each type of which a number is neither used nor reserved."""
    for name, one in sorted(listing.types.items()):
        if gaps := one.gaps():
            numbers = ", ".join(map(str, gaps))
            yield f"{name}: nothing has the numbers {numbers}: use them, or write `reserved {numbers};`"


def listing_file(version: int) -> Path:
    """Return the file of the recorded listing of a version of the wire."""
    return LISTINGS / f"version-{version}.txt"


def problems() -> list[str]:
    """Return what breaks a recorded version, or leaves a gap in the numbers."""
    new, found = present_listing(), []
    for version in range(1, NEWEST_VERSION + 1):
        file = listing_file(version)
        if file.exists():
            old = read_listing(file.read_text())
            broken = breaks(old, new, has_same_names=version == NEWEST_VERSION)
            found += [f"version {version}: {sentence}" for sentence in broken]
    return found + list(gaps_in(new))


def unrecorded() -> list[str]:
    """Return one sentence if the recorded listing of the present version is not that of the generated code."""
    file = listing_file(NEWEST_VERSION)
    if file.exists() and file.read_text() == text_of(present_listing()):
        return []
    return [f"{file.relative_to(REPOSITORY)} is not what protos/ says: make wire"]


if __name__ == "__main__":
    FOUND = problems()
    if "--record" in sys.argv and not FOUND:
        listing_file(NEWEST_VERSION).write_text(text_of(present_listing()))
    print(*FOUND, *unrecorded(), sep="\n")
    sys.exit(bool(FOUND or unrecorded()))
