"""Makes devices hold what a plan says: uploads, frees, resizes, in an order that no budget notices.

A device's ledger is its budget; the host's covers pages in the pager, and everything else.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import jax

from jitllm.errors import BudgetError
from jitllm.executor import Place
from jitllm.kernels.ops import choose
from jitllm.model.config import ModelConfig
from jitllm.model.weights import TensorView, field_name
from jitllm.paging.budget import Charge, Ledger
from jitllm.paging.container import Container
from jitllm.paging.pager import Pager, whole_cycle
from jitllm.placement.devices import HOST, Device
from jitllm.placement.plan import RESIDENT, STREAMED, Assignment, Plan
from jitllm.steps import Steps
from jitllm.stores import DeviceStore, HostStore, Layout, taking
from jitllm.units import format_size


class Residence:
    """The devices of one model: their places for the executor, and what lies on them."""

    def __init__(
        self,
        container: Container,
        pager: Pager,
        devices: Sequence[Device],
        config: ModelConfig,
        ledger: Ledger,
    ):
        """`ledger` is the host's; every other device gets one of its own, with its budget."""
        self._container, self._pager = container, pager
        layouts = [page_layout(container, page) for page in range(len(container.pages))]
        host = HostStore(pager, layouts, devices[0].jax_device)
        self.ledgers = {HOST: ledger} | {d.id: _ledger_of(d) for d in devices[1:]}
        self.places: dict[str, Place] = {}
        self.notes: dict[str, str] = {}
        """Who computes on each device."""
        for device in devices:
            store = host if device.is_host else DeviceStore(host, device.jax_device)
            ops, self.notes[device.id] = choose(device.platform)
            steps = Steps(config, ops, _charger(self.ledgers[device.id]))
            self.places[device.id] = Place(device.id, store, steps, self.ledgers[device.id])
        self._pages: dict[int, tuple[str, Charge]] = {}
        self._coming: dict[int, tuple[str, Charge]] = {}
        """Uploaded by `prepare`, for `settle` to take up."""
        self._slots: dict[str, tuple[tuple[int, int], Charge]] = {}

    def prepare(self, plan: Plan, undo: ExitStack) -> None:
        """Put what `plan` needs where it needs it, and let nothing go yet; between two passes.

        Where it fails (BudgetError, FormatError, DeviceError), and where what follows does, `undo`
        takes it all back. A device holds the larger of its two plans at most.
        """
        self._check_room(plan)
        self.forget_views()
        before, cycle = self._pager.cycle, host_cycle(self._container, plan)
        # What is in the host's memory stays there until it is known to be elsewhere.
        both = [page for page in whole_cycle(self._container) if page in {*before, *cycle}]
        if tuple(both) != before:
            self._pager.set_cycle(both)
            undo.callback(self._pager.set_cycle, before)
        self._coming.clear()
        for page, device in self._wanted(plan).items():
            if page not in self._pages or self._pages[page][0] != device:
                self._make_slots(device, 0, 0, undo)
                self._upload(page, device, undo)

    def settle(self, plan: Plan) -> None:
        """Let go of what `plan`, which was prepared, does not need. Cannot fail."""
        wanted = self._wanted(plan)
        for page in [p for p, (device, _) in self._pages.items() if wanted.get(p) != device]:
            device, charge = self._pages.pop(page)
            self.places[device].store.drop(page)
            charge.release()
        self._pages |= self._coming
        self._coming.clear()
        for use in plan.uses:
            if use.device != HOST:
                self._make_slots(use.device, use.n_slots, use.slot_bytes)
        cycle = host_cycle(self._container, plan)
        if tuple(cycle) != self._pager.cycle:
            self._pager.set_cycle(cycle)

    def _wanted(self, plan: Plan) -> dict[int, str]:
        """Which page stays on which device."""
        return {
            page: part.device
            for part in plan.assignments
            for page in _pages_of(self._container, part)
            if part.device != HOST and part.mode == RESIDENT
        }

    def _check_room(self, plan: Plan) -> None:
        """Steps that were compiled may take more than the plan reckons with, if there was room."""
        for use in plan.uses:
            if use.device == HOST:
                continue
            more = self.ledgers[use.device].used("activations") - use.workspace_bytes
            missing_bytes = use.missing_bytes + max(0, more)
            if use.n_bytes and missing_bytes > 0:
                raise BudgetError(
                    f"{use.device} lacks {format_size(missing_bytes)}; nothing was moved",
                    use.n_bytes + missing_bytes,
                )

    def _upload(self, page: int, device: str, undo: ExitStack) -> None:
        """A copy of a page on a device, charged."""
        charge = self.ledgers[device].charge("weights", self._container.pages[page].n_bytes)
        undo.callback(charge.release)
        store = self.places[device].store
        undo.callback(store.drop, page)
        data = self._pager.fetch(page)
        with taking(device):
            if self._container.pages[page].kind == "embed":
                table = self._container.embedding
                rows = data[: table.n_rows * table.unit_bytes]
                store.put_table(page, rows.reshape(table.n_rows, table.unit_bytes))
            else:
                store.put(page, data)
        self._coming[page] = device, charge

    def _make_slots(
        self, device: str, n_slots: int, slot_bytes: int, undo: ExitStack | None = None
    ) -> None:
        """Give a device so many slots, charged, in place of those it has."""
        before, charge = self._slots.get(device, ((0, 0), None))
        if (n_slots, slot_bytes) == before:
            return
        if charge is not None:
            charge.release()
        self.places[device].store.resize(n_slots)
        n_bytes = n_slots * slot_bytes
        charge = self.ledgers[device].charge("staging", n_bytes)
        self._slots[device] = (n_slots, slot_bytes), charge
        if undo is not None:
            undo.callback(self._make_slots, device, *before)

    @property
    def bytes_streamed(self) -> dict[str, int]:
        """Uploaded through slots so far, by device id; the host's pages stay where they are."""
        others = (place for place in self.places.values() if place.id != HOST)
        return {place.id: place.store.bytes_streamed for place in others}

    def forget_views(self) -> None:
        """Let go of the arrays over host frames, so that frames can give their memory back."""
        self.places[HOST].store.close()

    def kv_home(self, part: Assignment) -> tuple[jax.Device, Ledger]:
        """The device of a block's KV, and the ledger it counts on."""
        return self.places[part.kv_device].store.device, self.ledgers[part.kv_device]

    def close(self) -> None:
        """Free everything on every device."""
        for place in self.places.values():
            place.store.close()
        for _, charge in (*self._pages.values(), *self._slots.values()):
            charge.release()
        self._pages.clear()
        self._slots.clear()


def page_layout(container: Container, page: int) -> Layout:
    """Where each tensor of a page lies."""
    return tuple(
        TensorView(field_name(t.name), t.qtype, t.shape, t.offset, t.n_bytes)
        for t in container.on_page(page).values()
    )


def host_cycle(container: Container, plan: Plan) -> list[int]:
    """The pages that a pass visits on the host: its own, and those streamed from it."""
    return [
        page
        for part in plan.assignments
        if part.kind != "embed" and (part.device == HOST or part.mode == STREAMED)
        for page in _pages_of(container, part)
    ]


def _pages_of(container: Container, part: Assignment) -> list[int]:
    pages = container.pages_of(part.kind)
    return [pages[part.index]] if part.kind == "block" else pages


def _ledger_of(device: Device) -> Ledger:
    return Ledger(
        device.budget_bytes,
        device.id,
        f"give it more with -devices {device.id}=SIZE, or fewer blocks",
    )


def _charger(ledger: Ledger) -> Callable[[int], None]:
    """Charges XLA's temporaries: those of the largest step, for only one runs at a time."""

    def charge(n_bytes: int) -> None:
        more = n_bytes - ledger.used("activations")
        if more > 0:
            ledger.charge("activations", more)

    return charge
