"""A server with API keys: who gets in, what the others hear, and that no key is left lying about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.bed import http
from tests.bed.processes import Api, fleet
from tests.bed.servers import Server
from tests.integration.raw_http import ask, get

KEYS = ("sk-one-4711", "sk-two-0815")

CLOSED = ["/", "/v1/models", "/v1/nothing", "/v1/embeddings", "/tokenize", "/admin/workers", "/docs", "/openapi.json"]


@pytest.fixture(scope="module")
def locked_api(shared_server: Server, null_folder: Path) -> Iterator[Api]:
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api(api_keys=KEYS)
        yield api
        assert not [key for key in KEYS if key in api.log]


@pytest.mark.parametrize("path", CLOSED)
def test_without_a_key_nothing_is_said(locked_api: Api, path: str) -> None:
    answer = http.get(locked_api.url + path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (401, "invalid_request_error", "missing_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_needs_no_key(locked_api: Api, path: str) -> None:
    assert http.get(locked_api.url + path).status_code in (200, 503)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_each_key_opens_everything(locked_api: Api, key: str, scheme: str) -> None:
    headers = {"authorization": f"{scheme} {key}"}
    for path in ("/v1/models", "/admin/workers", "/openapi.json"):
        assert http.get(locked_api.url + path, headers=headers).status_code == 200
    assert http.get(f"{locked_api.url}/v1/nothing", headers=headers).status_code == 404


@pytest.mark.parametrize(
    "value",
    [
        "Bearer sk-one-4712",
        "Bearer sk-one-471",
        "Bearer sk-one-47111",
        "Bearer SK-ONE-4711",
        "Bearer sk-one-4711,sk-two-0815",
        "Bearer",
        "Bearer ",
        "sk-one-4711",
        "Basic c2stb25lLTQ3MTE6",
        "Bearer \xff\xfe",
        "Bearer " + "x" * 10_000,
    ],
)
def test_a_wrong_key_is_a_401_that_does_not_repeat_it(locked_api: Api, value: str) -> None:
    answer = ask(
        locked_api.url, get("/v1/models").replace(b"host: x", b"host: x\r\nauthorization: " + value.encode("latin-1"))
    )
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert value.partition(" ")[2][:20] not in answer.error["message"] or not value.partition(" ")[2]


def test_two_keys_in_one_request_are_none(locked_api: Api) -> None:
    lines = tuple(f"authorization: Bearer {key}" for key in KEYS)
    assert ask(locked_api.url, get("/v1/models", *lines)).status == 401


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT"])
def test_no_method_goes_round_the_key(locked_api: Api, method: str) -> None:
    assert http.request(method, f"{locked_api.url}/v1/models").status_code == 401


def test_a_body_is_not_waited_for_without_a_key(locked_api: Api) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n"
    assert ask(locked_api.url, head).status == 401


def test_the_official_client_raises_its_own_error(locked_api: Api) -> None:
    for key, wrong in ((KEYS[0], False), ("sk-other", True)):
        with openai.OpenAI(base_url=f"{locked_api.url}/v1", api_key=key, max_retries=0) as client:
            if wrong:
                with pytest.raises(openai.AuthenticationError, match="not one of this server's"):
                    client.models.list()
            else:
                assert [model.id for model in client.models.list()] == ["null"]


def test_the_page_says_that_a_key_is_wanted(locked_api: Api) -> None:
    page = http.get(f"{locked_api.url}/openapi.json", headers={"authorization": f"Bearer {KEYS[0]}"}).json()
    assert page["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert page["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in page["paths"]["/health/live"]["get"]
