"""Clients that leave, on real sockets and on an engine that makes one pass at a time."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from jitllm.executor import CHUNK_TOKENS
from tests.server.asking import wait_until
from tests.server.conftest import listening
from tests.server.fake_engine import FakeEngine

TOKENS = {"max_tokens": 40, "temperature": 0}
LEAVING = {
    "queued": {"prompt": "xyz"} | TOKENS,
    "prefilling": {"prompt": "x" * (8 * CHUNK_TOKENS)} | TOKENS,
    "decoding": {"prompt": "xyz"} | TOKENS,
}


class Gate:
    """In place of the event that an engine waits for: lets through as many passes as it is told."""

    def __init__(self):
        self._passes = threading.Semaphore(0)

    def wait(self, timeout: float) -> None:
        assert self._passes.acquire(timeout=timeout)

    def let(self, n_passes: int) -> None:
        self._passes.release(n_passes)


def ask(port: int, body: dict) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", LEAVING)
def test_a_client_that_leaves_frees_its_row_after_the_pass_under_way(make, state, stream):
    engine = FakeEngine(max_seq=16 * CHUNK_TOKENS)
    engine.go_on = gate = Gate()
    served = make(engine, sessions=1 if state == "queued" else 2)
    scheduler = served.app.extensions["jitllm"].models.get("fake").scheduler

    def rows() -> tuple[int, int, int]:
        stats = scheduler.stats
        return stats.n_queued, stats.n_prefilling, stats.n_decoding

    with listening(served) as httpd, ThreadPoolExecutor(1) as pool:
        neighbour = ask(httpd.effective_port, {"prompt": "abc"} | TOKENS)
        reply = pool.submit(lambda: json.load(neighbour.getresponse()))
        gate.let(1)
        wait_until(lambda: rows() == (0, 0, 1))
        leaving = ask(httpd.effective_port, LEAVING[state] | {"stream": stream})
        wait_until(lambda: rows() == (1, 0, 1))
        if state != "queued":
            gate.let(1)  # the neighbour's token, and the prompt may begin
            wait_until(lambda: rows() == (0, 1, 1))
        if state == "decoding":
            gate.let(1)
            wait_until(lambda: rows() == (0, 0, 2))

        leaving.close()
        wait_until(lambda: len(httpd.active_channels) == 1)
        # a turn is a chunk of a prompt and a token of every reply
        gate.let(2 if state == "prefilling" else 1)
        wait_until(lambda: rows() == (0, 0, 1))
        wait_until(lambda: outcomes(served)["cancelled"] == 1)

        n_before = len(engine.passes)
        gate.let(100)
        assert reply.result(30)["choices"][0]["text"] == "defghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOP"
        neighbour.close()
        assert all(len(rows) == 1 == len(rows[0]) for rows in engine.passes[n_before:])
        assert outcomes(served) == {"ok": 1, "cancelled": 1, "refused": 0, "failed": 0}


def outcomes(served) -> dict[str, int]:
    text = served.client.get("/metrics").get_data(as_text=True)
    found = re.findall(r'^jitllm_requests_total\{outcome="(\w+)"\} (\d+)', text, re.MULTILINE)
    return {outcome: int(count) for outcome, count in found}
