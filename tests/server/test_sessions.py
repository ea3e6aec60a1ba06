"""Sessions on the fake engine: conversations that go on where they were."""

import threading

from tests.server.asking import chunks_of, error_of, wait_until
from tests.server.fake_engine import FakeEngine


def session(served, **body) -> str:
    return served.post("/jitllm/sessions", body).get_json()["id"]


def test_a_session_goes_on_where_it_was_and_computes_only_what_is_new(served):
    id = session(served, model="fake")
    first = served.complete("abcd", max_tokens=2, jitllm_session=id).get_json()
    assert first["choices"][0]["text"] == "ef"
    second = served.complete("xyz", max_tokens=2, jitllm_session=id).get_json()
    assert second["choices"][0]["text"] == " A"
    # all but the last token of the first reply were in its cache
    assert second["usage"]["prompt_tokens"] == 9
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert second["jitllm"]["session"] == id
    found = served.client.get(f"/jitllm/sessions/{id}").get_json()
    assert (found["kind"], found["tokens"], found["busy"]) == ("text", 10, False)


def test_a_session_equals_one_long_prompt(served):
    id = session(served)
    text = ""
    for prompt in ("abc", [20, 21], "x"):
        reply = served.complete(prompt, max_tokens=3, jitllm_session=id).get_json()
        shown = prompt if isinstance(prompt, str) else served.engine.tokenizer.decode(prompt)
        whole = served.complete(text + shown, max_tokens=3).get_json()
        assert reply["choices"] == whole["choices"]
        assert reply["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        text += shown + reply["choices"][0]["text"]


def test_a_chat_session_remembers_what_was_said(served):
    id = session(served)
    served.chat("abc", max_tokens=2, jitllm_session=id)
    reply = served.chat("xyz", max_tokens=1, jitllm_session=id).get_json()
    assert reply["usage"]["prompt_tokens"] == len("abc\nde\nxyz")
    response = served.complete(jitllm_session=id)
    assert error_of(response)["message"] == f"the session {id} is a chat; reset it, or open another"
    assert served.post(f"/jitllm/sessions/{id}/reset", {}).get_json()["tokens"] == 0
    assert served.complete(max_tokens=1, jitllm_session=id).status_code == 200


def test_a_turn_that_fails_leaves_the_session_as_it_was(served):
    id = session(served)
    served.complete("abc", max_tokens=2, jitllm_session=id)
    assert served.complete("a" * 65, jitllm_session=id).status_code == 400
    served.engine.broken_token = served.engine.tokenizer.encode("z")[0]
    assert served.complete("xy", max_tokens=5, jitllm_session=id).status_code == 409
    served.engine.broken_token = None
    reply = served.complete("x", max_tokens=1, jitllm_session=id).get_json()
    assert reply["usage"]["prompt_tokens"] == len("abcdex")


def test_a_session_takes_one_turn_at_a_time(make):
    served = make(FakeEngine())
    id = session(served)
    served.engine.go_on.clear()
    turn = threading.Thread(target=served.complete, kwargs={"jitllm_session": id})
    turn.start()
    wait_until(lambda: served.client.get(f"/jitllm/sessions/{id}").get_json()["busy"])
    for response in (
        served.complete(jitllm_session=id),
        served.client.delete(f"/jitllm/sessions/{id}"),
        served.post(f"/jitllm/sessions/{id}/reset", {}),
    ):
        assert (response.status_code, error_of(response)["code"]) == (409, "session_busy")
    served.engine.go_on.set()
    turn.join()
    assert served.client.delete(f"/jitllm/sessions/{id}").status_code == 200
    assert served.client.get("/jitllm/sessions").get_json()["data"] == []


def test_there_are_as_many_sessions_as_the_server_was_told_and_no_more(make):
    served = make(sessions=2)
    ids = [session(served) for _ in range(2)]
    assert len(set(ids)) == 2
    response = served.post("/jitllm/sessions", {})
    assert (response.status_code, error_of(response)["code"]) == (409, "too_many_sessions")


def test_streamed_and_whole_turns_of_a_session_are_the_same(served):
    whole, streamed = session(served), session(served)
    for prompt in ("abc", "xyz"):
        asked = {"max_tokens": 3, "stop": ["A"]}
        body = served.complete(prompt, jitllm_session=whole, **asked).get_json()
        chunks = chunks_of(served.complete(prompt, jitllm_session=streamed, stream=True, **asked))
        text = "".join(c["choices"][0]["text"] for c in chunks)
        assert text == body["choices"][0]["text"]
