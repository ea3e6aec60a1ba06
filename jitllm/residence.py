"""Makes devices hold what a plan says: uploads, frees, resizes, in an order that no budget notices.

A device's ledger is its budget; the host's covers pages in the pager, and everything else.
"""

from collections.abc import Callable, Sequence

import jax

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
from jitllm.stores import DeviceStore, HostStore, Layout


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
        self.ledgers = {d.id: Ledger(d.budget_bytes) for d in devices[1:]} | {HOST: ledger}
        self.places: dict[str, Place] = {}
        self.notes: dict[str, str] = {}
        """Who computes on each device."""
        for device in devices:
            store = host if device.is_host else DeviceStore(host, device.jax_device)
            ops, self.notes[device.id] = choose(device.platform)
            steps = Steps(config, ops, _charger(self.ledgers[device.id]))
            self.places[device.id] = Place(device.id, store, steps)
        self._pages: dict[int, tuple[str, Charge]] = {}
        self._slots: dict[str, Charge] = {}

    def follow(self, plan: Plan) -> None:
        """Bring the weights to where `plan` has them; between two passes.

        First what comes to the host, then what goes to devices, then what leaves them: a device
        never holds more than the larger of its two plans. Where it fails, BudgetError or
        FormatError, what was uploaded is freed and everything is as it was.
        """
        wanted = {
            page: part.device
            for part in plan.assignments
            for page in _pages_of(self._container, part)
            if part.device != HOST and part.mode == RESIDENT
        }
        self.forget_views()
        new = {p: d for p, d in wanted.items() if self._pages.get(p, ("", None))[0] != d}
        cycle = host_cycle(self._container, plan)
        before = self._pager.cycle
        both = [p for p in whole_cycle(self._container) if p in {*before, *cycle}]
        if tuple(both) != before:
            self._pager.set_cycle(both)
        uploaded = self._upload(new)
        for page in [p for p, (device, _) in self._pages.items() if wanted.get(p) != device]:
            self._drop(page)
        self._pages |= uploaded
        self._resize_slots(plan)
        if tuple(cycle) != self._pager.cycle:
            self._pager.set_cycle(cycle)

    def _upload(self, wanted: dict[int, str]) -> dict[int, tuple[str, Charge]]:
        """Copies of pages on devices, charged; all of them, or an error and none."""
        done: dict[int, tuple[str, Charge]] = {}
        try:
            for page, device in wanted.items():
                n_bytes = self._container.pages[page].n_bytes
                charge = self.ledgers[device].charge("weights", n_bytes)
                done[page] = device, charge
                self.places[device].store.put(page, self._pager.fetch(page))
        except BaseException:
            for page, (device, charge) in done.items():
                self.places[device].store.drop(page)
                charge.release()
            raise
        return done

    def _drop(self, page: int) -> None:
        device, charge = self._pages.pop(page)
        self.places[device].store.drop(page)
        charge.release()

    def _resize_slots(self, plan: Plan) -> None:
        for use in plan.uses:
            if use.device == HOST:
                continue
            self.places[use.device].store.resize(use.n_slots)
            if use.device in self._slots:
                self._slots.pop(use.device).release()
            if use.n_slots:
                n_bytes = use.n_slots * use.slot_bytes
                self._slots[use.device] = self.ledgers[use.device].charge("staging", n_bytes)

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
        for _, charge in self._pages.values():
            charge.release()
        self._pages.clear()


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


def _charger(ledger: Ledger) -> Callable[[int], None]:
    """Charges XLA's temporaries: those of the largest step, for only one runs at a time."""

    def charge(n_bytes: int) -> None:
        more = n_bytes - ledger.used("activations")
        if more > 0:
            ledger.charge("activations", more)

    return charge
