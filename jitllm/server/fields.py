"""The kinds of value that a request field may have: each checks a JSON value and has a JSON schema.

`null` never arrives here: it means that the field is absent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jitllm.ranges import Range
from jitllm.server.errors import ApiError, bad_value

Read = Callable[[Any, str], Any]
"""read(value, name) -> the value; raises ApiError, naming the field."""


@dataclass(frozen=True)
class Kind:
    """How one field is read, and what is said about it in the OpenAPI document."""

    read: Read
    schema: dict[str, Any]


def shown(value: Any) -> str:
    """`value` for an error message: short, whatever was sent."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def integer(low: int, high: int) -> Kind:
    """A whole number from `low` to `high`; `true` is none."""

    read = _read_in(Range(int, low, high))
    return Kind(read, {"type": "integer", "minimum": low, "maximum": high})


def number(low: float, high: float) -> Kind:
    """A number from `low` to `high`."""
    read = _read_in(Range(float, low, high))
    return Kind(read, {"type": "number", "minimum": low, "maximum": high})


def _read_in(allowed: Range) -> Read:
    def read(value: Any, name: str) -> Any:
        if not allowed.holds(value):
            raise bad_value(name, f"{name} has to be {allowed}, but is {shown(value)}")
        return allowed.kind(value)

    return read


def boolean() -> Kind:
    """`true` or `false`."""

    def read(value: Any, name: str) -> bool:
        if not isinstance(value, bool):
            raise bad_value(name, f"{name} has to be true or false, but is {shown(value)}")
        return value

    return Kind(read, {"type": "boolean"})


def choice(*values: str) -> Kind:
    """One of these strings."""

    def read(value: Any, name: str) -> str:
        if value not in values:
            raise bad_value(name, f"{name} has to be {' or '.join(values)}, but is {shown(value)}")
        return value

    return Kind(read, {"enum": list(values)})


def text(max_chars: int, min_chars: int = 0) -> Kind:
    """A string of so many characters."""

    def read(value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise bad_value(name, f"{name} has to be a string, but is {shown(value)}")
        if not min_chars <= len(value) <= max_chars:
            raise bad_value(
                name,
                f"{name} has to be of {min_chars} to {max_chars} characters, "
                f"but is of {len(value)}",
            )
        return value

    return Kind(read, {"type": "string", "minLength": min_chars, "maxLength": max_chars})


def items(of: Kind, max_items: int, min_items: int = 0) -> Kind:
    """A list of so many values of one kind, as a tuple."""

    def read(value: Any, name: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise bad_value(name, f"{name} has to be a list, but is {shown(value)}")
        if not min_items <= len(value) <= max_items:
            raise bad_value(
                name, f"{name} has to be a list of {min_items} to {max_items}, not {len(value)}"
            )
        return tuple(of.read(item, f"{name}[{i}]") for i, item in enumerate(value))

    schema = {"type": "array", "items": of.schema, "minItems": min_items, "maxItems": max_items}
    return Kind(read, schema)


def fields_of(fields: Mapping[str, Kind], *, required: tuple[str, ...] = ()) -> Kind:
    """An object of these fields and no other, as a dict of those that are there."""

    def read(value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise bad_value(name, f"{name} has to be an object, but is {shown(value)}")
        return read_object(value, fields, required, prefix=f"{name}.")

    return Kind(read, object_schema(fields, required))


def read_object(
    body: Mapping[str, Any],
    fields: Mapping[str, Kind],
    required: tuple[str, ...] = (),
    prefix: str = "",
) -> dict[str, Any]:
    """The fields of `body` that are there and not null, each read by its kind.

    ApiError for a field that is not in the table and for a required one that is missing.
    """
    for name in body:
        if name not in fields:
            raise ApiError(
                400,
                f"{shown(prefix + name)} is not a field that this server knows",
                code="unknown_parameter",
                param=prefix + name[:80],
            )
    for name in required:
        if body.get(name) is None:
            raise ApiError(
                400,
                f"{prefix}{name} is missing",
                code="missing_required_parameter",
                param=prefix + name,
            )
    given = {name: value for name, value in body.items() if value is not None}
    return {name: fields[name].read(value, prefix + name) for name, value in given.items()}


def object_schema(fields: Mapping[str, Kind], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON schema of `read_object`: what is not required may be null."""
    properties = {
        name: kind.schema if name in required else nullable(kind.schema)
        for name, kind in fields.items()
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": list(required)} if required else {})


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, or null."""
    return {"anyOf": [schema, {"type": "null"}]}
