"""An engine that can be worked out by hand, in place of the real one.

A reply to a text is its words in reverse: "a b c" gives the pieces "c", " b", " a". Each word is a
token; every figure of the reports is a small constant or a count of these tokens. As a program,
`python -m tests.cli.fake_engine ARGUMENTS...` is `jitllm ARGUMENTS...` on this engine.
"""

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

from jitllm.errors import JitllmError
from jitllm.paging.budget import LedgerLine, LedgerReport
from jitllm.reports import GenerationReport, MemoryReport
from jitllm.sampling import SamplingParams

KIB = 1024


class FakeGeneration:
    """Yields `pieces`; the report counts them."""

    def __init__(self, pieces: list[str], prompt_tokens: int, delay_s: float = 0.0):
        self._delay_s = delay_s
        self._pieces = self._run(pieces)
        self.report = GenerationReport(prompt_tokens=prompt_tokens, finish_reason="stop")

    def _run(self, pieces: list[str]) -> Iterator[str]:
        for number, piece in enumerate(pieces):
            if piece.endswith("boom"):
                raise JitllmError("page 3 of fake.jlm does not match its hash")
            time.sleep(self._delay_s)
            self._count(number, piece)
            yield piece

    def _count(self, number: int, piece: str) -> None:
        report = self.report
        report.ids.append(100 + number)
        report.text += piece
        report.generated_tokens = len(report.ids)
        report.prefill_s, report.decode_s = 0.5, 0.25 * len(report.ids)
        report.prefill_tokens_per_second = report.prompt_tokens / report.prefill_s
        report.decode_tokens_per_second = 4.0
        report.page_ins, report.evictions, report.frames = 3 * len(report.ids), 2, 2
        report.bytes_read, report.read_requests = 10 * KIB * len(report.ids), 7
        report.bytes_read_per_token, report.read_wait_s = 10 * KIB, 0.0125
        report.budget_bytes, report.resident_bytes = 400 * KIB, 300 * KIB
        report.peak_rss_bytes = 2 * KIB * KIB

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        self._pieces.close()


class FakeSession:
    """Remembers how many turns it answered."""

    def __init__(self, engine: "FakeEngine"):
        self.engine, self.n_turns = engine, 0

    def chat(
        self,
        text: str,
        params: SamplingParams,
        system: str | None = None,
        stop: tuple[str, ...] = (),
    ) -> FakeGeneration:
        self.n_turns += 1
        self.engine.calls.append(("chat", text, params, system, stop))
        return self.engine.reply(f"{text} turn-{self.n_turns}", self.engine.delay_s)

    def reset(self) -> None:
        self.n_turns = 0


class FakeEngine:
    """Three of five blocks fit its budget of 400 KiB."""

    def __init__(self, delay_s: float = 0.0):
        self.delay_s = delay_s
        self.budget_bytes = 400 * KIB
        self.calls: list[tuple] = []
        self.closed = False
        self.template_error = ""

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def reply(self, text: str, delay_s: float = 0.0) -> FakeGeneration:
        words = text.split()
        pieces = [word if i == 0 else f" {word}" for i, word in enumerate(reversed(words))]
        return FakeGeneration(pieces, len(words), delay_s)

    def generate(self, prompt: str, **options: object) -> FakeGeneration:
        self.calls.append(("generate", prompt, options))
        return self.reply(prompt)

    def chat(self, messages: list[dict[str, str]], **options: object) -> FakeGeneration:
        self.calls.append(("chat", messages, options))
        return self.reply(messages[-1]["content"], self.delay_s)

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        if self.template_error:
            raise JitllmError(self.template_error)
        return [len(messages)]

    def session(self) -> FakeSession:
        return FakeSession(self)

    def set_budget(self, budget_bytes: int) -> None:
        if budget_bytes < 10 * KIB:
            raise JitllmError("a budget of 1.0 KiB is below the smallest that works, 10.0 KiB")
        self.budget_bytes = budget_bytes

    def stats(self) -> SimpleNamespace:
        lines = (LedgerLine("weights", self.budget_bytes, 300 * KIB, 350 * KIB),)
        lines += (LedgerLine("prefix_cache", None, 0, 0),)
        ledger = LedgerReport(lines, 364 * KIB, 420 * KIB, None)
        return SimpleNamespace(ledger=ledger, rss_bytes=KIB * KIB, peak_rss_bytes=2 * KIB * KIB)

    def memory_report(self) -> MemoryReport:
        weights = 500 * KIB
        return MemoryReport(
            budget_bytes=self.budget_bytes,
            automatic=False,
            weights_bytes=weights,
            kv_bytes=64 * KIB,
            pages_bytes=self.budget_bytes - 20 * KIB,
            over_bytes=max(0, weights - self.budget_bytes),
            n_pages=6,
            n_blocks=5,
            n_resident_blocks=3,
            block_bytes=90 * KIB,
            page_ins_per_token=3,
            page_in_bytes_per_token=270 * KIB,
            max_seq=128,
            kernels="fake, 2 threads",
        )


def main() -> int:
    """`jitllm` on a fake engine whose chat replies take 0.2 s a piece."""
    from jitllm.cli import jitllm
    from jitllm.cli.options import EngineOptions

    EngineOptions.open = lambda self, model: FakeEngine(delay_s=0.2)
    return jitllm.main()


if __name__ == "__main__":
    sys.exit(main())
