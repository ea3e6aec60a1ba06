"""A real `jitllmd serve` in a process of its own, on a free port, with a tiny model."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from jitllm.convert import convert
from jitllm.server.client import Client
from tests.tiny_models import MODELS, random_tensors, write_gguf

_JITLLMD = "import sys; from jitllm.cli.jitllmd import main; sys.exit(main())"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_model(folder: Path, name: str = "tiny", **overrides: Any) -> Path:
    """A container with 1024 tokens of context and a chat template."""
    from dataclasses import replace

    tiny = replace(MODELS["Q4_K"], **{"context_length": 1024, "n_blocks": 4} | overrides)
    tensors = dict(random_tensors(tiny))
    source = folder / f"{name}.gguf.source"
    write_gguf(source, tiny, tensors, lambda writer: writer.add_chat_template(TEMPLATE))
    return convert(source, folder / f"{name}.jlm").out


class Served:
    """A running server: its process, its port, and what it said."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.said = process, []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listening.wait(60), f"it does not listen: {self.said}"
        self.addr = re.search(r"listening at http://(\S+)", "".join(self.said))[1]
        self.host, port = self.addr.rsplit(":", 1)
        self.port = int(port)
        self.client = Client(self.addr)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.said.append(line)
            if "listening at" in line:
                self._listening.set()
        self._listening.set()

    @property
    def figures(self) -> psutil.Process:
        """Threads, files and memory of the process."""
        return psutil.Process(self.process.pid)

    def complete(self, prompt: Any, **fields: Any) -> dict:
        """The whole reply to a prompt, greedy unless told otherwise."""
        return self.client.post(
            "/v1/completions", {"prompt": prompt, "temperature": 0, "ignore_eos": True} | fields
        )

    def text(self, prompt: Any, **fields: Any) -> str:
        """The text of the only choice."""
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def stats(self) -> dict:
        """What the server counts."""
        return self.client.get("/jitllm/stats")

    def rows(self) -> tuple[int, int, int]:
        """Requests that wait, prompts that are read, replies under way, of all models."""
        found = [model["scheduler"] for model in self.stats()["models"].values()]
        names = "n_queued", "n_prefilling", "n_decoding"
        return tuple(sum(model[name] for model in found) for name in names)

    def send(self, body: dict, path: str = "/v1/completions") -> socket.socket:
        """A request on a socket of its own, sent and not waited for."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self.addr}\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection((self.host, self.port), timeout=30)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """A server for the models in `folder`, gone at the end of the `with`."""
    command = [sys.executable, "-c", _JITLLMD, "serve", "-models", str(folder), *flags]
    if "-addr" not in flags:
        command += ["-addr", "127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield Served(process)
    finally:
        process.kill()
        process.wait(30)
        process.stderr.close()


def wait_for(condition, seconds: float = 20) -> None:
    """Polls until `condition()`; its last value where it never comes."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not come to that, but to {found}"
        time.sleep(0.01)
