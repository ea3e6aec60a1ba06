"""Changes of the plan while conversations go on: between two passes, with their KV.

move   what a user asks for: a range of blocks to a device
fit    the KV of one more conversation, or of a longer one: where blocks may give way, a device
       that it fills sends its last ones home, and they return when there is room
grow   a device with room left takes one more of the host's blocks, token by token

Everything a plan needs is there before anything of the old one is let go: a change that fails
leaves weights, KV and plan as they were.
"""

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack

from jitllm.errors import BudgetError
from jitllm.executor import Executor
from jitllm.paging.gate import StepGate
from jitllm.placement import changes
from jitllm.placement.devices import HOST
from jitllm.placement.plan import Plan
from jitllm.residence import Residence
from jitllm.session import Session
from jitllm.stores import taking


class Mover:
    """Keeps the plan in force, and everything where it says."""

    def __init__(
        self,
        executor: Executor,
        residence: Residence,
        gate: StepGate,
        sessions: Collection[Session],
        kv_sizes: Callable[[int], list[int]],
        first_tokens: int,
        gives_way: bool,
    ):
        """`kv_sizes` gives each block's bytes for a cache of so many tokens. There is always room
        for one cache of `first_tokens`; with `gives_way` blocks leave devices for KV to grow."""
        self._executor, self._residence, self._gate = executor, residence, gate
        self._sessions, self._kv_sizes = sessions, kv_sizes
        self._first_tokens, self._gives_way = first_tokens, gives_way
        self._full: Plan | None = None
        self.counts = Counter(moved=0, sent_home=0, returned=0, grown=0)
        """Blocks `moved`, `sent_home`, `returned` and `grown` so far."""

    @property
    def plan(self) -> Plan:
        """The plan in force; its KV is that of all conversations."""
        return self._executor.plan

    def move(self, first: int, last: int, to: str) -> None:
        """Bring blocks `first` to `last` to the device `to`; errors as `changes.move` has them."""
        with self._gate.change():
            self.counts["moved"] += self._follow(changes.move(self.plan, first, last, to))

    def fit(self, n_tokens: int = 0, of: Session | None = None) -> None:
        """Make room for a cache of `n_tokens`, a new one or that of the conversation `of`; or see
        what there is room for since one was given back. BudgetError: too little can give way.
        """
        caches = [session.capacity for session in self._sessions if session is not of]
        sizes = map(self._kv_sizes, [*caches, n_tokens] if n_tokens else caches)
        kv = [sum(each) for each in zip(*sizes, strict=True)] or self._kv_sizes(self._first_tokens)
        with self._gate.change():
            before = self.plan
            if not self._gives_way:
                self._follow(changes.resize(before, kv))
                return
            new = changes.relocate(before, kv)
            self._follow(changes.halfway(before, new))
            self._follow(new)
            for old, part in zip(before.blocks, new.blocks, strict=True):
                self.counts["sent_home"] += old.device != HOST and part.device == HOST
                self.counts["returned"] += old.device == HOST and part.device != HOST

    def grow(self) -> None:
        """One more block, the last that the host still executes, to a device with room for it."""
        if self.plan is self._full:
            return
        movable = [b for b in self.plan.blocks if b.device == HOST and not b.pinned]
        devices = [use.device for use in self.plan.uses if use.device != HOST]
        for device in devices if movable else ():
            last = movable[-1].index
            try:
                new = changes.move(self.plan, last, last, device)
            except BudgetError:
                continue
            with self._gate.change():
                self.counts["grown"] += self._follow(new)
            return
        self._full = self.plan

    def rebudget(self, host_bytes: int) -> None:
        """Let the plan say what another budget of the host's means."""
        self._executor.plan = changes.rebudget(self.plan, host_bytes)

    def _follow(self, new: Plan) -> int:
        """Put `new` in force; how many blocks changed their device."""
        old = self.plan
        if new == old:
            return 0
        with ExitStack() as undo:
            self._residence.prepare(new, undo)
            put_in_place = self._copy_kv(new, undo)
            undo.pop_all()
        for put in put_in_place:
            put()
        self._residence.settle(new)
        self._executor.plan = new
        pairs = zip(old.blocks, new.blocks, strict=True)
        return sum(before.device != part.device for before, part in pairs)

    def _copy_kv(self, new: Plan, undo: ExitStack) -> list[Callable[[], None]]:
        """Copies of the caches that move, and how each is put in its place."""
        puts = []
        for before, part in zip(self.plan.blocks, new.blocks, strict=True):
            if part.kv_device != before.kv_device:
                device, ledger = self._residence.kv_home(part)
                for session in list(self._sessions):
                    with taking(part.kv_device):
                        puts.append(session.copy_kv(part.index, device, ledger, undo))
        return puts
