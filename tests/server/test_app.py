"""The application on the fake engine: what is refused and how, and many requests at once."""

import json
import random
import threading

import pytest

from jitllm.server.protocol import COMPLETION
from tests.server.asking import chunks_of, error_of, wait_until
from tests.server.fake_engine import FakeEngine

JSON = "application/json"
SAMPLER = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
)


def to(path: str, body: object = None, method: str = "POST", **options: object) -> dict:
    """A request."""
    return {"path": path, "method": method} | ({"json": body} if body is not None else {}) | options


TEXT, FAKE = "/v1/completions", "/jitllm/models/fake"
REFUSALS = [
    (404, "not_found", to("/v2/models", method="GET")),
    (405, "method_not_allowed", to(TEXT, {}, "PUT")),
    (415, "unsupported_media_type", to(TEXT, data="{}", content_type="text/plain")),
    (415, "unsupported_media_type", to(TEXT, data={"prompt": "a"})),
    (400, "invalid_json", to(TEXT, data="{", content_type=JSON)),
    (413, "request_entity_too_large", to(TEXT, data=b" " * (5 << 20), content_type=JSON)),
    (400, "missing_required_parameter", to(TEXT, {})),
    (404, "model_not_found", to(TEXT, {"prompt": "a", "model": "gpt"})),
    (404, "session_not_found", to(TEXT, {"prompt": "a", "jitllm_session": "x"})),
    (400, "invalid_value", to(TEXT, {"prompt": ""})),
    (400, "invalid_value", to(TEXT, {"prompt": [10**6]})),
    (404, "model_not_found", to("/v1/models/gpt", method="GET")),
    (404, "model_not_found", to("/jitllm/models/gpt/budget", method="GET")),
    (409, "budget_too_small", to(f"{FAKE}/budget", {"maxmem": "1K"}, "PUT")),
    (400, "invalid_value", to(f"{FAKE}/budget", {"maxmem": "much"}, "PUT")),
    (400, "invalid_value", to(f"{FAKE}/budget", {"maxmem": -1}, "PUT")),
    (400, "invalid_value", to(f"{FAKE}/placement/moves", {"first": 0, "last": 1, "to": "moon"})),
    (400, "unsupported_parameter", to(f"{FAKE}/placement", {"placement": "head=cpu:1"}, "PUT")),
    (400, "invalid_value", to(f"{FAKE}/placement", {"placement": "x"}, "PUT")),
    (404, "session_not_found", to("/jitllm/sessions/x", method="DELETE")),
    (400, "invalid_value", to("/jitllm/stats?watch=soon", method="GET")),
    (404, "file_not_found", to("/jitllm/models", {"file": "none.jlm"})),
    (409, "model_exists", to("/jitllm/models", {"file": "fake.jlm"})),
    (400, "invalid_value", to("/jitllm/models", {"file": "fake.jlm", "id": "a/b"})),
    (400, "unknown_parameter", to("/jitllm/models", {"file": "fake.jlm", "profile": "x"})),
]
TYPES = {400: "invalid_request_error", 404: "not_found_error", 409: "conflict_error"}


@pytest.mark.parametrize(("status", "code", "asked"), REFUSALS)
def test_what_cannot_be_answered_is_an_error_object(served, status, code, asked):
    response = served.client.open(**asked)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (status, code)
    assert error["type"] == TYPES.get(status, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_400_with_both_numbers_before_any_event(served, stream):
    response = served.complete("a" * 65, stream=stream)
    assert (response.status_code, response.mimetype) == (400, JSON)
    assert error_of(response) == {
        "message": "the prompt has 65 tokens, but the context of fake is 64 tokens",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
        "n_prompt_tokens": 65,
        "n_ctx": 64,
    }
    assert served.complete("a" * 64, max_tokens=5).get_json()["choices"][0]["text"] == "b"


def test_messages_that_the_template_refuses_are_a_400(served):
    response = served.post(
        "/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}]}
    )
    assert response.status_code == 400
    assert error_of(response)["message"] == "the last message cannot be of the system"


def test_a_failed_step_is_an_error_and_the_server_goes_on(served):
    served.engine.broken_token = served.engine.tokenizer.encode("e")[0]
    response = served.complete("ab", max_tokens=5)
    assert response.status_code == 409
    data = served.complete("ab", max_tokens=5, stream=True).get_data(as_text=True)
    assert "a page could not be held" in json.loads(data.split("\n\n")[-2][6:])["error"]["message"]
    assert served.complete("ij", max_tokens=2).get_json()["choices"][0]["text"] == "kl"
    requests = served.client.get("/jitllm/stats").get_json()["requests"]
    assert requests == {"ok": 1, "cancelled": 0, "refused": 0, "failed": 2}


def test_random_bodies_are_answered_with_4xx_or_a_reply_and_nothing_else(served):
    random.seed(4242)
    fields = ["prompt", "n", "stop", "max_tokens", "stream", "logprobs", "temperature", "seed", "x"]
    values = [
        "a",
        "",
        0,
        1,
        -1,
        2**70,
        1.5,
        True,
        None,
        [],
        ["a"],
        [1],
        [[1]],
        {},
        {"a": []},
        "é😀",
    ]
    values += [float("nan"), [None], "\ud800", [["a"]], {"include_usage": True}]
    for _ in range(500):
        body = {random.choice(fields): random.choice(values) for _ in range(random.randint(0, 5))}
        data = json.dumps(body)
        if random.random() < 0.2:
            data = data[: random.randint(0, len(data))]
        path = random.choice(["/v1/completions", "/v1/chat/completions"])
        response = served.client.post(path, data=data, content_type=JSON)
        if response.status_code != 200:
            assert 400 <= response.status_code < 500, (body, response.get_data())
            error_of(response)
        response.close()
    assert served.complete(max_tokens=2).get_json()["choices"][0]["text"] == "de"


def test_the_ends_of_every_range_of_the_sampler_give_text(served):
    ranges = {name: COMPLETION[name].schema for name in SAMPLER}
    rng = random.Random(4242)
    for _ in range(200):
        # the least number above 0 is 0 in float32
        above_0 = {"number": 5e-324, "integer": 1}
        ends = {
            name: rng.choice([r["minimum"], max(r["minimum"], above_0[r["type"]]), r["maximum"]])
            for name, r in ranges.items()
        }
        reply = served.complete("abcabc", **ends, max_tokens=6, ignore_eos=True, logprobs=3)
        assert reply.status_code == 200, (ends, reply.get_data())
        (choice,) = reply.get_json()["choices"]
        found = choice["logprobs"]["token_logprobs"]
        assert len(found) == 6 and all(-20 < logprob < 0 for logprob in found)


def test_a_full_queue_is_a_429_that_says_when_to_come_back(make):
    served = make(FakeEngine(), sessions=1, max_queue=1)
    served.engine.go_on.clear()
    asked = [threading.Thread(target=served.complete, kwargs={"max_tokens": 2}) for _ in range(2)]
    scheduler = served.app.extensions["jitllm"].models.get("fake").scheduler
    for thread, (n_active, n_queued) in zip(asked, [(1, 0), (1, 1)], strict=True):
        thread.start()
        wait_until(lambda: counts(scheduler) == (n_active, n_queued))  # noqa: B023
    response = served.complete(max_tokens=2)
    served.engine.go_on.set()
    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) >= 1
    assert error_of(response)["type"] == "rate_limit_error"
    for thread in asked:
        thread.join()


def test_a_stream_and_a_whole_reply_are_the_same_for_any_stops_and_any_tokens(served):
    rng = random.Random(4242)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for seed in range(40):
        letters = "abcdefgh é😀 XYZ.!"
        asked = {
            "prompt": "".join(rng.choices(letters, k=rng.randrange(1, 9))),
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0, 1, 2]),
            "stop": ["".join(rng.choices(letters, k=rng.randrange(1, 3))) for _ in range(3)],
            "seed": seed,
            "logprobs": 1,
        }
        whole = served.complete(**asked).get_json()
        *chunks, last = chunks_of(served.complete(**asked, **usage))
        parts = [chunk["choices"][0] for chunk in chunks]
        (choice,) = whole["choices"]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][key] == whole["usage"][key]
        tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]


def test_a_stream_that_is_closed_frees_its_row_and_counts_as_cancelled(make):
    served = make(FakeEngine(max_seq=4096, step_s=0.002), sessions=1)
    body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    for n_events in (2, 0):
        response = served.post("/v1/completions", body, buffered=False)
        iterator = response.iter_encoded()
        for _ in range(n_events):
            next(iterator)
        response.close()
    assert served.complete("ab", max_tokens=2).get_json()["choices"][0]["text"] == "cd"
    assert served.client.get("/jitllm/stats").get_json()["requests"]["cancelled"] == 2


def test_a_server_that_is_about_to_end_takes_no_requests(served):
    served.app.extensions["jitllm"].drain(0.1)
    assert served.client.get("/healthz").status_code == 503
    response = served.complete()
    assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
    assert "Retry-After" in response.headers


def counts(scheduler) -> tuple[int, int]:
    stats = scheduler.stats
    return stats.n_prefilling + stats.n_decoding, stats.n_queued
