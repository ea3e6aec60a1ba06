"""What an attention call works on: the shape a kernel is made for, its blocking, its record."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from jitllm.kernels.cpu.compile import Tier
from jitllm.kernels.cpu.ir import LANES, Function, Value, f32, i64, ptr
from jitllm.kernels.spec import AttentionSpec

CHUNK = 128
"""Keys whose scores are weighed together; boundaries lie at multiples of it in every call."""

# a tier's first word -> f32[16] accumulators a product may hold in registers
_ACCUMULATORS = {"avx512": 24, "avx2": 6, "generic": 3}
_MAX_ROWS = 12

SHARE_BYTES = 1 << 17
"""Cache bytes below which a call is no slower done alone (measured: about 100 KiB)."""


@dataclass(frozen=True)
class Shape:
    """Everything a kernel is compiled for; the rest it reads from its arguments."""

    head_dim: int
    group: int
    """Query heads that share a key-value head."""
    rope_dim: int
    rope_style: str
    stored: str
    """The caches' type: "f16" or "f32"."""

    @classmethod
    def of(cls, spec: AttentionSpec, dtype: str) -> Shape:
        """The shape that serves `spec` over caches of numpy type `dtype`."""
        group = spec.n_heads // spec.n_kv_heads
        stored = {"float16": "f16", "float32": "f32"}[dtype]
        return cls(spec.head_dim, group, spec.rope_dim, spec.rope_style, stored)

    @property
    def name(self) -> str:
        """Names the kernel, its object code and its FFI target."""
        rope = f"{self.rope_style}{self.rope_dim}"
        return f"attention-h{self.head_dim}-g{self.group}-{rope}-{self.stored}"

    @property
    def value_bytes(self) -> int:
        """Bytes of one cached value."""
        return 2 if self.stored == "f16" else 4

    @property
    def lanes(self) -> int:
        """Consecutive values of a head that one vector holds."""
        return gcd(self.head_dim, LANES)

    @property
    def head_bytes(self) -> int:
        """Bytes of a head as f32."""
        return 4 * self.head_dim


@dataclass(frozen=True)
class Blocking:
    """How query rows are gathered so that they share every load of the caches.

    A key-value head's `group` of query heads is cut into `n_parts` parts of `heads` (the last one
    overlaps its neighbour where they do not come out even); a block holds one part of one position,
    or of `positions` consecutive ones.
    """

    shape: Shape
    accumulators: int

    @classmethod
    def of(cls, shape: Shape, t: Tier) -> Blocking:
        """The blocking for a tier's registers."""
        return cls(shape, _ACCUMULATORS[t.name.split("-")[0]])

    @property
    def _max_rows(self) -> int:
        return min(self.accumulators, _MAX_ROWS)

    @property
    def n_parts(self) -> int:
        """Parts of a group of query heads."""
        return -(-self.shape.group // self._max_rows)

    @property
    def heads(self) -> int:
        """Query heads in a part."""
        return -(-self.shape.group // self.n_parts)

    @property
    def positions(self) -> int:
        """Positions in a full block."""
        return max(1, self._max_rows // self.heads)

    def tiles(self, rows: int) -> int:
        """Key tiles whose scores for `rows` rows are summed side by side: a power of two."""
        return min(4, 1 << ((self.accumulators // rows).bit_length() - 1))

    def columns(self, rows: int) -> int:
        """Vectors of a head's values that are summed side by side for `rows` rows."""
        n = self.shape.head_dim // self.shape.lanes
        fits = max(1, self.accumulators // rows)
        return max(c for c in range(1, min(n, fits) + 1) if n % c == 0)

    def part_bytes(self, rows: int) -> int:
        """Bytes of a partial result: f32 maxima [16], sums [16], weighted values [rows][H]."""
        return 2 * 4 * LANES + -(-rows * self.shape.head_bytes // 64) * 64


class Job:
    """The record the threads of a call share: fields of 8 bytes, by name."""

    _POINTERS = ("q", "k", "v", "rope", "q_norm", "k_norm", "out", "k_cache", "v_cache", "scratch",
                 "next_keys")  # fmt: skip
    _NUMBERS = ("pos", "n_tokens", "capacity", "n_kv_heads", "n_heads", "window", "first_chunk",
                "n_chunks", "n_blocks", "n_singles")  # fmt: skip
    _FLOATS = ("q_scale", "softcap", "eps")
    _FIELDS = (*_POINTERS, *_NUMBERS, *_FLOATS)
    BYTES = 8 * len(_FIELDS)

    def __init__(self, f: Function, address: Value | None = None):
        self.f = f
        self.address = f.stack(i64, len(self._FIELDS), align=8) if address is None else address

    def __getattr__(self, name: str) -> Value:
        t = ptr if name in self._POINTERS else f32 if name in self._FLOATS else i64
        return self.f.load(self.address, t, 8 * self._FIELDS.index(name), align=8)

    def put(self, **values: Value) -> None:
        """Fill in fields."""
        for name, x in values.items():
            self.f.store(x, self.address, 8 * self._FIELDS.index(name), align=8)
