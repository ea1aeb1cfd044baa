"""Public faults of HTTP APIs, as tests: odd prompts, ids beyond the vocabulary, prompts at the context's edge."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from prelay_worker.config import Role
from tests.bed.chain import check_chain
from tests.bed.http import post
from tests.bed.processes import Api, fleet, until_ready
from tests.bed.servers import Server
from tests.bed.tokenizer import EOS_ID, chat, ids_of, make_tokenizer, words
from tests.integration.leftovers import check_no_job_left

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

#: So short that a request without max_tokens is answered at once.
CONTEXT = 64


@pytest.fixture(scope="module")
def api(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    queue = shared_server.settings()
    with fleet(queue, make_tokenizer(tmp_path_factory.mktemp("short"), CONTEXT)) as found:
        api = found.api()
        for role in (Role.PREFILL, Role.DECODE):
            found.worker(role)
        until_ready(api.url)
        yield api
        check_no_job_left(queue)


def ask(api: Api, path: str = COMPLETIONS, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return post(api.url + path, json={"model": "null", **body}, headers=headers)


def check_served(api: Api) -> None:
    """The next request is answered, and rightly."""
    found = ask(api, prompt=[1, 2, 3], max_tokens=5)
    assert found.status_code == 200
    check_chain([1, 2, 3], ids_of(found.json()["choices"][0]["text"]))


def refusal(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("prompt", ["", " ", [], [""], [[]], ["t1", ""], ["t1", []], [[1], []], None, {}])
def test_an_empty_prompt_is_refused_by_name_and_the_next_request_is_served(api: Api, prompt: Any) -> None:
    """vllm#7283: an empty prompt killed the engine, and all requests with it."""
    assert refusal(ask(api, prompt=prompt, max_tokens=2))["param"].startswith("prompt")
    check_served(api)


@pytest.mark.parametrize(
    "messages",
    [[], None, {}, [{}], [None], [{"role": "user"}], [{"role": "user", "content": None}],
     [{"role": "user", "content": []}], [{"role": "user", "content": ""}], [{"role": "", "content": "t1"}],
     [{"content": "t1"}], [{"role": "user", "content": [{"type": "text"}]}]],
)  # fmt: skip
def test_empty_messages_are_refused_by_name_and_the_next_request_is_served(api: Api, messages: Any) -> None:
    """vllm#7283, for chats: the template of this model makes nothing of an empty message."""
    assert refusal(ask(api, CHAT, messages=messages, max_tokens=2))["param"].startswith("messages")
    check_served(api)


@pytest.mark.parametrize("token", [EOS_ID + 1, -1, 2**31, 2**40, 2**63, 2**70, 1.5, True, None])
@pytest.mark.parametrize("shape", ["alone", "after others", "in the second prompt"])
def test_an_id_beyond_the_vocabulary_is_refused_by_name_and_the_server_survives(
    api: Api, token: Any, shape: str
) -> None:
    """vllm#9634: an id outside of the embedding crashed the engine."""
    prompt = {"alone": [token], "after others": [1, 2, token], "in the second prompt": [[1], [2, token]]}[shape]
    error = refusal(ask(api, prompt=prompt, max_tokens=2))
    assert error["param"].startswith("prompt")
    assert not isinstance(token, int) or token > 2**63 or str(token) in error["message"]
    check_served(api)


@pytest.mark.parametrize(
    "more",
    [{"logit_bias": {"9999999": 1}}, {"logit_bias": {str(EOS_ID + 1): 1}}, {"logit_bias": {"-1": 1}},
     {"logit_bias": {"t1": 1}}, {"logit_bias": {"1": 101}}, {"stop_token_ids": [9999999]}, {"stop_token_ids": [-1]}],
)  # fmt: skip
def test_other_ids_beyond_the_vocabulary_are_refused_by_name(api: Api, more: dict[str, Any]) -> None:
    """vllm#9634, for the parameters that name tokens."""
    (name,) = more
    assert name in refusal(ask(api, prompt="t1", max_tokens=2, **more))["message"]
    check_served(api)


def test_a_list_of_lists_of_ids_is_a_list_of_prompts(api: Api) -> None:
    """vllm#9634: [[1], [2]] is right."""
    choices = ask(api, prompt=[[1], [2]], max_tokens=3).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for prompt, choice in zip(([1], [2]), choices, strict=True):
        check_chain(prompt, ids_of(choice["text"]))


@pytest.mark.parametrize("chatting", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1])
@pytest.mark.parametrize("wanted", [None, 1, 2, 10**9, 2**63])
def test_a_prompt_at_the_edge_of_the_context_is_refused_with_both_numbers_or_fits(
    api: Api, chatting: bool, stream: bool, length: int, wanted: int | None
) -> None:
    """vllm#33418: max_tokens became negative where the prompt filled the context, or the request hung."""
    ids = [n % 1000 for n in range(length)]
    body: dict[str, Any] = {"messages": chat(ids)} if chatting else {"prompt": words(ids)}
    if wanted is not None:
        body["max_tokens"] = wanted
    answer = ask(api, CHAT if chatting else COMPLETIONS, **body, stream=stream)
    room = CONTEXT - length
    if room < 1 or (wanted is not None and wanted > room):
        error = refusal(answer)
        assert error["code"] == "context_length_exceeded"
        assert str(length) in error["message"]
        assert str(CONTEXT) in error["message"]
        assert wanted is None or room < 1 or str(wanted) in error["message"]
        return
    assert answer.status_code == 200
    if not stream:
        made = room if wanted is None else wanted
        assert answer.json()["usage"]["completion_tokens"] == made
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    else:
        assert answer.text.endswith("data: [DONE]\n\n")


def test_requests_under_one_name_get_right_answers_of_their_own(api: Api) -> None:
    """vllm#10583: requests with one X-Request-Id at the same time were mixed up, or never answered.

    Those with one Idempotency-Key are in test_api_idempotency.py.
    """
    prompts = [[n, n + 1] for n in range(24)]

    def one(prompt: list[int]) -> httpx.Response:
        return ask(api, prompt=prompt, max_tokens=20, headers={"X-Request-Id": "the-same"})

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(one, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status_code == 200
        check_chain(prompt, ids_of(answer.json()["choices"][0]["text"]))
        assert answer.headers["x-request-id"] == answer.json()["id"]
    assert len({answer.json()["id"] for answer in answers}) == len(prompts)


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


#: Schemas that are wrong, endless, huge or empty, and patterns on which a matcher never ends.
GRAMMARS: dict[str, tuple[str, Any]] = {
    "invalid": ("json_schema", {"type": "no such type"}),
    "recursive": ("json_schema", {"$ref": "#"}),
    "empty": ("json_schema", {}),
    "deep": ("json_schema", _deep(400)),
    "a megabyte": ("json_schema", {"enum": ["x" * 1000 for _ in range(1000)]}),
    "regex": ("regex", "(a+)+$" * 50),
    "grammar": ("grammar", "root ::= root"),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("kind", "value"), GRAMMARS.values(), ids=GRAMMARS.keys())
def test_no_schema_and_no_pattern_is_compiled_and_others_are_served(api: Api, path: str, kind: str, value: Any) -> None:
    """api-batch case 11, vllm#17248: one bad schema or pattern killed, or held up, the whole engine.

    Here there are none: each is refused by its name, at once.
    """
    asked: dict[str, Any] = {"messages": chat([1])} if path == CHAT else {"prompt": [1]}
    forms: list[dict[str, Any]] = [{"structured_outputs": {kind.removesuffix("_schema"): value}}]
    if kind == "json_schema":
        shown = {"name": "x", "schema": value, "strict": True}
        forms += [{"response_format": {"type": kind, kind: shown}}, {"guided_json": value}]
    for form in forms:
        error = refusal(ask(api, path, max_tokens=2, **asked, **form))
        assert error["param"] == next(iter(form))
        assert len(error["message"]) < 400
    check_served(api)
