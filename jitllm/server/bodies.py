"""What the bodies of the control plane may say: tables of fields. Pure."""

from collections.abc import Mapping
from typing import Any

from jitllm.errors import UsageError
from jitllm.placement.devices import HOST
from jitllm.server.errors import bad_value
from jitllm.server.fields import Kind, choice, integer, read_object, shown, text
from jitllm.units import parse_size

_MANY = 2**31 - 1


def _read_size(value: Any, name: str) -> int:
    if isinstance(value, str):
        try:
            return parse_size(value)
        except UsageError as error:
            raise bad_value(name, f"{name}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise bad_value(name, f"{name} has to be bytes or a size as 400K, but is {shown(value)}")
    return value


def _read_place(value: Any, name: str) -> str:
    place = text(64, min_chars=1).read(value, name).lower()
    return HOST if place in ("cpu", "cpu:0") else place


SIZE = Kind(_read_size, {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]})
PLACE = Kind(_read_place, {"type": "string", "minLength": 1, "maxLength": 64})

LOAD: dict[str, Kind] = {
    "file": text(1024, min_chars=1),
    "id": text(64, min_chars=1),
    "devices": text(256, min_chars=1),
    "placement": text(1024, min_chars=1),
    "maxmem": SIZE,
    "gpu_layers": integer(0, _MANY),
    "max_seq": integer(1, _MANY),
    "kv": choice("f16", "f32"),
    "process_limit": SIZE,
}
"""`POST /jitllm/models`. A profile is a file, and files are the server's own to name."""
BUDGET: dict[str, Kind] = {"maxmem": SIZE}
"""`PUT .../budget`."""
PLACEMENT: dict[str, Kind] = {"placement": text(1024, min_chars=1)}
"""`PUT .../placement`: SEL=WHERE,... as `-placement` has it."""
MOVE: dict[str, Kind] = {"first": integer(0, _MANY), "last": integer(0, _MANY), "to": PLACE}
"""`POST .../placement/moves`."""
SESSION: dict[str, Kind] = {"model": text(256, min_chars=1)}
"""`POST /jitllm/sessions`."""
NOTHING: dict[str, Kind] = {}


def read(
    body: Mapping[str, Any], table: Mapping[str, Kind], required: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The fields of `body` that one of the tables above allows."""
    return read_object(body, table, required)
