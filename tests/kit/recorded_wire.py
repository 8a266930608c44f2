"""Messages of a recorded version of the wire, for tests that act as a peer of that version."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pool, duration_pb2, message_factory, timestamp_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from guards.wire_listing import WireField, listing_file, read_listing

_LABEL = re.compile(r"(repeated|optional|oneof) ")
_MAP = re.compile(r"map<(.+), (.+)>")


class RecordedWire:
    """The message classes of a version, by their full name, made of its listing alone."""

    def __init__(self, version: int) -> None:
        self.listing = read_listing(listing_file(version).read_text())
        self._pool = descriptor_pool.DescriptorPool()
        file = FileDescriptorProto(name=f"version-{version}.proto", package="recorded", syntax="proto3")
        for module in (duration_pb2, timestamp_pb2):
            self._pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
            file.dependency.append(module.DESCRIPTOR.name)
        for name, one in self.listing.types.items():
            if one.kind == "enum":
                enum = file.enum_type.add(name=_flat(name))
                for number, value in one.fields.items():
                    enum.value.add(name=f"{_flat(name)}_{value.name}", number=number)
            else:
                message = file.message_type.add(name=_flat(name))
                for number, made in one.fields.items():
                    self._add_field(message, number, made)
        self._pool.Add(file)

    def message(self, name: str) -> Any:
        """Return the class of the message `name`, for example "ganger.v1.Job"."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"recorded.{_flat(name)}"))

    def call(self, channel: Any, path: str) -> Any:
        """Return the callable of a method without streams on `channel`, in messages of this version."""
        method = self.listing.methods[path]
        request, response = self.message(method.request), self.message(method.response)
        return channel.unary_unary(path, request.SerializeToString, response.FromString)

    def _add_field(self, message: DescriptorProto, number: int, made: WireField) -> None:
        if match := _MAP.fullmatch(made.type):
            entry = message.nested_type.add(name=made.name.title().replace("_", "") + "Entry")
            entry.options.map_entry = True
            for at, (name, kind) in enumerate(zip(("key", "value"), match.groups(), strict=True), 1):
                self._add_field(entry, at, WireField(name, kind))
            type_name = f".recorded.{message.name}.{entry.name}"
            message.field.add(
                name=made.name,
                number=number,
                label=FieldDescriptorProto.LABEL_REPEATED,
                type=FieldDescriptorProto.TYPE_MESSAGE,
                type_name=type_name,
            )
            return
        label = _LABEL.match(made.type)
        kind = made.type[label.end() :] if label else made.type
        field = message.field.add(name=made.name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if label and label[1] == "repeated":
            field.label = FieldDescriptorProto.LABEL_REPEATED
        if "." not in kind:
            field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
        elif (known := self.listing.types.get(kind)) is not None:
            is_enum = known.kind == "enum"
            field.type = FieldDescriptorProto.TYPE_ENUM if is_enum else FieldDescriptorProto.TYPE_MESSAGE
            field.type_name = f".recorded.{_flat(kind)}"
        else:
            field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{kind}"


def _flat(name: str) -> str:
    return name.replace(".", "_")
