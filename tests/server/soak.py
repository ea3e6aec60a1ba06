"""Many clients and a restless administrator: answers stay right, nothing is lost, nothing grows.

    python -m tests.server.soak [--seconds 60] [--clients 16] [--model FILE.jlm] [SERVE FLAGS]

Clients ask, streamed or not, for one reply, for several, or turn by turn in a session, and go away
amid one of four. Meanwhile the budget changes and blocks move. What every reply has to be has been
asked for before, one at a time. The test suite does it for some seconds with a tiny model, which
the command takes as well where it is given none.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.server.process import Served, serving, wait_for, write_model

FLAGS = (
    *("-devices", "cpu,cpu:1=2G", "-placement", "*=host,head=host"),
    # fewer than there are clients: some wait, and some are refused
    *("-sessions", "8", "-max-queue", "6"),
)
_REPLY_S = 120
"""A reply that takes longer is lost."""
_GROWTH_BYTES = 16 << 20
"""What memory may differ by from one quarter to the next, beside two KV caches: malloc's pools of
60 threads settle slowly. A cache kept for each request would be more within seconds."""

_XLA_THREADS = 3
"""Made once, when first a step is compiled that is not in the cache on disk."""
DONE = ("finished", "left before", "left amid", "refused", "turns", "budgets", "moves")
"""What has to have happened."""
Body = dict[str, Any]
Answer = list[tuple[str, str]]
"""(text, finish_reason) of each choice."""


def bodies(n_ctx: int) -> list[Body]:
    """Requests of all kinds; prompts that are ids are long enough to be read in several passes."""
    rng = random.Random(0)
    long, half = ([rng.randrange(3, 400) for _ in range(n_ctx * n // 8)] for n in (6, 4))
    return [
        {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0},
        {"prompt": long, "max_tokens": 8, "temperature": 0, "logprobs": 3},
        {"prompt": [*half, 5], "max_tokens": 16, "seed": 1},
        {"prompt": [*half, 6], "max_tokens": 16, "temperature": 0},
        {"prompt": "Tim was sad", "max_tokens": 40, "seed": 2, "n": 2},
        {"prompt": "Lily saw", "max_tokens": 60, "seed": 3, "temperature": 0.8, "top_k": 40},
        {"prompt": "The dog", "max_tokens": 60, "seed": 4, "top_p": 0.9, "stop": [".", "e a"]},
        {"prompt": "The sun", "max_tokens": 50, "seed": 5, "min_p": 0.05}
        | {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    ]


TURNS: list[Body] = [
    {"prompt": "Once upon a time there was a cat.", "max_tokens": 20, "temperature": 0},
    {"prompt": " She said", "max_tokens": 30, "seed": 6, "stop": ["!"]},
    {"prompt": " Then he", "max_tokens": 30, "temperature": 0},
]


class Crowd:
    """The clients of one server, what they know to be right, and what came of their requests."""

    def __init__(self, served: Served):
        self.served, self.client = served, served.client
        self.stop, self.counts = threading.Event(), Counter[str]()
        self._counting = threading.Lock()
        model = self.client.get("/v1/models/m")
        self.bodies = bodies(model["context_tokens"])
        self.n_blocks = sum(model["blocks"].values())
        budget = self.client.get("/jitllm/models/m/budget")
        self.weights_bytes, self.kv_bytes = budget["weights_bytes"], budget["kv_bytes"]
        self.answers = [self.ask(body) for body in self.bodies]
        with self.session() as id:
            self.turns = [self.ask(turn | {"jitllm_session": id}) for turn in TURNS]
        assert all([*self.answers, *self.turns]), "alone, none is refused"

    def count(self, what: str) -> None:
        with self._counting:
            self.counts[what] += 1

    # Asking

    def ask(self, body: Body) -> Answer | None:
        """The answer; None where the queue was full."""
        with self.sent(body) as connection:
            response = connection.getresponse()
            if response.status == 429:
                self.count("refused")
                self.stop.wait(0.1)
                return None
            assert response.status == 200, response.read()
            answer = (_streamed if body.get("stream") else _whole)(response)
            self.count("finished")
            return answer

    def leave(self, body: Body, rng: random.Random) -> None:
        """Ask, and go away before the reply, or amid it."""
        with self.sent(body) as connection:
            if body["stream"] and rng.random() < 0.5:
                connection.sock.recv(rng.randrange(1, 3000))
                self.count("left amid")
            else:
                self.stop.wait(rng.random() * 0.3)
                self.count("left before")

    @contextmanager
    def sent(self, body: Body) -> Iterator[HTTPConnection]:
        connection = HTTPConnection(self.served.host, self.served.port, timeout=_REPLY_S)
        headers = {"Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            self.count("sent")
            yield connection
        finally:
            connection.close()

    @contextmanager
    def session(self) -> Iterator[str]:
        id = self.client.post("/jitllm/sessions", {})["id"]
        try:
            yield id
        finally:
            wait_for(lambda: not self.client.get(f"/jitllm/sessions/{id}")["busy"], _REPLY_S)
            self.client.delete(f"/jitllm/sessions/{id}")

    # What the threads do

    def work(self, seed: int) -> None:
        """A client, until told to stop; one of four talks in sessions."""
        rng = random.Random(seed)
        while not self.stop.is_set():
            if seed % 4 == 0:
                self.talk(rng)
                continue
            which, stream = rng.randrange(len(self.bodies)), rng.random() < 0.5
            body = self.bodies[which] | {"stream": stream}
            if rng.random() < 0.25:
                self.leave(body, rng)
            elif (answer := self.ask(body)) is not None:
                assert answer == self.answers[which], (body, answer, self.answers[which])

    def talk(self, rng: random.Random) -> None:
        """The turns of a session, as far as the client has patience."""
        with self.session() as id:
            for turn, right in zip(TURNS, self.turns, strict=True):
                body = turn | {"jitllm_session": id, "stream": rng.random() < 0.5}
                if rng.random() < 0.2:
                    self.leave(body, rng)
                    return
                while (answer := self.ask(body)) is None:
                    pass
                assert answer == right, (body, answer, right)
                self.count("turns")

    def change(self) -> None:
        """Budgets and moves, until told to stop."""
        rng, last = random.Random(0), self.n_blocks - 1
        half = f"{last // 2 + 1}-{last}"
        while not self.stop.wait(0.05):
            budget = int(self.weights_bytes * rng.choice([0.5, 0.75, 2]))
            applied = self.client.put("/jitllm/models/m/budget", {"maxmem": budget})["applied"]
            assert applied["budget_bytes"] == budget
            self.count("budgets")
            # each place has steps of its own to compile: a few, that come again and again
            places = rng.choice(["*=host", f"{half}=cpu:1,*=host", "*=cpu:1"])
            self.client.put("/jitllm/models/m/placement", {"placement": places})
            self.count("moves")
            move = {"first": last, "last": last, "to": rng.choice(["host", "cpu:1"])}
            self.client.post("/jitllm/models/m/placement/moves", move)
            self.count("moves")

    @property
    def growth_bytes(self) -> int:
        """What memory may differ by."""
        return _GROWTH_BYTES + 2 * self.kv_bytes

    def watch(self) -> list[int]:
        """Looks, until told to stop, whether any budget is exceeded; the process's memory."""
        memory = []
        while not self.stop.wait(0.1):
            for path in ("models/m/residency", "models/m/budget", "devices"):
                self.client.get(f"/jitllm/{path}")
            lines = self.served.stats()["models"]["m"]["ledger"]["lines"]
            devices = self.client.get("/jitllm/models/m/placement")["devices"]
            for line in (*lines, *devices):
                assert line["used_bytes"] <= (line["budget_bytes"] or 2**63), line
            memory.append(self.served.figures.memory_info().rss)
        return memory

    def run(self, n_clients: int, seconds: float) -> list[int]:
        """All at once, for so long; the process's memory as it went."""
        self.stop.clear()
        with ThreadPoolExecutor(n_clients + 2) as pool:
            watched, changed = pool.submit(self.watch), pool.submit(self.change)
            working = [pool.submit(self.work, seed) for seed in range(n_clients)]
            end = time.monotonic() + seconds
            while time.monotonic() < end and not any(f.done() for f in (watched, *working)):
                self.stop.wait(0.1)
            self.stop.set()
            for future in (*working, changed):
                future.result()
            return watched.result()


def _whole(response: Any) -> Answer:
    choices = json.load(response)["choices"]
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


def _streamed(response: Any) -> Answer:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    events = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]", events[-1]
    for event in events[:-1]:
        (choice,) = json.loads(event)["choices"]
        index, reason = choice["index"], choice["finish_reason"]
        texts[index] = texts.get(index, "") + choice["text"]
        reasons |= {index: reason} if reason else {}
    return [(texts[index], reasons[index]) for index in sorted(texts)]


def soak(served: Served, file: str, seconds: float, n_clients: int = 16) -> Counter[str]:
    """AssertionError where an answer was wrong, a request lost, a budget exceeded, or threads,
    files or memory have grown; what was done. The server has loaded nothing yet."""

    process = served.figures
    with loaded(served, file):  # what is made once and stays, is made
        Crowd(served).run(n_clients, seconds / 4)
    threads, files, rss = process.num_threads(), process.num_fds(), process.memory_info().rss
    with loaded(served, file):
        crowd = Crowd(served)
        done = check(crowd, seconds, n_clients)
    wait_for(lambda: process.num_threads() <= threads + _XLA_THREADS)
    wait_for(lambda: process.num_fds() <= files)
    grown = process.memory_info().rss - rss
    assert grown <= crowd.growth_bytes, f"{grown / 2**20:.1f} MiB are left behind"
    return done


@contextmanager
def loaded(served: Served, file: str) -> Iterator[None]:
    served.client.post("/jitllm/models", {"file": file, "id": "m"})
    yield
    served.client.delete("/jitllm/models/m")


def check(crowd: Crowd, seconds: float, n_clients: int) -> Counter[str]:
    """Run the crowd; what it did and what the server counted, which have to agree."""
    served, before = crowd.served, crowd.served.stats()["requests"]
    crowd.counts.clear()
    memory = crowd.run(n_clients, seconds)
    wait_for(lambda: served.rows() == (0, 0, 0))
    counts = crowd.counts
    assert all(counts[what] for what in DONE), counts

    def ended() -> Counter[str]:
        now = served.stats()["requests"]
        return Counter({outcome: now[outcome] - before[outcome] for outcome in now})

    # each request has one outcome; who left may have had an answer, or not have been heard at all
    wait_for(lambda: ended().total() >= counts["sent"] - counts["left before"])
    n_left = counts["left before"] + counts["left amid"]
    assert ended()["failed"] == 0 < ended()["cancelled"] <= n_left, ended()
    assert ended()["ok"] >= counts["finished"] and ended()["refused"] >= counts["refused"]
    assert ended().total() <= counts["sent"]
    memory = memory[len(memory) // 2 :]  # until then steps are compiled
    first, second = memory[: len(memory) // 2], memory[len(memory) // 2 :]
    grown = statistics.median(second) - statistics.median(first)
    assert grown <= crowd.growth_bytes, f"{grown / 2**20:.1f} MiB more"
    return counts + Counter({f"ended {outcome}": n for outcome, n in ended().items()})


def main() -> None:
    """Soak a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=16)
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_model(Path(folder))
        with serving(model.parent, *FLAGS, *flags) as served:
            print(dict(soak(served, model.name, args.seconds, args.clients)))


if __name__ == "__main__":
    main()
