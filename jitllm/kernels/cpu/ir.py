"""A thin layer over `llvmlite.ir` that lets a kernel be read as arithmetic.

A `Value` carries its builder, so `acc + w * x` writes the instructions; Python numbers become
constants of the other side's type and are spread over vectors. Pointers count in bytes. Vectors are
always written 16 lanes wide (one tile of rows): LLVM splits them where the machine is narrower.
Loop-carried state lives in a `Var`, a stack slot that LLVM turns into a register.

Floats are never reassociated: additions happen in the order they are written, on every tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from llvmlite.ir.instructions import CastInstr

i1, i8, i16, i32, i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
f16, f32 = ir.HalfType(), ir.FloatType()
ptr = ir.PointerType()
void = ir.VoidType()

LANES = 16


def vec(element: ir.Type, n: int = LANES) -> ir.VectorType:
    """The type of `n` elements side by side."""
    return ir.VectorType(element, n)


def element(t: ir.Type) -> ir.Type:
    """The element type of a vector; a scalar's own type."""
    return t.element if isinstance(t, ir.VectorType) else t


def with_element(t: ir.Type, new: ir.Type) -> ir.Type:
    """`t` with another element type and the same number of lanes."""
    return ir.VectorType(new, t.count) if isinstance(t, ir.VectorType) else new


def type_name(t: ir.Type) -> str:
    """The suffix an overloaded LLVM intrinsic wants for `t`: `v16f32`, `i64`."""
    if isinstance(t, ir.VectorType):
        return f"v{t.count}{type_name(t.element)}"
    if t == f32:
        return "f32"
    return "f16" if t == f16 else "p0" if t == ptr else str(t)


class Value:
    """An LLVM value and the function it is written in."""

    __slots__ = ("fn", "v")

    def __init__(self, fn: Function, v: ir.Value):
        self.fn, self.v = fn, v

    @property
    def type(self) -> ir.Type:
        """The LLVM type; every address is a plain `ptr`."""
        return ptr if isinstance(self.v.type, ir.PointerType) else self.v.type

    def _binary(self, other: Any, int_op: str, float_op: str = "") -> Value:
        if self.type == ptr:
            return self.fn.offset(self, other)
        other = self.fn.value(other, self.type)
        op = float_op if element(self.type) == f32 else int_op
        return Value(self.fn, getattr(self.fn.b, op)(self.v, other.v))

    def __add__(self, other: Any) -> Value:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Any) -> Value:
        if self.type == ptr:
            return self.fn.offset(self, -self.fn.value(other, i64))
        return self._binary(other, "sub", "fsub")

    def __rsub__(self, other: Any) -> Value:
        return self.fn.value(other, self.type) - self

    def __mul__(self, other: Any) -> Value:
        return self._binary(other, "mul", "fmul")

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> Value:
        return self._binary(other, "", "fdiv")

    def __rtruediv__(self, other: Any) -> Value:
        return self.fn.value(other, self.type) / self

    def __floordiv__(self, other: Any) -> Value:
        return self._binary(other, "udiv")

    def __mod__(self, other: Any) -> Value:
        return self._binary(other, "urem")

    def __and__(self, other: Any) -> Value:
        return self._binary(other, "and_")

    def __or__(self, other: Any) -> Value:
        return self._binary(other, "or_")

    def __xor__(self, other: Any) -> Value:
        return self._binary(other, "xor")

    def __lshift__(self, other: Any) -> Value:
        return self._binary(other, "shl")

    def __rshift__(self, other: Any) -> Value:
        """Logical: zeros come in from the left."""
        return self._binary(other, "lshr")

    def sar(self, other: Any) -> Value:
        """Arithmetic shift right: the sign comes in from the left."""
        return self._binary(other, "ashr")

    def __neg__(self) -> Value:
        if element(self.type) == f32:
            return Value(self.fn, self.fn.b.fneg(self.v))
        return self.fn.value(0, self.type) - self

    def _compare(self, op: str, other: Any) -> Value:
        other, b = self.fn.value(other, self.type), self.fn.b
        if element(self.type) == f32:
            return Value(self.fn, b.fcmp_ordered(op, self.v, other.v))
        return Value(self.fn, b.icmp_signed(op, self.v, other.v))

    def __lt__(self, other: Any) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compare(">=", other)

    def eq(self, other: Any) -> Value:
        """`self == other`, as an i1 (floats: ordered)."""
        return self._compare("==", other)

    def ne(self, other: Any) -> Value:
        """`self != other`, as an i1 (floats: ordered)."""
        return self._compare("!=", other)

    def _cast(self, op: str, to: ir.Type) -> Value:
        to = to if isinstance(to, ir.VectorType) else with_element(self.type, to)
        return Value(self.fn, getattr(self.fn.b, op)(self.v, to))

    def zext(self, to: ir.Type) -> Value:
        """Widen with zeros; `to` may be an element type."""
        return self._cast("zext", to)

    def sext(self, to: ir.Type) -> Value:
        """Widen with the sign; `to` may be an element type."""
        return self._cast("sext", to)

    def trunc(self, to: ir.Type) -> Value:
        """Keep the low bits."""
        return self._cast("trunc", to)

    def to_f32(self) -> Value:
        """Signed integer or f16 to f32, exactly where f32 can hold it."""
        return self._cast("fpext" if element(self.type) == f16 else "sitofp", f32)

    def to_f16(self) -> Value:
        """f32 to f16, rounding to nearest even."""
        return self._cast("fptrunc", f16)

    def to_i32(self) -> Value:
        """f32 to i32, towards zero; the value must fit."""
        return self._cast("fptosi", i32)

    def bitcast(self, to: ir.Type) -> Value:
        """The same bits as another type of the same size."""
        return Value(self.fn, self.fn.b.bitcast(self.v, to))

    def splat(self, n: int = LANES) -> Value:
        """This scalar in each of `n` lanes."""
        b, t = self.fn.b, vec(self.type, n)
        one = b.insert_element(ir.Constant(t, ir.Undefined), self.v, i32(0))
        zeros = ir.Constant(vec(i32, n), [0] * n)
        return Value(self.fn, b.shuffle_vector(one, ir.Constant(t, ir.Undefined), zeros))

    def lane(self, i: int | Value) -> Value:
        """Element `i` of a vector."""
        index = i.v if isinstance(i, Value) else i32(i)
        return Value(self.fn, self.fn.b.extract_element(self.v, index))

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """The named lanes of `self`, or of `self` and `other` counted on, in that order."""
        second = other.v if other is not None else ir.Constant(self.type, ir.Undefined)
        mask = ir.Constant(vec(i32, len(lanes)), list(lanes))
        return Value(self.fn, self.fn.b.shuffle_vector(self.v, second, mask))


class Var:
    """A mutable value; reads and writes become registers after LLVM's first pass."""

    def __init__(self, fn: Function, init: Value):
        self.fn, self.slot = fn, fn.stack(init.type)
        self.set(init)

    def get(self) -> Value:
        """The present value."""
        return Value(self.fn, self.fn.b.load(self.slot.v, typ=self._type))

    def set(self, new: Value) -> None:
        """Replace the value."""
        self._type = new.type
        self.fn.b.store(new.v, self.slot.v)


class Function:
    """A function under construction; made by `Module.function`."""

    def __init__(self, module: Module, f: ir.Function):
        self.module, self.f = module, f
        entry = f.append_basic_block("entry")
        self._entry = ir.IRBuilder(f.append_basic_block("body"))
        self._slots = ir.IRBuilder(entry)
        self._slots.branch(self._entry.block)
        self.b = self._entry
        self.args = [Value(self, a) for a in f.args]

    # --- values -------------------------------------------------------------------------------

    def value(self, x: Any, t: ir.Type) -> Value:
        """`x` as a value of type `t`: numbers become constants, scalars are spread over vectors."""
        if not isinstance(x, Value):
            return Value(self, self._constant(x, t))
        if isinstance(t, ir.VectorType) and not isinstance(x.type, ir.VectorType):
            return x.splat(t.count)
        return x

    def _constant(self, x: Any, t: ir.Type) -> ir.Constant:
        if t == ptr:
            return ir.Constant(ptr, None)
        if isinstance(t, ir.VectorType):
            lanes = x if isinstance(x, (list, tuple)) else [x] * t.count
            return ir.Constant(t, [self._constant(lane, t.element) for lane in lanes])
        return ir.Constant(t, float(x) if t in (f32, f16) else int(x))

    def var(self, init: Value) -> Var:
        """A mutable value."""
        return Var(self, init)

    def stack(self, t: ir.Type, count: int = 1, align: int = 0) -> Value:
        """The address of `count` values of type `t` on the stack, alive until the return."""
        with self._slots.goto_block(self._slots.block):
            self._slots.position_at_start(self._slots.block)
            slot = self._slots.alloca(t, count if count > 1 else None)
        slot.align, slot.type = align or None, ptr
        return Value(self, slot)

    def select(self, condition: Value, yes: Any, no: Any) -> Value:
        """`yes` where `condition`, else `no`; one of the two may be a number."""
        t = yes.type if isinstance(yes, Value) else no.type
        yes, no = self.value(yes, t), self.value(no, t)
        return Value(self, self.b.select(condition.v, yes.v, no.v))

    # --- memory -------------------------------------------------------------------------------

    def offset(self, base: Value, n_bytes: Any) -> Value:
        """The address `n_bytes` after `base`."""
        n = self.value(n_bytes, i64)
        address = self.b.gep(base.v, [n.v], source_etype=i8)
        address.type = ptr
        return Value(self, address)

    def load(self, base: Value, t: ir.Type, n_bytes: Any = 0, align: int = 1) -> Value:
        """A value of type `t` at `base + n_bytes`."""
        address = self.offset(base, n_bytes)
        return Value(self, self.b.load(address.v, typ=t, align=align))

    def store(self, x: Value, base: Value, n_bytes: Any = 0, align: int = 1) -> None:
        """Write `x` at `base + n_bytes`."""
        self.b.store(x.v, self.offset(base, n_bytes).v, align=align)

    def atomic_load(self, base: Value, n_bytes: Any = 0, t: ir.Type = i64) -> Value:
        """Load with acquire ordering (naturally aligned)."""
        return Value(
            self, self.b.load_atomic(self.offset(base, n_bytes).v, "acquire", t.width // 8, typ=t)
        )

    def atomic_store(self, x: Value, base: Value, n_bytes: Any = 0) -> None:
        """Store with release ordering (naturally aligned)."""
        address = self.offset(base, n_bytes).v
        address.type = x.type.as_pointer()  # llvmlite looks for a pointee here
        self.b.store_atomic(x.v, address, "release", x.type.width // 8)

    def atomic_add(self, base: Value, n_bytes: Any, x: Any) -> Value:
        """Add an i64; the value before. Sequentially consistent."""
        address, x = self.offset(base, n_bytes), self.value(x, i64)
        return Value(self, self.b.atomic_rmw("add", address.v, x.v, "seq_cst"))

    def exchange_if(self, base: Value, n_bytes: Any, old: Any, new: Any) -> Value:
        """Compare and swap an i64; true when `old` was there and `new` now is."""
        old, new = self.value(old, i64), self.value(new, i64)
        address = self.offset(base, n_bytes)
        pair = self.b.cmpxchg(address.v, old.v, new.v, "seq_cst", "seq_cst")
        return Value(self, self.b.extract_value(pair, 1))

    # --- calls --------------------------------------------------------------------------------

    def call(self, callee: ir.Function | Value, *args: Any, returns: ir.Type = void) -> Value:
        """Call a function of this module, or an address with the arguments' own types."""
        if isinstance(callee, Value):
            t = ir.FunctionType(returns, [a.type for a in args])
            # llvmlite calls through typed pointers only; the cast prints as nothing but the type
            target = CastInstr(self.b.block, "bitcast", callee.v, t.as_pointer())
            self.b._insert(target)
            return Value(self, self.b.call(target, [a.v for a in args]))
        values = [self.value(a, t) for a, t in zip(args, callee.ftype.args, strict=True)]
        return Value(self, self.b.call(callee, [a.v for a in values]))

    def intrinsic(self, name: str, returns: ir.Type, *args: Any) -> Value:
        """Call `llvm.NAME`, declared on first use; give `Value` arguments."""
        f = self.module.declare(f"llvm.{name}", returns, [a.type for a in args])
        return Value(self, self.b.call(f, [a.v for a in args]))

    def fma(self, a: Value, x: Any, acc: Value) -> Value:
        """a * x + acc: fused where the machine has it, and then in every kernel alike."""
        x = self.value(x, a.type)
        return self.intrinsic(f"fmuladd.{type_name(a.type)}", a.type, a, x, acc)

    def unary(self, name: str, x: Value) -> Value:
        """An overloaded one-argument intrinsic: `sqrt`, `fabs`, `rint`, ..."""
        return self.intrinsic(f"{name}.{type_name(x.type)}", x.type, x)

    def binary(self, name: str, x: Value, y: Any) -> Value:
        """An overloaded two-argument intrinsic: `umax`, `smin`, `maxnum`, ..."""
        return self.intrinsic(f"{name}.{type_name(x.type)}", x.type, x, self.value(y, x.type))

    def minimum(self, x: Value, y: Any) -> Value:
        """The smaller of two signed integers."""
        return self.binary("smin", x, y)

    def reduce(self, x: Value, combine: Any) -> Value:
        """Fold the lanes of `x` by halves: an order that is the same on every machine."""
        n = x.type.count
        while n > 1:
            n //= 2
            x = combine(x.shuffle(range(n)), x.shuffle(range(n, 2 * n)))
        return x.lane(0)

    # --- control flow -------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """for i in range(start, stop, step), i64; the body may run zero times."""
        head, body, tail = (self.f.append_basic_block(n) for n in ("head", "loop", "after"))
        start, stop, step = (self.value(x, i64) for x in (start, stop, step))
        origin = self.b.block
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(i64)
        i.add_incoming(start.v, origin)
        self.b.cbranch(self.b.icmp_signed("<", i, stop.v), body, tail)
        self.b.position_at_end(body)
        yield Value(self, i)
        i.add_incoming(self.b.add(i, step.v, flags=["nsw"]), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(tail)

    @contextmanager
    def repeat(self) -> Iterator[Any]:
        """Loop for ever; call the yielded function with a condition to leave when it is true."""
        body, tail = (self.f.append_basic_block(n) for n in ("repeat", "after"))
        self.b.branch(body)
        self.b.position_at_end(body)

        def leave_if(condition: Value) -> None:
            rest = self.f.append_basic_block("stay")
            self.b.cbranch(condition.v, tail, rest)
            self.b.position_at_end(rest)

        yield leave_if
        self.b.branch(body)
        self.b.position_at_end(tail)

    @contextmanager
    def when(self, condition: Value, likely: bool | None = None) -> Iterator[None]:
        """if condition: ..."""
        with self.b.if_then(condition.v, likely=likely):
            yield

    @contextmanager
    def either(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """if / else: yields the two branches, each a context manager."""
        with self.b.if_else(condition.v) as branches:
            yield branches

    def ret(self, x: Any = None) -> None:
        """Return; must be the last instruction of its block."""
        t = self.f.ftype.return_type
        if x is None and t == void:
            self.b.ret_void()
        else:
            self.b.ret(self.value(x, t).v)


class Module:
    """One unit of compilation."""

    def __init__(self, name: str):
        self.ir = ir.Module(name)

    def declare(self, name: str, returns: ir.Type, args: Sequence[ir.Type]) -> ir.Function:
        """A function of this name, declared once."""
        if name not in self.ir.globals:
            return ir.Function(self.ir, ir.FunctionType(returns, list(args)), name)
        return self.ir.globals[name]

    @contextmanager
    def function(
        self,
        name: str,
        returns: ir.Type,
        args: Sequence[ir.Type],
        export: bool = False,
        inline: bool = False,
    ) -> Iterator[Function]:
        """Write a function inside `with`; a void one returns at its end by itself."""
        f = self.declare(name, returns, args)
        f.attributes.add("nounwind")
        if not export:
            f.linkage = "internal"
        if inline:
            f.attributes.add("alwaysinline")
        fn = Function(self, f)
        yield fn
        if returns == void and not fn.b.block.is_terminated:
            fn.ret()

    def zeros(self, name: str, n_bytes: int) -> ir.GlobalVariable:
        """Exported static memory of zeros, 64-aligned."""
        t = ir.ArrayType(i8, n_bytes)
        g = ir.GlobalVariable(self.ir, t, name)
        g.initializer, g.align = ir.Constant(t, None), 64
        return g
