"""A real server in a process of its own: verbs, disconnects, changes while it runs, and its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jitllm.cli import jitllmd
from jitllm.errors import JitllmError
from tests.server.process import Served, serving, wait_for, write_model

SMALL, LARGE = "400K", "64M"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path):
    flags = ["-load", "tiny.jlm", "-devices", "cpu,cpu:1=64M", "-maxmem", LARGE]
    flags += ["-placement", "*=host,head=host"]
    with serving(folder, *flags, "-sessions", "4", "-max-queue", "4") as served:
        yield served


@pytest.fixture
def verb(served: Served, capsys: pytest.CaptureFixture):
    """Runs a verb against the server; its exit code and what it printed."""

    def verb(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = jitllmd.main([argv[0], "-addr", served.addr, *argv[1:]])
        return code, *capsys.readouterr()

    return verb


# Verbs


def test_devices_shows_the_memory_that_can_be_spent(verb):
    code, out, _ = verb("devices")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["device", "budget", "used", "free", "total", "kind"]
    # cpu:1 has the host's memory, which is there once
    assert [line.split()[0] for line in lines[1:]] == ["host"]
    host = json.loads(verb("devices", "--json")[1])["data"][0]
    assert 0 < host["used_bytes"] <= host["budget_bytes"] == 64 << 20


def test_place_shows_the_pager_and_changes_its_budget(served, verb):
    _, out, _ = verb("place", "-model", "tiny")
    assert "4 of 4 blocks resident at once" in out and ": it fits" in out
    text = served.text("Once upon a time", max_tokens=12)
    code, out, _ = verb("place", "-model", "tiny", "-maxmem", SMALL)
    assert code == 0
    assert "memory   budget 400.0 KiB" in out and "over budget by" in out
    assert "applied  budget 400.0 KiB" in out
    blocks = served.client.get("/jitllm/models/tiny/residency")["blocks"]
    assert 0 < sum(block["in_memory"] for block in blocks) < 4
    before = served.stats()["models"]["tiny"]["pager"]["page_ins"]
    assert served.text("Once upon a time", max_tokens=12) == text
    assert served.stats()["models"]["tiny"]["pager"]["page_ins"] > before
    code, _, err = verb("place", "-model", "tiny", "-maxmem", "1K")
    assert code == 1 and err.startswith("jitllmd: a budget of 1.0 KiB is too small")
    verb("place", "-model", "tiny", "-maxmem", LARGE)


def test_blocks_move_in_the_middle_of_a_conversation_with_their_kv(served, verb):
    id = verb("sessions", "-new", "-model", "tiny")[1].strip()
    plain = served.complete("Once upon a time", max_tokens=8, jitllm_session=id)
    code, out, err = verb("place", "-session", id, "-move", "1:2", "-to", "cpu:1")
    assert code == 0, err
    moved = [line.split() for line in out.splitlines() if "cpu:1" in line]
    assert moved and moved[0][:3] == ["blocks", "1-2", "cpu:1"]
    more = served.complete(" She", max_tokens=8, jitllm_session=id)
    assert blocks_of(more) == {"host": 2, "cpu:1": 2}
    assert all(device["blocks_executed"] for device in more["jitllm"]["devices"])
    assert more["usage"]["prompt_tokens_details"]["cached_tokens"] == 5 + 7
    verb("place", "-model", "tiny", "-move", "0:3", "-to", "host")
    verb("sessions", "-close", id)
    id = verb("sessions", "-new")[1].strip()
    for prompt, turn in (("Once upon a time", plain), (" She", more)):
        unmoved = served.complete(prompt, max_tokens=8, jitllm_session=id)
        assert unmoved["choices"] == turn["choices"]
    assert served.stats()["models"]["tiny"]["blocks_executed"]["cpu:1"] > 0
    code, _, err = verb("place", "-session", id, "-move", "0:9", "-to", "cpu:1")
    assert (code, err) == (1, "jitllmd: blocks 0-9 are not there; the model has 0-3\n")
    assert verb("sessions", "-close", id)[1] == "no session is open\n"


def blocks_of(reply: dict) -> dict[str, int]:
    return {device["device"]: device["n_blocks"] for device in reply["jitllm"]["devices"]}


def test_a_placement_map_is_followed_while_the_server_runs(served, verb):
    code, _, err = verb("place", "-model", "tiny", "-placement", "0=cpu:1,*=host")
    assert code == 0, err
    assert blocks_of(served.complete("a", max_tokens=1)) == {"cpu:1": 1, "host": 3}
    verb("place", "-model", "tiny", "-placement", "*=host")


def test_of_a_placement_map_that_cannot_be_followed_nothing_is(served, verb):
    verb("place", "-model", "tiny", "-placement", "3=cpu:1,*=host")
    code, _, err = verb("place", "-model", "tiny", "-placement", "0=cpu:1,3=host,1=cuda:7")
    assert code == 1 and err.startswith("jitllmd: cuda:7 is not among the devices that are open")
    assert blocks_of(served.complete("a", max_tokens=1)) == {"cpu:1": 1, "host": 3}
    placement = served.client.get("/jitllm/models/tiny/placement")["parts"]
    assert [part["device"] for part in placement[:4]] == ["host"] * 3 + ["cpu:1"]
    verb("place", "-model", "tiny", "-placement", "*=host")


def test_what_a_server_refuses_is_said_in_the_words_that_were_typed(verb):
    load = "models", "-load", "tiny.jlm", "-id", "two"
    for argv, sentence in (
        (("run", "-temp", "3", "a"), "-temp has to be a number from 0 to 2, but is 3.0"),
        (("run", "-stop", "", "a"), "-stop has to be of 1 to 256 characters, but is of 0"),
        ((*load, "-max-seq", "9999"), "-max-seq is 9999; this model's context is 1 to 1024 tokens"),
        (
            (*load, "-gpu-layers", "-1"),
            "-gpu-layers has to be a whole number from 0 to 2147483647, but is -1",
        ),
        (
            ("place", "-model", "tiny", "-move", "3:1", "-to", "host"),
            "-move '3:1' ends before it begins; write 1:3",
        ),
    ):
        assert verb(*argv) == (2, "", f"jitllmd: {sentence}\n")


def test_a_key_that_is_missing_is_asked_for_as_the_verbs_take_it(folder, capsys):
    keys = ["--api-key", "K", "--admin-key", "A"]
    with serving(folder, "-load", "tiny.jlm", "-devices", "cpu", *keys) as served:
        place = ["place", "-addr", served.addr, "-model", "tiny"]
        assert jitllmd.main(place) == 1
        assert jitllmd.main([*place, "-maxmem", LARGE, "--api-key", "K"]) == 1
        assert capsys.readouterr().err.splitlines() == [
            "jitllmd: the api key is wrong or missing; give it with --api-key, or in "
            "JITLLMD_API_KEY",
            "jitllmd: this needs the admin key; give it with --api-key, or in JITLLMD_ADMIN_KEY",
        ]
        assert jitllmd.main([*place, "-maxmem", LARGE, "--api-key", "A"]) == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"hello\n", "what answers at @ is no jitllmd"),
        (b"HTTP/1.1 501 Not Here\r\n\r\n", "what answers at @ is no jitllmd: it says 501 Not Here"),
        (b"", "the server at @ broke off: Remote end closed connection without response"),
    ],
)
def test_what_is_no_server_of_ours_is_said_to_be_none(capsys, answer, words):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        addr = f"127.0.0.1:{listener.getsockname()[1]}"

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        assert jitllmd.main(["devices", "-addr", addr]) == 1
        thread.join()
    assert capsys.readouterr().err == f"jitllmd: {words.replace('@', addr)}\n"


def test_a_session_says_by_itself_which_model_is_meant(served, verb):
    verb("models", "-load", "tiny.jlm", "-id", "two", "-maxmem", SMALL)
    id = verb("sessions", "-new", "-model", "two")[1].strip()
    assert served.complete("Once", max_tokens=1, jitllm_session=id)["model"] == "two"
    sentence = "-model is missing; loaded are: tiny, two"
    assert verb("run", "Once") == (2, "", f"jitllmd: {sentence}\n")
    verb("models", "-unload", "two")


def test_run_streams_to_stdout_and_says_the_cost_on_stderr(served, verb):
    code, out, err = verb("run", "-n", "6", "-temp", "0", "Once upon a time")
    assert code == 0
    assert out == f"Once upon a time{served.text('Once upon a time', max_tokens=6)}\n"
    assert err.startswith("rate     prompt 5 tokens")
    code, out, _ = verb("run", "--json", "-chat", "-n", "3", "-temp", "0", "hello")
    assert json.loads(out)["object"] == "chat.completion"


def test_models_and_stats_say_what_is_there(served, verb):
    _, out, _ = verb("models", "-load", "tiny.jlm", "-id", "two", "-maxmem", SMALL)
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["tiny", "two"]
    assert json.loads(verb("models", "--json", "-unload", "two")[1])["data"][0]["id"] == "tiny"
    out = verb("stats")[1]
    assert out.splitlines()[0].startswith("server   up for")
    assert "model    tiny" in out
    watched = served.client.events("/jitllm/stats?watch=0.1")
    assert next(watched)["uptime_s"] < next(watched)["uptime_s"]
    watched.close()


def test_a_server_that_is_not_there_is_one_sentence_with_how_to_start_it(capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert jitllmd.main(["devices", "-addr", f"127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err == (
        f"jitllmd: no server answers at 127.0.0.1:{port} (Connection refused); "
        f"jitllmd serve -addr 127.0.0.1:{port} starts one\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["place"], "place needs either -model ID or -session ID"),
        (["place", "-model", "a", "-move", "0:1"], "-move FIRST:LAST and -to WHERE go together"),
        (["place", "-session", "s", "-maxmem", "1M"], "-maxmem is a model's; write -model ID"),
        (["models", "-maxmem", "1M"], "-maxmem is for a model to load; add -load FILE"),
        (["sessions", "-model", "m"], "-model is for a session to open; add -new"),
        (["run", "-system", "x", "y"], "-system is part of a conversation; add -chat"),
        (["serve", "-addr", "0.0.0.0:0"], "-addr 0.0.0.0:0 can be reached from other machines; "
         "add --api-key KEY, or listen at 127.0.0.1:4242"),
    ],
)  # fmt: skip
def test_verbs_that_cannot_mean_anything_are_usage(capsys, argv, message):
    assert jitllmd.main(argv) == 2
    assert capsys.readouterr().err == f"jitllmd: {message}\n"


def test_how_a_model_is_opened_is_the_server_s_to_say_and_a_load_s(folder):
    flags = ["-devices", "cpu", "-kv", "f32", "-threads", "1", "--process-limit", "32M"]
    with serving(folder, "-load", "tiny.jlm", *flags) as served:
        given = {"file": "tiny.jlm", "id": "two", "kv": "f16", "process_limit": "48M"}
        served.client.post("/jitllm/models", given)
        found = served.client.get("/jitllm/models")["data"]
        shown = [(m["kv"], m["threads"], m["process_limit_bytes"] >> 20) for m in found]
        assert shown == [("f32", 1, 32), ("f16", 1, 48)]
        text = served.text("Once upon a time", model="tiny")
        assert text == served.text("Once upon a time", model="tiny", max_tokens=16)
        cache = served.stats()["models"]["tiny"]["scheduler"]["prefix_cache"]
        assert cache["budget_bytes"] > 0 and cache["n_hits"] == 1
        for limit, words in (("1K", "a process limit of 1.0 KiB is"), ("x", "process_limit: size")):
            with pytest.raises(JitllmError, match=words):
                served.client.post("/jitllm/models", given | {"id": "no", "process_limit": limit})


# Clients that leave


LONG = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}
# no two begin alike, so that every one of them has to be read
MANY_PROMPTS = [[10 + i, *[7] * 1000] for i in range(32)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("state", "body"),
    [
        ("queued", LONG | {"prompt": "Once"}),
        ("prefilling", {"prompt": MANY_PROMPTS, "max_tokens": 1}),
        ("decoding", LONG | {"prompt": "Once"}),
    ],
)
def test_a_client_that_goes_away_is_counted_and_changes_no_text(served, state, body, stream):
    alone = served.text("Other", max_tokens=900)
    before, n_neighbours = served.stats()["requests"], 4 if state == "queued" else 1
    with ThreadPoolExecutor(1) as pool:
        neighbours = pool.submit(served.complete, "Other", max_tokens=900, n=n_neighbours)
        wait_for(lambda: served.rows()[2] == n_neighbours)
        connection = served.send(body | {"stream": stream})
        which = ("queued", "prefilling", "decoding").index(state)
        wait_for(lambda: served.rows()[which] > (n_neighbours if state == "decoding" else 0))
        connection.close()
        wait_for(lambda: served.rows() == (0, 0, n_neighbours))
        texts = [choice["text"] for choice in neighbours.result(60)["choices"]]
    assert texts == [alone] * n_neighbours
    after = before | {"ok": before["ok"] + 1, "cancelled": before["cancelled"] + 1}
    wait_for(lambda: served.stats()["requests"] == after)


def test_a_full_queue_is_a_429_with_retry_after(served):
    busy = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
    connections = [served.send(busy | {"n": 4})]
    wait_for(lambda: served.rows()[2] == 4)
    connections += [served.send(busy) for _ in range(4)]
    wait_for(lambda: served.rows()[0] == 4)
    refused = served.send(busy)
    answer = refused.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 429 ")
    assert "\r\nRetry-After: " in answer
    for connection in (*connections, refused):
        connection.close()
    wait_for(lambda: served.rows() == (0, 0, 0))


def test_a_client_that_sends_nothing_or_reads_nothing_holds_up_nobody(served):
    idle = [socket.create_connection((served.host, served.port)) for _ in range(30)]
    half = [socket.create_connection((served.host, served.port)) for _ in range(30)]
    for connection in half:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
    asked = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    deaf = [served.send(asked) for _ in range(3)]
    assert served.text("Once", max_tokens=3)
    wait_for(lambda: served.rows() == (0, 0, 0), seconds=60)
    for connection in (*idle, *half, *deaf):
        connection.close()


# The end


def test_sigterm_lets_a_reply_finish_refuses_others_and_exits_with_0(folder):
    with serving(folder, "-load", "tiny.jlm", "-devices", "cpu") as served:
        asked = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with served.send(asked) as connection:
            data = connection.recv(100)
            served.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "draining: replies under way may finish\n" in served.said)
            with served.send({"prompt": "Twice"}) as refused:
                answer = refused.recv(4096)
            while more := connection.recv(1 << 16):
                data += more
        assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: " in answer
        assert b"data: [DONE]" in data
        assert served.process.wait(20) == 0


def test_after_a_second_sigterm_no_reply_goes_on(folder):
    write_model(folder, "long", context_length=1 << 15)
    with serving(folder, "-load", "long.jlm", "-devices", "cpu", "-max-seq", "32768") as served:
        asked = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        with served.send(asked) as connection:
            data = connection.recv(100)
            served.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "draining: replies under way may finish\n" in served.said)
            served.process.send_signal(signal.SIGTERM)
            while more := connection.recv(1 << 16):
                data += more
        assert b"[DONE]" not in data
        assert served.process.wait(20) == 0


def test_a_server_that_was_stopped_for_a_while_hears_a_signal_of_that_time(folder):
    with serving(folder) as served:
        served.process.send_signal(signal.SIGSTOP)
        served.process.send_signal(signal.SIGTERM)
        served.process.send_signal(signal.SIGCONT)
        assert served.process.wait(20) == 0


def test_a_server_that_was_killed_leaves_nothing_in_the_way_of_the_next(folder):
    with (
        serving(folder, "-load", "tiny.jlm", "-devices", "cpu") as first,
        first.send({"prompt": "Once", "max_tokens": 900, "stream": True}) as connection,
    ):
        connection.recv(10)
        first.process.kill()
        first.process.wait(10)
    with serving(folder, "-load", "tiny.jlm", "-devices", "cpu", "-addr", first.addr) as second:
        assert second.text("Once", max_tokens=2)
        assert second.terminate() == 0


def test_flask_and_waitress_serve_find_the_application(folder, tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text(f"models: {folder}\nload: tiny.jlm\nid: [t]\ndevices: cpu\nmaxmem: 400K\n")
    code = (
        f"import os; os.environ['JITLLMD_CONFIG'] = {str(config)!r}\n"
        "from app import app\n"
        "reply = app.test_client().post('/v1/completions', json={'prompt': 'Once'})\n"
        "print(reply.get_json()['model']); app.extensions['jitllm'].close()"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert (done.stdout, done.returncode) == ("t\n", 0), done.stderr


def test_settings_that_cannot_be_end_the_application_in_one_sentence(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("sesions: 2\n")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", "import app"],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"JITLLMD_CONFIG": str(config)},
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"jitllmd: settings {config}: unknown key 'sesions'; known are ")
    assert done.stderr.count("\n") == 1
