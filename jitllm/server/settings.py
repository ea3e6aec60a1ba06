"""What a server is told when it starts: one frozen dataclass, from flags or from a YAML file.

No jax here: the command line reads defaults and help from the field docstrings.
"""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml

from jitllm.errors import SettingError, UsageError
from jitllm.ranges import check_counts
from jitllm.units import parse_size

DEFAULT_ADDR = "127.0.0.1:4242"
_FOLDER = "models"
_SIZES = ("maxmem", "prefix_cache", "process_limit")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How one model is opened. Sizes are bytes."""

    devices: str | None = None
    """auto, all, cpu, gpu[:N] or PLATFORM[:N], comma separated, each with an optional =SIZE;
    unset: the profile's, or auto."""
    placement: str | None = None
    """SEL=WHERE,...: what goes where. SEL is N, A-B, head or *; WHERE is host or a device, with !
    (pinned) or ~ (streamed)."""
    profile: str | None = None
    """Placement profile, a YAML file; the other flags go before what it says."""
    maxmem: int | None = None
    """Memory for weights; unset: 80 % of what is free. The rest is read from disk as needed."""
    gpu_layers: int | None = None
    """How many of the last blocks go to devices unasked."""
    max_seq: int | None = None
    """Room for N tokens, prompt and reply together; unset: the model's limit, at most 4096."""
    kv: Literal["f16", "f32"] | None = None
    """Type of the cached keys and values; unset: f16, or what the profile says."""
    threads: int | None = None
    """CPU threads; unset: the physical cores this process may use."""
    process_limit: int | None = None
    """All that a model's ledger counts together, KV and prefix cache too; unset: no limit."""

    def __post_init__(self) -> None:
        """SettingError for a value that cannot be."""
        check_counts(self, maxmem=0, gpu_layers=0, max_seq=1, threads=1, process_limit=0)
        _check_choice(self, "kv", None, "f16", "f32")


@dataclass(frozen=True, kw_only=True)
class Settings(ModelOptions):
    """Everything a server is told."""

    addr: str = DEFAULT_ADDR
    """HOST:PORT to listen at; port 0 takes a free one. Other than loopback needs --api-key."""
    models: str | None = None
    """The folder that models are loaded from, and never from elsewhere; unset: models, which need
    not be there yet."""
    load: tuple[str, ...] = ()
    """File in that folder to load at the start; may be given several times."""
    id: tuple[str, ...] = ()
    """Name of the model in requests, one for each -load; unset: the file's without its ending."""
    sessions: int = 8
    """Replies of one model that are made at once; also how many sessions may be open."""
    max_queue: int = 32
    """Requests of one model that may wait; the next is answered with 429."""
    prefix_cache: int | None = None
    """Memory for KV of earlier prompts, per model; 0: none; unset: one session's KV, or what the
    process limit leaves."""
    api_key: str | None = None
    """Key that every request has to bring; unset: JITLLMD_API_KEY, or none."""
    admin_key: str | None = None
    """Key that changes to the server have to bring; unset: JITLLMD_ADMIN_KEY, or the api key and a
    client on this machine."""
    allow_host: tuple[str, ...] = ()
    """Further name under which the server may be addressed; may be given several times."""
    cors_origin: tuple[str, ...] = ()
    """Origin whose pages may send requests, as https://app.example; may be given several times."""
    log_format: Literal["text", "json"] = "text"
    """Form of the log on stderr."""

    def __post_init__(self) -> None:
        """UsageError for values that cannot be, alone or together."""
        super().__post_init__()
        split_addr(self.addr)
        if len(self.id) > len(self.load):
            spare = self.id[len(self.load)]
            raise SettingError("id", f"id {spare} has no file to load that it could name")
        check_counts(self, sessions=1, max_queue=0, prefix_cache=0)
        _check_choice(self, "log_format", "text", "json")
        for origin in self.cors_origin:
            if not origin.startswith(("http://", "https://")) or origin.endswith("/"):
                raise SettingError(
                    "cors_origin", f"cors_origin {origin!r} is no origin; write https://app.example"
                )

    @property
    def host(self) -> str:
        """Where to listen."""
        return split_addr(self.addr)[0]

    @property
    def port(self) -> int:
        """0: any that is free."""
        return split_addr(self.addr)[1]

    def check_bind(self) -> None:
        """UsageError where anybody could reach the server and nobody needs a key."""
        if not is_loopback(self.host) and not self.api_key:
            raise UsageError(
                f"-addr {self.addr} can be reached from other machines; add --api-key KEY, or "
                f"listen at {DEFAULT_ADDR}"
            )

    @property
    def folder(self) -> Path:
        """Where models are loaded from. UsageError where one was named and is none."""
        if self.models is not None and not Path(self.models).is_dir():
            what = "is not a folder" if Path(self.models).exists() else "is not there"
            raise UsageError(f"the folder of models {self.models} {what}; make it, or name another")
        return Path(self.models or _FOLDER)

    @property
    def n_slots(self) -> int:
        """Requests for text that may be under way, of all models: those of one, and a few more, so
        that it is the model's own queue that refuses where there is only one."""
        return self.sessions + self.max_queue + 4

    @property
    def options(self) -> ModelOptions:
        """How a model is opened where its own request says nothing else."""
        return ModelOptions(**{f.name: getattr(self, f.name) for f in fields(ModelOptions)})


def _check_choice(options: ModelOptions, name: str, *allowed: str | None) -> None:
    """SettingError for a field that is none of the values that it may have."""
    if (value := getattr(options, name)) not in allowed:
        words = " or ".join(filter(None, allowed))
        raise SettingError(name, f"{name} has to be {words}, but is {value!r}")


def split_addr(addr: str) -> tuple[str, int]:
    """(host, port) of `HOST:PORT` or `[IPV6]:PORT`. SettingError where it is neither."""
    host, colon, port = addr.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise SettingError("addr", f"addr {addr!r} is not HOST:PORT; write e.g. {DEFAULT_ADDR}")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise SettingError(
            "addr", f"addr {addr!r}: {port!r} is not a port; write e.g. {DEFAULT_ADDR}"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine and cannot be another."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def load_settings(path: str | Path, **overrides: Any) -> Settings:
    """The settings in a YAML file, each key a field of `Settings`, null for unset; `overrides` go
    before them."""
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except OSError as error:
        raise UsageError(f"settings {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"settings {path} are not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, Mapping):
        raise UsageError(f"settings {path} have to be KEY: VALUE lines")
    hints = get_type_hints(Settings)
    for key in content:
        if key not in hints:
            raise UsageError(f"settings {path}: unknown key {key!r}; known are {', '.join(hints)}")
    given = {
        key: _value(path, key, value, hints[key])
        for key, value in content.items()
        if value is not None
    }
    try:
        return Settings(**given | overrides)
    except UsageError as error:
        raise UsageError(f"settings {path}: {error}") from None


def _value(path: str | Path, key: str, value: Any, hint: Any) -> Any:
    """A YAML value as the field's type; sizes may be text."""
    if key in _SIZES and isinstance(value, str):
        try:
            return parse_size(value)
        except UsageError as error:
            raise UsageError(f"settings {path}: {key}: {error}") from None
    if hint == tuple[str, ...] and isinstance(value, list | str):
        return tuple(map(str, value)) if isinstance(value, list) else (value,)
    number = int in (hint, *get_args(hint))
    if isinstance(value, bool) or not isinstance(value, int if number else str):
        kind = "a whole number" if number else "a text"
        raise UsageError(f"settings {path}: {key} has to be {kind}, but is {value!r}")
    return value


def default_names() -> tuple[str, ...]:
    """Names of this machine, for a server that listens at all its addresses."""
    return socket.gethostname(), socket.getfqdn()
