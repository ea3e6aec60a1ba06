"""Who may touch the frames: one step at a time, or a change between two steps."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StepGate:
    """Steps and changes exclude each other, and a change that waits goes before the next step.

    Without that order a thread that steps in a loop would keep a change out for ever.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._stepper: int | None = None
        self._n_waiting = 0

    @property
    def is_mine(self) -> bool:
        """This thread is inside a step."""
        return self._stepper == threading.get_ident()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside: this thread steps, and nothing changes."""
        assert not self.is_mine, "a step inside a step"
        with self._turn:
            while self._n_waiting or self._stepper is not None:
                self._turn.wait()
            self._stepper = threading.get_ident()
        try:
            yield
        finally:
            with self._turn:
                self._stepper = None
                self._turn.notify_all()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Inside: nobody steps. Waits for the step under way, which must be another thread's."""
        assert not self.is_mine, "a change inside a step would wait for itself"
        with self._turn:
            self._n_waiting += 1
            try:
                while self._stepper is not None:
                    self._turn.wait()
                yield
            finally:
                self._n_waiting -= 1
                self._turn.notify_all()
