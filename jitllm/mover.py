"""Changes of the plan while conversations go on: between two passes, with their KV.

move       what a user asks for: a range of blocks to a device
relocate   a device whose KV grew sends its last blocks home; they return when room is
grow       a device with room left takes one more of the host's blocks, token by token
"""

from collections import Counter
from collections.abc import Callable, Collection

from jitllm.errors import BudgetError
from jitllm.executor import Executor
from jitllm.paging.gate import StepGate
from jitllm.placement import planner
from jitllm.placement.devices import HOST
from jitllm.placement.plan import Plan
from jitllm.residence import Residence
from jitllm.session import Session


class Mover:
    """Keeps the plan in force, and everything where it says."""

    def __init__(
        self,
        executor: Executor,
        residence: Residence,
        gate: StepGate,
        sessions: Collection[Session],
        kv_sizes: Callable[[int], list[int]],
    ):
        """`kv_sizes` gives each block's bytes for a cache of so many tokens."""
        self._executor, self._residence, self._gate = executor, residence, gate
        self._sessions, self._kv_sizes = sessions, kv_sizes
        self._full: Plan | None = None
        self.counts = Counter[str]()
        """Blocks `moved`, `sent_home`, `returned` and `grown` so far."""

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._executor.plan

    def move(self, first: int, last: int, to: str) -> None:
        """Bring blocks `first` to `last` to the device `to`; errors as `planner.move` has them."""
        with self._gate.change():
            self.counts["moved"] += self._follow(planner.move(self.plan, first, last, to))

    def relocate(self, extra_tokens: int = 0) -> None:
        """Make room for the sessions' KV and `extra_tokens` more of it, or take back what left.

        BudgetError: what is pinned leaves too little.
        """
        tokens = extra_tokens + sum(session.capacity for session in self._sessions)
        with self._gate.change():
            before = self.plan
            new = planner.relocate(before, self._kv_sizes(tokens))
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
                new = planner.move(self.plan, last, last, device)
            except BudgetError:
                continue
            with self._gate.change():
                self.counts["grown"] += self._follow(new)
            return
        self._full = self.plan

    def _follow(self, new: Plan) -> int:
        """Put `new` in force; how many blocks changed their device."""
        old = self.plan
        if new == old:
            return 0
        self._residence.follow(new)
        for before, part in zip(old.blocks, new.blocks, strict=True):
            if part.kv_device != before.kv_device:
                device, ledger = self._residence.kv_home(part)
                for session in list(self._sessions):
                    session.move_kv(part.index, device, ledger)
        self._executor.plan = new
        pairs = zip(old.blocks, new.blocks, strict=True)
        return sum(before.device != part.device for before, part in pairs)
