"""What a product call does first: its activations, normalised and quantised into scratch.

A call is described by a *job*: 8-byte fields on the handler's stack that all its threads read,
those of `JOB` and then those of `WEIGHT` for each weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite.ir import Type

from jitllm.kernels.cpu.formats import STEP
from jitllm.kernels.cpu.ir import Function, Module, Value, f32, i8, i32, i64, ptr, vec, void
from jitllm.kernels.cpu.norm import VECTOR, rms
from jitllm.kernels.cpu.steps import STEP_BYTES
from jitllm.kernels.cpu.vmath import round_bits

JOB: dict[str, Type] = {
    "n_tokens": i64,
    "k": i64,
    "x": ptr,
    "norm": ptr,  # null: none; so are ints, floats, add and bias
    "eps": i64,  # the bits of an f32
    "ints": ptr,  # scratch for quantised activations, and the tokens of its blocks
    "ints_block": i64,
    "floats": ptr,
    "floats_block": i64,
    "n_weights": i64,
    "add": ptr,
    "activation": i64,
}
WEIGHT: dict[str, Type] = {
    "tiles": ptr,
    "tile_bytes": i64,
    "n_rows": i64,
    "n_tiles": i64,
    "first_item": i64,  # its part of the call's items: tiles, or pairs of tiles
    "n_items": i64,
    "one": ptr,
    "few": ptr,
    "unpack": ptr,
    "panel": ptr,
    "panel_steps": i64,
    "steps": i64,
    "x": ptr,  # the activations in the form this weight meets
    "x_block_bytes": i64,
    "x_step_bytes": i64,
    "block_tokens": i64,
    "y": ptr,
    "bias": ptr,
}
JOB_BYTES, WEIGHT_BYTES = 8 * len(JOB), 8 * len(WEIGHT)


@dataclass(frozen=True)
class Fields:
    """Named 8-byte fields at an address."""

    f: Function
    base: Value
    types: dict[str, Type]

    def __getitem__(self, name: str) -> Value:
        return self.f.load(self.base, self.types[name], 8 * list(self.types).index(name), 8)

    def __setitem__(self, name: str, x: Value | int) -> None:
        x = self.f.value(x, self.types[name])
        self.f.store(x, self.base, 8 * list(self.types).index(name), 8)


def job_at(f: Function, base: Value) -> Fields:
    """The job at an address."""
    return Fields(f, base, JOB)


def weight_of(job: Fields, index: Value | int) -> Fields:
    """Weight `index` of a job."""
    at = job.f.value(index, i64) * WEIGHT_BYTES + JOB_BYTES
    return Fields(job.f, job.base + at, WEIGHT)


def write_prepare(m: Module) -> None:
    """Write prepare(job, begin, end): the activations of tokens begin..end, into scratch."""
    _write_quantise(m)
    with m.function("prepare", void, [ptr, i64, i64]) as f:
        address, begin, end = f.args
        job = job_at(f, address)
        k, norm = job["k"], job["norm"]
        with f.loop(begin, end) as token:
            x = job["x"] + token * k * 4

            def plain(t: Type, i: Value, x: Value = x) -> Value:
                return f.load(x, t, i * 4, 4)

            with f.either(norm.ne(None)) as (normed, as_is):
                with normed:
                    scale = rms(f, x, k, job["eps"].trunc(i32).bitcast(f32))
                    _put(
                        job,
                        token,
                        lambda t, i, read=plain, scale=scale: (
                            read(t, i) * f.value(scale, t) * f.load(norm, t, i * 4, 4)
                        ),
                    )
                with as_is:
                    _put(job, token, plain)


def _put(job: Fields, token: Value, read: Callable[[Type, Value], Value]) -> None:
    """Write one token's activations, `read(type, k)`, in the forms the call's weights want."""
    f, k = job.f, job["k"]
    quantise = f.module.ir.globals["quantise"]
    with f.when(job["ints"].ne(None)):
        tokens = job["ints_block"]
        block = job["ints"] + (token // tokens) * tokens * (k // STEP) * STEP_BYTES
        with f.loop(0, k // STEP) as step:
            to = block + step * tokens * STEP_BYTES
            parts = [read(VECTOR, step * STEP + 16 * h) for h in range(2)]
            f.call(quantise, *parts, to, token % tokens, tokens)
    with f.when(job["floats"].ne(None)):
        tokens = job["floats_block"]
        block = job["floats"] + ((token // tokens) * tokens * k + token % tokens) * 4
        with f.loop(0, k) as i:
            f.store(read(f32, i), block, i * tokens * 4, 4)


def _write_quantise(m: Module) -> None:
    """quantise(a, b, to, i, tokens): a step of token i, two f32[16], into its block of `tokens`.

    As ggml's Q8: d = amax / 127, codes round(x / d) to nearest even. The maximum is taken over the
    bits of |x|, whose order as integers is that of the floats with NaN above infinity: a NaN
    among the activations makes d, and so every output, NaN.
    """
    with m.function("quantise", void, [VECTOR, VECTOR, ptr, i64, i64], inline=True) as f:
        a, b, to, i, tokens = f.args
        bits = [v.bitcast(vec(i32)) & 0x7FFFFFFF for v in (a, b)]
        largest = f.reduce(f.binary("umax", *bits), lambda p, q: f.binary("umax", p, q))
        amax = largest.bitcast(f32)
        inverse = f.select(amax > 2.0**-112, 127.0 / amax, 0.0)
        codes = [round_bits(v * inverse.splat()).trunc(i8) for v in (a, b)]
        for h, v in enumerate(codes):
            f.store(v, to, i * STEP + 16 * h)
        first, last = _sums(*(v.sext(i32) for v in codes))
        d, field = amax / 127.0, to + (tokens * STEP + i * 4)
        total = first + last
        for n, value in enumerate((d, d * total.to_f32(), total * -128, first * -128)):
            f.store(value, field, tokens * (4 * n), 4)


def _sums(a: Value, b: Value) -> tuple[Value, Value]:
    """The sums of the lanes of two i32[16], folded together."""
    low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    v = a.shuffle(low, b) + a.shuffle(high, b)
    for distance in (4, 2, 1):
        v = v + v.shuffle([lane ^ distance for lane in range(16)])
    return v.lane(0), v.lane(8)
