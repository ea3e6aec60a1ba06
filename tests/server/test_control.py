"""The control plane on the fake engine: models, budgets, places, and what is said of them."""

from jitllm.placement.profile import profile_hash
from jitllm.placement.rules import Profile
from tests.server.asking import error_of
from tests.server.fake_engine import FakeEngine


def test_models_are_loaded_and_put_away_while_the_server_runs(served):
    assert served.post("/jitllm/models", {"file": "fake.jlm", "id": "two"}).status_code == 201
    ids = [m["id"] for m in served.client.get("/v1/models").get_json()["data"]]
    assert ids == ["fake", "two"]
    response = served.complete(max_tokens=1)
    assert error_of(response)["message"] == "model is missing; loaded are: fake, two"
    assert served.complete(max_tokens=1, model="two").status_code == 200
    assert served.client.delete("/jitllm/models/two").get_json()["deleted"] is True
    assert served.engine.closed
    assert served.complete(max_tokens=1, model="two").status_code == 404


def test_a_model_is_described_as_the_document_says(served):
    model = served.client.get("/jitllm/models/fake").get_json()
    assert model["profile"] == {"file": None, "hash": profile_hash(Profile())}
    served.engine.profile = Profile(source="/private/mine.yaml", strict=True)
    model = served.client.get("/jitllm/models/fake").get_json()
    assert model["profile"] == {"file": "mine.yaml", "hash": profile_hash(served.engine.profile)}
    placement = served.client.get("/jitllm/models/fake/placement").get_json()
    assert placement["profile"] == model["profile"]
    assert (model["kv"], model["threads"], model["process_limit_bytes"]) == ("f16", 2, None)
    assert served.client.get("/v1/models/fake").get_json() == model
    operation = served.client.get("/openapi.json").get_json()["paths"]["/jitllm/models/{id}"]["get"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(schema["required"]) == set(schema["properties"]) == set(model)


def test_the_prefix_cache_takes_what_the_process_limit_leaves(make):
    for spare_bytes, n_bytes in ((None, 4096), (1000, 1000), (1 << 20, 4096)):
        engine = FakeEngine()
        engine.spare_bytes = spare_bytes
        stats = make(engine).client.get("/jitllm/stats").get_json()["models"]["fake"]
        assert stats["scheduler"]["prefix_cache"]["budget_bytes"] == n_bytes


def test_a_budget_is_changed_between_two_tokens_and_says_what_was_applied(served):
    before = served.client.get("/jitllm/models/fake/budget").get_json()
    assert (before["budget_bytes"], before["resident_blocks"], before["fits"]) == (409600, 3, False)
    response = served.client.put("/jitllm/models/fake/budget", json={"maxmem": "1M"})
    assert response.get_json()["applied"]["evicted"] == 2
    assert response.get_json()["fits"] is True
    assert served.engine.budget_bytes == 1 << 20


def test_blocks_are_moved_for_a_model_or_by_one_of_its_sessions(served):
    move = {"first": 0, "last": 2, "to": "cpu:1"}
    assert served.post("/jitllm/models/fake/placement/moves", move).status_code == 200
    id = served.post("/jitllm/sessions", {}).get_json()["id"]
    back = {"first": 1, "last": 1, "to": "CPU"}
    assert served.post(f"/jitllm/sessions/{id}/placement/moves", back).status_code == 200
    assert served.engine.moves == [(0, 2, "cpu:1"), (1, 1, "host")]
    response = served.client.put("/jitllm/models/fake/placement", json={"placement": "3-4=cpu:1"})
    assert response.status_code == 200
    assert served.engine.moves[2:] == [(3, 4, "cpu:1")]
    path = f"/jitllm/sessions/{id}/placement"
    assert served.client.put(path, json={"placement": "0=cpu:1"}).status_code == 200
    assert served.engine.moves[3:] == [(0, 0, "cpu:1")]


def test_the_document_names_every_route_and_no_other(served):
    paths = served.client.get("/openapi.json").get_json()["paths"]
    documented = {
        (path, method.upper())
        for path, item in paths.items()
        for method in item
        if method != "parameters"
    }
    routed = {
        (rule.rule.replace("<id>", "{id}"), method)
        for rule in served.app.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    assert documented == routed


def test_metrics_are_what_happened(served):
    served.complete(max_tokens=3)
    served.complete("a" * 65)
    lines = served.client.get("/metrics").get_data(as_text=True).splitlines()
    for line in (
        'jitllm_requests_total{outcome="ok"} 1.0',
        'jitllm_requests_total{outcome="refused"} 1.0',
        'jitllm_tokens_total{kind="prompt"} 3.0',
        'jitllm_tokens_total{kind="reply"} 3.0',
        "jitllm_time_to_first_token_seconds_count 1.0",
        "jitllm_inter_token_seconds_count 2.0",
        'jitllm_page_ins_total{model="fake"} 9.0',
        'jitllm_budget_bytes{model="fake"} 409600.0',
        'jitllm_device_bytes{device="host",model="fake"} 311296.0',
    ):
        assert line in lines
