"""Who is answered, who may change the server, and what a model may be loaded from."""

import pytest

from jitllm.errors import UsageError
from jitllm.server import Settings
from tests.server.asking import error_of


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:4242", 200),
        ("localhost", 200),
        ("LOCALHOST:99", 200),
        ("[::1]:4242", 200),
        ("[::ffff:127.0.0.1]", 200),
        ("127.8.8.8", 200),
        ("box.lan:4242", 200),
        ("evil.example:4242", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("user@localhost", 403),
        ("localhost:port", 403),
        ("", 403),
    ],
)
def test_the_server_answers_only_to_its_own_names(make, host, status):
    client = make(allow_host=("box.lan",)).client
    assert client.get("/v1/models", headers={"Host": host}).status_code == status
    # before routing: a path that is not there is no way to find out
    wanted = 404 if status == 200 else 403
    assert client.get("/nowhere", headers={"Host": host}).status_code == wanted


def test_no_page_may_read_a_reply_unless_its_origin_was_allowed(make):
    client = make(cors_origin=("https://app.example",)).client
    allowed = client.get("/v1/models", headers={"Origin": "https://app.example"})
    assert allowed.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert "Origin" in allowed.headers["Vary"]
    for origin in ("https://evil.example", "null", "https://app.example.evil.example"):
        refused = client.get("/v1/models", headers={"Origin": origin})
        assert "Access-Control-Allow-Origin" not in refused.headers
    preflight = client.options("/v1/completions", headers={"Origin": "https://app.example"})
    assert preflight.status_code == 204
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    plain = make().client.get("/v1/models", headers={"Origin": "https://app.example"})
    assert not any(name.startswith("Access-Control") for name in dict(plain.headers))


def test_an_api_key_is_needed_everywhere_but_for_health(make):
    client = make(api_key="k1").client
    assert client.get("/healthz").status_code == 200
    for path in ("/v1/models", "/jitllm/stats", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer k2"}).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer k1"}).status_code == 200


def test_an_admin_key_is_needed_to_change_the_server_and_opens_everything(make):
    client = make(api_key="k1", admin_key="root").client
    change = {"path": "/jitllm/models/fake/budget", "json": {"maxmem": "1M"}}
    assert client.put(**change, headers={"Authorization": "Bearer k1"}).status_code == 401
    assert client.put(**change, headers={"Authorization": "Bearer root"}).status_code == 200
    assert client.get("/v1/models", headers={"Authorization": "Bearer root"}).status_code == 200
    new = {"path": "/jitllm/sessions", "json": {}, "headers": {"Authorization": "Bearer k1"}}
    assert client.post(**new).status_code == 201


def test_without_keys_only_this_machine_is_answered_and_may_change_the_server(make):
    away = {"environ_base": {"REMOTE_ADDR": "10.0.0.7"}}
    client = make().client
    assert client.get("/v1/models", **away).status_code == 403
    client = make(api_key="k1").client
    key = {"headers": {"Authorization": "Bearer k1"}}
    assert client.get("/v1/models", **away, **key).status_code == 200
    change = {"path": "/jitllm/models/fake/budget", "json": {"maxmem": "1M"}}
    assert client.put(**change, **away, **key).status_code == 403
    assert client.put(**change, **key).status_code == 200


def test_an_address_that_others_can_reach_needs_a_key():
    for addr in ("0.0.0.0:80", "[::]:80", "192.168.1.5:80", "example.org:80"):
        with pytest.raises(UsageError, match="can be reached from other machines; add --api-key"):
            Settings(addr=addr).check_bind()
        Settings(addr=addr, api_key="k").check_bind()
    for addr in ("127.0.0.1:80", "localhost:80", "[::1]:80"):
        Settings(addr=addr).check_bind()


@pytest.mark.parametrize("addr", ["4242", "::1:80", ":80", "h:x", "h:70000", "h:-1", "", "h:"])
def test_an_address_that_is_none_is_refused(addr):
    with pytest.raises(UsageError, match=r"^addr .* write e\.g\. 127\.0\.0\.1:4242$"):
        Settings(addr=addr)


@pytest.mark.parametrize(
    "file",
    ["../secret.jlm", "/etc/passwd", "link.jlm", "a\\b.jlm", "x\0.jlm", "notes.txt", ".", ""],
)
def test_a_model_is_loaded_from_the_folder_alone_and_absent_and_forbidden_are_one(
    served, folder, file
):
    (folder.parent / "secret.jlm").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"x")
    (folder / "link.jlm").symlink_to(folder.parent / "secret.jlm")
    response = served.post("/jitllm/models", {"file": file, "id": "m"})
    assert response.status_code in (400, 404)
    if file:
        assert error_of(response)["message"].startswith(
            f"there is no model file {file!r}; there are: "
        )
    names = [f["file"] for f in served.client.get("/jitllm/models").get_json()["files"]]
    assert names == ["fake.jlm"]
