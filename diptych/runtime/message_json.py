"""JSON of protobuf messages for scripts and pages: names of the protocol, and numbers as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def message_members(message: Message, *, short_enums: bool = False) -> dict[str, Any]:
    """Return the members of a message, those at their default included.

    Args:
        short_enums: write `WORKER_STATE_READY` as `ready`.
    """
    members: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _simplify(members, message.DESCRIPTOR.fields_by_name, short_enums)


def _simplify(members: Mapping[str, Any], fields: Mapping[str, Any], short_enums: bool) -> dict[str, Any]:
    def simple(field: Any, value: Any) -> Any:
        if isinstance(value, list):
            return [simple(field, one) for one in value]
        if isinstance(value, dict):
            return _simplify(value, field.message_type.fields_by_name, short_enums)
        if field.cpp_type in _LONG:  # protobuf's JSON has them as text
            return int(value)
        if short_enums and field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
            return str(value).removeprefix(prefix).lower()
        return value

    return {name: simple(fields[name], value) for name, value in members.items()}
