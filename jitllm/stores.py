"""Where the weights of a block are when a step needs them: in a page held on the host, or in
buffers of another device. A store yields the arrays of a page for the time of one step.

A page on the host is read into a frame by the pager, and its arrays alias that frame. On another
device a page is either *resident*, uploaded once, or *streamed*: copied into one of a few slots
each time, from the host frame, while the block before it computes.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jitllm.errors import DeviceError
from jitllm.model.weights import TensorView, weight_views
from jitllm.paging.frames import Frame
from jitllm.paging.pager import Pager

Layout = tuple[TensorView, ...]
Weights = dict[str, Any]


class HostStore:
    """Pages in host frames, under the pager's budget."""

    def __init__(self, pager: Pager, layouts: list[Layout], device: jax.Device):
        self._pager, self.layouts, self.device = pager, layouts, device
        self._all: tuple[int, dict[int, Weights]] | None = None

    @contextmanager
    def hold(self, page: int) -> Iterator[tuple[Weights, Callable[[jax.Array], None]]]:
        """(the page's arrays, what to call with the step's result before the hold ends)."""
        with self._pager.hold(page) as frame:
            # A moving frame is refilled once it is let go: not before the step has read it.
            yield self.views(frame, page), _let_run if frame.pinned else _wait_for

    def resident(self) -> dict[int, Weights] | None:
        """The arrays of every page of the cycle, where each is in its own frame; else None."""
        generation = self._pager.generation
        if self._all is None or self._all[0] != generation:
            self._all = None
            frames = self._pager.resident_frames()
            if frames is None:
                return None
            self._all = generation, {p: self.views(f, p) for p, f in frames.items()}
        return self._all[1]

    def staying(self, page: int) -> Weights | None:
        """The page's arrays where they stay for this pass, hold or not."""
        frame = self._pager.staying_frame(page)
        return None if frame is None else self.views(frame, page)

    def views(self, frame: Frame, page: int) -> Weights:
        """The arrays over a frame, made once for each layout that passes through it."""
        layout = self.layouts[page]
        if layout not in frame.views:
            frame.views[layout] = weight_views(frame.data, layout, self.device)
        return frame.views[layout]

    def upload(self, page: int, device: jax.Device) -> Weights:
        """A copy of the page's arrays on another device, complete."""
        with self._pager.hold(page) as frame:
            copy = weight_views(frame.data, self.layouts[page], device, copy=True)
            return jax.block_until_ready(copy)

    def close(self) -> None:
        """Forget the arrays."""
        self._all = None


def _let_run(x: jax.Array) -> None:
    """Nothing to wait for."""


def _wait_for(x: jax.Array) -> None:
    x.block_until_ready()


class DeviceStore:
    """Buffers of another device: pages that stay, and slots that others are copied through."""

    def __init__(self, host: HostStore, device: jax.Device):
        self._host, self.layouts, self.device = host, host.layouts, device
        self._pages: dict[int, Weights] = {}
        self._slots: deque[tuple[jax.Array, Weights]] = deque()
        self.n_slots = 0
        self.bytes_streamed = 0
        """Uploaded through slots so far."""

    def put(self, page: int, data: np.ndarray) -> None:
        """Upload a page, uint8[bytes], to stay."""
        weights = weight_views(data, self.layouts[page], self.device, copy=True)
        self._pages[page] = jax.block_until_ready(weights)

    def put_table(self, page: int, rows: np.ndarray) -> None:
        """Upload the rows of an embedding, uint8[V, row bytes], to stay."""
        copy = jax.device_put(rows.copy(), self.device)
        self._pages[page] = {"token_embd": jax.block_until_ready(copy)}

    def resize(self, n_slots: int) -> None:
        """Have so many slots from now on, all of them empty."""
        while self._slots:
            self._empty_slot()
        self.n_slots = n_slots

    def drop(self, page: int) -> None:
        """Free a page's buffers, if it has any here."""
        _free(self._pages.pop(page, {}))

    def resident(self) -> dict[int, Weights]:
        """The arrays of every page that stays here."""
        return self._pages

    def staying(self, page: int) -> Weights | None:
        """The page's arrays where they stay for this pass, hold or not."""
        return self._pages.get(page)

    @contextmanager
    def hold(self, page: int) -> Iterator[tuple[Weights, Callable[[jax.Array], None]]]:
        """(the page's arrays, what to call with the step's result before the hold ends)."""
        if page in self._pages:
            yield self._pages[page], _let_run
            return
        while len(self._slots) >= self.n_slots:
            self._empty_slot()
        weights = self._host.upload(page, self.device)
        self.bytes_streamed += sum(view.n_bytes for view in self.layouts[page])
        yield weights, lambda result: self._slots.append((result, weights))

    def close(self) -> None:
        """Free everything."""
        for page in list(self._pages):
            self.drop(page)
        self.resize(0)

    def _empty_slot(self) -> None:
        result, weights = self._slots.popleft()
        result.block_until_ready()
        _free(weights)


@contextmanager
def taking(device: str) -> Iterator[None]:
    """What goes to a device inside: DeviceError where it cannot, as when others use its memory."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).strip().partition("\n")[0]
        raise DeviceError(f"{device} did not take what was put on it: {why}") from error


def _free(weights: Weights) -> None:
    for array in jax.tree.leaves(weights):
        array.delete()
